//! Decides what a daemon gives to who takes a trace: a descriptor of the memory in which reactors tell events, and what the numbers in
//! these events mean. All else is done by `blkmq trace`, in its own process, so that the daemon has nothing to do with it.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;

use anyhow::{Result, bail};
use blkmq_core::ids::GroupId;
use blkmq_core::trace::blktrace::{device, device_text};
use blkmq_host::control::{Control, Trace};
use blkmq_host::disk::{Disk, MAPPED};
use serde::{Deserialize, Serialize};

/// A trace that a client takes, until this is dropped.
pub(crate) struct Recording {
    control: Control,
    /// What is traced; everything if there is nothing in it.
    wanted: Vec<String>,
    trace: Trace,
}

/// What a client is told when its trace begins.
#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct Started {
    /// The numbers of disks, as tools print them.
    pub(crate) devices: BTreeMap<String, String>,
    /// How many rings there are in the memory.
    pub(crate) reactors: usize,
    /// How the memory is to be read: [`FORMAT`] if it is as this program knows it.
    pub(crate) format: u32,
}

/// What numbers in events mean now.
#[derive(Debug, Default, Deserialize, Serialize)]
pub(crate) struct Names {
    /// The disks that are traced.
    pub(crate) disks: Vec<NamedDisk>,
    pub(crate) groups: Vec<NamedGroup>,
}

#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct NamedDisk {
    pub(crate) queue: u16,
    pub(crate) id: u32,
    pub(crate) name: String,
    /// Its device's number, which no other disk of the daemon ever has.
    pub(crate) device: u32,
}

#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct NamedGroup {
    pub(crate) queue: u16,
    pub(crate) id: u32,
    pub(crate) path: String,
}

impl Recording {
    /// Begins to trace these disks, or all.
    ///
    /// # Errors
    /// If there is no such disk, it has no requests of its own, somebody traces already, or there is no memory.
    pub(crate) fn start(control: Control, wanted: Vec<String>) -> Result<Self> {
        let disks = control.disks();
        for name in &wanted {
            match disks.iter().find(|disk| disk.name == *name) {
                None => bail!("disk {name}: there is no such disk"),
                Some(disk) if disk.queue == MAPPED => {
                    bail!("disk {name}: lies on others, and has no requests of its own; trace these")
                }
                Some(_) => {}
            }
        }
        Ok(Self {
            trace: control.trace()?,
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

    /// What gives access to the memory.
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

    /// The disks that are traced.
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

/// The layout of the memory and of the events in it.
pub(crate) const FORMAT: u32 = 1;
