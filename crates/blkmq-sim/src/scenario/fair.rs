//! `fair` measures whether each of up to 1000 groups gets its due from a modelled flash drive, over any
//! second of virtual time, at what cost in throughput, and how long a light tenant waits among them.
//!
//! There is one reactor and a drive of units that each serve one request at a time; clients submit
//! again as soon as an I/O has ended. Calls cost nothing, so decisions are shown, not CPU time.

use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::fmt::Write;
use std::ops::Range;
use std::rc::Rc;

use blkmq_core::bio::Status;
use blkmq_core::bio::{Bio, Op};
use blkmq_core::driver::{Done, HctxDriver, Issued};
use blkmq_core::group::{CapKind, Caps, GroupTree, ROOT};
use blkmq_core::ids::{Cookie, GroupId};
use blkmq_core::limits::Limits;
use blkmq_core::local::LocalQueue;
use blkmq_core::queue::{DiskConfig, Effects, Queue, QueueConfig, TagMode};
use blkmq_core::request::Request;
use blkmq_core::sched::{self, ElevatorType};
use blkmq_core::time::{Instant, Nanos};

use crate::rng::Rng;

mod flash;
pub mod slow;
#[cfg(test)]
mod tests;

/// Its name on the command line.
pub const NAME: &str = "fair";
/// A summary, for the command line.
pub const ABOUT: &str =
    "measures shares, throughput and a light tenant's wait among 2 to 1000 groups on modelled flash; a table";

/// The tenants that share the drive.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// How many requests the drive serves at once.
    pub units: u32,
    /// Number of saturating groups.
    pub groups: u32,
    /// Their weights, in turn. The light tenant's is 100.
    pub weights: [u16; 3],
    /// Bios that each saturating group keeps under way.
    pub depth: u32,
    /// Its clients, who share them.
    pub clients: u32,
    /// Their sizes in bytes, in turn; a group with an odd number writes.
    pub sizes: [u64; 2],
    /// How long the light tenant rests between two reads of 4 KiB, on average.
    pub rest: Nanos,
    /// The light tenant's latency target.
    pub target: Option<Nanos>,
    /// The cap of each saturating group, in I/Os per second.
    pub cap: Option<u64>,
    /// Requests of the queue; by default enough for all bios.
    pub requests: Option<u32>,
}

/// The result of one case.
#[derive(Clone, Copy, Debug)]
pub struct Outcome {
    /// I/Os per second of virtual time.
    pub iops: u64,
    /// Bytes per second.
    pub rate: u64,
    /// The largest difference of a group's share from its due over any second, in millionths of the
    /// due.
    pub worst_error: u64,
    /// The light tenant's median latency.
    pub light_p50: Nanos,
    /// Its 99th percentile.
    pub light_p99: Nanos,
}

/// A drive of units; further requests wait inside it in order.
struct Flash {
    clock: Rc<RefCell<Clock>>,
}

/// The drive's state that the loop needs as well.
struct Clock {
    rng: Rng,
    free: BinaryHeap<Reverse<Instant>>,
    ends: BinaryHeap<Reverse<(Instant, u64)>>,
    /// How many times longer than SERVICE a request takes at present.
    slowness: u64,
    /// When the drive begins no request, like one that collects garbage.
    pauses: Option<Every>,
    /// Requests that take long, and no unit meanwhile.
    slow: Option<Slow>,
}

/// Slow requests: the first that one of the first groups issues in each period. Flushes count as theirs, whoever shares
/// them.
#[derive(Clone, Copy)]
struct Slow {
    groups: usize,
    period: Nanos,
    takes: Nanos,
    next: Instant,
}

/// Something that happens at each multiple of `period`, and lasts for `length`.
#[derive(Clone, Copy)]
struct Every {
    period: Nanos,
    length: Nanos,
}

impl Every {
    /// When it ends, if it happens at this time.
    fn until(self, now: Instant) -> Option<Instant> {
        let since = Nanos(now.0 % self.period.0);
        (since < self.length).then(|| now + Nanos(self.length.0 - since.0))
    }
}

/// Measures a case for `seconds` of virtual time after the first two.
///
/// # Panics
/// If a bio ends with an error or is refused.
pub fn measure(case: Case, kind: &'static ElevatorType, seconds: u64, seed: u64) -> Outcome {
    let mut world = World::new(case, kind, seed);
    world.run_until(Instant(2 * SECOND));
    world.light.clear();
    let (mut seen, start) = (VecDeque::new(), world.totals());
    let (mut worst, mut ios) = (0, world.ios);
    for step in 0..=seconds * STEPS {
        world.run_until(Instant(2 * SECOND + step * SECOND / STEPS));
        seen.push_back(world.totals());
        if seen.len() as u64 > STEPS {
            worst = worst.max(world.share_error(&seen[0], &seen[seen.len() - 1]));
            seen.pop_front();
        }
    }
    ios = world.ios - ios;
    let end = world.totals();
    let bytes: u64 = end.iter().zip(&start).map(|(end, start)| end - start).sum();
    Outcome {
        iops: ios / seconds,
        rate: bytes / seconds,
        worst_error: worst,
        light_p50: world.light(50),
        light_p99: world.light(99),
    }
}

/// Measures all cases and returns the table.
pub fn table(seed: u64) -> String {
    let mut table = format!(
        "requests of {} ± {} µs, virtual time, calls cost nothing: a model, see docs/simulator.md\n\
         units groups depth  sizes        elevator     K IOPS  of none  worst share error  light p50, p99 µs\n",
        SERVICE.0 / 1000,
        SPREAD.0 / 1000
    );
    for case in CASES {
        let none = measure(case, sched::NONE, SECONDS, seed);
        for kind in sched::BUILT_IN {
            let outcome = if kind == sched::NONE {
                none
            } else {
                measure(case, kind, SECONDS, seed)
            };
            let _ = writeln!(
                table,
                "{:>5} {:>6} {:>5}  {:<11}  {:<11} {:>7}  {:>5.1} %  {:>15.2} %  {:>9.0} {:>7.0}",
                case.units,
                case.groups,
                case.depth,
                format!("{} {} KiB", case.sizes[0] >> 10, case.sizes[1] >> 10),
                kind.name,
                outcome.iops / 1000,
                outcome.iops as f64 * 100.0 / none.iops as f64,
                outcome.worst_error as f64 / 1e4,
                outcome.light_p50.0 as f64 / 1e3,
                outcome.light_p99.0 as f64 / 1e3,
            );
        }
    }
    table
}

/// How many times longer than a read this operation takes.
fn longer(op: Op) -> u64 {
    match op {
        Op::Discard | Op::WriteZeroes => DISCARD_TIMES,
        _ => 1,
    }
}

struct World {
    queue: LocalQueue,
    clock: Rc<RefCell<Clock>>,
    fx: Effects,
    now: Instant,
    rng: Rng,
    weights: Vec<u64>,
    bytes: Vec<u64>,
    ios: u64,
    /// Latencies of the light tenant, in ns.
    light: Vec<u64>,
    /// Bios that were refused because too many wait.
    refused: VecDeque<Bio>,
    /// When the light tenant submits next.
    light_due: Option<Instant>,
    rest: Nanos,
    /// How far ahead of the slowest group a group may be, in bytes served over weight; asserted
    /// after every end.
    lead_max: Option<u64>,
    /// By group: its latest end, and the longest time without one.
    gaps: Vec<(Instant, Nanos)>,
    /// Since when a group has been farther ahead.
    ahead_since: Option<Instant>,
    /// When the client of this group has no CPU, and so does not react to ends.
    absences: Option<(GroupId, Every)>,
    /// The bios that it will submit afterwards.
    late: Vec<Bio>,
    /// These groups submit nothing but this operation.
    only: Option<(Range<usize>, Op)>,
    /// How many of the first groups submit nothing more.
    silent: usize,
}

impl World {
    fn new(case: Case, kind: &'static ElevatorType, seed: u64) -> Self {
        let mut tree = GroupTree::new(case.groups + 2);
        let caps = case
            .cap
            .map_or_else(Caps::default, |iops| Caps::default().with(CapKind::Iops, iops));
        let weights: Vec<u64> = (0..case.groups)
            .map(|group| case.weights[group as usize % 3].into())
            .collect();
        for &weight in &weights {
            let group = tree.create(ROOT, weight as u16).expect("room was made");
            tree.set_caps(group, caps).expect("it has just been made");
        }
        let light = tree.create(ROOT, 100).expect("room was made");
        tree.set_latency_target(light, case.target)
            .expect("it has just been made");
        let mut config = QueueConfig::new("fair", 1);
        config.tags = TagMode::PerHctx(TAGS);
        let bios = case.groups * case.depth + 1;
        // Twice as many as needed, so that requests are never short.
        config.requests_per_reactor = case.requests.unwrap_or(2 * bios);
        config.elevator = kind;
        config.groups = tree;
        config.limits = Limits {
            discard_max: DISCARD,
            zeroes_max: DISCARD,
            cache: true,
            ..Limits::default()
        };
        config.disks.push(DiskConfig {
            name: "d".into(),
            base: 0,
            size: DISK,
            read_only: false,
            logical_block: 4096,
        });
        let (_, handles) = Queue::new(config).expect("a possible configuration");
        let clock = Rc::new(RefCell::new(Clock {
            rng: Rng::new(seed, 1),
            free: (0..case.units).map(|_| Reverse(Instant(0))).collect(),
            ends: BinaryHeap::new(),
            slowness: 1,
            pauses: None,
            slow: None,
        }));
        let driver = Flash {
            clock: Rc::clone(&clock),
        };
        let handle = handles.into_iter().next().expect("one reactor has one handle");
        let mut world = Self {
            queue: handle.attach(Some(Box::new(driver))),
            clock,
            fx: Effects::default(),
            now: Instant(0),
            rng: Rng::new(seed, 2),
            bytes: vec![0; weights.len()],
            gaps: vec![(Instant(0), Nanos::ZERO); weights.len()],
            weights,
            ios: 0,
            light: Vec::new(),
            refused: VecDeque::new(),
            light_due: Some(Instant(0)),
            rest: case.rest,
            lead_max: None,
            ahead_since: None,
            absences: None,
            late: Vec::new(),
            only: None,
            silent: 0,
        };
        for group in 0..case.groups {
            let (op, len) = if group % 2 == 0 {
                (Op::Read, case.sizes[0])
            } else {
                (Op::Write, case.sizes[1])
            };
            for bio in 0..case.depth {
                world.submit(Bio {
                    op,
                    len,
                    group: GroupId(group + 1),
                    client: group + 1 + bio % case.clients * case.groups,
                    ..Bio::default()
                });
            }
        }
        world
    }

    fn submit(&mut self, mut bio: Bio) {
        if let Some((_, op)) = self
            .only
            .as_ref()
            .filter(|(groups, _)| groups.contains(&bio.group.index()))
        {
            bio.op = *op;
            bio.len = match op {
                Op::Flush => 0,
                Op::Discard | Op::WriteZeroes => DISCARD,
                _ => bio.len,
            };
        }
        if let Some(places) = DISK.checked_div(bio.len) {
            bio.offset = self.rng.below(places) * bio.len;
        }
        bio.cookie = self.now.0;
        if let Err(bio) = self.queue.submit(bio, self.now, &mut self.fx) {
            assert!(
                bio.group.index() <= self.weights.len(),
                "the light tenant is refused"
            );
            self.refused.push_back(bio);
        }
    }

    /// Submits refused bios again, until one is refused.
    fn submit_refused(&mut self) {
        for _ in 0..self.refused.len() {
            let (bio, left) = (self.refused.pop_front(), self.refused.len());
            self.submit(bio.expect("as many as there were"));
            if self.refused.len() > left {
                return;
            }
        }
    }

    fn run_until(&mut self, end: Instant) {
        loop {
            self.turn();
            let drive = self.clock.borrow().ends.peek().map(|Reverse((at, _))| *at);
            let back = self.back_at().filter(|_| !self.late.is_empty());
            let next = [drive, self.queue.next_wakeup(), self.light_due, back]
                .into_iter()
                .flatten()
                .min();
            let next = next.expect("something is always under way").max(self.now);
            if next > end {
                self.now = end;
                return;
            }
            self.now = next;
        }
    }

    /// When the client that has no CPU now continues.
    fn back_at(&self) -> Option<Instant> {
        self.absences.and_then(|(_, absence)| absence.until(self.now))
    }

    /// Does everything that is due now.
    fn turn(&mut self) {
        if self.back_at().is_none() {
            let late = std::mem::take(&mut self.late);
            late.into_iter().for_each(|bio| self.submit(bio));
        }
        if self.light_due.take_if(|due| *due <= self.now).is_some() {
            let light = GroupId(self.weights.len() as u32 + 1);
            self.submit(Bio {
                len: 4096,
                group: light,
                client: light.0,
                ..Bio::default()
            });
        }
        self.queue.unplug(self.now, &mut self.fx);
        loop {
            self.fx.kicks = Default::default();
            self.queue.run(self.now, &mut self.fx);
            let ended = std::mem::take(&mut self.fx.ended);
            if !ended.is_empty() {
                self.submit_refused();
            }
            let is_quiet = ended.is_empty() && self.fx.kicks.is_empty();
            for bio in ended {
                assert!(bio.status.is_ok(), "{:?} ended with {:?}", bio.op, bio.status);
                self.account(bio);
            }
            self.queue.unplug(self.now, &mut self.fx);
            if is_quiet && self.fx.ended.is_empty() {
                return;
            }
        }
    }

    fn account(&mut self, bio: Bio) {
        self.ios += 1;
        let place = bio.group.index() - 1;
        if place < self.silent {
            return;
        }
        if place < self.bytes.len() {
            self.bytes[place] += bio.len;
            let (ended, longest) = &mut self.gaps[place];
            *longest = self.now.since(*ended).max(*longest);
            *ended = self.now;
            self.check_lead();
            let is_away =
                self.absences.is_some_and(|(group, _)| group == bio.group) && self.back_at().is_some();
            if is_away {
                self.late.push(bio);
            } else {
                self.submit(bio);
            }
        } else {
            self.light.push(self.now.0 - bio.cookie);
            self.light_due = Some(self.now + Nanos(self.rng.from_to(0, 2 * self.rest.0)));
        }
    }

    /// Asserts that no group is ahead by more than is allowed, except during the few milliseconds
    /// of a probe.
    fn check_lead(&mut self) {
        let Some(lead_max) = self.lead_max else { return };
        let served = || {
            self.bytes
                .iter()
                .zip(&self.weights)
                .map(|(bytes, weight)| bytes / weight)
        };
        let lead = served().max().unwrap_or_default() - served().min().unwrap_or_default();
        if lead <= lead_max {
            self.ahead_since = None;
            return;
        }
        let since = *self.ahead_since.get_or_insert(self.now);
        assert!(
            self.now.since(since) <= PROBE_MAX && lead <= PROBE_LEAD * lead_max,
            "a group is {lead} bytes a weight ahead at {} ns, since {} ns",
            self.now.0,
            since.0
        );
    }

    fn totals(&self) -> Vec<u64> {
        self.bytes.clone()
    }

    /// The largest difference of a share from its due, in millionths of the due.
    fn share_error(&self, before: &[u64], after: &[u64]) -> u64 {
        let moved = || after.iter().zip(before).map(|(after, before)| after - before);
        let (total, weights): (u64, u64) = (moved().sum(), self.weights.iter().sum());
        let error = |(moved, weight): (u64, &u64)| {
            let due = u128::from(total) * u128::from(*weight) / u128::from(weights);
            (u128::from(moved).abs_diff(due) * 1_000_000 / due.max(1)) as u64
        };
        moved().zip(&self.weights).map(error).max().unwrap_or_default()
    }

    fn light(&self, percent: usize) -> Nanos {
        let mut sorted = self.light.clone();
        sorted.sort_unstable();
        Nanos(
            sorted
                .get(sorted.len() * percent / 100)
                .copied()
                .unwrap_or_default(),
        )
    }
}

const SERVICE: Nanos = Nanos::from_micros(80);
const SPREAD: Nanos = Nanos::from_micros(16);
const TAGS: u32 = 4096;
const DISK: u64 = 1 << 40;
/// Bytes of a discard, which takes `DISCARD_TIMES` times as long as a read.
const DISCARD: u64 = 1 << 20;
const DISCARD_TIMES: u64 = 10;
const SECOND: u64 = 1_000_000_000;
/// In a probe only the order decides. For at most `PROBE_MAX`, until the slow group has caught up,
/// a group may be `PROBE_LEAD` times farther ahead.
const PROBE_MAX: Nanos = Nanos::from_millis(40);
const PROBE_LEAD: u64 = 8;
/// Starts per second of the windows of one second in which shares are checked.
const STEPS: u64 = 20;
const SECONDS: u64 = 3;
const WEIGHTS: [u16; 3] = [100, 200, 400];
const fn shares(units: u32, groups: u32, depth: u32, sizes: [u64; 2]) -> Case {
    Case {
        units,
        groups,
        weights: WEIGHTS,
        depth,
        clients: 1,
        sizes,
        rest: Nanos::from_millis(5),
        target: None,
        cap: None,
        requests: None,
    }
}
/// A reader that never rests, beside tenants of its own weight that each leave it as much as it
/// asks for.
const fn isolation(units: u32, groups: u32, bytes: u64) -> Case {
    Case {
        units,
        groups,
        weights: [100; 3],
        depth: 32,
        clients: 1,
        sizes: [bytes; 2],
        rest: Nanos::ZERO,
        target: None,
        cap: None,
        requests: None,
    }
}
/// The same with a latency target for the reader, on schedulers that know no groups.
const fn targeted(units: u32, groups: u32, target: Nanos) -> Case {
    Case {
        target: Some(target),
        ..isolation(units, groups, 4096)
    }
}
/// A reader that never rests, with capped tenants that have far more under way than there are requests.
const fn crowded(units: u32, groups: u32, depth: u32, cap: u64, requests: u32) -> Case {
    Case {
        depth,
        cap: Some(cap),
        requests: Some(requests),
        ..isolation(units, groups, 4096)
    }
}
const CASES: [Case; 12] = [
    shares(64, 2, 128, [4096; 2]),
    shares(64, 8, 32, [4096; 2]),
    shares(64, 8, 128, [4096, 256 << 10]),
    shares(64, 63, 32, [4096; 2]),
    shares(64, 63, 32, [256 << 10; 2]),
    shares(64, 1000, 8, [4096; 2]),
    isolation(16, 8, 4096),
    isolation(16, 8, 256 << 10),
    isolation(128, 63, 4096),
    isolation(128, 63, 256 << 10),
    targeted(16, 8, Nanos::from_micros(250)),
    crowded(16, 8, 1024, 1000, 1024),
];
