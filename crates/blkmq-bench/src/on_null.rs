//! A queue with a null drive that is loaded from reactors: a service on each keeps its I/Os in flight. Used
//! by `stats`, `single-dispatch` and `run-queue`; each sets its queue's configuration.

mod load;

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::mpsc;

use anyhow::{Context, Result, ensure};
use blkmq_core::ids::{GroupId, ReactorId};
use blkmq_core::queue::TagMode;
use blkmq_core::time::Nanos;
use blkmq_drivers::null::{NullConfig, NullDevice};
use blkmq_host::engine::{DiskEntry, Engine, EngineConfig, QueueSpec};

use self::load::Load;
use crate::args::Plan;
use crate::histogram::Histogram;
use crate::rounds::Sample;
use crate::usage::Usage;
use crate::window::Window;

/// The load of the queue.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Jobs {
    /// Submitters, a reactor each.
    pub(crate) jobs: u32,
    /// I/Os that each keeps in flight.
    pub(crate) depth: u32,
}

/// Checks the arguments of [`measure`].
///
/// # Errors
/// If a number is out of range.
pub(crate) fn check_load(all_jobs: &[u32], depth: u32) -> Result<()> {
    for jobs in all_jobs {
        ensure!(
            (1..=JOBS_MAX).contains(jobs),
            "--jobs {jobs} rejected: must be from 1 to {JOBS_MAX}"
        );
        ensure!(
            (*jobs..=DEPTH_MAX).contains(&depth),
            "--depth {depth} rejected: must be from {jobs} (one for each of --jobs) to {DEPTH_MAX}"
        );
    }
    Ok(())
}

/// The null drive of `--drive KEY=VALUE,…`; without keys `default`.
///
/// # Errors
/// Names the invalid key or value.
pub(crate) fn drive(keys: Option<&str>, default: NullConfig) -> Result<NullConfig> {
    let Some(keys) = keys else {
        return Ok(default);
    };
    let mut drive = NullConfig::bare();
    for pair in keys.split(',') {
        let (key, value) = pair
            .split_once('=')
            .with_context(|| format!("--drive {pair} rejected: must be KEY=VALUE"))?;
        drive.set(key, value).with_context(|| format!("--drive {pair}"))?;
    }
    drive.check().with_context(|| format!("--drive {keys}"))?;
    Ok(drive)
}

/// Loads a queue with a null drive, whose configuration `set` completes, for the plan's window.
/// Also returns how many runs of hardware contexts were queued meanwhile.
///
/// # Errors
/// If the engine does not start, or an I/O fails.
pub(crate) fn measure(
    load: Jobs,
    drive: NullConfig,
    plan: &Plan,
    set: impl FnOnce(&mut QueueSpec),
) -> Result<(Sample, u64)> {
    let engine = start(load, drive, set)?;
    let window = Arc::new(Window::new(load.jobs as usize));
    let disk = engine.disk(DISK).context("the engine has no disk")?.clone();
    let (latencies, results) = mpsc::channel();
    for index in 0..load.jobs {
        let (window, disk, latencies) = (Arc::clone(&window), disk.clone(), latencies.clone());
        let factory = move || Box::new(Load::new(&disk, load.depth, window, index as usize, latencies)) as _;
        engine.add_service(ReactorId(index as u16), Box::new(factory));
    }
    drop(latencies);
    let control = engine.control();
    // Read at the beginning and the end of the window.
    let schedules = RefCell::new(Vec::with_capacity(2));
    let measured = window.measure(plan, || {
        let events = control.event_stats(disk.queue);
        schedules.borrow_mut().push(events.runs_scheduled);
        Ok([Usage::of_this_process()?, Usage::default()])
    });
    engine.shutdown(SHUTDOWN_WITHIN)?;
    let measured = measured?;
    let mut latency = Histogram::new();
    results.iter().for_each(|part| latency.merge(&part));
    let sample = Sample {
        ios: measured.ios,
        elapsed: measured.elapsed,
        latency: (&latency).into(),
        usage: measured.usage[0],
        ..Sample::default()
    };
    let schedules = schedules.into_inner();
    Ok((sample, schedules[1] - schedules[0]))
}

fn start(load: Jobs, drive: NullConfig, set: impl FnOnce(&mut QueueSpec)) -> Result<Engine> {
    let mut queue = QueueSpec::new("bench", Arc::new(NullDevice::new(drive, &[NULL_BYTES])?));
    queue.disks.push(DiskEntry {
        name: DISK.into(),
        description: String::new(),
        serial: None,
        export: None,
        size: NULL_BYTES,
        read_only: false,
        group: GroupId::default(),
        block_size: 512,
    });
    let in_all = load.depth * load.jobs;
    queue.tags = TagMode::PerHctx(in_all);
    queue.requests_per_reactor = in_all;
    set(&mut queue);
    let config = EngineConfig {
        reactors: load.jobs as usize,
        queues: vec![queue],
        ..EngineConfig::default()
    };
    Ok(Engine::start(config)?)
}

const DISK: &str = "bench";
const NULL_BYTES: u64 = 1 << 40;
const SHUTDOWN_WITHIN: Nanos = Nanos::from_secs(10);
const JOBS_MAX: u32 = 64;
const DEPTH_MAX: u32 = 4096;
