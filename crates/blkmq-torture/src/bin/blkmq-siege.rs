//! The command line of `blkmq-siege`: which daemon, for how long, with which seed.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use blkmq_torture::siege::{self, Plan, attack};
use clap::Parser;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Attacks a daemon in every known way, beside a tenant that must not notice
///
/// Exit status: 0 if the tenant noticed nothing, 2 if the command line is wrong, 3 if a check
/// fails.
#[derive(Parser)]
struct Args {
    /// The daemon's program
    #[arg(long, required_unless_present = "client")]
    program: Option<PathBuf>,
    /// Seconds that the attacks and the quiet windows take together
    #[arg(long, default_value_t = 300)]
    seconds: u64,
    /// Seed of all random choices
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Run only this attack
    #[arg(long)]
    attack: Option<String>,
    /// Run only this setting
    #[arg(long)]
    setting: Option<String>,
    /// Show the latencies of the tenant beside each attack, and judge only the longest and the typical one
    #[arg(long)]
    lenient: bool,
    /// Be a client of the daemon at this socket: attackers start this
    #[arg(long, hide = true)]
    client: Option<PathBuf>,
}

fn main() -> ExitCode {
    let args = Args::parse();
    if let Some(socket) = args.client {
        let _ = attack::client(&socket);
        return ExitCode::SUCCESS;
    }
    let start = Instant::now();
    raise_descriptor_limit();
    let plan = Plan {
        program: args.program.unwrap_or_default(),
        time: Duration::from_secs(args.seconds),
        seed: args.seed,
        attack: args.attack,
        setting: args.setting,
        is_lenient: args.lenient,
    };
    match siege::run(&plan) {
        Ok(report) => {
            println!("{report} ({:.1} s)", start.elapsed().as_secs_f64());
            for what in report.skipped() {
                blkmq_testkit::skip_of("siege", what);
            }
            ExitCode::SUCCESS
        }
        Err(error) => {
            println!("FAILED after {:.1} s: {error:#}", start.elapsed().as_secs_f64());
            ExitCode::from(3)
        }
    }
}

/// The crowd needs more connections than most shells allow.
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        println!("crowds are smaller: file descriptors cannot be raised: {error}");
    }
}
