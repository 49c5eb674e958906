//! The same load through every front door: reads of 4 KiB from a null disk, by each door's client, compared
//! with qemu-storage-daemon where it has the door, in one run with alternating sides.

mod fuse;
mod vhost_user;

use std::fs::File;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use blkmq_nbd::codec::HeaderStyle;

use crate::args::{BenchArgs, Plan};
use crate::histogram::Histogram;
use crate::nbd::{EXPORT, Load, connect};
use crate::report::{About, Report};
use crate::rounds::{self, Point, Sample};
use crate::server::{Running, daemon};
use crate::usage::Usage;
use crate::window::Window;
use blkmq_testkit::Scratch;

/// Compare the front doors under one load, and with qemu-storage-daemon
#[derive(clap::Args, Clone, Debug)]
pub struct DoorsArgs {
    /// What all benches have.
    #[command(flatten)]
    pub common: BenchArgs,
    /// Doors to measure [default: all that there can be here]
    #[arg(long, value_name = "DOOR", value_delimiter = ',')]
    pub door: Vec<Door>,
    /// Virtqueues, or FUSE clients, each driven by a thread; or NBD connections, all driven by one
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [1, 2])]
    pub queues: Vec<u16>,
    /// I/Os under way in each queue
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [1, 32])]
    pub depth: Vec<u16>,
    /// Have vhost-user's clients sleep until they are told of ends; without it they look for them all the time
    #[arg(long)]
    pub sleep: bool,
    /// Sides to measure [default: all that are installed]
    #[arg(long, value_name = "SIDE", value_delimiter = ',')]
    pub side: Vec<Side>,
}

/// A front door.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Door {
    /// vhost-user-blk, with `blkio` as the client.
    VhostUser,
    /// NBD, with the client of `bench nbd`.
    Nbd,
    /// FUSE, with asynchronous reads past the page cache.
    Fuse,
}

/// A server to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Side {
    /// This program, without a scheduler.
    Ours,
    /// This program with bfq.
    OursBfq,
    /// This program without FUSE over io_uring; for FUSE alone.
    OursDevFuse,
    /// qemu-storage-daemon with its null-co driver.
    QemuStorageDaemon,
}

impl std::fmt::Display for Door {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::VhostUser => "vhost-user",
            Self::Nbd => "nbd",
            Self::Fuse => "fuse",
        })
    }
}

impl Door {
    const ALL: [Self; 3] = [Self::VhostUser, Self::Nbd, Self::Fuse];

    /// What the queues of all sides have room for: qemu-storage-daemon's virtqueues have 128 entries, and a read takes three.
    const fn depth_max(self) -> u16 {
        match self {
            Self::VhostUser => 40,
            Self::Nbd | Self::Fuse => 128,
        }
    }
}

impl Side {
    const ALL: [Self; 4] = [
        Self::Ours,
        Self::OursBfq,
        Self::OursDevFuse,
        Self::QemuStorageDaemon,
    ];

    const fn name(self) -> &'static str {
        match self {
            Self::Ours => "ours",
            Self::OursBfq => "ours-bfq",
            Self::OursDevFuse => "ours-dev-fuse",
            Self::QemuStorageDaemon => PEER,
        }
    }
}

/// Runs the bench and prints its report; progress goes to stderr.
///
/// # Errors
/// If an option is out of range, a server to be measured does not start or answers wrongly, or a file cannot
/// be written.
pub fn main(args: &DoorsArgs) -> Result<()> {
    let doors = doors(args)?;
    let depth_max = doors.iter().map(|door| door.depth_max()).min();
    for (name, values, max) in [
        ("--queues", &args.queues, QUEUES_MAX),
        ("--depth", &args.depth, depth_max.unwrap_or_default()),
    ] {
        for value in values {
            ensure!(
                (1..=max).contains(value),
                "{name} {value} rejected: must be from 1 to {max}"
            );
        }
    }
    let sides = sides(args)?;
    let mut points = points(args, &doors, &sides);
    let plan = args.common.plan(points.len(), SET_UP)?;
    let mut report = Report::start("doors", about(args.sleep), &plan);
    let rows = rounds::run(&plan, &mut points)?;
    report.finish(rows, &args.common)
}

/// The doors that the user named, or all that there can be; one left out is named on stderr.
fn doors(args: &DoorsArgs) -> Result<Vec<Door>> {
    let mut doors = Door::ALL.to_vec();
    if !args.door.is_empty() {
        doors.clone_from(&args.door);
    }
    if let Err(error) = File::options().read(true).write(true).open(FUSE_DEVICE) {
        ensure!(
            !args.door.contains(&Door::Fuse),
            "--door fuse: {FUSE_DEVICE} cannot be opened: {error}"
        );
        eprintln!("fuse is left out: {FUSE_DEVICE} cannot be opened: {error}");
        doors.retain(|door| *door != Door::Fuse);
    }
    Ok(doors)
}

/// The sides that the user named, or all that are installed; one left out is named on stderr.
fn sides(args: &DoorsArgs) -> Result<Vec<Side>> {
    let mut version = Command::new(PEER);
    let version = version.arg("--version").stdin(Stdio::null()).output();
    let mut sides = Side::ALL.to_vec();
    if let Err(error) = version {
        ensure!(
            !args.side.contains(&Side::QemuStorageDaemon),
            "{PEER} cannot be started: {error}"
        );
        eprintln!("{PEER} is left out: {error}");
        sides.pop();
    }
    if !std::fs::read_to_string(FUSE_SWITCH).is_ok_and(|switch| switch.trim() == "Y") {
        eprintln!("FUSE over io_uring is not switched on ({FUSE_SWITCH}): ours goes by {FUSE_DEVICE}");
        sides.retain(|side| *side != Side::OursDevFuse || args.side.contains(side));
    }
    sides.retain(|side| args.side.is_empty() || args.side.contains(side));
    Ok(sides)
}

fn points<'a>(args: &DoorsArgs, doors: &[Door], sides: &[Side]) -> Vec<Point<'a>> {
    let mut points = Vec::new();
    let sleeps = args.sleep;
    for &door in doors {
        for &queues in &args.queues {
            for &depth in &args.depth {
                let there = |side: &&Side| door == Door::Fuse || **side != Side::OursDevFuse;
                points.extend(sides.iter().filter(there).map(|&side| Point {
                    case: format!("door={door}/queues={queues}/depth={depth}"),
                    side: side.name().into(),
                    measure: Box::new(move |plan| {
                        measure(door, side, queues, usize::from(depth), sleeps, plan)
                    }),
                }));
            }
        }
    }
    points
}

/// Starts the server afresh, loads it for the plan's window, and ends it.
fn measure(door: Door, side: Side, queues: u16, depth: usize, sleeps: bool, plan: &Plan) -> Result<Sample> {
    let dir = Scratch::new();
    let place = dir.path("s");
    let server = start(command(door, side, queues, &place)?, door, dir, place)?;
    let sample = match door {
        Door::VhostUser => run_vhost_user(&server, queues, depth, sleeps, plan),
        Door::Nbd => {
            let connections = connect(server.place(), usize::from(queues), HeaderStyle::Simple)?;
            let mut load = Load::new(connections, depth, BLOCK_BYTES);
            run(
                &server,
                &Window::new(1),
                [|window: &Window| load.run(window)],
                plan,
            )
        }
        Door::Fuse => {
            let loads = (0..usize::from(queues)).map(|index| {
                let load = fuse::Load::new(server.place(), index as u64, depth);
                move |window: &Window| load.run(index, window)
            });
            run(&server, &Window::new(usize::from(queues)), loads, plan)
        }
    };
    sample.with_context(|| server.last_words())
}

/// Reads 4 KiB at random over vhost-user, as a virtual machine that sleeps until it is told of ends.
pub(crate) fn measure_reads(server: &Running, queues: u16, depth: usize, plan: &Plan) -> Result<Sample> {
    run_vhost_user(server, queues, depth, true, plan).with_context(|| server.last_words())
}

fn run_vhost_user(server: &Running, queues: u16, depth: usize, sleeps: bool, plan: &Plan) -> Result<Sample> {
    let generators = vhost_user::Attached::new(server.place(), queues, depth, sleeps)?;
    let window = Window::new(usize::from(queues));
    let loads = (0..).zip(generators.loads);
    let loads = loads.map(|(index, load)| move |window: &Window| load.run(index, window));
    run(server, &window, loads, plan)
}

/// Starts a server at a socket, or at a file, which is the disk once it has a size.
fn start(command: Command, door: Door, dir: Scratch, place: PathBuf) -> Result<Running> {
    match door {
        Door::Nbd => Running::start(command, dir, place),
        Door::VhostUser => {
            Running::start_until(command, dir, place, |socket| UnixStream::connect(socket).is_ok())
        }
        Door::Fuse => {
            File::create_new(&place).context("making a file to be the disk")?;
            let is_served = |file: &Path| file.metadata().is_ok_and(|file| file.len() > 0);
            Running::start_until(command, dir, place, is_served)
        }
    }
}

/// Runs each load on a thread of its own through the window.
fn run<L>(
    server: &Running,
    window: &Window,
    loads: impl IntoIterator<Item = L>,
    plan: &Plan,
) -> Result<Sample>
where
    L: FnOnce(&Window) -> Result<Histogram> + Send,
{
    std::thread::scope(|scope| {
        let start = |load: L| scope.spawn(move || load(window));
        let running: Vec<_> = loads.into_iter().map(start).collect();
        let measured = window.measure(plan, || Ok([Usage::of(server.pid())?, Usage::of_this_process()?]));
        let mut latency = Histogram::new();
        for load in running {
            // A generator's error says more than the window's.
            latency.merge(&load.join().expect("a load generator does not panic")?);
        }
        let measured = measured?;
        Ok(Sample {
            ios: measured.ios,
            elapsed: measured.elapsed,
            latency: (&latency).into(),
            usage: measured.usage[0],
            client: Some(measured.usage[1]),
            figures: Vec::new(),
        })
    })
}

fn command(door: Door, side: Side, queues: u16, place: &Path) -> Result<Command> {
    let address = match door {
        Door::Fuse => place.display().to_string(),
        Door::VhostUser | Door::Nbd => format!("unix:{}", place.display()),
    };
    let elevator = match side {
        Side::QemuStorageDaemon => return Ok(peer(door, queues, place)),
        Side::Ours | Side::OursDevFuse => "none",
        Side::OursBfq => "bfq",
    };
    let mut command = Command::new(daemon()?);
    command
        .args([
            "serve",
            "--disk",
            &format!("name={EXPORT},null=1T,sched={elevator}"),
        ])
        .args([&format!("--{door}"), &address]);
    if side == Side::OursDevFuse {
        command.args(["--fuse-io-uring", "off"]);
    }
    Ok(command)
}

fn peer(door: Door, queues: u16, place: &Path) -> Command {
    let mut command = Command::new(PEER);
    let address = place.display();
    command.args([
        "--blockdev",
        "driver=null-co,node-name=null0,size=1099511627776,read-zeroes=on",
    ]);
    match door {
        Door::VhostUser => command.args([
            "--export",
            &format!("type=vhost-user-blk,id=e0,node-name=null0,addr.type=unix,addr.path={address},writable=on,num-queues={queues}"),
        ]),
        Door::Nbd => command.args([
            "--nbd-server",
            &format!("addr.type=unix,addr.path={address},max-connections=100"),
            "--export",
            &format!("type=nbd,id=e0,node-name=null0,name={EXPORT},writable=on"),
        ]),
        Door::Fuse => command.args([
            "--export",
            &format!("type=fuse,id=e0,node-name=null0,mountpoint={address},writable=on,allow-other=off"),
        ]),
    };
    command
}

fn about(sleeps: bool) -> About {
    let how = if sleeps {
        "sleeps until its eventfd tells it"
    } else {
        "looks for ends all the time"
    };
    About {
        question: "what does one load come to through each front door?".into(),
        setting: vec![
            format!(
                "null disks of 1 TiB, {BLOCK_BYTES} B random reads; vhost-user: blkio, a thread for each queue, which {how}; \
                 nbd: one thread for all connections, simple replies; fuse: a thread for each queue, asynchronous O_DIRECT"
            ),
            format!(
                "CPU and context switches are the server's; a fresh server for every visit; {PEER}: null-co, read-zeroes=on"
            ),
        ],
    }
}

const PEER: &str = "qemu-storage-daemon";
const BLOCK_BYTES: u32 = 4096;
const QUEUES_MAX: u16 = 16;
const FUSE_DEVICE: &str = "/dev/fuse";
const FUSE_SWITCH: &str = "/sys/module/fuse/parameters/enable_uring";
/// Starting and ending a server.
const SET_UP: Duration = Duration::from_millis(150);
