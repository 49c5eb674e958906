//! Decides which of the current group's usable paths carries the next request: the five ways, what each remembers, and how
//! many lines of other contexts it reads.
//!
//! | selector | takes the path | reads |
//! |---|---|---|
//! | `round-robin` | after the one taken last | nothing |
//! | `io-affinity` | that belongs to the hardware context | nothing |
//! | `queue-length` | with the fewest requests in flight | the counts of all contexts |
//! | `service-time` | with the least (bytes in flight + these) / throughput | the counts of all contexts |
//! | `historical-service-time` | with the least (average service time × requests in flight here) | its own history |
//!
//! Where adding the counts up would take too many lines, two paths are compared instead of all: the better of two drawn at
//! random is nearly as good as the best (Mitzenmacher, "The power of two choices in randomized load balancing", 1996).

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use crate::ids::HctxId;
use crate::time::{Instant, Nanos};

use super::PATHS_MAX;
use super::shard::Shard;
use super::shared::{List, View};

/// How a path is chosen. The names are those of the device mapper.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Selector {
    /// One after the other.
    RoundRobin,
    /// The one with the fewest requests in flight; ties rotate.
    QueueLength,
    /// The one that would be done first, by its bytes in flight and its relative throughput; ties rotate.
    #[default]
    ServiceTime,
    /// The one that would be done first, by what its requests have taken so far. A path that was not used for 0.25 s is tried
    /// with one request.
    HistoricalServiceTime,
    /// By hardware context: context `i` keeps to path `i` modulo the paths of the group, as long as that is usable.
    IoAffinity,
}

impl Selector {
    /// All of them.
    pub const ALL: [Self; 5] = [
        Self::RoundRobin,
        Self::QueueLength,
        Self::ServiceTime,
        Self::HistoricalServiceTime,
        Self::IoAffinity,
    ];

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::RoundRobin => "round-robin",
            Self::QueueLength => "queue-length",
            Self::ServiceTime => "service-time",
            Self::HistoricalServiceTime => "historical-service-time",
            Self::IoAffinity => "io-affinity",
        }
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The name of no selector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnknownSelector;

impl FromStr for Selector {
    type Err = UnknownSelector;

    fn from_str(name: &str) -> Result<Self, UnknownSelector> {
        let mut all = Self::ALL.into_iter();
        all.find(|selector| selector.name() == name)
            .ok_or(UnknownSelector)
    }
}

/// What a context does to choose, worked out when it looked at the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// One after the other.
    RoundRobin,
    /// Always this one.
    Pinned(u8),
    /// By the number of requests in flight.
    QueueLength,
    /// By the bytes in flight.
    ServiceTime,
    /// By the own history.
    History,
    /// First over the worker.
    Detour,
    /// There is none.
    None,
}

impl View {
    /// How a context that can use `usable` chooses.
    pub(super) fn way(&self, usable: &List, hctx: HctxId) -> Way {
        match (usable.len(), self.selector) {
            (0, _) => Way::None,
            (1, _) => Way::Pinned(usable.get(0) as u8),
            (_, Selector::RoundRobin) => Way::RoundRobin,
            (_, Selector::QueueLength) => Way::QueueLength,
            (_, Selector::ServiceTime) => Way::ServiceTime,
            (_, Selector::HistoricalServiceTime) => Way::History,
            (_, Selector::IoAffinity) => Way::Pinned(self.own_path(usable, hctx)),
        }
    }

    /// The context's path, or the next one of the group that is usable.
    fn own_path(&self, usable: &List, hctx: HctxId) -> u8 {
        let count = self.members.len();
        let from = hctx.index() % count;
        let mut turn = (from..from + count).map(|at| self.members.get(at % count));
        let path = turn.find(|path| usable.iter().any(|other| other == *path));
        path.unwrap_or(usable.get(0)) as u8
    }
}

/// Chooses by load: the path of `usable` with the least cost. Of equals, the first one behind the path that was chosen last, at
/// `turn`: it has waited longest, so its requests are nearest to their ends.
///
/// `load` is what one shard has of a path; `is_less` compares two paths by their loads of all shards; `idle_is_best` says that
/// none is less than an idle one.
#[inline(always)]
pub(super) fn least_loaded(
    usable: &List,
    turn: &mut usize,
    dice: &mut Dice,
    shards: &[Arc<Shard>],
    load: impl Fn(&Shard, usize) -> u64,
    is_less: impl Fn((usize, u64), (usize, u64)) -> bool,
    idle_is_best: bool,
) -> usize {
    let count = usable.len();
    let after = |at: usize| if at + 1 >= count { 0 } else { at + 1 };
    let weigh = |path: usize| (path, shards.iter().map(|shard| load(shard, path)).sum::<u64>());
    let mut at = after(*turn);
    *turn = at;
    let mut best = weigh(usable.get(at));
    if best.1 == 0 && idle_is_best {
        return best.0;
    }
    if count * shards.len() <= LINES_MAX {
        for _ in 1..count {
            at = after(at);
            let other = weigh(usable.get(at));
            if is_less(other, best) {
                (best, *turn) = (other, at);
            }
        }
    } else {
        at = (at + 1 + dice.below(count as u32 - 1) as usize) % count;
        let other = weigh(usable.get(at));
        if is_less(other, best) {
            (best, *turn) = (other, at);
        }
    }
    best.0
}

/// What `historical-service-time` remembers of one path, for one context.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct History {
    /// Moving average of the serialised service time, in 1/16 ns; none before the first end.
    average: Option<u64>,
    finished: Instant,
    chosen: Instant,
    /// What is known is old: the next end replaces it.
    renews: bool,
}

impl History {
    /// `count` requests, the first of them started at `start`, have ended together: the time since then, or since the end
    /// before them, is what they took one after another. Returns the average.
    pub(super) fn ended(&mut self, start: Instant, count: u64, now: Instant) -> Nanos {
        let each = now.since(start.max(self.finished)).0.saturating_mul(SCALE) / count;
        self.finished = now;
        let weight = (2 * count).min(SCALE);
        let average = match self.average {
            Some(average) if !self.renews => {
                (average * (SCALE - weight)).saturating_add(each.saturating_mul(weight)) / SCALE
            }
            _ => each,
        };
        self.renews = false;
        self.average = Some(average);
        Nanos(average / SCALE)
    }

    /// What one more request costs; of a path without history the first costs nothing, and further ones wait for its end.
    fn cost(&self, in_flight: u32) -> u64 {
        match self.average {
            Some(average) => average.saturating_mul(u64::from(in_flight) + 1),
            None if in_flight == 0 => 0,
            None => u64::MAX,
        }
    }

    fn is_stale(&self, in_flight: u32, now: Instant) -> bool {
        in_flight == 0 && now.since(self.chosen) >= STALE
    }

    fn choose(&mut self, is_stale: bool, now: Instant) {
        self.renews |= is_stale;
        self.chosen = now;
    }
}

/// Chooses by history: the context's own, as are the counts of `shard`.
pub(super) fn by_history(
    usable: &List,
    turn: &mut usize,
    histories: &mut [History; PATHS_MAX],
    shard: &Shard,
    now: Instant,
) -> usize {
    let count = usable.len();
    let first = if *turn + 1 >= count { 0 } else { *turn + 1 };
    let (mut best, mut least) = (first, u64::MAX);
    for step in 0..count {
        let at = if first + step >= count {
            first + step - count
        } else {
            first + step
        };
        let path = usable.get(at);
        let in_flight = shard.paths[path].in_flight();
        if histories[path].is_stale(in_flight, now) {
            histories[path].choose(true, now);
            return path;
        }
        let cost = histories[path].cost(in_flight);
        if cost < least {
            (best, least) = (at, cost);
        }
    }
    *turn = best;
    let path = usable.get(best);
    histories[path].choose(false, now);
    path
}

/// Chance for the choice of two: reproducible, and good enough for that (xorshift; Marsaglia, 2003).
#[derive(Clone, Copy, Debug)]
pub(super) struct Dice(u32);

impl Dice {
    pub(super) fn new(hctx: HctxId) -> Self {
        Self(0x9e37_79b9 ^ (u32::from(hctx.0) + 1))
    }

    fn below(&mut self, limit: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 17;
        self.0 ^= self.0 << 5;
        ((u64::from(self.0) * u64::from(limit)) >> 32) as u32
    }
}

/// Most lines of counts that a choice by load reads before it compares two paths only.
const LINES_MAX: usize = 32;
const SCALE: u64 = 16;
/// A path that was not chosen for so long is tried.
const STALE: Nanos = Nanos::from_millis(250);

#[cfg(test)]
mod tests {
    use super::*;

    fn list(count: usize) -> List {
        let mut list = List::default();
        (0..count).for_each(|path| list.push(path));
        list
    }

    #[test]
    fn the_least_loaded_is_chosen_and_ties_rotate() {
        let shards = [Arc::new(Shard::new()), Arc::new(Shard::new())];
        let (mut turn, mut dice) = (0, Dice::new(HctxId(0)));
        let mut choose = |shards: &[Arc<Shard>]| {
            let load = |shard: &Shard, path: usize| shard.paths[path].in_flight().into();
            least_loaded(
                &list(3),
                &mut turn,
                &mut dice,
                shards,
                load,
                |a, b| a.1 < b.1,
                true,
            )
        };
        let rotated: Vec<usize> = (0..4).map(|_| choose(&shards)).collect();
        assert_eq!(rotated, [1, 2, 0, 1]);
        shards[0].paths[1].start(1);
        shards[1].paths[2].start(1);
        assert_eq!([choose(&shards), choose(&shards), choose(&shards)], [0, 0, 0]);
    }

    #[test]
    fn among_many_contexts_two_paths_are_compared_and_the_idle_one_gets_most() {
        let shards: Vec<_> = (0..64).map(|_| Arc::new(Shard::new())).collect();
        for (path, shard) in shards.iter().take(7).enumerate() {
            shard.paths[path].start(1);
        }
        let (mut turn, mut dice) = (0, Dice::new(HctxId(3)));
        let mut chosen = [0; 8];
        for _ in 0..8000 {
            let load = |shard: &Shard, path: usize| shard.paths[path].in_flight().into();
            chosen[least_loaded(
                &list(8),
                &mut turn,
                &mut dice,
                &shards,
                load,
                |a, b| a.1 < b.1,
                true,
            )] += 1;
        }
        // Whichever other path is compared, it is drawn once in seven; and it is never left while it is the first.
        assert!(
            chosen[7] > 1000 && chosen[7] > *chosen[..7].iter().max().unwrap(),
            "{chosen:?}"
        );
    }

    #[test]
    fn an_old_average_gives_way_to_the_first_new_time() {
        let mut history = History::default();
        let mut now = Instant(0);
        for _ in 0..50 {
            let start = now;
            now = now + Nanos::from_micros(800);
            history.ended(start, 1, now);
        }
        assert_eq!(history.average, Some(800_000 * SCALE));
        history.choose(true, now + STALE);
        let end = now + STALE + Nanos::from_micros(20);
        assert_eq!(history.ended(now + STALE, 1, end), Nanos::from_micros(20));
    }

    #[test]
    fn requests_served_side_by_side_share_the_time() {
        let mut history = History::default();
        assert_eq!(history.ended(Instant(0), 8, Instant(800)), Nanos(100));
        assert_eq!(history.ended(Instant(100), 8, Instant(1600)), Nanos(100));
    }
}
