//! Requests that hang beside tenants that have none: what `slow` asserts of `bfq` on the drive of `fair`. No
//! request of the others waits beyond its bound while the drive has room and its group is within its due.
//!
//! The bounds are those of the table "What waits, and for how long" in `docs/architecture.md`. A tenant's requests
//! hang one at a time or all of them, and no unit of the drive with them, so there is always room: the others' longest
//! time without an end is their longest wait. What they have beside a neighbour whose requests do not hang is their due.

use std::fmt::{self, Write};
use std::num::NonZero;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use blkmq_core::bio::Op;
use blkmq_core::ids::GroupId;
use blkmq_core::sched;
use blkmq_core::time::{Instant, Nanos};

use super::{Case, SECOND, Slow, World, shares};

/// Its name on the command line.
pub const NAME: &str = "slow";
/// A summary, for the command line.
pub const ABOUT: &str =
    "asserts what a tenant's requests that hang cost 1 to 8 others: 1596 cases, ten minutes; a table";

/// A tenant with requests that hang, beside others.
#[derive(Clone, Copy, Debug)]
pub(super) struct SlowCase {
    pub(super) takes: Nanos,
    /// Each of its requests hangs, not just one now and then.
    pub(super) all_hang: bool,
    /// What the slow tenant does; the others read and write in turn.
    pub(super) op: Op,
    /// Bios that each tenant keeps under way.
    pub(super) depth: u32,
    /// The queue's `depth=`; 0 for the default.
    pub(super) queue_depth: u32,
    /// How many tenants are slow, and the clients of each tenant.
    pub(super) slow: u32,
    pub(super) clients: u32,
    pub(super) others: u32,
    /// The slow tenant's weight, and that of each other.
    pub(super) weights: [u16; 2],
}

/// What the others had.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cost {
    /// The longest time without an end of any of them.
    wait: Nanos,
    /// What the one with the least had, in percent of what it has beside a neighbour whose requests do not hang: one
    /// that is idle, if all of its requests hang.
    percent: u64,
    percent_min: u64,
    wait_max: Nanos,
}

impl SlowCase {
    /// Runs the case.
    pub(super) fn cost(&self, seed: u64) -> Cost {
        let (least, _) = self.run(None, SECOND, seed);
        let slow = Slow {
            groups: self.slow as usize,
            period: match self.all_hang {
                true => Nanos::ZERO,
                false => Nanos(self.takes.0.saturating_mul(5) / 4),
            },
            takes: self.takes,
            next: Instant(0),
        };
        // Until hangs and the time after them were seen; of those that never end, some seconds.
        let time = match self.takes {
            NEVER => 2 * SECOND,
            takes => SECOND.max(takes.0 * 5 / 2).min(takes.0 + 3 * SECOND),
        };
        let (beside, wait) = self.run(Some(slow), time, seed);
        let percent = beside * 100 / least.max(1);
        Cost {
            wait,
            percent,
            percent_min: self.percent_min(),
            // Those of many tenants that end at once are all within their due then, and hang one after the other.
            wait_max: if self.slow > 1 { WAIT_MAX_OF_MANY } else { WAIT_MAX },
        }
    }

    /// Before requests are known to hang, as many are out as keep the drive busy: a depth of hardly more has no room
    /// for as many of others.
    fn percent_min(&self) -> u64 {
        match self.queue_depth {
            1..=UNITS_TWICE => PERCENT_MIN / 4,
            // By weight: the requests of so many end, 25,600 a second, and each other has what one of them has.
            1.. if self.slow > 1 && self.clients > 1 && self.takes < Nanos::from_secs(1) => 1,
            // What many tenants leave of the depth is less than the others would use.
            1.. if self.slow > 1 => PERCENT_MIN / 4,
            _ => PERCENT_MIN,
        }
    }

    /// Returns the fewest bytes a second of any of the others, and the longest wait.
    fn run(&self, slow: Option<Slow>, time: u64, seed: u64) -> (u64, Nanos) {
        let groups = self.others + self.slow;
        let case = Case {
            weights: [self.weights[1]; 3],
            clients: self.clients,
            ..shares(UNITS, groups, self.depth, [4096; 2])
        };
        let mut world = World::new(case, sched::BFQ, seed);
        let queue = world.queue.queue().clone();
        for group in (1..=self.slow).map(GroupId) {
            let is_set = queue.set_group_weight(group, self.weights[0]);
            is_set.expect("nobody is inside the gate").expect("it exists");
        }
        if self.queue_depth > 0 {
            queue.set_depth(self.queue_depth).expect("less than the default");
        }
        world.light_due = None;
        world.only = Some((1..self.slow as usize + 1, self.op));
        let is_idle = slow.is_none() && (self.all_hang || self.depth == 1);
        world.silent = if is_idle { self.slow as usize } else { 0 };
        world.run_until(Instant(WARM));
        world.clock.borrow_mut().slow = slow;
        let others = self.slow as usize..groups as usize;
        let before = world.totals();
        for (_, longest) in &mut world.gaps[others.clone()] {
            *longest = Nanos::ZERO;
        }
        let end = Instant(WARM + time);
        world.run_until(end);
        let moved = others.clone().map(|place| world.bytes[place] - before[place]);
        let least = u128::from(moved.min().unwrap_or(0)) * u128::from(SECOND) / u128::from(time);
        let gaps = &world.gaps[others];
        let longest = gaps
            .iter()
            .map(|(ended, longest)| end.since(*ended).max(*longest));
        (least as u64, longest.max().unwrap_or(Nanos::ZERO))
    }
}

impl Cost {
    /// Says whether the others had what they are promised.
    pub(super) fn is_right(&self) -> bool {
        self.wait <= self.wait_max && self.percent >= self.percent_min
    }
}

impl fmt::Display for SlowCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [slow, other] = self.weights;
        let takes = match self.takes {
            NEVER => "never".to_owned(),
            takes => takes.to_string(),
        };
        let op = format!("{:?}", self.op);
        let all = if self.all_hang { "all " } else { "" };
        write!(
            f,
            "{all}{takes:>6} {op:<11} depth {:>2}, {} others, weights {slow}:{other}",
            self.depth, self.others
        )?;
        if (self.slow, self.clients) != (1, 1) {
            write!(f, ", {} slow, {} clients each", self.slow, self.clients)?;
        }
        match self.queue_depth {
            0 => Ok(()),
            depth => write!(f, ", depth={depth}"),
        }
    }
}

/// Every combination.
pub(super) fn cases() -> impl Iterator<Item = SlowCase> {
    let tenants = |(takes, op, all_hang)| {
        let depths = [1, 4, 16, 64].into_iter();
        depths.flat_map(move |depth| {
            let others = [1, 2, 8].into_iter();
            others.flat_map(move |others| {
                [[100, 100], [1000, 100], [100, 1000]].map(|weights| SlowCase {
                    takes,
                    all_hang,
                    op,
                    depth,
                    queue_depth: 0,
                    slow: 1,
                    clients: 1,
                    others,
                    weights,
                })
            })
        })
    };
    let of_small_queue = |case: SlowCase| {
        let is_one = case.all_hang && case.depth == 64 && case.op == Op::Read;
        // Depth, slow tenants, clients of each.
        let queues: &[(u32, u32, u32)] = match (is_one, case.weights) {
            (false, _) => &[],
            (_, [100, 100]) => &[
                (8, 1, 1),
                (16, 1, 1),
                (32, 1, 1),
                (64, 1, 64),
                (64, 16, 1),
                (256, 16, 16),
                (16, 1, 2),
            ],
            _ => &[(8, 1, 1), (16, 1, 1), (32, 1, 1)],
        };
        let queues = queues.iter();
        queues.map(move |&(queue_depth, slow, clients)| SlowCase {
            queue_depth,
            slow,
            clients,
            ..case
        })
    };
    let takes = [
        Nanos::from_millis(10),
        Nanos::from_secs(1),
        Nanos::from_secs(30),
        NEVER,
    ];
    let requests = |all_hang| {
        let takes = takes.into_iter();
        takes.flat_map(move |takes| OPS.map(|op| (takes, op, all_hang)))
    };
    let usual = || requests(false).chain(requests(true)).flat_map(tenants);
    usual().chain(usual().flat_map(of_small_queue))
}

/// Runs every case, as many at a time as there are processors. `begun` is told how many have begun, and of how many.
///
/// # Errors
/// The table, if the others lack something in any case.
pub fn table(seed: u64, begun: impl Fn(usize, usize) + Sync) -> Result<String, String> {
    let (mut table, mut wrong) = (String::new(), 0);
    let (mut wait, mut percent) = (Nanos::ZERO, u64::MAX);
    for (case, cost) in costs(seed, begun) {
        (wait, percent) = (wait.max(cost.wait), percent.min(cost.percent));
        if !cost.is_right() {
            wrong += 1;
            let _ = writeln!(table, "{case}: {}, {} %", cost.wait, cost.percent);
        }
    }
    let _ = writeln!(
        table,
        "seed {seed}: {wrong} cases beyond {WAIT_MAX} or below {PERCENT_MIN} %; \
         longest wait {wait}, least part {percent} %"
    );
    if wrong > 0 { Err(table) } else { Ok(table) }
}

/// The cost in every case, in their order.
fn costs(seed: u64, begun: impl Fn(usize, usize) + Sync) -> Vec<(SlowCase, Cost)> {
    let cases: Vec<SlowCase> = cases().collect();
    let costs: Vec<OnceLock<Cost>> = cases.iter().map(|_| OnceLock::new()).collect();
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let threads = std::thread::available_parallelism().map_or(1, NonZero::get);
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let place = next.fetch_add(1, Ordering::Relaxed);
                    let Some(case) = cases.get(place) else { return };
                    begun(place + 1, cases.len());
                    costs[place].get_or_init(|| case.cost(seed));
                }
            });
        }
    });
    let costs = costs.into_iter().filter_map(OnceLock::into_inner);
    cases.into_iter().zip(costs).collect()
}

const OPS: [Op; 5] = [Op::Read, Op::Write, Op::Flush, Op::Discard, Op::WriteZeroes];
/// Longer than any run.
pub(super) const NEVER: Nanos = Nanos::from_secs(100_000);
/// Time before the first request hangs.
const WARM: u64 = SECOND / 2;
/// The longest of the table's bounds: a probe that drains the drive.
const WAIT_MAX: Nanos = Nanos::from_millis(50);
const WAIT_MAX_OF_MANY: Nanos = Nanos::from_millis(250);
const PERCENT_MIN: u64 = 80;
/// Requests that the drive serves at a time.
const UNITS: u32 = 4;
const UNITS_TWICE: u32 = 2 * UNITS;

#[cfg(test)]
mod tests {
    use super::*;

    /// The short form of `blkmq-lab sim --scenario slow`: some of the cases, none of which lasts long.
    fn short(is_meant: impl Fn(&SlowCase) -> bool) {
        let is_short = |case: &SlowCase| case.takes != Nanos::from_secs(30) && is_meant(case);
        let cases: Vec<_> = cases().filter(is_short).step_by(23).collect();
        assert!(cases.len() >= 3, "{} cases", cases.len());
        for case in cases {
            let cost = case.cost(1);
            assert!(cost.is_right(), "{case}: {cost:?}");
        }
    }

    /// Each turn of theirs takes a place for as long; and all of them have one as often as the one that goes on.
    #[test]
    fn many_tenants_whose_requests_end_and_hang_again_leave_room() {
        for (clients, queue_depth, others) in [(1, 64, 1), (16, 256, 1), (16, 256, 8)] {
            let case = SlowCase {
                takes: Nanos::from_secs(1),
                all_hang: true,
                op: Op::Read,
                depth: 64,
                queue_depth,
                slow: 16,
                clients,
                others,
                weights: [100, 100],
            };
            let cost = case.cost(1);
            assert!(cost.is_right() && cost.percent >= 50, "{case}: {cost:?}");
        }
    }

    fn moves_no_data(case: &SlowCase) -> bool {
        matches!(case.op, Op::Discard | Op::WriteZeroes)
    }

    #[test]
    fn slow_requests_make_nobody_else_wait() {
        short(|case| case.queue_depth == 0 && !moves_no_data(case));
    }

    #[test]
    fn slow_discards_make_nobody_else_wait() {
        short(moves_no_data);
    }

    #[test]
    fn slow_requests_leave_room_in_a_queue_of_small_depth() {
        short(|case| case.queue_depth > 0);
    }
}
