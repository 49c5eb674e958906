//! `cargo xtask NAME` runs a chore; each chore has a file of its own.

mod ceph;
mod check;
mod chores;
mod commits;
mod crashes;
mod figures;
mod filesystems;
mod fio;
mod fuzz;
mod guest;
mod instructions;
mod loom;
mod mutant;
mod mutants;
mod outside;
mod package;
mod path_loss;
mod place;
mod release;
mod sanitize;
mod screens;
mod setup;
mod siege;
mod sim;
mod skips;
mod soak;
mod steps;
mod test;

use std::process::ExitCode;

use clap::Parser;

use crate::chores::Command;
use crate::steps::Steps;

fn main() -> ExitCode {
    match Command::parse().chore.run(&mut Steps::new()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}
