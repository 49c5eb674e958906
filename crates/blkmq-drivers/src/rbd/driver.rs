//! The driver of disks in a Ceph cluster: `rbd=POOL/IMAGE` and its other keys.

use std::sync::Arc;

use blkmq_core::queue::TagMode;
use blkmq_host::Error;
use blkmq_host::device::Device;
use blkmq_host::value::ConfigError;

use super::{RbdConfig, RbdDevice, RbdDisk};
use crate::driver::{
    Attributes, BLOCK_MIN, DiskRequest, Driver, DriverConfig, Key, Needs, OpenDisk, OpenError, Shape,
    into_disk,
};
use crate::keys::Pairs;

/// The driver, for the registry.
pub static DRIVER: Driver = Driver {
    name: NAME,
    value: "POOL/IMAGE",
    help: "an image in a Ceph cluster, or a snapshot: pool/namespace/image@snapshot",
    keys: &[
        Key {
            name: "conf",
            default: "where Ceph's programs look",
            help: "Ceph's configuration file",
        },
        Key {
            name: "id",
            default: "admin",
            help: "the user, without client.",
        },
        Key {
            name: "keyring",
            default: "what the configuration says",
            help: "the file with the user's key",
        },
        Key {
            name: "timeout",
            default: "0",
            help: "when a request without an answer fails; 0: it waits",
        },
        Key {
            name: "lock",
            default: "on",
            help: "take the image's exclusive lock",
        },
        Key {
            name: "lock_wait",
            default: "45s",
            help: "how long to wait for a lock that somebody has",
        },
        Key {
            name: "open_timeout",
            default: "30s",
            help: "how long opening, resizing and lookups may take",
        },
        Key {
            name: "encryption",
            default: "off",
            help: "librbd's own encryption: luks2 or luks1",
        },
        Key {
            name: "key",
            default: "none",
            help: "the file with the passphrase of that",
        },
        Key {
            name: "read_only",
            default: "off",
            help: "open for reading only, without the lock",
        },
        Key {
            name: "option.KEY",
            default: "Ceph's",
            help: "an option rbd_* of Ceph's",
        },
    ],
    parse,
};

fn parse(pairs: &mut Pairs, request: &DiskRequest<'_>) -> Result<Arc<dyn DriverConfig>, ConfigError> {
    let mut config = RbdConfig::new(&pairs.take(NAME)?.unwrap_or_default())?;
    config.read_only = request.read_only;
    pairs.set_all(|key, value| config.set(key, value))?;
    config.check()?;
    Ok(Arc::new(config))
}

impl DriverConfig for RbdConfig {
    fn driver(&self) -> &'static str {
        NAME
    }

    fn describe(&self) -> &'static str {
        "disk in a Ceph cluster"
    }

    fn open(&self, attributes: &Attributes) -> Result<Box<dyn OpenDisk>, OpenError> {
        let config = Self {
            read_only: self.read_only || attributes.read_only,
            ..self.clone()
        };
        Ok(Box::new(RbdDisk::open(&config, attributes.purpose)?))
    }

    /// To monitors and OSDs; all disks of a cluster share them.
    fn connections(&self, _reactors: usize) -> usize {
        CONNECTIONS
    }

    fn needs(&self) -> Needs {
        let files = [&self.cluster.conf, &self.cluster.keyring];
        let files = files.into_iter().flatten().map(Into::into);
        Needs {
            // libcryptsetup, which librbd has read the header, opens it.
            read: files
                .chain(self.key.clone())
                .chain(self.encryption.map(|_| "/dev/random".into()))
                .collect(),
            has_names: true,
            has_library: true,
            ..Needs::default()
        }
    }

    fn shares_device(&self) -> bool {
        true
    }

    fn is_remote(&self) -> bool {
        true
    }

    fn has_key(&self) -> bool {
        self.encryption.is_some()
    }

    fn check_path(&self) -> Result<(), &'static str> {
        Err("librbd finds its own ways to the cluster; serve the image as one disk")
    }
}

impl OpenDisk for RbdDisk {
    fn driver(&self) -> &'static str {
        NAME
    }

    fn shape(&self) -> Shape {
        Shape {
            size: self.image.size(),
            block_size: BLOCK_MIN,
            read_only: self.image.is_read_only(),
        }
    }

    fn device(&self) -> Option<String> {
        Some(self.queue.clone())
    }

    fn tags(&self) -> TagMode {
        TagMode::Shared(DEPTH)
    }

    fn join(
        self: Box<Self>,
        _queue: &str,
        others: Vec<Box<dyn OpenDisk>>,
        _sizes: &[u64],
        depth: u32,
    ) -> Result<Arc<dyn Device>, Error> {
        let others = others.into_iter().filter_map(into_disk::<Self>);
        let disks = std::iter::once(self).chain(others).map(|disk| *disk).collect();
        Ok(Arc::new(RbdDevice::new(disks, depth)))
    }
}

const NAME: &str = "rbd";
const DEPTH: u32 = 256;
const CONNECTIONS: usize = 4;
