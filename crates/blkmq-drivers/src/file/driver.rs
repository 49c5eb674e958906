//! The driver of disks in files and on block devices: `file=PATH` and its other keys.

use std::sync::Arc;

use blkmq_core::queue::TagMode;
use blkmq_host::Error;
use blkmq_host::device::Device;
use blkmq_host::value::ConfigError;

use super::disks::NewDisk;
use super::{FileConfig, FileDevice, FileDisk};
use crate::driver::{
    Attributes, DiskRequest, Driver, DriverConfig, Key, LocalFile, OpenDisk, OpenError, Shape, config_of,
    device_error,
};
use crate::keys::Pairs;

/// The driver, for the registry.
pub static DRIVER: Driver = Driver {
    name: NAME,
    value: "PATH",
    help: "an image file or a block device",
    keys: &[
        Key {
            name: "size",
            default: "the file's",
            help: "the least size; a smaller file is refused",
        },
        Key {
            name: "create",
            default: "off",
            help: "make a file that is missing, with size=",
        },
        Key {
            name: "read_only",
            default: "off",
            help: "open for reading only, beside other readers",
        },
        Key {
            name: "block_size",
            default: "512; a device's sector",
            help: "logical block size, a power of two from 512 to 65536",
        },
        Key {
            name: "direct",
            default: "auto",
            help: "go past the page cache: auto, on or off",
        },
        Key {
            name: "lock",
            default: "on",
            help: "refuse a file that somebody else writes to",
        },
    ],
    parse,
};

fn parse(pairs: &mut Pairs, request: &DiskRequest<'_>) -> Result<Arc<dyn DriverConfig>, ConfigError> {
    let mut config = FileConfig {
        read_only: request.read_only,
        ..FileConfig::default()
    };
    if let Some(size) = request.block_size {
        config.set("block_size", size)?;
    }
    pairs.set_all(|key, value| config.set(key, value))?;
    config.check()?;
    Ok(Arc::new(config))
}

impl DriverConfig for FileConfig {
    fn driver(&self) -> &'static str {
        NAME
    }

    fn describe(&self) -> &'static str {
        "disk on a file"
    }

    fn least_size(&self) -> Option<u64> {
        self.size
    }

    fn shares_device(&self) -> bool {
        true
    }

    /// A file may be larger than the size that is asked for, since it can have grown.
    fn serves_as(&self, size: u64, later: &dyn DriverConfig) -> bool {
        let Some(later) = config_of::<Self>(later) else {
            return false;
        };
        let like_later = Self {
            size: later.size,
            ..self.clone()
        };
        like_later == *later && later.size <= Some(size)
    }

    fn open(&self, attributes: &Attributes) -> Result<Box<dyn OpenDisk>, OpenError> {
        let config = FileConfig {
            read_only: self.read_only || attributes.read_only,
            block_size: self.block_size.or(attributes.block_size),
            ..self.clone()
        };
        Ok(Box::new(FileDisk::open_for(attributes.purpose, &config)?))
    }

    fn file(&self) -> Option<LocalFile<'_>> {
        Some(LocalFile {
            path: &self.path,
            size: self.new_size(),
            is_locked: !self.unlocked,
        })
    }
}

impl FileDisk {
    /// The name of the queue of what it lies on.
    pub(crate) fn device_name(&self) -> Option<String> {
        Some(self.place.queue.clone())
    }

    /// The tags of that queue.
    pub(crate) fn tags(&self) -> TagMode {
        TagMode::Shared(DEPTH)
    }
}

impl OpenDisk for FileDisk {
    fn driver(&self) -> &'static str {
        NAME
    }

    fn shape(&self) -> Shape {
        Shape {
            size: self.size(),
            block_size: self.block_size(),
            read_only: self.is_read_only(),
        }
    }

    fn device(&self) -> Option<String> {
        self.device_name()
    }

    fn tags(&self) -> TagMode {
        Self::tags(self)
    }

    fn check_path(&self) -> Result<(), &'static str> {
        match self.direct() {
            Some(_) => Ok(()),
            None => Err(
                "it goes through the page cache, where other paths' writes are not seen; give it direct=on",
            ),
        }
    }

    fn join(
        self: Box<Self>,
        queue: &str,
        others: Vec<Box<dyn OpenDisk>>,
        _sizes: &[u64],
        depth: u32,
    ) -> Result<Arc<dyn Device>, Error> {
        FileDevice::join(queue, self, others, depth)
    }
}

impl FileDevice {
    /// Makes the drive of a queue of disks that lie in files, whichever of their drivers opened them.
    ///
    /// # Errors
    /// `OutOfMemory`, with the queue's name.
    pub(crate) fn join(
        queue: &str,
        first: Box<dyn OpenDisk>,
        others: Vec<Box<dyn OpenDisk>>,
        depth: u32,
    ) -> Result<Arc<dyn Device>, Error> {
        let members = std::iter::once(first).chain(others).filter_map(NewDisk::of);
        let device = Self::of(members.collect(), depth).map_err(|error| device_error(queue, error))?;
        Ok(Arc::new(device))
    }
}

const NAME: &str = "file";
const DEPTH: u32 = 256;
