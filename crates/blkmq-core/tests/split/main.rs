//! Tests splitting and merging between submission and driver: whatever the limits, each request
//! that the driver gets is within them, and together the requests are what was submitted, each byte
//! once and with its own memory.

mod sys;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use blkmq_core::bio::{Bio, Data, Op, Status};
use blkmq_core::driver::{Done, HctxDriver, Issued, TimedOut};
use blkmq_core::ids::{Cookie, DiskId};
use blkmq_core::limits::Limits;
use blkmq_core::local::LocalQueue;
use blkmq_core::queue::{DiskConfig, Effects, Queue, QueueConfig};
use blkmq_core::request::Request;
use blkmq_core::sched::{self, ElevatorType};
use blkmq_core::time::Instant;
use proptest::prelude::*;

/// The memory of each unit of a disk's content; 0 for an operation without memory.
type Content = BTreeMap<(DiskId, u64), usize>;

/// A driver that completes everything at once, and records what it gets.
struct Notes {
    limits: Limits,
    seen: Rc<RefCell<Content>>,
}

impl HctxDriver for Notes {
    fn issue(&mut self, rq: &Request, _cookie: Cookie, _last: bool, _now: Instant) -> Issued {
        self.check(rq);
        let mut seen = self.seen.borrow_mut();
        let mut note = |offset: u64, address: usize| {
            let old = seen.insert((rq.disk(), offset), address);
            assert_eq!(old, None, "byte {offset} of disk {} issued twice", rq.disk());
        };
        let mut offset = rq.offset();
        rq.for_each_piece(|piece| {
            for at in (0..piece.len()).step_by(UNIT as usize) {
                note(offset, piece.start().as_ptr() as usize + at as usize);
                offset += UNIT;
            }
        });
        if !rq.op().has_data() {
            units(rq.offset(), rq.len()).for_each(|offset| note(offset, 0));
            offset += rq.len();
        }
        assert_eq!(offset, rq.offset() + rq.len(), "memory of {rq:?}");
        Issued::Done(Status::Ok)
    }

    fn commit(&mut self) {}

    fn reap(&mut self, _now: Instant, _done: &mut Vec<Done>) {}

    fn timed_out(&mut self, _cookie: Cookie) -> TimedOut {
        TimedOut::Wait
    }
}

impl Notes {
    fn check(&self, rq: &Request) {
        let limits = &self.limits;
        let max = match rq.op() {
            Op::Discard => limits.discard_max,
            Op::WriteZeroes => limits.zeroes_max,
            _ => limits.transfer_max.into(),
        };
        assert!(!rq.is_empty() && rq.len() <= max, "{} bytes of {max}", rq.len());
        assert!(rq.len().is_multiple_of(BLOCK) && rq.offset().is_multiple_of(BLOCK));
        if rq.op().has_data() {
            let mut pieces = 0;
            rq.for_each_piece(|_| pieces += 1);
            assert_eq!(pieces, rq.segment_count());
            assert!(pieces <= limits.segments_max.into(), "{pieces} pieces");
            let (start, end) = (rq.position(), rq.position_end());
            let crosses = limits.boundary != 0 && start / limits.boundary != (end - 1) / limits.boundary;
            assert!(!crosses, "{start} to {end} crosses {}", limits.boundary);
        }
    }
}

/// One bio of a load.
#[derive(Clone, Debug)]
struct Plan {
    op: Op,
    disk: u32,
    /// Blocks between it and the previous bio on its disk; 0 if they are contiguous.
    gap: u64,
    /// Lengths of its pieces of memory, in units.
    pieces: Vec<u32>,
    /// Bios with a lower turn are submitted earlier.
    turn: u8,
}

fn plans() -> impl Strategy<Value = Vec<Plan>> {
    let op = prop_oneof![
        4 => Just(Op::Read),
        4 => Just(Op::Write),
        1 => Just(Op::Discard),
        1 => Just(Op::WriteZeroes),
    ];
    let gap = prop_oneof![4 => Just(0), 1 => 1..8u64];
    let turn = prop_oneof![Just(0), 0..4u8];
    let pieces = prop::collection::vec(1..24u32, 1..10);
    let plan = (op, 0..2u32, gap, pieces, turn).prop_map(|(op, disk, gap, pieces, turn)| Plan {
        op,
        disk,
        gap,
        pieces,
        turn,
    });
    prop::collection::vec(plan, 1..BIOS_MAX)
}

fn limits() -> impl Strategy<Value = Limits> {
    let boundary = prop_oneof![Just(0), 1..40u64];
    (1..64u32, 4..9u16, boundary, 1..64u64, 1..64u64).prop_map(
        |(transfer, segments, boundary, discard, zeroes)| Limits {
            transfer_max: transfer * BLOCK as u32,
            segments_max: segments,
            boundary: boundary * BLOCK,
            discard_max: discard * BLOCK,
            zeroes_max: zeroes * BLOCK,
            ..Limits::default()
        },
    )
}

/// Places the bios on their disks, and sorts them by turn.
fn bios(plans: &[Plan]) -> Vec<Bio> {
    let mut ends = [0; 2];
    let mut bios: Vec<(u8, Bio)> = plans
        .iter()
        .map(|plan| {
            let end = &mut ends[plan.disk as usize];
            let bio = bio(plan, *end + plan.gap * BLOCK);
            *end = bio.end();
            (plan.turn, bio)
        })
        .collect();
    bios.sort_by_key(|&(turn, _)| turn);
    let number = |(n, (_, bio))| Bio {
        cookie: n as u64,
        ..bio
    };
    bios.into_iter().enumerate().map(number).collect()
}

fn bio(plan: &Plan, offset: u64) -> Bio {
    let mut lengths: Vec<u32> = plan.pieces.iter().map(|units| units * UNIT as u32).collect();
    let sum = |lengths: &[u32]| lengths.iter().map(|&len| u64::from(len)).sum::<u64>();
    let odd = sum(&lengths) % BLOCK;
    if odd > 0 {
        lengths.push((BLOCK - odd) as u32);
    }
    let data = if plan.op.has_data() {
        Data::List(sys::lend(&lengths).into())
    } else {
        Data::None
    };
    Bio {
        op: plan.op,
        disk: DiskId(plan.disk),
        offset,
        len: sum(&lengths),
        data,
        ..Bio::default()
    }
}

fn expected(bios: &[Bio]) -> Content {
    let mut content = Content::new();
    for bio in bios {
        let memory = bio.pieces().flat_map(|piece| {
            let start = piece.start().as_ptr() as usize;
            (0..piece.len())
                .step_by(UNIT as usize)
                .map(move |at| start + at as usize)
        });
        let nowhere = std::iter::repeat(0);
        let units = units(bio.offset, bio.len).map(|offset| (bio.disk, offset));
        content.extend(units.zip(memory.chain(nowhere)));
    }
    content
}

fn units(offset: u64, len: u64) -> impl Iterator<Item = u64> {
    (offset..offset + len).step_by(UNIT as usize)
}

fn queue(limits: &Limits, elevator: &'static ElevatorType, seen: &Rc<RefCell<Content>>) -> LocalQueue {
    let mut config = QueueConfig::new("q", 1);
    let disk = |name: &str, base| DiskConfig {
        name: name.into(),
        base,
        size: DISK,
        read_only: false,
        logical_block: BLOCK as u32,
    };
    config.disks = vec![disk("a", 0), disk("b", DISK)];
    config.limits = limits.clone();
    config.elevator = elevator;
    config.requests_per_reactor = 6;
    let (_, mut handles) = Queue::new(config).expect("a sound configuration");
    let driver = Notes {
        limits: limits.clone(),
        seen: Rc::clone(seen),
    };
    handles.remove(0).attach(Some(Box::new(driver)))
}

/// Submits all bios, `per_plug` of them in one plug, and returns those that ended.
fn run(local: &mut LocalQueue, bios: &[Bio], per_plug: usize) -> Vec<Bio> {
    let mut fx = Effects::default();
    let mut now = Instant(1000);
    for (n, bio) in bios.iter().enumerate() {
        let mut waits = bio.clone();
        while let Err(back) = local.submit(waits, now, &mut fx) {
            waits = back;
            local.unplug(now, &mut fx);
            local.run(now, &mut fx);
        }
        if n % per_plug == 0 {
            local.unplug(now, &mut fx);
        }
    }
    while local.outstanding() > 0 {
        now.0 += 1000;
        assert!(now.0 < 10_000_000, "{} bios never end", local.outstanding());
        local.unplug(now, &mut fx);
        local.run(now, &mut fx);
        local.check_invariants();
    }
    fx.ended
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn requests_at_the_driver_are_within_limits_and_all_that_was_submitted(
        plans in plans(),
        limits in limits(),
        elevator in prop::sample::select(sched::BUILT_IN.to_vec()),
        per_plug in 1..16usize,
    ) {
        let bios = bios(&plans);
        let seen = Rc::default();
        let ended = run(&mut queue(&limits, elevator, &seen), &bios, per_plug);
        let mut cookies: Vec<u64> = ended.iter().map(|bio| bio.cookie).collect();
        cookies.sort_unstable();
        prop_assert_eq!(cookies, (0..bios.len() as u64).collect::<Vec<_>>());
        for bio in &ended {
            prop_assert_eq!(bio.status, Status::Ok);
            let submitted = &bios[bio.cookie as usize];
            prop_assert_eq!((bio.offset, bio.len, bio.flags), (submitted.offset, submitted.len, submitted.flags));
        }
        prop_assert_eq!(&*seen.borrow(), &expected(&bios));
    }
}

const BLOCK: u64 = 512;
/// Pieces of memory have multiples of this size, so that some end within a block.
const UNIT: u64 = 256;
const BIOS_MAX: usize = 24;
/// Enough for all the bios, with 10 pieces of 23 units and a gap each; and not a multiple of most
/// boundaries, which are counted from the queue's beginning, not from the disk's.
const DISK: u64 = BIOS_MAX as u64 * 64 * 1024 + BLOCK;
