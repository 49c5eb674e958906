//! The way of a mapped disk's bio: what its members get, in which order, and what comes back, with drivers answered by hand
//! and with drivers that fail, requeue and reorder by chance.

mod common;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use blkmq_core::bio::{Bio, Data, Flags, Op, Status};
use blkmq_core::driver::{Done, Issued};
use blkmq_core::ids::DiskId;
use blkmq_core::limits::Limits;
use blkmq_core::local::LocalQueue;
use blkmq_core::mapper::Below;
use blkmq_core::mapper::stack::Stack;
use blkmq_core::mapper::table::{Leaf, MapKind, MapSpec, MemberSpec, Table};
use blkmq_core::queue::{Effects, Queue, QueueConfig};
use blkmq_core::time::{Instant, Nanos};
use common::{Hand, HandDriver, Seen};
use proptest::prelude::*;

/// Some queues with one disk each, and mapped disks on them.
struct Rig {
    queues: Vec<LocalQueue>,
    hands: Vec<Rc<RefCell<Hand>>>,
    stack: Stack,
    fx: Effects,
    now: Instant,
}

/// What the members are like.
#[derive(Clone, Copy)]
struct Members {
    count: u16,
    requests: u32,
    cache: bool,
    fua: bool,
}

const FOUR: Members = Members {
    count: 4,
    requests: 64,
    cache: true,
    fua: true,
};

fn rig(members: Members, specs: &[MapSpec]) -> Rig {
    let limits = Limits {
        cache: members.cache,
        fua: members.fua,
        discard_max: 1 << 30,
        zeroes_max: 1 << 20,
        ..Limits::default()
    };
    let leaf = |queue| Leaf {
        queue,
        disk: DiskId(0),
        size: MEMBER,
        read_only: false,
        limits: limits.clone(),
    };
    let mut table = Table::new((0..members.count).map(leaf).collect());
    for spec in specs {
        table.add(spec).unwrap();
    }
    let hands: Vec<Rc<RefCell<Hand>>> = (0..members.count).map(|_| Rc::default()).collect();
    let queue = |hand: &Rc<RefCell<Hand>>| {
        let mut config = QueueConfig::new("q", 1);
        config.limits = limits.clone();
        config.requests_per_reactor = members.requests;
        config.disks = vec![common::disk("m", 0, MEMBER)];
        config.timeout = Nanos::from_secs(3600);
        let (_, mut seats) = Queue::new(config).unwrap();
        seats.remove(0).sit(Some(Box::new(HandDriver(Rc::clone(hand)))))
    };
    Rig {
        queues: hands.iter().map(queue).collect(),
        hands,
        stack: Stack::new(Arc::new(table), 1024, 64),
        fx: Effects::default(),
        now: Instant(1),
    }
}

impl Rig {
    fn submit(&mut self, bio: Bio) -> Result<(), Bio> {
        let submitted = self.stack.submit(bio, &mut self.queues, self.now, &mut self.fx);
        self.stack.check_invariants();
        submitted
    }

    fn unplug(&mut self) {
        self.queues
            .iter_mut()
            .for_each(|queue| queue.unplug(self.now, &mut self.fx));
        self.settle();
    }

    fn run(&mut self) {
        self.queues
            .iter_mut()
            .for_each(|queue| queue.run(self.now, &mut self.fx));
        self.settle();
        self.queues.iter().for_each(LocalQueue::check_invariants);
    }

    fn settle(&mut self) {
        while self.stack.is_due(&self.fx) && self.stack.settle(&mut self.queues, self.now, &mut self.fx) {}
        self.stack.check_invariants();
    }

    /// What the driver of a member has.
    fn issued(&self, member: usize) -> Vec<Seen> {
        self.hands[member].borrow().issued.clone()
    }

    /// What all drivers have: member, operation, offset, length.
    fn all_issued(&self) -> Vec<(usize, Op, u64, u64)> {
        let of = |member| {
            let issued = self.issued(member).into_iter();
            issued.map(move |seen| (member, seen.op, seen.offset, seen.len))
        };
        (0..self.hands.len()).flat_map(of).collect()
    }

    /// Ends what the driver of a member has.
    fn end(&mut self, member: usize, status: Status) -> usize {
        let mut hand = self.hands[member].borrow_mut();
        let issued = std::mem::take(&mut hand.issued);
        hand.done.extend(issued.iter().map(|seen| Done {
            cookie: seen.cookie,
            status,
        }));
        drop(hand);
        self.run();
        issued.len()
    }

    fn ended(&mut self) -> Vec<(u64, Status)> {
        let ended = self.fx.ended.drain(..);
        ended.map(|bio| (bio.cookie, bio.status)).collect()
    }

    fn assert_at_rest(&self) {
        assert_eq!(self.stack.outstanding(), 0);
        assert!(self.queues.iter().all(|queue| queue.outstanding() == 0));
    }
}

fn spec(kind: MapKind, members: &[Below]) -> MapSpec {
    let member = |below: &Below| MemberSpec {
        name: "m".to_owned(),
        below: *below,
        start: 0,
        len: None,
    };
    MapSpec {
        name: "d".to_owned(),
        kind,
        members: members.iter().map(member).collect(),
        block_size: None,
        read_only: false,
    }
}

fn striped(count: u32) -> MapSpec {
    let leaves: Vec<Below> = (0..count).map(Below::Leaf).collect();
    spec(MapKind::Striped { chunk: CHUNK }, &leaves)
}

fn linear(count: u32) -> MapSpec {
    let leaves: Vec<Below> = (0..count).map(Below::Leaf).collect();
    spec(MapKind::Linear, &leaves)
}

fn bio(op: Op, offset: u64, len: u64, cookie: u64) -> Bio {
    Bio {
        op,
        offset,
        len,
        cookie,
        ..Bio::default()
    }
}

#[test]
fn a_bio_on_one_member_comes_back_as_it_was_submitted() {
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
fn a_read_over_a_stripe_is_one_request_for_each_member_and_one_end() {
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
fn a_discard_over_a_stripe_is_one_range_of_each_member() {
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
fn a_flush_goes_to_each_drive_below_once_and_ends_when_all_have() {
    // The drives are below twice: in the stripe, and in a part of it that is joined with another.
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
fn a_flush_of_drives_without_a_cache_is_done_at_once() {
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
fn a_preflush_write_waits_for_the_flushes_of_all_members() {
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
fn a_preflush_write_whose_flush_fails_is_not_written() {
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
fn the_first_error_is_the_end_and_no_more_parts_are_sent_after_it() {
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
fn a_huge_bio_has_a_bounded_number_of_parts_under_way() {
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
fn a_bio_is_given_back_when_its_members_are_full() {
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
    // One whose bytes lie on others too is cut as they take it; one that none takes is given back.
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
fn what_a_mapped_disk_refuses_ends_at_once() {
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
fn a_bio_of_great_many_parts_on_drives_that_end_at_once_lets_others_go_on() {
    let mut rig = rig(FOUR, &[striped(4)]);
    rig.hands.iter().for_each(|hand| hand.borrow_mut().inline = true);
    rig.submit(bio(Op::Read, 0, 4 * MEMBER, 5)).unwrap();
    let mut calls = 1;
    while rig.stack.settle(&mut rig.queues, rig.now, &mut rig.fx) {
        assert!(rig.stack.is_due(&rig.fx), "it is to be called again");
        calls += 1;
    }
    assert_eq!(rig.ended(), [(5, Status::Ok)]);
    assert!(calls > 1, "{calls} calls");
}

/// What is done to drives and disks, by chance.
#[derive(Clone, Debug)]
struct Step {
    op: Op,
    flags: Flags,
    disk: u32,
    start: u32,
    blocks: u32,
    /// What the drivers do before the next step: which end, and how.
    answers: Vec<(prop::sample::Index, u8)>,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let op = prop_oneof![
        4 => Just(Op::Read),
        4 => Just(Op::Write),
        1 => Just(Op::Flush),
        1 => Just(Op::Discard),
        1 => Just(Op::WriteZeroes),
    ];
    let flags = prop_oneof![
        4 => Just(Flags::NONE),
        1 => Just(Flags::FUA),
        1 => Just(Flags::PREFLUSH),
    ];
    let answers = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6);
    let step = (op, flags, 0..3u32, any::<u32>(), 1..600u32, answers);
    let step = step.prop_map(|(op, flags, disk, start, blocks, answers)| Step {
        op,
        flags: if op.is_write() { flags } else { Flags::NONE },
        disk,
        start,
        blocks,
        answers,
    });
    prop::collection::vec(step, 1..40)
}

impl Rig {
    /// Has one request of one driver end, by chance. Says whether it ended with an error.
    fn answer(&mut self, which: usize, how: u8) {
        let member = which % self.hands.len();
        let mut hand = self.hands[member].borrow_mut();
        match how {
            0..8 => hand.answers.push_back(Issued::Resource),
            8..16 => hand.answers.push_back(Issued::DeviceResource),
            _ => {}
        }
        if hand.issued.is_empty() {
            return;
        }
        let at = which / 4 % hand.issued.len();
        let seen = hand.issued.remove(at);
        let status = match how {
            16..32 => Status::Requeue,
            32..40 => Status::Medium,
            40..48 => Status::Transport,
            _ => Status::Ok,
        };
        let cookie = seen.cookie;
        hand.done.push(Done { cookie, status });
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn every_bio_ends_once_whatever_the_drives_do(steps in steps(), requests in 1..40u32, fua in any::<bool>()) {
        let top = MapSpec {
            members: vec![
                MemberSpec { name: "m".to_owned(), below: Below::Mapped(0), start: CHUNK, len: Some(5 * CHUNK) },
                MemberSpec { name: "m".to_owned(), below: Below::Leaf(3), start: 512, len: Some(MEMBER / 2) },
            ],
            ..linear(1)
        };
        let members = Members { requests, fua, ..FOUR };
        let mut rig = rig(members, &[striped(3), linear(4), top]);
        let sizes = [3 * MEMBER, 4 * MEMBER, 5 * CHUNK + MEMBER / 2];
        let mut under_way = BTreeMap::new();
        for (cookie, step) in (0..).zip(&steps) {
            let blocks = sizes[step.disk as usize] / 512;
            let start = u64::from(step.start) % blocks;
            let len = u64::from(step.blocks).min(blocks - start);
            let (offset, len) = if step.op == Op::Flush { (0, 0) } else { (start * 512, len * 512) };
            let asked = Bio {
                disk: DiskId(step.disk),
                flags: step.flags,
                data: Data::Token(cookie),
                ..bio(step.op, offset, len, cookie)
            };
            if rig.submit(asked.clone()).is_ok() {
                under_way.insert(cookie, asked);
            } else {
                prop_assert!(rig.stack.outstanding() > 0, "refused with nothing under way");
            }
            rig.unplug();
            for (which, how) in &step.answers {
                rig.answer(which.index(64), *how);
            }
            rig.now = rig.now + Nanos::from_millis(5);
            rig.run();
            take_back(&mut rig, &mut under_way);
        }
        let mut turns = 0;
        while rig.stack.outstanding() > 0 {
            turns += 1;
            prop_assert!(turns < 10_000, "stuck with {} under way", rig.stack.outstanding());
            rig.now = rig.now + Nanos::from_millis(5);
            (0..4).for_each(|member| {
                rig.end(member, Status::Ok);
            });
            rig.unplug();
        }
        take_back(&mut rig, &mut under_way);
        prop_assert!(under_way.is_empty());
        rig.assert_at_rest();
    }
}

/// Compares what has ended with what was submitted.
fn take_back(rig: &mut Rig, under_way: &mut BTreeMap<u64, Bio>) {
    for bio in rig.fx.ended.drain(..) {
        let asked = under_way.remove(&bio.cookie).expect("ends once");
        assert!(
            matches!(bio.status, Status::Ok | Status::Medium | Status::Transport),
            "{bio:?}"
        );
        assert_eq!(
            (bio.disk, bio.offset, bio.len, bio.op),
            (asked.disk, asked.offset, asked.len, asked.op)
        );
        assert_eq!((bio.skip, bio.origin), (0, asked.origin));
    }
}

const MEMBER: u64 = 64 << 20;
const CHUNK: u64 = 64 << 10;
