//! The comparison of ways to wait for a device: one thread, a modelled device in process, and for each way
//! the I/Os, the latency and the processor time, compared with the least that is possible on this host.

mod limit;
mod modelled;

use std::fmt::Write;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use blkmq_core::bio::{Bio, Op};
use blkmq_core::ids::GroupId;
use blkmq_core::poll::Wait;
use blkmq_core::queue::TagMode;
use blkmq_core::time::{Instant, Nanos};
use blkmq_host::control::Control;
use blkmq_host::engine::{DiskEntry, Engine, EngineConfig, QueueSpec};
use blkmq_host::{Attached, QueueId, sleep};
use blkmq_sim::scenario::poll::{DEVICES, ModelledDevice, Shape, Side};
use rustix::time::{ClockId, clock_gettime};

use self::limit::Times;
use self::modelled::Modelled;
use crate::args::{BenchArgs, Plan};
use crate::histogram::Histogram;
use crate::report::{self, About, Report, Row};
use crate::rounds::{self, Point, Sample};
use crate::usage::Usage;

/// Compare ways to wait for a device: block, poll, sleep for half of its time, sleep as predicted
#[derive(clap::Args, Clone, Debug)]
pub struct PollArgs {
    /// What all benches have.
    #[command(flatten)]
    pub common: BenchArgs,
    /// Times of the modelled devices, in µs [default: 5,20,50,100,200]
    #[arg(long, value_name = "US", value_delimiter = ',')]
    pub device: Vec<u64>,
    /// How their times differ: fixed, spread, bimodal, step, mixed [default: all]
    #[arg(long, value_name = "SHAPE", value_delimiter = ',', value_parser = shape)]
    pub shape: Vec<Shape>,
    /// Reads under way [default: 1; with spread also 4 and 32]
    #[arg(long, value_name = "N", value_delimiter = ',')]
    pub depth: Vec<u32>,
}

/// Runs the bench and prints its report; progress goes to stderr.
///
/// # Errors
/// If an option is out of range, the engine does not start, an I/O fails, or a file cannot be written.
pub fn main(args: &PollArgs) -> Result<()> {
    let cases = cases(args)?;
    let plan = args.common.plan(cases.len() * Side::ALL.len(), SET_UP)?;
    let mut points = points(&cases);
    let mut report = Report::start("poll", about(), &plan);
    let rows = rounds::run(&plan, &mut points)?;
    drop(points);
    report.finish(rows, &args.common)?;
    report::say(&summary(&report.rows));
    Ok(())
}

fn cases(args: &PollArgs) -> Result<Vec<(ModelledDevice, u32)>> {
    let or = |given: &[u64], default: &[u64]| if given.is_empty() { default } else { given }.to_vec();
    let shapes = if args.shape.is_empty() {
        Shape::ALL.to_vec()
    } else {
        args.shape.clone()
    };
    let mut cases = Vec::new();
    for &shape in &shapes {
        for us in or(&args.device, &DEVICES) {
            ensure!(
                (1..=DEVICE_MAX_US).contains(&us),
                "--device {us} rejected: must be from 1 to {DEVICE_MAX_US} µs"
            );
            let default: &[u32] = if shape == Shape::Spread { &[1, 4, 32] } else { &[1] };
            let depths = if args.depth.is_empty() {
                default
            } else {
                &args.depth
            };
            for &depth in depths {
                ensure!(
                    (1..=DEPTH_MAX).contains(&depth),
                    "--depth {depth} rejected: must be from 1 to {DEPTH_MAX}"
                );
                cases.push((ModelledDevice { us, shape }, depth));
            }
        }
    }
    Ok(cases)
}

fn points(cases: &[(ModelledDevice, u32)]) -> Vec<Point<'_>> {
    let mut points = Vec::new();
    for &(device, depth) in cases {
        let times = Times::of(device);
        points.extend(Side::ALL.map(|side| Point {
            case: format!("device={device}/depth={depth}"),
            side: side.name().into(),
            measure: Box::new(move |plan| measure(device, depth, times, side, plan)),
        }));
    }
    points
}

/// Starts an engine on a device, loads it from this thread, and measures it.
fn measure(device: ModelledDevice, depth: u32, times: Times, side: Side, plan: &Plan) -> Result<Sample> {
    // Measured in the same visit, because a host's wake-up times change from minute to minute.
    let host = sleep::measure_host(HOST_SLEEPS).context("measuring how late this host wakes a sleeper")?;
    let engine = start(device, side)?;
    let attached = engine.attach()?;
    let mut load = Load::new(attached, engine.control(), device, depth);
    load.run(plan.warm_up.max(LEARNING))?;
    let before = load.reading()?;
    load.latencies = Histogram::new();
    load.run(plan.window)?;
    let after = load.reading()?;
    let latency = (&load.latencies).into();
    drop(load);
    engine.shutdown(SHUTDOWN_WITHIN)?;
    let elapsed = Duration::from_nanos(after.at.since(before.at).0);
    let usage = after.usage - before.usage;
    let slept = after.slept - before.slept;
    let overslept = after.overslept - before.overslept;
    Ok(Sample {
        ios: after.ios - before.ios,
        elapsed,
        latency,
        usage,
        figures: vec![
            ("cpu", usage.cpu_ns as f64 / elapsed.as_nanos() as f64),
            ("cpu_limit", times.cpu_limit(&host, depth)),
            ("oversleep_rate", overslept as f64 / slept.max(1) as f64),
            (
                "slept_rate",
                slept as f64 / (after.ios - before.ios).max(1) as f64,
            ),
            ("late_p50_ns", host.late_percent(50).0 as f64),
            ("late_p90_ns", host.late_percent(90).0 as f64),
            ("late_p99_ns", host.late_percent(99).0 as f64),
            ("sleep_cost_ns", host.cost.0 as f64),
        ],
        ..Sample::default()
    })
}

fn start(device: ModelledDevice, side: Side) -> Result<Engine> {
    let setting = side.setting();
    let mut queue = QueueSpec::new("bench", Arc::new(Modelled(device)));
    queue.disks.push(DiskEntry {
        name: "bench".into(),
        description: String::new(),
        serial: None,
        export: None,
        size: DISK_BYTES,
        read_only: false,
        group: GroupId::default(),
        block_size: 512,
    });
    queue.tags = TagMode::PerHctx(DEPTH_MAX);
    queue.requests_per_reactor = DEPTH_MAX;
    queue.merges = false;
    queue.io_poll = Some(setting.is_polled);
    queue.poll_policy = setting.policy;
    Ok(Engine::start(EngineConfig {
        attached_max: 1,
        wait: if side == Side::Block {
            Wait::Block
        } else {
            Wait::Auto
        },
        queues: vec![queue],
        ..EngineConfig::default()
    })?)
}

/// The reader: this thread, attached.
struct Load {
    attached: Attached,
    control: Control,
    device: ModelledDevice,
    depth: u32,
    submitted: u64,
    ended: u64,
    latencies: Histogram,
}

/// The usage and the counts so far.
struct Reading {
    at: Instant,
    usage: Usage,
    ios: u64,
    slept: u64,
    overslept: u64,
}

impl Load {
    fn new(attached: Attached, control: Control, device: ModelledDevice, depth: u32) -> Self {
        Self {
            attached,
            control,
            device,
            depth,
            submitted: 0,
            ended: 0,
            latencies: Histogram::new(),
        }
    }

    /// Reads for `time`, and then until no read is in flight.
    fn run(&mut self, time: Duration) -> Result<()> {
        let end = self.attached.now() + Nanos(time.as_nanos() as u64);
        let mut out = Vec::with_capacity(self.depth as usize);
        let mut now = self.attached.now();
        loop {
            while now < end && self.attached.outstanding() < self.depth {
                self.submit(now)?;
            }
            if self.attached.outstanding() == 0 {
                return Ok(());
            }
            self.attached.wait(&mut out, None);
            now = self.attached.now();
            for bio in out.drain(..) {
                ensure!(bio.status.is_ok(), "a read ended with {:?}", bio.status);
                self.latencies.record(now.since(Instant(bio.cookie)).0);
                self.ended += 1;
            }
        }
    }

    fn submit(&mut self, now: Instant) -> Result<()> {
        let len = self.device.len(self.submitted);
        let place = self.submitted.wrapping_mul(0x9e37_79b9_7f4a_7c15) % (DISK_BYTES / len);
        self.submitted += 1;
        let bio = Bio {
            op: Op::Read,
            offset: place * len,
            len,
            cookie: now.0,
            ..Bio::default()
        };
        let taken = self.attached.submit(QueueId(0), bio);
        ensure!(
            taken.is_ok(),
            "a read was refused with fewer than {DEPTH_MAX} under way"
        );
        Ok(())
    }

    fn reading(&self) -> Result<Reading> {
        let stats = self.control.poll_stats(QueueId(0));
        let time = clock_gettime(ClockId::ProcessCPUTime);
        Ok(Reading {
            at: self.attached.now(),
            usage: Usage {
                // Exact to the nanosecond, unlike procfs, which is up to a tick behind for a
                // running thread.
                cpu_ns: time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64,
                ..Usage::of_this_process()?
            },
            ios: self.ended,
            slept: stats.iter().map(|(_, seen)| seen.slept).sum(),
            overslept: stats.iter().map(|(_, seen)| seen.overslept).sum(),
        })
    }
}

fn about() -> About {
    About {
        question: "what does it cost, in processor time and latency, to wait for a device in one way or another?".into(),
        setting: vec![
            "one thread reads from a modelled device in process, which serves any number at once; 4 KiB, mixed: 512 B and 64 KiB".into(),
            "block: a timer wakes the thread when a read ends, as an interrupt would; classic: it looks all the time".into(),
            "half-mean, half-min: it sleeps for half of the mean of 100 ms, or of the shortest time ever, then looks; ours: as predicted".into(),
            "cpu: of a core; cpu_limit: a sleep and the spreads of lateness and device, by the device's time (docs/benchmarks/poll.md)".into(),
        ],
    }
}

/// Each side compared with classic polling, and the published figures.
fn summary(rows: &[Row]) -> String {
    let mut lines = String::from(
        "\nIOPS, and p99, in percent of classic's; processor time in percent of a core; slept for, and of these overslept, in percent.\n\
         case                          side        IOPS    p99    CPU  limit  slept  overslept\n",
    );
    for row in rows {
        let classic = rows
            .iter()
            .find(|other| other.case == row.case && other.side == Side::Classic.name());
        let Some(classic) = classic else { continue };
        let figure = |name: &str| 100.0 * row.figures.get(name).copied().unwrap_or(f64::NAN);
        let _ = writeln!(
            lines,
            "{:<29} {:<9} {:>6.1} {:>6.1} {:>6.1} {:>6.1} {:>6.1} {:>10.2}",
            row.case,
            row.side,
            100.0 * row.iops / classic.iops,
            100.0 * row.p99_ns as f64 / classic.p99_ns.max(1) as f64,
            figure("cpu"),
            figure("cpu_limit"),
            figure("slept_rate"),
            figure("oversleep_rate"),
        );
    }
    lines + PUBLISHED
}

fn shape(name: &str) -> Result<Shape, String> {
    let found = Shape::ALL.into_iter().find(|shape| shape.name() == name);
    found.ok_or_else(|| "must be fixed, spread, bimodal, step or mixed".to_owned())
}

const PUBLISHED: &str = "\
Published: 512 B and 64 KiB in turn on a drive of 5.2 µs, Linux 2016: classic 39.9 thousand IOPS at 100 % of a core, half of the mean 94 %
of that at 68, interrupts 65 % at 39. io_uring 2024: polled 470 thousand, half of the minimum 76 % of that at 85, interrupts 43 %.
Compare columns, not tables: other hosts wake in 1 to 3 µs.
";
/// Most reads under way.
const DEPTH_MAX: u32 = 256;
const DEVICE_MAX_US: u64 = 10_000;
const DISK_BYTES: u64 = 1 << 40;
/// Sleeps before each visit that measure how late this host wakes a thread.
const HOST_SLEEPS: u32 = 200;
/// Time for these sleeps, for starting and ending an engine, and for learning.
const SET_UP: Duration = Duration::from_millis(145);
/// Every side has its estimate before it is measured: sleeping for half of the mean needs a full
/// window of 100 ms.
const LEARNING: Duration = Duration::from_millis(120);
const SHUTDOWN_WITHIN: Nanos = Nanos::from_secs(10);
