//! Tests that each bio that enters the elevator leaves it once, whole and within limits, and that
//! none waits forever: random histories of the gate's calls, on both kinds of drive.

use std::collections::BTreeSet;

use blkmq_core::bio::{Bio, Class, Flags, Op, Prio};
use blkmq_core::group::{GroupTree, Node};
use blkmq_core::ids::{DiskId, GroupId, ReactorId};
use blkmq_core::limits::Limits;
use blkmq_core::request::Request;
use blkmq_core::sched::bfq::Bfq;
use blkmq_core::sched::{Elevator, GroupAware, InsertAt, Note};
use blkmq_core::time::{Instant, Nanos};
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Step {
    Insert(Bio, u16),
    Dispatch(usize),
    End(usize),
    Requeue(usize),
    Wait(Nanos),
    Set(&'static str, u64),
    Group(u32, u32, u16),
    Gone(u32),
}

struct Ledger {
    bfq: Bfq,
    now: Instant,
    inserted: u64,
    under_way: BTreeSet<u64>,
    out: Vec<Box<Request>>,
    parents: [u32; GROUPS],
}

impl Ledger {
    fn new(rotational: bool) -> Self {
        let limits = Limits {
            rotational,
            ..limits()
        };
        Self {
            bfq: Bfq::new(limits, STEPS_MAX, &GroupTree::flat(GROUPS as u32)),
            now: Instant(0),
            inserted: 0,
            under_way: BTreeSet::new(),
            out: Vec::new(),
            parents: [0; GROUPS],
        }
    }

    fn take(&mut self, step: &Step) -> Result<(), TestCaseError> {
        match step {
            Step::Insert(bio, owner) => self.insert(bio.clone(), *owner),
            Step::Dispatch(count) => {
                for _ in 0..*count {
                    self.dispatch()?;
                }
            }
            Step::End(n) => self.end(*n)?,
            Step::Requeue(n) => {
                if !self.out.is_empty() {
                    let rq = self.out.remove(n % self.out.len());
                    self.bfq.insert(rq, InsertAt::Head, self.now);
                }
            }
            Step::Wait(time) => self.now = self.now + *time,
            Step::Set(name, value) => self.bfq.set_tunable(name, *value).expect("a valid tunable"),
            Step::Group(group, parent, weight) => self.set_group(*group, *parent, *weight),
            Step::Gone(group) => self.remove_group(*group),
        }
        self.bfq.check_invariants();
        Ok(())
    }

    fn insert(&mut self, mut bio: Bio, owner: u16) {
        bio.cookie = self.inserted;
        self.under_way.insert(self.inserted);
        self.inserted += 1;
        let base = u64::from(bio.disk.0) * 64 * BLOCK;
        let rq = Request::for_test(ReactorId(owner), bio, base);
        self.bfq.insert(rq, InsertAt::Ordered, self.now);
    }

    fn dispatch(&mut self) -> Result<(), TestCaseError> {
        let Some(rq) = self.bfq.dispatch(self.now) else {
            // It may dispatch nothing although requests are queued: then it waits for a stated
            // time, or for a completion.
            let waits = self.bfq.next_wakeup().is_some() || !self.out.is_empty();
            prop_assert!(self.bfq.queued() == 0 || waits, "{} are left", self.bfq.queued());
            return Ok(());
        };
        let mut bios = Vec::new();
        rq.for_each_bio(|bio| bios.push(bio.clone()));
        prop_assert!(rq.len() <= limits().length_max(rq.op(), rq.position()));
        for pair in bios.windows(2) {
            let (a, b) = (&pair[0], &pair[1]);
            prop_assert_eq!(a.end(), b.offset);
            prop_assert_eq!(
                (a.op, a.disk, a.group, a.prio, a.flags),
                (b.op, b.disk, b.group, b.prio, b.flags)
            );
            prop_assert!(
                !a.flags
                    .has_any(Flags::FUA.with(Flags::PREFLUSH).with(Flags::NO_MERGE))
            );
        }
        self.out.push(rq);
        Ok(())
    }

    fn end(&mut self, n: usize) -> Result<(), TestCaseError> {
        if self.out.is_empty() {
            return Ok(());
        }
        let rq = self.out.remove(n % self.out.len());
        let mut once = true;
        rq.for_each_bio(|bio| once &= self.under_way.remove(&bio.cookie));
        prop_assert!(once, "a bio came out twice");
        self.bfq.completed(&Note::of(&rq, self.now));
        Ok(())
    }

    fn set_group(&mut self, group: u32, parent: u32, weight: u16) {
        let mut at = parent;
        while at != 0 {
            if at == group {
                return;
            }
            at = self.parents[at as usize];
        }
        self.parents[group as usize] = parent;
        self.bfq
            .group_set(GroupId(group), &Node::new(GroupId(parent), weight));
    }

    /// Removes a group without children if nothing is under way; a new one gets its number.
    fn remove_group(&mut self, group: u32) {
        if self.under_way.is_empty() && !self.parents.contains(&group) {
            self.bfq.group_gone(GroupId(group));
            self.bfq.check_invariants();
            self.set_group(group, 0, 100);
        }
    }

    /// Completes everything: nothing may be left, and it must come to an end.
    fn finish(mut self) -> Result<(), TestCaseError> {
        for _ in 0..20 * STEPS_MAX {
            self.dispatch()?;
            self.end(0)?;
            self.now = self.now + Nanos::from_millis(1);
            self.bfq.check_invariants();
            if self.under_way.is_empty() {
                break;
            }
        }
        prop_assert!(
            self.under_way.is_empty(),
            "{} bios are left",
            self.under_way.len()
        );
        prop_assert_eq!(self.bfq.queued(), 0);
        Ok(())
    }
}

fn limits() -> Limits {
    Limits {
        transfer_max: 8 * BLOCK as u32,
        segments_max: 5,
        boundary: 16 * BLOCK,
        discard_max: 12 * BLOCK,
        ..Limits::default()
    }
}

fn bios() -> impl Strategy<Value = Bio> {
    let op =
        prop_oneof![8 => Just(Op::Read), 6 => Just(Op::Write), 2 => Just(Op::Discard), 1 => Just(Op::Flush)];
    let class = prop_oneof![1 => Just(Class::Rt), 4 => Just(Class::Be), 1 => Just(Class::Idle)];
    let prio =
        (class, prop_oneof![9 => Just(4u8), 1 => 0..8u8]).prop_map(|(class, level)| Prio { class, level });
    let flags = prop_oneof![
        20 => Just(Flags::NONE),
        1 => Just(Flags::FUA),
        1 => Just(Flags::NO_MERGE),
    ];
    let range = (0..2u32, 0..64u64, 1..4u64);
    (op, prio, flags, 0..GROUPS as u32, 0..3u32, range).prop_map(
        |(op, prio, flags, group, client, (disk, block, blocks))| {
            let blocks = blocks.min(16 - block % 16);
            let (block, blocks) = if op == Op::Flush { (0, 0) } else { (block, blocks) };
            Bio {
                op,
                flags,
                prio,
                group: GroupId(group),
                client,
                disk: DiskId(disk),
                offset: block * BLOCK,
                len: blocks * BLOCK,
                ..Bio::default()
            }
        },
    )
}

fn histories() -> impl Strategy<Value = Vec<Step>> {
    let tunables = prop::sample::select(vec![
        ("slice_idle", 0),
        ("slice_idle", 8),
        ("strict_guarantees", 0),
        ("strict_guarantees", 1),
        ("low_latency", 0),
        ("low_latency", 1),
        ("max_budget", 0),
        ("max_budget", 64),
        ("timeout_sync", 1),
        ("fifo_expire_sync", 1),
        ("request_cost", 0),
        ("request_cost", 64),
    ]);
    let waits = prop::sample::select(vec![10u64, 100, 1_000, 8_000, 200_000, 3_000_000]);
    let step = prop_oneof![
        30 => (bios(), 0..2u16).prop_map(|(bio, owner)| Step::Insert(bio, owner)),
        12 => (1..6usize).prop_map(Step::Dispatch),
        12 => any::<usize>().prop_map(Step::End),
        2 => any::<usize>().prop_map(Step::Requeue),
        4 => waits.prop_map(|us| Step::Wait(Nanos::from_micros(us))),
        1 => tunables.prop_map(|(name, value)| Step::Set(name, value)),
        2 => (1..GROUPS as u32, 0..GROUPS as u32, 1..1000u16).prop_map(|(g, p, w)| Step::Group(g, p, w)),
        1 => (1..GROUPS as u32).prop_map(Step::Gone),
    ];
    prop::collection::vec(step, 0..STEPS_MAX)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn every_bio_comes_out_once_and_nothing_waits_for_ever(rotational: bool, steps in histories()) {
        let mut ledger = Ledger::new(rotational);
        for step in &steps {
            ledger.take(step)?;
        }
        ledger.finish()?;
    }
}

const BLOCK: u64 = 4096;
const GROUPS: usize = 5;
const STEPS_MAX: usize = 250;
