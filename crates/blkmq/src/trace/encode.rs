//! Decides how a daemon tells what it traces: each reactor's events as records of [`blkmq_core::trace::blktrace`], groups as processes with names,
//! and how many events found no room as messages.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Result, bail};
use blkmq_core::ids::{DiskId, GroupId, ReactorId};
use blkmq_core::trace::Event;
use blkmq_core::trace::blktrace::{MESSAGE, NAME_BYTES, PROCESS, Record, device, device_text};
use blkmq_host::control::{Control, Trace};
use blkmq_host::disk::{MAPPED, QueueId};

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
    /// By queue and disk: its number, if it is traced.
    devices: Cache<DiskId, Option<u32>>,
    /// By queue and group: what stands for the group.
    pids: Cache<GroupId, u32>,
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
        Ok(Self {
            trace,
            every: EVERY_MIN,
            encoder: Encoder {
                control,
                wanted,
                devices: Cache::default(),
                pids: Cache::default(),
                sequences,
                time: 0,
            },
        })
    }

    /// The numbers of the disks that are traced, as tools print them.
    pub(crate) fn devices(&self) -> Vec<(String, String)> {
        let disks = self.encoder.control.disks();
        let traced = disks.iter().filter(|disk| disk.queue != MAPPED);
        let traced = traced.filter(|disk| self.encoder.is_wanted(&disk.name));
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
        let Some(device) = self.device(event.queue, event.disk) else {
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

    /// Gives a group a number, and says its name.
    fn introduce(&mut self, reactor: ReactorId, event: &Event, device: u32, out: &mut Vec<u8>) -> u32 {
        let pid = self.pids.all.len() as u32 + 1;
        self.pids.keep(event.queue, event.group, pid);
        let mut name = Record::notice(PROCESS, event.at.0, &self.name_of(event.queue, event.group));
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
        if let Some(known) = self.devices.find(queue, disk) {
            return known;
        }
        let disks = self.control.disks();
        let found = disks.iter().find(|one| one.queue.0 == queue && one.id == disk);
        let found = found.filter(|one| self.is_wanted(&one.name));
        let found = found.map(|one| device(one.number));
        self.devices.keep(queue, disk, found);
        found
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

/// How many events a message says that were dropped.
pub(super) fn dropped(message: &[u8]) -> u64 {
    let text = std::str::from_utf8(message).unwrap_or_default();
    text.strip_prefix(DROPPED)
        .and_then(|count| count.parse().ok())
        .unwrap_or(0)
}

const DROPPED: &str = "blkmq dropped ";
/// Events that a reactor has room for: 5 ms of a million requests a second. More of them are not in its cache when it comes round.
const EVENTS: usize = 1 << 14;
const EVERY_MIN: Duration = Duration::from_millis(1);
/// Then the buffers have room for a burst of a million requests a second.
const EVERY_MAX: Duration = Duration::from_millis(5);
