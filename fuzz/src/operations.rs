//! A sequence of operations against a queue of the core, whose drivers are answered by hand.
//!
//! The first bytes choose the queue (see [`Bench::new`]), the rest are operations: submissions of every kind, completions
//! in any order and with any status, drivers that push back, freezes, quiesces, switches of elevator and depth, time. At
//! the end reactors run only when something wakes them. Broken would be: a bio that ends twice or never, or with a status
//! that nobody gave; a request the drive cannot take; one issued while quiesced; or an invariant of the core.

mod bench;
mod hand;

use blkmq_core::bio::{Bio, Class, Flags, Op, Prio, Status};
use blkmq_core::driver::Issued;
use blkmq_core::ids::{DiskId, GroupId};
use blkmq_core::sched;
use blkmq_core::time::Nanos;

use bench::{BLOCK_BYTES, Bench, GROUPS};

/// Runs one input.
///
/// # Panics
/// An invariant is broken.
pub fn run(data: &[u8]) {
    let mut bytes = Bytes(data);
    let Some(setting) = bytes.array() else {
        return;
    };
    let mut bench = Bench::new(setting);
    while step(&mut bench, &mut bytes).is_some() {
        bench.check();
    }
    bench.finish();
}

/// Does the next operation; `None` at the end of the input.
fn step(bench: &mut Bench, bytes: &mut Bytes<'_>) -> Option<()> {
    let code = bytes.one()?;
    // The upper half chooses who does it.
    let side = usize::from(code >> 4) % bench.sides.len();
    match code & 15 {
        0..=3 => {
            let bio = bio(bytes)?;
            bench.submit(side, bio);
        }
        4 => bench.unplug(side),
        5 => bench.run(side),
        6 | 7 => {
            let [which, status] = bytes.array()?;
            bench.complete(side, which.into(), STATUSES[usize::from(status) % STATUSES.len()]);
        }
        8 => {
            let [answer, status] = bytes.array()?;
            let status = STATUSES[usize::from(status) % STATUSES.len()];
            let answers = [
                Issued::Resource,
                Issued::DeviceResource,
                Issued::Done(status),
                Issued::Queued,
            ];
            bench.answer(side, answers[usize::from(answer) % answers.len()]);
        }
        9 => bench.freeze_begin(),
        10 => bench.freeze_end(),
        11 => bench.quiesce_begin(),
        12 => bench.quiesce_end(),
        13 => bench.set_elevator(sched::BUILT_IN[usize::from(bytes.one()?) % sched::BUILT_IN.len()]),
        14 => match bytes.array()? {
            [which @ 0..128, value] => bench.set_tunable(which.into(), value.into()),
            [_, depth] => bench.set_depth(depth.into()),
        },
        _ => match bytes.one()? {
            255 => bench.let_go_of_late_requests(),
            // From 1 us to beyond every time limit and deadline.
            time => bench.wait(Nanos(1000 << (time % 28))),
        },
    }
    Some(())
}

/// Seven bytes: kind, modifiers, disk and group, priority, place, length, and what is odd about them.
fn bio(bytes: &mut Bytes<'_>) -> Option<Bio> {
    let [op, flags, owner, prio, place, blocks, odd] = bytes.array()?;
    let op = OPS[usize::from(op) % OPS.len()];
    let classes = [Class::Be, Class::Rt, Class::Idle];
    let mut bio = Bio {
        op,
        // All that a submitter can set.
        flags: Flags(flags & 31),
        prio: Prio {
            class: classes[usize::from(prio) % classes.len()],
            level: prio / 3 % 8,
        },
        disk: DiskId(u32::from(owner) & 1),
        group: GroupId(u32::from(owner >> 1) % GROUPS),
        offset: u64::from(place) * BLOCK_BYTES,
        len: u64::from(blocks % 48) * BLOCK_BYTES,
        ..Bio::default()
    };
    if op == Op::Flush && odd & 1 == 0 {
        (bio.offset, bio.len) = (0, 0);
    }
    match odd {
        240.. => bio.len += u64::from(odd & 15),
        224..240 => bio.offset = u64::MAX - bio.offset,
        _ => {}
    }
    Some(bio)
}

/// What is left of the input.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn one(&mut self) -> Option<u8> {
        self.array().map(|[byte]| byte)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*head)
    }
}

const OPS: [Op; 5] = [Op::Read, Op::Write, Op::Flush, Op::Discard, Op::WriteZeroes];
/// Good ends first and often, so that sequences get somewhere.
const STATUSES: [Status; 8] = [
    Status::Ok,
    Status::Ok,
    Status::Requeue,
    Status::Ok,
    Status::Medium,
    Status::Transport,
    Status::NoSpace,
    Status::NotSupported,
];
