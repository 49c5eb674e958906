//! The comparison of NBD with TLS and without, and of our server with nbdkit and qemu-nbd: everywhere both
//! sides check certificates, the client is ours in a process of its own (`blkmq-lab bench engine`), and the
//! disks hold noise.

mod servers;

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use blkmq_core::sched;

use self::servers::{Credentials, Server, Side};
use crate::args::{BenchArgs, Plan};
use crate::engine::{self, DeviceArg, EngineArgs, Pattern};
use crate::report::{self, About, Report, Row};
use crate::rounds::{self, Point, Sample};
use crate::table;
use crate::usage::Usage;

/// Compare NBD by TLS with NBD without, on our server, nbdkit and qemu-nbd
#[derive(clap::Args, Clone, Debug)]
pub struct TlsArgs {
    /// What all benches have.
    #[command(flatten)]
    pub common: BenchArgs,
    /// Sides to measure, of those that are installed [default: all]
    #[arg(long, value_name = "SIDE", value_delimiter = ',')]
    pub side: Vec<Side>,
    /// What to do
    #[arg(long, value_name = "PATTERN", value_delimiter = ',', default_values = ["randread", "randwrite"])]
    pub rw: Vec<Pattern>,
}

/// A load: bytes of each I/O, and how many are under way.
type Size = (u32, u32);

/// Runs the bench and prints its report; progress goes to stderr.
///
/// # Errors
/// If openssl or nbdcopy is missing, a requested side cannot be measured, or a file cannot be written.
pub fn main(args: &TlsArgs) -> Result<()> {
    let credentials = Credentials::make()?;
    let sides = sides(args)?;
    let mut points = Vec::new();
    for &rw in &args.rw {
        for size in SIZES {
            for &side in &sides {
                for by_tls in [false, true] {
                    let credentials = &credentials;
                    points.push(Point {
                        case: format!("{}/bs={}/depth={}", rw.name(), size.0, size.1),
                        side: name(side, by_tls),
                        measure: Box::new(move |plan| {
                            measure(&Server::start(side, by_tls, credentials)?, rw, size, plan)
                        }),
                    });
                }
            }
        }
    }
    let plan = args.common.plan(points.len(), SET_UP)?;
    let mut report = Report::start("tls", about(), &plan);
    let rows = rounds::run(&plan, &mut points)?;
    drop(points);
    report.finish(rows, &args.common)?;
    report::say(&summary(&report.rows));
    Ok(())
}

fn sides(args: &TlsArgs) -> Result<Vec<Side>> {
    let mut sides = Vec::new();
    for side in Side::ALL {
        if !args.side.is_empty() && !args.side.contains(&side) {
            continue;
        }
        match side.version() {
            Ok(_) => sides.push(side),
            Err(error) if args.side.contains(&side) => return Err(error),
            Err(error) => eprintln!("{} is left out: {error:#}", side.name()),
        }
    }
    ensure!(!sides.is_empty(), "none of the sides can be measured");
    Ok(sides)
}

fn name(side: Side, by_tls: bool) -> String {
    let by = if by_tls { "-tls" } else { "" };
    format!("{}{by}", side.name())
}

/// Loads a server from another process.
fn measure(server: &Server, rw: Pattern, (bs, depth): Size, plan: &Plan) -> Result<Sample> {
    let args = EngineArgs {
        common: BenchArgs::default(),
        device: DeviceArg::Nbd(server.uri.clone()),
        elevator: Vec::new(),
        jobs: Vec::new(),
        depth: Vec::new(),
        rw,
        bs,
        overwrite: matches!(rw, Pattern::Randwrite | Pattern::Write),
        groups: false,
        before: None,
    };
    let program = std::env::current_exe().context("finding this program")?;
    // nbdkit has threads for each connection, which end when it closes.
    let before = Usage::of_with_ended_threads(server.pid())?;
    let sample = engine::before::measure(&program, &args, sched::NONE, 1, depth, plan)?;
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
        question: "what does TLS cost on NBD, and what does it cost others?".into(),
        setting: vec![
            "unix sockets, one connection, TLS 1.3 with ECDSA P-256, certificates of server and client checked".into(),
            "ours: ram of 128 MiB; nbdkit: memory; qemu-nbd: a file of that size in the page cache; all of it noise".into(),
            "the client is `blkmq-lab bench engine` in a process of its own; CPU is the server's, for as much of its run as the client measures".into(),
        ],
    }
}

/// The part of each side's throughput that remains with TLS, and how ours compares with the others
/// with TLS.
fn summary(rows: &[Row]) -> String {
    let mut lines = String::new();
    let find = |case: &str, side: &str| rows.iter().find(|row| row.case == case && row.side == side);
    for row in rows.iter().filter(|row| row.side.ends_with("-tls")) {
        let side = row.side.trim_end_matches("-tls");
        if let Some(plain) = find(&row.case, side) {
            lines += &format!(
                "{}: {side} has by TLS {} × of its plain IOPS\n",
                row.case,
                row.against(plain)
            );
        }
        if let Some(ours) = find(&row.case, "ours-tls").filter(|_| side != "ours") {
            lines += &format!(
                "{}: ours has by TLS {} × the IOPS of {side} ({}), {:.2} of its CPU per I/O\n",
                row.case,
                ours.against(row),
                table::count(row.iops),
                ours.cpu_ns_per_io / row.cpu_ns_per_io.max(1e-9)
            );
        }
    }
    lines
}

/// Block sizes and depths: small and large, one and several.
const SIZES: [Size; 3] = [(4096, 1), (4096, 32), (256 << 10, 8)];
/// Time to start a server and fill its disk.
const SET_UP: Duration = Duration::from_millis(600);
