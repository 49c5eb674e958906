//! The demo, `blkmq demo`: a light tenant, and one that pauses, beside a flooding one on one drive, shared by one rule
//! after the other; then four tenants with weights, of which the heaviest has little in flight.
//! `drive` makes the drive, `scene` serves it as `serve` does, `client` is a tenant's load, `stage` lets both run together,
//! `report` writes the table and what is to be seen in it.

mod client;
mod drive;
mod latencies;
mod report;
mod scene;
mod stage;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::{Context, Result};
use blkmq_core::sched::{self, ElevatorType};
use clap::{Args, ValueEnum};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

use client::Job;
use drive::Medium;
use report::{Run, Tenant};
use scene::{FLOOD_DEPTH, Rule, Scene};
use stage::Stage;

/// What `demo` takes.
#[derive(Debug, Args)]
#[command(after_long_help = HELP)]
pub struct DemoArgs {
    /// Measure for N seconds under each rule
    #[arg(long, value_name = "N", default_value_t = 5.0, value_parser = seconds)]
    pub seconds: f64,
    /// Use seven files of 128 MiB in DIR, removed at the end, instead of a modelled drive
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// Use a new file at PATH, of 897 MiB, as the drive, and remove it at the end; an existing file is refused
    #[arg(long, value_name = "PATH", conflicts_with = "dir")]
    pub file: Option<PathBuf>,
    /// What the flooding tenant does
    #[arg(long, value_enum, default_value_t = Flood::Writes)]
    pub flood: Flood,
    /// Show all schedulers, not only none and bfq
    #[arg(long)]
    pub all: bool,
    /// Largest number of requests at the drive at once, under every rule
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=1024))]
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

/// Runs the demo, with output on standard output. A signal ends it early, and cleanly.
///
/// # Errors
/// What cannot be made or served, a server that fails its client, or the signal.
pub fn main(args: &DemoArgs) -> Result<()> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        // In this order: the first signal only sets the flag, the second finds it set and ends the
        // process.
        flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&stop))?;
        flag::register(signal, Arc::clone(&stop))?;
    }
    println!("{}", show(args, &stop)?);
    Ok(())
}

/// Runs everything; returns the text that main prints. Nothing is left behind, whatever the result
/// is.
fn show(args: &DemoArgs, stop: &AtomicBool) -> Result<String> {
    let medium = medium(args);
    let scene = Scene::set(&medium, args.depth)?;
    let outcome = run(args, &scene, stop);
    let ended = scene.end().context("ending the server");
    let (runs, weighted) = outcome?;
    ended?;
    Ok(format!(
        "{}\n\n{}\n{}\n\nTenants with weights, of which the heaviest has little in flight:\n{}",
        set_up(args, &medium),
        report::table(&runs),
        report::findings(&runs, medium.capacity(args.flood.job())),
        report::shares(&weighted),
    ))
}

/// The light tenant alone, then beside the others under each rule; then the tenants with weights.
fn run(args: &DemoArgs, scene: &Scene, stop: &AtomicBool) -> Result<(Vec<Run>, Vec<Run>)> {
    let schedulers: Vec<&'static ElevatorType> = sched::BUILT_IN
        .into_iter()
        .filter(|kind| args.all || FEW.contains(kind))
        .collect();
    let mut light = scene.connect(scene::LIGHT, light())?;
    let mut pausing = scene.connect(scene::PAUSING, pausing())?;
    let mut flood = scene.connect(scene::FLOOD, args.flood.job())?;
    let total = 2 + schedulers.len() + WEIGHTED_UNDER.len();
    let mut stage = Stage::new(Duration::from_secs_f64(args.seconds), total, stop);
    let first = Rule::Scheduler(sched::NONE);
    let alone = stage.play(
        "none, the light tenant alone",
        || scene.switch(first),
        vec![(Tenant::Alone, &mut light)],
    )?;
    let mut runs = vec![alone.into_run(first)];
    let mut together = |rule: Rule, runs: &mut Vec<Run>| -> Result<()> {
        let tenants = vec![
            (Tenant::Light, &mut light),
            (Tenant::Pausing, &mut pausing),
            (Tenant::Flooding, &mut flood),
        ];
        let played = stage.play(
            &format!("{}, all three", rule.name()),
            || scene.switch(rule),
            tenants,
        )?;
        runs.push(played.into_run(rule));
        Ok(())
    };
    together(first, &mut runs)?;
    // The choice of an operator who knows the flood's throughput: half of it.
    let flood_bps = runs
        .last()
        .map_or(0, |run| (report::flood_bytes(run) / 2.0) as u64);
    together(Rule::Caps { flood_bps }, &mut runs)?;
    for &kind in &schedulers[1..] {
        together(Rule::Scheduler(kind), &mut runs)?;
    }
    let mut clients = scene::WEIGHTED
        .iter()
        .map(|tenant| scene.connect(tenant.name, args.flood.job().with_depth(tenant.depth)))
        .collect::<Result<Vec<_>>>()?;
    let mut weighted = Vec::new();
    for rule in WEIGHTED_UNDER.map(Rule::Scheduler) {
        let tenants = clients.iter_mut().enumerate();
        let tenants = tenants
            .map(|(place, client)| (Tenant::Weighted(place), client))
            .collect();
        let played = stage.play(
            &format!("{}, those with weights", rule.name()),
            || scene.switch(rule),
            tenants,
        )?;
        weighted.push(played.into_run(rule));
    }
    Ok((runs, weighted))
}

fn medium(args: &DemoArgs) -> Medium {
    match (&args.dir, &args.file) {
        (Some(dir), _) => Medium::Dir(dir.clone()),
        (None, Some(file)) => Medium::File(file.clone()),
        (None, None) => Medium::Model,
    }
}

fn light() -> Job {
    Job::reads(4 << 10, 1)
}

fn pausing() -> Job {
    light().with_rate(PAUSING_RATE)
}

/// A description of the set-up, for readers of the table.
fn set_up(args: &DemoArgs, medium: &Medium) -> String {
    format!(
        "Drive:     {}\nQueue:     one for all disks; at most {} requests with the drive, whatever the rule\n\
         Light:     {}\nPausing:   {}\nFlooding:  {}\nCaps:      the flooding tenant gets at most half of what it got with none\nAll over NBD on a unix socket, one connection each; measured for {} s each time.",
        medium.describe(scene::disks().count()),
        args.depth,
        light(),
        pausing(),
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

/// Reads a second of the tenant that pauses.
const PAUSING_RATE: u32 = 200;
/// The schedulers that show the difference.
const FEW: [&ElevatorType; 2] = [sched::NONE, sched::BFQ];
/// The schedulers under which tenants with weights are shown.
const WEIGHTED_UNDER: [&ElevatorType; 2] = [sched::NONE, sched::BFQ];

const HELP: &str = "\
Serves disks on one scratch drive, as `blkmq serve` does, and connects an NBD
client to each. A light tenant reads alone, then beside a flooding one and one
that pauses after each read: without a scheduler, with a cap on the flood, and
with bfq. Then three flooding tenants
have weights 1:2:4, and one with 4 requests in flight has 8. The rule is changed
under load.

The drive is a model, so that the story is the same on every host and no disk is
worn; with --dir or --file it is the one under that. Nothing is left behind.

Examples:
  blkmq demo
  blkmq demo --all
  blkmq demo --dir /var/tmp --seconds 10
  blkmq demo --file /var/tmp/drive.raw";

#[cfg(test)]
mod tests {
    use super::*;

    fn args(medium: Medium) -> DemoArgs {
        let (dir, file) = match medium {
            Medium::Model => (None, None),
            Medium::Dir(dir) => (Some(dir), None),
            Medium::File(file) => (None, Some(file)),
        };
        DemoArgs {
            seconds: 0.1,
            dir,
            file,
            flood: Flood::Writes,
            all: true,
            depth: 128,
        }
    }

    #[test]
    fn whole_demo_runs_in_a_moment_and_has_a_row_for_each_tenant_and_rule() {
        let text = show(&args(Medium::Model), &AtomicBool::new(false)).unwrap();
        let rules = sched::BUILT_IN.map(|kind| kind.name);
        for rule in rules.into_iter().chain(["caps"]) {
            let rows = text.lines().filter(|line| line.split(' ').next() == Some(rule));
            let expected = if rule == "none" { 4 } else { 3 };
            assert_eq!(rows.count(), expected, "{rule} in:\n{text}");
        }
        for tenant in scene::WEIGHTED {
            assert!(
                text.lines().any(|line| line.starts_with(tenant.name)),
                "{tenant:?} in:\n{text}"
            );
        }
    }

    #[test]
    fn file_is_the_drive_of_all_tenants_and_is_gone_afterwards() {
        let dir = std::env::temp_dir().join(format!("blkmq-demo-file-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let path = dir.join("drive.raw");
        let shown = show(&args(Medium::File(path.clone())), &AtomicBool::new(false));
        // Fails if anything is left in it.
        std::fs::remove_dir(&dir).unwrap();
        let text = shown.unwrap();
        assert!(text.contains(&path.display().to_string()), "{text}");
        assert!(text.lines().any(|line| line.starts_with("platinum")), "{text}");
    }

    #[test]
    fn signal_ends_the_demo_and_takes_the_scratch_files_away() {
        let dir = std::env::temp_dir().join(format!("blkmq-demo-test-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        for medium in [Medium::Dir(dir.clone()), Medium::File(dir.join("drive.raw"))] {
            let error = show(&args(medium), &AtomicBool::new(true)).unwrap_err();
            assert!(error.to_string().contains("interrupted"), "{error:#}");
        }
        // Fails if anything is left in it.
        std::fs::remove_dir(&dir).unwrap();
    }

    #[test]
    fn length_out_of_range_is_refused() {
        assert!(seconds("5").is_ok());
        for text in ["0", "-1", "601", "inf", "NaN", "soon"] {
            assert!(seconds(text).is_err(), "{text}");
        }
    }
}
