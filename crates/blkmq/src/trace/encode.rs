//! Decides how a daemon tells what it traces: each reactor's events as records of [`blkmq_core::trace::blktrace`], groups as processes with names,
//! and how many events found no room as messages.

use std::collections::BTreeMap;

use anyhow::{Result, bail};
use blkmq_core::ids::{DiskId, GroupId, ReactorId};
use blkmq_core::trace::Event;
use blkmq_core::trace::blktrace::{MESSAGE, NAME_BYTES, PROCESS, Record, device, device_text};
use blkmq_host::control::{Control, Trace};
use blkmq_host::disk::{MAPPED, QueueId};

/// A trace on its way to a client.
pub(crate) struct Stream {
    trace: Trace,
    control: Control,
    /// What is traced; everything if there is nothing in it.
    wanted: Vec<String>,
    /// By queue and disk: its number, if it is traced.
    devices: BTreeMap<(u16, DiskId), Option<u32>>,
    /// By queue and group: what stands for the group.
    pids: BTreeMap<(u16, GroupId), u32>,
    /// Of each reactor, the number of its latest record.
    sequences: Vec<u32>,
    /// When the latest event was.
    time: u64,
}

impl Stream {
    /// Begins to trace these disks, or all.
    ///
    /// # Errors
    /// If there is no such disk, it has no requests of its own, or somebody traces already.
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
            trace: control.trace(EVENTS)?,
            control,
            wanted,
            devices: BTreeMap::new(),
            pids: BTreeMap::new(),
            sequences: Vec::new(),
            time: 0,
        })
    }

    /// The numbers of the disks that are traced, as tools print them.
    pub(crate) fn devices(&self) -> Vec<(String, String)> {
        let disks = self.control.disks();
        let traced = disks.iter().filter(|disk| disk.queue != MAPPED);
        let traced = traced.filter(|disk| self.is_wanted(&disk.name));
        traced
            .map(|disk| (disk.name.clone(), device_text(device(disk.number))))
            .collect()
    }

    /// How many reactors tell something: the CPUs of the trace.
    pub(crate) fn reactors(&self) -> usize {
        self.trace.reactors()
    }

    /// Appends what has been told since the last call.
    pub(crate) fn take(&mut self, out: &mut Vec<u8>) {
        let mut told = Vec::new();
        self.trace.drain(|reactor, event| told.push((reactor, event)));
        for (reactor, event) in told {
            self.time = event.at.0;
            if let Some(device) = self.device(event.queue, event.disk) {
                self.write_event(reactor, &event, device, out);
            }
        }
        let mut dropped = Vec::new();
        self.trace
            .take_dropped(|reactor, count| dropped.push((reactor, count)));
        for (reactor, count) in dropped {
            let message = Record::notice(MESSAGE, self.time, &format!("{DROPPED}{count}"));
            self.write(reactor, message, out);
        }
    }

    fn write_event(&mut self, reactor: ReactorId, event: &Event, device: u32, out: &mut Vec<u8>) {
        let next = self.pids.len() as u32 + 1;
        let at = (event.queue, event.group);
        let pid = *self.pids.entry(at).or_insert(next);
        if pid == next {
            let mut name = Record::notice(PROCESS, event.at.0, &self.name_of(event.queue, event.group));
            name.text.resize(NAME_BYTES, 0);
            (name.pid, name.device) = (pid, device);
            self.write(reactor, name, out);
        }
        let mut record = Record::of(event);
        (record.pid, record.device) = (pid, device);
        self.write(reactor, record, out);
    }

    fn write(&mut self, reactor: ReactorId, mut record: Record, out: &mut Vec<u8>) {
        if self.sequences.len() <= reactor.index() {
            self.sequences.resize(reactor.index() + 1, 0);
        }
        let sequence = &mut self.sequences[reactor.index()];
        *sequence = sequence.wrapping_add(1);
        record.sequence = *sequence;
        record.cpu = u32::from(reactor.0);
        record.write(out);
    }

    /// The last bytes of a group's path, which say the most, as many as a name may have.
    fn name_of(&self, queue: u16, group: GroupId) -> String {
        let path = self.control.group_path(QueueId(queue), group);
        let path = path.unwrap_or_else(|| "removed".to_owned());
        let mut start = path.len().saturating_sub(NAME_BYTES - 1);
        while !path.is_char_boundary(start) {
            start += 1;
        }
        path[start..].to_owned()
    }

    fn device(&mut self, queue: u16, disk: DiskId) -> Option<u32> {
        if let Some(known) = self.devices.get(&(queue, disk)) {
            return *known;
        }
        let disks = self.control.disks();
        let found = disks.iter().find(|one| one.queue.0 == queue && one.id == disk);
        let found = found.filter(|one| self.is_wanted(&one.name));
        let found = found.map(|one| device(one.number));
        self.devices.insert((queue, disk), found);
        found
    }

    fn is_wanted(&self, disk: &str) -> bool {
        self.wanted.is_empty() || self.wanted.iter().any(|wanted| wanted == disk)
    }
}

/// How many events a message says that were dropped.
pub(super) fn dropped(message: &[u8]) -> u64 {
    let text = std::str::from_utf8(message).unwrap_or_default();
    text.strip_prefix(DROPPED)
        .and_then(|count| count.parse().ok())
        .unwrap_or(0)
}

const DROPPED: &str = "blkmq dropped ";
/// Events that a reactor has room for: 30 ms of a million requests a second.
const EVENTS: usize = 1 << 17;
