//! The bench of the single dispatcher, compared with every hardware context dispatching for itself, as Linux
//! did, and with a single hardware queue; on a null drive in process, and in virtual time on a disk with
//! seeks. `dbench` does it with the tool of the published measurement.

pub mod dbench;
mod disk;
mod stage;

use std::fmt::Write;
use std::time::Duration;

use anyhow::{Result, ensure};
use blkmq_core::queue::Dispatch;
use blkmq_core::sched::{self, ElevatorType};
use blkmq_drivers::null::NullConfig;
use blkmq_sim::scenario::clients::{self, CLIENTS, Side};

use crate::args::{BenchArgs, Plan};
use crate::on_null::{self, Jobs, check_load};
use crate::report::{self, About, Report, Row};
use crate::rounds::{self, Latency, Point, Sample};
use crate::usage::Usage;

/// Measure one dispatcher for a scheduler, against every hardware context and against a single
/// hardware queue
#[derive(clap::Args, Clone, Debug)]
pub struct SingleDispatchArgs {
    /// What all benches have.
    #[command(flatten)]
    pub common: BenchArgs,
    /// Elevators to measure [default: mq-deadline,bfq]
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_parser = scheduler)]
    pub elevator: Vec<&'static ElevatorType>,
    /// Submitters on the null drive, a reactor each [default: 1,2,8]
    #[arg(long, value_name = "N", value_delimiter = ',')]
    pub jobs: Vec<u32>,
    /// I/Os under way on the null drive, over all submitters
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub depth: u32,
    /// Clients of the modelled disk; 0 for none [default: 1,2,4,8,16,32,64,512; with --quick
    /// without 512]
    #[arg(long, value_name = "N", value_delimiter = ',')]
    pub clients: Vec<usize>,
    /// Measure with dbench instead, on XFS on the modelled disk in real time, beside the kernel's
    /// scheduler; needs root [default: clients 1 to 64, bfq, 3 rounds]
    #[arg(long)]
    pub dbench: bool,
    /// How the disk becomes a block device with dbench
    #[arg(long, value_name = "DOOR", default_value = "fuse", requires = "dbench")]
    pub door: dbench::Door,
    /// Sides to measure with dbench [default: all]
    #[arg(long, value_name = "SIDE", value_delimiter = ',', requires = "dbench")]
    pub side: Vec<dbench::Side>,
    /// The filesystem that dbench is played on
    #[arg(long, value_name = "NAME", default_value = "xfs", requires = "dbench")]
    pub filesystem: dbench::Filesystem,
    /// Lines of dbench's load file that each of its clients plays
    #[arg(long, value_name = "N", default_value_t = 2000)]
    pub ops: usize,
}

/// Runs the bench and prints its report; progress goes to stderr.
///
/// # Errors
/// If an option is out of range, the engine does not start, an I/O fails, or a file cannot be written.
pub fn main(args: &SingleDispatchArgs) -> Result<()> {
    if args.dbench {
        return dbench::main(args);
    }
    let args = &with_defaults(args)?;
    let visits = args.elevator.len() * args.jobs.len() * ON_NULL.len();
    let plan = args.common.plan(visits, SET_UP)?;
    let mut points = points(args);
    let mut report = Report::start("single-dispatch", about(args), &plan);
    let rows = rounds::run(&plan, &mut points)?;
    drop(points);
    report.finish(rows, &args.common)?;
    report::say(&summary(&report.rows));
    report::say(&published(&report.rows, args));
    Ok(())
}

/// Fills in the defaults and checks the numbers.
fn with_defaults(args: &SingleDispatchArgs) -> Result<SingleDispatchArgs> {
    let mut args = args.clone();
    if args.elevator.is_empty() {
        args.elevator = vec![sched::MQ_DEADLINE, sched::BFQ];
    }
    if args.jobs.is_empty() {
        args.jobs = vec![1, 2, 8];
    }
    if args.clients.is_empty() {
        let most = if args.common.quick {
            CLIENTS_QUICK
        } else {
            CLIENTS_MAX
        };
        args.clients = CLIENTS.into_iter().filter(|clients| *clients <= most).collect();
    }
    args.clients.retain(|clients| *clients > 0);
    check_load(&args.jobs, args.depth)?;
    for clients in &args.clients {
        ensure!(
            *clients <= CLIENTS_MAX,
            "--clients {clients} rejected: must be from 0 to {CLIENTS_MAX}"
        );
    }
    Ok(args)
}

fn points(args: &SingleDispatchArgs) -> Vec<Point<'_>> {
    let mut points = Vec::new();
    for &elevator in &args.elevator {
        for &jobs in &args.jobs {
            points.extend(ON_NULL.map(|side| Point {
                case: format!("null/{elevator}/jobs={jobs}"),
                side: side.name().into(),
                measure: Box::new(move |plan| on_null(side, elevator, jobs, args.depth, plan)),
            }));
        }
        for &clients in &args.clients {
            points.extend(Side::ALL.map(|side| {
                let mut seed = 0;
                Point {
                    case: format!("disk/{elevator}/clients={clients}"),
                    side: side.name().into(),
                    measure: Box::new(move |_| {
                        seed += 1;
                        Ok(on_disk(side, elevator, clients, seed))
                    }),
                }
            }));
        }
    }
    points
}

/// Loads a null drive from `jobs` reactors for the plan's window.
fn on_null(
    side: Side,
    elevator: &'static ElevatorType,
    jobs: u32,
    depth: u32,
    plan: &Plan,
) -> Result<Sample> {
    let load = Jobs {
        jobs,
        depth: depth / jobs,
    };
    let measured = on_null::measure(load, NullConfig::bare(), plan, |queue| {
        queue.elevator = elevator;
        match side {
            // Except on SCSI, only `bfq` ran all contexts: whenever the drive had become empty, as
            // this one does after each request.
            Side::Before if elevator == sched::BFQ => queue.dispatch = Dispatch::EveryContext,
            Side::Before => queue.dispatch = Dispatch::OwnContext,
            Side::SingleQueue | Side::SingleDirect => queue.hctxs = Some(1),
            Side::After => {}
        }
    });
    measured.map(|(sample, _)| sample)
}

/// One run of the model; its time is virtual.
fn on_disk(side: Side, elevator: &'static ElevatorType, clients: usize, seed: u64) -> Sample {
    let point = clients::measure(side, elevator, clients, seed);
    let quantile = |permille: usize| {
        let last = point.latencies.len() - 1;
        point.latencies[last * permille / 1000]
    };
    Sample {
        ios: point.bios,
        elapsed: Duration::from_nanos(point.time.0),
        latency: Latency {
            p50_ns: quantile(500),
            p99_ns: quantile(990),
            p999_ns: quantile(999),
        },
        usage: Usage {
            cpu_ns: point.busy.0,
            switches: 0,
        },
        figures: vec![
            ("seconds", point.time.0 as f64 / 1e9),
            ("merged_percent", point.merged_ppm() as f64 / 1e4),
        ],
        ..Sample::default()
    }
}

fn about(args: &SingleDispatchArgs) -> About {
    About {
        question: "what does one dispatcher gain over one per hardware context, and over a single hardware queue?".into(),
        setting: vec![
            format!(
                "null: 4 KiB reads on an inline null drive, depth {} over all jobs, a reactor per job, measured",
                args.depth
            ),
            "disk: dbench-like clients on a 7200 rpm disk with 64 hardware contexts, modelled: virtual time, a seed per round".into(),
            "before: an insertion runs one context, a completion all on the disk and with bfq; each waits for the elevator's lock".into(),
            "single-queue: one hardware context, which the first reactor owns; the others hand over to it".into(),
            "single-direct: the same, where handing over takes no time; modelled only".into(),
        ],
    }
}

/// How throughput grows with submitters.
fn summary(rows: &[Row]) -> String {
    let mut lines = String::new();
    for row in rows.iter().filter(|row| row.case.starts_with("null/")) {
        let Some((device, jobs)) = row.case.split_once("jobs=") else {
            continue;
        };
        let alone = format!("{device}jobs=1");
        let one = rows.iter().find(|one| one.case == alone && one.side == row.side);
        if let Some(one) = one.filter(|_| jobs != "1") {
            let share = 100.0 * row.iops / one.iops;
            let _ = writeln!(
                lines,
                "{} {}: {share:.0} % of one submitter's IOPS",
                row.case, row.side
            );
        }
    }
    lines
}

/// The published times next to ours.
fn published(rows: &[Row], args: &SingleDispatchArgs) -> String {
    let mut lines = String::new();
    for elevator in args.elevator.iter().filter(|_| !args.clients.is_empty()) {
        let _ = writeln!(
            lines,
            "\nSeconds, lower is better. Published: Kara 2020, dbench on XFS, 64 hardware queues, BFQ, a real disk.\n\
             Ours: {elevator}, virtual, on the modelled disk; compare columns, not tables.\n\
             clients   published: multi-queue  single-queue   patched     ours: before  single-queue  single-direct     after  after/direct",
        );
        for clients in &args.clients {
            let seconds = |side: Side| {
                let case = format!("disk/{elevator}/clients={clients}");
                let mut found = rows
                    .iter()
                    .filter(|row| row.case == case && row.side == side.name());
                found
                    .find_map(|row| row.figures.get("seconds"))
                    .copied()
                    .unwrap_or_default()
            };
            let [before, single, direct, after] = Side::ALL.map(seconds);
            let theirs = theirs(*clients);
            let ratio = after / direct;
            let _ = writeln!(
                lines,
                "{clients:>7} {theirs} {before:>16.3} {single:>13.3} {direct:>14.3} {after:>9.3} {ratio:>13.3}"
            );
        }
    }
    lines
}

/// The published times for `clients` clients, as three columns.
fn theirs(clients: usize) -> String {
    match PUBLISHED.iter().find(|(count, _)| *count == clients) {
        Some((_, [multi, single, patched])) => format!("{multi:>22.2} {single:>13.2} {patched:>9.2}"),
        None => format!("{:>22} {:>13} {:>9}", "-", "-", "-"),
    }
}

/// Finds an elevator by its name; `none` stands for no elevator.
pub(crate) fn scheduler(name: &str) -> Result<&'static ElevatorType, String> {
    let kinds = || sched::BUILT_IN.into_iter().filter(|kind| *kind != sched::NONE);
    let names = || kinds().map(|kind| kind.name).collect::<Vec<_>>().join(", ");
    kinds()
        .find(|kind| kind.name == name)
        .ok_or_else(|| format!("must be one of {}", names()))
}

/// The sides that are measured and not modelled. On a real reactor a hand-over always takes time,
/// since a driver belongs to a thread.
const ON_NULL: [Side; 3] = [Side::Before, Side::SingleQueue, Side::After];
/// Clients, and the seconds of multi-queue, single-queue and patched.
const PUBLISHED: [(usize, [f64; 3]); 8] = [
    (1, [39.12, 43.29, 36.09]),
    (2, [128.58, 101.30, 96.14]),
    (4, [577.42, 494.47, 508.49]),
    (8, [610.95, 363.86, 362.12]),
    (16, [391.78, 261.49, 282.94]),
    (32, [324.64, 267.71, 233.00]),
    (64, [295.04, 253.02, 242.37]),
    (512, [10281.61, 10211.16, 10447.53]),
];
const CLIENTS_MAX: usize = 512;
const CLIENTS_QUICK: usize = 64;
/// Time to start and end an engine.
const SET_UP: Duration = Duration::from_millis(40);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_times_stand_beside_ours_for_the_same_number_of_clients() {
        let args = SingleDispatchArgs {
            common: BenchArgs::default(),
            elevator: vec![sched::MQ_DEADLINE],
            jobs: vec![1],
            depth: 256,
            clients: vec![8, 9],
            dbench: false,
            door: dbench::Door::Fuse,
            side: Vec::new(),
            filesystem: dbench::Filesystem::Xfs,
            ops: 1,
        };
        let row = |side: Side, seconds: f64| Row {
            case: "disk/mq-deadline/clients=8".into(),
            side: side.name().into(),
            figures: [("seconds".to_owned(), seconds)].into(),
            ..Row::default()
        };
        let rows = [
            row(Side::Before, 4.0),
            row(Side::SingleQueue, 3.0),
            row(Side::SingleDirect, 2.4),
            row(Side::After, 1.8),
        ];
        let text = published(&rows, &args);
        let line = |clients: &str| {
            let mut lines = text.lines().filter(|line| line.trim_start().starts_with(clients));
            lines.next().unwrap().split_whitespace().collect::<Vec<_>>()
        };
        assert_eq!(
            line("8 "),
            [
                "8", "610.95", "363.86", "362.12", "4.000", "3.000", "2.400", "1.800", "0.750"
            ]
        );
        assert_eq!(line("9 ")[..4], ["9", "-", "-", "-"]);
    }
}
