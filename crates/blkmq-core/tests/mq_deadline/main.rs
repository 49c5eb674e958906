//! Tests mq-deadline against a simple oracle: equal histories must give equal decisions, and an
//! oracle with a defect must always be detected.

mod oracle;

use blkmq_core::bio::{Bio, Class, Flags, Op, Prio};
use blkmq_core::ids::{DiskId, GroupId, ReactorId};
use blkmq_core::limits::Limits;
use blkmq_core::request::Request;
use blkmq_core::sched::mq_deadline::MqDeadline;
use blkmq_core::sched::{Elevator, InsertAt, Inserted};
use blkmq_core::time::Instant;
use proptest::prelude::*;
use proptest::test_runner::{TestError, TestRunner};

use crate::oracle::{Item, Oracle, Rules, Wrong};

/// A call of the elevator.
#[derive(Clone, Debug)]
enum Step {
    Insert(Bio),
    Dispatch(usize),
    /// The n-th of the dispatched requests is requeued.
    Requeue(usize),
    WaitMs(u64),
    Set(&'static str, u64),
}

/// The elevator and the oracle, with a record of what was inserted and dispatched.
struct Pair {
    elevator: MqDeadline,
    oracle: Oracle,
    now_ms: u64,
    inserted: u64,
    /// Dispatched and not ended, so they may be requeued.
    out: Vec<(Box<Request>, Item)>,
    /// By cookie, how many times each bio is queued or dispatched.
    under_way: Vec<bool>,
}

impl Pair {
    fn new(rules: Rules) -> Self {
        Self {
            elevator: MqDeadline::new(limits(), REQUESTS_MAX),
            oracle: Oracle::new(rules, limits()),
            now_ms: 0,
            inserted: 0,
            out: Vec::new(),
            under_way: Vec::new(),
        }
    }

    fn take(&mut self, step: &Step) -> Result<(), TestCaseError> {
        match step {
            Step::Insert(bio) => self.insert(bio.clone())?,
            Step::Dispatch(count) => {
                for _ in 0..*count {
                    self.dispatch()?;
                }
            }
            Step::Requeue(n) => self.requeue(*n),
            Step::WaitMs(ms) => self.now_ms += ms,
            Step::Set(name, value) => self.set(name, *value),
        }
        self.elevator.check_invariants();
        prop_assert_eq!(self.elevator.queued(), self.oracle.queued());
        Ok(())
    }

    fn insert(&mut self, mut bio: Bio) -> Result<(), TestCaseError> {
        bio.cookie = self.inserted;
        self.inserted += 1;
        self.under_way.push(true);
        let base = u64::from(bio.disk.0) * DISK_BLOCKS * BLOCK;
        let merged = self.oracle.insert(bio.clone(), base + bio.offset, self.now_ms);
        let rq = Request::for_test(ReactorId(0), bio, base);
        let inserted = self.elevator.insert(rq, InsertAt::Ordered, self.now());
        prop_assert_eq!(inserted == Inserted::Merged, merged);
        Ok(())
    }

    fn dispatch(&mut self) -> Result<(), TestCaseError> {
        let rq = self.elevator.dispatch(self.now());
        let item = self.oracle.dispatch(self.now_ms);
        prop_assert_eq!(rq.is_some(), item.is_some());
        if let (Some(rq), Some(item)) = (rq, item) {
            self.compare(&rq, &item)?;
            self.out.push((rq, item));
        }
        Ok(())
    }

    fn requeue(&mut self, n: usize) {
        if self.out.is_empty() {
            return;
        }
        let (rq, item) = self.out.remove(n % self.out.len());
        self.elevator.insert(rq, InsertAt::Head, self.now());
        self.oracle.requeue(item, self.now_ms);
    }

    fn set(&mut self, name: &str, value: u64) {
        self.elevator.set_tunable(name, value).expect("a valid tunable");
        let rules = &mut self.oracle.rules;
        match name {
            "fifo_batch" => rules.fifo_batch = value,
            "writes_starved" => rules.writes_starved = value,
            "front_merges" => rules.front_merges = value == 1,
            "read_expire" => rules.read_expire = value,
            other => panic!("the oracle has no {other}"),
        }
    }

    /// Checks that the request is the one that the oracle chose, and that its bios are whole,
    /// contiguous, of one kind and within limits.
    fn compare(&self, rq: &Request, item: &Item) -> Result<(), TestCaseError> {
        let mut bios = Vec::new();
        rq.for_each_bio(|bio| bios.push(bio.clone()));
        let cookies = |bios: &[Bio]| bios.iter().map(|bio| bio.cookie).collect::<Vec<_>>();
        prop_assert_eq!(cookies(&bios), cookies(&item.bios));
        prop_assert_eq!(rq.bio_count() as usize, bios.len());
        prop_assert_eq!(rq.len(), bios.iter().map(|bio| bio.len).sum::<u64>());
        prop_assert_eq!(rq.offset(), bios[0].offset);
        prop_assert!(rq.len() <= limits().length_max(rq.op(), rq.position()));
        prop_assert!(!rq.op().has_data() || rq.segment_count() <= limits().segments_max.into());
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
        Ok(())
    }

    /// Empties the elevator, and checks that every inserted bio is dispatched once.
    fn finish(mut self) -> Result<(), TestCaseError> {
        while self.elevator.queued() > 0 {
            self.dispatch()?;
        }
        prop_assert!(self.elevator.dispatch(self.now()).is_none());
        for (rq, _) in &self.out {
            rq.for_each_bio(|bio| {
                let first = std::mem::replace(&mut self.under_way[bio.cookie as usize], false);
                assert!(first, "bio {} came out twice", bio.cookie);
            });
        }
        prop_assert!(!self.under_way.contains(&true), "a bio is lost");
        self.elevator.check_invariants();
        Ok(())
    }

    fn now(&self) -> Instant {
        Instant(self.now_ms * 1_000_000)
    }
}

fn replay(rules: &Rules, steps: &[Step]) -> Result<(), TestCaseError> {
    let mut pair = Pair::new(rules.clone());
    for step in steps {
        pair.take(step)?;
    }
    pair.finish()
}

/// Small limits, so that merges meet each of them.
fn limits() -> Limits {
    Limits {
        transfer_max: 8 * BLOCK as u32,
        segments_max: 5,
        boundary: 16 * BLOCK,
        discard_max: 12 * BLOCK,
        zeroes_max: 4 * BLOCK,
        ..Limits::default()
    }
}

/// Bios of a few kinds on two contiguous disks, never across a boundary, as `split` returns them.
fn bios() -> impl Strategy<Value = Bio> {
    let op = prop_oneof![
        8 => Just(Op::Read),
        6 => Just(Op::Write),
        2 => Just(Op::Discard),
        1 => Just(Op::WriteZeroes),
        1 => Just(Op::Flush),
    ];
    let class = prop_oneof![1 => Just(Class::Rt), 4 => Just(Class::Be), 1 => Just(Class::Idle)];
    let prio =
        (class, prop_oneof![9 => Just(4u8), 1 => Just(5)]).prop_map(|(class, level)| Prio { class, level });
    let flags = prop_oneof![
        20 => Just(Flags::NONE),
        1 => Just(Flags::FUA),
        1 => Just(Flags::PREFLUSH),
        1 => Just(Flags::NO_MERGE),
    ];
    let group = prop_oneof![9 => Just(GroupId(0)), 1 => Just(GroupId(1))];
    let range = (0..2u32, 0..DISK_BLOCKS, 1..4u64);
    (op, prio, flags, group, range).prop_map(|(op, prio, flags, group, (disk, block, blocks))| {
        let blocks = blocks.min(16 - block % 16);
        let (block, blocks) = if op == Op::Flush { (0, 0) } else { (block, blocks) };
        Bio {
            op,
            flags,
            prio,
            group,
            disk: DiskId(disk),
            offset: block * BLOCK,
            len: blocks * BLOCK,
            ..Bio::default()
        }
    })
}

fn histories() -> impl Strategy<Value = Vec<Step>> {
    let waits = prop::sample::select(vec![1u64, 100, 499, 500, 2500, 4999, 5000, 9999, 10000]);
    let tunables = prop::sample::select(vec![
        ("fifo_batch", 1),
        ("fifo_batch", 3),
        ("fifo_batch", 16),
        ("writes_starved", 0),
        ("writes_starved", 2),
        ("front_merges", 0),
        ("front_merges", 1),
        ("read_expire", 0),
        ("read_expire", 500),
    ]);
    let step = prop_oneof![
        30 => bios().prop_map(Step::Insert),
        6 => (1..6usize).prop_map(Step::Dispatch),
        2 => any::<usize>().prop_map(Step::Requeue),
        3 => waits.prop_map(Step::WaitMs),
        1 => tunables.prop_map(|(name, value)| Step::Set(name, value)),
    ];
    prop::collection::vec(step, 0..STEPS_MAX)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn every_history_is_decided_as_the_oracle_decides_it(steps in histories()) {
        replay(&Rules::default(), &steps)?;
    }
}

/// Runs histories until one shows that the elevator does not follow `rules`.
fn assert_found_out(rules: &Rules) {
    let mut runner = TestRunner::deterministic();
    let mut config = ProptestConfig::with_cases(2000);
    config.failure_persistence = None;
    config.max_shrink_iters = 0;
    runner = TestRunner::new_with_rng(config, runner.rng().clone());
    let result = runner.run(&histories(), |steps| {
        let caught = std::panic::AssertUnwindSafe(|| replay(rules, &steps));
        std::panic::catch_unwind(caught).unwrap_or_else(|_| Err(TestCaseError::fail("panicked")))
    });
    assert!(
        matches!(result, Err(TestError::Fail(..))),
        "nobody sees that the elevator differs from {rules:?}"
    );
}

#[test]
fn oracle_with_a_wrong_constant_is_found_out() {
    let right = Rules::default();
    let bent = [
        Rules {
            read_expire: 499,
            ..right.clone()
        },
        Rules {
            read_expire: 501,
            ..right.clone()
        },
        Rules {
            write_expire: 4999,
            ..right.clone()
        },
        Rules {
            write_expire: 5001,
            ..right.clone()
        },
        Rules {
            writes_starved: 1,
            ..right.clone()
        },
        Rules {
            writes_starved: 3,
            ..right.clone()
        },
        Rules {
            fifo_batch: 15,
            ..right.clone()
        },
        Rules {
            fifo_batch: 17,
            ..right.clone()
        },
        Rules {
            front_merges: false,
            ..right.clone()
        },
        Rules {
            prio_aging_expire: 9999,
            ..right.clone()
        },
        Rules {
            prio_aging_expire: 10001,
            ..right
        },
    ];
    bent.iter().for_each(assert_found_out);
}

#[test]
fn oracle_with_a_mistake_is_found_out() {
    for wrong in [
        Wrong::RequeuedLastFirst,
        Wrong::RequeuedAcrossClasses,
        Wrong::GapsStayOpen,
        Wrong::LaterDeadlineInherited,
        Wrong::MergeAcrossDisks,
        Wrong::MergeAcrossGroups,
        Wrong::MergeAcrossLevels,
        Wrong::MergeOfFlush,
        Wrong::MergeBeyondBoundary,
        Wrong::SweepFromZero,
        Wrong::DiscardsAsReads,
        Wrong::DeadlineOneLate,
    ] {
        assert_found_out(&Rules {
            wrong: Some(wrong),
            ..Rules::default()
        });
    }
}

const BLOCK: u64 = 4096;
const DISK_BLOCKS: u64 = 64;
const STEPS_MAX: usize = 300;
const REQUESTS_MAX: usize = STEPS_MAX;
