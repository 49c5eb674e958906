//! The counters of one request and of groups that come and go, without a queue.

use std::iter;

use super::*;
use crate::bio::{Bio, Flags, Op, Status};
use crate::group::{GroupTree, ROOT};
use crate::ids::ReactorId;
use crate::time::Instant;

fn ended(op: Op, flags: Flags, group: u32, times_us: [u64; 3]) -> Box<Request> {
    let bio = Bio {
        op,
        flags,
        group: GroupId(group),
        len: 4096,
        ..Bio::default()
    };
    let mut rq = Request::for_test(ReactorId(0), bio, 0);
    let [inserted, issued, completed] = times_us.map(|us| Instant(us * 1000));
    rq.inserted_at = inserted;
    rq.issued_at = issued;
    rq.completed_at = completed;
    rq
}

fn own(shard: &Shard, group: u32) -> GroupStats {
    Stats::new(4, StatsMode::Outside, || Instant(0)).own(iter::once(shard), GroupId(group))
}

#[test]
fn end_is_counted_with_its_times_for_its_group_and_kind_alone() {
    let shard = Shard::new(4);
    let mut rq = ended(Op::Write, Flags::ASYNC, 1, [10, 15, 115]);
    rq.status = Status::Io;
    shard.count_end(&rq);
    let stats = own(&shard, 1);
    let expected = DirectionStats {
        inserted: 1,
        ios: 1,
        bytes: 4096,
        errors: 1,
        merged: 0,
        wait_ns: 5_000,
        service_ns: 100_000,
    };
    assert_eq!(stats.of(Direction::Write), expected);
    assert_eq!(
        (stats.asynchronous(), stats.synchronous(), stats.total()),
        (expected, DirectionStats::default(), expected)
    );
    assert_eq!(stats.wait.permille(1000), Some(Nanos(6144)));
    assert_eq!(stats.device.permille(1000), Some(Nanos(131_072)));
    assert_eq!(own(&shard, 0), GroupStats::default());
}

#[test]
fn ends_of_a_batch_count_as_each_by_itself() {
    let (one_by_one, together) = (Shard::new(4), Shard::new(4));
    let mut list = Vec::new();
    for n in 0..200u64 {
        let (op, flags) = match n / 7 % 4 {
            0 => (Op::Write, Flags::NONE),
            1 => (Op::Write, Flags::ASYNC),
            2 => (Op::Discard, Flags::NONE),
            _ => (Op::Read, Flags::NONE),
        };
        let times = [10, 10 + n / 11 % 3, 20 + n / 13];
        let mut rq = ended(op, flags, (n / 17 % 3) as u32, times);
        rq.bio.len = 512 << (n % 3);
        if n / 19 % 2 == 1 {
            rq.stamp = Stamp::new((n % 5) as u32, 1 + (n / 23 % 2) as u8, 1);
        }
        if n / 29 % 3 == 1 {
            rq.status = Status::Io;
        }
        one_by_one.count_end(&rq);
        list.push(rq);
    }
    together.count_ends(&list);
    for group in 0..3 {
        assert_eq!(own(&one_by_one, group), own(&together, group));
    }
    let delays = |shard: &Shard| -> Vec<u64> { shard.delays.iter().map(Counter::get).collect() };
    assert_eq!(delays(&one_by_one), delays(&together));
}

#[test]
fn insertions_of_a_batch_count_as_each_by_itself() {
    let (one_by_one, together) = (Shard::new(4), Shard::new(4));
    let kinds = [
        (Op::Read, Flags::NONE),
        (Op::Write, Flags::ASYNC),
        (Op::Write, Flags::NONE),
    ];
    let list: Vec<_> = (0..40usize)
        .map(|n| {
            let (op, flags) = kinds[n / 5 % 3];
            let mut rq = ended(op, flags, (n / 7 % 3) as u32, [0; 3]);
            rq.bios = 1 + (n % 3) as u32;
            rq
        })
        .collect();
    list.iter().for_each(|rq| one_by_one.count_insert(rq));
    together.count_inserts(&list);
    for group in 0..3 {
        assert_eq!(own(&one_by_one, group), own(&together, group));
    }
}

#[test]
fn read_is_synchronous_whatever_it_says() {
    let shard = Shard::new(4);
    shard.count_end(&ended(Op::Read, Flags::ASYNC, 0, [0, 0, 1]));
    let stats = own(&shard, 0);
    assert_eq!((stats.of(Direction::Read).ios, stats.synchronous().ios), (1, 1));
}

#[test]
fn counts_of_a_removed_group_are_its_parents_and_none_is_lost_or_changes_its_kind() {
    let (a, b) = (Shard::new(4), Shard::new(4));
    let stats = Stats::new(4, StatsMode::Outside, || Instant(0));
    let kinds = [
        (Op::Read, Flags::NONE),
        (Op::Write, Flags::NONE),
        (Op::Write, Flags::ASYNC),
        (Op::Discard, Flags::NONE),
        (Op::Discard, Flags::ASYNC),
        (Op::Flush, Flags::NONE),
    ];
    for (n, (op, flags)) in kinds.into_iter().enumerate() {
        for shard in [&a, &b].into_iter().take(1 + n % 2) {
            shard.count_end(&ended(op, flags, 2, [0, n as u64, 50]));
        }
    }
    let shards = || [&a, &b].into_iter();
    let mut before = stats.own(shards(), GroupId(2));
    stats.bury(shards(), GroupId(2), GroupId(1));
    assert_eq!(stats.own(shards(), GroupId(2)), GroupStats::default());
    assert_eq!(stats.of_the_gone(GroupId(1)), before);
    a.count_end(&ended(Op::Read, Flags::NONE, 1, [0, 1, 2]));
    before.add(&stats.own(shards(), GroupId(1)));
    stats.bury(shards(), GroupId(1), ROOT);
    assert_eq!(stats.of_the_gone(ROOT), before);
    assert_eq!(stats.of_the_gone(GroupId(1)), GroupStats::default());
}

/// A watch of the root and three top-level groups, with requests by group.
struct Bench {
    stats: Stats,
    watch: Watch,
}

impl Bench {
    fn new(groups: u32) -> Self {
        Self::with(&GroupTree::flat(groups))
    }

    fn with(tree: &GroupTree) -> Self {
        let stats = Stats::new(tree.capacity(), StatsMode::Outside, || Instant(0));
        let watch = Watch::new(std::sync::Arc::clone(&stats.watched), tree, true);
        Self { stats, watch }
    }

    fn insert(&mut self, group: u32, at: u64) {
        self.watch.inserted(GroupId(group), 1, Instant(at));
    }

    /// Dispatches a request that was inserted at a time, and counts its end.
    fn dispatch(&mut self, shard: &Shard, group: u32, inserted: u64, at: u64) -> Stamp {
        let mut rq = ended(Op::Read, Flags::NONE, group, [0; 3]);
        self.watch.dispatched(&mut rq, Instant(at));
        (rq.inserted_at, rq.issued_at, rq.completed_at) = (Instant(inserted), Instant(at), Instant(at + 1));
        shard.count_end(&rq);
        rq.stamp
    }

    fn of(&self, shard: &Shard, group: u32) -> GroupStats {
        self.stats.own(iter::once(shard), GroupId(group))
    }
}

#[test]
fn group_waits_from_its_first_insertion_to_its_first_dispatch() {
    let (mut bench, shard) = (Bench::new(4), Shard::new(4));
    bench.insert(1, 100);
    bench.insert(1, 110);
    assert_eq!(bench.of(&shard, 1).queued, 2);
    bench.dispatch(&shard, 1, 100, 130);
    bench.dispatch(&shard, 1, 110, 150);
    bench.insert(1, 175);
    let stats = bench.of(&shard, 1);
    assert_eq!(
        (stats.queued, stats.group_wait_ns, stats.empty_ns, stats.dequeues),
        (1, 30, 125, 1)
    );
    bench.dispatch(&shard, 1, 175, 176);
    let stats = bench.of(&shard, 1);
    assert_eq!((stats.queued, stats.group_wait_ns, stats.dequeues), (0, 31, 2));
    assert_eq!((stats.queue.queued_sum, stats.queue.samples), (2 + 1 + 1, 3));
}

#[test]
fn wait_counts_for_who_went_ahead_and_a_row_sums_up_to_its_groups_wait() {
    let (mut bench, shard) = (Bench::new(4), Shard::new(4));
    for at in 0..3 {
        bench.insert(1, at);
        bench.insert(2, at);
    }
    let mut at = 10;
    for (group, inserted) in [(1, 0), (2, 0), (2, 1), (1, 1), (1, 2), (2, 2)] {
        bench.dispatch(&shard, group, inserted, at);
        at += 10;
    }
    let delays = bench.stats.delays(iter::once(&shard)).pairs;
    let cell = |a, b| {
        let pair = (Some(GroupId(a)), Some(GroupId(b)));
        delays
            .iter()
            .find(|(a, b, _)| (*a, *b) == pair)
            .map_or(0, |cell| cell.2.0)
    };
    assert_eq!([cell(1, 0), cell(1, 1), cell(1, 2)], [10, 48, 39]);
    assert_eq!([cell(2, 0), cell(2, 1), cell(2, 2)], [0, 20 + 58, 29]);
    let wait = |group| bench.of(&shard, group).of(Direction::Read).wait_ns;
    assert_eq!([wait(1), wait(2)], [10 + 48 + 39, 20 + 58 + 29]);
    let turns = [bench.of(&shard, 1).turn_ns, bench.of(&shard, 2).turn_ns];
    assert_eq!(turns, [10 + 20, 20], "the last turn goes on");
}

#[test]
fn top_level_groups_beyond_the_sixteenth_share_a_column() {
    let (mut bench, shard) = (Bench::new(20), Shard::new(20));
    for group in [15, 16, 19] {
        bench.insert(group, 0);
        bench.dispatch(&shard, group, 0, u64::from(group));
    }
    let delays = bench.stats.delays(iter::once(&shard)).pairs;
    assert_eq!(
        delays,
        [
            (Some(GroupId(15)), Some(ROOT), Nanos(15)),
            (None, Some(GroupId(15)), Nanos(16)),
            (None, None, Nanos(19)),
        ]
    );
}

#[test]
fn nested_groups_with_ios_wait_behind_each_other() {
    let mut tree = GroupTree::new(40);
    let top = tree.create(ROOT, 100).expect("there is room");
    let nested: Vec<u32> = (0..20)
        .map(|_| tree.create(top, 100).expect("there is room").0)
        .collect();
    let (mut bench, shard) = (Bench::with(&tree), Shard::new(40));
    // The first that do I/O, not the first that were made, have a column each.
    for group in nested.iter().rev() {
        bench.insert(*group, 0);
        bench.dispatch(&shard, *group, 0, 10);
    }
    let delays = bench.stats.delays(iter::once(&shard)).pairs;
    let behind = |who| {
        delays
            .iter()
            .filter(|pair| pair.0 == Some(GroupId(who)))
            .collect::<Vec<_>>()
    };
    let (last, before) = (nested[19], nested[18]);
    assert_eq!(behind(last), [&(Some(GroupId(last)), Some(ROOT), Nanos(10))]);
    assert_eq!(
        behind(before),
        [&(Some(GroupId(before)), Some(GroupId(last)), Nanos(10))]
    );
    let sixteenth = Some(GroupId(nested[4]));
    assert_eq!(
        behind(top.0),
        [
            &(Some(top), Some(top), Nanos(30)),
            &(Some(top), sixteenth, Nanos(10))
        ],
        "the others count as their top-level group"
    );
    bench.watch.groups_changed(&tree);
    bench.insert(before, 20);
    bench.dispatch(&shard, before, 20, 30);
    let delays = bench.stats.delays(iter::once(&shard)).pairs;
    assert!(
        delays.contains(&(Some(GroupId(before)), Some(top), Nanos(10))),
        "it keeps its column when the tree changes: {delays:?}"
    );
}

#[test]
fn waits_of_removed_groups_are_one_sum() {
    let (mut bench, shard) = (Bench::new(4), Shard::new(4));
    for group in [1, 2, 3] {
        bench.insert(group, 0);
        bench.dispatch(&shard, group, 0, 10);
    }
    bench.watch.group_gone(GroupId(1));
    bench.watch.group_gone(GroupId(2));
    let delays = bench.stats.delays(iter::once(&shard)).pairs;
    assert_eq!(
        delays,
        [
            (None, Some(ROOT), Nanos(10)),
            (None, None, Nanos(10)),
            (Some(GroupId(3)), None, Nanos(10)),
        ]
    );
}
