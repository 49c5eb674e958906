//! The driver of disks in qcow2 images: `qcow2=PATH` and its other keys.

use std::sync::Arc;

use blkmq_host::value::ConfigError;

use super::config::Qcow2Config;
use super::disk::ImageDisk;
use crate::driver::{
    Attributes, DiskRequest, Driver, DriverConfig, Key, LocalFile, Needs, OpenDisk, OpenError,
};
use crate::keys::Pairs;

/// The driver, for the registry.
pub static DRIVER: Driver = Driver {
    name: NAME,
    value: "PATH",
    help: "a qcow2 image, also on a base that others share",
    keys: &[
        Key {
            name: "read_only",
            default: "off",
            help: "open for reading only, beside other readers",
        },
        Key {
            name: "block_size",
            default: "512",
            help: "logical block size, a power of two from 512 to 65536",
        },
        Key {
            name: "direct",
            default: "auto",
            help: "go past the page cache with its own data: auto, on or off",
        },
        Key {
            name: "base_cache",
            default: "page",
            help: "how bases are read: page or direct",
        },
        Key {
            name: "map_cache",
            default: "16M",
            help: "memory for the cached map, at most",
        },
        Key {
            name: "dirs",
            default: "its own",
            help: "directories of bases and data files, with colons between them",
        },
        Key {
            name: "chain",
            default: "16",
            help: "most images of the chain, itself among them",
        },
        Key {
            name: "lock",
            default: "on",
            help: "refuse an image that somebody else writes to",
        },
    ],
    parse,
};

fn parse(pairs: &mut Pairs, request: &DiskRequest<'_>) -> Result<Arc<dyn DriverConfig>, ConfigError> {
    let mut config = Qcow2Config {
        read_only: request.read_only,
        ..Qcow2Config::default()
    };
    if let Some(size) = request.block_size {
        config.set("block_size", size)?;
    }
    pairs.set_all(|key, value| config.set(key, value))?;
    Ok(Arc::new(config))
}

impl DriverConfig for Qcow2Config {
    fn driver(&self) -> &'static str {
        NAME
    }

    /// Its data goes the way of files.
    fn drive(&self) -> &'static str {
        "file"
    }

    fn describe(&self) -> &'static str {
        "disk in an image"
    }

    fn shares_device(&self) -> bool {
        true
    }

    fn open(&self, attributes: &Attributes) -> Result<Box<dyn OpenDisk>, OpenError> {
        let config = Self {
            read_only: self.read_only || attributes.read_only,
            block_size: self.block_size.or(attributes.block_size),
            ..self.clone()
        };
        Ok(Box::new(ImageDisk::open_for(attributes.purpose, &config)?))
    }

    fn file(&self) -> Option<LocalFile<'_>> {
        Some(LocalFile {
            path: &self.path,
            size: None,
            is_locked: !self.unlocked,
        })
    }

    /// The directories of its bases, which are only read.
    fn needs(&self) -> Needs {
        Needs {
            read: self.directories.clone(),
            ..Needs::default()
        }
    }

    fn check_path(&self) -> Result<(), &'static str> {
        Err("an image has one writer, and so one path")
    }
}

const NAME: &str = "qcow2";
