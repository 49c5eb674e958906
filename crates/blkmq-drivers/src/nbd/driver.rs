//! The driver of disks on an NBD server: `nbd=URI` and its other keys.

use std::net::IpAddr;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use blkmq_core::queue::TagMode;
use blkmq_host::Error;
use blkmq_host::device::Device;
use blkmq_host::value::ConfigError;
use blkmq_nbd::uri::Address;

use super::{NbdConfig, NbdDevice, NbdDisk};
use crate::driver::{
    Attributes, DiskRequest, Driver, DriverConfig, Key, Needs, OpenDisk, OpenError, Shape, Unshared,
};
use crate::keys::Pairs;

/// The driver, for the registry.
pub static DRIVER: Driver = Driver {
    name: NAME,
    value: "URI",
    help: "another server's disk: nbd://HOST/EXPORT or nbd+unix:///EXPORT?socket=PATH, nbds for TLS",
    keys: &[
        Key {
            name: "connections",
            default: "one per hardware context",
            help: "how many connections",
        },
        Key {
            name: "timeout",
            default: "the queue's",
            help: "how long one answer may take",
        },
        Key {
            name: "reconnect",
            default: "0",
            help: "how long requests wait for a lost server",
        },
        Key {
            name: "connect_timeout",
            default: "5s",
            help: "for one attempt to connect, handshake included",
        },
        Key {
            name: "tls_certificates",
            default: "none",
            help: "a directory: ca-cert.pem, client-cert.pem, client-key.pem",
        },
        Key {
            name: "tls_ca",
            default: "none",
            help: "the authorities that are trusted (PEM)",
        },
        Key {
            name: "tls_certificate",
            default: "none",
            help: "the certificate that the server is shown (PEM)",
        },
        Key {
            name: "tls_key",
            default: "none",
            help: "the certificate's key (PEM)",
        },
        Key {
            name: "tls_hostname",
            default: "the URI's host",
            help: "what the server is called by its certificate",
        },
        Key {
            name: "rotational",
            default: "what the server says",
            help: "whether distance costs time there",
        },
    ],
    parse,
};

fn parse(pairs: &mut Pairs, _request: &DiskRequest<'_>) -> Result<Arc<dyn DriverConfig>, ConfigError> {
    let mut config = NbdConfig::new(&pairs.take(NAME)?.unwrap_or_default())?;
    pairs.set_all(|key, value| config.set(key, value))?;
    Ok(Arc::new(config))
}

impl DriverConfig for NbdConfig {
    fn driver(&self) -> &'static str {
        NAME
    }

    fn describe(&self) -> &'static str {
        "disk on an NBD server"
    }

    fn open(&self, attributes: &Attributes) -> Result<Box<dyn OpenDisk>, OpenError> {
        let config = NbdConfig {
            read_only: self.read_only || attributes.read_only,
            ..self.clone()
        };
        Ok(Box::new(NbdDisk::open(&config)?))
    }

    fn connections(&self, reactors: usize) -> usize {
        self.connections.map_or(reactors, usize::from)
    }

    fn needs(&self) -> Needs {
        let files = [&self.tls.ca, &self.tls.certificate, &self.tls.key];
        let read = files.into_iter().flatten().cloned().collect();
        match &self.uri.address {
            Address::Tcp { host, port } => Needs {
                read,
                ports: vec![*port],
                has_names: host.parse::<IpAddr>().is_err(),
                ..Needs::default()
            },
            Address::Unix(path) => Needs {
                read,
                has_abstract: path.as_os_str().as_bytes().starts_with(b"@"),
                ..Needs::default()
            },
        }
    }

    fn is_remote(&self) -> bool {
        true
    }

    fn check_path(&self) -> Result<(), &'static str> {
        if self.reconnect.is_zero() {
            return Ok(());
        }
        Err("reconnect= would have its requests wait while other paths work; take it away")
    }
}

impl OpenDisk for NbdDisk {
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

    fn tags(&self) -> TagMode {
        TagMode::PerHctx(DEPTH)
    }

    fn share_queue(&self, _other: &dyn OpenDisk) -> Result<(), Unshared> {
        Err(Unshared {
            disks: "disks",
            why: "a disk on an NBD server has a queue of its own; give one another queue=",
        })
    }

    fn join(
        self: Box<Self>,
        _queue: &str,
        _others: Vec<Box<dyn OpenDisk>>,
        _sizes: &[u64],
        depth: u32,
    ) -> Result<Arc<dyn Device>, Error> {
        Ok(Arc::new(NbdDevice::new(*self, depth)))
    }
}

const NAME: &str = "nbd";
const DEPTH: u32 = 128;
