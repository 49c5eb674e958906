//! The stage on which a scene is played: an engine with as many reactors as the product would have, the
//! tenants as services spread over them, and the figures that are read while it runs. `scene` defines the
//! tenants, `score` evaluates the result.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use blkmq_core::group::{CapKind, Caps, GroupTree};
use blkmq_core::ids::{GroupId, ReactorId};
use blkmq_core::poll::Policy;
use blkmq_core::queue::TagMode;
use blkmq_core::sched::ElevatorType;
use blkmq_core::time::Nanos;
use blkmq_drivers::file::{Direct, FileConfig, FileDevice, FileDisk};
use blkmq_drivers::null::{NullConfig, NullDevice};
use blkmq_host::QueueId;
use blkmq_host::device::Device;
use blkmq_host::engine::{DiskEntry, Engine, EngineConfig, QueueSpec};
use blkmq_host::service::Service;

use super::scene::{Model, Scene, Tenant, Turn};
use super::score::Series;
use super::tenant::{MEASURE, Meter, STOP, Source, Stage, WARM_UP};
use crate::args::Plan;
use crate::histogram::Histogram;
use crate::usage::Usage;

/// What the tenants share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Medium {
    /// The modelled drive of the scene.
    Model,
    /// A file, with direct I/O.
    File(PathBuf),
}

/// Of all tenants, per second.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Totals {
    pub(super) ios: f64,
    pub(super) bytes: f64,
}

/// Where scenes are played.
#[derive(Clone, Debug)]
pub(super) struct Ground {
    pub(super) medium: Medium,
    /// Threads of the engine, over which tenants are spread.
    pub(super) reactors: usize,
    /// The light tenant's latency target, for the side that has one.
    pub(super) target: Nanos,
}

/// The readings of one visit.
pub(super) struct Visit {
    pub(super) series: Series,
    /// Latencies of the victim.
    pub(super) latency: Histogram,
    pub(super) ios: u64,
    /// I/Os and bytes per second of all tenants together, from a moment after the scene's change
    /// on.
    pub(super) steady: Totals,
    pub(super) elapsed: Duration,
    pub(super) usage: Usage,
    /// The largest part of the time for which a tenant of the crowd had nothing queued, and so did
    /// not demand its share.
    pub(super) dry: f64,
    /// The time of the scene's change.
    pub(super) turned_at: Duration,
}

impl Medium {
    pub(super) fn description(&self) -> String {
        match self {
            Self::Model => format!(
                "null drive of {FLASH_UNITS} units of {} µs ± {} µs, polled; 128-units: of {WIDE_UNITS}; bandwidth=1G: {} µs, \
                 and 1 GiB/s for all together",
                FLASH_NS / 1000,
                FLASH_SPREAD_NS / 1000,
                FLASH_NS / 1000
            ),
            Self::File(path) => format!("{}, past the page cache", path.display()),
        }
    }

    fn open(&self, model: Model) -> Result<(Arc<dyn Device>, u64)> {
        match self {
            Self::Model => {
                let drive = NullDevice::new(null_config(model), &[MODEL_BYTES])?;
                Ok((Arc::new(drive), MODEL_BYTES))
            }
            Self::File(path) => {
                let config = FileConfig {
                    path: path.clone(),
                    read_only: false,
                    direct: Direct::On,
                    ..FileConfig::default()
                };
                let disk = FileDisk::open(&config)?;
                let size = disk.size();
                Ok((Arc::new(FileDevice::new(vec![disk], TAGS)?), size))
            }
        }
    }
}

fn null_config(model: Model) -> NullConfig {
    let flash = NullConfig {
        latency: Nanos(FLASH_NS),
        spread: Nanos(FLASH_SPREAD_NS),
        parallel: FLASH_UNITS,
        depth: TAGS,
        // A sleep that ends 20 µs late would add a quarter to the drive's time.
        poll_queues: u16::MAX,
        ..NullConfig::bare()
    };
    match model {
        Model::Flash => flash,
        Model::Wide => NullConfig {
            parallel: WIDE_UNITS,
            ..flash
        },
        Model::Bandwidth => NullConfig {
            parallel: 0,
            bandwidth: BANDWIDTH,
            ..flash
        },
    }
}

/// Plays a scene under an elevator. With `capacity`, in bytes per second, each tenant is capped at
/// its due part of it.
///
/// # Errors
/// If the engine cannot be started, or an I/O fails.
pub(super) fn play(
    scene: &Scene,
    ground: &Ground,
    elevator: &'static ElevatorType,
    capacity: Option<f64>,
    plan: &Plan,
) -> Result<Visit> {
    let crowd = scene.crowd.len();
    let tenants = scene.tenants();
    let engine = start(scene, ground, elevator, capacity)?;
    let stage = Arc::new(Stage {
        meters: tenants.iter().map(|_| Meter::default()).collect(),
        timed: scene.victim.map(|_| crowd).or(Some(0)),
        latency: Mutex::new(Histogram::new()),
        phase: AtomicU8::new(WARM_UP),
        away: scene.away,
    });
    for (place, tenant) in tenants.iter().enumerate() {
        let (stage, tenant) = (Arc::clone(&stage), *tenant);
        let disk = engine.disk(DISK).context("the engine has no disk")?.clone();
        let with_buffers = ground.medium != Medium::Model;
        let factory =
            move || Box::new(Source::new(stage, place, &tenant, &disk, with_buffers)) as Box<dyn Service>;
        engine.add_service(ReactorId((place % ground.reactors) as u16), Box::new(factory));
    }
    let visit = watch(scene, &engine, &stage, crowd, plan);
    stage.phase.store(STOP, Ordering::Relaxed);
    engine.shutdown(SHUTDOWN_WITHIN)?;
    let failures: u64 = stage
        .meters
        .iter()
        .map(|meter| meter.failures.load(Ordering::Relaxed))
        .sum();
    ensure!(failures == 0, "{}: {failures} I/Os failed", scene.case);
    let latency = std::mem::take(&mut *stage.latency.lock().unwrap_or_else(PoisonError::into_inner));
    Ok(Visit { latency, ..visit? })
}

fn start(
    scene: &Scene,
    ground: &Ground,
    elevator: &'static ElevatorType,
    capacity: Option<f64>,
) -> Result<Engine> {
    let (drive, size) = ground.medium.open(scene.model)?;
    let mut queue = QueueSpec::new("fairness", drive);
    queue.disks.push(DiskEntry {
        name: DISK.into(),
        description: String::new(),
        serial: None,
        export: None,
        size,
        read_only: false,
        group: GroupId::default(),
        block_size: 4096,
    });
    queue.elevator = elevator;
    queue.poll_policy = Policy::Classic;
    queue.tags = TagMode::PerHctx(TAGS);
    queue.requests_per_reactor = REQUESTS;
    queue.groups = scene.tree.clone();
    queue.group_paths = (0..scene.tree.capacity() as u32)
        .map(|id| path(GroupId(id)))
        .collect();
    if let Some(capacity) = capacity {
        cap(&mut queue.groups, scene, capacity);
    }
    let config = EngineConfig {
        reactors: ground.reactors,
        attached_max: 0,
        queues: vec![queue],
        ..EngineConfig::default()
    };
    Ok(Engine::start(config)?)
}

/// The path of a group: the root's, or its number.
fn path(id: GroupId) -> String {
    if id == GroupId(0) {
        "/".into()
    } else {
        format!("/{id}")
    }
}

/// Caps every tenant, the light one included, at its due part of the drive's capacity, like an
/// operator who knows the capacity, but not how much each tenant is going to use.
fn cap(tree: &mut GroupTree, scene: &Scene, capacity: f64) {
    let tenants = scene.tenants();
    for (tenant, due) in tenants.iter().zip(scene.due(&scene.tree, &tenants)) {
        let rate = (capacity * due).max(CAP_MIN) as u64;
        tree.set_caps(tenant.group, Caps::default().with(CapKind::Bps, rate))
            .expect("tenants have groups");
    }
}

/// How long tenants run before they are measured: schedulers that learn have learned by then.
pub(super) fn warm_up(plan: &Plan) -> Duration {
    plan.warm_up.max(plan.window.min(LEARNING_MAX))
}

/// Runs the tenants, reads the counters every few milliseconds, and makes the scene's change
/// half-way through.
fn watch(scene: &Scene, engine: &Engine, stage: &Stage, crowd: usize, plan: &Plan) -> Result<Visit> {
    std::thread::sleep(warm_up(plan));
    let bytes = || {
        stage.meters[..crowd]
            .iter()
            .map(|meter| meter.bytes.load(Ordering::Relaxed))
            .collect::<Vec<u64>>()
    };
    let ios = || {
        stage
            .meters
            .iter()
            .map(|meter| meter.ios.load(Ordering::Relaxed))
            .sum::<u64>()
    };
    let control = engine.control();
    let empty = || -> Vec<u64> {
        let of = |tenant: &Tenant| control.group_stats(QueueId(0), tenant.group).empty_ns;
        scene.crowd.iter().map(of).collect()
    };
    stage.phase.store(MEASURE, Ordering::Relaxed);
    let empty_before = empty();
    let (usage, ios_before, start) = (Usage::of_this_process()?, ios(), Instant::now());
    let totals = || {
        let sum = |of: fn(&Meter) -> &AtomicU64| {
            stage
                .meters
                .iter()
                .map(|meter| of(meter).load(Ordering::Relaxed))
                .sum::<u64>() as f64
        };
        Totals {
            ios: sum(|meter| &meter.ios),
            bytes: sum(|meter| &meter.bytes),
        }
    };
    let mut series = Series::default();
    let mut turned_at = None;
    let mut steady = (start.elapsed(), totals());
    while start.elapsed() < plan.window {
        series.moments.push((start.elapsed(), bytes()));
        if turned_at.is_none() && start.elapsed() >= plan.window / 2 {
            turn(scene, engine, stage, crowd)?;
            turned_at = Some(start.elapsed());
        }
        let is_steady = |at: Duration| start.elapsed() >= at + AFTER_TURN;
        if scene.turn != Turn::Nothing && steady.0 < AFTER_TURN && turned_at.is_some_and(is_steady) {
            steady = (start.elapsed(), totals());
        }
        std::thread::sleep(READ_EVERY);
    }
    series.moments.push((start.elapsed(), bytes()));
    let (since, before) = steady;
    let (seconds, after) = ((start.elapsed() - since).as_secs_f64(), totals());
    let dry = empty()
        .iter()
        .zip(&empty_before)
        .map(|(after, before)| after - before)
        .max();
    let dry = dry.unwrap_or(0) as f64 / start.elapsed().as_nanos() as f64;
    Ok(Visit {
        dry,
        steady: Totals {
            ios: (after.ios - before.ios) / seconds,
            bytes: (after.bytes - before.bytes) / seconds,
        },
        ios: ios() - ios_before,
        elapsed: start.elapsed(),
        usage: Usage::of_this_process()? - usage,
        latency: Histogram::new(),
        turned_at: turned_at.unwrap_or_default(),
        series,
    })
}

fn turn(scene: &Scene, engine: &Engine, stage: &Stage, crowd: usize) -> Result<()> {
    match scene.turn {
        Turn::Nothing => {}
        Turn::Weight(weight) => {
            let path = path(scene.crowd[0].group);
            engine.control().set_group_weight(QueueId(0), &path, weight)?;
        }
        Turn::Silence => stage.meters[crowd - 1].silent.store(true, Ordering::Relaxed),
    }
    Ok(())
}

const DISK: &str = "shared";
const TAGS: u32 = 1024;
const REQUESTS: u32 = 2048;
const FLASH_UNITS: u32 = 16;
const FLASH_NS: u64 = 80_000;
const FLASH_SPREAD_NS: u64 = 8_000;
const WIDE_UNITS: u32 = 128;
const BANDWIDTH: u64 = 1 << 30;
const MODEL_BYTES: u64 = 1 << 40;
/// One request of the largest size per second: no cap may be lower.
pub(super) const CAP_MIN: f64 = (1 << 20) as f64;
const LEARNING_MAX: Duration = Duration::from_millis(1500);
/// After a scene's change its total counts from this time on: the other tenants may take this long
/// to notice.
const AFTER_TURN: Duration = Duration::from_millis(10);
const READ_EVERY: Duration = Duration::from_millis(2);
const SHUTDOWN_WITHIN: Nanos = Nanos::from_secs(10);

#[cfg(test)]
mod tests {
    use super::super::cases;
    use super::*;

    #[test]
    fn caps_leave_each_tenant_its_part_and_the_light_one_is_capped_as_well() {
        let scene = cases::all()
            .into_iter()
            .find(|scene| scene.crowd.len() == 8 && scene.victim.is_some())
            .expect("a light tenant beside eight floods");
        let mut tree = scene.tree.clone();
        cap(&mut tree, &scene, 900e6);
        for tenant in scene.tenants() {
            let node = tree.get(tenant.group).expect("tenants have groups");
            let cap = node.caps.get(CapKind::Bps).expect("every tenant is capped");
            assert_eq!(cap.rate, 100_000_000);
        }
    }
}
