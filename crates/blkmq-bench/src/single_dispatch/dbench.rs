//! The published measurement, repeated with its own tool: dbench on XFS on a slow disk, compared with the
//! kernel's own scheduler. `stage` has the layers between them, `disk` the disk.
//!
//! dbench normally plays its load file repeatedly for a fixed time. Here each client plays the
//! beginning of it once, so that the work is fixed and the time is measured, and then sleeps until
//! it is killed. Each client makes one directory before its work and one after it, which mark the
//! times.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write as _};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, bail, ensure};
use blkmq_core::queue::Dispatch;
use blkmq_core::sched::{self, ElevatorType};
use blkmq_sim::scenario::clients::CPUS;
use rustix::process::{Pid, Signal, kill_process_group};

use super::stage::{Queue, Stage};
use super::{SingleDispatchArgs, theirs};
use crate::interrupt;
use crate::report::{self, About, Ratio, Report, Row};
use crate::rounds::{self, Point, Sample};
use crate::usage::Usage;
use blkmq_testkit::Scratch;

/// Who dispatches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Side {
    /// A hardware context for each of 64 reactors; each dispatches for itself, and the end of a
    /// request runs all of them.
    Before,
    /// One hardware context.
    SingleQueue,
    /// A hardware context for each reactor, and the gate.
    After,
    /// The kernel's scheduler on the block device, and no scheduler of ours below it.
    Kernel,
}

/// How the disk becomes a block device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Door {
    /// A loop device on a FUSE file.
    Fuse,
    /// A device of ublk, which needs the kernel's module `ublk_drv`.
    Ublk,
}

impl Door {
    /// Checks what else it needs.
    fn check(self) -> Result<()> {
        match self {
            Self::Fuse => check_program("losetup", "mount"),
            Self::Ublk => {
                ensure!(
                    Path::new(UBLK).exists(),
                    "--door ublk: there is no {UBLK}: load the kernel's module ublk_drv (modprobe ublk_drv; Linux 6.4 or later), \
                     or run: cargo xtask guest dbench"
                );
                Ok(())
            }
        }
    }

    const fn setting(self) -> &'static str {
        match self {
            Self::Fuse => "a loop device on a FUSE file",
            Self::Ublk => "a device of ublk",
        }
    }
}

/// The filesystem of dbench's files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Filesystem {
    /// As in the published measurement.
    Xfs,
    /// The other common filesystem.
    Ext4,
}

impl Filesystem {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Xfs => "xfs",
            Self::Ext4 => "ext4",
        }
    }

    /// The program that makes a filesystem, and its options.
    pub(super) const fn maker(self) -> (&'static str, &'static [&'static str]) {
        match self {
            Self::Xfs => ("mkfs.xfs", &["-q", "-f", "-K", "-l", "size=64m"]),
            Self::Ext4 => ("mkfs.ext4", &["-q", "-F", "-J", "size=64", "-E", "nodiscard"]),
        }
    }

    /// Mount options: ext4 must not initialize its inode tables during the measurement.
    pub(super) const fn mounted_with(self) -> &'static str {
        match self {
            Self::Xfs => "defaults",
            Self::Ext4 => "noinit_itable",
        }
    }
}

impl Side {
    const ALL: [Self; 4] = [Self::Before, Self::SingleQueue, Self::After, Self::Kernel];

    const fn name(self) -> &'static str {
        match self {
            Self::Before => "before",
            Self::SingleQueue => "single-queue",
            Self::After => "after",
            Self::Kernel => "kernel",
        }
    }

    /// The configuration of the disk's queue.
    pub(super) fn queue(self, elevator: &'static ElevatorType) -> Queue {
        let (elevator, hctxs, dispatch) = match self {
            Self::Before => (elevator, CPUS as u16, Dispatch::EveryContext),
            Self::SingleQueue => (elevator, 1, Dispatch::Single),
            Self::After => (elevator, CPUS as u16, Dispatch::Single),
            // One context, so that the disk has as many commands as on the other sides.
            Self::Kernel => (sched::NONE, 1, Dispatch::Single),
        };
        Queue {
            elevator,
            hctxs,
            dispatch,
        }
    }

    /// The scheduler on the block device.
    pub(super) const fn kernel_scheduler(self, elevator: &'static ElevatorType) -> &'static str {
        match self {
            Self::Kernel => elevator.name,
            _ => sched::NONE.name,
        }
    }
}

/// Runs the bench and prints its report.
///
/// # Errors
/// If a requirement is missing, an option is out of range, or a visit fails.
pub(super) fn main(args: &SingleDispatchArgs) -> Result<()> {
    let args = &with_defaults(args)?;
    let load = Scratch::new();
    let loadfile = load.path("client.txt");
    write_loadfile(&loadfile, args.ops)?;
    interrupt::listen()?;
    let times = Times::default();
    let mut points = Vec::new();
    for &elevator in &args.elevator {
        for &clients in &args.clients {
            let (loadfile, times) = (&loadfile, &times);
            points.extend(args.side.iter().map(|&side| Point {
                case: case(args, elevator, clients),
                side: side.name().into(),
                measure: Box::new(move |_| {
                    let sample = measure(args, side, elevator, clients, loadfile)?;
                    let mut times = times.borrow_mut();
                    let of_side = times.entry((elevator.name, clients, side)).or_default();
                    of_side.push(sample.elapsed.as_secs_f64());
                    Ok(sample)
                }),
            }));
        }
    }
    let plan = args.common.plan(points.len(), Duration::ZERO)?;
    let mut report = Report::start("single-dispatch-dbench", about(args), &plan);
    let rows = rounds::run(&plan, &mut points)?;
    drop(points);
    report.finish(rows, &args.common)?;
    report::say(&table(&report.rows, args));
    report::say(&compare(&times.borrow(), args));
    Ok(())
}

/// Seconds of each round, by elevator, clients and side.
type Times = RefCell<BTreeMap<(&'static str, usize, Side), Vec<f64>>>;

fn with_defaults(args: &SingleDispatchArgs) -> Result<SingleDispatchArgs> {
    let mut args = args.clone();
    args.door.check()?;
    ensure!(
        rustix::process::geteuid().is_root(),
        "--dbench needs root, for block devices and mounts"
    );
    check_program("dbench", "dbench")?;
    check_program(args.filesystem.maker().0, "xfsprogs or e2fsprogs")?;
    ensure!(
        (1..=OPS_MAX).contains(&args.ops),
        "--ops {} rejected: must be from 1 to {OPS_MAX}",
        args.ops
    );
    args.clients.retain(|clients| *clients > 0);
    for clients in &args.clients {
        ensure!(
            *clients <= CLIENTS_MAX,
            "--clients {clients} rejected: must be from 1 to {CLIENTS_MAX} with --dbench"
        );
    }
    if args.elevator.is_empty() {
        args.elevator = vec![sched::BFQ];
    }
    if args.side.is_empty() {
        args.side = Side::ALL.to_vec();
    }
    if args.clients.is_empty() {
        args.clients = if args.common.quick {
            vec![1, 8]
        } else {
            CLIENTS.to_vec()
        };
    }
    if !args.common.quick {
        args.common.rounds.get_or_insert(ROUNDS);
    }
    Ok(args)
}

fn check_program(program: &str, package: &str) -> Result<()> {
    let found = Command::new(program).arg("--version").output();
    ensure!(found.is_ok(), "--dbench needs {program}: install {package}");
    Ok(())
}

/// Names a case.
fn case(args: &SingleDispatchArgs, elevator: &'static ElevatorType, clients: usize) -> String {
    let door = match args.door {
        Door::Fuse => "",
        Door::Ublk => "-ublk",
    };
    let filesystem = match args.filesystem {
        Filesystem::Xfs => "",
        Filesystem::Ext4 => "-ext4",
    };
    format!("dbench{door}{filesystem}/{elevator}/clients={clients}")
}

/// Writes the beginning of dbench's own load file, between two directories that mark a client's
/// beginning and end.
fn write_loadfile(path: &Path, ops: usize) -> Result<()> {
    let whole = File::open(LOADFILE).with_context(|| format!("opening dbench's load file {LOADFILE}"))?;
    let mut text = "Mkdir \"\\begin-client1\" NT_STATUS_OK\n".to_owned();
    for line in BufReader::new(whole).lines().take(ops) {
        text += &line.with_context(|| format!("reading {LOADFILE}"))?;
        text.push('\n');
    }
    text += "Mkdir \"\\end-client1\" NT_STATUS_OK\nSleep 2000000000 NT_STATUS_OK\n";
    let mut file = File::create_new(path).context("making a load file")?;
    file.write_all(text.as_bytes()).context("writing a load file")
}

/// Makes a new filesystem and has the clients do their work on it.
fn measure(
    args: &SingleDispatchArgs,
    side: Side,
    elevator: &'static ElevatorType,
    clients: usize,
    loadfile: &Path,
) -> Result<Sample> {
    let stage = Stage::set_up(args.door, args.filesystem, side, elevator)?;
    stage.disk().take_time(true);
    let before = Usage::of_this_process()?;
    let times = {
        let mut dbench = Dbench::start(clients, loadfile, stage.directory())?;
        dbench.wait(clients, stage.directory())?
    };
    let usage = Usage::of_this_process()? - before;
    let (served, latency) = stage.disk().served();
    stage.disk().take_time(false);
    let began = times.iter().map(|time| time.0).min().context("no client")?;
    let seconds = |from: SystemTime, to: SystemTime| to.duration_since(from).unwrap_or_default();
    let elapsed = times
        .iter()
        .map(|time| seconds(began, time.1))
        .max()
        .unwrap_or_default();
    let mean = times.iter().map(|time| seconds(time.0, time.1)).sum::<Duration>() / clients as u32;
    Ok(Sample {
        ios: served,
        elapsed,
        latency: (&latency).into(),
        usage,
        figures: vec![
            ("seconds", elapsed.as_secs_f64()),
            ("mean_seconds", mean.as_secs_f64()),
            ("requests", served as f64),
        ],
        ..Sample::default()
    })
}

/// dbench and its clients, in their own process group; dropping it ends them.
struct Dbench(Child);

impl Dbench {
    fn start(clients: usize, loadfile: &Path, directory: &Path) -> Result<Self> {
        let mut command = Command::new("dbench");
        command
            .args(["--skip-cleanup", "-t", "100000", "-c"])
            .arg(loadfile)
            .arg("-D")
            .arg(directory)
            .arg(clients.to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .process_group(0);
        Ok(Self(command.spawn().context("starting dbench")?))
    }

    /// Waits until all clients have ended their work; returns when each began and ended.
    fn wait(&mut self, clients: usize, directory: &Path) -> Result<Vec<(SystemTime, SystemTime)>> {
        let start = Instant::now();
        let time = |what: &str, client: usize| {
            let directory = fs::metadata(directory.join(format!("{what}-client{client}")));
            directory.and_then(|directory| directory.modified())
        };
        let mut times = Vec::with_capacity(clients);
        while times.len() < clients {
            let client = times.len();
            if let Ok(end) = time("end", client) {
                times.push((time("begin", client)?, end));
                continue;
            }
            interrupt::check()?;
            if let Some(status) = self.0.try_wait().context("waiting for dbench")? {
                bail!("dbench ended before its clients had done their work ({status})");
            }
            ensure!(
                start.elapsed() < WORK_WITHIN,
                "dbench is not done after {WORK_WITHIN:?}"
            );
            sleep(Duration::from_millis(10));
        }
        Ok(times)
    }
}

impl Drop for Dbench {
    fn drop(&mut self) {
        if let Some(group) = Pid::from_raw(self.0.id() as i32) {
            let _ = kill_process_group(group, Signal::KILL);
        }
        let _ = self.0.wait();
    }
}

fn about(args: &SingleDispatchArgs) -> About {
    About {
        question: "what does one dispatcher gain over one per hardware context, and over a single hardware queue, for dbench?".into(),
        setting: vec![
            format!(
                "dbench: each client plays the first {} lines of dbench's load file once; {} on {}",
                args.ops,
                args.filesystem.name(),
                args.door.setting()
            ),
            "disk: the modelled 7200 rpm disk of 512 GiB in real time, 32 commands; mkfs and umount take no time of it".into(),
            "before: 64 hardware contexts, each dispatches for itself, an end runs all; single-queue: one context; after: 64 and the gate"
                .into(),
            "kernel: the kernel's scheduler of that name on that block device, none below".into(),
            "seconds: from the first client's start to the last one's end; IOPS, latency: of the disk's commands; CPU: of this process"
                .into(),
        ],
    }
}

/// The published times next to ours.
fn table(rows: &[Row], args: &SingleDispatchArgs) -> String {
    let mut lines = String::new();
    for elevator in &args.elevator {
        let _ = writeln!(
            lines,
            "\nSeconds, lower is better. Published: Kara 2020, BFQ, whole load files, another disk; compare columns, not tables.\n\
             clients   published: multi-queue  single-queue   patched     ours: before  single-queue     after    kernel {elevator}",
        );
        for &clients in &args.clients {
            let case = case(args, elevator, clients);
            let [before, single, after, kernel] = Side::ALL.map(|side| {
                let mut found = rows
                    .iter()
                    .filter(|row| row.case == case && row.side == side.name());
                let seconds = found.find_map(|row| row.figures.get("seconds"));
                seconds.copied().unwrap_or_default()
            });
            let theirs = theirs(clients);
            let _ = writeln!(
                lines,
                "{clients:>7} {theirs} {before:>16.2} {single:>13.2} {after:>9.2} {kernel:>9.2}"
            );
        }
    }
    lines
}

/// The time with one dispatcher as a part of the other sides' times in the same round.
fn compare(times: &BTreeMap<(&'static str, usize, Side), Vec<f64>>, args: &SingleDispatchArgs) -> String {
    let mut lines = "\nThe time of `after` in that of others, within rounds: median (lowest-highest), and rounds in which it was less\n".to_owned();
    for elevator in &args.elevator {
        for &clients in &args.clients {
            let of = |side| times.get(&(elevator.name, clients, side));
            for other in [Side::Before, Side::SingleQueue, Side::Kernel] {
                let (Some(own), Some(others)) = (of(Side::After), of(other)) else {
                    continue;
                };
                let less = own.iter().zip(others).filter(|(own, other)| own <= other).count();
                let _ = writeln!(
                    lines,
                    "{elevator} clients={clients} {}: {}, {less} of {}",
                    other.name(),
                    Ratio::of(own, others),
                    own.len()
                );
            }
        }
    }
    lines
}

const UBLK: &str = "/dev/ublk-control";
const LOADFILE: &str = "/usr/share/dbench/client.txt";
const CLIENTS: [usize; 7] = [1, 2, 4, 8, 16, 32, 64];
const CLIENTS_MAX: usize = 512;
const OPS_MAX: usize = 1_000_000;
const ROUNDS: u32 = 3;
const WORK_WITHIN: Duration = Duration::from_secs(600);
