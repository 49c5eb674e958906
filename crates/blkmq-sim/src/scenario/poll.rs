//! `poll` measures the cost of each way to wait for a device in CPU time, I/Os and latency, on hosts
//! whose sleeping threads wake late.
//!
//! One CPU keeps `depth` reads under way and follows the core's predictor. Polling and each sleep
//! are charged, and a sleeping thread wakes late. It is a model: see docs/simulator.md.

mod device;

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fmt::Write;

use blkmq_core::bio::Op;
use blkmq_core::ids::Tag;
use blkmq_core::poll::{Bucket, Policy, Predictor, Setting, Verdict, Wait, Waited, WakeLatency};
use blkmq_core::time::{Instant, Nanos};

pub use self::device::{ModelledDevice, STEP_EVERY, Shape};
use crate::rng::{Ppm, Rng};

/// Its name on the command line.
pub const NAME: &str = "poll";
/// A summary, for the command line.
pub const ABOUT: &str = "measures processor time, I/Os and oversleeps of six ways to wait for a device, on two modelled hosts; a table";

/// A way to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Blocked until the device wakes the reactor.
    Block,
    /// Polling all the time.
    Classic,
    /// Asleep for half of the mean.
    HalfMean,
    /// Asleep for half of the shortest time ever.
    HalfMin,
    /// Asleep as predicted.
    Ours,
    /// As predicted, but only where sleeping threads are hardly ever late.
    Cautious,
}

impl Side {
    /// All ways.
    pub const ALL: [Self; 6] = [
        Self::Block,
        Self::Classic,
        Self::HalfMean,
        Self::HalfMin,
        Self::Ours,
        Self::Cautious,
    ];

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Block => "block",
            Self::Classic => "classic",
            Self::HalfMean => "half-mean",
            Self::HalfMin => "half-min",
            Self::Ours => "ours",
            Self::Cautious => "cautious",
        }
    }

    /// The settings of the reactor and the queue.
    pub const fn setting(self) -> Setting {
        let policy = match self {
            Self::Block | Self::Ours => Policy::Predicted,
            Self::Classic => Policy::Classic,
            Self::HalfMean => Policy::HalfMean,
            Self::HalfMin => Policy::HalfMin,
            Self::Cautious => Policy::Cautious,
        };
        let is_polled = !matches!(self, Self::Block);
        Setting {
            wait: if is_polled { Wait::Auto } else { Wait::Block },
            policy,
            is_polled,
        }
    }
}

/// How late a host wakes sleeping threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Host {
    /// 1 to 3 µs late; a sleep costs 2.5 µs of processor time.
    Metal,
    /// Like the virtual machines of our lab: 14 to 22 µs late, one in 100 up to 40 µs; a sleep
    /// costs 14 µs.
    Virtual,
}

impl Host {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Metal, Self::Virtual];

    const fn name(self) -> &'static str {
        match self {
            Self::Metal => "metal",
            Self::Virtual => "virtual",
        }
    }

    const fn cost(self) -> Nanos {
        match self {
            Self::Metal => Nanos(2_500),
            Self::Virtual => Nanos(14_000),
        }
    }

    fn late(self, rng: &mut Rng) -> Nanos {
        let is_rare = rng.chance(Ppm::percent(1));
        Nanos(match self {
            Self::Metal => rng.from_to(1_000, 3_000),
            Self::Virtual if is_rare => rng.from_to(22_000, 40_000),
            Self::Virtual => 14_000 + rng.from_to(0, 4_000) + rng.from_to(0, 4_000),
        })
    }
}

/// The result of one way to wait.
#[derive(Clone, Copy, Debug, Default)]
pub struct Outcome {
    /// Reads in a second of virtual time.
    pub iops: u64,
    /// Processor time in millionths of a core.
    pub cpu_ppm: u64,
    /// Of the reads that a sleep preceded, the part that had ended when the thread awoke, in
    /// millionths.
    pub overslept_ppm: u64,
    /// The median of the latencies.
    pub p50: Nanos,
    /// Their 99th percentile.
    pub p99: Nanos,
    /// The mean of the last windows of 100 ms, of the bucket of the smallest reads, as the reactor
    /// measured it.
    pub seen_mean: Nanos,
    /// Oversleeps from the 65th read after a step on, in millionths of all reads.
    pub overslept_later_ppm: u64,
    /// CPU time from the same read on, in millionths of a core.
    pub cpu_later_ppm: u64,
}

/// Measures one way to wait: `reads` reads, `depth` of them under way.
pub fn measure(device: ModelledDevice, depth: u32, side: Side, host: Host, reads: u64, seed: u64) -> Outcome {
    let mut model = Model::new(device, depth, side, host, seed);
    while model.ended < reads {
        model.turn();
    }
    model.outcome()
}

/// Measures all ways and returns the table.
pub fn table(seed: u64) -> String {
    let mut table = "virtual time: a model, see docs/simulator.md; IOPS in percent of classic's, of a core, of reads slept for\n\
         host     device         depth  side        IOPS     CPU  overslept  p50, p99 µs\n"
        .to_owned();
    for host in Host::ALL {
        for shape in Shape::ALL {
            for us in DEVICES {
                for depth in [1, 8] {
                    let device = ModelledDevice { us, shape };
                    rows(&mut table, device, depth, host, seed);
                }
            }
        }
    }
    table
}

fn rows(table: &mut String, device: ModelledDevice, depth: u32, host: Host, seed: u64) {
    let classic = measure(device, depth, Side::Classic, host, READS, seed).iops;
    for side in Side::ALL {
        let outcome = measure(device, depth, side, host, READS, seed);
        let _ = writeln!(
            table,
            "{:<8} {:<14} {:>5}  {:<9} {:>5.1} % {:>5.1} % {:>8.2} %  {:>6.1} {:>6.1}",
            host.name(),
            device.to_string(),
            depth,
            side.name(),
            outcome.iops as f64 * 100.0 / classic as f64,
            outcome.cpu_ppm as f64 / 1e4,
            outcome.overslept_ppm as f64 / 1e4,
            outcome.p50.0 as f64 / 1e3,
            outcome.p99.0 as f64 / 1e3,
        );
    }
}

struct Model {
    device: ModelledDevice,
    side: Side,
    host: Host,
    rng: Rng,
    predictor: Predictor,
    oversleep: WakeLatency,
    now: Instant,
    busy: Nanos,
    /// When each read under way ends, its tag, its number and when it was issued.
    ends: BinaryHeap<Reverse<(Instant, u32, u64, Instant)>>,
    free: Vec<u32>,
    issued: u64,
    ended: u64,
    latencies: Vec<u64>,
    later: Later,
}

/// What is counted from the 65th read after a step on.
#[derive(Default)]
struct Later {
    since: Option<(Instant, Nanos)>,
    time: Nanos,
    busy: Nanos,
    reads: u64,
    overslept: u64,
}

impl Model {
    fn new(device: ModelledDevice, depth: u32, side: Side, host: Host, seed: u64) -> Self {
        let mut rng = Rng::new(seed, 1);
        let observed: Vec<Nanos> = (0..128).map(|_| host.late(&mut rng)).collect();
        Self {
            device,
            side,
            host,
            rng,
            predictor: Predictor::new(depth),
            oversleep: WakeLatency::new(host.cost(), &observed),
            now: Instant(1_000_000_000),
            busy: Nanos::ZERO,
            ends: BinaryHeap::new(),
            free: (0..depth).collect(),
            issued: 0,
            ended: 0,
            latencies: Vec::new(),
            later: Later::default(),
        }
    }

    fn turn(&mut self) {
        while let Some(tag) = self.free.pop() {
            let len = self.device.len(self.issued);
            let time = self.device.time(self.issued, len, &mut self.rng);
            self.predictor.issued(Tag(tag), Op::Read, len, self.now);
            self.ends
                .push(Reverse((self.now + time, tag, self.issued, self.now)));
            self.issued += 1;
            self.work(PER_READ);
        }
        let first = self.ends.peek().expect("reads are under way").0.0;
        let setting = self.side.setting();
        let mut was_asleep = false;
        match self.predictor.verdict(setting, &mut self.oversleep, self.now) {
            Verdict::Spin => {
                let left = first.since(self.now);
                self.predictor.waited(Waited::Looking, self.now.max(first - LOOK));
                self.work(left);
            }
            Verdict::SleepUntil(wake) => {
                was_asleep = true;
                let late = self.host.late(&mut self.rng);
                self.busy += self.host.cost();
                self.now = wake + late;
                self.oversleep.observe(late);
                self.predictor.waited(Waited::Asleep, self.now);
            }
            Verdict::Block if first <= self.now => {}
            Verdict::Block => {
                self.busy += self.host.cost();
                self.now = first + self.host.late(&mut self.rng);
                let typical = self.oversleep.typical();
                self.predictor.waited(Waited::Woken(typical), self.now);
            }
        }
        self.reap(was_asleep);
    }

    fn reap(&mut self, was_asleep: bool) {
        let now = self.now;
        while let Some(&Reverse((end, tag, number, issued))) = self.ends.peek()
            && end <= now
        {
            self.ends.pop();
            self.predictor.completed(Tag(tag), now);
            self.latencies.push(now.since(issued).0);
            self.free.push(tag);
            self.ended += 1;
            self.later.count(number % STEP_EVERY, was_asleep, now, self.busy);
        }
        self.predictor.looked(now);
    }

    fn work(&mut self, time: Nanos) {
        self.now = self.now + time;
        self.busy += time;
    }

    fn outcome(mut self) -> Outcome {
        self.latencies.sort_unstable();
        let quantile = |percent: usize| Nanos(self.latencies[(self.latencies.len() - 1) * percent / 100]);
        let time = self.now.since(Instant(1_000_000_000)).0;
        let stats: Vec<_> = Bucket::all().map(|bucket| self.predictor.stats(bucket)).collect();
        let sum = |of: fn(&blkmq_core::poll::BucketStats) -> u64| stats.iter().map(of).sum::<u64>();
        Outcome {
            iops: self.ended * 1_000_000_000 / time,
            cpu_ppm: self.busy.0 * 1_000_000 / time,
            overslept_ppm: sum(|of| of.overslept) * 1_000_000 / sum(|of| of.slept).max(1),
            p50: quantile(50),
            p99: quantile(99),
            seen_mean: stats
                .iter()
                .find(|of| of.samples > 0)
                .map_or(Nanos::ZERO, |of| of.mean),
            overslept_later_ppm: self.later.overslept * 1_000_000 / self.later.reads.max(1),
            cpu_later_ppm: self.later.busy.0 * 1_000_000 / self.later.time.0.max(1),
        }
    }
}

impl Later {
    /// Counts a read that has ended, the `since_step`th after a step.
    fn count(&mut self, since_step: u64, was_asleep: bool, now: Instant, busy: Nanos) {
        if since_step < RECOVERY {
            self.since = None;
            return;
        }
        if let Some((then, busy_then)) = self.since {
            self.time += now.since(then);
            self.busy += Nanos(busy.0 - busy_then.0);
        }
        self.since = Some((now, busy));
        self.reads += 1;
        self.overslept += u64::from(was_asleep);
    }
}

/// The devices of the table, in microseconds.
pub const DEVICES: [u64; 5] = [5, 20, 50, 100, 200];
/// A step must be learned within this many reads.
const RECOVERY: u64 = 64;
const READS: u64 = 20_000;
/// Processor time of submitting and taking one read.
const PER_READ: Nanos = Nanos(500);
/// Time between two polls.
const LOOK: Nanos = Nanos(100);

#[cfg(test)]
mod tests;
