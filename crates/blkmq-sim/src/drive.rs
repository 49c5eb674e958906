//! A modelled drive: which commands it takes, when each completes and when its data moves.
//! `modelled_hctx` is its interface to the core, `model` decides times, `fault` decides faults;
//! `seek_queue` orders a disk's commands.
//!
//! ```text
//!   issue ─► staged ── commit / last ──► waiting ── a unit is free ──► in service ─► ended ── reap ─► gone
//!                                                                          └─► lost ── timed_out ───────┘
//! ```

pub mod fault;
pub mod model;
pub mod modelled_hctx;
pub mod seek_queue;
mod transfer;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;

use blkmq_core::bio::{Bio, Data, Flags, Op, Status};
use blkmq_core::driver::{Done, Issued, TimedOut};
use blkmq_core::ids::{Cookie, DiskId};
use blkmq_core::request::Request;
use blkmq_core::time::{Instant, Nanos};

use crate::images::{Cell, Images, Lot};
use crate::rng::{Ppm, Rng};
use fault::{Faults, Mutation, Plan};
use model::{Arm, Model, Work};

/// The clients' memory, as the drive sees it: numbers instead of buffers.
pub trait Memory {
    /// Stores a block's content into block `index` of the buffer of bio `token`.
    fn store(&mut self, token: u64, index: u32, content: u64);
    /// Returns the content of block `index` of the buffer of bio `token`.
    fn load(&mut self, token: u64, index: u32) -> u64;
}

/// The specification of a drive.
#[derive(Clone, Debug)]
pub struct Spec {
    /// Its kind and speed.
    pub model: Model,
    /// How many commands it takes from one hardware context; beyond that, it answers `DeviceResource`.
    pub slots: u32,
    /// Its faults.
    pub faults: Faults,
    /// A forbidden behaviour, for tests of the oracle.
    pub mutation: Option<Mutation>,
    /// Whether it has a volatile cache.
    pub cache: bool,
    /// Its completions interrupt; otherwise it states the time at which to reap.
    pub interrupts: bool,
    /// Factors by which commands of these disks take longer; 1 for disks without an entry.
    pub slowness: Vec<u32>,
}

/// Where a disk lies on its drive.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    /// Its first block; blocks are numbered across all drives.
    pub first: u32,
    /// Number of its blocks.
    pub blocks: u32,
}

/// One modelled drive, shared by all its hardware contexts.
#[derive(Debug)]
pub struct Drive {
    spec: Spec,
    block: u64,
    /// Number of blocks that are written together or not at all when the power fails.
    physical: u32,
    places: Vec<Span>,
    images: Images,
    rng: Rng,
    arm: Arm,
    ways: Vec<Way>,
    commands: BTreeMap<u64, Command>,
    next_command: u64,
    waiting: VecDeque<u64>,
    /// Commands in service, by the time of their end.
    serving: BTreeSet<(Instant, u64)>,
    /// Hardware contexts with new completions.
    interrupts: BTreeSet<u16>,
}

/// One hardware context's side of the drive.
#[derive(Debug, Default)]
struct Way {
    staged: Vec<u64>,
    by_cookie: BTreeMap<u64, u64>,
    ended: VecDeque<Done>,
    /// Ends to be reported a second time, though the request has ended.
    echoes: VecDeque<Done>,
}

#[derive(Debug)]
struct Command {
    way: u16,
    cookie: Cookie,
    op: Op,
    through: bool,
    disk: DiskId,
    position: u64,
    len: u64,
    parts: Vec<Part>,
    plan: Plan,
    state: State,
    /// The blocks that a flush must make durable.
    owed: Vec<(u32, Cell)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Waiting,
    Serving,
    Lost,
    Ended,
    /// The drive has given it up, but a unit still works on it.
    Dropped,
}

/// One bio's share of a command.
#[derive(Clone, Copy, Debug)]
struct Part {
    token: u64,
    /// Its first block on the drive.
    block: u32,
    /// The first block of this share in the bio's buffer.
    index: u32,
    count: u32,
}

impl Drive {
    /// Makes a drive with an entry for each of `hctxs` hardware contexts. Its disks follow one
    /// another, in blocks of `block` bytes; `physical` is the size of its physical blocks.
    pub fn new(spec: Spec, (block, physical): (u32, u32), places: Vec<Span>, hctxs: u16, rng: Rng) -> Self {
        let first = places.first().map_or(0, |place| place.first);
        let end = places.last().map_or(0, |place| place.first + place.blocks);
        let blocks = end - first;
        Self {
            spec,
            block: u64::from(block),
            physical: physical / block,
            places,
            images: Images::new(first..end),
            rng,
            arm: Arm::new(u64::from(blocks) * u64::from(block)),
            ways: (0..hctxs).map(|_| Way::default()).collect(),
            commands: BTreeMap::new(),
            next_command: 0,
            waiting: VecDeque::new(),
            serving: BTreeSet::new(),
            interrupts: BTreeSet::new(),
        }
    }

    /// The drive's images.
    pub fn images(&mut self) -> &mut Images {
        &mut self.images
    }

    /// Says whether its completions interrupt.
    pub fn has_interrupts(&self) -> bool {
        self.spec.interrupts
    }

    /// Returns the time of the drive's next event.
    pub fn next_due(&self) -> Option<Instant> {
        self.serving.first().map(|&(at, _)| at)
    }

    /// Says whether the drive is working, so that it needs no call for its next step.
    pub fn is_busy(&self) -> bool {
        !self.serving.is_empty()
    }

    /// Returns how many of its commands it will never report as ended.
    pub fn lost(&self) -> usize {
        let lost = |c: &&Command| c.state == State::Lost;
        self.commands.values().filter(lost).count()
    }

    /// Returns how many of its commands were never committed.
    pub fn uncommitted(&self) -> usize {
        self.ways.iter().map(|way| way.staged.len()).sum()
    }

    /// Returns the hardware contexts to interrupt, once each.
    pub fn take_interrupts(&mut self) -> BTreeSet<u16> {
        std::mem::take(&mut self.interrupts)
    }

    /// Writes some of the cache back.
    pub fn destage(&mut self) {
        let mut lot = Lot::new(Ppm::percent(20), self.physical);
        self.images.destage(&mut lot, &mut self.rng);
    }

    /// Cuts the power. Of writes in service and of the cache, some blocks become durable, and the
    /// rest is lost. Returns how many blocks are lost.
    pub fn power_cut(&mut self, memory: &mut dyn Memory) -> usize {
        let serving: Vec<u64> = self.serving.iter().map(|&(_, id)| id).collect();
        for id in serving {
            let command = &self.commands[&id];
            if command.op.is_write() && command.state == State::Serving {
                let (parts, op) = (command.parts.clone(), command.op);
                for part in parts {
                    self.move_part(op, &part, false, Ppm::percent(50), memory);
                }
            }
        }
        let mut lot = Lot::new(Ppm::percent(50), self.physical);
        self.images.destage(&mut lot, &mut self.rng);
        self.forget_commands();
        self.images.power_cut()
    }

    fn forget_commands(&mut self) {
        self.commands.clear();
        self.waiting.clear();
        self.serving.clear();
        self.interrupts.clear();
        for way in &mut self.ways {
            *way = Way::default();
        }
    }

    /// Takes or refuses a request.
    fn issue(&mut self, way: u16, rq: &Request, cookie: Cookie, memory: &mut dyn Memory) -> Issued {
        let in_flight = self.ways[usize::from(way)].by_cookie.len();
        if self.rng.chance(self.spec.faults.resource) {
            return Issued::Resource;
        }
        let full = in_flight >= self.spec.slots as usize;
        if in_flight > 0 && (self.rng.chance(self.spec.faults.device_resource) || full) {
            return Issued::DeviceResource;
        }
        let mut command = self.command(way, rq, cookie);
        let inline = self.rng.chance(self.spec.model.inline());
        if inline && !command.plan.lost && command.op != Op::Flush {
            self.move_data(&mut command, memory);
            self.report(&command);
            return Issued::Done(command.plan.status);
        }
        let id = self.next_command;
        self.next_command += 1;
        let side = &mut self.ways[usize::from(way)];
        side.by_cookie.insert(cookie.raw(), id);
        side.staged.push(id);
        self.commands.insert(id, command);
        Issued::Queued
    }

    /// Starts the issued commands.
    fn commit(&mut self, way: u16, now: Instant, memory: &mut dyn Memory) {
        let staged = std::mem::take(&mut self.ways[usize::from(way)].staged);
        self.waiting.extend(staged);
        self.start(now, memory);
    }

    /// Reports the commands of one hardware context that have ended.
    fn reap(&mut self, way: u16, done: &mut Vec<Done>) {
        self.interrupts.remove(&way);
        let side = &mut self.ways[usize::from(way)];
        let ended: Vec<Done> = side.ended.drain(..).collect();
        done.extend(side.echoes.drain(..));
        for end in ended {
            let side = &mut self.ways[usize::from(way)];
            let id = side.by_cookie.remove(&end.cookie.raw());
            let Some(command) = id.and_then(|id| self.commands.remove(&id)) else {
                continue;
            };
            if command.plan.twice {
                side.echoes.push_back(end);
            }
            self.report(&command);
            done.push(end);
        }
    }

    /// Decides about a command that has passed the time limit.
    fn timed_out(&mut self, way: u16, cookie: Cookie) -> TimedOut {
        let side = &mut self.ways[usize::from(way)];
        let Some(&id) = side.by_cookie.get(&cookie.raw()) else {
            return TimedOut::Wait;
        };
        let command = self.commands.get_mut(&id).expect("a cookie names a command");
        let bound = command.state == State::Ended || std::mem::take(&mut command.plan.wait);
        if bound || self.spec.mutation == Some(Mutation::DropsCompletion) {
            return TimedOut::Wait;
        }
        side.by_cookie.remove(&cookie.raw());
        side.staged.retain(|&staged| staged != id);
        if command.plan.late {
            let status = Status::Ok;
            side.echoes.push_back(Done { cookie, status });
        }
        let hangs = command.plan.hangs_for > Nanos::ZERO;
        if command.state == State::Serving && !hangs {
            command.state = State::Dropped;
        } else {
            self.waiting.retain(|&waiting| waiting != id);
            self.serving.retain(|&(_, serving)| serving != id);
            self.commands.remove(&id);
        }
        TimedOut::Ended
    }

    /// Says when one hardware context should reap next, for a drive without interrupts.
    fn next_event(&self, way: u16, now: Instant) -> Option<Instant> {
        let side = &self.ways[usize::from(way)];
        if !side.ended.is_empty() {
            return Some(now);
        }
        let (mut own, mut queued) = (None, false);
        for id in side.by_cookie.values() {
            queued |= self.commands[id].state == State::Waiting;
        }
        for &(at, id) in &self.serving {
            if queued || self.commands[&id].way == way {
                own = Some(at);
                break;
            }
        }
        own
    }

    /// Handles all of the drive's events until `now`.
    pub fn advance(&mut self, now: Instant, memory: &mut dyn Memory) {
        while let Some(&(at, id)) = self.serving.first() {
            if at > now {
                break;
            }
            self.serving.pop_first();
            self.finish(id, memory);
            self.start(at, memory);
        }
    }

    fn start(&mut self, now: Instant, memory: &mut dyn Memory) {
        while (self.serving.len() as u64) < u64::from(self.spec.model.units()) {
            let Some(id) = self.waiting.pop_front() else {
                return;
            };
            let Some(mut command) = self.commands.remove(&id) else {
                continue;
            };
            if command.op == Op::Flush {
                command.owed = self.images.owed(self.range(command.disk));
            }
            command.state = State::Serving;
            if command.plan.early {
                self.move_data(&mut command, memory);
            }
            let end = now + self.service(&command, now);
            self.serving.insert((end, id));
            self.commands.insert(id, command);
        }
    }

    fn service(&mut self, command: &Command, now: Instant) -> Nanos {
        let work = Work {
            op: command.op,
            position: command.position,
            len: command.len,
            owed: command.owed.len() as u64,
        };
        let time = self.spec.model.service(&work, now, &mut self.arm, &mut self.rng);
        let disk = self.spec.slowness.get(command.disk.index()).copied().unwrap_or(1);
        Nanos(time.0 * u64::from(command.plan.slowness) * u64::from(disk)) + command.plan.hangs_for
    }

    fn finish(&mut self, id: u64, memory: &mut dyn Memory) {
        let Some(mut command) = self.commands.remove(&id) else {
            return;
        };
        if command.state == State::Dropped {
            if self.mutated(Mutation::WritesAfterTimeout) {
                self.move_data(&mut command, memory);
            }
            return;
        }
        if !command.plan.early {
            self.move_data(&mut command, memory);
        }
        command.state = State::Ended;
        let lost =
            command.plan.lost || self.mutated(Mutation::DropsCompletion) && self.rng.chance(Ppm(20_000));
        if lost {
            command.state = State::Lost;
            self.commands.insert(id, command);
            return;
        }
        let (way, cookie, status) = (command.way, self.reported_cookie(&command), command.plan.status);
        self.commands.insert(id, command);
        self.ways[usize::from(way)]
            .ended
            .push_back(Done { cookie, status });
        self.interrupts.insert(way);
    }

    /// The cookie under which a command's end is reported: its own, unless the drive is mutated.
    fn reported_cookie(&mut self, command: &Command) -> Cookie {
        if self.mutated(Mutation::EndsAnother) && self.rng.chance(Ppm::percent(5)) {
            let others = &self.ways[usize::from(command.way)].by_cookie;
            let mut serving = others.iter().filter(|&(_, id)| {
                self.commands
                    .get(id)
                    .is_some_and(|other| other.state == State::Serving)
            });
            if let Some((&raw, _)) = serving.next() {
                return Cookie::from_raw(raw);
            }
        }
        command.cookie
    }

    fn mutated(&self, mutation: Mutation) -> bool {
        self.spec.mutation == Some(mutation)
    }

    fn range(&self, disk: DiskId) -> Range<u32> {
        let place = self.places[disk.index()];
        place.first..place.first + place.blocks
    }

    fn command(&mut self, way: u16, rq: &Request, cookie: Cookie) -> Command {
        let mut parts = Vec::new();
        rq.for_each_bio(|bio| parts.extend(self.part(bio)));
        let first = (rq.position() / self.block) as u32;
        let blocks = first..first + (rq.len() / self.block) as u32;
        let mut plan = self.spec.faults.plan(&blocks, &mut self.rng);
        if self
            .commands
            .values()
            .any(|other| other.plan.hangs_for > Nanos::ZERO)
        {
            plan.hangs_for = Nanos::ZERO;
        }
        if plan.status == Status::Medium && self.mutated(Mutation::HidesErrors) {
            plan.status = Status::Ok;
            parts.clear();
        }
        Command {
            way,
            cookie,
            op: rq.op(),
            through: !self.spec.cache || rq.flags().has(Flags::FUA) && !self.mutated(Mutation::IgnoresFua),
            disk: rq.disk(),
            position: rq.position(),
            len: rq.len(),
            parts,
            plan,
            state: State::Waiting,
            owed: Vec::new(),
        }
    }

    fn part(&self, bio: &Bio) -> Option<Part> {
        let Data::Token(token) = bio.data else { return None };
        (bio.len > 0).then(|| Part {
            token,
            block: self.places[bio.disk.index()].first + (bio.offset / self.block) as u32,
            index: (bio.skip / self.block) as u32,
            count: (bio.len / self.block) as u32,
        })
    }
}
