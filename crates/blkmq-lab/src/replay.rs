//! The command line of `blkmq-lab replay`: the disks on which a recording is played are those of its
//! flags and its configuration file, as for `blkmq serve`, or a modelled drive.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use blkmq_bench::replay;
use blkmq_config::{Config, DiskSpec, Plan, luks, plan};
use blkmq_host::EngineConfig;
use clap::Args;

/// What `replay` takes.
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct ReplayCommand {
    /// A disk to play on, as for serve: for all devices of the recording, or given again for each
    #[arg(long, value_name = "KEY=VALUE,...")]
    pub disk: Vec<String>,
    /// Groups with weights and caps, as for serve
    #[arg(long, value_name = "PATH,KEY=VALUE,...")]
    pub group: Vec<String>,
    /// Read disks, queues and groups from FILE (TOML); flags add to it
    #[arg(short, long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// What is played, and how.
    #[command(flatten)]
    pub replay: replay::ReplayArgs,
    /// In virtual time instead.
    #[command(flatten)]
    pub simulate: replay::SimulateArgs,
}

/// Replays a recording.
///
/// # Errors
/// A disk or the recording is wrong, or an I/O fails.
pub(crate) fn main(args: &ReplayCommand) -> Result<()> {
    if replay::simulate(&args.replay, &args.simulate)? {
        return Ok(());
    }
    let mut config = match &args.config {
        Some(file) => {
            let text = std::fs::read_to_string(file);
            let text = text.with_context(|| format!("{} cannot be read", file.display()))?;
            Config::from_toml(&text).with_context(|| format!("configuration {}", file.display()))?
        }
        None => Config::default(),
    };
    for disk in &args.disk {
        config.disks.push(DiskSpec::parse(disk)?);
    }
    for group in &args.group {
        config.groups.push(blkmq_config::group::parse(group)?);
    }
    ensure!(
        !config.disks.is_empty(),
        "no disk to play on: give --disk, or a configuration with some, or --simulate"
    );
    let names: Vec<String> = config.disks.iter().map(|disk| disk.name.clone()).collect();
    let Plan { queues, mapped, luks } = plan(&config)?;
    luks::refuse(&luks)?;
    let engine = EngineConfig {
        reactors: 0,
        attached_max: 1,
        wait: config.wait,
        queues,
        mapped,
        ..EngineConfig::default()
    };
    replay::run(&args.replay, engine, &names)
}

const EXAMPLES: &str = "\
Examples:
  blkmq-lab replay trace --disk name=a,file=copy.raw,sched=bfq
  blkmq-lab replay trace --disk name=a,null=10G,latency=80us --speed 2
  fio --write_iolog=log job.fio && blkmq-lab replay log --disk name=a,file=copy.raw --speed max
  blkmq-lab replay trace --simulate flash,read=60us --sched bfq";
