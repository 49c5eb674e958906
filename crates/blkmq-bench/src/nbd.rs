//! The comparison of NBD servers: one lean client against our server and the installed peers, each with a
//! null disk on a unix socket, in one run with alternating sides.

mod client;
mod peers;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use blkmq_nbd::codec::HeaderStyle;

pub(crate) use self::client::{Load, ReplyStream, connect, connect_to};
pub(crate) use self::peers::EXPORT;
use self::peers::{Server, Side};
use crate::args::{BenchArgs, Plan};
use crate::report::{self, About, Report, Row};
use crate::rounds::{self, Point, Sample};
use crate::usage::Usage;
use crate::window::Window;
use crate::{fio, table};

/// Compare our NBD server with qemu-storage-daemon and nbdkit
#[derive(clap::Args, Clone, Debug)]
pub struct NbdArgs {
    /// What all benches have.
    #[command(flatten)]
    pub common: BenchArgs,
    /// I/Os under way per connection
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [1, 16, 32, 64])]
    pub depth: Vec<u32>,
    /// Connections, all driven by one thread
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [1, 4])]
    pub conns: Vec<u32>,
    /// Sides to measure, of those that are installed [default: all]
    #[arg(long, value_name = "SIDE", value_delimiter = ',')]
    pub side: Vec<Side>,
    /// Replies to negotiate; the simple ones are what the kernel's client uses
    #[arg(long, value_name = "STYLE", default_value = "simple")]
    pub replies: Replies,
    /// Also load every server through fio's nbd engine, one connection
    #[arg(long)]
    pub fio: bool,
    /// Another build of blkmq to compare with: it becomes the side `before`, this one `after`
    #[arg(long, value_name = "PROGRAM")]
    pub before: Option<PathBuf>,
}

/// The styles of replies, as the protocol names them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Replies {
    /// A head of 16 bytes.
    Simple,
    /// Chunks with heads of 20 bytes.
    Structured,
    /// Chunks with heads of 32 bytes (qemu-storage-daemon 7.2 and nbdkit 1.32 do not have them).
    Extended,
}

impl Replies {
    const fn style(self) -> HeaderStyle {
        match self {
            Self::Simple => HeaderStyle::Simple,
            Self::Structured => HeaderStyle::Structured,
            Self::Extended => HeaderStyle::Extended,
        }
    }
}

/// Runs the bench and prints its report; progress goes to stderr.
///
/// # Errors
/// If an option is out of range, a server to be measured does not start or answers wrongly, or a
/// file cannot be written.
pub fn main(args: &NbdArgs) -> Result<()> {
    check(args)?;
    let sides = sides(args)?;
    let mut points = points(args, &sides)?;
    let plan = args.common.plan(points.len(), SET_UP)?;
    let mut report = Report::start("nbd", about(args, &sides), &plan);
    let rows = rounds::run(&plan, &mut points)?;
    drop(points);
    report.finish(rows, &args.common)?;
    report::say(&summary(&report.rows));
    Ok(())
}

fn check(args: &NbdArgs) -> Result<()> {
    for depth in &args.depth {
        ensure!(
            (1..=DEPTH_MAX).contains(depth),
            "--depth {depth} rejected: must be from 1 to {DEPTH_MAX}"
        );
    }
    for conns in &args.conns {
        ensure!(
            (1..=CONNS_MAX).contains(conns),
            "--conns {conns} rejected: must be from 1 to {CONNS_MAX}"
        );
    }
    ensure!(
        !args.fio || fio::is_installed(),
        "--fio: fio is not installed; install it or leave --fio out"
    );
    Ok(())
}

/// The sides: those that the user named, or all that are installed. The others are named on stderr.
fn sides(args: &NbdArgs) -> Result<Vec<Server>> {
    let mut servers = Vec::new();
    for side in Side::ALL {
        let named = args.side.contains(&side);
        if side == Side::Before && args.before.is_none() {
            ensure!(!named, "--side before: name the other program with --before");
            continue;
        }
        if !args.side.is_empty() && !named {
            continue;
        }
        match Server::find(side, args.before.as_deref()) {
            Ok(server) => servers.push(server),
            Err(error) if named || !side.is_peer() => return Err(error),
            Err(error) => eprintln!("{side} is left out: {error:#}"),
        }
    }
    ensure!(!servers.is_empty(), "none of the sides can be measured");
    Ok(servers)
}

fn points<'a>(args: &NbdArgs, sides: &'a [Server]) -> Result<Vec<Point<'a>>> {
    let mut points = Vec::new();
    let style = args.replies.style();
    for &conns in &args.conns {
        for &depth in &args.depth {
            points.extend(sides.iter().map(|server| Point {
                case: format!("nbd/null/conns={conns}/depth={depth}"),
                side: server.name(args.before.is_some()).into(),
                measure: Box::new(move |plan| measure(server, conns as usize, depth as usize, style, plan)),
            }));
        }
    }
    for &depth in args.depth.iter().filter(|_| args.fio) {
        points.extend(sides.iter().map(|server| Point {
            case: format!("nbd/null/fio/depth={depth}"),
            side: server.name(args.before.is_some()).into(),
            measure: Box::new(move |plan| measure_with_fio(server, depth, plan)),
        }));
    }
    Ok(points)
}

/// Starts the server, loads it with our client for the plan's window, and ends it.
fn measure(server: &Server, conns: usize, depth: usize, style: HeaderStyle, plan: &Plan) -> Result<Sample> {
    let running = server.start()?;
    let window = Window::new(1);
    let connections = client::connect(running.place(), conns, style)?;
    let mut load = client::Load::new(connections, depth, BLOCK_BYTES);
    std::thread::scope(|scope| {
        let generator = scope.spawn(|| load.run(&window));
        let measured = window.measure(plan, || {
            Ok([Usage::of(running.pid())?, Usage::of_this_process()?])
        });
        let latency = generator.join().expect("the load generator does not panic");
        // The generator's error is more precise than the window's.
        let latency = latency.with_context(|| running.last_words())?;
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

/// The same with fio as the client; the server's usage is that of fio's whole run, warm-up included.
fn measure_with_fio(server: &Server, depth: u32, plan: &Plan) -> Result<Sample> {
    let running = server.start()?;
    let uri = format!(
        "nbd+unix:///{}?socket={}",
        peers::EXPORT,
        running.place().display()
    );
    // fio accepts an engine's option only after the engine's name.
    let options = [
        "--ioengine=nbd".into(),
        format!("--uri={uri}"),
        "--rw=randread".into(),
        format!("--bs={BLOCK_BYTES}"),
        format!("--iodepth={depth}"),
    ];
    let before = Usage::of(running.pid())?;
    let sample = fio::run(&options, Duration::ZERO, plan.window).with_context(|| running.last_words())?;
    let used = Usage::of(running.pid())? - before;
    Ok(Sample {
        client: Some(sample.usage),
        usage: used,
        ..sample
    })
}

fn about(args: &NbdArgs, sides: &[Server]) -> About {
    let replies = format!("{:?}", args.replies).to_lowercase();
    let mut setting = vec![
        format!(
            "null disks of 1 TiB on a unix socket, {BLOCK_BYTES} B random reads, {replies} replies; one client thread for all \
             connections, blocking, depth per connection"
        ),
        "CPU and context switches are the server's; a fresh server for every visit".into(),
    ];
    for server in sides {
        setting.push(format!(
            "{}: {}",
            server.name(args.before.is_some()),
            server.description()
        ));
    }
    About {
        question: "how many 4 KiB reads does an NBD server do, how fast, at what cost?".into(),
        setting,
    }
}

/// One line per case: ours against the peer with the most IOPS in that case.
fn summary(rows: &[Row]) -> String {
    let mut lines = String::new();
    for ours in rows
        .iter()
        .filter(|row| row.side == "ours" || row.side == "after")
    {
        let others = rows
            .iter()
            .filter(|row| row.case == ours.case && row.side != ours.side);
        if let Some(best) = others.max_by(|a, b| a.iops.total_cmp(&b.iops)) {
            lines += &format!(
                "{}: {:.2} × the IOPS of {} ({}), {:.2} of its CPU per I/O, p99 {} against {}\n",
                ours.case,
                ours.iops / best.iops,
                best.side,
                table::count(best.iops),
                ours.cpu_ns_per_io / best.cpu_ns_per_io.max(1e-9),
                table::nanos(ours.p99_ns as f64),
                table::nanos(best.p99_ns as f64),
            );
        }
    }
    lines
}

const BLOCK_BYTES: u32 = 4096;
const DEPTH_MAX: u32 = 1024;
const CONNS_MAX: u32 = 64;
/// Time to start and end a server.
const SET_UP: Duration = Duration::from_millis(120);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summary_compares_with_the_faster_peer_at_each_point() {
        let row = |side: &str, iops, cpu| Row {
            case: "c".into(),
            side: side.into(),
            iops,
            cpu_ns_per_io: cpu,
            ..Row::default()
        };
        let rows = [
            row("ours", 300.0, 10.0),
            row("slow", 100.0, 5.0),
            row("fast", 200.0, 40.0),
        ];
        let summary = summary(&rows);
        assert!(
            summary.starts_with("c: 1.50 × the IOPS of fast (200), 0.25 of its CPU"),
            "{summary}"
        );
    }

    #[test]
    fn depths_and_connections_out_of_range_are_refused() {
        let args = |depth, conns| NbdArgs {
            common: BenchArgs::default(),
            depth: vec![depth],
            conns: vec![conns],
            side: Vec::new(),
            replies: Replies::Simple,
            fio: false,
            before: None,
        };
        assert!(check(&args(1, 1)).is_ok());
        assert!(
            check(&args(0, 1))
                .unwrap_err()
                .to_string()
                .contains("from 1 to 1024")
        );
        assert!(
            check(&args(1, 65))
                .unwrap_err()
                .to_string()
                .contains("from 1 to 64")
        );
    }
}
