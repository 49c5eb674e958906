//! The engine bench, which measures the cost of an I/O in the engine itself: load in process on attached
//! threads, without a protocol or a hand-over; on a file, compared with fio's io_uring engine.

pub mod direct;
pub mod many;

pub(crate) mod before;
mod copies;
pub(crate) mod device;
mod load;
mod nbdcopy;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, ensure};
use blkmq_core::bio::Op;
use blkmq_core::sched::{self, ElevatorType};
use blkmq_host::engine::Engine;
use blkmq_host::value;

pub use self::device::DeviceArg;
pub(crate) use self::device::{NULL_BYTES, Opened, start};
pub(crate) use self::load::Job;
use self::load::Load;
use crate::args::{BenchArgs, Plan, elevator};
use crate::histogram::Histogram;
use crate::report::{self, About, Report, Row};
use crate::rounds::{self, Point, Sample};
use crate::usage::Usage;
use crate::window::Window;
use crate::{fio, table};

/// Measure the engine in process: IOPS, latency and CPU per I/O
#[derive(clap::Args, Clone, Debug)]
pub struct EngineArgs {
    /// What all benches have.
    #[command(flatten)]
    pub common: BenchArgs,
    /// What to run on: null, ram, file:PATH or an NBD URI; a file is also measured with fio, where
    /// that is installed, and an NBD server with nbdcopy, if --rw is read
    #[arg(long, value_name = "DEVICE", default_value = "null")]
    pub device: DeviceArg,
    /// Elevators to measure [default: all; on a file or an NBD server: none]
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_parser = elevator)]
    pub elevator: Vec<&'static ElevatorType>,
    /// Submitters, a thread each [default: 1,2,8; on a file: 1; on an NBD server, a connection
    /// each: 1,4]
    #[arg(long, value_name = "N", value_delimiter = ',')]
    pub jobs: Vec<u32>,
    /// I/Os under way per submitter [default: 1,16,64,256,1024; on a file: 1,32; on an NBD server: 64]
    #[arg(long, value_name = "N", value_delimiter = ',')]
    pub depth: Vec<u32>,
    /// What to do
    #[arg(long, value_name = "PATTERN", default_value = "randread")]
    pub rw: Pattern,
    /// Bytes of each I/O
    #[arg(long, value_name = "SIZE", default_value = "4k", value_parser = block_size)]
    pub bs: u32,
    /// Allow writing to the file or server: what is there is lost
    #[arg(long)]
    pub overwrite: bool,
    /// Give each submitter a disk and a group of its own, on the null drive: a scheduler then
    /// counts and shares by group
    #[arg(long)]
    pub groups: bool,
    /// Another build of blkmq to compare with: it becomes the side `before`, this one `after`
    #[arg(long, value_name = "PROGRAM")]
    pub before: Option<PathBuf>,
}

/// What is read or written, and in which order; named as fio does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Pattern {
    /// Read at random offsets.
    Randread,
    /// Write at random offsets.
    Randwrite,
    /// Read onwards.
    Read,
    /// Write onwards.
    Write,
}

impl Pattern {
    pub(crate) const fn op(self) -> Op {
        match self {
            Self::Randread | Self::Read => Op::Read,
            Self::Randwrite | Self::Write => Op::Write,
        }
    }

    pub(crate) const fn is_random(self) -> bool {
        matches!(self, Self::Randread | Self::Randwrite)
    }

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Randread => "randread",
            Self::Randwrite => "randwrite",
            Self::Read => "read",
            Self::Write => "write",
        }
    }
}

impl EngineArgs {
    /// Whether whole copies are timed, including start and handshake: `nbdcopy`, the other side,
    /// can be timed in no other way.
    fn copies(&self) -> bool {
        matches!(self.device, DeviceArg::Nbd(_)) && self.rw == Pattern::Read
    }
}

/// Runs the bench and prints its report; progress goes to stderr.
///
/// # Errors
/// If an option is out of range, the device cannot be opened or fails, or a file cannot be written.
pub fn main(args: &EngineArgs) -> Result<()> {
    let args = &with_defaults(args)?;
    let mut points = points(args);
    let plan = args.common.plan(points.len(), SET_UP)?;
    let mut report = Report::start("engine", about(args), &plan);
    let rows = rounds::run(&plan, &mut points)?;
    drop(points);
    report.finish(rows, &args.common)?;
    report::say(&summary(&report.rows));
    Ok(())
}

/// Fills in the defaults that depend on the device, and checks everything.
fn with_defaults(args: &EngineArgs) -> Result<EngineArgs> {
    let mut args = args.clone();
    let (elevators, jobs, depths): (&[&'static ElevatorType], &[u32], &[u32]) = match args.device {
        DeviceArg::Null | DeviceArg::Ram => (&sched::BUILT_IN, &[1, 2, 8], &[1, 16, 64, 256, 1024]),
        DeviceArg::File(_) => (&[sched::NONE], &[1], &[1, 32]),
        DeviceArg::Nbd(_) => (&[sched::NONE], &[1, 4], &[64]),
    };
    fill_in(&mut args.elevator, elevators);
    fill_in(&mut args.jobs, jobs);
    fill_in(&mut args.depth, depths);
    for depth in &args.depth {
        ensure!(
            (1..=DEPTH_MAX).contains(depth),
            "--depth {depth} rejected: must be from 1 to {DEPTH_MAX}"
        );
    }
    for jobs in &args.jobs {
        ensure!(
            (1..=JOBS_MAX).contains(jobs),
            "--jobs {jobs} rejected: must be from 1 to {JOBS_MAX}"
        );
    }
    if let DeviceArg::File(path) = &args.device {
        device::check_file(path, args.bs)?;
    }
    ensure!(
        !args.groups || args.device == DeviceArg::Null,
        "--groups rejected: it needs --device null"
    );
    let content = match &args.device {
        DeviceArg::Null | DeviceArg::Ram => None,
        DeviceArg::File(path) => Some(path.display().to_string()),
        DeviceArg::Nbd(uri) => Some(uri.clone()),
    };
    if let Some(content) = content {
        ensure!(
            !args.rw.op().is_write() || args.overwrite,
            "--rw {} writes to {content}: say --overwrite if its content may be lost",
            args.rw.name()
        );
    }
    Ok(args)
}

fn fill_in<T: Copy>(list: &mut Vec<T>, defaults: &[T]) {
    if list.is_empty() {
        list.extend_from_slice(defaults);
    }
}

fn points(args: &EngineArgs) -> Vec<Point<'_>> {
    let mut points = Vec::new();
    for &elevator in &args.elevator {
        for &jobs in &args.jobs {
            for &depth in &args.depth {
                let case = case(args, elevator, jobs, depth);
                if let Some(program) = &args.before {
                    points.push(Point {
                        case: case.clone(),
                        side: "before".into(),
                        measure: Box::new(move |plan| {
                            before::measure(program, args, elevator, jobs, depth, plan)
                        }),
                    });
                }
                points.push(Point {
                    case: case.clone(),
                    side: if args.before.is_some() { "after" } else { "ours" }.into(),
                    measure: Box::new(move |plan| measure(args, elevator, jobs, depth, plan)),
                });
                if let DeviceArg::Nbd(uri) = &args.device
                    && args.copies()
                    && nbdcopy::is_installed()
                {
                    points.push(Point {
                        case: case.clone(),
                        side: "nbdcopy".into(),
                        measure: Box::new(move |plan| {
                            nbdcopy::measure(uri, args.device.size()?, jobs, depth, args.bs, plan)
                        }),
                    });
                }
                if matches!(args.device, DeviceArg::File(_)) && fio::is_installed() {
                    points.push(Point {
                        case,
                        side: "fio".into(),
                        measure: Box::new(move |plan| measure_fio(args, jobs, depth, plan)),
                    });
                }
            }
        }
    }
    points
}

/// The point's name; the default, random reads of 4 KiB, is not part of it.
fn case(args: &EngineArgs, elevator: &'static ElevatorType, jobs: u32, depth: u32) -> String {
    let mut case = format!("{}/{elevator}/jobs={jobs}/depth={depth}", args.device);
    if args.rw != Pattern::Randread {
        case += &format!("/rw={}", args.rw.name());
    }
    if args.bs != 4096 {
        case += &format!("/bs={}", args.bs);
    }
    if args.groups {
        case += "/groups";
    }
    case
}

/// Starts an engine, loads it from `jobs` attached threads for the plan's window, and ends it.
fn measure(
    args: &EngineArgs,
    elevator: &'static ElevatorType,
    jobs: u32,
    depth: u32,
    plan: &Plan,
) -> Result<Sample> {
    let writable = args.rw.op().is_write() || args.device == DeviceArg::Ram;
    let start = || {
        if args.groups {
            device::start_with_groups(elevator, jobs, depth)
        } else {
            args.device.start(elevator, jobs, depth, writable)
        }
    };
    let job = Job {
        op: args.rw.op(),
        block_bytes: args.bs,
        depth,
        random: args.rw.is_random(),
        // Two clock readings cost as much as an inline I/O, so few are timed there; elsewhere every
        // one is.
        sample_every: if args.device.is_inline() {
            (64 / depth).max(1)
        } else {
            1
        },
    };
    if args.copies() {
        return copies::measure(start, job, jobs, plan);
    }
    let engine = start()?;
    if args.device == DeviceArg::Ram {
        device::fill(&engine)?;
    }
    load_attached(engine, job, jobs, plan)
}

/// Loads an engine's disk from `jobs` attached threads for the plan's window, and ends the engine.
///
/// # Errors
/// If a thread cannot attach, or an I/O fails.
pub(crate) fn load_attached(engine: Engine, job: Job, jobs: u32, plan: &Plan) -> Result<Sample> {
    let window = Window::new(jobs as usize);
    let (measured, latency) = std::thread::scope(|scope| {
        let generators: Vec<_> = (0..jobs as usize)
            .map(|index| {
                let (engine, window) = (&engine, &window);
                scope.spawn(move || {
                    let attached = engine.attach().inspect_err(|_| window.fail())?;
                    let disk = device::loaded(engine, index)?;
                    Load::new(attached, &disk, job, index as u64).run(window, index)
                })
            })
            .collect();
        let measured = window.measure(plan, || Ok([Usage::of_this_process()?, Usage::default()]));
        let mut latency = Histogram::new();
        for generator in generators {
            latency.merge(&generator.join().expect("a load generator does not panic")?);
        }
        anyhow::Ok((measured?, latency))
    })?;
    engine.shutdown(SHUTDOWN_WITHIN)?;
    Ok(Sample {
        ios: measured.ios,
        elapsed: measured.elapsed,
        latency: (&latency).into(),
        usage: measured.usage[0],
        client: None,
        figures: Vec::new(),
    })
}

/// Does the same I/O with fio's io_uring engine on the same file.
fn measure_fio(args: &EngineArgs, jobs: u32, depth: u32, plan: &Plan) -> Result<Sample> {
    let DeviceArg::File(path) = &args.device else {
        unreachable!("fio is a side on files only");
    };
    let options = [
        format!("--filename={}", path.display()),
        "--ioengine=io_uring".into(),
        "--direct=1".into(),
        "--registerfiles=1".into(),
        format!("--rw={}", args.rw.name()),
        format!("--bs={}", args.bs),
        format!("--iodepth={depth}"),
        format!("--numjobs={jobs}"),
        "--group_reporting=1".into(),
    ];
    fio::run(&options, plan.warm_up, plan.window)
}

fn about(args: &EngineArgs) -> About {
    let jobs = "a thread per job, attached to the engine; depth per job; 32-deep plug as for every caller";
    let mut setting = vec![
        format!("{}; {} B, {}", args.device.description(), args.bs, args.rw.name()),
        jobs.into(),
        "CPU and context switches are the whole process's, the load generator included".into(),
    ];
    if let DeviceArg::File(_) = args.device {
        setting.push("fio: io_uring, direct, registered file, same depth, jobs and block size".into());
    } else if let DeviceArg::Nbd(_) = args.device {
        setting.push(
            "nbdcopy: the whole export to null:, same connections, threads, requests and block size; ours does not merge; whole copies with start and handshake, of both".into(),
        );
    } else {
        setting.push("latency is sampled: one batch of I/Os in 64 / depth, at least every 64th I/O".into());
    }
    About {
        question: "what does an I/O cost in the engine itself?".into(),
        setting,
    }
}

/// What an elevator adds to the cost of an I/O, how throughput grows with submitters, and how fio
/// compares.
fn summary(rows: &[Row]) -> String {
    let mut lines = String::new();
    let find = |case: &str, side: &str| rows.iter().find(|row| row.case == case && row.side == side);
    for row in rows
        .iter()
        .filter(|row| row.side == "ours" || row.side == "after")
    {
        let elevator = row.case.split('/').nth(1).unwrap_or_default();
        let without = row.case.replacen(elevator, "none", 1);
        if let Some(none) = find(&without, &row.side).filter(|_| elevator != "none") {
            lines += &format!(
                "{}: {} of CPU per I/O more than with none\n",
                row.case,
                table::nanos(row.cpu_ns_per_io - none.cpu_ns_per_io)
            );
        }
        let alone = row.case.replacen("jobs=8", "jobs=1", 1);
        if let Some(one) = find(&alone, &row.side).filter(|_| alone != row.case) {
            lines += &format!(
                "{}: {:.0} % of one submitter's IOPS\n",
                row.case,
                100.0 * row.iops / one.iops
            );
        }
        let peers = ["before", "fio", "nbdcopy"].into_iter();
        for peer in peers.filter_map(|side| find(&row.case, side)) {
            lines += &format!(
                "{}: {:.1} % of the IOPS of {}, {:.2} of its CPU per I/O\n",
                row.case,
                100.0 * row.iops / peer.iops,
                peer.side,
                row.cpu_ns_per_io / peer.cpu_ns_per_io.max(1e-9)
            );
        }
    }
    lines
}

fn block_size(word: &str) -> Result<u32, String> {
    let bytes = value::size("bs", word).map_err(|error| error.to_string())?;
    u32::try_from(bytes)
        .ok()
        .filter(|bytes| bytes.is_multiple_of(512) && (512..=BLOCK_BYTES_MAX).contains(bytes))
        .ok_or_else(|| format!("must be a multiple of 512 from 512 to {BLOCK_BYTES_MAX}"))
}

const DEPTH_MAX: u32 = 1024;
const JOBS_MAX: u32 = 64;
const BLOCK_BYTES_MAX: u32 = 1 << 20;
/// Time to start and end an engine.
const SET_UP: Duration = Duration::from_millis(20);
const SHUTDOWN_WITHIN: blkmq_core::time::Nanos = blkmq_core::time::Nanos::from_secs(10);
