//! The growth with the number of submitters, in the simulator's CPU model, since two cores cannot show 64.

use std::time::Duration;

use anyhow::{Result, ensure};
use blkmq_core::sched::{self, ElevatorType};
use blkmq_sim::scenario::scale;

use crate::args::BenchArgs;
use crate::report::{About, Report};
use crate::rounds::{self, Point, Sample};
use crate::usage::Usage;

/// Show how elevators scale to many submitters, in a model of as many CPUs
#[derive(clap::Args, Clone, Debug)]
pub struct ScaleArgs {
    /// What all benches have.
    #[command(flatten)]
    pub common: BenchArgs,
    /// Submitters, each on a CPU of its own [default: 1,2,4,8,16,32,64]
    #[arg(long, value_name = "N", value_delimiter = ',')]
    pub submitters: Vec<usize>,
}

/// Runs the bench and prints its report; progress goes to stderr.
///
/// # Errors
/// If an option is out of range, or a file cannot be written.
pub fn main(args: &ScaleArgs) -> Result<()> {
    let submitters = match &args.submitters[..] {
        [] => SUBMITTERS.to_vec(),
        given => given.to_vec(),
    };
    for count in &submitters {
        ensure!(
            (1..=SUBMITTERS_MAX).contains(count),
            "--submitters {count} rejected: must be from 1 to {SUBMITTERS_MAX}"
        );
    }
    let plan = args.common.plan(KINDS.len() * submitters.len(), Duration::ZERO)?;
    let mut points = points(&submitters);
    let mut report = Report::start("scale", about(), &plan);
    let rows = rounds::run(&plan, &mut points)?;
    drop(points);
    report.finish(rows, &args.common)?;
    Ok(())
}

/// How submitters wait for a busy elevator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Lock,
    Gate,
    FourGates,
}

impl Side {
    const ALL: [Self; 3] = [Self::Lock, Self::Gate, Self::FourGates];

    fn name(self) -> &'static str {
        match self {
            Self::Lock => "lock",
            Self::Gate => "gate",
            Self::FourGates => "four-gates",
        }
    }

    /// Whether this point can be measured: without an elevator submitters do not meet.
    fn fits(self, kind: &'static ElevatorType, submitters: usize) -> bool {
        match self {
            Self::Lock => kind != sched::NONE,
            Self::Gate => true,
            Self::FourGates => kind != sched::NONE && submitters.is_multiple_of(4),
        }
    }
}

fn points(submitters: &[usize]) -> Vec<Point<'static>> {
    let mut points = Vec::new();
    for kind in KINDS {
        for &submitters in submitters {
            let sides = Side::ALL.into_iter().filter(|side| side.fits(kind, submitters));
            points.extend(sides.map(|side| {
                let mut seed = 0;
                Point {
                    case: format!("model/{kind}/submitters={submitters}"),
                    side: side.name().into(),
                    measure: Box::new(move |_| {
                        seed += 1;
                        Ok(sample(side, kind, submitters, seed))
                    }),
                }
            }));
        }
    }
    points
}

/// One run of the model; its time is virtual.
fn sample(side: Side, kind: &'static ElevatorType, submitters: usize, seed: u64) -> Sample {
    let gates = if side == Side::FourGates { 4 } else { 1 };
    let depth = DEPTH / gates as u64;
    let point = scale::measure(kind, submitters / gates, depth, side == Side::Lock, seed);
    let gates = gates as u64;
    Sample {
        ios: point.bios * gates,
        elapsed: Duration::from_nanos(point.time.0),
        usage: Usage {
            cpu_ns: point.busy.0 * gates,
            switches: 0,
        },
        ..Sample::default()
    }
}

fn about() -> About {
    About {
        question: "how does an elevator's throughput grow with the number of submitters?".into(),
        setting: vec![
            format!("a model: virtual time, a CPU for each submitter, an inline null drive, depth {DEPTH} over all, a seed per round"),
            "gate: who comes late leaves its work to the one inside; without an elevator nobody meets".into(),
            "lock: who comes late waits, spinning".into(),
            "four-gates: a quarter of the submitters at each of four, which know nothing of each other: what several gates under one bound could have at most".into(),
        ],
    }
}

const KINDS: [&ElevatorType; 3] = [sched::NONE, sched::MQ_DEADLINE, sched::BFQ];
const SUBMITTERS: [usize; 7] = [1, 2, 4, 8, 16, 32, 64];
const SUBMITTERS_MAX: usize = 128;
/// I/Os under way, over all submitters.
const DEPTH: u64 = 1024;
