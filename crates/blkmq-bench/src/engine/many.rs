//! The bench of idle disks and groups, and what they cost: 4 KiB reads, one at a time on each of 20 disks,
//! among disks, or groups, that are idle. `examples/many_path.rs` runs it under callgrind, as `direct` is
//! run.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use blkmq_core::bio::{Bio, Op};
use blkmq_core::group::GroupTree;
use blkmq_core::ids::GroupId;
use blkmq_core::queue::TagMode;
use blkmq_core::sched::ElevatorType;
use blkmq_drivers::null::{NullConfig, NullDevice};
use blkmq_host::engine::{DiskEntry, Engine, EngineConfig, QueueSpec};

use super::device::NULL_BYTES;
use super::direct::ParkedReactor;

/// The disks and groups of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Crowd {
    /// Number of disks.
    pub disks: usize,
    /// They share one queue, as files of one filesystem do; otherwise each has its own.
    pub share_queue: bool,
    /// Number of groups, over which the disks are distributed in turn; 0 for none. With `bfq` a run
    /// may hang outside of callgrind: `bfq` waits for a group until a time that the parked reactor
    /// would have to notice.
    pub groups: usize,
    /// The queues' elevator.
    pub elevator: &'static ElevatorType,
}

/// Does about `count` reads on the first 20 disks and returns their number. A parked thread remains.
///
/// # Errors
/// If there are fewer disks, the engine does not start or an I/O ends with an error.
pub fn run(crowd: Crowd, count: u64) -> Result<u64> {
    ensure!(
        crowd.disks >= ACTIVE,
        "{} disks: fewer than {ACTIVE}",
        crowd.disks
    );
    let engine = start(crowd)?;
    let mut attached = engine.attach()?;
    let disk = |number: usize| {
        let found = engine.disk(&name(number));
        found.context("the engine has no such disk")
    };
    let disks = (0..ACTIVE).map(disk).collect::<Result<Vec<_>>>()?;
    let (mut done, mut out) = (0, Vec::with_capacity(ACTIVE));
    while done < count {
        for disk in &disks {
            let bio = Bio {
                op: Op::Read,
                disk: disk.id,
                group: disk.group,
                offset: done * 4096 % (NULL_BYTES / 2),
                len: 4096,
                ..Bio::default()
            };
            ensure!(attached.submit(disk.queue, bio).is_ok(), "no room for a read");
        }
        while attached.outstanding() > 0 {
            attached.wait(&mut out, None);
            ensure!(out.iter().all(|bio| bio.status.is_ok()), "a read has failed");
            done += out.len() as u64;
            out.clear();
        }
    }
    drop(attached);
    // A shutdown would wait for the parked reactor.
    std::mem::forget(engine);
    Ok(done)
}

fn start(crowd: Crowd) -> Result<Engine> {
    let numbers: Vec<usize> = (0..crowd.disks).collect();
    let on_a_queue = if crowd.share_queue { crowd.disks } else { 1 };
    let queues = numbers
        .chunks(on_a_queue)
        .map(|disks| queue(crowd, disks))
        .collect::<Result<_>>()?;
    let config = EngineConfig {
        attached_max: 1,
        queues,
        ..EngineConfig::default()
    };
    Ok(Engine::start(config)?)
}

fn queue(crowd: Crowd, disks: &[usize]) -> Result<QueueSpec> {
    let sizes = vec![NULL_BYTES; disks.len()];
    let drive = ParkedReactor(Arc::new(NullDevice::new(NullConfig::bare(), &sizes)?));
    let mut queue = QueueSpec::new(format!("q{}", disks[0]), Arc::new(drive));
    queue.elevator = crowd.elevator;
    queue.tags = TagMode::PerHctx(64);
    queue.requests_per_reactor = 64;
    // The root is the first one.
    queue.groups = GroupTree::flat(1 + crowd.groups as u32);
    for &number in disks {
        queue.disks.push(DiskEntry {
            name: name(number),
            description: String::new(),
            serial: None,
            export: None,
            size: NULL_BYTES,
            read_only: true,
            group: GroupId((1 + number % crowd.groups.max(1)).min(crowd.groups) as u32),
            block_size: 512,
        });
    }
    Ok(queue)
}

fn name(number: usize) -> String {
    format!("d{number}")
}

/// Disks that are read.
const ACTIVE: usize = 20;
