//! What cannot be seen from outside: queues change hands, what came back is not paid for twice, and the check finds what
//! is broken.

use super::*;
use crate::bio::{Bio, Flags};
use crate::group::Node;
use crate::ids::ReactorId;

fn bfq(requests_max: usize) -> Bfq {
    let mut bfq = Bfq::new(Limits::default(), requests_max, &GroupTree::flat(8));
    bfq.depth = DepthLaw::resting_at(64, requests_max as u32);
    bfq
}

fn insert(bfq: &mut Bfq, group: u32, client: u32, block: u64) {
    insert_sized(bfq, group, client, block, 4096);
}

fn insert_sized(bfq: &mut Bfq, group: u32, client: u32, block: u64, len: u64) {
    let bio = Bio {
        group: GroupId(group),
        client,
        offset: block * 4096,
        len,
        ..Bio::default()
    };
    let rq = Request::for_test(ReactorId(0), bio, 0);
    bfq.insert(rq, InsertAt::Ordered, Instant(0));
}

fn dispatch(bfq: &mut Bfq) -> Box<Request> {
    bfq.dispatch(Instant(0)).expect("a request may go")
}

#[test]
fn more_clients_than_queues_take_turns_with_them() {
    let mut bfq = bfq(4);
    for client in 0..100 {
        insert(&mut bfq, client % 3, client, 2 * u64::from(client));
        bfq.check_invariants();
        if client >= 3 {
            let rq = dispatch(&mut bfq);
            bfq.completed(&Note::of(&rq, Instant(0)));
            bfq.check_invariants();
        }
    }
}

#[test]
fn hold_ends_with_the_tunables_that_know_none() {
    const NOW: Instant = Instant(1000);
    for (tunable, value) in [("strict_guarantees", 1), ("slice_idle", 0)] {
        let mut bfq = bfq(256);
        bfq.set_tunable("low_latency", 0).expect("bfq has it");
        insert(&mut bfq, 2, 2, 0);
        let last = bfq.dispatch(NOW).expect("it may go");
        (0..250).for_each(|n| insert_sized(&mut bfq, 1, 1, 1000 * n, 256 << 10));
        bfq.completed(&Note::of(&last, NOW));
        // The bound holds the one until it is known whether the other comes back: that is asked at once.
        while bfq.dispatch(NOW).is_some() {}
        assert_eq!((bfq.queued() > 0, bfq.next_wakeup()), (true, Some(NOW)));
        bfq.set_tunable(tunable, value).expect("bfq has it");
        bfq.dispatch(NOW);
        // What is out may be overdue then.
        let late = (tunable == "strict_guarantees").then(|| bfq.overdue.epoch_ends());
        assert_eq!(bfq.next_wakeup(), late, "{tunable}");
    }
}

#[test]
fn restored_figures_of_a_group_are_continued_and_nonsense_is_ignored() {
    let (slow, now) = (GroupId(1), Instant(1000));
    let mut bfq = bfq(16);
    assert_eq!(bfq.learnt(slow), [0; 0], "it was not probed");
    for nonsense in [&[][..], &[300, 1, 1], &[1024, 1, 1, 0, 0, 1, 8, 0], &[300; 9]] {
        bfq.take_learnt(slow, nonsense, now);
        assert!(bfq.learnt(slow).is_empty(), "{nonsense:?}");
    }
    let max = u64::MAX;
    bfq.take_learnt(slow, &[300, max, max, max, max, 1, max, max], now);
    bfq.take_learnt(GroupId(2), &[max, 0, 0, 0, 0, 0, 0, 0], now);
    assert!(bfq.probing.has_passed());
    let seconds = |count: u64| count * 1_000_000_000;
    let most = [300, 4, 0, seconds(8), seconds(8), 1, 1 << 16, 0];
    assert_eq!(bfq.learnt(slow), most);
    assert_eq!(bfq.learnt(GroupId(2))[..6], [4096, 1, 0, 100_000_000, 0, 0]);
    insert(&mut bfq, 1, 1, 0);
    insert(&mut bfq, 2, 2, 2);
    bfq.check_invariants();
    for _ in 0..2 {
        let rq = bfq.dispatch(now).expect("nobody is held");
        bfq.completed(&Note::of(&rq, now));
    }
    bfq.check_invariants();
}

#[test]
fn all_requests_may_come_back_for_other_clients_before_their_ends_are_reported() {
    const REQUESTS: usize = 16;
    let mut bfq = bfq(REQUESTS);
    let (mut out, mut client): (Vec<Box<Request>>, u32) = (Vec::new(), 0);
    for _ in 0..20 {
        // Those that are out have ended, and are here again.
        for _ in bfq.queued()..REQUESTS {
            client += 1;
            insert(&mut bfq, client % 3, client, 2 * u64::from(client));
        }
        bfq.check_invariants();
        for rq in out.drain(..) {
            bfq.completed(&Note::of(&rq, Instant(0)));
        }
        bfq.check_invariants();
        while let Some(rq) = bfq.dispatch(Instant(0)) {
            out.push(rq);
        }
        assert!(!out.is_empty());
    }
}

#[test]
fn requests_of_two_groups_that_touch_are_not_merged_and_those_of_one_client_are() {
    let mut bfq = bfq(8);
    insert(&mut bfq, 1, 0, 0);
    insert(&mut bfq, 2, 0, 1);
    insert(&mut bfq, 1, 0, 1);
    insert(&mut bfq, 1, 7, 2);
    assert_eq!(bfq.queued(), 3);
    bfq.check_invariants();
}

#[test]
fn requeued_request_goes_first_and_is_not_charged_again() {
    let mut bfq = bfq(64);
    for n in 0..16 {
        insert(&mut bfq, 1, 0, 2 * n);
        insert(&mut bfq, 2, 0, 1000 + 2 * n);
    }
    let mut done = [0i32; 2];
    let mut refused = None;
    while done[0] < 12 {
        let rq = dispatch(&mut bfq);
        let group = rq.group().index() - 1;
        if group == 0 && refused.is_none() {
            // The drive wants each request of group 1 the second time only.
            refused = Some(rq.position());
            bfq.insert(rq, InsertAt::Head, Instant(0));
        } else {
            if group == 0 {
                assert_eq!(refused.take(), Some(rq.position()), "what came back is first");
            }
            bfq.completed(&Note::of(&rq, Instant(0)));
            done[group] += 1;
        }
        bfq.check_invariants();
        assert!((done[0] - done[1]).abs() <= 2, "{done:?}");
    }
}

#[test]
fn group_that_returns_within_its_due_alone_goes_beside_a_full_drive() {
    let mut bfq = bfq(1024);
    for n in 0..200 {
        insert(&mut bfq, 1, 0, 2 * n);
        insert(&mut bfq, 2, 0, 1000 + 2 * n);
    }
    let mut out: Vec<_> = std::iter::from_fn(|| bfq.dispatch(Instant(0))).collect();
    assert_eq!(
        out.len(),
        bfq.depth.limit() as usize,
        "a flood has the depth, no more"
    );
    insert(&mut bfq, 0, 9, 5000);
    let rq = dispatch(&mut bfq);
    assert_eq!((rq.group(), rq.position()), (GroupId(0), 5000 * 4096));
    bfq.check_invariants();
    assert!(bfq.dispatch(Instant(0)).is_none());
    // However many come: a quarter of the depth beside it.
    for client in 10..200 {
        insert(&mut bfq, 0, client, 10_000 + 2 * u64::from(client));
        out.extend(bfq.dispatch(Instant(0)));
    }
    assert!(bfq.in_flight <= bfq.depth.limit() * 5 / 4, "{}", bfq.in_flight);
    bfq.check_invariants();
}

#[test]
fn group_that_is_gone_leaves_nothing_to_its_successor() {
    let mut bfq = bfq(8);
    insert(&mut bfq, 2, 5, 0);
    let rq = dispatch(&mut bfq);
    bfq.completed(&Note::of(&rq, Instant(0)));
    bfq.group_gone(GroupId(2));
    bfq.check_invariants();
    assert_eq!(bfq.clients.iter().count(), 0);
    bfq.group_set(GroupId(2), &Node::new(GroupId(1), 500));
    insert(&mut bfq, 2, 5, 0);
    bfq.check_invariants();
    assert_eq!(dispatch(&mut bfq).group(), GroupId(2));
}

#[test]
fn copy_counts_for_the_rate_as_it_is_charged() {
    let rate = |flags| {
        let mut bfq = bfq(8);
        bfq.tunables.request_cost = 0;
        for n in 1..200 {
            let bio = Bio {
                offset: n * (64 << 10),
                len: 16 << 10,
                flags,
                ..Bio::default()
            };
            let now = Instant(n * 100_000);
            bfq.insert(Request::for_test(ReactorId(0), bio, 0), InsertAt::Ordered, now);
            let rq = bfq.dispatch(now).expect("nobody else is there");
            bfq.completed(&Note::of(&rq, now));
        }
        bfq.rate.bytes_per_second() / 10_000_000
    };
    assert_eq!(rate(Flags::TASK), 2 * rate(Flags::default()));
}

/// Dispatches what goes out within 5 s while nothing ends. Returns how many.
fn dispatch_all(bfq: &mut Bfq, from: Instant) -> u32 {
    let before = bfq.in_flight;
    for step in 0..100 {
        let now = from + Nanos::from_millis(50 * step);
        while bfq.in_flight < bfq.queue_depth && bfq.dispatch(now).is_some() {
            bfq.check_invariants();
        }
    }
    bfq.in_flight - before
}

/// An elevator below a depth of 32 with these requests, whose groups compete with one whose requests end, for eight
/// requests at the drive.
fn bfq_of_small_depth(requests: impl Iterator<Item = (u32, u32)>) -> Bfq {
    let mut bfq = bfq(1024);
    bfq.depth = DepthLaw::resting_at(8, 1024);
    bfq.set_depth(32);
    insert(&mut bfq, 2, 2, 1000);
    (1..)
        .zip(requests)
        .for_each(|(n, (group, client))| insert(&mut bfq, group, client, 1000 + 2 * n));
    let rq = dispatch(&mut bfq);
    assert_eq!(rq.group(), GroupId(2));
    bfq.completed(&Note::of(&rq, Instant(0)));
    bfq
}

fn assert_others_have_room(bfq: &mut Bfq) {
    insert(bfq, 2, 2, 2000);
    let other = bfq.dispatch(Instant(0) + Nanos::from_secs(100));
    assert_eq!(other.expect("there is room").group(), GroupId(2));
    bfq.check_invariants();
}

#[test]
fn client_whose_requests_hang_leaves_room_in_the_depth() {
    let mut bfq = bfq_of_small_depth((0..100).map(|_| (1, 1)));
    assert_eq!(dispatch_all(&mut bfq, Instant(0)), 11);
    assert_others_have_room(&mut bfq);
}

#[test]
fn clients_of_a_group_whose_requests_hang_leave_half_of_the_depth() {
    let mut bfq = bfq_of_small_depth((0..64).map(|n| (1, 10 + n)));
    assert_eq!(dispatch_all(&mut bfq, Instant(0)), 16);
    assert_others_have_room(&mut bfq);
}

#[test]
fn end_of_a_request_that_hung_brings_back_as_many_clients_as_there_is_room_for() {
    let mut bfq = bfq_of_small_depth((0..200).map(|n| (1, 10 + n)));
    let mut out = Vec::new();
    for step in 0..100 {
        let now = Instant(0) + Nanos::from_millis(50 * step);
        out.extend(std::iter::from_fn(|| bfq.dispatch(now)));
    }
    assert_eq!((out.len(), waiting(&bfq)), (16, 0), "all others are parked");
    let now = Instant(0) + Nanos::from_secs(6);
    for rq in &out[..12] {
        bfq.completed(&Note::of(rq, now));
    }
    out.drain(..12);
    bfq.unpark();
    bfq.check_invariants();
    assert_eq!(waiting(&bfq), 32 - 4 - 4);
    let next = bfq.dispatch(now).expect("there is room");
    out.push(next);
    for rq in out {
        bfq.completed(&Note::of(&rq, now));
    }
    assert_eq!(
        std::iter::from_fn(|| {
            let rq = bfq.dispatch(now)?;
            bfq.completed(&Note::of(&rq, now));
            bfq.check_invariants();
            Some(rq)
        })
        .count(),
        200 - 17,
        "nobody is forgotten"
    );
}

/// How many clients have their turns in the order.
fn waiting(bfq: &Bfq) -> usize {
    let waits = |id: usize| bfq.wf2q.waits(bfq.wf2q.leaf(id));
    bfq.clients.iter().filter(|(id, ..)| waits(*id)).count()
}

#[test]
fn many_groups_whose_requests_hang_leave_room_in_the_depth() {
    let mut bfq = bfq_of_small_depth((0..128).map(|n| (3 + n % 4, n % 4)));
    assert!(dispatch_all(&mut bfq, Instant(0)) <= 28);
    assert_others_have_room(&mut bfq);
}

#[test]
fn group_that_is_alone_leaves_a_reserve_of_the_depth_until_its_requests_hang() {
    let mut bfq = bfq(1024);
    bfq.set_depth(32);
    (0..64).for_each(|n| insert(&mut bfq, 1, 1, 2 * n));
    while bfq.dispatch(Instant(0)).is_some() {}
    assert_eq!(bfq.in_flight, 28);
    assert!(bfq.keeps_back() && bfq.next_wakeup().is_some());
    assert_eq!(
        dispatch_all(&mut bfq, Instant(0)),
        0,
        "what hangs fills more than a third"
    );
    assert_others_have_room(&mut bfq);
}

#[test]
fn group_a_few_of_whose_requests_hang_leaves_the_reserve_of_the_depth() {
    let mut bfq = bfq(1024);
    bfq.set_depth(32);
    (0..4).for_each(|n| insert(&mut bfq, 1, 1, 2 * n));
    while bfq.dispatch(Instant(0)).is_some() {}
    (4..64).for_each(|n| insert(&mut bfq, 1, 1, 2 * n));
    for ms in [50, 100] {
        while bfq.dispatch(Instant(0) + Nanos::from_millis(ms)).is_some() {}
    }
    assert!(bfq.overdue.finds_any(), "those that were sent first");
    assert_eq!(bfq.in_flight, 28);
    assert_others_have_room(&mut bfq);
}

#[test]
fn strict_guarantees_do_not_wait_for_what_is_overdue() {
    let mut bfq = bfq(8);
    bfq.set_tunable("strict_guarantees", 1).expect("bfq has it");
    insert(&mut bfq, 1, 1, 0);
    insert(&mut bfq, 2, 2, 100);
    dispatch(&mut bfq);
    assert!(bfq.dispatch(Instant(0)).is_none());
    for _ in 0..10 {
        assert!(bfq.keeps_back());
        let at = bfq.next_wakeup().expect("a timer");
        if let Some(rq) = bfq.dispatch(at) {
            assert_eq!(rq.group(), GroupId(2));
            assert!(at.since(Instant(0)) <= bfq.tunables.timeout_sync + Nanos::from_millis(5));
            return;
        }
    }
    panic!("nothing goes out beside a request that hangs");
}

/// Breaks something of an elevator with requests queued and in flight; the check must panic.
fn assert_found(break_it: fn(&mut Bfq)) {
    let mut bfq = bfq(8);
    for n in 0..4 {
        insert(&mut bfq, n as u32 % 3, 0, 2 * n);
    }
    dispatch(&mut bfq);
    bfq.check_invariants();
    break_it(&mut bfq);
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| bfq.check_invariants()));
    assert!(caught.is_err(), "nobody sees what is broken");
}

#[test]
fn check_finds_what_is_broken() {
    assert_found(|bfq| bfq.in_flight += 1);
    assert_found(|bfq| bfq.clients[1].in_flight += 1);
    assert_found(|bfq| bfq.contention.begin(GroupId(1), 7));
    assert_found(|bfq| {
        // A queue that waits is forgotten: its requests would never leave.
        let leaf = bfq.wf2q.pick(|_| false).expect("somebody waits");
        bfq.wf2q.release(leaf, None);
    });
    assert_found(|bfq| {
        let slot = bfq.clients[1].requests.oldest().expect("it has a request");
        let rq = bfq.clients[1].requests.take(&mut bfq.held, slot);
        bfq.held.slots.put(rq, Instant(0));
    });
}
