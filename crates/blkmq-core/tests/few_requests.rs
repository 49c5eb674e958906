//! Tests groups that have more bios under way than their reactor has requests, beside others that
//! have few.

mod common;

use blkmq_core::bio::{Bio, Flags, Op, Status};
use blkmq_core::group::{CapKind, Caps, GroupTree, ROOT};
use blkmq_core::ids::GroupId;
use blkmq_core::queue::QueueConfig;
use blkmq_core::sched::{self, ElevatorType};
use blkmq_core::time::Nanos;
use common::{Bench, bio, config};

/// A queue with this many requests and groups; the first `capped` groups have a cap of one I/O per
/// second.
fn crowded(kind: &'static ElevatorType, requests: u32, groups: u32, capped: u32) -> Bench {
    let mut tree = GroupTree::new(groups + 1);
    for number in 0..groups {
        let group = tree.create(ROOT, 100).expect("room was made");
        if number < capped {
            let caps = Caps::default().with(CapKind::Iops, 1);
            tree.set_caps(group, caps).expect("it lives");
        }
    }
    let mut config = QueueConfig {
        groups: tree,
        elevator: kind,
        merges: false,
        requests_per_reactor: requests,
        ..config(1)
    };
    config.limits.cache = true;
    Bench::new(config)
}

fn read(group: GroupId, cookie: u64) -> Bio {
    Bio {
        group,
        ..bio(Op::Read, cookie, 1, cookie)
    }
}

/// Submits bios until one is refused; returns how many were taken.
fn flood(bench: &mut Bench, make: impl Fn(u64) -> Bio) -> u64 {
    for cookie in 0..100_000 {
        let side = &mut bench.sides[0];
        if side.local.submit(make(cookie), bench.now, &mut side.fx).is_err() {
            return cookie;
        }
        if cookie % 16 == 0 {
            bench.unplug(0);
        }
    }
    panic!("everything was taken: there is no limit");
}

/// Lets time pass until nothing is under way.
fn run_out(bench: &mut Bench) {
    for _ in 0..100_000 {
        bench.run_dry();
        if bench.sides[0].local.outstanding() == 0 {
            return;
        }
        bench.now = bench.now + Nanos::from_secs(1);
    }
    panic!("{} bios never end", bench.sides[0].local.outstanding());
}

#[test]
fn light_group_is_served_at_once_beside_a_capped_one_that_is_refused_more() {
    for kind in sched::BUILT_IN {
        let mut bench = crowded(kind, 512, 2, 1);
        let (heavy, light) = (GroupId(1), GroupId(2));
        let taken = flood(&mut bench, |cookie| read(heavy, cookie));
        bench.run_until_idle();
        assert!((512..1024).contains(&taken), "{kind}: {taken} taken");
        bench.run_dry();
        let passed = bench.ended(0).len();
        assert!(passed <= 2, "{kind}: {passed} of one per second");
        for round in 0..100 {
            // A group that has just been served may come back at once, so bfq waits some
            // microseconds for it.
            bench.now = bench.now + Nanos::from_millis(1);
            // More than the four that each group has.
            for cookie in 0..8 {
                bench.submit(0, read(light, round * 8 + cookie));
            }
            bench.unplug(0);
            bench.run_until_idle();
            assert_eq!(bench.issued(0).len(), 8, "{kind}: round {round}");
            bench.run_dry();
            assert_eq!(bench.ended(0).len(), 8, "{kind}: round {round}");
        }
        run_out(&mut bench);
        assert_eq!(bench.ended(0).len() + passed, taken as usize, "{kind}");
    }
}

#[test]
fn thirty_capped_groups_that_came_one_after_the_other_leave_the_next_its_share() {
    let mut bench = crowded(sched::NONE, 4096, 32, 31);
    for group in 1..=31 {
        flood(&mut bench, |cookie| read(GroupId(group), cookie));
        bench.run_dry();
        bench.ended(0);
    }
    for round in 0..20 {
        (0..4).for_each(|cookie| bench.submit(0, read(GroupId(32), round * 4 + cookie)));
        bench.unplug(0);
        assert_eq!(bench.issued(0).len(), 4, "round {round}");
        bench.run_dry();
    }
}

#[test]
fn bios_without_a_request_keep_their_groups_order_and_groups_take_turns() {
    // Two groups with one I/O at the drive each; its completion lets the next one enter.
    let mut bench = crowded(sched::NONE, 8, 2, 0);
    for cookie in 0..24 {
        let side = &mut bench.sides[0];
        let group = GroupId(1 + u32::from(cookie >= 12));
        let bio = read(group, cookie);
        if side.local.submit(bio, bench.now, &mut side.fx).is_err() {
            break;
        }
    }
    bench.unplug(0);
    let mut order = Vec::new();
    loop {
        bench.run_until_idle();
        let Some(first) = bench.issued(0).first().cloned() else {
            break;
        };
        order.push(first.offset / 4096);
        let mut hand = bench.sides[0].hand.borrow_mut();
        hand.issued.remove(0);
        hand.done.push(blkmq_core::driver::Done {
            cookie: first.cookie,
            status: Status::Ok,
        });
    }
    assert_eq!(order.len(), bench.ended(0).len());
    let of = |second: bool| {
        order
            .iter()
            .copied()
            .filter(move |number| (*number >= 12) == second)
    };
    assert!(of(false).is_sorted() && of(true).is_sorted(), "{order:?}");
    assert!(of(true).count() >= 4, "{order:?}");
    let second_at = order
        .iter()
        .position(|number| *number >= 12)
        .expect("the second group");
    assert!(
        second_at <= 8,
        "the second group waits behind all of the first: {order:?}"
    );
}

#[test]
fn ordered_writes_of_a_capped_group_leave_room_for_those_of_others() {
    let mut bench = crowded(sched::NONE, 256, 2, 1);
    let ordered = |group, cookie: u64| Bio {
        group,
        flags: Flags::PREFLUSH.with(Flags::FUA),
        ..bio(Op::Write, cookie, 1, cookie)
    };
    let taken = flood(&mut bench, |cookie| ordered(GroupId(1), cookie));
    bench.run_dry();
    let passed = bench.ended(0).len();
    for round in 0..50 {
        (0..4).for_each(|cookie| bench.submit(0, ordered(GroupId(2), round * 4 + cookie)));
        bench.unplug(0);
        bench.run_dry();
        assert_eq!(bench.ended(0).len(), 4, "round {round}");
    }
    run_out(&mut bench);
    assert_eq!(bench.ended(0).len() + passed, taken as usize);
}

#[test]
fn parts_of_large_reads_of_a_capped_group_leave_requests_for_others() {
    let mut bench = crowded(sched::MQ_DEADLINE, 256, 2, 1);
    let large = |group, cookie: u64| Bio {
        group,
        ..bio(Op::Read, cookie % 16 * 4096, 4096, cookie)
    };
    let taken = flood(&mut bench, |cookie| large(GroupId(1), cookie));
    bench.run_until_idle();
    bench.submit(0, large(GroupId(2), 7));
    bench.unplug(0);
    bench.run_dry();
    assert_eq!(bench.ended(0), [(7, Status::Ok)]);
    run_out(&mut bench);
    assert_eq!(bench.ended(0).len(), taken as usize);
}
