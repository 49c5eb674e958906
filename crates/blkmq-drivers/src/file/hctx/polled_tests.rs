//! Tests of a hardware context with a device whose queues are polled: `BLKMQ_POLLED_DEVICE`, as in `cargo
//! xtask guest`.

use blkmq_core::bio::Flags;

use super::tests::{Rig, cut, pattern, rig};
use super::*;
use crate::file::Direct;
use crate::testing::{cookie, lend, request_with};

/// A context that is polled, unless there is no device for it.
fn polled_rig() -> Option<Rig> {
    let Some(device) = std::env::var_os("BLKMQ_POLLED_DEVICE") else {
        blkmq_testkit::skip("no device with poll queues; cargo xtask guest has one");
        return None;
    };
    let mut rig = rig(device.as_ref(), Direct::On);
    assert!(rig.hctx.set_polled(true));
    assert!(rig.hctx.polled.is_some(), "{:?}", rig.device.disks()[0].polling());
    Some(rig)
}

/// Looks until so many have ended.
fn look(rig: &mut Rig, count: usize) -> Vec<Done> {
    let mut done = Vec::new();
    while done.len() < count {
        rig.hctx.reap(Instant(0), &mut done);
    }
    done
}

#[test]
fn polled_context_moves_whole_odd_and_scattered_memory() {
    let Some(mut rig) = polled_rig() else { return };
    for (seed, skip, cuts) in [(1, 0, &[][..]), (2, 1, &[]), (3, 0, &[4096, 512])] {
        let data = pattern(seed, 16384);
        for op in [Op::Write, Op::Read] {
            let mut memory = vec![0; 16384 + 4096 + skip];
            let start = memory.as_ptr().align_offset(4096) + skip;
            let memory = &mut memory[start..][..16384];
            if op == Op::Write {
                memory.copy_from_slice(&data);
            }
            let rq = request_with(op, Flags::NONE, 0, 65536, &cut(memory, cuts));
            assert_eq!(rig.hctx.issue(&rq, cookie(5), true, Instant(0)), Issued::Queued);
            assert_eq!(look(&mut rig, 1)[0].status, Status::Ok, "{op:?}, case {seed}");
            assert!(memory == data, "{op:?}, case {seed}");
        }
    }
    assert_eq!(rig.device.ended_polled(), 6);
}

#[test]
fn polled_context_that_is_switched_off_is_polled_until_it_is_empty() {
    let Some(mut rig) = polled_rig() else { return };
    let mut memory = vec![0; 8192];
    let aligned = memory.as_ptr().align_offset(4096);
    let piece = lend(&mut memory[aligned..][..4096]);
    let rq = request_with(Op::Read, Flags::NONE, 0, 0, &[piece]);
    // Not the last of its batch: it waits in the ring.
    assert_eq!(rig.hctx.issue(&rq, cookie(1), false, Instant(0)), Issued::Queued);
    assert!(rig.hctx.set_polled(false), "nothing announces the end");
    assert_eq!(rig.hctx.issue(&rq, cookie(2), true, Instant(0)), Issued::Queued);
    assert_eq!(rig.device.ended_polled(), 0);
    let mut done = look(&mut rig, 1);
    assert!(!rig.hctx.set_polled(false) && rig.hctx.polled.is_none());
    done.extend(rig.wait(1));
    assert!(done.iter().all(|done| done.status.is_ok()));
    assert_eq!(rig.device.ended_polled(), 1, "the second one was not polled");
    assert!(rig.hctx.set_polled(true) && rig.hctx.polled.is_some());
}

#[test]
fn polled_request_that_timed_out_ends_once_and_its_tag_is_free_again() {
    let Some(mut rig) = polled_rig() else { return };
    let mut memory = vec![0; 8192];
    let aligned = memory.as_ptr().align_offset(4096);
    let piece = lend(&mut memory[aligned..][..4096]);
    let rq = request_with(Op::Read, Flags::NONE, 0, 0, &[piece]);
    assert_eq!(rig.hctx.issue(&rq, cookie(3), false, Instant(0)), Issued::Queued);
    assert_eq!(rig.hctx.timed_out(cookie(3)), TimedOut::Wait);
    let end = look(&mut rig, 1)[0];
    assert!(
        end.cookie == cookie(3) && matches!(end.status, Status::Ok | Status::Timeout),
        "{end:?}"
    );
    assert_eq!(rig.hctx.timed_out(cookie(3)), TimedOut::Ended);
    assert_eq!(rig.hctx.issue(&rq, cookie(3), true, Instant(0)), Issued::Queued);
    assert_eq!(look(&mut rig, 1)[0].status, Status::Ok);
}

#[test]
fn polled_context_flushes_through_the_reactors_ring() {
    let Some(mut rig) = polled_rig() else { return };
    let flush = request_with(Op::Flush, Flags::NONE, 0, 0, &[]);
    assert_eq!(rig.run(&flush), Status::Ok);
    assert_eq!(rig.device.ended_polled(), 0);
}
