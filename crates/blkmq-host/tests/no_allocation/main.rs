//! Tests that the request path does not allocate. It is a binary of its own, since its allocator
//! counts for the whole process.

#[path = "../common/mod.rs"]
mod common;
mod sys;

use blkmq_core::sched;
use blkmq_drivers::null::NullConfig;
use blkmq_host::{Attached, QueueId};
use common::{engine, read};

fn turn(attached: &mut Attached, rounds: u64, depth: u64) {
    let mut out = Vec::with_capacity(256);
    for round in 0..rounds {
        for cookie in 0..depth {
            attached.submit(QueueId(0), read(round * depth + cookie)).unwrap();
        }
        while attached.outstanding() > 0 {
            attached.poll(&mut out);
            out.clear();
        }
    }
}

fn main() {
    // There is no test harness, because its threads allocate at any time.
    for elevator in sched::BUILT_IN {
        let engine = engine(1, 1, NullConfig::bare(), elevator);
        let mut attached = engine.attach().unwrap();
        for depth in [1, 32, 64, 200] {
            turn(&mut attached, 8, depth);
            let before = sys::allocations();
            turn(&mut attached, 1000, depth);
            // The one allocation is the caller's list.
            let count = sys::allocations() - before;
            assert!(
                count <= 1,
                "{elevator} at depth {depth}: {count} allocations in {} I/Os",
                1000 * depth
            );
        }
        println!("{elevator}: no allocation on the request path");
    }
    let before = sys::allocations();
    drop(std::hint::black_box(Box::new(7)));
    assert_eq!(sys::allocations() - before, 1, "the counter counts");
}
