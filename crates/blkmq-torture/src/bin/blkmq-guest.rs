//! The command line of the proofs in a guest: which proof is made, of which daemon. `cargo xtask guest`
//! calls it.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use blkmq_torture::guest::log_writes::Round;
use blkmq_torture::guest::power_cuts::Drive;
use blkmq_torture::guest::{Filesystem, Plan, failing, log_writes, power_cuts};
use blkmq_torture::history::Wrong;
use blkmq_torture::load::Trouble;
use clap::{Parser, ValueEnum};

/// Proves durability on devices that only the kernel of a guest has. It makes and removes devices:
/// not for a machine that is used for anything else.
///
/// Exit status: 0 if everything was there, 1 if the proof could not be made, 2 if the command line is
/// wrong, 3 if data was lost or was never written.
#[derive(Parser)]
struct Args {
    /// What is to be proved
    proof: Proof,
    /// The daemon's program
    #[arg(long)]
    program: PathBuf,
    /// What chance starts from
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

#[derive(Clone, Copy, ValueEnum)]
enum Proof {
    /// ext4 and XFS on a disk of ours, and what is durable on its drive at each flush
    LogWrites,
    /// Drives that lose power or fail for a while
    Flakey,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let plan = Plan {
        program: args.program,
        seed: args.seed,
    };
    let proved = match args.proof {
        Proof::LogWrites => log_writes(&plan),
        Proof::Flakey => flakey(&plan),
    };
    let Err(trouble) = proved else {
        return ExitCode::SUCCESS;
    };
    match trouble {
        Trouble::Read(wrong) | Trouble::AfterCrash(wrong) => {
            match wrong {
                Wrong::Lost(what) => println!("LOST: {what}"),
                Wrong::Foreign(what) => println!("FOREIGN: {what}"),
            }
            ExitCode::from(3)
        }
        Trouble::Other(error) => {
            println!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn log_writes(plan: &Plan) -> Result<(), Trouble> {
    for (number, filesystem) in [
        Filesystem::Ext4,
        Filesystem::Xfs,
        Filesystem::Ext4,
        Filesystem::Xfs,
    ]
    .into_iter()
    .enumerate()
    {
        let round = Round {
            filesystem,
            connections: [1, 4, 4, 1][number],
            is_direct: number < 2,
        };
        let start = Instant::now();
        let result = log_writes::run(plan, &round);
        let report = result.map_err(|trouble| trouble.at(&round.to_string()))?;
        println!("{round}: {report} ({:.1} s)", start.elapsed().as_secs_f64());
    }
    Ok(())
}

fn flakey(plan: &Plan) -> Result<(), Trouble> {
    let files = Filesystem::ALL.map(|filesystem| (Drive::File(filesystem), FILE_CUTS));
    for (drive, cuts) in files.into_iter().chain([(Drive::Device, DEVICE_CUTS)]) {
        let (start, mut report) = (Instant::now(), power_cuts::Report::default());
        for is_direct in [true, false] {
            power_cuts::run(plan, drive, is_direct, cuts, &mut report)?;
        }
        let took = start.elapsed().as_secs_f64();
        println!("{drive:?}: {report} ({took:.1} s)");
    }
    let (start, mut report) = (Instant::now(), failing::Report::default());
    for is_direct in [true, false] {
        failing::run(plan, is_direct, INTERVALS, &mut report)?;
    }
    println!("{report} ({:.1} s)", start.elapsed().as_secs_f64());
    Ok(())
}

/// For each filesystem, past the page cache and through it each.
const FILE_CUTS: u64 = 6;
const DEVICE_CUTS: u64 = 10;
const INTERVALS: u64 = 4;
