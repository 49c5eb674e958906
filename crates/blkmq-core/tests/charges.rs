//! Tests what I/O other than reads and writes costs in the caps of its group, with a driver that
//! the test controls.

mod common;

use blkmq_core::bio::{Bio, Flags, Op, Status};
use blkmq_core::group::{CapKind, Caps, GroupTree, ROOT};
use blkmq_core::ids::GroupId;
use blkmq_core::limits::Limits;
use blkmq_core::queue::QueueConfig;
use blkmq_core::sched::{self, ElevatorType};
use blkmq_core::time::Nanos;
use common::{Bench, bio, config};

/// A queue with a group that has these caps.
fn bench(kind: &'static ElevatorType, reactors: u16, caps: Caps, limits: Limits) -> (Bench, GroupId) {
    let mut config = QueueConfig {
        groups: GroupTree::new(4),
        elevator: kind,
        merges: false,
        limits,
        ..config(reactors)
    };
    let group = config.groups.create(ROOT, 100).unwrap();
    config.groups.set_caps(group, caps).unwrap();
    (Bench::new(config), group)
}

/// Completes everything that is issued until nothing is left. Returns how long that took.
fn run(bench: &mut Bench) -> Nanos {
    let start = bench.now;
    loop {
        bench.run_until_idle();
        let ended: usize = (0..bench.sides.len())
            .map(|side| bench.end_all(side, Status::Ok))
            .sum();
        if ended > 0 {
            continue;
        }
        let timers = bench.sides.iter().filter_map(|side| side.local.next_wakeup());
        match timers.min() {
            Some(at) if bench.queue.outstanding() > 0 => bench.now = bench.now.max(at),
            _ => return bench.now.since(start),
        }
    }
}

/// Has everything dispatched at once: charges from the start are not measured.
fn submit(bench: &mut Bench, bios: impl IntoIterator<Item = Bio>) {
    bios.into_iter().for_each(|bio| bench.submit(0, bio));
    bench.unplug(0);
}

fn zeroes(group: GroupId, flags: Flags, blocks: u64, cookie: u64) -> Bio {
    Bio {
        group,
        flags,
        ..bio(Op::WriteZeroes, cookie * 4096, blocks, cookie)
    }
}

/// Zeroing of 4 MiB, so that the first part, which is charged afterwards, matters little.
fn time_of_zeroing(limits: &Limits, flags: Flags) -> Nanos {
    let caps = Caps::default().with(CapKind::WriteBps, 4 << 20);
    let (mut bench, group) = bench(sched::MQ_DEADLINE, 1, caps, limits.clone());
    let blocks = (4 << 20) / 4096;
    let mut bio = zeroes(group, flags, blocks, 1);
    bio.offset = 0;
    submit(&mut bench, [bio]);
    run(&mut bench)
}

#[test]
fn zeroing_counts_as_the_bytes_that_the_drive_writes() {
    let cheap = Limits {
        zeroes_max: 1 << 30,
        transfer_max: 64 << 10,
        ..Limits::default()
    };
    let slow = Limits {
        zeroes_are_written: true,
        ..cheap.clone()
    };
    // The first piece of 64 KiB is charged to the following ones.
    let almost = Nanos::from_millis(950)..=Nanos::from_secs(1);
    for (limits, flags, is_charged) in [
        (&cheap, Flags::NONE, false),
        (&cheap, Flags::NO_UNMAP, true),
        (&cheap, Flags::NO_UNMAP.with(Flags::FAST_ONLY), false),
        (&slow, Flags::NONE, true),
        (&slow, Flags::FAST_ONLY, false),
    ] {
        let time = time_of_zeroing(limits, flags);
        let what = format!("{flags:?}, written: {}: {time:?}", limits.zeroes_are_written);
        match is_charged {
            true => assert!(almost.contains(&time), "{what}"),
            false => assert_eq!(time, Nanos::ZERO, "{what}"),
        }
    }
}

#[test]
fn written_zeroes_are_cut_like_writes_and_others_are_not() {
    let limits = Limits {
        zeroes_max: 1 << 30,
        transfer_max: 64 << 10,
        ..Limits::default()
    };
    for (flags, pieces) in [(Flags::NONE, 1), (Flags::NO_UNMAP, 16)] {
        let (mut bench, group) = bench(sched::NONE, 1, Caps::default(), limits.clone());
        submit(&mut bench, [zeroes(group, flags, 256, 0)]);
        bench.run_until_idle();
        assert_eq!(bench.issued(0).len(), pieces, "{flags:?}");
        bench.run_dry();
    }
}

/// What a copy writes counts where reads and writes count together.
#[test]
fn copy_counts_as_the_bytes_that_it_reads_and_writes() {
    for (kind, flags, seconds) in [
        (CapKind::Bps, Flags::NONE, 4),
        (CapKind::Bps, Flags::TASK, 8),
        (CapKind::ReadBps, Flags::TASK, 4),
    ] {
        let caps = Caps::default().with(kind, 1 << 20);
        let (mut bench, group) = bench(sched::MQ_DEADLINE, 1, caps, Limits::default());
        let copy = |cookie| Bio {
            group,
            flags,
            ..bio(Op::Read, cookie * 64, 64, cookie)
        };
        // The first one is charged to the following ones.
        submit(&mut bench, (0..17).map(copy));
        let time = run(&mut bench);
        assert_eq!(time, Nanos::from_secs(seconds), "{kind} {flags:?}");
    }
}

fn flush(group: GroupId, cookie: u64) -> Bio {
    Bio {
        group,
        ..bio(Op::Flush, 0, 0, cookie)
    }
}

fn with_cache() -> Limits {
    Limits {
        cache: true,
        ..Limits::default()
    }
}

#[test]
fn flush_waits_for_a_cap_on_requests_and_counts_as_one() {
    for kind in sched::BUILT_IN {
        for reactors in [1, 2] {
            let caps = Caps::default().with(CapKind::Iops, 100);
            let (mut bench, group) = bench(kind, reactors, caps, with_cache());
            let start = bench.now;
            // One at a time, as a client does that waits for each; otherwise they share a flush.
            for cookie in 0..11 {
                submit(&mut bench, [flush(group, cookie)]);
                run(&mut bench);
            }
            assert_eq!(bench.now.since(start), Nanos::from_millis(100), "{kind}");
            assert_eq!(bench.ended(0).len(), 11);
            let mut write = bio(Op::Write, 0, 1, 50);
            write.group = group;
            submit(&mut bench, [write]);
            assert_eq!(
                run(&mut bench),
                Nanos::from_millis(10),
                "{kind}: behind the last flush"
            );
            assert_eq!(bench.queue.outstanding(), 0);
        }
    }
}

#[test]
fn flush_is_no_bytes_and_does_not_wait_behind_writes_that_are() {
    for kind in sched::BUILT_IN {
        let caps = Caps::default().with(CapKind::WriteBps, 1 << 20);
        let (mut bench, group) = bench(kind, 1, caps, with_cache());
        let write = |cookie| Bio {
            group,
            ..bio(Op::Write, cookie * 256, 256, cookie)
        };
        submit(&mut bench, (0..4).map(write).chain([flush(group, 9)]));
        bench.run_until_idle();
        bench.end_all(0, Status::Ok);
        bench.run_until_idle();
        let ended: Vec<u64> = bench.ended(0).into_iter().map(|end| end.0).collect();
        assert!(ended.contains(&9), "{kind}: {ended:?}");
        assert!(
            run(&mut bench) >= Nanos::from_secs(2),
            "{kind}: the writes have waited"
        );
    }
}

#[test]
fn freeze_lets_flushes_go_that_wait_for_a_cap_and_what_they_owe_is_paid_afterwards() {
    for kind in [sched::NONE, sched::MQ_DEADLINE] {
        let caps = Caps::default().with(CapKind::WriteIops, 1);
        let (mut bench, group) = bench(kind, 1, caps, with_cache());
        for cookie in 0..2 {
            submit(&mut bench, [flush(group, cookie)]);
            bench.run_until_idle();
            bench.end_all(0, Status::Ok);
        }
        bench.run_until_idle();
        assert_eq!(bench.ended(0).len(), 1, "{kind}: one is held");
        bench.queue.freeze_begin();
        bench.run_until_idle();
        bench.end_all(0, Status::Ok);
        bench.run_until_idle();
        assert!(bench.queue.is_drained(), "{kind}");
        bench.queue.freeze_end();
        submit(&mut bench, [flush(group, 5)]);
        let waited = run(&mut bench);
        assert!(waited >= Nanos::from_millis(1900), "{kind}: {waited:?}");
    }
}

#[test]
fn groups_without_caps_flush_past_those_that_wait() {
    let caps = Caps::default().with(CapKind::Iops, 1);
    let (mut bench, group) = bench(sched::MQ_DEADLINE, 2, caps, with_cache());
    submit(&mut bench, [flush(group, 0)]);
    run(&mut bench);
    submit(&mut bench, [flush(group, 1)]);
    bench.submit(1, flush(ROOT, 2));
    bench.unplug(1);
    bench.run_until_idle();
    bench.end_all(1, Status::Ok);
    bench.run_until_idle();
    assert_eq!(bench.ended(1), [(2, Status::Ok)]);
    assert!(run(&mut bench) > Nanos::from_millis(900));
}

#[test]
fn flush_of_a_thread_without_a_context_is_issued_by_the_one_that_it_uses() {
    for kind in sched::BUILT_IN {
        let caps = Caps::default().with(CapKind::Iops, 100);
        let mut config = QueueConfig {
            groups: GroupTree::new(4),
            elevator: kind,
            hctxs: 1,
            limits: with_cache(),
            ..config(2)
        };
        let group = config.groups.create(ROOT, 100).unwrap();
        config.groups.set_caps(group, caps).unwrap();
        let mut bench = Bench::new(config);
        for cookie in 0..3 {
            bench.submit(1, flush(group, cookie));
            bench.unplug(1);
            run(&mut bench);
        }
        assert_eq!(bench.ended(1).len(), 3, "{kind}");
        assert_eq!(bench.queue.outstanding(), 0);
    }
}
