//! The driver of disks without a medium: `null=SIZE` and its other keys.

use std::sync::Arc;

use blkmq_core::queue::TagMode;
use blkmq_host::Error;
use blkmq_host::device::Device;
use blkmq_host::value::ConfigError;

use super::{NullConfig, NullDevice};
use crate::driver::{
    Attributes, BLOCK_MIN, DiskRequest, Driver, DriverConfig, Key, OpenDisk, OpenError, Shape, Unshared,
    device_error, disk_of,
};
use crate::keys::{Pairs, fits_memory};

/// The driver, for the registry.
pub static DRIVER: Driver = Driver {
    name: NAME,
    value: "SIZE",
    help: "stores nothing; for measuring the engine and injecting faults",
    keys: KEYS,
    parse,
};

/// The configuration of a disk without a medium; nothing has to be opened.
#[derive(Clone, Debug, PartialEq)]
pub struct NullDisk {
    /// Bytes.
    pub size: u64,
    /// The drive's own keys.
    pub config: NullConfig,
}

fn parse(pairs: &mut Pairs, _request: &DiskRequest<'_>) -> Result<Arc<dyn DriverConfig>, ConfigError> {
    let size = pairs.take_size(NAME)?;
    let mut config = NullConfig::default();
    pairs.set_all(|key, value| config.set(key, value))?;
    config.check()?;
    if config.memory {
        fits_memory("memory=on with null", size)?;
    }
    if let Some(bad) = config.bad.iter().find(|bad| bad.end > size) {
        return Err(ConfigError::Refused {
            key: "bad".to_owned(),
            value: format!("{}-{}", bad.start, bad.end),
            why: format!("must lie within the disk, {size} bytes"),
        });
    }
    Ok(Arc::new(NullDisk { size, config }))
}

impl DriverConfig for NullDisk {
    fn driver(&self) -> &'static str {
        NAME
    }

    fn describe(&self) -> &'static str {
        "null disk, stores nothing"
    }

    fn open(&self, _attributes: &Attributes) -> Result<Box<dyn OpenDisk>, OpenError> {
        Ok(Box::new(self.clone()))
    }
}

impl OpenDisk for NullDisk {
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
        if self.config.shared_tags {
            TagMode::Shared(self.config.depth)
        } else {
            TagMode::PerHctx(self.config.depth)
        }
    }

    /// One drive has one configuration.
    fn share_queue(&self, other: &dyn OpenDisk) -> Result<(), Unshared> {
        match disk_of::<Self>(other) {
            Some(other) if other.config == self.config => Ok(()),
            _ => Err(Unshared {
                disks: "null disks",
                why: "their other keys must be the same",
            }),
        }
    }

    fn join(
        self: Box<Self>,
        queue: &str,
        _others: Vec<Box<dyn OpenDisk>>,
        sizes: &[u64],
        _depth: u32,
    ) -> Result<Arc<dyn Device>, Error> {
        let device = NullDevice::new(self.config, sizes).map_err(|error| device_error(queue, error))?;
        Ok(Arc::new(device))
    }
}

const NAME: &str = "null";

const fn key(name: &'static str, default: &'static str, help: &'static str) -> Key {
    Key { name, default, help }
}

const KEYS: &[Key] = &[
    key(
        "completion",
        "timer if a key gives requests a duration, else inline",
        "when requests end: inline, deferred or timer",
    ),
    key("latency", "0", "mean service time"),
    key("spread", "0", "standard deviation of the service time"),
    key("slow", "1ms", "service time of the slow requests"),
    key("slow_rate", "0", "how many requests are slow"),
    key("parallel", "no limit", "requests that the drive serves at a time"),
    key(
        "bandwidth",
        "no limit",
        "bytes per second over all hardware contexts",
    ),
    key("depth", "1024", "requests that one hardware context takes"),
    key(
        "shared_tags",
        "off",
        "have all hardware contexts share one set of tags",
    ),
    key("poll_queues", "0", "hardware contexts that announce no ends"),
    key("zero", "on", "fill reads with zeroes"),
    key("memory", "off", "keep what is written, in memory"),
    key("cache", "off", "announce a volatile write cache"),
    key("cache_size", "16M", "what the cache holds before it writes back"),
    key("fua", "on", "with cache: take FUA in the drive"),
    key("bad", "none", "a range of bytes that fails; may be given again"),
    key("timeout_rate", "0", "how many requests never complete"),
    key("requeue_rate", "0", "how many requests end with a requeue"),
    key(
        "resource_rate",
        "0",
        "how many requests are refused for want of a resource",
    ),
    key("setup_failure", "none", "the hardware context whose set-up fails"),
    key("seed", "1", "what all chance starts from"),
];
