//! The records that `blkparse` gets for events: disks are devices, groups are processes with names, and
//! messages report dropped events and new disks.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use blkmq_core::ids::ReactorId;
use blkmq_core::trace::blktrace::{MESSAGE, NAME_BYTES, PROCESS, Record};
use blkmq_core::trace::{Event, Step};

use serde_json::json;

use super::recording::{NamedGroup, Names};
use crate::control::client::Client;

/// Makes records of events.
pub(super) struct Encoder {
    /// Answers what numbers mean.
    daemon: Client,
    /// The numbers may have other meanings by now.
    is_stale: bool,
    asked_at: Instant,
    /// The devices of traced disks, by queue and disk.
    devices: Cache<u32>,
    /// The process numbers of groups, by queue and group.
    pids: Cache<u32>,
    /// Paths of groups that have no records yet, by queue and group.
    paths: BTreeMap<(u16, u32), String>,
    /// The process numbers of groups by path; they never change.
    known_groups: BTreeMap<String, u32>,
    known_devices: BTreeSet<u32>,
    /// New disks that have no records yet: their names by device.
    come: BTreeMap<u32, String>,
    /// The number of each reactor's latest record.
    sequences: Vec<u32>,
    /// The record of the latest event.
    record: Record,
}

impl Encoder {
    /// Makes an encoder, and asks the daemon for the names.
    ///
    /// # Errors
    /// The daemon does not answer.
    pub(super) fn new(daemon: Client, reactors: usize) -> Result<Self> {
        let mut encoder = Self {
            daemon,
            is_stale: false,
            asked_at: Instant::now(),
            devices: Cache::default(),
            pids: Cache::default(),
            paths: BTreeMap::new(),
            known_groups: BTreeMap::new(),
            known_devices: BTreeSet::new(),
            come: BTreeMap::new(),
            sequences: vec![0; reactors],
            record: Record::default(),
        };
        encoder.look_again()?;
        encoder.come.clear();
        Ok(encoder)
    }

    /// Appends the record of an event and returns true, if the event's disk is traced.
    ///
    /// # Errors
    /// The daemon does not answer what its numbers mean.
    #[inline]
    pub(super) fn event(&mut self, reactor: ReactorId, event: &Event, out: &mut Vec<u8>) -> Result<bool> {
        if !self.record.set(event) {
            self.is_stale |= event.step == Step::Renumbered;
            return Ok(false);
        }
        if self.is_stale && self.asked_at.elapsed() > ASK_AGAIN {
            self.look_again()?;
        }
        let (disk, group) = ((event.queue, event.disk.0), (event.queue, event.group.0));
        let device = match self.devices.find(disk) {
            Some(device) => Some(device),
            None if self.is_stale => {
                self.look_again()?;
                self.devices.find(disk)
            }
            None => None,
        };
        let Some(device) = device else { return Ok(false) };
        if !self.come.is_empty()
            && let Some(name) = self.come.remove(&device)
        {
            super::say_device(device, &name);
            self.message(reactor, device, &format!("{DISK}{name}"), out);
        }
        let pid = match self.pids.find(group) {
            Some(pid) => pid,
            None => self.introduce(reactor, group, device, out),
        };
        (self.record.device, self.record.pid) = (device, pid);
        number(&mut self.record, &mut self.sequences, reactor);
        self.record.write(out);
        Ok(true)
    }

    /// Checks that the daemon still runs.
    ///
    /// # Errors
    /// The daemon has closed the connection.
    pub(super) fn check(&self) -> Result<()> {
        ensure!(
            !self.daemon.has_ended(),
            "the daemon has ended, or another one has taken over: the trace ends here; start it again"
        );
        Ok(())
    }

    /// Appends a message that so many events were dropped.
    pub(super) fn dropped(&mut self, reactor: ReactorId, count: u64, out: &mut Vec<u8>) {
        self.message(reactor, 0, &format!("{DROPPED}{count}"), out);
    }

    fn message(&mut self, reactor: ReactorId, device: u32, text: &str, out: &mut Vec<u8>) {
        let mut message = Record::notice(MESSAGE, self.record.time, text);
        message.device = device;
        self.write(reactor, message, out);
    }

    fn look_again(&mut self) -> Result<()> {
        // A change during the question has a later event of its own.
        self.is_stale = false;
        let names = self.daemon.call("trace.names", &json!({}))?;
        let names: Names = serde_json::from_value(names).context(super::OTHER_VERSION)?;
        self.asked_at = Instant::now();
        self.devices = Cache::default();
        self.pids = Cache::default();
        for disk in names.disks {
            self.devices.keep((disk.queue, disk.id), disk.device);
            if self.known_devices.insert(disk.device) {
                self.come.insert(disk.device, disk.name);
            }
        }
        let path = |group: NamedGroup| ((group.queue, group.id), group.path);
        self.paths = names.groups.into_iter().map(path).collect();
        Ok(())
    }

    /// Finds the process number of a group; appends the group's name if the number is new.
    fn introduce(&mut self, reactor: ReactorId, group: (u16, u32), device: u32, out: &mut Vec<u8>) -> u32 {
        let path = self.paths.get(&group).cloned();
        let path = path.unwrap_or_else(|| "removed".to_owned());
        let next = self.known_groups.len() as u32 + 1;
        let pid = *self.known_groups.entry(path.clone()).or_insert(next);
        self.pids.keep(group, pid);
        if pid != next {
            return pid;
        }
        let mut name = Record::notice(PROCESS, self.record.time, end_of(&path));
        name.text.resize(NAME_BYTES, 0);
        (name.pid, name.device) = (pid, device);
        self.write(reactor, name, out);
        pid
    }

    fn write(&mut self, reactor: ReactorId, mut record: Record, out: &mut Vec<u8>) {
        number(&mut record, &mut self.sequences, reactor);
        record.write(out);
    }
}

/// Gives a record the next number of its reactor.
#[inline]
fn number(record: &mut Record, sequences: &mut [u32], reactor: ReactorId) {
    let sequence = &mut sequences[reactor.index()];
    *sequence = sequence.wrapping_add(1);
    record.sequence = *sequence;
    record.cpu = u32::from(reactor.0);
}

/// Values by queue and disk, or by queue and group. The latest is found at once, because many events of one follow each other.
#[derive(Default)]
struct Cache<V> {
    all: BTreeMap<(u16, u32), V>,
    latest: Option<((u16, u32), V)>,
}

impl<V: Copy> Cache<V> {
    #[inline]
    fn find(&mut self, at: (u16, u32)) -> Option<V> {
        if let Some((latest, value)) = self.latest
            && latest == at
        {
            return Some(value);
        }
        let found = self.all.get(&at).copied()?;
        self.latest = Some((at, found));
        Some(found)
    }

    fn keep(&mut self, at: (u16, u32), value: V) {
        self.all.insert(at, value);
    }
}

/// The last bytes of a path, which say the most, as many as a name may have.
fn end_of(path: &str) -> &str {
    let mut start = path.len().saturating_sub(NAME_BYTES - 1);
    while !path.is_char_boundary(start) {
        start += 1;
    }
    &path[start..]
}

const DROPPED: &str = "blkmq dropped ";
const DISK: &str = "blkmq disk ";
/// The least time between two questions after changes, because many disks may be added at once.
const ASK_AGAIN: Duration = Duration::from_millis(5);
