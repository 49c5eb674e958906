//! The bench of stacking: a null drive alone, and the same behind multipath: as in the past (over a worker
//! thread), with each of the three fixes alone, and with all of them; and the same below a mapped disk.

use std::fmt::Write;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use blkmq_core::bio::Op;
use blkmq_core::mapper::multipath::{Detours, Selector};
use blkmq_core::mapper::table::MapKind;
use blkmq_core::sched;
use blkmq_drivers::multipath::{MultipathConfig, MultipathDevice, PathDevice};
use blkmq_drivers::null::{NullConfig, NullDevice};
use blkmq_host::device::Device;

use crate::args::{BenchArgs, Plan};
use crate::engine::{self, Job, NULL_BYTES, Opened};
use crate::on_null;
use crate::report::{self, About, Report, Row};
use crate::rounds::{self, Point, Sample};

/// Measure request-based multipath: inline, against insertion, completion and queue runs over a
/// worker thread
#[derive(clap::Args, Clone, Debug)]
pub struct StackArgs {
    /// What all benches have.
    #[command(flatten)]
    pub common: BenchArgs,
    /// Paths to the drive [default: 1,2,4,8]
    #[arg(long, value_name = "N", value_delimiter = ',')]
    pub paths: Vec<u32>,
    /// How a path is chosen [default: round-robin, and all of them with 4 paths]
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_parser = selector)]
    pub selector: Vec<Selector>,
    /// Sides to measure: raw, before, fix-insert, fix-run, fix-complete, after [default: all with 4
    /// paths and round-robin, else raw and after]; or of a mapped disk: raw, linear, striped
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_parser = side)]
    pub side: Vec<Side>,
    /// Submitters, an attached thread each
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub jobs: u32,
    /// I/Os under way from each submitter
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub depth: u32,
    /// The null drive, by keys of its driver (docs/drivers/null.md), such as completion=deferred
    /// [default: it completes inline]
    #[arg(long, value_name = "KEY=VALUE,…")]
    pub drive: Option<String>,
}

/// The side that is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The null drive alone.
    Raw,
    /// Multipath; these steps of a request go over the worker.
    Stacked(&'static str, Detours),
    /// A mapped disk over two halves of the null drive's.
    Mapped(&'static str, MapKind),
}

impl Side {
    const fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Stacked(name, _) | Self::Mapped(name, _) => name,
        }
    }

    const fn is_mapped(self) -> bool {
        matches!(self, Self::Mapped(..))
    }
}

/// Runs the bench and prints its report; progress goes to stderr.
///
/// # Errors
/// If an option is out of range, the engine does not start, an I/O fails, or a file cannot be written.
pub fn main(args: &StackArgs) -> Result<()> {
    let range = |name, value: u32, max| {
        ensure!(
            (1..=max).contains(&value),
            "--{name} {value} rejected: must be from 1 to {max}"
        );
        Ok(())
    };
    range("jobs", args.jobs, JOBS_MAX)?;
    range("depth", args.depth, DEPTH_MAX)?;
    args.paths
        .iter()
        .try_for_each(|&paths| range("paths", paths, PATHS_MAX))?;
    let drive = on_null::drive(args.drive.as_deref(), NullConfig::bare())?;
    let mut points = points(args, &drive);
    let plan = args.common.plan(points.len(), SET_UP)?;
    let mut report = Report::start("stack", about(args), &plan);
    let rows = rounds::run(&plan, &mut points)?;
    drop(points);
    report.finish(rows, &args.common)?;
    report::say(&summary(&report.rows));
    Ok(())
}

fn points<'a>(args: &'a StackArgs, drive: &'a NullConfig) -> Vec<Point<'a>> {
    let mut points = Vec::new();
    let all_paths = if args.paths.is_empty() {
        &PATHS[..]
    } else {
        &args.paths
    };
    for &paths in all_paths {
        for selector in selectors(args, paths) {
            for side in sides(args, paths, selector) {
                points.push(Point {
                    case: format!("paths={paths}/selector={selector}"),
                    side: side.name().into(),
                    measure: Box::new(move |plan| measure(args, drive, paths, selector, side, plan)),
                });
            }
        }
    }
    points.extend(mapped_sides(args).into_iter().map(|side| Point {
        case: "mapped".into(),
        side: side.name().into(),
        measure: Box::new(move |plan| measure(args, drive, 1, Selector::default(), side, plan)),
    }));
    points
}

/// The sides of the case with mapped disks: all of them unless some are requested.
fn mapped_sides(args: &StackArgs) -> Vec<Side> {
    let asks_for_paths = !args.paths.is_empty() || !args.selector.is_empty();
    match args.side[..] {
        [] if asks_for_paths => Vec::new(),
        [] => MAPPED.to_vec(),
        _ if !args.side.iter().any(|side| side.is_mapped()) => Vec::new(),
        _ => MAPPED
            .into_iter()
            .filter(|side| args.side.contains(side))
            .collect(),
    }
}

fn selectors(args: &StackArgs, paths: u32) -> Vec<Selector> {
    match args.selector[..] {
        [] if paths == PATHS_SHOWN => Selector::ALL.to_vec(),
        [] => vec![Selector::RoundRobin],
        _ => args.selector.clone(),
    }
}

fn sides(args: &StackArgs, paths: u32, selector: Selector) -> Vec<Side> {
    match args.side[..] {
        [] if paths == PATHS_SHOWN && selector == Selector::RoundRobin => SIDES.to_vec(),
        [] => vec![SIDES[0], SIDES[SIDES.len() - 1]],
        // Mapped sides have their own case.
        _ if args.side.iter().any(|side| side.is_mapped()) => Vec::new(),
        _ => args.side.clone(),
    }
}

fn measure(
    args: &StackArgs,
    drive: &NullConfig,
    paths: u32,
    selector: Selector,
    side: Side,
    plan: &Plan,
) -> Result<Sample> {
    let opened = Opened {
        drive: open(args, drive, paths, selector, side)?,
        size: NULL_BYTES,
        block_size: 512,
        read_only: true,
        merges: true,
        map: match side {
            Side::Mapped(_, kind) => Some(kind),
            _ => None,
        },
    };
    let engine = engine::start(opened, sched::NONE, args.jobs, args.depth).context("starting the engine")?;
    let job = Job {
        op: Op::Read,
        block_bytes: 4096,
        depth: args.depth,
        random: true,
        sample_every: (64 / args.depth).max(1),
    };
    engine::load_attached(engine, job, args.jobs, plan)
}

fn open(
    args: &StackArgs,
    drive: &NullConfig,
    paths: u32,
    selector: Selector,
    side: Side,
) -> Result<Arc<dyn Device>> {
    // The probes use one tag in addition to the queue's.
    let depth = args.depth.max(TAGS_MIN) + 1;
    let null = || -> Result<Arc<dyn Device>> {
        let config = NullConfig {
            depth,
            ..drive.clone()
        };
        Ok(Arc::new(NullDevice::new(config, &[NULL_BYTES])?))
    };
    let Side::Stacked(_, detours) = side else {
        return null();
    };
    let config = MultipathConfig {
        selector,
        detours,
        ..MultipathConfig::default()
    };
    let path = |number| Ok(PathDevice::new(format!("path{number}"), null()?, NULL_BYTES));
    let paths = (0..paths).map(path).collect::<Result<_>>()?;
    Ok(Arc::new(MultipathDevice::new(
        "bench",
        &config,
        paths,
        depth - 1,
    )?))
}

fn about(args: &StackArgs) -> About {
    let drive = args.drive.as_deref().unwrap_or("it completes inline");
    About {
        question: "what does a request pay for being carried over one of several paths?".into(),
        setting: vec![
            format!(
                "4 KiB random reads on null drives ({drive}); {} attached thread(s), depth {}; no elevator",
                args.jobs, args.depth
            ),
            "raw: one null drive, nothing above it; after: multipath, all of a request's way inline on its thread".into(),
            "before: a worker thread is woken, issues the request, takes its end, gives it back, and runs the upper queue".into(),
            "fix-insert, fix-run, fix-complete: before, with that one part as after".into(),
            "mapped: raw, and a linear and a striped disk (64 KiB) on top of two halves of the drive's".into(),
        ],
    }
}

/// The sides as parts of raw, and the published figures next to ours.
fn summary(rows: &[Row]) -> String {
    let mut lines = String::from(
        "\nPublished: Snitzer 2016, thousand IOPS over a null device: raw 1950, before 950 (49 %), after 1350 (69 %); context switches in all \
         7,905,181 before, 2,008 after.\n\
         case                                      side           of raw   more than raw   switches/IO\n",
    );
    for row in rows.iter().filter(|row| row.side != "raw") {
        let raw = rows.iter().find(|raw| raw.case == row.case && raw.side == "raw");
        let part = raw.map_or(f64::NAN, |raw| 100.0 * row.iops / raw.iops);
        let more = raw.map_or(f64::NAN, |raw| row.cpu_ns_per_io - raw.cpu_ns_per_io);
        let _ = writeln!(
            lines,
            "{:<40}  {:<12} {part:>8.1} %  {more:>10.1} ns  {:>12.6}",
            row.case, row.side, row.ctx_per_io
        );
    }
    lines
}

fn selector(name: &str) -> Result<Selector, String> {
    let names = || Selector::ALL.map(Selector::name).join(", ");
    name.parse().map_err(|_| format!("must be one of {}", names()))
}

fn side(name: &str) -> Result<Side, String> {
    let all = || SIDES.into_iter().chain(MAPPED.into_iter().skip(1));
    let names = || all().map(Side::name).collect::<Vec<_>>().join(", ");
    let found = all().find(|side| side.name() == name);
    found.ok_or_else(|| format!("must be one of {}", names()))
}

const SIDES: [Side; 6] = [
    Side::Raw,
    Side::Stacked("before", Detours::ALL),
    Side::Stacked(
        "fix-insert",
        Detours {
            insert: false,
            ..Detours::ALL
        },
    ),
    Side::Stacked(
        "fix-run",
        Detours {
            run: false,
            ..Detours::ALL
        },
    ),
    Side::Stacked(
        "fix-complete",
        Detours {
            complete: false,
            ..Detours::ALL
        },
    ),
    Side::Stacked("after", NO_DETOURS),
];
/// The sides of the case with mapped disks; the raw one is first.
const MAPPED: [Side; 3] = [
    Side::Raw,
    Side::Mapped("linear", MapKind::Linear),
    Side::Mapped("striped", MapKind::Striped { chunk: 64 << 10 }),
];
const NO_DETOURS: Detours = Detours {
    insert: false,
    issue: false,
    complete: false,
    run: false,
};
const PATHS: [u32; 4] = [1, 2, 4, 8];
/// The number of paths with which every selector and side is measured by default.
const PATHS_SHOWN: u32 = 4;
const PATHS_MAX: u32 = 32;
const JOBS_MAX: u32 = 64;
const DEPTH_MAX: u32 = 1024;
const TAGS_MIN: u32 = 128;
/// Time to start and end an engine.
const SET_UP: Duration = Duration::from_millis(40);
