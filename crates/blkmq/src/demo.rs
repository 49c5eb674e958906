//! Decides what `blkmq demo` shows: two tenants of one drive under each scheduler in turn.
//! `scene` makes the drive and serves it as `serve` does, `client` is a tenant's load, `stage` lets both run together,
//! `report` writes the table and what is to be seen in it.

mod client;
mod report;
mod scene;
mod stage;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::{Context, Result};
use blkmq_core::sched::Kind;
use clap::{Args, ValueEnum};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

use client::Job;
use report::{Run, Tenant};
use scene::Scene;
use stage::Stage;

/// What `demo` takes.
#[derive(Debug, Args)]
#[command(after_long_help = HELP)]
pub struct DemoArgs {
    /// Measure for N seconds under each scheduler
    #[arg(long, value_name = "N", default_value_t = 8.0, value_parser = seconds)]
    pub seconds: f64,
    /// Use two files of 256 MiB in DIR, removed at the end, instead of a modelled drive
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// What the flooding tenant does
    #[arg(long, value_enum, default_value_t = Flood::Writes)]
    pub flood: Flood,
    /// How many requests may be with the drive at once, under every scheduler
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub depth: u32,
}

/// What the flooding tenant does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Flood {
    /// Random writes of 32 KiB, 64 in flight
    Writes,
    /// Random reads of 4 KiB, 64 in flight
    Reads,
}

impl Flood {
    fn job(self) -> Job {
        match self {
            Self::Writes => Job::writes(32 << 10, FLOOD_DEPTH),
            Self::Reads => Job::reads(4 << 10, FLOOD_DEPTH),
        }
    }
}

/// Shows it, on standard output. A signal ends it early, and cleanly.
///
/// # Errors
/// What cannot be made or served, a server that fails its client, or the signal.
pub fn main(args: &DemoArgs) -> Result<()> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        // In this order: the first signal only sets the flag, the second finds it set and ends the process.
        flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&stop))?;
        flag::register(signal, Arc::clone(&stop))?;
    }
    println!("{}", show(args, &stop)?);
    Ok(())
}

/// Runs everything; returns the text that main prints. Nothing is left behind, whatever comes out.
fn show(args: &DemoArgs, stop: &AtomicBool) -> Result<String> {
    let scene = Scene::set(args.dir.as_deref(), args.depth)?;
    let outcome = run(args, &scene, stop);
    let ended = scene.end().context("ending the server");
    let runs = outcome?;
    ended?;
    Ok(format!(
        "{}\n\n{}\n{}",
        set_up(args),
        report::table(&runs),
        report::findings(
            &runs,
            args.dir.is_none().then(|| scene::capacity(args.flood.job()))
        )
    ))
}

/// The light tenant alone, then both under each scheduler.
fn run(args: &DemoArgs, scene: &Scene, stop: &AtomicBool) -> Result<Vec<Run>> {
    let mut light = scene.connect(scene::LIGHT, light())?;
    let mut flood = scene.connect(scene::FLOOD, args.flood.job())?;
    let mut stage = Stage::new(Duration::from_secs_f64(args.seconds), 1 + Kind::ALL.len(), stop);
    let first = Kind::ALL[0];
    let alone = stage.play(
        &format!("{first}, the light tenant alone"),
        || scene.switch(first),
        vec![(Tenant::Alone, &mut light)],
    )?;
    let mut runs = vec![alone.into_run(first)];
    for kind in Kind::ALL {
        let both = vec![(Tenant::Light, &mut light), (Tenant::Flooding, &mut flood)];
        let played = stage.play(&format!("{kind}, both"), || scene.switch(kind), both)?;
        runs.push(played.into_run(kind));
    }
    Ok(runs)
}

fn light() -> Job {
    Job::reads(4 << 10, 1)
}

/// What was run, for who reads the table.
fn set_up(args: &DemoArgs) -> String {
    format!(
        "Drive:     {}\nQueue:     one for both disks; at most {} requests with the drive, whatever the scheduler\n\
         Light:     {}\nFlooding:  {}\nBoth over NBD on a unix socket, one connection each; measured for {} s each time.",
        scene::describe(args.dir.as_deref()),
        args.depth,
        light(),
        args.flood.job(),
        args.seconds,
    )
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (0.01..=600.0).contains(&seconds) => Ok(seconds),
        _ => Err("must be a number from 0.01 to 600".into()),
    }
}

const FLOOD_DEPTH: usize = 64;

const HELP: &str = "\
Serves two disks on one scratch drive, as `blkmq serve` does, connects an NBD
client to each, and runs the same load once for each scheduler: a light tenant
alone, then beside a flooding one. The scheduler is switched under load.

The drive is a model, so that the story is the same on every host and no disk is
worn; with --dir it is the one under DIR. Nothing is left behind.

Examples:
  blkmq demo
  blkmq demo --flood reads
  blkmq demo --dir /var/tmp --seconds 10";

#[cfg(test)]
mod tests {
    use super::*;

    fn args(dir: Option<PathBuf>) -> DemoArgs {
        DemoArgs {
            seconds: 0.1,
            dir,
            flood: Flood::Writes,
            depth: 8,
        }
    }

    #[test]
    fn the_whole_demo_runs_in_a_moment_and_has_a_row_for_each_tenant_and_scheduler() {
        let text = show(&args(None), &AtomicBool::new(false)).unwrap();
        for kind in Kind::ALL {
            let rows = text.lines().filter(|line| line.starts_with(kind.name()));
            let expected = if kind == Kind::ALL[0] { 3 } else { 2 };
            assert_eq!(rows.count(), expected, "{kind} in:\n{text}");
        }
    }

    #[test]
    fn a_signal_ends_the_demo_and_takes_the_scratch_files_away() {
        let dir = std::env::temp_dir().join(format!("blkmq-demo-test-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let error = show(&args(Some(dir.clone())), &AtomicBool::new(true)).unwrap_err();
        // Fails if anything is left in it.
        std::fs::remove_dir(&dir).unwrap();
        assert!(error.to_string().contains("interrupted"), "{error:#}");
    }

    #[test]
    fn a_length_out_of_range_is_refused() {
        assert!(seconds("5").is_ok());
        for text in ["0", "-1", "601", "inf", "NaN", "soon"] {
            assert!(seconds(text).is_err(), "{text}");
        }
    }
}
