//! The bench of observers, and what they cost the tenant of a daemon: one NBD client of a null disk, without
//! observers, with a trace of all requests written to files, with two programs that print the activity of
//! hundreds of disks, in processes of their own, and with somebody who changes the daemon all the time.

mod changes;

use std::cell::RefCell;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use blkmq_nbd::codec::HeaderStyle;
use rustix::process::{Pid, Signal, kill_process};

use self::changes::Changes;
use crate::args::{BenchArgs, Plan};
use crate::nbd::{EXPORT, Load, connect};
use crate::report::{self, About, Report, Row};
use crate::rounds::{self, Point, Sample};
use crate::server::{Running, daemon};
use crate::table;
use crate::usage::Usage;
use crate::window::Window;
use blkmq_testkit::Scratch;

/// Measure what it costs a client that its daemon is traced, that its statistics are read, or that it is changed
#[derive(clap::Args, Clone, Debug)]
pub struct ObserversArgs {
    /// What all benches have.
    #[command(flatten)]
    pub common: BenchArgs,
    /// I/Os under way
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [1, 16, 64])]
    pub depth: Vec<u32>,
    /// Disks that the daemon serves, one of which is used
    #[arg(long, value_name = "N", default_value_t = 500)]
    pub disks: u32,
}

/// Runs the bench and prints its report; progress goes to stderr.
///
/// # Errors
/// If an option is out of range, the daemon or an observer does not start or fails, or a file cannot be written.
pub fn main(args: &ObserversArgs) -> Result<()> {
    for depth in &args.depth {
        ensure!(
            (1..=DEPTH_MAX).contains(depth),
            "--depth {depth} rejected: must be from 1 to {DEPTH_MAX}"
        );
    }
    ensure!(
        (1..=DISKS_MAX).contains(&args.disks),
        "--disks {} rejected: must be from 1 to {DISKS_MAX}",
        args.disks
    );
    let plan = args.common.plan(args.depth.len() * SIDES.len(), SET_UP)?;
    let scene = RefCell::new(None);
    let mut points = points(args, &scene);
    let mut report = Report::start("observers", about(args), &plan);
    let rows = rounds::run(&plan, &mut points)?;
    drop(points);
    report.finish(rows, &args.common)?;
    report::say(&summary(&report.rows));
    Ok(())
}

/// The observers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    /// None.
    Nobody,
    /// `blkmq trace` writes what happens to all requests into files.
    Trace,
    /// Two times `blkmq iostat` prints what disks did each second.
    Statistics,
    /// The daemon is changed 33 times a second.
    Changes,
}

/// A daemon and its client. The sides of one depth and round meet the same, so that only the observers differ:
/// where the system places a daemon and a client is worth more than what a trace costs.
struct Scene {
    daemon: Running,
    load: Load,
}

impl Scene {
    fn start(args: &ObserversArgs, depth: u32) -> Result<Self> {
        let daemon = start(args.disks)?;
        let connections = connect(daemon.place(), 1, HeaderStyle::Simple)?;
        Ok(Self {
            load: Load::new(connections, depth as usize, BLOCK_BYTES),
            daemon,
        })
    }

    fn measure(&mut self, side: Side, plan: &Plan) -> Result<Sample> {
        let Self { daemon, load } = self;
        let observers = Observers::start(side, daemon.dir())?;
        let window = Window::new(1);
        let (latency, measured) = thread::scope(|scope| {
            let generator = scope.spawn(|| load.run(&window));
            let measured = window.measure(plan, || Ok([Usage::of(daemon.pid())?, observers.usage()?]));
            (
                generator.join().expect("the load generator does not panic"),
                measured,
            )
        });
        // The generator's error says more than the window's.
        let latency = latency.with_context(|| daemon.last_words())?;
        let measured = measured?;
        let observers_cpu = measured.usage[1].cpu_ns as f64 / measured.elapsed.as_nanos() as f64;
        let dropped = observers.end()?;
        Ok(Sample {
            ios: measured.ios,
            elapsed: measured.elapsed,
            latency: (&latency).into(),
            usage: measured.usage[0],
            client: None,
            figures: vec![("observers_cpu", observers_cpu), ("dropped", dropped as f64)],
        })
    }
}

/// The points of each depth, in the order of the sides: the first starts a scene anew, the others take it over.
fn points<'a>(args: &'a ObserversArgs, scene: &'a RefCell<Option<Scene>>) -> Vec<Point<'a>> {
    let depths = args.depth.iter();
    let both = depths.flat_map(|&depth| SIDES.map(|(name, side)| (depth, name, side)));
    let point = |(depth, name, side): (u32, &'static str, Side)| Point {
        case: format!("disks={}/depth={depth}", args.disks),
        side: name.into(),
        measure: Box::new(move |plan| {
            let mut scene = scene.borrow_mut();
            if side == SIDES[0].1 {
                *scene = Some(Scene::start(args, depth)?);
            }
            let scene = scene.as_mut().context("the first side makes the scene")?;
            scene.measure(side, plan)
        }),
    };
    both.map(point).collect()
}

fn start(disks: u32) -> Result<Running> {
    let dir = Scratch::new();
    let socket = dir.path("s");
    let mut command = Command::new(daemon()?);
    command.args(["serve", "--disk", &format!("name={EXPORT},null=1T")]);
    for number in 1..disks {
        command.args([
            "--disk",
            &format!("name=disk{number},null=1G,group=/tenants/{number}"),
        ]);
    }
    command.args([
        "--nbd",
        &address(&socket),
        "--control",
        &address(&dir.path(CONTROL)),
    ]);
    Running::start(command, dir, socket)
}

fn address(path: &Path) -> String {
    format!("unix:{}", path.display())
}

/// The programs that look on, until this is dropped, and who changes the daemon.
struct Observers {
    side: Side,
    programs: Vec<Child>,
    changes: Option<Changes>,
}

impl Observers {
    fn start(side: Side, dir: &Scratch) -> Result<Self> {
        wait_for(&dir.path(CONTROL))?;
        let control = address(&dir.path(CONTROL));
        let mut observers = Self {
            side,
            programs: Vec::new(),
            changes: None,
        };
        match side {
            Side::Nobody => {}
            Side::Trace => {
                let out = dir.path("trace");
                observers.run(&["trace", "--socket", &control, "--out", &out.to_string_lossy()])?;
                wait_for(&dir.path("trace.blktrace.0"))?;
            }
            Side::Statistics => {
                for _ in 0..2 {
                    observers.run(&["iostat", "--socket", &control, "1"])?;
                }
            }
            Side::Changes => observers.changes = Some(Changes::start(&dir.path(CONTROL))?),
        }
        Ok(observers)
    }

    fn run(&mut self, words: &[&str]) -> Result<()> {
        let mut command = Command::new(daemon()?);
        command.args(words).stdin(Stdio::null());
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        let program = command.spawn();
        self.programs
            .push(program.with_context(|| format!("starting blkmq {}", words[0]))?);
        Ok(())
    }

    /// What all of them have used.
    fn usage(&self) -> Result<Usage> {
        let mut sum = Usage::default();
        for program in &self.programs {
            sum += Usage::of(program.id())?;
        }
        Ok(sum)
    }

    /// Ends them. Returns how many events of a trace found no room.
    fn end(mut self) -> Result<u64> {
        if let Some(changes) = self.changes.take() {
            ensure!(changes.end()? > 0, "the daemon was not changed in this time");
        }
        let mut dropped = 0;
        for mut program in self.programs.drain(..) {
            if self.side != Side::Trace {
                program.kill().context("ending an observer")?;
                program.wait().context("waiting for an observer")?;
                continue;
            }
            if let Some(pid) = Pid::from_raw(program.id() as i32) {
                kill_process(pid, Signal::INT).context("ending a trace")?;
            }
            let output = program.wait_with_output().context("waiting for a trace")?;
            let said = String::from_utf8_lossy(&output.stderr);
            ensure!(output.status.success(), "a trace failed: {said}");
            dropped += dropped_events(&said)
                .with_context(|| format!("a trace does not say what it dropped: {said}"))?;
        }
        Ok(dropped)
    }
}

impl Drop for Observers {
    fn drop(&mut self) {
        for program in &mut self.programs {
            let _ = program.kill();
            let _ = program.wait();
        }
    }
}

fn wait_for(file: &Path) -> Result<()> {
    let start = Instant::now();
    while !file.exists() {
        ensure!(
            start.elapsed() < BEGIN_WITHIN,
            "{} is not there after {BEGIN_WITHIN:?}",
            file.display()
        );
        thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// The number in `N events, M dropped`.
fn dropped_events(said: &str) -> Option<u64> {
    let before = said.lines().find_map(|line| line.strip_suffix(" dropped"))?;
    before.rsplit(' ').next()?.parse().ok()
}

fn about(args: &ObserversArgs) -> About {
    About {
        question: "what does it cost a client that its daemon is traced, read or changed?".into(),
        setting: vec![
            format!(
                "one NBD client, {BLOCK_BYTES} B random reads of one of {} null disks; daemon and client are new for each depth and round, and the same for all sides of it",
                args.disks
            ),
            "trace: blkmq trace writes all requests of all disks to files; statistics: two times blkmq iostat, each second".into(),
            "changes: 33 a second of disks, weights, the scheduler of the read disk and whole configurations, four in ten refused".into(),
            "CPU and context switches are the daemon's; observers_cpu is the observers', in processors".into(),
        ],
    }
}

/// How many I/Os remain compared with a client without observers.
fn summary(rows: &[Row]) -> String {
    let mut lines = String::new();
    for row in rows {
        let alone = rows
            .iter()
            .find(|one| one.case == row.case && one.side == SIDES[0].0);
        if let Some(alone) = alone.filter(|alone| alone.side != row.side) {
            lines += &format!(
                "{} {}: {} of the IOPS without ({}), p99 {} against {}\n",
                row.case,
                row.side,
                row.against(alone),
                table::count(alone.iops),
                table::nanos(row.p99_ns as f64),
                table::nanos(alone.p99_ns as f64),
            );
        }
    }
    lines
}

const SIDES: [(&str, Side); 4] = [
    ("nobody", Side::Nobody),
    ("trace", Side::Trace),
    ("statistics", Side::Statistics),
    ("changes", Side::Changes),
];
/// The control socket's name.
const CONTROL: &str = "c";
const BLOCK_BYTES: u32 = 4096;
const DEPTH_MAX: u32 = 1024;
const DISKS_MAX: u32 = 1000;
const BEGIN_WITHIN: Duration = Duration::from_secs(5);
/// Starting and ending a daemon and observers.
const SET_UP: Duration = Duration::from_millis(300);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closing_lines_of_a_trace_are_read() {
        assert_eq!(dropped_events("259,0 is disk a\n17 events, 4 dropped\n"), Some(4));
        assert_eq!(dropped_events("it failed"), None);
    }

    #[test]
    fn summary_compares_with_a_client_whom_nobody_observes() {
        let row = |case: &str, side: &str, iops| Row {
            case: case.into(),
            side: side.into(),
            iops,
            rounds: vec![iops],
            ..Row::default()
        };
        let rows = [
            row("a", "nobody", 200.0),
            row("b", "nobody", 1.0),
            row("a", "trace", 190.0),
        ];
        let summary = summary(&rows);
        assert_eq!(summary.lines().count(), 1);
        assert!(
            summary.starts_with("a trace: 0.95 (0.95–0.95) of the IOPS without (200)"),
            "{summary}"
        );
    }
}
