//! The driver of disks in memory: `ram=SIZE` and its other keys.

use std::sync::Arc;

use blkmq_core::queue::TagMode;
use blkmq_host::Error;
use blkmq_host::device::Device;
use blkmq_host::value::ConfigError;

use super::{RamConfig, RamDevice};
use crate::driver::{
    Attributes, BLOCK_MIN, DiskRequest, Driver, DriverConfig, Key, OpenDisk, OpenError, Shape,
};
use crate::keys::{Pairs, fits_memory};

/// The driver, for the registry.
pub static DRIVER: Driver = Driver {
    name: NAME,
    value: "SIZE",
    help: "sparse memory; a discard frees it",
    keys: &[Key {
        name: "hugepages",
        default: "off",
        help: "take memory in huge pages",
    }],
    parse,
};

/// The configuration of a disk in memory; nothing has to be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RamDisk {
    /// Bytes.
    pub size: u64,
    /// The drive's own keys.
    pub config: RamConfig,
}

fn parse(pairs: &mut Pairs, _request: &DiskRequest<'_>) -> Result<Arc<dyn DriverConfig>, ConfigError> {
    let size = pairs.take_size(NAME)?;
    fits_memory(NAME, size)?;
    let mut config = RamConfig::default();
    pairs.set_all(|key, value| config.set(key, value))?;
    Ok(Arc::new(RamDisk { size, config }))
}

impl DriverConfig for RamDisk {
    fn driver(&self) -> &'static str {
        NAME
    }

    fn describe(&self) -> &'static str {
        "disk in memory"
    }

    fn open(&self, _attributes: &Attributes) -> Result<Box<dyn OpenDisk>, OpenError> {
        Ok(Box::new(self.clone()))
    }
}

impl OpenDisk for RamDisk {
    fn driver(&self) -> &'static str {
        NAME
    }

    fn shape(&self) -> Shape {
        Shape {
            size: self.size,
            block_size: BLOCK_MIN,
            read_only: false,
        }
    }

    fn tags(&self) -> TagMode {
        TagMode::PerHctx(DEPTH)
    }

    fn join(
        self: Box<Self>,
        _queue: &str,
        _others: Vec<Box<dyn OpenDisk>>,
        sizes: &[u64],
        _depth: u32,
    ) -> Result<Arc<dyn Device>, Error> {
        Ok(Arc::new(RamDevice::new(&self.config, sizes)))
    }
}

const NAME: &str = "ram";
const DEPTH: u32 = 128;
