//! Decides how a daemon tells what it traces: each reactor's events as records of [`blkmq_core::trace::blktrace`], groups as processes
//! with names, and as messages how many events found no room and which disks have come.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail};
use blkmq_core::ids::{DiskId, GroupId, ReactorId};
use blkmq_core::trace::Event;
use blkmq_core::trace::blktrace::{MESSAGE, NAME_BYTES, PROCESS, Record, device, device_text};
use blkmq_host::control::{Control, Trace};
use blkmq_host::disk::{Disk, MAPPED, QueueId};

/// A trace on its way to a client.
pub(crate) struct Stream {
    trace: Trace,
    encoder: Encoder,
    /// How long it waits between looks into the buffers.
    every: Duration,
}

/// What makes records of events.
struct Encoder {
    control: Control,
    /// What is traced; everything if there is nothing in it.
    wanted: Vec<String>,
    /// The disks that there were when it was looked last.
    disks: Arc<[Disk]>,
    /// By queue and disk, as long as the disks stay the same: its number, if it is traced.
    devices: Cache<DiskId, Option<u32>>,
    /// By queue and group, as long as that: what stands for the group.
    pids: Cache<GroupId, u32>,
    /// By path: the same, for good.
    groups: BTreeMap<String, u32>,
    /// The numbers of disks whose names have been told.
    named: BTreeSet<u32>,
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
        let trace = control.trace(EVENTS)?;
        let sequences = vec![0; trace.reactors()];
        let mut encoder = Encoder {
            control,
            wanted,
            disks,
            devices: Cache::default(),
            pids: Cache::default(),
            groups: BTreeMap::new(),
            named: BTreeSet::new(),
            sequences,
            time: 0,
        };
        encoder.named = encoder.traced().map(|disk| disk.number).collect();
        Ok(Self {
            trace,
            encoder,
            every: EVERY_MIN,
        })
    }

    /// The numbers of the disks that are traced, as tools print them.
    pub(crate) fn devices(&self) -> Vec<(String, String)> {
        let traced = self.encoder.traced();
        traced
            .map(|disk| (disk.name.clone(), device_text(device(disk.number))))
            .collect()
    }

    /// How many reactors tell something: the CPUs of the trace.
    pub(crate) fn reactors(&self) -> usize {
        self.trace.reactors()
    }

    /// Appends what has been told since the last call. Returns when to come again: when buffers are an eighth to a quarter full, so that
    /// what they hold is still in a cache, and few wake-ups disturb those who serve.
    pub(crate) fn take(&mut self, out: &mut Vec<u8>) -> Duration {
        let Self {
            trace,
            encoder,
            every,
        } = self;
        encoder.look_for_changes();
        let count = trace.drain(|reactor, event| encoder.write_event(reactor, &event, out));
        if count > EVENTS / 4 {
            *every = (*every / 2).max(EVERY_MIN);
        } else if count < EVENTS / 8 {
            *every = (*every + EVERY_MIN).min(EVERY_MAX);
        }
        trace.take_dropped(|reactor, count| {
            let message = Record::notice(MESSAGE, encoder.time, &format!("{DROPPED}{count}"));
            encoder.write(reactor, message, out);
        });
        *every
    }
}

impl Encoder {
    fn write_event(&mut self, reactor: ReactorId, event: &Event, out: &mut Vec<u8>) {
        self.time = event.at.0;
        let Some(device) = self.device(reactor, event, out) else {
            return;
        };
        let mut record = Record::of(event);
        record.device = device;
        record.pid = match self.pids.find(event.queue, event.group) {
            Some(pid) => pid,
            None => self.introduce(reactor, event, device, out),
        };
        self.write(reactor, record, out);
    }

    /// Places on a queue are given to others when disks and groups go. What happened to the disk that had one within some milliseconds of
    /// that is told of the one that has it now.
    fn look_for_changes(&mut self) {
        let disks = self.control.disks();
        if !Arc::ptr_eq(&disks, &self.disks) {
            self.disks = disks;
            self.devices = Cache::default();
            self.pids = Cache::default();
        }
    }

    /// Finds the number of a group; says its name when it has none yet.
    fn introduce(&mut self, reactor: ReactorId, event: &Event, device: u32, out: &mut Vec<u8>) -> u32 {
        let path = self.control.group_path(QueueId(event.queue), event.group);
        let path = path.unwrap_or_else(|| "removed".to_owned());
        let next = self.groups.len() as u32 + 1;
        let pid = *self.groups.entry(path.clone()).or_insert(next);
        self.pids.keep(event.queue, event.group, pid);
        if pid != next {
            return pid;
        }
        let mut name = Record::notice(PROCESS, event.at.0, end_of(&path));
        name.text.resize(NAME_BYTES, 0);
        (name.pid, name.device) = (pid, device);
        self.write(reactor, name, out);
        pid
    }

    fn write(&mut self, reactor: ReactorId, mut record: Record, out: &mut Vec<u8>) {
        let sequence = &mut self.sequences[reactor.index()];
        *sequence = sequence.wrapping_add(1);
        record.sequence = *sequence;
        record.cpu = u32::from(reactor.0);
        record.write(out);
    }

    /// The number of an event's disk, if it is traced; says the name of one that has come since the start.
    fn device(&mut self, reactor: ReactorId, event: &Event, out: &mut Vec<u8>) -> Option<u32> {
        if let Some(known) = self.devices.find(event.queue, event.disk) {
            return known;
        }
        let is_it = |one: &&Disk| one.queue.0 == event.queue && one.id == event.disk;
        let found = self
            .traced()
            .find(is_it)
            .map(|disk| (disk.number, disk.name.clone()));
        let number = found.as_ref().map(|(number, _)| device(*number));
        self.devices.keep(event.queue, event.disk, number);
        if let Some((disk, name)) = found
            && self.named.insert(disk)
        {
            let mut told = Record::notice(MESSAGE, event.at.0, &format!("{DISK}{name}"));
            told.device = device(disk);
            self.write(reactor, told, out);
        }
        number
    }

    /// The disks that are traced.
    fn traced(&self) -> impl Iterator<Item = &Disk> {
        let traced = self.disks.iter().filter(|disk| disk.queue != MAPPED);
        traced.filter(|disk| self.is_wanted(&disk.name))
    }

    fn is_wanted(&self, disk: &str) -> bool {
        self.wanted.is_empty() || self.wanted.iter().any(|wanted| wanted == disk)
    }
}

/// What is known of a queue's disks, or groups. The latest is found at once: many events of one follow each other.
struct Cache<K, V> {
    all: BTreeMap<(u16, K), V>,
    latest: Option<((u16, K), V)>,
}

impl<K, V> Default for Cache<K, V> {
    fn default() -> Self {
        Self {
            all: BTreeMap::new(),
            latest: None,
        }
    }
}

impl<K: Copy + Ord, V: Copy> Cache<K, V> {
    fn find(&mut self, queue: u16, key: K) -> Option<V> {
        let at = (queue, key);
        if let Some((latest, value)) = self.latest
            && latest == at
        {
            return Some(value);
        }
        let found = self.all.get(&at).copied()?;
        self.latest = Some((at, found));
        Some(found)
    }

    fn keep(&mut self, queue: u16, key: K, value: V) {
        self.all.insert((queue, key), value);
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

/// Which disk a message says that a device is.
pub(super) fn disk(message: &[u8]) -> Option<&str> {
    std::str::from_utf8(message).ok()?.strip_prefix(DISK)
}

/// How many events a message says that were dropped.
pub(super) fn dropped(message: &[u8]) -> u64 {
    let text = std::str::from_utf8(message).unwrap_or_default();
    text.strip_prefix(DROPPED)
        .and_then(|count| count.parse().ok())
        .unwrap_or(0)
}

const DROPPED: &str = "blkmq dropped ";
const DISK: &str = "blkmq disk ";
/// Events that a reactor has room for: 5 ms of a million requests a second. More of them are not in its cache when it comes round.
const EVENTS: usize = 1 << 14;
const EVERY_MIN: Duration = Duration::from_millis(1);
/// Then the buffers have room for a burst of a million requests a second.
const EVERY_MAX: Duration = Duration::from_millis(5);
