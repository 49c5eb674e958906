//! Decides what the simulator's command line means: replay one history, run many, or list the
//! scenarios.

use std::ops::Range;
use std::panic::resume_unwind;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use blkmq_core::sched::Kind;
use blkmq_sim::run;
use blkmq_sim::scenario::{self, Scenario};
use blkmq_sim::world::Summary;

const USAGE: &str = "\
Runs blkmq's core in virtual time, with modelled CPUs and drives. One seed, one history.

usage: blkmq-sim --scenario NAME [--seed N] [--trace]
       blkmq-sim --scenario NAME|all --seeds COUNT [--first-seed N]
       blkmq-sim --list

  --scenario NAME   what to run; `all` is every scenario but those that only measure
  --seed N          replay one history and print its digest and summary (default 1)
  --trace           print its setup and every fact of it
  --seeds COUNT     run so many seeds; the first failure of a scenario is printed with the command that replays it
  --first-seed N    start with this one (default 1)
  --list            list the scenarios

Exit status: 0 if all is right, 1 if the oracle found a fault, 2 if the command line is wrong.";

#[derive(Default)]
struct Args {
    scenario: Option<String>,
    seed: Option<u64>,
    seeds: Option<u64>,
    first_seed: Option<u64>,
    trace: bool,
    list: bool,
    help: bool,
}

fn main() -> ExitCode {
    let args = match parse(std::env::args().skip(1)) {
        Ok(args) => args,
        Err(problem) => return wrong(&problem),
    };
    if args.help {
        println!("{USAGE}");
        return ExitCode::SUCCESS;
    }
    if args.list {
        for scenario in scenario::ALL {
            println!("{:14} {}", scenario.name, scenario.about);
        }
        println!("{:14} {}", scenario::clients::NAME, scenario::clients::ABOUT);
        println!("{:14} {}", scenario::fair::NAME, scenario::fair::ABOUT);
        println!(
            "{:14} {}",
            scenario::fair::slow::NAME,
            scenario::fair::slow::ABOUT
        );
        println!("{:14} {}", scenario::poll::NAME, scenario::poll::ABOUT);
        return ExitCode::SUCCESS;
    }
    let Some(name) = args.scenario.as_deref() else {
        return wrong("--scenario is missing");
    };
    let first = args.first_seed.or(args.seed).unwrap_or(1);
    match (name, scenario::by_name(name), args.seeds) {
        (scenario::clients::NAME, _, seeds) => {
            for elevator in Kind::ALL.into_iter().filter(|kind| *kind != Kind::None) {
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
        (scenario::fair::slow::NAME, ..) => match scenario::fair::slow::table(first) {
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
        (_, None, _) => wrong(&format!(
            "scenario {name} rejected: there is none of that name; see --list"
        )),
    }
}

fn parse(mut words: impl Iterator<Item = String>) -> Result<Args, String> {
    let mut args = Args::default();
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or(format!("{word} needs a value"));
        match word.as_str() {
            "--scenario" => args.scenario = Some(value()?),
            "--seed" => args.seed = Some(number(&word, &value()?)?),
            "--seeds" => args.seeds = Some(number(&word, &value()?)?),
            "--first-seed" => args.first_seed = Some(number(&word, &value()?)?),
            "--trace" => args.trace = true,
            "--list" => args.list = true,
            "--help" | "-h" => args.help = true,
            _ => return Err(format!("{word} rejected: no such option")),
        }
    }
    Ok(args)
}

fn number(name: &str, text: &str) -> Result<u64, String> {
    text.parse()
        .map_err(|_| format!("{name} {text} rejected: must be a number from 0 to 2^64 - 1"))
}

fn wrong(problem: &str) -> ExitCode {
    eprintln!("{problem}\n\n{USAGE}");
    ExitCode::from(2)
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
