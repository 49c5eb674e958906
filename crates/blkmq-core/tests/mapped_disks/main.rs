//! Tests the way of a mapped disk's bio: what its members get, in which order, and what is
//! returned, with drivers that the test controls and with drivers that fail, requeue and reorder at
//! random.

#[path = "../common/mod.rs"]
mod common;
mod random;
mod rig;

use blkmq_core::bio::{Bio, Data, Flags, Op, Status};
use blkmq_core::ids::DiskId;
use blkmq_core::mapper::Below;
use blkmq_core::mapper::table::{MapKind, MapSpec};

use crate::rig::*;

#[test]
fn bio_on_one_member_comes_back_as_it_was_submitted() {
    let mut rig = rig(FOUR, &[linear(4)]);
    let asked = Bio {
        client: 3,
        data: Data::Token(9),
        flags: Flags::FUA,
        ..bio(Op::Write, MEMBER + 8192, 4096, 7)
    };
    rig.submit(asked.clone()).unwrap();
    rig.unplug();
    assert_eq!(rig.all_issued(), [(1, Op::Write, 8192, 4096)]);
    assert_eq!(rig.issued(1)[0].flags, Flags::FUA);
    rig.end(1, Status::Medium);
    let back = rig.fx.ended.pop().unwrap();
    assert_eq!(back.status, Status::Medium);
    assert_eq!(
        (back.disk, back.offset, back.len),
        (asked.disk, asked.offset, asked.len)
    );
    assert_eq!((back.client, back.cookie, back.flags), (3, 7, Flags::FUA));
    assert_eq!(back.origin, asked.origin);
    rig.assert_at_rest();
}

#[test]
fn read_over_a_stripe_is_one_request_for_each_member_and_one_end() {
    let mut rig = rig(FOUR, &[striped(4)]);
    rig.submit(bio(Op::Read, CHUNK, 8 * CHUNK, 1)).unwrap();
    rig.unplug();
    // Neighbouring chunks of a member are merged before they are issued.
    assert_eq!(
        rig.all_issued(),
        [
            (0, Op::Read, CHUNK, 2 * CHUNK),
            (1, Op::Read, 0, 2 * CHUNK),
            (2, Op::Read, 0, 2 * CHUNK),
            (3, Op::Read, 0, 2 * CHUNK),
        ]
    );
    for member in [2, 0, 3] {
        rig.end(member, Status::Ok);
        assert_eq!(rig.ended(), []);
    }
    rig.end(1, Status::Ok);
    assert_eq!(rig.ended(), [(1, Status::Ok)]);
    rig.assert_at_rest();
}

#[test]
fn discard_over_a_stripe_is_one_range_of_each_member() {
    for (op, flags) in [(Op::Discard, Flags::NONE), (Op::WriteZeroes, Flags::NO_UNMAP)] {
        let mut rig = rig(FOUR, &[striped(4)]);
        let asked = bio(op, CHUNK / 2, 6 * CHUNK, 1);
        rig.submit(Bio { flags, ..asked }).unwrap();
        rig.unplug();
        assert_eq!(
            rig.all_issued(),
            [
                (0, op, CHUNK / 2, CHUNK / 2 + CHUNK),
                (1, op, 0, 2 * CHUNK),
                (2, op, 0, CHUNK + CHUNK / 2),
                (3, op, 0, CHUNK),
            ]
        );
        assert!((0..4).all(|member| rig.issued(member)[0].flags == flags));
        (0..4).for_each(|member| assert_eq!(rig.end(member, Status::Ok), 1));
        assert_eq!(rig.ended(), [(1, Status::Ok)]);
    }
}

#[test]
fn flush_goes_to_each_drive_below_once_and_ends_when_all_have() {
    // The drives are reached twice: through the stripe, and through a part of it that is joined
    // with another.
    let top = spec(
        MapKind::Linear,
        &[Below::Mapped(0), Below::Leaf(1), Below::Mapped(0)],
    );
    let mut rig = rig(FOUR, &[striped(3), top]);
    let flush = Bio {
        disk: DiskId(1),
        ..bio(Op::Flush, 0, 0, 5)
    };
    rig.submit(flush).unwrap();
    rig.unplug();
    assert_eq!(
        rig.all_issued(),
        [(0, Op::Flush, 0, 0), (1, Op::Flush, 0, 0), (2, Op::Flush, 0, 0)]
    );
    rig.end(0, Status::Ok);
    rig.end(1, Status::Io);
    assert_eq!(rig.ended(), []);
    rig.end(2, Status::Ok);
    assert_eq!(rig.ended(), [(5, Status::Io)]);
    rig.assert_at_rest();
}

#[test]
fn flush_of_drives_without_a_cache_is_done_at_once() {
    let without = Members { cache: false, ..FOUR };
    let mut rig = rig(without, &[striped(4)]);
    rig.submit(bio(Op::Flush, 0, 0, 5)).unwrap();
    assert_eq!(rig.ended(), [(5, Status::Ok)]);
    let write = bio(Op::Write, 0, 4096, 6);
    rig.submit(Bio {
        flags: Flags::PREFLUSH,
        ..write
    })
    .unwrap();
    rig.unplug();
    assert_eq!(rig.all_issued(), [(0, Op::Write, 0, 4096)]);
}

#[test]
fn preflush_write_waits_for_the_flushes_of_all_members() {
    let mut rig = rig(FOUR, &[striped(4)]);
    let write = Bio {
        flags: Flags::PREFLUSH.with(Flags::FUA),
        ..bio(Op::Write, 0, 2 * CHUNK, 5)
    };
    rig.submit(write).unwrap();
    rig.unplug();
    for member in 0..4 {
        let flushes: Vec<Op> = rig.all_issued().iter().map(|seen| seen.1).collect();
        assert_eq!(flushes, vec![Op::Flush; 4 - member]);
        rig.end(member, Status::Ok);
    }
    assert_eq!(
        rig.all_issued(),
        [(0, Op::Write, 0, CHUNK), (1, Op::Write, 0, CHUNK)]
    );
    assert_eq!(rig.issued(0)[0].flags, Flags::FUA);
    rig.end(0, Status::Ok);
    rig.end(1, Status::Ok);
    let back = rig.fx.ended.pop().unwrap();
    assert_eq!((back.cookie, back.flags), (5, Flags::PREFLUSH.with(Flags::FUA)));
    rig.assert_at_rest();
}

#[test]
fn preflush_write_whose_flush_fails_is_not_written() {
    let mut rig = rig(FOUR, &[striped(4)]);
    let write = bio(Op::Write, 0, 2 * CHUNK, 5);
    rig.submit(Bio {
        flags: Flags::PREFLUSH,
        ..write
    })
    .unwrap();
    rig.unplug();
    rig.end(3, Status::Io);
    (0..3).for_each(|member| assert_eq!(rig.end(member, Status::Ok), 1));
    assert_eq!((rig.all_issued(), rig.ended()), (vec![], vec![(5, Status::Io)]));
    rig.assert_at_rest();
}

#[test]
fn fua_without_a_drive_that_has_it_is_a_flush_of_the_written_members_only() {
    let without = Members { fua: false, ..FOUR };
    let mut rig = rig(without, &[striped(4)]);
    let write = bio(Op::Write, 0, 2 * CHUNK, 5);
    rig.submit(Bio {
        flags: Flags::FUA,
        ..write
    })
    .unwrap();
    rig.unplug();
    (0..2).for_each(|member| assert_eq!(rig.end(member, Status::Ok), 1));
    assert_eq!(rig.all_issued(), [(0, Op::Flush, 0, 0), (1, Op::Flush, 0, 0)]);
    (0..2).for_each(|member| assert_eq!(rig.end(member, Status::Ok), 1));
    assert_eq!(rig.ended(), [(5, Status::Ok)]);
}

#[test]
fn first_error_is_the_end_and_no_more_parts_are_sent_after_it() {
    let few = Members { requests: 4, ..FOUR };
    let mut rig = rig(few, &[striped(4)]);
    rig.submit(bio(Op::Read, 0, MEMBER, 5)).unwrap();
    rig.unplug();
    rig.end(2, Status::Medium);
    let mut requests = 0;
    while rig.stack.outstanding() > 0 {
        requests += (0..4).map(|member| rig.end(member, Status::Io)).sum::<usize>();
    }
    assert!(
        requests < 40,
        "{requests} requests after the error, of {}",
        MEMBER / CHUNK
    );
    assert_eq!(rig.ended(), [(5, Status::Medium)]);
    rig.assert_at_rest();
}

#[test]
fn huge_bio_has_a_bounded_number_of_parts_under_way() {
    let many = Members {
        requests: 4096,
        ..FOUR
    };
    let mut rig = rig(many, &[striped(4)]);
    rig.submit(bio(Op::Write, 0, 4 * MEMBER, 5)).unwrap();
    let mut written = 0;
    rig.unplug();
    while rig.stack.outstanding() > 0 {
        for member in 0..4 {
            let bytes: u64 = rig.all_issued().iter().map(|seen| seen.3).sum();
            assert!(bytes <= 128 * CHUNK, "{bytes} bytes");
            written += rig.issued(member).iter().map(|seen| seen.len).sum::<u64>();
            rig.end(member, Status::Ok);
        }
    }
    assert_eq!((written, rig.ended()), (4 * MEMBER, vec![(5, Status::Ok)]));
    rig.assert_at_rest();
}

#[test]
fn bio_is_given_back_when_its_members_are_full() {
    let few = Members { requests: 2, ..FOUR };
    let mut rig = rig(few, &[striped(4)]);
    let mut taken = 0;
    let back = loop {
        match rig.submit(bio(Op::Read, 16 * taken * CHUNK, CHUNK, taken)) {
            Ok(()) => taken += 1,
            Err(back) => break back,
        }
        rig.unplug();
    };
    assert!((2..=8).contains(&taken), "{taken} taken by one member");
    assert_eq!((back.cookie, back.offset), (taken, 16 * taken * CHUNK));
    // If it uses other members as well, it is split as they accept parts; if none accepts a part,
    // it is returned.
    rig.submit(bio(Op::Read, 100 * 16 * CHUNK, 2 * CHUNK, 100))
        .unwrap_err();
    rig.submit(bio(Op::Read, 100 * 16 * CHUNK + 3 * CHUNK, 2 * CHUNK, 101))
        .unwrap();
    while rig.stack.outstanding() > 0 {
        rig.unplug();
        (0..4).for_each(|member| {
            rig.end(member, Status::Ok);
        });
    }
    let ended = rig.ended().into_iter().map(|(cookie, _)| cookie);
    let mut ended: Vec<u64> = ended.collect();
    ended.sort_unstable();
    assert_eq!(ended, (0..taken).chain([101]).collect::<Vec<_>>());
}

#[test]
fn bio_that_a_mapped_disk_refuses_ends_at_once() {
    let mut rig = rig(
        FOUR,
        &[MapSpec {
            read_only: true,
            ..linear(2)
        }],
    );
    for (bio, status) in [
        (bio(Op::Write, 0, 512, 0), Status::ReadOnly),
        (bio(Op::Read, 2 * MEMBER, 512, 0), Status::Invalid),
        (bio(Op::Read, 0, 100, 0), Status::Invalid),
        (bio(Op::Read, u64::MAX - 511, 512, 0), Status::Invalid),
        (
            Bio {
                disk: DiskId(1),
                ..bio(Op::Read, 0, 512, 0)
            },
            Status::Invalid,
        ),
    ] {
        rig.submit(bio).unwrap();
        assert_eq!(rig.ended(), [(0, status)]);
    }
}

#[test]
fn bio_of_great_many_parts_on_drives_that_end_at_once_lets_others_go_on() {
    let mut rig = rig(FOUR, &[striped(4)]);
    rig.hands.iter().for_each(|hand| hand.borrow_mut().inline = true);
    rig.submit(bio(Op::Read, 0, 4 * MEMBER, 5)).unwrap();
    let mut calls = 1;
    while rig.stack.complete_parts(&mut rig.queues, rig.now, &mut rig.fx) {
        assert!(rig.stack.is_due(&rig.fx), "it is to be called again");
        calls += 1;
    }
    assert_eq!(rig.ended(), [(5, Status::Ok)]);
    assert!(calls > 1, "{calls} calls");
}
