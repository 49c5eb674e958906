//! The time of whole copies of a disk, including start, handshakes and shutdown: like `nbdcopy`, which is
//! compared with them and cannot be timed otherwise.

use std::time::Instant;

use anyhow::Result;
use blkmq_host::engine::Engine;

use super::load::{Job, Load};
use super::{SHUTDOWN_WITHIN, device};
use crate::args::Plan;
use crate::histogram::Histogram;
use crate::rounds::Sample;
use crate::usage::Usage;

/// What one thread of a copy did.
struct Copied {
    ios: u64,
    latency: Histogram,
    /// Usage of the thread, which has ended when the process's usage is read.
    usage: Usage,
}

/// Reads as much as the disk holds, divided between `jobs` attached threads of a new engine, again
/// and again for the plan's window or a little longer.
///
/// # Errors
/// If an engine cannot be started, a thread cannot attach, or an I/O fails.
pub(super) fn measure(
    start: impl Fn() -> Result<Engine>,
    job: Job,
    jobs: u32,
    plan: &Plan,
) -> Result<Sample> {
    let (before, began) = (Usage::of_this_process()?, Instant::now());
    let (mut ios, mut latency, mut usage) = (0, Histogram::new(), Usage::default());
    while began.elapsed() < plan.window {
        let engine = start()?;
        let blocks = device::loaded(&engine, 0)?.size / u64::from(job.block_bytes);
        let each = blocks.div_ceil(u64::from(jobs));
        let copied = std::thread::scope(|scope| {
            let copier = |index| {
                let engine = &engine;
                scope.spawn(move || copy(engine, job, index, each))
            };
            let copiers: Vec<_> = (0..jobs as usize).map(copier).collect();
            copiers
                .into_iter()
                .map(|copier| copier.join().expect("a copier does not panic"))
                .collect::<Result<Vec<_>>>()
        })?;
        for part in copied {
            ios += part.ios;
            latency.merge(&part.latency);
            usage += part.usage;
        }
        engine.shutdown(SHUTDOWN_WITHIN)?;
    }
    let elapsed = began.elapsed();
    usage += Usage::of_this_process()? - before;
    Ok(Sample {
        ios,
        elapsed,
        latency: (&latency).into(),
        usage,
        client: None,
        figures: Vec::new(),
    })
}

fn copy(engine: &Engine, job: Job, index: usize, ios: u64) -> Result<Copied> {
    let disk = device::loaded(engine, index)?;
    let (ios, latency) = Load::new(engine.attach()?, &disk, job, index as u64).copy(ios)?;
    Ok(Copied {
        ios,
        latency,
        usage: Usage::of_this_thread()?,
    })
}
