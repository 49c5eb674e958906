//! Decides what one I/O of the instruction counts is: a 4 KiB random read at depth 64 on an inline null drive, through an
//! attached thread. `examples/direct_path.rs` (no elevator), `multipath_path.rs` (four of them as paths) and `scheduled_path.rs`
//! (mq-deadline) run it under callgrind.

use std::io;
use std::sync::Arc;

use anyhow::{Context, Result};
use blkmq_core::bio::{Op, Status};
use blkmq_core::driver::{Done, Driver, Issued};
use blkmq_core::ids::{Cookie, DiskId, HctxId};
use blkmq_core::limits::Limits;
use blkmq_core::request::Request;
use blkmq_core::sched::Kind;
use blkmq_core::time::Instant;
use blkmq_host::drive::Drive;
use blkmq_host::driver::multipath::{MultipathConfig, MultipathDrive, PathDrive, Selector};
use blkmq_host::driver::null::{NullConfig, NullDrive};
use blkmq_host::driver::{Allocation, Extent};
use blkmq_host::ring::RingHandle;

use super::device::{self, NULL_BYTES, Opened};
use super::load::{Job, Load};

/// Does `count` I/Os (or up to one batch more) and returns their number. A parked thread stays behind.
///
/// # Errors
/// If the engine does not start or an I/O ends with an error.
pub fn run(elevator: Kind, count: u64) -> Result<u64> {
    run_on(null()?, elevator, count)
}

/// As [`run`] without an elevator, on a multipath drive over so many inline null drives.
///
/// # Errors
/// As for [`run`], or if there cannot be so many paths.
pub fn run_multipath(paths: usize, selector: Selector, count: u64) -> Result<u64> {
    let path = |number: usize| Ok(PathDrive::new(format!("p{number}"), null()?, NULL_BYTES));
    let paths = (0..paths).map(path).collect::<Result<_>>()?;
    let config = MultipathConfig {
        selector,
        ..MultipathConfig::default()
    };
    run_on(
        Arc::new(MultipathDrive::new("bench", &config, paths, DEPTH_MAX)?),
        Kind::None,
        count,
    )
}

fn null() -> Result<Arc<dyn Drive>> {
    Ok(Arc::new(NullDrive::new(NullConfig::bare(), &[NULL_BYTES])?))
}

fn run_on(drive: Arc<dyn Drive>, elevator: Kind, count: u64) -> Result<u64> {
    let opened = Opened {
        drive: Arc::new(ParkedReactor(drive)),
        size: NULL_BYTES,
        block_size: 512,
        read_only: true,
        merges: true,
    };
    let engine = device::start(opened, elevator, 1, DEPTH)?;
    let job = Job {
        op: Op::Read,
        block_bytes: 4096,
        depth: DEPTH,
        random: true,
        sample_every: 1,
    };
    let disk = engine.disk(device::DISK).context("the engine has no disk")?;
    let done = Load::new(engine.attach()?, disk, job, 0).run_count(count)?;
    // A shutdown would wait for the parked reactor.
    std::mem::forget(engine);
    Ok(done)
}

/// A drive whose first hardware context parks its thread for ever.
///
/// The engine's own reactor has nothing to do here, and would block in its ring. Callgrind runs one thread at a time and
/// does not know that waiting in a ring blocks: the reactor would keep everybody else from running. It knows parking.
pub(super) struct ParkedReactor(pub(super) Arc<dyn Drive>);

impl Drive for ParkedReactor {
    fn limits(&self) -> Limits {
        self.0.limits()
    }

    fn open_hctx(&self, ring: &RingHandle, hctx: HctxId) -> io::Result<Box<dyn Driver>> {
        if hctx == HctxId(0) {
            return Ok(Box::new(Parked));
        }
        self.0.open_hctx(ring, hctx)
    }
}

impl Allocation for ParkedReactor {
    fn extents(
        &self,
        disk: DiskId,
        offset: u64,
        len: u64,
        max: usize,
        out: &mut Vec<Extent>,
    ) -> io::Result<()> {
        self.0.extents(disk, offset, len, max, out)
    }
}

/// The driver's side of the parked reactor, which is asked for its next event before the reactor first blocks.
struct Parked;

impl Driver for Parked {
    fn issue(&mut self, _rq: &Request, _cookie: Cookie, _last: bool, _now: Instant) -> Issued {
        Issued::Done(Status::Io)
    }

    fn reap(&mut self, _now: Instant, _done: &mut Vec<Done>) {}

    fn next_event(&self) -> Option<Instant> {
        loop {
            std::thread::park();
        }
    }
}

const DEPTH: u32 = 64;
/// As many tags as the engine gives a queue at most for that.
const DEPTH_MAX: u32 = 4096;
