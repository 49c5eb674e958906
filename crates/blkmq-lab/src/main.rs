//! The command `blkmq-lab`: everything that measures, simulates or replays, apart from the daemon.
//!
//! The benches are `blkmq_bench`'s, the simulator is `blkmq_sim`; [`sim`] and [`replay`] are their
//! command lines. Benches that need a daemon start the `blkmq` beside this program.
#![forbid(unsafe_code)]

mod replay;
mod sim;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// The laboratory of blkmq: benches, the simulator, recorded I/O played again
#[derive(Debug, Parser)]
#[command(name = "blkmq-lab", version, after_help = EXAMPLES, propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Measure
    #[command(subcommand)]
    Bench(Bench),
    /// Run the core in virtual time, with modelled CPUs and drives
    Sim(sim::SimArgs),
    /// Play recorded I/O again, on any disks or on a modelled drive
    Replay(replay::ReplayCommand),
    /// One tenant's client, which `bench fairness --clients` starts
    #[command(hide = true)]
    Client(blkmq_bench::fairness::own::OwnArgs),
}

/// What can be measured.
#[derive(Debug, Subcommand)]
enum Bench {
    /// The engine alone: in-process load on a null device, or on a file beside fio
    Engine(blkmq_bench::engine::EngineArgs),
    /// The NBD server beside other NBD servers, all under one lean client
    Nbd(blkmq_bench::nbd::NbdArgs),
    /// One load through every front door, beside qemu-storage-daemon where it has that door
    Doors(blkmq_bench::doors::DoorsArgs),
    /// Runs of hardware contexts: once and only where they wait, beside all of them at each completion
    RunQueue(blkmq_bench::run_queue::RunQueueArgs),
    /// Request-based multipath: carried inline, beside insertion, completion and queue runs over a worker thread
    Stack(blkmq_bench::stack::StackArgs),
    /// One dispatcher for a scheduler, beside every hardware context for itself and a single hardware queue
    SingleDispatch(blkmq_bench::single_dispatch::SingleDispatchArgs),
    /// How tenants share a drive: weights, isolation, throughput, reaction; beside the kernel's schedulers too
    Fairness(blkmq_bench::fairness::FairnessArgs),
    /// Ways to wait for a device: block, look, sleep for half of its time, sleep as predicted
    Poll(blkmq_bench::poll::PollArgs),
    /// A scheduler's statistics: under its lock, outside of it, and off
    Stats(blkmq_bench::stats::StatsArgs),
    /// What it costs a client that its daemon is traced, or that its statistics are read
    Observers(blkmq_bench::observers::ObserversArgs),
    /// Disks in a Ceph cluster: beside fio's rbd engine and QEMU's servers, shared by weight, and hanging
    Rbd(blkmq_bench::rbd::RbdArgs),
    /// Disks in qcow2 images: beside qemu-storage-daemon with the same image, and beside raw files
    Images(blkmq_bench::images::ImagesArgs),
    /// NBD by TLS beside NBD without, ours and others'
    Tls(blkmq_bench::tls::TlsArgs),
    /// Encrypted disks beside plain ones and qemu-storage-daemon's, and the cipher beside OpenSSL's
    Luks(blkmq_bench::luks::LuksArgs),
    /// The library in Rust and C, beside the engine alone, libblkio and tokio
    Library(blkmq_bench::library::LibraryArgs),
    /// How elevators scale to many submitters, in a model of as many CPUs
    Scale(blkmq_bench::scale::ScaleArgs),
}

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("blkmq-lab: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<ExitCode> {
    match command {
        Command::Bench(what) => bench(what)?,
        Command::Sim(args) => return Ok(sim::main(&args)),
        Command::Replay(args) => replay::main(&args)?,
        Command::Client(args) => blkmq_bench::fairness::own::main(&args)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn bench(what: Bench) -> Result<()> {
    match what {
        Bench::Engine(args) => blkmq_bench::engine::main(&args),
        Bench::Nbd(args) => blkmq_bench::nbd::main(&args),
        Bench::Doors(args) => blkmq_bench::doors::main(&args),
        Bench::RunQueue(args) => blkmq_bench::run_queue::main(&args),
        Bench::Stack(args) => blkmq_bench::stack::main(&args),
        Bench::SingleDispatch(args) => blkmq_bench::single_dispatch::main(&args),
        Bench::Fairness(args) => blkmq_bench::fairness::main(&args),
        Bench::Poll(args) => blkmq_bench::poll::main(&args),
        Bench::Stats(args) => blkmq_bench::stats::main(&args),
        Bench::Observers(args) => blkmq_bench::observers::main(&args),
        Bench::Rbd(args) => blkmq_bench::rbd::main(&args),
        Bench::Images(args) => blkmq_bench::images::main(&args),
        Bench::Tls(args) => blkmq_bench::tls::main(&args),
        Bench::Luks(args) => blkmq_bench::luks::main(&args),
        Bench::Library(args) => blkmq_bench::library::main(&args),
        Bench::Scale(args) => blkmq_bench::scale::main(&args),
    }
}

const EXAMPLES: &str = "\
Examples:
  blkmq-lab bench engine --quick
  blkmq-lab sim --scenario power-cut --seed 17
  blkmq-lab replay trace --simulate flash --sched bfq";

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn commands_are_well_formed() {
        Cli::command().debug_assert();
    }
}
