//! The bench of run-queue work: on a drive whose hardware contexts share their tags, loaded beyond its limit.
//! The end of a request runs every context again (as in the past), every context that is not queued already,
//! or those that wait.

use std::fmt::Write;
use std::hint::black_box;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use blkmq_core::queue::{Rerun, TagMode};
use blkmq_drivers::null::{Completion, NullConfig};
use blkmq_sync::{Published, RunWork};

use crate::args::BenchArgs;
use crate::on_null::{self, Jobs, check_load};
use crate::report::{self, About, Report, Row};
use crate::rounds::{self, Point, Sample};

/// Measure run-queue work: contexts run once and only where they wait, against all of them at each
/// completion
#[derive(clap::Args, Clone, Debug)]
pub struct RunQueueArgs {
    /// What all benches have.
    #[command(flatten)]
    pub common: BenchArgs,
    /// Submitters, a reactor with a hardware context each
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub jobs: u32,
    /// I/Os under way from each submitter [default: 16,64,256,1024]
    #[arg(long, value_name = "N", value_delimiter = ',')]
    pub depth: Vec<u32>,
    /// Tags that all hardware contexts share
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub tags: u32,
    /// The null drive, by keys of its driver (docs/drivers/null.md), such as bandwidth=1G [default:
    /// a drive that completes when it is next looked at]
    #[arg(long, value_name = "KEY=VALUE,…")]
    pub drive: Option<String>,
}

/// Runs the bench and prints its report; progress goes to stderr.
///
/// # Errors
/// If an option is out of range, the engine does not start, an I/O fails, or a file cannot be written.
pub fn main(args: &RunQueueArgs) -> Result<()> {
    let mut args = args.clone();
    if args.depth.is_empty() {
        args.depth = PUBLISHED.iter().map(|(depth, _)| *depth).collect();
    }
    check_load(&[args.jobs], args.jobs)?;
    for depth in &args.depth {
        ensure!(
            (1..=DEPTH_MAX).contains(depth),
            "--depth {depth} rejected: must be from 1 to {DEPTH_MAX}"
        );
    }
    ensure!(
        (1..=TAGS_MAX).contains(&args.tags),
        "--tags {} rejected: must be from 1 to {TAGS_MAX}",
        args.tags
    );
    let default = NullConfig {
        completion: Some(Completion::Deferred),
        ..NullConfig::bare()
    };
    let drive = NullConfig {
        depth: TAGS_MAX,
        ..on_null::drive(args.drive.as_deref(), default)?
    };
    let plan = args.common.plan(args.depth.len() * SIDES.len(), SET_UP)?;
    let mut points = points(&args, &drive);
    let mut report = Report::start("run-queue", about(&args), &plan);
    let rows = rounds::run(&plan, &mut points)?;
    drop(points);
    report.finish(rows, &args.common)?;
    report::say(&summary(&report.rows, &args));
    report::say(&cost_of_redundant_runs());
    Ok(())
}

fn points<'a>(args: &'a RunQueueArgs, drive: &'a NullConfig) -> Vec<Point<'a>> {
    let mut points = Vec::new();
    for &depth in &args.depth {
        points.extend(SIDES.map(|(side, rerun)| Point {
            case: case(args, depth),
            side: side.into(),
            measure: Box::new(move |plan| {
                let load = Jobs {
                    jobs: args.jobs,
                    depth,
                };
                let (sample, schedules) = on_null::measure(load, drive.clone(), plan, |queue| {
                    queue.tags = TagMode::Shared(args.tags);
                    queue.rerun = rerun;
                })?;
                let per_io = schedules as f64 / sample.ios.max(1) as f64;
                Ok(Sample {
                    figures: vec![("schedules_per_io", per_io)],
                    ..sample
                })
            }),
        }));
    }
    points
}

fn case(args: &RunQueueArgs, depth: u32) -> String {
    format!("jobs={}/depth={depth}", args.jobs)
}

fn about(args: &RunQueueArgs) -> About {
    About {
        question: "what does it cost to run hardware contexts when something that they share is freed?".into(),
        setting: vec![
            format!(
                "4 KiB random reads on a null drive ({}); {} reactors with a hardware context each share {} tags; no elevator",
                args.drive
                    .as_deref()
                    .unwrap_or("it completes when it is next looked at"),
                args.jobs,
                args.tags
            ),
            "before: each end of a request queues a run of every context anew; marked: unless it is queued already".into(),
            "after: a batch of ends runs the contexts that wait for a tag, once".into(),
        ],
    }
}

/// The sides compared with each other, and the published figures next to ours.
fn summary(rows: &[Row], args: &RunQueueArgs) -> String {
    let mut lines = String::from(
        "\nThousand IOPS. Published: Li 2019, eight jobs of 4 KiB random reads on a disk in memory.\n\
         case                   before   marked    after   after/before   published\n",
    );
    for &depth in &args.depth {
        let case = case(args, depth);
        let [before, marked, after] = SIDES.map(|(side, _)| {
            let found = rows.iter().find(|row| row.case == case && row.side == side);
            found.map_or(f64::NAN, |row| row.iops)
        });
        let published = PUBLISHED.iter().find(|(known, _)| *known == depth);
        let published = published.map_or("-".into(), |(_, [before, after])| {
            format!("{before} -> {after}, {:+.0} %", (after / before - 1.0) * 100.0)
        });
        let _ = writeln!(
            lines,
            "{case:<20} {:>8.0} {:>8.0} {:>8.0} {:>+12.1} %   {published}",
            before / 1e3,
            marked / 1e3,
            after / 1e3,
            (after / before - 1.0) * 100.0,
        );
    }
    lines
}

/// The cost of requesting a run that is queued already, for each way to request it.
fn cost_of_redundant_runs() -> String {
    let work = RunWork::new();
    let _ = work.run();
    let published = Published::now();
    let time = |ask: &dyn Fn(&RunWork)| {
        let rounds = (0..REDUNDANT_ROUNDS).map(|_| {
            let start = Instant::now();
            (0..REDUNDANT_RUNS).for_each(|_| ask(black_box(&work)));
            start.elapsed().as_nanos() as f64 / f64::from(REDUNDANT_RUNS)
        });
        rounds.fold(f64::MAX, f64::min)
    };
    let by_completion = time(&|work| _ = black_box(work.run_published(&published)));
    let by_owner = time(&|work| _ = black_box(work.run_by_owner()));
    let alone = time(&|work| _ = black_box(work.run()));
    let unmarked = time(&RunWork::run_unmarked);
    format!(
        "\nTo ask for a run that is queued already, on a line of the own core, the loop and the call included: {by_completion:.1} ns \
         by a completion\n(its batch has one fence), {by_owner:.1} ns by the owner, {alone:.1} ns with a fence of its own, \
         {unmarked:.1} ns if it is queued anew (before).\n"
    )
}

const SIDES: [(&str, Rerun); 3] = [
    ("before", Rerun::Every),
    ("marked", Rerun::EveryMarked),
    ("after", Rerun::Waiting),
];
/// Depth of each job, and thousands of IOPS before and after.
const PUBLISHED: [(u32, [f64; 2]); 4] = [
    (16, [190.0, 190.0]),
    (64, [235.0, 240.0]),
    (256, [180.0, 256.0]),
    (1024, [156.0, 250.0]),
];
const DEPTH_MAX: u32 = 4096;
const REDUNDANT_RUNS: u32 = 100_000;
/// Only the fastest round counts, since the others were interrupted.
const REDUNDANT_ROUNDS: u32 = 20;
const TAGS_MAX: u32 = 65_536;
/// Time to start and end an engine.
const SET_UP: Duration = Duration::from_millis(40);
