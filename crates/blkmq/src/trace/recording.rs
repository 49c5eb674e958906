//! What a daemon provides for a trace: a descriptor of the memory in which reactors record events, and the
//! meaning of the numbers in these events. `blkmq trace` does the rest in its own process, so a trace costs
//! the daemon as little as possible.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use blkmq_core::ids::GroupId;
use blkmq_core::trace::blktrace::{device, device_text};
use blkmq_host::Error;
use blkmq_host::control::{Control, Trace};
use blkmq_host::disk::{Disk, MAPPED};
use serde::{Deserialize, Serialize};

/// A client's running trace; it ends when this is dropped.
pub(crate) struct Recording {
    control: Control,
    /// The names of the traced disks; all disks if empty.
    wanted: Vec<String>,
    trace: Trace,
}

/// The answer to `trace.start`.
#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct Started {
    /// The device numbers of the disks, as blkparse prints them.
    pub(crate) devices: BTreeMap<String, String>,
    /// The number of rings in the memory.
    pub(crate) reactors: usize,
    /// The format of the memory; this program knows [`FORMAT`].
    pub(crate) format: u32,
}

/// The meaning of the numbers in events: the answer to `trace.names`.
#[derive(Debug, Default, Deserialize, Serialize)]
pub(crate) struct Names {
    /// The traced disks.
    pub(crate) disks: Vec<NamedDisk>,
    pub(crate) groups: Vec<NamedGroup>,
}

#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct NamedDisk {
    pub(crate) queue: u16,
    pub(crate) id: u32,
    pub(crate) name: String,
    /// The device number; no other disk of the daemon ever has it.
    pub(crate) device: u32,
}

#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct NamedGroup {
    pub(crate) queue: u16,
    pub(crate) id: u32,
    pub(crate) path: String,
}

impl Recording {
    /// Starts a trace of these disks, or of all disks if there are none. Blocks for up to
    /// [`PREDECESSOR_MAX`]: the client of another trace may have gone, and its thread has yet to
    /// notice.
    ///
    /// # Errors
    /// A disk is named twice, does not exist or has no requests of its own, another trace is running, or there is not enough memory.
    pub(crate) fn start(control: Control, wanted: Vec<String>) -> Result<Self> {
        let disks = control.disks();
        for (at, name) in wanted.iter().enumerate() {
            if wanted[..at].contains(name) {
                bail!("disk {name}: it is named twice; name each disk once");
            }
            match disks.iter().find(|disk| disk.name == *name) {
                None => bail!("disk {name}: there is no such disk"),
                Some(disk) if disk.queue == MAPPED => {
                    bail!("disk {name}: lies on others, and has no requests of its own; trace these")
                }
                Some(_) => {}
            }
        }
        Ok(Self {
            trace: trace(&control)?,
            control,
            wanted,
        })
    }

    pub(crate) fn started(&self) -> Started {
        let named = |disk: NamedDisk| (disk.name, device_text(disk.device));
        Started {
            devices: self.disks().map(named).collect(),
            reactors: self.trace.reactors(),
            format: FORMAT,
        }
    }

    /// The descriptor of the memory.
    pub(crate) fn memory(&self) -> BorrowedFd<'_> {
        self.trace.memory()
    }

    pub(crate) fn names(&self) -> Names {
        let queues = self.control.queues().into_iter();
        let groups = queues.flat_map(|(queue, _)| {
            let named = move |(path, id): (String, GroupId)| NamedGroup {
                queue: queue.0,
                id: id.0,
                path,
            };
            self.control.groups(queue).into_iter().map(named)
        });
        Names {
            groups: groups.collect(),
            disks: self.disks().collect(),
        }
    }

    /// The traced disks.
    fn disks(&self) -> impl Iterator<Item = NamedDisk> {
        let is_traced = |disk: &&Disk| {
            disk.queue != MAPPED && (self.wanted.is_empty() || self.wanted.contains(&disk.name))
        };
        let named = |disk: &Disk| NamedDisk {
            queue: disk.queue.0,
            id: disk.id.0,
            name: disk.name.clone(),
            device: device(disk.number),
        };
        let all: Vec<NamedDisk> = self.control.disks().iter().filter(is_traced).map(named).collect();
        all.into_iter()
    }
}

/// Starts a trace, if need be when the one before has ended.
fn trace(control: &Control) -> Result<Trace, Error> {
    let end = Instant::now() + PREDECESSOR_MAX;
    loop {
        match control.trace() {
            Err(Error::Busy(_)) if Instant::now() < end => thread::sleep(TRY_AGAIN),
            started => return started,
        }
    }
}

/// How long a trace whose client has gone may take to end.
const PREDECESSOR_MAX: Duration = Duration::from_millis(200);
const TRY_AGAIN: Duration = Duration::from_millis(2);
/// The version of the memory's layout and of the events.
pub(crate) const FORMAT: u32 = 1;
