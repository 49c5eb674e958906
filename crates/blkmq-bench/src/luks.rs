//! What encryption costs: the cipher beside OpenSSL's; an encrypted disk beside a plain one, on a null drive in
//! this process; and both beside qemu-storage-daemon's `luks` on one image, by a client of ours in a process of its own.

mod in_process;
mod servers;

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use blkmq_core::sched;
use blkmq_luks::Xts;

use self::servers::{Drive, Image, Server, Side};
use crate::args::{BenchArgs, Plan};
use crate::engine::{self, DeviceArg, EngineArgs, Pattern};
use crate::report::{self, About, Report, Row};
use crate::rounds::{self, Point, Sample};
use crate::usage::Usage;

/// Compare encrypted disks with plain ones, with OpenSSL's cipher and with qemu-storage-daemon's `luks`
#[derive(clap::Args, Clone, Debug)]
pub struct LuksArgs {
    /// What all benches have.
    #[command(flatten)]
    pub common: BenchArgs,
    /// A directory on a drive, for a file beside those on a null disk and in memory
    #[arg(long, value_name = "DIRECTORY")]
    pub drive: Option<PathBuf>,
    /// What to do on disks
    #[arg(long, value_name = "PATTERN", value_delimiter = ',', default_values = ["randread", "randwrite"])]
    pub rw: Vec<Pattern>,
}

/// Runs the bench and prints its report; progress goes to stderr.
///
/// # Errors
/// If cryptsetup, openssl or qemu-storage-daemon is missing, or a file cannot be written.
pub fn main(args: &LuksArgs) -> Result<()> {
    let in_memory = Image::make(&PathBuf::from("/dev/shm"))?;
    let on_drive = args.drive.as_deref().map(Image::make).transpose()?;
    let mut drives = vec![Drive::Memory(&in_memory)];
    drives.extend(on_drive.iter().map(Drive::File));
    let mut points = Vec::new();
    let measures: [(&str, Measure); 3] = [
        ("ours", |bytes, plan| cipher(bytes, SECTOR, plan)),
        (OF_DISKS, |bytes, plan| cipher(bytes, SECTOR_OF_DISKS, plan)),
        ("openssl", openssl),
    ];
    for bytes in CIPHER_BYTES {
        for (side, measure) in measures {
            points.push(Point {
                case: format!("cipher/bs={bytes}"),
                side: side.to_owned(),
                measure: Box::new(move |plan| measure(bytes, plan)),
            });
        }
    }
    for &rw in &args.rw {
        for side in [Side::Plain, Side::Luks] {
            points.push(Point {
                case: format!("null/{}/bs={BLOCK}/depth={DEPTH}", rw.name()),
                side: side.name().to_owned(),
                measure: Box::new(move |plan| in_process::measure(side == Side::Luks, rw, plan)),
            });
        }
    }
    for drive in &drives {
        for &rw in &args.rw {
            for side in Side::ALL {
                points.push(Point {
                    case: format!("{}/{}/bs={BLOCK}/depth={DEPTH}", drive.name(), rw.name()),
                    side: side.name().to_owned(),
                    measure: Box::new(move |plan| measure(&Server::start(side, drive)?, rw, plan)),
                });
            }
        }
    }
    let plan = args.common.plan(points.len(), SET_UP)?;
    let mut report = Report::start("luks", about(), &plan);
    let rows = rounds::run(&plan, &mut points)?;
    drop(points);
    report.finish(rows, &args.common)?;
    report::say(&summary(&report.rows));
    Ok(())
}

/// A key of 512 bits.
fn key() -> Vec<u8> {
    (0..64).map(|at| at * 3 + 1).collect()
}

/// Encrypts a buffer again and again, on this thread.
fn cipher(bytes: usize, sector: u32, plan: &Plan) -> Result<Sample> {
    let xts = Xts::new(&key(), sector)?;
    let mut buffer = vec![7; bytes];
    let before = Usage::of_this_thread()?;
    let (start, mut ios) = (Instant::now(), 0);
    while start.elapsed() < plan.window {
        for _ in 0..ROUNDS_PER_LOOK {
            xts.encrypt(ios, &mut buffer);
            ios += 1;
        }
    }
    std::hint::black_box(&buffer);
    Ok(Sample {
        ios,
        elapsed: start.elapsed(),
        usage: Usage::of_this_thread()? - before,
        ..Sample::default()
    })
}

/// The same by OpenSSL, one sector as long as the buffer.
fn openssl(bytes: usize, plan: &Plan) -> Result<Sample> {
    let seconds = plan.window.as_secs().max(1);
    let output = Command::new("openssl")
        .args(["speed", "-evp", "aes-256-xts", "-bytes", &bytes.to_string()])
        .args(["-seconds", &seconds.to_string()])
        .stdin(Stdio::null())
        .output()
        .context("openssl cannot be started: apt-get install openssl")?;
    let said = String::from_utf8_lossy(&output.stdout);
    let last = said
        .split_whitespace()
        .last()
        .and_then(|word| word.strip_suffix('k'));
    let speed = last.and_then(|number| number.parse::<f64>().ok());
    let speed = speed.with_context(|| format!("openssl speed says something else: {said}"))?;
    ensure!(output.status.success(), "openssl speed has failed");
    let elapsed = Duration::from_secs(seconds);
    let ios = (speed * 1000.0 * elapsed.as_secs_f64() / bytes as f64) as u64;
    Ok(Sample {
        ios,
        elapsed,
        usage: Usage {
            cpu_ns: elapsed.as_nanos() as u64,
            switches: 0,
        },
        ..Sample::default()
    })
}

/// Loads a server from another process.
fn measure(server: &Server, rw: Pattern, plan: &Plan) -> Result<Sample> {
    let args = EngineArgs {
        common: BenchArgs::default(),
        device: DeviceArg::Nbd(server.uri.clone()),
        elevator: Vec::new(),
        jobs: Vec::new(),
        depth: Vec::new(),
        rw,
        bs: BLOCK,
        overwrite: matches!(rw, Pattern::Randwrite | Pattern::Write),
        groups: false,
        before: None,
    };
    let program = std::env::current_exe().context("finding this program")?;
    let before = Usage::of_with_ended_threads(server.pid())?;
    let sample = engine::before::measure(&program, &args, sched::NONE, 1, DEPTH, plan)?;
    let used = Usage::of_with_ended_threads(server.pid())? - before;
    // The client warms up before its window, so a part of the server's usage is warm-up.
    let part = plan.window.as_secs_f64() / (plan.window + plan.warm_up).as_secs_f64();
    let of_window = |all: u64| (all as f64 * part) as u64;
    Ok(Sample {
        client: Some(sample.usage),
        usage: Usage {
            cpu_ns: of_window(used.cpu_ns),
            switches: of_window(used.switches),
        },
        ..sample
    })
}

fn about() -> About {
    About {
        question: "what does encryption cost?".into(),
        setting: vec![
            "aes-xts-plain64 with keys of 512 bits; the cipher has sectors of 4096 bytes, and those of the disks in `ours-512`; OpenSSL has one as long as the buffer".into(),
            "null: one thread that takes part in the engine, sectors of 512 bytes; CPU is the process's".into(),
            "files: LUKS1, whose sectors have 512 bytes, as QEMU has them; NBD over a unix socket, one connection".into(),
            "the client is `blkmq-lab bench engine` in a process of its own; CPU is the server's, for as much of its run as the client measures".into(),
        ],
    }
}

/// How each encrypted side compares with its plain one, and with the others.
fn summary(rows: &[Row]) -> String {
    let mut lines = String::new();
    let find = |case: &str, side: Side| {
        rows.iter()
            .find(|row| row.case == case && row.side == side.name())
    };
    let cipher = rows
        .iter()
        .find(|row| row.case == format!("cipher/bs={BLOCK}") && row.side == OF_DISKS);
    for row in rows.iter().filter(|row| row.side == "openssl") {
        if let Some(ours) = rows
            .iter()
            .find(|ours| ours.case == row.case && ours.side == "ours")
        {
            lines += &format!(
                "{}: ours does {} × what OpenSSL does\n",
                row.case,
                ours.against(row)
            );
        }
    }
    for ours in rows.iter().filter(|row| row.side == Side::Luks.name()) {
        if let Some(plain) = find(&ours.case, Side::Plain) {
            let more = ours.cpu_ns_per_io - plain.cpu_ns_per_io;
            lines += &format!(
                "{}: {} × of the plain disk, {more:.0} ns more of CPU per I/O",
                ours.case,
                ours.against(plain)
            );
            if let Some(cipher) = cipher {
                lines += &format!(
                    ", {:.2} × the cipher's own time",
                    more / cipher.cpu_ns_per_io.max(1e-9)
                );
            }
            lines += "\n";
        }
        if let Some(qemu) = find(&ours.case, Side::Qemu) {
            lines += &format!(
                "{}: {} × qemu-storage-daemon, {:.2} of its CPU per I/O\n",
                ours.case,
                ours.against(qemu),
                ours.cpu_ns_per_io / qemu.cpu_ns_per_io.max(1e-9)
            );
        }
    }
    lines
}

/// Measures the cipher with a buffer of so many bytes.
type Measure = fn(usize, &Plan) -> Result<Sample>;

const CIPHER_BYTES: [usize; 2] = [BLOCK as usize, 64 << 10];
const BLOCK: u32 = 4096;
const DEPTH: u32 = 32;
/// Bytes of a sector of the cipher.
const SECTOR: u32 = 4096;
/// Bytes of a sector of the disks, and the side with the cipher in these.
const SECTOR_OF_DISKS: u32 = 512;
const OF_DISKS: &str = "ours-512";
/// How often the cipher runs between two looks at the clock.
const ROUNDS_PER_LOOK: u32 = 64;
/// Time to start a server.
const SET_UP: Duration = Duration::from_millis(300);
