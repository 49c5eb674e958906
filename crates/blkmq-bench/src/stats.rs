//! The bench of a scheduler's statistics, and what they cost: kept under the gate, as in schedulers with a
//! lock, with a clock reading for each update or with the batch's time; kept outside by each reactor; and
//! off. It runs on a null drive in process, so that nothing else takes time.

use std::fmt::Write;
use std::time::Duration;

use anyhow::Result;
use blkmq_core::sched::ElevatorType;
use blkmq_core::stat::StatsMode;
use blkmq_drivers::null::NullConfig;

use crate::args::BenchArgs;
use crate::on_null::{self, Jobs, check_load};
use crate::report::{self, About, Report, Row};
use crate::rounds::{self, Point};
use crate::single_dispatch::scheduler;

/// Measure what a scheduler's statistics cost: under its lock, outside, and off
#[derive(clap::Args, Clone, Debug)]
pub struct StatsArgs {
    /// What all benches have.
    #[command(flatten)]
    pub common: BenchArgs,
    /// The elevator
    #[arg(long, value_name = "NAME", default_value = "bfq", value_parser = scheduler)]
    pub elevator: &'static ElevatorType,
    /// Submitters, a reactor each [default: 1,8]
    #[arg(long, value_name = "N", value_delimiter = ',')]
    pub jobs: Vec<u32>,
    /// I/Os under way, over all submitters
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub depth: u32,
}

/// Runs the bench and prints its report; progress goes to stderr.
///
/// # Errors
/// If an option is out of range, the engine does not start, an I/O fails, or a file cannot be written.
pub fn main(args: &StatsArgs) -> Result<()> {
    let mut args = args.clone();
    if args.jobs.is_empty() {
        args.jobs = vec![1, 8];
    }
    check_load(&args.jobs, args.depth)?;
    let plan = args.common.plan(args.jobs.len() * SIDES.len(), SET_UP)?;
    let mut points = points(&args);
    let mut report = Report::start("stats", about(&args), &plan);
    let rows = rounds::run(&plan, &mut points)?;
    drop(points);
    report.finish(rows, &args.common)?;
    report::say(&summary(&report.rows, &args));
    Ok(())
}

fn points(args: &StatsArgs) -> Vec<Point<'_>> {
    let mut points = Vec::new();
    for &jobs in &args.jobs {
        points.extend(SIDES.map(|(side, mode)| Point {
            case: case(args, jobs),
            side: side.into(),
            measure: Box::new(move |plan| {
                let load = Jobs {
                    jobs,
                    depth: args.depth / jobs,
                };
                let measured = on_null::measure(load, NullConfig::bare(), plan, |queue| {
                    queue.elevator = args.elevator;
                    queue.stats = mode;
                });
                measured.map(|(sample, _)| sample)
            }),
        }));
    }
    points
}

fn case(args: &StatsArgs, jobs: u32) -> String {
    format!("null/{}/jobs={jobs}", args.elevator)
}

fn about(args: &StatsArgs) -> About {
    About {
        question: "what do the statistics of groups cost a scheduler?".into(),
        setting: vec![
            format!(
                "4 KiB reads on a null drive without latency, completing inline; depth {} over all jobs, a reactor per job",
                args.depth
            ),
            "published: the counters under the gate, at insertion, dispatch and end, each update with a clock reading of its own"
                .into(),
            "before: the same counters under the gate, at insertion, dispatch and end; after: by each reactor outside it".into(),
            "off: nothing is counted of groups; the engine's own events are, on all sides".into(),
        ],
    }
}

/// The sides compared with each other, and the published figures next to ours.
fn summary(rows: &[Row], args: &StatsArgs) -> String {
    let mut lines = String::from(
        "\nThousand IOPS. Linux: Valente and Miccio 2017, BFQ, 8 threads of random I/O, null device without latency.\n\
         case                      published   before    after      off   after/published   after/before   after/off\n",
    );
    let mut line = |name: &str, [published, before, after, off]: [f64; 4]| {
        let more = |than: f64| (after / than - 1.0) * 100.0;
        let _ = writeln!(
            lines,
            "{name:<24} {:>10} {:>8} {:>8} {:>8} {:>17} {:>14} {:>11}",
            whole(published / 1e3),
            whole(before / 1e3),
            whole(after / 1e3),
            whole(off / 1e3),
            percent(more(published)),
            percent(more(before)),
            percent(more(off)),
        );
    };
    line("Linux", LINUX);
    for &jobs in &args.jobs {
        let case = case(args, jobs);
        let iops = SIDES.map(|(side, _)| {
            let found = rows.iter().find(|row| row.case == case && row.side == side);
            found.map_or(f64::NAN, |row| row.iops)
        });
        line(&case, iops);
    }
    lines
}

fn whole(figure: f64) -> String {
    shown(figure, || format!("{figure:.0}"))
}

fn percent(figure: f64) -> String {
    shown(figure, || format!("{figure:+.1} %"))
}

fn shown(figure: f64, text: impl Fn() -> String) -> String {
    if figure.is_nan() { "-".into() } else { text() }
}

const SIDES: [(&str, StatsMode); 4] = [
    ("published", StatsMode::UnderGateTimed),
    ("before", StatsMode::UnderGate),
    ("after", StatsMode::Outside),
    ("off", StatsMode::Off),
];
/// The published comparison has nothing like our `before`.
const LINUX: [f64; 4] = [250e3, f64::NAN, 310e3, 400e3];
/// Time to start and end an engine.
const SET_UP: Duration = Duration::from_millis(40);
