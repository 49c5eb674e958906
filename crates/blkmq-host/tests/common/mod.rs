//! The set-up of the host's tests: an engine on a null drive, and a submitter's loop.
#![allow(dead_code, reason = "each test binary uses its part")]

use std::sync::Arc;

use blkmq_core::bio::{Bio, Op};
use blkmq_core::ids::{DiskId, GroupId};
use blkmq_core::sched::ElevatorType;
use blkmq_drivers::null::{NullConfig, NullDevice};
use blkmq_host::{Attached, DiskEntry, Engine, EngineConfig, QueueId, QueueSpec};

/// Bytes of every disk here.
pub(crate) const SIZE: u64 = 1 << 30;

/// An engine with one queue of one null disk.
pub(crate) fn engine(
    reactors: usize,
    attached_max: usize,
    null: NullConfig,
    elevator: &'static ElevatorType,
) -> Engine {
    Engine::start(EngineConfig {
        reactors,
        attached_max,
        queues: vec![queue("q", null, elevator)],
        ..EngineConfig::default()
    })
    .expect("the engine starts")
}

/// A queue of one null disk with the queue's name.
pub(crate) fn queue(name: &str, null: NullConfig, elevator: &'static ElevatorType) -> QueueSpec {
    let device = NullDevice::new(null, &[SIZE]).expect("a null drive");
    let mut spec = QueueSpec::new(name, Arc::new(device));
    spec.elevator = elevator;
    spec.disks.push(DiskEntry {
        name: name.to_owned(),
        description: String::new(),
        serial: None,
        export: None,
        size: SIZE,
        read_only: false,
        group: GroupId(0),
        block_size: 4096,
    });
    spec
}

/// A 4 KiB read without memory.
pub(crate) fn read(cookie: u64) -> Bio {
    Bio {
        op: Op::Read,
        disk: DiskId(0),
        offset: cookie.wrapping_mul(0x9e37_79b9_7f4a_7c15) % (SIZE / 4096) * 4096,
        len: 4096,
        cookie,
        ..Bio::default()
    }
}

/// Submits `count` reads at `depth` and asserts that each ends exactly once, without an error.
pub(crate) fn submit_and_count(attached: &mut Attached, count: u64, depth: u32) {
    let mut ended = vec![false; count as usize];
    let (mut next, mut seen) = (0, 0);
    let mut out = Vec::new();
    while seen < count {
        while next < count && attached.outstanding() < depth {
            if attached.submit(QueueId(0), read(next)).is_err() {
                break;
            }
            next += 1;
        }
        attached.wait(&mut out, None);
        for bio in out.drain(..) {
            assert!(
                bio.status.is_ok(),
                "bio {} ended with {:?}",
                bio.cookie,
                bio.status
            );
            let before = std::mem::replace(&mut ended[bio.cookie as usize], true);
            assert!(!before, "bio {} ended twice", bio.cookie);
            seen += 1;
        }
    }
    assert_eq!(
        attached.poll(&mut out),
        0,
        "something ended that nobody had submitted"
    );
}
