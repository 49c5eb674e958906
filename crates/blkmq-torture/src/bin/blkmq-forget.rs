//! The command line of `blkmq-forget`: which daemon, how many crashes, from which seed.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use blkmq_torture::crashes::{self, Disk, Failure, Plan};
use blkmq_torture::filesystems;
use clap::Parser;

/// Kills a daemon again and again on a filesystem that forgets what was not made durable, and checks what is left.
///
/// Exit status: 0 if everything was there, 1 if the proof could not be made, 2 if the command line is wrong, 3 if
/// data was lost or was never written, 4 if there is no FUSE here, or, with
/// --filesystems, no loop device.
#[derive(Parser)]
struct Args {
    /// The daemon's program
    #[arg(long)]
    program: PathBuf,
    /// How many crashes
    #[arg(long, default_value_t = 200)]
    crashes: u64,
    /// What chance starts from
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// One of the twenty combinations alone, from 0: bit 0 is direct I/O, bit 1 four connections
    #[arg(long)]
    only: Option<u64>,
    /// Put ext4 and XFS on the disk, by FUSE and a loop device, instead of load over NBD; --only is from 0 to 3 then. Needs root
    #[arg(long)]
    filesystems: bool,
    /// Have direct I/O take whole blocks of 4096 bytes only, so that small writes are done by read, change and write; every
    /// crash is one of direct I/O then
    #[arg(long, conflicts_with = "filesystems")]
    blocks: bool,
    /// Have the disk encrypted, by a key of cryptsetup's
    #[arg(long, conflicts_with = "filesystems")]
    encrypted: bool,
    /// Have the disk in a qcow2 image, with snapshots meanwhile; needs qemu-img
    #[arg(long, conflicts_with_all = ["filesystems", "blocks", "encrypted"])]
    images: bool,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let start = Instant::now();
    let plan = Plan {
        program: args.program.clone(),
        crashes: args.crashes,
        seed: args.seed,
        only: args.only,
        disk: match &args {
            Args { blocks: true, .. } => Disk::Blocks,
            Args { encrypted: true, .. } => Disk::Encrypted,
            Args { images: true, .. } => Disk::Image,
            _ => Disk::File,
        },
    };
    let proved = if args.filesystems {
        filesystems::run(&plan).map(|report| report.to_string())
    } else {
        crashes::run(&plan).map(|report| report.to_string())
    };
    match proved {
        Ok(report) => {
            println!("{report} ({:.1} s)", start.elapsed().as_secs_f64());
            ExitCode::SUCCESS
        }
        Err(failure) => {
            println!("{failure}");
            ExitCode::from(match failure {
                Failure::NoMount(_) => 4,
                Failure::Wrong(..) => 3,
                Failure::Other(_) => 1,
            })
        }
    }
}
