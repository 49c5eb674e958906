//! The device of the engine bench: a null drive that completes inline, memory, a file, or an NBD server; one
//! queue with one disk.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use blkmq_core::bio::Op;
use blkmq_core::group::GroupTree;
use blkmq_core::ids::GroupId;
use blkmq_core::mapper::table::MapKind;
use blkmq_core::queue::TagMode;
use blkmq_core::sched::ElevatorType;
use blkmq_drivers::file::{Direct, FileConfig, FileDevice, FileDisk};
use blkmq_drivers::nbd::{NbdConfig, NbdDevice, NbdDisk};
use blkmq_drivers::null::{NullConfig, NullDevice};
use blkmq_drivers::ram::{RamConfig, RamDevice};
use blkmq_host::device::Device;
use blkmq_host::disk::Disk;
use blkmq_host::engine::{DiskEntry, Engine, EngineConfig, QueueSpec};
use blkmq_host::mapped::{MapConfig, MappedSpec, Member};

use super::load::{Job, Load};

/// A device to measure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceArg {
    /// Stores nothing, completes inline, does not change buffers.
    Null,
    /// Memory, every byte of it written before it is read.
    Ram,
    /// A file or block device, with direct I/O.
    File(PathBuf),
    /// An export of an NBD server, by its URI.
    Nbd(String),
}

impl FromStr for DeviceArg {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        match word.split_once(':') {
            None if word == "null" => Ok(Self::Null),
            None if word == "ram" => Ok(Self::Ram),
            Some(("file", path)) if !path.is_empty() => Ok(Self::File(path.into())),
            Some(("nbd" | "nbd+unix" | "nbds" | "nbds+unix", _)) => {
                NbdConfig::new(word).map_err(|error| error.to_string())?;
                Ok(Self::Nbd(word.to_owned()))
            }
            _ => Err("must be null, ram, file:PATH or an NBD URI".into()),
        }
    }
}

impl fmt::Display for DeviceArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Null => "null",
            Self::Ram => "ram",
            Self::File(_) => "file",
            Self::Nbd(_) => "nbd",
        })
    }
}

impl DeviceArg {
    /// Says whether each I/O completes while it is issued, so that only a sample of latencies is
    /// taken.
    pub(crate) fn is_inline(&self) -> bool {
        matches!(self, Self::Null | Self::Ram)
    }

    /// A description for the report.
    pub(crate) fn description(&self) -> String {
        match self {
            Self::Null => format!("null drive of {} GiB, completing inline", NULL_BYTES >> 30),
            Self::Ram => format!("ram drive of {} MiB, filled", RAM_BYTES >> 20),
            Self::File(path) => format!("{}, past the page cache", path.display()),
            Self::Nbd(uri) => uri.clone(),
        }
    }

    /// Opens the device and starts an engine with it, for `jobs` attached threads with `depth` I/Os
    /// under way each.
    ///
    /// # Errors
    /// If the device cannot be opened.
    pub(crate) fn start(
        &self,
        elevator: &'static ElevatorType,
        jobs: u32,
        depth: u32,
        writable: bool,
    ) -> Result<Engine> {
        let opened = self.open(depth.max(TAGS_MIN), writable)?;
        start(opened, elevator, jobs, depth).with_context(|| format!("starting the engine on {self}"))
    }

    /// Its size in bytes.
    ///
    /// # Errors
    /// If the device cannot be opened.
    pub(crate) fn size(&self) -> Result<u64> {
        Ok(self.open(1, false)?.size)
    }

    fn open(&self, depth: u32, writable: bool) -> Result<Opened> {
        let (drive, size, block_size): (Arc<dyn Device>, u64, u32) = match self {
            Self::Null => {
                let drive = NullDevice::new(NullConfig::bare(), &[NULL_BYTES])?;
                (Arc::new(drive), NULL_BYTES, 512)
            }
            Self::Ram => {
                let drive = RamDevice::new(&RamConfig::default(), &[RAM_BYTES]);
                (Arc::new(drive), RAM_BYTES, 512)
            }
            Self::File(path) => {
                let config = FileConfig {
                    path: path.clone(),
                    read_only: !writable,
                    direct: Direct::On,
                    ..FileConfig::default()
                };
                let disk = FileDisk::open(&config)?;
                let (size, block_size) = (disk.size(), disk.block_size());
                (Arc::new(FileDevice::new(vec![disk], depth)?), size, block_size)
            }
            Self::Nbd(uri) => {
                let disk = NbdDisk::open(&NbdConfig::new(uri)?)?;
                let (size, block_size) = (disk.size(), disk.block_size());
                (Arc::new(NbdDevice::new(disk, depth)), size, block_size)
            }
        };
        Ok(Opened {
            drive,
            size,
            block_size,
            read_only: !writable,
            merges: !matches!(self, Self::Nbd(_)),
            map: None,
        })
    }
}

/// A drive with one disk.
pub(crate) struct Opened {
    pub(crate) drive: Arc<dyn Device>,
    pub(crate) size: u64,
    pub(crate) block_size: u32,
    pub(crate) read_only: bool,
    /// Whether neighbouring bios are merged. Not on a server, because nbdcopy, the other side, does
    /// not merge.
    pub(crate) merges: bool,
    /// Put a mapped disk on two halves of the disk, and load it.
    pub(crate) map: Option<MapKind>,
}

/// Starts an engine with one queue and its disk, for `jobs` attached threads with `depth` I/Os
/// under way each.
///
/// # Errors
/// If the engine does not start.
pub(crate) fn start(
    opened: Opened,
    elevator: &'static ElevatorType,
    jobs: u32,
    depth: u32,
) -> Result<Engine> {
    let mut queue = queue(opened.drive, elevator, depth);
    queue.disks.push(DiskEntry {
        name: DISK.into(),
        description: String::new(),
        serial: None,
        export: None,
        size: opened.size,
        read_only: opened.read_only,
        group: GroupId::default(),
        block_size: opened.block_size,
    });
    queue.merges = opened.merges;
    let config = EngineConfig {
        reactors: 0,
        attached_max: jobs as usize,
        queues: vec![queue],
        mapped: opened
            .map
            .map(|kind| mapped(kind, opened.size))
            .into_iter()
            .collect(),
        ..EngineConfig::default()
    };
    Ok(Engine::start(config)?)
}

/// Starts an engine with a null drive, on which each of `jobs` attached threads has a disk in a
/// group of its own.
///
/// # Errors
/// If the engine does not start.
pub(crate) fn start_with_groups(elevator: &'static ElevatorType, jobs: u32, depth: u32) -> Result<Engine> {
    let sizes = vec![NULL_BYTES; jobs as usize];
    let drive = NullDevice::new(NullConfig::bare(), &sizes)?;
    let mut queue = queue(Arc::new(drive), elevator, depth);
    // The root is the first one.
    queue.groups = GroupTree::flat(1 + jobs);
    queue.disks = (0..jobs)
        .map(|number| DiskEntry {
            name: own_disk(number as usize),
            description: String::new(),
            serial: None,
            export: None,
            size: NULL_BYTES,
            read_only: true,
            group: GroupId(1 + number),
            block_size: 512,
        })
        .collect();
    let config = EngineConfig {
        reactors: 0,
        attached_max: jobs as usize,
        queues: vec![queue],
        ..EngineConfig::default()
    };
    Ok(Engine::start(config)?)
}

fn queue(drive: Arc<dyn Device>, elevator: &'static ElevatorType, depth: u32) -> QueueSpec {
    let mut queue = QueueSpec::new("bench", drive);
    queue.elevator = elevator;
    queue.tags = TagMode::PerHctx(depth.max(TAGS_MIN));
    queue.requests_per_reactor = depth.max(REQUESTS_MIN);
    queue
}

/// The name of a submitter's own disk.
fn own_disk(submitter: usize) -> String {
    format!("{DISK}-{submitter}")
}

/// A mapped disk over the two halves of the engine's disk.
fn mapped(kind: MapKind, size: u64) -> MappedSpec {
    let half = |number: u64| Member {
        disk: DISK.into(),
        start: number * (size / 2),
        len: Some(size / 2),
    };
    MappedSpec {
        name: MAPPED.into(),
        description: String::new(),
        serial: None,
        export: None,
        map: MapConfig {
            kind,
            members: vec![half(0), half(1)],
        },
        read_only: false,
        block_size: None,
        group: GroupId::default(),
    }
}

/// The disk that a submitter loads: its own, or the one that all share, the topmost one.
///
/// # Errors
/// If the engine has no such disk.
pub(crate) fn loaded(engine: &Engine, submitter: usize) -> Result<Disk> {
    let own = engine.disk(&own_disk(submitter));
    let disk = own.or_else(|| engine.disk(MAPPED)).or_else(|| engine.disk(DISK));
    disk.context("the engine has no disk")
}

/// Writes every byte of the engine's disk once.
///
/// # Errors
/// If a write ends with an error.
pub(crate) fn fill(engine: &Engine) -> Result<()> {
    let disk = loaded(engine, 0)?;
    let job = Job {
        op: Op::Write,
        block_bytes: FILL_BYTES,
        depth: 1,
        random: false,
        sample_every: u32::MAX,
    };
    Load::new(engine.attach()?, &disk, job, 0).run_count(disk.size / u64::from(FILL_BYTES))?;
    Ok(())
}

/// Checks a file before the first round.
///
/// # Errors
/// If the file does not exist, or is smaller than one I/O.
pub(crate) fn check_file(path: &Path, block_bytes: u32) -> Result<()> {
    let advice = "make one with: dd if=/dev/urandom of=FILE bs=1M count=1024";
    let mut file =
        std::fs::File::open(path).with_context(|| format!("opening {}; {advice}", path.display()))?;
    let size = std::io::Seek::seek(&mut file, std::io::SeekFrom::End(0))?;
    ensure!(
        size >= u64::from(block_bytes),
        "{} has {size} bytes: too few for one I/O; {advice}",
        path.display()
    );
    Ok(())
}

pub(crate) const DISK: &str = "bench";
pub(crate) const MAPPED: &str = "mapped";
pub(crate) const NULL_BYTES: u64 = 1 << 40;
const RAM_BYTES: u64 = 256 << 20;
const FILL_BYTES: u32 = 1 << 20;
const TAGS_MIN: u32 = 128;
const REQUESTS_MIN: u32 = 256;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_named_as_on_the_command_line() {
        assert_eq!("null".parse(), Ok(DeviceArg::Null));
        assert_eq!("ram".parse(), Ok(DeviceArg::Ram));
        assert_eq!("file:a:b".parse(), Ok(DeviceArg::File("a:b".into())));
        let uri = "nbd+unix:///x?socket=s";
        assert_eq!(uri.parse(), Ok(DeviceArg::Nbd(uri.into())));
        for wrong in ["", "nul", "file", "file:", "null:1", "nbd", "nbd:x"] {
            assert!(wrong.parse::<DeviceArg>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn file_that_is_not_there_comes_with_advice() {
        let error = check_file(Path::new("no-such-file-here"), 4096).unwrap_err();
        assert!(error.to_string().contains("no-such-file-here; make one with"));
    }
}
