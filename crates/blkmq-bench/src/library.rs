//! The bench of the library: the engine as its users reach it, in Rust and through C, beside the engine's own
//! interface on a null drive, and beside libblkio and tokio on one file. One thread reads 4 KiB blocks at random.

mod c;
mod sides;
mod sys;
mod tasks;

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::args::{BenchArgs, Plan};
use crate::report::{self, About, Report, Row};
use crate::rounds::{self, Point, Sample};
use crate::usage::Usage;

/// Measure the library: in Rust and C, beside the engine alone, libblkio and tokio
#[derive(clap::Args, Clone, Debug)]
pub struct LibraryArgs {
    /// What all benches have.
    #[command(flatten)]
    pub common: BenchArgs,
    /// The file that is read [default: a new one of 256 MiB in the directory for temporary files]
    #[arg(long, value_name = "PATH")]
    pub file: Option<PathBuf>,
    /// Only cases whose name begins so: `null`, `file`, `cached`
    #[arg(long, value_name = "CASE")]
    pub only: Option<String>,
}

/// A load that keeps a number of reads under way.
trait Side {
    /// Submits what is idle, waits until something has ended, and returns how many have.
    ///
    /// # Errors
    /// If a read fails.
    fn batch(&mut self) -> Result<u64>;
}

/// Makes a side whose depth is given.
type Make<'a> = Box<dyn Fn() -> Result<Box<dyn Side>> + 'a>;

/// Runs the bench and prints its report; progress goes to stderr.
///
/// # Errors
/// If an option is out of range, the library for C is not beside this program, or a read fails.
pub fn main(args: &LibraryArgs) -> Result<()> {
    let made = args.file.is_none().then(Made::new).transpose()?;
    let file = made
        .as_ref()
        .map(|made| made.0.as_path())
        .or(args.file.as_deref());
    let mut points = points(file.context("a file")?, args.only.as_deref().unwrap_or(""));
    let plan = args.common.plan(points.len(), SET_UP)?;
    let mut report = Report::start("library", about(), &plan);
    let rows = rounds::run(&plan, &mut points)?;
    drop(points);
    report.finish(rows, &args.common)?;
    report::say(&summary(&report.rows));
    Ok(())
}

fn points<'a>(file: &'a Path, only: &str) -> Vec<Point<'a>> {
    let mut points = Vec::new();
    let mut add = |case: String, side: &str, make: Make<'a>| {
        if case.starts_with(only) {
            points.push(Point {
                case,
                side: side.into(),
                measure: Box::new(move |plan| measure(&mut *make()?, plan)),
            });
        }
    };
    for depth in [1, 64] {
        let case = || format!("null/depth={depth}");
        add(case(), "engine", Box::new(move || sides::Engine::open(depth)));
        add(case(), "face", Box::new(move || sides::Face::open(NULL, depth)));
        add(case(), "c", Box::new(move || c::C::open(NULL, depth, false)));
        if depth > 1 {
            add(case(), "c-many", Box::new(move || c::C::open(NULL, depth, true)));
        }
    }
    for depth in [1, 16, 64] {
        let case = || format!("file/depth={depth}");
        let disk = format!("name=d,file={},read_only=on", file.display());
        add(case(), "face", Box::new(move || sides::Face::open(&disk, depth)));
        add(
            case(),
            "libblkio",
            Box::new(move || sides::Blkio::open(file, depth)),
        );
    }
    let case = || format!("cached/depth={TASKS}");
    let disk = format!("name=d,file={},read_only=on,direct=off", file.display());
    add(
        case(),
        "futures",
        Box::new(move || tasks::Futures::open(&disk, TASKS)),
    );
    add(case(), "tokio", Box::new(move || tasks::Tokio::open(file, TASKS)));
    points
}

/// Runs a side for the plan's window.
fn measure(side: &mut dyn Side, plan: &Plan) -> Result<Sample> {
    let run = |side: &mut dyn Side, time: Duration| -> Result<(u64, Duration)> {
        let (start, mut ios) = (Instant::now(), 0);
        loop {
            // The clock is read seldom: a read of the null drive takes no longer than that.
            for _ in 0..BATCHES {
                ios += side.batch()?;
            }
            let elapsed = start.elapsed();
            if elapsed >= time {
                return Ok((ios, elapsed));
            }
        }
    };
    run(side, plan.warm_up)?;
    let before = Usage::of_this_process()?;
    let (ios, elapsed) = run(side, plan.window)?;
    Ok(Sample {
        ios,
        elapsed,
        usage: Usage::of_this_process()? - before,
        ..Sample::default()
    })
}

fn about() -> About {
    About {
        question: "what does an I/O cost through the library, and through others' libraries?".into(),
        setting: vec![
            "4 KiB reads at random places, one submitter; without latencies, which would cost a reading of the clock".into(),
            "null: a drive that ends inline. engine: the engine's own interface; face: blkmq-engine; c: blkmq.h, loaded; c-many: the same, a call for all that is submitted".into(),
            "file: past the page cache, an attached thread beside libblkio's io_uring driver".into(),
            "cached: through the page cache, a task of tokio per read: the library's futures beside tokio's own files".into(),
        ],
    }
}

/// The ratios that matter, round by round.
fn summary(rows: &[Row]) -> String {
    let mut text =
        String::from("\ncase              of            to            IOPS ratio           CPU per I/O\n");
    for row in rows {
        let base = rows
            .iter()
            .find(|other| other.case == row.case && is_base(&other.side));
        let Some(base) = base.filter(|base| base.side != row.side) else {
            continue;
        };
        text += &format!(
            "{:<17} {:<13} {:<13} {:<20} {:.2}\n",
            row.case,
            row.side,
            base.side,
            row.against(base).to_string(),
            row.cpu_ns_per_io / base.cpu_ns_per_io
        );
    }
    text
}

/// Whether other sides are compared with this one.
fn is_base(side: &str) -> bool {
    ["engine", "libblkio", "tokio"].contains(&side)
}

/// A file that is removed at the end.
struct Made(PathBuf);

impl Made {
    fn new() -> Result<Self> {
        let path = std::env::temp_dir().join(format!("blkmq-bench-library-{}.raw", std::process::id()));
        let made = Self(path);
        let mut file = File::create(&made.0).with_context(|| made.0.display().to_string())?;
        // Chance, so that nothing on the way finds holes or compresses.
        let mut chance = File::open("/dev/urandom")?;
        let mut piece = vec![0; 4 << 20];
        for _ in 0..FILE_BYTES / piece.len() {
            chance.read_exact(&mut piece)?;
            file.write_all(&piece)?;
        }
        file.sync_all()?;
        Ok(made)
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

const NULL: &str = "name=d,null=1G,zero=off";
/// The bytes of the null drive.
const NULL_BYTES: u64 = 1 << 30;
const BLOCK: usize = 4096;
const TASKS: usize = 32;
const BATCHES: u32 = 64;
const FILE_BYTES: usize = 256 << 20;
/// Time to start and end an engine.
const SET_UP: Duration = Duration::from_millis(40);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sides_read_what_they_say() {
        let made = Made(std::env::temp_dir().join(format!("blkmq-bench-sides-{}.raw", std::process::id())));
        std::fs::write(&made.0, vec![7; 1 << 20]).unwrap();
        let plan = Plan {
            rounds: 1,
            window: Duration::from_millis(20),
            warm_up: Duration::from_millis(1),
        };
        for mut point in points(&made.0, "") {
            // The shared library for C lies beside the programs of a build, not beside those of its tests.
            if !point.side.starts_with('c') {
                let sample = (point.measure)(&plan).unwrap();
                assert!(sample.ios > 0, "{} {}", point.case, point.side);
            }
        }
    }
}
