//! The comparison of disks in a Ceph cluster with other access to the same image: fio's own rbd engine in
//! process, QEMU's servers behind NBD; how tenants share a cluster; and whether a hanging cluster affects a
//! local disk.
//!
//! `cargo xtask ceph --bench` starts the clusters, and calls this.

mod hang;
mod shares;
mod sides;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use self::sides::{Client, Server};
use crate::args::BenchArgs;
use crate::engine::Pattern;
use crate::report::{self, About, Report, Row};
use crate::rounds::{self, Point};
use crate::{fio, table};

/// Measure disks in a Ceph cluster beside fio's rbd engine and QEMU's servers
#[derive(clap::Args, Clone, Debug)]
pub struct RbdArgs {
    /// What all benches have.
    #[command(flatten)]
    pub common: BenchArgs,
    /// Ceph's configuration file
    #[arg(long, value_name = "FILE")]
    pub conf: PathBuf,
    /// The user, without client.
    #[arg(long, value_name = "NAME", default_value = "admin")]
    pub id: String,
    /// The image, filled; what is on it is lost. The tenants' are called the same with -1, -2, -3 behind it
    #[arg(long, value_name = "POOL/IMAGE", default_value = "rbd/bench")]
    pub image: String,
    /// What to measure [default: all that there is what it takes for]
    #[arg(long, value_name = "WHAT", value_delimiter = ',')]
    pub what: Vec<What>,
    /// I/Os under way
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [1, 16, 32])]
    pub depth: Vec<u32>,
    /// What to do
    #[arg(long, value_name = "PATTERN", value_delimiter = ',', default_values = ["randread", "randwrite"])]
    pub rw: Vec<Pattern>,
    /// The library of the fio engine [default: libblkmq_fio.so beside this program]
    #[arg(long, value_name = "FILE")]
    pub engine: Option<PathBuf>,
    /// The configuration file of another cluster, with an image of the same name; for `hang`
    #[arg(long, value_name = "FILE")]
    pub other_conf: Option<PathBuf>,
    /// The process of its OSD, which is stopped and goes on
    #[arg(long, value_name = "PID")]
    pub other_osd: Option<u32>,
}

/// What can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum What {
    /// The engine under fio, beside fio's own rbd engine.
    Engine,
    /// The daemon behind NBD, beside QEMU's.
    Nbd,
    /// Three tenants of weights 1, 2 and 4.
    Shares,
    /// A local disk beside a cluster that hangs.
    Hang,
}

impl RbdArgs {
    fn measures(&self, what: What) -> bool {
        self.what.is_empty() || self.what.contains(&what)
    }

    /// An image of the cluster as a disk of ours.
    fn disk(&self, name: &str, image: &str) -> String {
        format!(
            "name={name},rbd={image},conf={},id={}",
            self.conf.display(),
            self.id
        )
    }

    /// Pool and image.
    fn parts(&self) -> (&str, &str) {
        self.image.split_once('/').unwrap_or(("rbd", &self.image))
    }

    fn fio_engine(&self) -> Result<PathBuf> {
        if let Some(engine) = &self.engine {
            return Ok(engine.clone());
        }
        let program = std::env::current_exe().context("finding this program")?;
        Ok(program.with_file_name("libblkmq_fio.so"))
    }
}

/// Runs the bench and prints its report; progress goes to stderr.
///
/// # Errors
/// If an option is out of range, a requested measurement is not possible, or a file cannot be written.
pub fn main(args: &RbdArgs) -> Result<()> {
    ensure!(fio::is_installed(), "fio is the client here: apt-get install fio");
    for depth in &args.depth {
        ensure!(
            (1..=DEPTH_MAX).contains(depth),
            "--depth {depth} rejected: must be from 1 to {DEPTH_MAX}"
        );
    }
    ensure!(
        args.rw
            .iter()
            .all(|rw| matches!(rw, Pattern::Randread | Pattern::Randwrite)),
        "--rw rejected: must be randread or randwrite"
    );
    let (clients, servers) = (clients(args)?, servers(args)?);
    let mut points = points(args, &clients, &servers)?;
    ensure!(!points.is_empty(), "nothing can be measured");
    let plan = args.common.plan(points.len(), SET_UP)?;
    let mut report = Report::start("rbd", about(args), &plan);
    let rows = rounds::run(&plan, &mut points)?;
    drop(points);
    report.finish(rows, &args.common)?;
    report::say(&summary(&report.rows));
    Ok(())
}

fn clients(args: &RbdArgs) -> Result<Vec<Client>> {
    if !args.measures(What::Engine) {
        return Ok(Vec::new());
    }
    let engine = args.fio_engine()?;
    if !engine.exists() || !fio::has_engine("rbd") {
        let why = format!(
            "engine: needs fio with its rbd engine, and {} (cargo build --release -p blkmq-fio)",
            engine.display()
        );
        ensure!(!args.what.contains(&What::Engine), "{why}");
        eprintln!("left out: {why}");
        return Ok(Vec::new());
    }
    Ok(vec![Client::Ours(engine), Client::Fio, Client::FioUncached])
}

fn servers(args: &RbdArgs) -> Result<Vec<Server>> {
    if !args.measures(What::Nbd) {
        return Ok(Vec::new());
    }
    let mut servers = Vec::new();
    for server in Server::ALL {
        // Once for nothing: whether it can, is known when it has.
        match server.start(args) {
            Ok(_) => servers.push(server),
            Err(error) if server == Server::Ours => return Err(error),
            Err(error) => eprintln!(
                "{} is left out (apt-get install qemu-utils qemu-block-extra): {error:#}",
                server.name()
            ),
        }
    }
    Ok(servers)
}

fn points<'a>(args: &'a RbdArgs, clients: &'a [Client], servers: &'a [Server]) -> Result<Vec<Point<'a>>> {
    let mut points = Vec::new();
    let loads = || {
        let rws = args.rw.iter().copied();
        rws.flat_map(|rw| args.depth.iter().map(move |&depth| (rw, depth)))
    };
    for (rw, depth) in loads() {
        // fio's cache is one of writes: reads are the same with it and without.
        let sides = clients
            .iter()
            .filter(|client| rw == Pattern::Randwrite || !matches!(client, Client::FioUncached));
        points.extend(sides.map(|client| Point {
            case: format!("engine/{}/depth={depth}", rw.name()),
            side: client.name().into(),
            measure: Box::new(move |plan| client.measure(args, rw, depth, plan)),
        }));
    }
    for (rw, depth) in loads() {
        points.extend(servers.iter().map(|server| Point {
            case: format!("nbd/{}/depth={depth}", rw.name()),
            side: server.name().into(),
            measure: Box::new(move |plan| server.measure(args, rw, depth, plan)),
        }));
    }
    if args.measures(What::Shares) {
        points.extend(["bfq", "none"].map(|sched| Point {
            case: "shares/1:2:4".into(),
            side: sched.into(),
            measure: Box::new(move |plan| shares::measure(args, sched, plan)),
        }));
    }
    if let (true, Some(conf), Some(osd)) = (args.measures(What::Hang), &args.other_conf, args.other_osd) {
        points.extend(
            [("alone", None), ("beside-a-hanging-cluster", Some(osd))].map(|(side, stopped)| Point {
                case: "hang/local/randread/depth=1".into(),
                side: side.into(),
                measure: Box::new(move |plan| hang::measure(args, conf, stopped, plan)),
            }),
        );
    } else {
        ensure!(
            !args.what.contains(&What::Hang),
            "--what hang needs --other-conf and --other-osd"
        );
    }
    Ok(points)
}

fn about(args: &RbdArgs) -> About {
    About {
        question: "what do disks in a Ceph cluster do beside others' ways to them?".into(),
        setting: vec![
            format!("{} of {}, {BLOCK_BYTES} B random; fio is every client, a process of its own", args.image, args.conf.display()),
            "engine: ours under fio beside fio's rbd engine, with its cache of writes as it is and switched off (fio-uncached); CPU is all of fio's, its start with it".into(),
            "nbd: a fresh server on a unix socket for every visit, all without a cache of writes, one connection; CPU is the server's".into(),
            "shares: 64 KiB random reads, 16 under way for each of three tenants; share_error_percent is the worst of the three".into(),
            "hang: 4 KiB random reads of a local file, one at a time, while 128 writes to another cluster wait for its OSD, and without those".into(),
        ],
    }
}

/// A line for each case: the first side against the others.
fn summary(rows: &[Row]) -> String {
    let mut lines = String::new();
    for (index, first) in rows.iter().enumerate() {
        if rows[..index].iter().any(|row| row.case == first.case) {
            continue;
        }
        for other in rows[index + 1..].iter().filter(|row| row.case == first.case) {
            lines += &format!(
                "{}: {} has {} × the IOPS of {}, {:.2} of its CPU per I/O, p99 {} against {}\n",
                first.case,
                first.side,
                first.against(other),
                other.side,
                first.cpu_ns_per_io / other.cpu_ns_per_io.max(1e-9),
                table::nanos(first.p99_ns as f64),
                table::nanos(other.p99_ns as f64),
            );
        }
        for row in rows.iter().filter(|row| row.case == first.case) {
            for (name, value) in &row.figures {
                lines += &format!("{}: {}: {name} {value:.2}\n", row.case, row.side);
            }
        }
    }
    lines
}

const BLOCK_BYTES: u32 = 4096;
const DEPTH_MAX: u32 = 256;
/// Connecting to a cluster, and letting go of an image.
const SET_UP: Duration = Duration::from_millis(500);
