//! The replay of recorded I/O: a trace by blktrace or `blkmq trace`, or an I/O log of fio, on any disks, at
//! its own speed or another. The command opens the disks and calls [`run`], or [`simulate`], which needs no
//! disks.

mod device_model;
mod player;
mod simulated;
mod source;

use std::io::{self, Write};
use std::path::PathBuf;
use std::str::FromStr;

use anyhow::{Context, Result, bail, ensure};
use blkmq_core::bio::Direction;
use blkmq_core::sched::ElevatorType;
use blkmq_core::time::Nanos;
use blkmq_host::{Disk, Engine, EngineConfig};
use serde_json::{Value, json};

use self::device_model::DeviceModel;
use self::player::{Outcome, Speed, moves_data, play};
use self::simulated::Simulation;
use self::source::{Recorded, Recording};
use crate::args::elevator;
use crate::table::align;

/// Play recorded I/O again
#[derive(clap::Args, Clone, Debug)]
pub struct ReplayArgs {
    /// The recording: an I/O log of fio's, or what stands before .blktrace.0
    pub recording: PathBuf,
    /// How many times as fast as it was recorded, such as 2 or 0.5, or max: without its pauses
    #[arg(long, value_name = "TIMES", default_value = "1")]
    speed: Speed,
    /// I/Os under way at most; more wait
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=4096))]
    depth: u32,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Play in virtual time
#[derive(clap::Args, Clone, Debug)]
pub struct SimulateArgs {
    /// Play in virtual time on a modelled drive instead: flash or rotating, with keys, such as
    /// flash,read=60us,units=8
    #[arg(long, value_name = "MODEL", conflicts_with_all = ["disk", "group", "config"])]
    simulate: Option<DeviceModel>,
    /// The scheduler of the modelled drive
    #[arg(long, value_name = "NAME", default_value = "none", requires = "simulate", value_parser = elevator)]
    sched: &'static ElevatorType,
    /// Seed of the model: equal seeds give equal figures
    #[arg(long, value_name = "N", default_value_t = 1, requires = "simulate")]
    seed: u64,
}

impl FromStr for Speed {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "max" {
            return Ok(Self::Max);
        }
        let times = text.parse::<f64>().ok();
        let times = times.filter(|times| (0.000_001..=1_000_000.0).contains(times));
        let wrong = || "must be a number from 0.000001 to 1000000, or max".to_owned();
        times.map(Self::Times).ok_or_else(wrong)
    }
}

/// Replays a recording on the disks of an engine, and prints the result. The recording's devices
/// are mapped to the disks of these names, in the order of both; one name is for all devices.
///
/// # Errors
/// If there is no such recording, it does not fit the disks, or the engine cannot start.
pub fn run(args: &ReplayArgs, engine: EngineConfig, names: &[String]) -> Result<()> {
    let recording = Recording::read(&args.recording)?;
    let engine = Engine::start(engine)?;
    let disks = choose(&recording, names, &engine)?;
    check(&recording, &disks)?;
    let mut attached = engine.attach()?;
    let outcome = play(&recording, &disks, args.speed, args.depth, &mut attached);
    drop(attached);
    engine.shutdown(SHUTDOWN_LIMIT)?;
    report(args, &outcome, "s")
}

/// Replays a recording in virtual time, if a modelled drive is requested. Returns whether it did.
///
/// # Errors
/// If there is no such recording, or its devices do not fit on a drive.
pub fn simulate(args: &ReplayArgs, simulate: &SimulateArgs) -> Result<bool> {
    let Some(device) = &simulate.simulate else {
        return Ok(false);
    };
    let recording = Recording::read(&args.recording)?;
    recording.ios.iter().try_for_each(check_len)?;
    let simulation = Simulation {
        device,
        sched: simulate.sched,
        seed: simulate.seed,
    };
    let outcome = simulated::play(&recording, args.speed, args.depth, simulation)?;
    report(args, &outcome, "s of virtual time")?;
    Ok(true)
}

/// Prints the result.
fn report(args: &ReplayArgs, outcome: &Outcome, unit: &str) -> Result<()> {
    let text = match args.json {
        true => format!("{:#}\n", as_json(outcome)),
        false => as_table(outcome, unit),
    };
    match io::stdout().lock().write_all(text.as_bytes()) {
        // A reader that closes early, as in `blkmq-lab replay trace … | head`, is no failure.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
        written => written?,
    }
    let failed: u64 = outcome.played.iter().map(|played| played.failed).sum();
    ensure!(failed == 0, "{failed} I/Os failed");
    Ok(())
}

/// The disk of each device.
fn choose(recording: &Recording, names: &[String], engine: &Engine) -> Result<Vec<Disk>> {
    let devices = &recording.devices;
    let mut disks = Vec::new();
    for name in names {
        disks.push(engine.disk(name).context("a disk that was started")?.clone());
    }
    if disks.len() == 1 {
        return Ok(vec![disks.remove(0); devices.len()]);
    }
    if disks.len() != devices.len() {
        bail!(
            "{} disks for {} devices ({}): give one disk for all, or one for each, in this order",
            disks.len(),
            devices.len(),
            devices.join(" ")
        );
    }
    Ok(disks)
}

/// Checks that the disks can do every I/O.
fn check(recording: &Recording, disks: &[Disk]) -> Result<()> {
    for io in &recording.ios {
        let disk = &disks[io.device as usize];
        let end = io.offset.saturating_add(io.len);
        ensure!(
            end <= disk.size,
            "disk {}: has {} bytes, and the recording reaches {end}: give it a larger one",
            disk.name,
            disk.size
        );
        check_len(io)?;
    }
    Ok(())
}

fn check_len(io: &Recorded) -> Result<()> {
    ensure!(
        io.len <= LEN_MAX || !moves_data(io.op),
        "{} bytes in one I/O rejected: {LEN_MAX} at most",
        io.len
    );
    Ok(())
}

fn as_table(outcome: &Outcome, unit: &str) -> String {
    let heads = ["", "ios", "MB", "p50_us", "p99_us", "max_us", "failed"];
    let mut lines = vec![heads.map(str::to_owned).to_vec()];
    for (direction, played) in Direction::ALL.iter().zip(&outcome.played) {
        if played.count == 0 {
            continue;
        }
        let us = |ns: u64| format!("{:.1}", ns as f64 / 1e3);
        lines.push(vec![
            format!("{direction:?}").to_lowercase(),
            played.count.to_string(),
            format!("{:.1}", played.bytes as f64 / 1e6),
            us(played.latency.quantile(0.5)),
            us(played.latency.quantile(0.99)),
            us(played.latency.max()),
            played.failed.to_string(),
        ]);
    }
    let seconds = outcome.elapsed.as_secs_f64();
    let ios: u64 = outcome.played.iter().map(|played| played.count).sum();
    let late = outcome.late.quantile(0.99) as f64 / 1e3;
    let sum = format!(
        "{seconds:.3} {unit}, {:.0} IOPS; submitted late by at most {late:.1} us (p99)\n",
        ios as f64 / seconds.max(1e-9)
    );
    align(&lines, 1) + &sum
}

fn as_json(outcome: &Outcome) -> Value {
    let mut all = json!({
        "elapsed_ns": outcome.elapsed.as_nanos() as u64,
        "late_p99_ns": outcome.late.quantile(0.99),
    });
    for (direction, played) in Direction::ALL.iter().zip(&outcome.played) {
        all[format!("{direction:?}").to_lowercase()] = json!({
            "ios": played.count,
            "bytes": played.bytes,
            "failed": played.failed,
            "p50_ns": played.latency.quantile(0.5),
            "p99_ns": played.latency.quantile(0.99),
            "max_ns": played.latency.max(),
        });
    }
    all
}

/// The largest I/O, in bytes. It must fit in memory; of those above 1 MiB one at a time is under
/// way.
const LEN_MAX: u64 = 64 << 20;
const SHUTDOWN_LIMIT: Nanos = Nanos::from_secs(30);
