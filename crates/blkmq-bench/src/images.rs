//! Disks in qcow2 images, beside qemu-storage-daemon with the same image and beside our own raw file, which is
//! the image's: fio over NBD, or `blkio` over vhost-user, in one run with alternating sides.

mod files;

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use blkmq_testkit::Scratch;

use self::files::{Files, Image};
use crate::args::{BenchArgs, Plan};
use crate::doors;
use crate::fio;
use crate::nbd::EXPORT;
use crate::report::{self, About, Report, Row};
use crate::rounds::{self, Point, Sample};
use crate::server::{Running, daemon};
use crate::usage::Usage;

/// Compare disks in qcow2 images with qemu-storage-daemon's, and with raw disks in the same place
#[derive(clap::Args, Clone, Debug)]
pub struct ImagesArgs {
    /// What all benches have.
    #[command(flatten)]
    pub common: BenchArgs,
    /// Where the images are made: the filesystem that is measured [default: the directory for temporary files]
    #[arg(long, value_name = "DIRECTORY")]
    pub dir: Option<PathBuf>,
    /// MiB of a disk, all of which its base has
    #[arg(long, value_name = "MIB", default_value_t = 1024)]
    pub mib: u64,
    /// Cases to measure [default: all]
    #[arg(long, value_name = "CASE", value_delimiter = ',')]
    pub case: Vec<Case>,
    /// Sides to measure [default: all]
    #[arg(long, value_name = "SIDE", value_delimiter = ',')]
    pub side: Vec<Side>,
}

/// What a client does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Case {
    /// Random reads of 4 KiB, one at a time, of clusters that are there.
    Read4kDepth1,
    /// The same, 32 at a time.
    Read4kDepth32,
    /// The same over vhost-user.
    Read4kDepth32VhostUser,
    /// Reads of 256 KiB one after the other, 4 at a time.
    Read256k,
    /// Random writes of 4 KiB into clusters that are there, 32 at a time.
    Write4k,
    /// The first 4 KiB of clusters that are in the base, one cluster after the other, 32 at a time.
    First4k,
    /// The same with whole clusters.
    First64k,
    /// Random reads of 4 KiB through a chain of 4 images, 32 at a time.
    Chain4,
    /// Of 16 images.
    Chain16,
}

/// A server and its disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Side {
    /// This program with the image.
    Ours,
    /// qemu-storage-daemon with it.
    QemuStorageDaemon,
    /// This program with the image's file as a raw one, of which the image's data is used.
    OursRaw,
}

impl Case {
    const ALL: [Self; 9] = [
        Self::Read4kDepth1,
        Self::Read4kDepth32,
        Self::Read4kDepth32VhostUser,
        Self::Read256k,
        Self::Write4k,
        Self::First4k,
        Self::First64k,
        Self::Chain4,
        Self::Chain16,
    ];

    const fn name(self) -> &'static str {
        match self {
            Self::Read4kDepth1 => "read=4k/depth=1",
            Self::Read4kDepth32 => "read=4k/depth=32",
            Self::Read4kDepth32VhostUser => "read=4k/depth=32/vhost-user",
            Self::Read256k => "read=256k/depth=4",
            Self::Write4k => "write=4k/depth=32",
            Self::First4k => "first=4k/depth=32",
            Self::First64k => "first=64k/depth=32",
            Self::Chain4 => "read=4k/depth=32/chain=4",
            Self::Chain16 => "read=4k/depth=32/chain=16",
        }
    }

    /// fio's options.
    const fn load(self) -> &'static [&'static str] {
        match self {
            Self::Read4kDepth1 => &["--rw=randread", "--bs=4k", "--iodepth=1"],
            Self::Read4kDepth32 | Self::Read4kDepth32VhostUser | Self::Chain4 | Self::Chain16 => {
                &["--rw=randread", "--bs=4k", "--iodepth=32"]
            }
            Self::Read256k => &["--rw=read", "--bs=256k", "--iodepth=4"],
            Self::Write4k => &["--rw=randwrite", "--bs=4k", "--iodepth=32"],
            Self::First4k => &[
                "--rw=write",
                "--bs=4k",
                "--iodepth=32",
                "--zonemode=strided",
                "--zonesize=4k",
                "--zonerange=64k",
            ],
            Self::First64k => &["--rw=write", "--bs=64k", "--iodepth=32"],
        }
    }

    const fn image(self) -> Image {
        match self {
            Self::First4k | Self::First64k => Image::Empty,
            Self::Chain4 => Image::Chain(4),
            Self::Chain16 => Image::Chain(16),
            _ => Image::Chain(1),
        }
    }

    fn is_first(self) -> bool {
        self.image() == Image::Empty
    }
}

impl Side {
    const ALL: [Self; 3] = [Self::Ours, Self::QemuStorageDaemon, Self::OursRaw];

    const fn name(self) -> &'static str {
        match self {
            Self::Ours => "ours",
            Self::QemuStorageDaemon => PEER,
            Self::OursRaw => "ours-raw",
        }
    }
}

/// Runs the bench and prints its report; progress goes to stderr.
///
/// # Errors
/// If an option is out of range, a program is missing, a server does not start, or a file cannot be written.
pub fn main(args: &ImagesArgs) -> Result<()> {
    ensure!(
        (16..=MIB_MAX).contains(&args.mib) && args.mib.is_multiple_of(16),
        "--mib {} rejected: must be a multiple of 16 from 16 to {MIB_MAX}",
        args.mib
    );
    ensure!(
        fio::is_installed() && fio::has_engine("nbd"),
        "fio with its nbd engine is not installed"
    );
    let chosen = |of: &[Case]| {
        if of.is_empty() {
            Case::ALL.to_vec()
        } else {
            of.to_vec()
        }
    };
    let cases = chosen(&args.case);
    let sides = if args.side.is_empty() {
        Side::ALL.to_vec()
    } else {
        args.side.clone()
    };
    let scratch = args.dir.as_deref().map_or_else(Scratch::new, Scratch::below);
    let chains: Vec<_> = cases.iter().map(|case| case.image()).collect();
    let files = Files::make(scratch, args.mib << 20, &chains)?;
    let mut points = points(&cases, &sides, &files);
    let plan = args.common.plan(points.len(), SET_UP)?;
    let mut report = Report::start("images", about(args), &plan);
    let rows = rounds::run(&plan, &mut points)?;
    report.finish(rows, &args.common)?;
    report::say(&summary(&report.rows));
    Ok(())
}

/// What the image does of what the others do, round by round, since a drive differs from round to round.
fn summary(rows: &[Row]) -> String {
    let mut lines = String::new();
    for ours in rows.iter().filter(|row| row.side == Side::Ours.name()) {
        let others = rows
            .iter()
            .filter(|row| row.case == ours.case && row.side != ours.side);
        for other in others {
            lines += &format!(
                "{}: ours does {} × what {} does, with {:.2} × of its CPU per I/O\n",
                ours.case,
                ours.against(other),
                other.side,
                ours.cpu_ns_per_io / other.cpu_ns_per_io
            );
        }
    }
    lines
}

fn points<'a>(cases: &[Case], sides: &[Side], files: &'a Files) -> Vec<Point<'a>> {
    let mut points = Vec::new();
    for &case in cases {
        // A raw file has no clusters, and no chain.
        let has = |side: &&Side| **side != Side::OursRaw || case.image() == Image::Chain(1);
        points.extend(sides.iter().filter(has).map(|&side| Point {
            case: case.name().into(),
            side: side.name().into(),
            measure: Box::new(move |plan| measure(case, side, files, plan)),
        }));
    }
    points
}

/// Starts the server afresh, loads it for the plan's window, and ends it.
fn measure(case: Case, side: Side, files: &Files, plan: &Plan) -> Result<Sample> {
    match case.image() {
        Image::Empty => files.make_empty()?,
        Image::Chain(1) if side != Side::OursRaw => files.restore_tables()?,
        Image::Chain(_) => {}
    }
    let dir = Scratch::new();
    let socket = dir.path("s");
    let over_vhost = case == Case::Read4kDepth32VhostUser;
    let command = match side {
        Side::Ours => ours(
            &format!("qcow2={}", files.top(case.image()).display()),
            over_vhost,
            &socket,
        )?,
        Side::OursRaw => ours(
            &format!("file={}", files.top(case.image()).display()),
            over_vhost,
            &socket,
        )?,
        Side::QemuStorageDaemon => peer(&files.nodes(case.image()), over_vhost, &socket),
    };
    if over_vhost {
        let server =
            Running::start_until(command, dir, socket, |socket| UnixStream::connect(socket).is_ok())?;
        return doors::measure_reads(&server, 1, 32, plan);
    }
    let server = Running::start(command, dir, socket)?;
    let uri = format!("nbd+unix:///{EXPORT}?socket={}", server.place().display());
    // fio accepts an engine's option only after the engine's name.
    let mut options = vec!["--ioengine=nbd".to_owned(), format!("--uri={uri}")];
    options.extend(case.load().iter().map(|option| (*option).to_owned()));
    if case.is_first() {
        // A second time, they would not be the first ones.
        options.push("--time_based=0".to_owned());
        options.push(format!("--size={}", files.bytes()));
    } else if side == Side::OursRaw {
        let data = files.data();
        options.push(format!("--offset={}", data.start));
        options.push(format!("--size={}", data.end - data.start));
    }
    let warm_up = if case.is_first() {
        Duration::ZERO
    } else {
        plan.warm_up
    };
    let before = Usage::of(server.pid())?;
    let sample = fio::run(&options, warm_up, plan.window).with_context(|| server.last_words())?;
    let usage = Usage::of(server.pid())? - before;
    // It is the server's for the warm-up, too: by I/O, those of the warm-up count.
    let share = plan.window.as_secs_f64() / (plan.window + warm_up).as_secs_f64();
    let usage = Usage {
        cpu_ns: (usage.cpu_ns as f64 * share) as u64,
        switches: (usage.switches as f64 * share) as u64,
    };
    Ok(Sample {
        client: Some(sample.usage),
        usage,
        ..sample
    })
}

fn ours(disk: &str, over_vhost: bool, socket: &Path) -> Result<Command> {
    let mut command = Command::new(daemon()?);
    let door = if over_vhost { "--vhost-user" } else { "--nbd" };
    command.args([
        "serve",
        "--reactors",
        "1",
        "--disk",
        &format!("name={EXPORT},{disk}"),
    ]);
    command.args([door, &format!("unix:{}", socket.display())]);
    Ok(command)
}

/// Images past the page cache, their bases through it, as ours.
fn peer(nodes: &[String], over_vhost: bool, socket: &Path) -> Command {
    let mut command = Command::new(PEER);
    for node in nodes {
        command.args(["--blockdev", node]);
    }
    let (address, top) = (socket.display(), nodes.len() - 1);
    match over_vhost {
        true => command.args([
            "--export",
            &format!(
                "type=vhost-user-blk,id=e0,node-name=n{top},addr.type=unix,addr.path={address},writable=on"
            ),
        ]),
        false => command.args([
            "--nbd-server",
            &format!("addr.type=unix,addr.path={address}"),
            "--export",
            &format!("type=nbd,id=e0,node-name=n{top},name={EXPORT},writable=on"),
        ]),
    };
    command
}

fn about(args: &ImagesArgs) -> About {
    About {
        question: "what does a disk in an image cost, beside QEMU's and beside a raw file?".into(),
        setting: vec![
            format!(
                "disks of {} MiB in clusters of 64 KiB; a chain has an equal part of the disk in each image; first writes are to \
                 an empty image on a raw base",
                args.mib
            ),
            format!(
                "{PEER}: images with cache.direct=on and io_uring, bases through the page cache; ours with one reactor"
            ),
            "ours-raw: the image's own file, from its first data on (over vhost-user, all of it), since a drive is not equally fast \
             everywhere; the file's tables are written back before other sides"
                .into(),
            "CPU is the server's, for each I/O; a fresh server for every visit".into(),
        ],
    }
}

const PEER: &str = "qemu-storage-daemon";
const MIB_MAX: u64 = 16 << 10;
/// Starting and ending a server.
const SET_UP: Duration = Duration::from_millis(300);
