//! The choice of a path for the next request: a path of cost zero in its turn, or otherwise the path of
//! least cost. `selector` names the ways; `history` records past times of one path; `hctx` calls it.
//!
//! The cost of a path is computed when it may have changed, not for each request: once per batch (all
//! requests that are issued at one time) from what the other contexts have in flight, and when a request of
//! this context stays with its path. On drives that end requests at once all paths have cost zero, and then
//! the turn decides whatever the selector.

use std::sync::Arc;

use crate::ids::HctxId;
use crate::time::{Instant, Nanos};

use super::PATHS_MAX;
use super::history::History;
use super::selector::Way;
use super::shard::Shard;
use super::shared::{List, View};

/// How one hardware context chooses a path.
pub(super) struct Choice {
    /// The path that is next if its cost is zero.
    turn: u8,
    /// A cost that no other path can be below; [`BEATABLE`] if all have to be compared.
    unbeaten: u64,
    /// The time of the batch for which the costs were computed.
    batch: Instant,
    paths: [Known; PATHS_MAX],
    way: Way,
    /// Summing all contexts' counts for each path would read too many cache lines.
    is_wide: bool,
    usable: List,
    hctx: HctxId,
    dice: Dice,
    shard: Arc<Shard>,
    /// The shards of all contexts, including this one's.
    shards: Vec<Arc<Shard>>,
}

/// The state of one path: a cache line.
#[derive(Clone, Copy, Default)]
#[repr(align(64))]
struct Known {
    /// Its load before one more request: in requests, bytes or time, as the selector counts.
    cost: u64,
    /// The usable path after this one.
    next: u8,
    /// Requests of this batch that ended while they were issued.
    ended: u32,
    /// Relative throughput, if the selector uses it.
    speed: u32,
    history: History,
}

impl Choice {
    pub(super) fn new(hctx: HctxId, shard: Arc<Shard>) -> Self {
        Self {
            turn: hctx.index() as u8 % PATHS_MAX as u8,
            unbeaten: BEATABLE,
            batch: NEVER,
            paths: [Known::default(); PATHS_MAX],
            way: Way::None,
            is_wide: false,
            usable: List::default(),
            hctx,
            dice: Dice::new(hctx),
            shard,
            shards: Vec::new(),
        }
    }

    /// Adapts to a change of the table, or of the paths that can be used here. With `detours` no path has a
    /// turn: requests go elsewhere first.
    pub(super) fn learn<'a>(
        &mut self,
        view: &View,
        usable: &List,
        shards: impl Iterator<Item = &'a Arc<Shard>>,
        detours: bool,
    ) {
        self.end_batch();
        self.shards.clear();
        self.shards.extend(shards.cloned());
        self.usable = *usable;
        self.way = view.way(usable, self.hctx);
        for (path, known) in self.paths.iter_mut().enumerate() {
            (known.cost, known.ended, known.speed) = (0, 0, 1);
            if self.way == Way::ServiceTime {
                known.speed = view.throughputs[path];
            }
        }
        let count = usable.len();
        for at in 0..count {
            let next = usable.get(if at + 1 == count { 0 } else { at + 1 });
            self.paths[usable.get(at)].next = next as u8;
        }
        if let Way::Pinned(path) = self.way {
            self.paths[usize::from(path)].next = path;
        }
        let mut speeds = usable.iter().map(|path| self.paths[path].speed);
        let first = speeds.next();
        let are_even = first > Some(0) && speeds.all(|speed| Some(speed) == first);
        self.is_wide = self.counts_all() && count * self.shards.len() > LINES_MAX;
        let has_best = are_even && !self.is_wide && !detours && self.way != Way::None;
        self.unbeaten = if has_best { 0 } else { BEATABLE };
        self.turn = self.first_turn();
    }

    /// Drops the state of a path: another path has its number now.
    pub(super) fn adopt(&mut self, path: usize) {
        self.paths[path] = Known::default();
    }

    /// The path in its turn, if none can be better; otherwise call [`Choice::compare`].
    #[inline(always)]
    pub(super) fn turn(&mut self, now: Instant) -> Option<usize> {
        let path = usize::from(self.turn) % PATHS_MAX;
        let known = &self.paths[path];
        let is_best = self.batch == now && known.cost == self.unbeaten;
        if is_best {
            self.turn = known.next;
        }
        is_best.then_some(path)
    }

    /// Notes that a request ended while it was issued.
    #[inline(always)]
    pub(super) fn ended_at_once(&mut self, path: usize) {
        let known = &mut self.paths[path % PATHS_MAX];
        known.ended = known.ended.wrapping_add(1);
    }

    /// Notes that a request stays with its path, which has counted it.
    pub(super) fn started(&mut self, path: usize, now: Instant) {
        self.paths[path].history.choose(false, now);
        self.weigh(path);
    }

    /// Call it before paths report requests, or when a request is no longer with its path: the costs of paths
    /// have changed.
    pub(super) fn end_batch(&mut self) {
        if self.way == Way::History {
            self.take_ended();
        }
        self.batch = NEVER;
    }

    /// Notes that `count` requests of a path, the first started at `start`, were reported together. Returns
    /// the time that one takes now.
    pub(super) fn ended(&mut self, path: usize, start: Instant, count: u64, now: Instant) -> Nanos {
        self.paths[path].history.ended(start, count, now)
    }

    /// Chooses one of all paths for a request of `bytes` bytes; none if there is no path. Used for the first
    /// request of a batch, and for every request while paths have a cost.
    pub(super) fn compare(&mut self, bytes: u64, now: Instant) -> Option<usize> {
        let path = if self.batch == now {
            None
        } else {
            self.begin_batch(now)
        };
        let path = match (path, self.way) {
            (Some(path), _) => path,
            (None, Way::None) => return None,
            (None, Way::RoundRobin | Way::Pinned(_)) => usize::from(self.turn) % PATHS_MAX,
            (None, Way::ServiceTime) => self.least(bytes),
            (None, Way::QueueLength | Way::History) => self.least(0),
        };
        self.turn = self.paths[path].next;
        Some(path)
    }

    /// Computes the costs of all paths. Returns a path that must be tried because too little is known of it.
    fn begin_batch(&mut self, now: Instant) -> Option<usize> {
        self.end_batch();
        self.batch = now;
        if self.way == Way::History || (self.counts_all() && !self.is_wide) {
            let usable = self.usable;
            usable.iter().for_each(|path| self.weigh(path));
        }
        self.stale(now)
    }

    /// The path with the least cost; of equals the first in turn: it was not used for longest, so its
    /// requests are nearest to their ends.
    ///
    /// If summing the counts would read too many cache lines, two paths are compared instead of all: the
    /// better of two drawn at random is nearly as good as the best (Mitzenmacher, "The power of two choices
    /// in randomized load balancing", 1996).
    fn least(&mut self, bytes: u64) -> usize {
        let first = usize::from(self.turn) % PATHS_MAX;
        if self.is_wide {
            let others = self.usable.len() as u32 - 1;
            let steps = self.dice.below(others);
            let mut other = self.after(first);
            (0..steps).for_each(|_| other = self.after(other));
            self.weigh(first);
            self.weigh(other);
            return if self.is_less(other, first, bytes) {
                other
            } else {
                first
            };
        }
        let (mut best, mut at) = (first, self.after(first));
        while at != first {
            if self.is_less(at, best, bytes) {
                best = at;
            }
            at = self.after(at);
        }
        best
    }

    /// Compares the costs of two paths with one more request: a / x < b / y, without a division. A throughput
    /// of 0 means an infinite cost.
    fn is_less(&self, one: usize, other: usize, bytes: u64) -> bool {
        let (one, other) = (&self.paths[one], &self.paths[other]);
        let of = |cost: u64, speed: u32| cost.saturating_add(bytes).saturating_mul(speed.into());
        of(one.cost, other.speed) < of(other.cost, one.speed)
    }

    fn after(&self, path: usize) -> usize {
        usize::from(self.paths[path].next) % PATHS_MAX
    }

    /// Computes the cost of a path.
    fn weigh(&mut self, path: usize) {
        let sum = |of: fn(&Shard, usize) -> u64| self.shards.iter().map(|shard| of(shard, path)).sum();
        let cost: u64 = match self.way {
            Way::QueueLength => sum(|shard, path| shard.paths[path].in_flight().into()),
            Way::ServiceTime => sum(|shard, path| shard.paths[path].in_flight_bytes()),
            Way::History => self.paths[path].history.cost(self.shard.paths[path].in_flight()),
            Way::RoundRobin | Way::Pinned(_) | Way::None => 0,
        };
        self.paths[path].cost = cost.min(BEATABLE - 1);
    }

    /// Chooses a path that was not used for long and has nothing in flight.
    fn stale(&mut self, now: Instant) -> Option<usize> {
        if self.way != Way::History {
            return None;
        }
        let is_stale = |path: &usize| {
            let in_flight = self.shard.paths[*path].in_flight();
            self.paths[*path].history.is_stale(in_flight, now)
        };
        let path = self.usable.iter().find(is_stale)?;
        self.paths[path].history.choose(true, now);
        Some(path)
    }

    /// Reports requests that ended while they were issued to the histories.
    fn take_ended(&mut self) {
        let usable = self.usable;
        for path in usable.iter() {
            let known = &mut self.paths[path];
            let count = std::mem::take(&mut known.ended);
            if count > 0 {
                known.history.choose(false, self.batch);
                known.history.ended(self.batch, count.into(), self.batch);
            }
        }
    }

    /// Says whether the counts of all contexts are used.
    fn counts_all(&self) -> bool {
        matches!(self.way, Way::QueueLength | Way::ServiceTime)
    }

    /// The path to begin with: the path in turn, or the next one that is usable.
    fn first_turn(&self) -> u8 {
        if let Way::Pinned(path) = self.way {
            return path;
        }
        let from = usize::from(self.turn);
        let later = self.usable.iter().find(|path| *path >= from);
        later.or(self.usable.iter().next()).unwrap_or(0) as u8
    }
}

/// Random numbers for the choice of two: reproducible, and good enough for that (xorshift; Marsaglia, 2003).
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

/// The time of no batch.
const NEVER: Instant = Instant(u64::MAX);
/// The cost of no path.
const BEATABLE: u64 = u64::MAX;
/// Largest number of cache lines of counts read per batch; above it, only two paths are compared, for each request.
const LINES_MAX: usize = 32;

#[cfg(test)]
mod tests {
    use super::super::Selector;
    use super::*;

    /// A table with a path of each throughput.
    fn view(selector: Selector, throughputs: &[u32]) -> View {
        let mut view = View::new();
        view.selector = selector;
        for (path, throughput) in throughputs.iter().enumerate() {
            view.members.push(path);
            view.usable.push(path);
            view.throughputs[path] = *throughput;
        }
        view
    }

    /// A choice of context 0 among such paths, with these contexts' counts.
    fn choice(selector: Selector, throughputs: &[u32], shards: &[Arc<Shard>]) -> Choice {
        let view = view(selector, throughputs);
        let mut choice = Choice::new(HctxId(0), Arc::clone(&shards[0]));
        choice.learn(&view, &view.usable, shards.iter(), false);
        choice
    }

    fn shards(count: usize) -> Vec<Arc<Shard>> {
        (0..count).map(|_| Arc::new(Shard::new())).collect()
    }

    impl Choice {
        fn choose(&mut self, bytes: u64, now: Instant) -> Option<usize> {
            self.turn(now).or_else(|| self.compare(bytes, now))
        }
    }

    /// Chooses and has the request stay with the path.
    fn start(choice: &mut Choice, bytes: u64, now: Instant) -> usize {
        let path = choice.choose(bytes, now).unwrap();
        choice.shard.paths[path].start(bytes);
        choice.started(path, now);
        path
    }

    #[test]
    fn idle_paths_take_turns_whatever_the_selector() {
        for selector in Selector::ALL {
            let mut choice = choice(selector, &[1, 1, 1], &shards(2));
            for round in 0..3 {
                let now = Instant(round);
                let mut chosen = [0; 3];
                for _ in 0..9 {
                    let path = choice.choose(4096, now).unwrap();
                    choice.ended_at_once(path);
                    chosen[path] += 1;
                }
                let want = if selector == Selector::IoAffinity {
                    [9, 0, 0]
                } else {
                    [3; 3]
                };
                assert_eq!(chosen, want, "{selector}");
            }
        }
    }

    #[test]
    fn least_loaded_is_chosen_and_ties_rotate() {
        let shards = shards(2);
        let mut choice = choice(Selector::QueueLength, &[1, 1, 1], &shards);
        let rotated: Vec<usize> = (0..4).map(|_| choice.choose(1, Instant(0)).unwrap()).collect();
        assert_eq!(rotated, [0, 1, 2, 0]);
        assert_eq!(start(&mut choice, 1, Instant(0)), 1);
        shards[1].paths[2].start(1);
        // The other context's request is seen in the next batch.
        let chosen: Vec<usize> = (0..3).map(|_| choice.choose(1, Instant(1)).unwrap()).collect();
        assert_eq!(chosen, [0, 0, 0]);
        let spread: Vec<usize> = (0..3).map(|_| start(&mut choice, 1, Instant(1))).collect();
        assert_eq!(spread, [0, 1, 2]);
    }

    #[test]
    fn nobody_has_a_turn_while_requests_go_elsewhere_first() {
        for selector in Selector::ALL {
            let shards = shards(1);
            let mut choice = choice(selector, &[1, 1], &shards);
            let (view, usable) = (view(selector, &[1, 1]), choice.usable);
            choice.learn(&view, &usable, shards.iter(), true);
            // Without a history, a second request on a path has an unknown, high cost.
            for _ in 0..3 {
                let path = choice.compare(4096, Instant(0)).unwrap();
                shards[0].paths[path].start(4096);
                choice.started(path, Instant(0));
                assert_eq!(choice.turn(Instant(0)), None, "{selector}");
            }
        }
    }

    #[test]
    fn ended_request_counts_no_more_within_the_same_batch() {
        let shards = shards(1);
        let mut choice = choice(Selector::QueueLength, &[1, 1], &shards);
        assert_eq!(start(&mut choice, 1, Instant(0)), 0);
        assert_eq!(start(&mut choice, 1, Instant(0)), 1);
        shards[0].paths[1].end(1);
        choice.end_batch();
        assert_eq!(choice.choose(1, Instant(0)), Some(1));
    }

    #[test]
    fn path_of_twice_the_throughput_gets_twice_the_bytes() {
        let mut choice = choice(Selector::ServiceTime, &[1, 2], &shards(1));
        let mut chosen = [0; 2];
        (0..30).for_each(|_| chosen[start(&mut choice, 4096, Instant(0))] += 1);
        assert_eq!(chosen, [10, 20]);
    }

    #[test]
    fn among_many_contexts_two_paths_are_compared_and_the_idle_one_gets_most() {
        let shards = shards(64);
        for (path, shard) in shards.iter().take(7).enumerate() {
            shard.paths[path].start(1);
        }
        let mut choice = choice(Selector::QueueLength, &[1; 8], &shards);
        let mut chosen = [0; 8];
        for _ in 0..8000 {
            chosen[choice.choose(1, Instant(0)).unwrap()] += 1;
        }
        // Whichever other path is compared, it is drawn once in seven; and it is never left while
        // it is the first.
        assert!(
            chosen[7] > 1000 && chosen[7] > *chosen[..7].iter().max().unwrap(),
            "{chosen:?}"
        );
    }

    #[test]
    fn path_that_is_slow_by_its_history_gets_one_request_each_quarter_of_a_second() {
        let shards = shards(1);
        let mut choice = choice(Selector::HistoricalServiceTime, &[1, 1], &shards);
        let mut now = Instant(1);
        for path in 0..2 {
            choice.ended(path, now, 1, now + Nanos::from_micros(1 + 999 * path as u64));
        }
        now = now + Nanos::from_millis(2);
        let mut chosen = [0; 2];
        for _ in 0..1000 {
            now = now + Nanos::from_millis(1);
            let path = start(&mut choice, 4096, now);
            chosen[path] += 1;
            shards[0].paths[path].end(4096);
            choice.end_batch();
            choice.ended(path, now, 1, now + Nanos::from_micros(1 + 999 * path as u64));
        }
        assert!((3..=5).contains(&chosen[1]), "{chosen:?}");
    }
}
