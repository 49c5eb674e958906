//! Tests of caps: rates over windows, bursts, ancestors, changes while requests wait.

use proptest::prelude::*;

use super::*;
use crate::bio::{Bio, Op};
use crate::group::{Cap, CapKind, ROOT, WEIGHT_DEFAULT};
use crate::ids::ReactorId;
use crate::time::Nanos;

/// A throttle with clients that always have requests waiting.
struct Bench {
    tree: GroupTree,
    throttle: Throttle,
    now: Instant,
    made: u64,
    /// What has passed: when, of which group, which operation, how many bytes, by number.
    out: Vec<(Instant, GroupId, Op, u64, u64)>,
}

const ROOM: usize = 512;

impl Bench {
    fn new() -> Self {
        let tree = GroupTree::new(16);
        let throttle = Throttle::new(&tree, ROOM, &Limits::default());
        Self {
            tree,
            throttle,
            now: Instant(1_000_000_000),
            made: 0,
            out: Vec::new(),
        }
    }

    fn group(&mut self, parent: GroupId, caps: Caps) -> GroupId {
        let id = self
            .tree
            .create(parent, WEIGHT_DEFAULT)
            .expect("room for a group");
        self.cap(id, caps);
        id
    }

    fn cap(&mut self, id: GroupId, caps: Caps) {
        self.tree.set_caps(id, caps).expect("a group that lives");
        self.throttle.set_caps(id, caps, self.now);
        self.retime();
    }

    fn retime(&mut self) {
        self.throttle.retime(&self.tree);
        self.release();
    }

    fn add(&mut self, group: GroupId, op: Op, len: u64) {
        self.made += 1;
        let bio = Bio {
            op,
            group,
            len,
            cookie: self.made,
            ..Bio::default()
        };
        let mut rq = Request::for_test(ReactorId(0), bio, 0);
        rq.inserted_at = self.now;
        assert!(self.throttle.concerns(group), "group {group} is not capped");
        let Self {
            tree,
            throttle,
            now,
            out,
            ..
        } = self;
        throttle.add(rq, tree, *now, None, &mut |rq| out.push(seen(*now, &rq)));
    }

    fn release(&mut self) {
        let Self {
            tree,
            throttle,
            now,
            out,
            ..
        } = self;
        throttle.release(tree, *now, &mut |rq| out.push(seen(*now, &rq)));
    }

    /// Lets time pass until `until`, with timers that are up to `late_ns` late. What passes is replaced by the same again.
    fn run(&mut self, until: Instant, late_ns: u64) {
        while let Some(at) = self.throttle.next_due().filter(|at| *at <= until) {
            let late = self.made.wrapping_mul(0x9e37_79b9_7f4a_7c15) % (late_ns + 1);
            self.now = self.now.max(at) + Nanos(late);
            let before = self.out.len();
            self.release();
            for at in before..self.out.len() {
                let (_, group, op, len, _) = self.out[at];
                self.add(group, op, len);
            }
        }
        self.now = self.now.max(until);
        self.throttle.check_invariants();
    }

    fn passed(&self, from: Instant, to: Instant, counts: impl Fn(GroupId, Op) -> bool) -> (u64, u64) {
        let within = |at: Instant| at > from && at <= to;
        let some = self
            .out
            .iter()
            .filter(|(at, group, op, ..)| within(*at) && counts(*group, *op));
        some.fold((0, 0), |(ios, bytes), entry| (ios + 1, bytes + entry.3))
    }
}

fn seen(now: Instant, rq: &Request) -> (Instant, GroupId, Op, u64, u64) {
    (now, rq.group(), rq.op(), rq.len(), rq.bio.cookie)
}

fn caps(kind: CapKind, rate: u64) -> Caps {
    Caps::default().with(kind, rate)
}

fn with_burst(kind: CapKind, rate: u64, burst: u64) -> Caps {
    let mut caps = Caps::default();
    caps.set(kind, Some(Cap { rate, burst }));
    caps
}

const SECOND: Nanos = Nanos::from_secs(1);

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    #[test]
    fn any_window_from_10_ms_on_has_what_the_cap_allows_within_2_percent_or_one_request(
        kind in prop::sample::select(CapKind::ALL.to_vec()),
        per_second in 500_u64..60_000,
        blocks in prop::collection::vec(1_u64..32, 1..5),
        late_ns in 0_u64..180_000,
    ) {
        let largest = blocks.iter().max().expect("one at least") * 4096;
        let rate = if kind.is_bytes() { per_second * 4096 } else { per_second };
        let mut bench = Bench::new();
        let group = bench.group(ROOT, caps(kind, rate));
        let op = if kind.counts(Op::Read) { Op::Read } else { Op::Write };
        // Enough that the client is never the limit, whatever passes at one late timer.
        for at in 0..64 {
            bench.add(group, op, blocks[at % blocks.len()] * 4096);
        }
        let start = bench.now;
        bench.run(start + Nanos::from_millis(400), late_ns);
        let slack = if kind.is_bytes() { largest } else { 1 };
        for (from_ms, to_ms) in [(0, 400), (5, 15), (20, 30), (33, 45), (100, 120), (211, 261), (300, 311), (0, 10)] {
            let (ios, bytes) = bench.passed(
                start + Nanos::from_millis(from_ms),
                start + Nanos::from_millis(to_ms),
                |_, _| true,
            );
            let amount = if kind.is_bytes() { bytes } else { ios };
            // In thousandths: a due of 48.8 requests is not 48.
            let due = rate * (to_ms - from_ms);
            prop_assert!(
                (amount * 1000).abs_diff(due) <= due / 50 + slack * 1000,
                "{kind} {rate}: {amount} instead of {due} thousandths from {from_ms} to {to_ms} ms"
            );
        }
    }

    #[test]
    fn capped_child_of_a_busy_capped_parent_gets_its_cap_or_fair_part_within_2_percent(
        kinds in prop::collection::vec(prop::sample::select(vec![CapKind::Iops, CapKind::Bps, CapKind::ReadIops]), 2),
        per_second in 2_000_u64..60_000,
        others in 1_u64..7,
        percent_of_fair in 5_u64..150,
        depth in 6_usize..16,
        late_ns in 0_u64..180_000,
    ) {
        let rate = |kind: CapKind, ios: u64| if kind.is_bytes() { ios * 4096 } else { ios };
        let fair = per_second / (others + 1);
        let own = (fair * percent_of_fair / 100).max(1);
        let mut bench = Bench::new();
        let parent = bench.group(ROOT, caps(kinds[0], rate(kinds[0], per_second)));
        let child = bench.group(parent, caps(kinds[1], rate(kinds[1], own)));
        let mut groups = vec![child];
        groups.extend((0..others).map(|_| bench.group(parent, Caps::default())));
        for group in groups {
            let depth = if group == child { depth } else { 32 };
            (0..depth).for_each(|_| bench.add(group, Op::Read, 4096));
        }
        let start = bench.now;
        bench.run(start + Nanos::from_millis(500), late_ns);
        for (from_ms, to_ms) in [(20, 120), (133, 233), (211, 311), (400, 500)] {
            let within = |counts: &dyn Fn(GroupId) -> bool| bench.passed(
                start + Nanos::from_millis(from_ms),
                start + Nanos::from_millis(to_ms),
                |group, _| counts(group),
            ).0;
            let (ios, all) = (within(&|group| group == child), within(&|_| true));
            let due = own.min(fair) * (to_ms - from_ms);
            prop_assert!(
                (ios * 1000).abs_diff(due) <= due / 50 + 1000,
                "{ios} instead of {due} thousandths from {from_ms} to {to_ms} ms"
            );
            let all_due = per_second * (to_ms - from_ms);
            prop_assert!((all * 1000).abs_diff(all_due) <= all_due / 50 + 1000, "{all} of {all_due} thousandths in all");
        }
    }

    #[test]
    fn everything_comes_out_once_and_each_direction_of_a_group_in_order(
        steps in prop::collection::vec((0_u8..8, 0_usize..6, 0_u64..300_007), 1..300),
    ) {
        let mut bench = Bench::new();
        let mut groups = vec![bench.group(ROOT, caps(CapKind::Iops, 2000))];
        for at in 0..5 {
            let parent = groups[at / 2];
            groups.push(bench.group(parent, caps(CapKind::ALL[at], 3 << 20)));
        }
        for (what, which, amount) in steps {
            let group = groups[which];
            match what {
                0..=3 if bench.throttle.held_back() < ROOM => {
                    let op = [Op::Read, Op::Write, Op::Discard, Op::Read][usize::from(what)];
                    bench.add(group, op, 4096 * (1 + amount % 8));
                }
                4 => bench.cap(group, caps(CapKind::ALL[which], (1 << 20) + amount)),
                5 if which > 0 => {
                    let parent = groups[amount as usize % groups.len()];
                    let _ = bench.tree.move_to(group, parent);
                    bench.retime();
                }
                6 => bench.cap(group, with_burst(CapKind::ReadIops, 1 + amount / 1000, 8)),
                _ => {
                    bench.now = bench.now + Nanos(amount);
                    bench.release();
                }
            }
            bench.throttle.check_invariants();
        }
        let Bench { tree, throttle, now, out, made, .. } = &mut bench;
        throttle.release_all(tree, *now, &mut |rq| out.push(seen(*now, &rq)));
        throttle.check_invariants();
        prop_assert!(throttle.is_empty() && throttle.next_due().is_none());
        let mut numbers: Vec<u64> = out.iter().map(|entry| entry.4).collect();
        for group in groups {
            for reads in [true, false] {
                let line = out.iter().filter(|entry| entry.1 == group && (entry.2 == Op::Read) == reads);
                prop_assert!(line.map(|entry| entry.4).is_sorted(), "order in group {group}");
            }
        }
        numbers.sort_unstable();
        prop_assert_eq!(numbers, (1..=*made).collect::<Vec<_>>());
    }
}

#[test]
fn rounding_does_not_add_up() {
    // 0.26 ns would be lost with each request, 23 requests in a second.
    let mut bench = Bench::new();
    let group = bench.group(ROOT, caps(CapKind::Iops, 300_007));
    bench.add(group, Op::Read, 4096);
    bench.add(group, Op::Read, 4096);
    let start = bench.now;
    bench.run(start + SECOND, 0);
    let (ios, _) = bench.passed(start, start + SECOND, |_, _| true);
    assert!(ios.abs_diff(300_007) <= 1, "{ios} I/Os in a second");
}

#[test]
fn after_a_pause_a_burst_passes_at_once_and_is_earned_again() {
    let mut bench = Bench::new();
    let group = bench.group(ROOT, with_burst(CapKind::Iops, 100, 20));
    for round in 1..=2 {
        for _ in 0..40 {
            bench.add(group, Op::Write, 4096);
        }
        // One more than the burst: the first needs no credit.
        assert_eq!(bench.out.len(), round * 21 + (round - 1) * 19);
        for _ in 0..19 {
            let at = bench.throttle.next_due().expect("something waits");
            bench.now = at;
            bench.release();
        }
        assert!(bench.throttle.is_empty());
        bench.now = bench.now + SECOND;
    }
}

#[test]
fn request_larger_than_the_burst_passes_and_the_next_one_pays() {
    let mut bench = Bench::new();
    let group = bench.group(ROOT, with_burst(CapKind::Bps, 1 << 20, 4096));
    bench.add(group, Op::Read, 1 << 20);
    bench.add(group, Op::Read, 4096);
    assert_eq!(bench.out.len(), 1);
    let waits = bench.throttle.next_due().expect("it waits").since(bench.now);
    assert_eq!(waits + Nanos(1_000_000_000 / 256), SECOND);
}

#[test]
fn cap_bounds_the_sum_of_what_is_below_it_and_they_take_turns() {
    let mut bench = Bench::new();
    let top = bench.group(ROOT, caps(CapKind::Iops, 9000));
    let a = bench.group(top, Caps::default());
    let b = bench.group(a, Caps::default());
    let slow = bench.group(top, caps(CapKind::ReadIops, 1000));
    for group in [a, b, slow, top] {
        (0..8).for_each(|_| bench.add(group, Op::Read, 4096));
    }
    let start = bench.now;
    bench.run(start + SECOND, 100_000);
    let of = |group| bench.passed(start, start + SECOND, |g, _| g == group).0;
    assert!(of(slow).abs_diff(1000) <= 20, "{} of the slow child", of(slow));
    for group in [a, b, top] {
        assert!(
            of(group).abs_diff(8000 / 3) <= 54,
            "{} of group {group}",
            of(group)
        );
    }
    let all = bench.passed(start, start + SECOND, |_, _| true).0;
    assert!(all.abs_diff(9000) <= 180, "{all} in all");
}

#[test]
fn reads_do_not_wait_for_a_cap_on_writes_and_a_common_one_starves_neither() {
    let mut bench = Bench::new();
    let group = bench.group(ROOT, caps(CapKind::WriteIops, 1));
    bench.add(group, Op::Write, 4096);
    bench.add(group, Op::Write, 4096);
    bench.add(group, Op::Read, 4096);
    assert_eq!(bench.out.len(), 2, "the second write waits alone");
    let both = bench.group(ROOT, caps(CapKind::Iops, 1000));
    for _ in 0..8 {
        bench.add(both, Op::Read, 4096);
        bench.add(both, Op::Write, 4096);
    }
    let start = bench.now;
    bench.run(start + SECOND, 0);
    for op in [Op::Read, Op::Write] {
        let (ios, _) = bench.passed(start, start + SECOND, |g, o| g == both && o == op);
        assert!(ios.abs_diff(500) <= 10, "{ios} of {op:?}");
    }
}

#[test]
fn waiter_is_timed_anew_and_debt_paid_at_the_new_rate_when_a_cap_changes() {
    let mut bench = Bench::new();
    let group = bench.group(ROOT, caps(CapKind::Bps, 1 << 20));
    bench.add(group, Op::Read, 1 << 20);
    bench.add(group, Op::Read, 1 << 20);
    assert_eq!(bench.throttle.next_due(), Some(bench.now + SECOND));
    bench.cap(group, caps(CapKind::Bps, 4 << 20));
    assert_eq!(
        bench.throttle.next_due(),
        Some(bench.now + Nanos::from_millis(250))
    );
    bench.cap(group, caps(CapKind::Iops, 5));
    assert_eq!(
        bench.out.len(),
        2,
        "nothing is owed under a cap that was not there"
    );
}

#[test]
fn debts_to_a_cap_are_paid_wherever_they_were_made() {
    let (mut there, mut here) = (Bench::new(), Bench::new());
    let [group, _] = [&mut there, &mut here].map(|bench| bench.group(ROOT, with_burst(CapKind::Iops, 10, 5)));
    (0..40).for_each(|_| there.add(group, Op::Write, 512));
    let now = there.now;
    there.throttle.release_all(&there.tree, now, &mut drop);
    let debts = there.throttle.debts(group, now);
    assert_eq!(debts[CapKind::Iops as usize], 40);
    here.add(group, Op::Write, 512);
    here.throttle.owe(group, &debts, now);
    here.throttle.retime(&here.tree);
    assert_eq!(here.throttle.debts(group, now)[CapKind::Iops as usize], 41);
    here.add(group, Op::Write, 512);
    // All but a burst has to be paid for.
    assert_eq!(here.throttle.next_due(), Some(now + Nanos::from_millis(3_600)));
    // What comes from outside may be anything.
    here.throttle.owe(group, &[u64::MAX; CapKind::COUNT], now);
    here.throttle.retime(&here.tree);
    here.throttle.owe(GroupId(0), &debts, now);
    assert_eq!(here.throttle.debts(ROOT, now), Debts::default(), "it has no caps");
}

#[test]
fn waiter_goes_when_its_cap_is_removed_and_obeys_those_of_its_ancestors() {
    let mut bench = Bench::new();
    let parent = bench.group(ROOT, caps(CapKind::Iops, 1000));
    let child = bench.group(parent, caps(CapKind::Iops, 1));
    for _ in 0..20 {
        bench.add(child, Op::Read, 4096);
    }
    assert_eq!(bench.out.len(), 1);
    bench.tree.remove(child).unwrap();
    bench.throttle.set_caps(child, Caps::default(), bench.now);
    bench.retime();
    let start = bench.now;
    while let Some(at) = bench.throttle.next_due() {
        bench.now = at;
        bench.release();
    }
    assert_eq!((bench.out.len(), bench.now), (20, start + Nanos::from_millis(19)));
}
