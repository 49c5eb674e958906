//! Tests mapped disks on drivers that fail, requeue and reorder at random.

use std::collections::BTreeMap;

use blkmq_core::bio::{Bio, Data, Flags, Op, Status};
use blkmq_core::driver::{Done, Issued};
use blkmq_core::ids::DiskId;
use blkmq_core::mapper::Below;
use blkmq_core::mapper::table::{MapSpec, MemberSpec};
use blkmq_core::time::Nanos;
use proptest::prelude::*;

use crate::rig::*;

/// A random action on drives and disks.
#[derive(Clone, Debug)]
struct Step {
    op: Op,
    flags: Flags,
    disk: u32,
    start: u32,
    blocks: u32,
    /// What the drivers do before the next step: which request ends, and how.
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
    /// Ends a random request of a random driver. Returns whether it ended with an error.
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

/// Compares ended bios with those that were submitted.
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
