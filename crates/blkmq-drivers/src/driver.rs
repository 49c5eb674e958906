//! The interface of a driver to the code that configures disks: its name and keys, the disk that its keys
//! describe, and the drive that the open disks of one queue become. [`registry`](crate::registry) lists
//! the drivers; `blkmq-config` parses, opens and joins through these traits, so it knows no driver by
//! name.
//!
//! ```text
//!  key=value ─ Driver::parse ─► DriverConfig ─ open ─► OpenDisk ─ join (all of one queue) ─► Device (blkmq_host)
//! ```

use std::any::Any;
use std::error::Error as StdError;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blkmq_core::queue::TagMode;
use blkmq_host::Error;
use blkmq_host::device::Device;
use blkmq_host::value::ConfigError;

use crate::keys::Pairs;

/// A driver, as it is listed.
#[derive(Debug)]
pub struct Driver {
    /// Its name: the key that locates a disk's data, as in `file=PATH`.
    pub name: &'static str,
    /// The name of that key's value in messages, as in `PATH`.
    pub value: &'static str,
    /// A description of its disks, in one line.
    pub help: &'static str,
    /// Its other keys.
    pub keys: &'static [Key],
    /// Parses the driver's keys, its name among them; the list contains no others. An invalid value
    /// is refused with the key, the value and what is allowed; the caller adds the disk's name.
    pub parse: Parse,
}

/// How a driver parses its keys.
pub type Parse = fn(&mut Pairs, &DiskRequest<'_>) -> Result<Arc<dyn DriverConfig>, ConfigError>;

/// A key of a driver. Its page in `docs/drivers` has the details.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key {
    /// The key.
    pub name: &'static str,
    /// Its default value, as text.
    pub default: &'static str,
    /// What it does, in one line.
    pub help: &'static str,
}

/// The attributes of every disk, whatever its driver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskRequest<'a> {
    /// Whether writes are refused.
    pub read_only: bool,
    /// Smallest unit of addresses and lengths, as it was written.
    pub block_size: Option<&'a str>,
}

/// A disk as its driver's keys describe it.
pub trait DriverConfig: Same + fmt::Debug + Any + Send + Sync {
    /// The driver's name.
    fn driver(&self) -> &'static str;

    /// The driver whose drive its disk joins.
    fn drive(&self) -> &'static str {
        self.driver()
    }

    /// The description in listings of exports where none was given: not the path, which clients
    /// must not see.
    fn describe(&self) -> &'static str;

    /// Opens the disk. May block.
    ///
    /// # Errors
    /// Why it cannot be served; the caller adds the disk's name.
    fn open(&self, attributes: &Attributes) -> Result<Box<dyn OpenDisk>, OpenError>;

    /// The file that contains the disk, if it is one of this host.
    fn file(&self) -> Option<LocalFile<'_>> {
        None
    }

    /// The least size that it asks for, in bytes, where the disk may be larger.
    fn least_size(&self) -> Option<u64> {
        None
    }

    /// Returns whether the disk that this configuration opened, which has `size` bytes now, is also what
    /// `later` asks for.
    fn serves_as(&self, _size: u64, later: &dyn DriverConfig) -> bool {
        self.is_same(later)
    }

    /// The number of connections to other hosts for this many reactors: each needs a descriptor.
    fn connections(&self, _reactors: usize) -> usize {
        0
    }

    /// What opening and serving it takes of this host beyond [its file](Self::file).
    fn needs(&self) -> Needs {
        Needs::default()
    }

    /// Returns whether disks share a queue by the device they lie on, unless they name one, and join and
    /// leave it while it is served. Others have a queue of their own.
    fn shares_device(&self) -> bool {
        false
    }

    /// Returns whether the disk may be missing while this host starts: a multipath disk then starts
    /// without this path.
    fn is_remote(&self) -> bool {
        false
    }

    /// Returns whether a key to the disk's data is in this process while it is open: then the process must write no core.
    fn has_key(&self) -> bool {
        false
    }

    /// Checks that the disk can be one of several paths, as far as its keys show.
    ///
    /// # Errors
    /// What is wrong, and what to do.
    fn check_path(&self) -> Result<(), &'static str> {
        Ok(())
    }
}

/// What a disk is opened for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Purpose {
    /// To be served: nobody else may have its lock.
    #[default]
    Serve,
    /// To see whether it could be served: who has its lock now does not matter, since a daemon that runs
    /// may be the one that serves it.
    Check,
}

/// The wanted attributes of a disk, as numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Attributes {
    /// Whether writes are refused.
    pub read_only: bool,
    /// Smallest unit of addresses and lengths, in bytes. Default: what the drive needs, 512 at least.
    pub block_size: Option<u32>,
    /// What the disk is opened for.
    pub purpose: Purpose,
}

/// A file of this host that contains a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalFile<'a> {
    /// Its path.
    pub path: &'a Path,
    /// The size with which it is made if it is missing, in bytes.
    pub size: Option<u64>,
    /// Whether it is locked against others that use it.
    pub is_locked: bool,
}

/// What a disk takes of this host beyond its file, for a daemon that is confined to what its disks need.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// Files that are read while it is served, such as keys.
    pub read: Vec<PathBuf>,
    /// TCP ports to which it connects.
    pub ports: Vec<u16>,
    /// It connects to a socket by a name in the abstract namespace.
    pub has_abstract: bool,
    /// It asks for the addresses of hosts by their names.
    pub has_names: bool,
    /// A library that opens files and connects as it likes runs in the daemon.
    pub has_library: bool,
}

/// Why a disk cannot be opened.
pub type OpenError = Box<dyn StdError + Send + Sync>;

/// A disk that is open and waits for the others of its queue.
pub trait OpenDisk: Any + Send {
    /// The driver's name.
    fn driver(&self) -> &'static str;

    /// The properties of the disk.
    fn shape(&self) -> Shape;

    /// The device whose capacity the disk uses, as the name of a queue: disks that name the same
    /// one share it. `None` for a device of its own.
    fn device(&self) -> Option<String> {
        None
    }

    /// The tags of its queue, unless configured otherwise.
    fn tags(&self) -> TagMode;

    /// Checks that the disk can share a queue with another one of the same driver.
    ///
    /// # Errors
    /// Why not, and what to do.
    fn share_queue(&self, _other: &dyn OpenDisk) -> Result<(), Unshared> {
        Ok(())
    }

    /// Checks that the disk can be one of several paths, from its properties.
    ///
    /// # Errors
    /// What is wrong, and what to do.
    fn check_path(&self) -> Result<(), &'static str> {
        Ok(())
    }

    /// Makes the drive of a queue of this disk and `others`, in this order, all of this driver, for
    /// tags below `depth`. `sizes` has the sizes of all.
    ///
    /// # Errors
    /// Why the drive cannot be made, with the queue's name.
    fn join(
        self: Box<Self>,
        queue: &str,
        others: Vec<Box<dyn OpenDisk>>,
        sizes: &[u64],
        depth: u32,
    ) -> Result<Arc<dyn Device>, Error>;
}

/// The properties of an open disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Bytes.
    pub size: u64,
    /// Smallest unit of addresses and lengths that the drive takes, in bytes.
    pub block_size: u32,
    /// Whether writes are refused.
    pub read_only: bool,
}

/// Why two disks cannot share a queue: their name in the message, and the reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unshared {
    /// `disks`, perhaps with the driver's name before it.
    pub disks: &'static str,
    /// Why, and what to do.
    pub why: &'static str,
}

/// Comparison of configurations of an unknown driver. Every comparable type has it.
pub trait Same {
    /// Returns whether the other one is of the same type and equal.
    fn is_same(&self, other: &dyn Any) -> bool;
}

impl<T: PartialEq + Any> Same for T {
    fn is_same(&self, other: &dyn Any) -> bool {
        other.downcast_ref::<T>().is_some_and(|other| self == other)
    }
}

impl PartialEq for dyn DriverConfig {
    fn eq(&self, other: &Self) -> bool {
        self.is_same(other)
    }
}

/// Downcasts a configuration to type `T`.
pub fn config_of<T: DriverConfig>(config: &dyn DriverConfig) -> Option<&T> {
    let config: &dyn Any = config;
    config.downcast_ref()
}

/// Downcasts an open disk to type `T`.
pub fn disk_of<T: OpenDisk>(disk: &dyn OpenDisk) -> Option<&T> {
    let disk: &dyn Any = disk;
    disk.downcast_ref()
}

/// Downcasts an owned open disk to type `T`.
pub fn into_disk<T: OpenDisk>(disk: Box<dyn OpenDisk>) -> Option<Box<T>> {
    let disk: Box<dyn Any> = disk;
    disk.downcast().ok()
}

/// A drive that cannot be made for a queue.
pub fn device_error(queue: &str, problem: impl ToString) -> Error {
    Error::Device {
        queue: queue.to_owned(),
        cause: io::Error::other(problem.to_string()),
    }
}

/// Smallest unit of addresses and lengths that any drive has, in bytes.
pub const BLOCK_MIN: u32 = 512;
