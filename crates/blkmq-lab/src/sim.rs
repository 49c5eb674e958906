//! The command line of the simulator, `blkmq-lab sim`: replay one history, run many seeds, or list
//! the scenarios. One seed is one history.

use std::ops::Range;
use std::panic::resume_unwind;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use blkmq_core::sched;
use blkmq_sim::run;
use blkmq_sim::scenario::{self, Scenario};
use blkmq_sim::world::Summary;
use clap::Args;

/// What `sim` takes.
#[derive(Debug, Args)]
#[command(after_help = STATUS)]
pub(crate) struct SimArgs {
    /// Run this scenario; `all` is every scenario but those that only measure
    #[arg(long, value_name = "NAME", required_unless_present = "list")]
    scenario: Option<String>,
    /// Replay one history and print its digest and summary [default: 1]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Print the setup and every fact of that history
    #[arg(long)]
    trace: bool,
    /// Run so many seeds; the first failure of a scenario is printed with the command that replays it
    #[arg(long, value_name = "COUNT")]
    seeds: Option<u64>,
    /// Start with this seed [default: 1]
    #[arg(long, value_name = "N")]
    first_seed: Option<u64>,
    /// List the scenarios
    #[arg(long)]
    list: bool,
}

/// Says now and then how many cases have begun.
fn show_progress(begun: usize, cases: usize) {
    if begun.is_multiple_of(100) {
        eprintln!("{begun} of {cases} cases");
    }
}

/// Runs what the arguments name.
pub(crate) fn main(args: &SimArgs) -> ExitCode {
    if args.list {
        print!("{}", list());
        return ExitCode::SUCCESS;
    }
    let name = args.scenario.as_deref().unwrap_or_default();
    let first = args.first_seed.or(args.seed).unwrap_or(1);
    match (name, scenario::by_name(name), args.seeds) {
        (scenario::clients::NAME, _, seeds) => {
            for elevator in sched::BUILT_IN.into_iter().filter(|kind| *kind != sched::NONE) {
                println!(
                    "{}",
                    scenario::clients::table(elevator, first, seeds.unwrap_or(5))
                );
            }
            ExitCode::SUCCESS
        }
        (scenario::fair::NAME, ..) => {
            print!("{}", scenario::fair::table(first));
            ExitCode::SUCCESS
        }
        (scenario::fair::slow::NAME, ..) => match scenario::fair::slow::table(first, show_progress) {
            Ok(table) => {
                print!("{table}");
                ExitCode::SUCCESS
            }
            Err(table) => {
                print!("{table}");
                ExitCode::FAILURE
            }
        },
        (scenario::poll::NAME, ..) => {
            print!("{}", scenario::poll::table(first));
            ExitCode::SUCCESS
        }
        ("all", _, seeds) => run_many(scenario::ALL, first, seeds.unwrap_or(1)),
        (_, Some(scenario), Some(seeds)) => run_many(&[*scenario], first, seeds),
        (_, Some(scenario), None) => replay(scenario, first, args.trace),
        (_, None, _) => {
            eprintln!("--scenario {name} rejected: there is none of that name; see --list");
            ExitCode::from(2)
        }
    }
}

/// A line for each scenario, those that only measure last.
fn list() -> String {
    let usual = scenario::ALL
        .iter()
        .map(|scenario| (scenario.name, scenario.about));
    let measuring = [
        (scenario::clients::NAME, scenario::clients::ABOUT),
        (scenario::fair::NAME, scenario::fair::ABOUT),
        (scenario::fair::slow::NAME, scenario::fair::slow::ABOUT),
        (scenario::poll::NAME, scenario::poll::ABOUT),
    ];
    usual
        .chain(measuring)
        .map(|(name, about)| format!("{name:14} {about}\n"))
        .collect()
}

fn replay(scenario: &Scenario, seed: u64, trace: bool) -> ExitCode {
    if trace {
        println!("{:#?}", scenario.setup_of(seed));
    }
    match run::one(scenario, seed, trace) {
        Ok(summary) => {
            println!("{}", describe(scenario, seed, &summary));
            ExitCode::SUCCESS
        }
        Err(fault) => {
            println!("{} seed {seed} FAILED: {fault}", scenario.name);
            ExitCode::FAILURE
        }
    }
}

fn describe(scenario: &Scenario, seed: u64, summary: &Summary) -> String {
    let (counts, cuts) = (&summary.counts, &summary.power_cuts);
    format!(
        "{} seed {seed}: digest {:016x}, {} facts in {} of virtual time\n\
         {} bios ended ({} with an error) in {} requests: {} merged, {} flushes, at most {} in flight\n\
         {} timeouts, {} stale ends, {} requeues, {} control actions, gate found held {} times\n\
         {} power cuts: {} met requests at a drive, {} lost something, {} tore a bio, {} a block",
        scenario.name,
        summary.digest,
        summary.facts,
        summary.time,
        counts.ended,
        counts.errors,
        counts.requests,
        counts.merged,
        counts.flushes,
        counts.in_flight_max,
        counts.timeouts,
        counts.stale,
        counts.requeues,
        summary.controls,
        summary.gate_skipped,
        cuts.count,
        cuts.in_flight,
        cuts.lost,
        cuts.torn_bios,
        cuts.torn_blocks,
    )
}

/// Runs the seeds of each scenario on all processors, and prints a line for each scenario. Seeds do
/// not depend on each other.
fn run_many(scenarios: &[Scenario], first: u64, seeds: u64) -> ExitCode {
    let mut failed = false;
    for scenario in scenarios {
        let start = Instant::now();
        let ends = run_seeds(scenario, first..first.saturating_add(seeds));
        let (mut bios, mut digest) = (0, 0u64);
        let fault = ends.into_iter().find_map(|(seed, end)| match end {
            Ok(summary) => {
                bios += summary.counts.ended;
                digest = digest.rotate_left(1) ^ summary.digest;
                None
            }
            Err(text) => Some(format!("{} seed {seed} FAILED: {text}", scenario.name)),
        });
        let time = start.elapsed().as_secs_f64();
        match fault {
            None => println!(
                "{:14} {seeds} seeds ok, {bios} bios, digest {digest:016x}, {time:.1} s",
                scenario.name
            ),
            Some(fault) => {
                failed = true;
                println!("{fault}");
            }
        }
    }
    if failed {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    }
}

/// The results of the seeds in order, at least up to the first that failed.
fn run_seeds(scenario: &Scenario, seeds: Range<u64>) -> Vec<(u64, Result<Summary, String>)> {
    let next = AtomicU64::new(seeds.start);
    let end = AtomicU64::new(seeds.end);
    let work = || {
        let mut ends = Vec::new();
        loop {
            // Relaxed, here and below: the results are published when the threads are joined.
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= end.load(Ordering::Relaxed) {
                return ends;
            }
            let one = run::one(scenario, seed, false);
            if one.is_err() {
                end.fetch_min(seed, Ordering::Relaxed);
            }
            ends.push((seed, one));
        }
    };
    let workers = thread::available_parallelism().map_or(1, usize::from);
    let mut all: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        let joined = threads.into_iter().map(|thread| thread.join());
        joined
            .flat_map(|ends| ends.unwrap_or_else(|panic| resume_unwind(panic)))
            .collect()
    });
    all.sort_by_key(|(seed, _)| *seed);
    all
}

const STATUS: &str =
    "Exit status: 0 if all is right, 1 if the oracle found a fault, 2 if the command line is wrong.";
