//! The fairness bench, which measures the costs and benefits of sharing a drive: tenants with weights on one
//! drive, under each elevator and under caps; the figures are shares, latency of a light tenant, total
//! throughput and reaction time.

mod cases;
mod clients;
mod images;
mod kernel;
pub mod own;
mod pictures;
mod processes;
mod scene;
mod score;
mod spec;
mod stage;
mod tenant;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use blkmq_core::sched::{self, ElevatorType};
use blkmq_core::time::Nanos;
use blkmq_host::value;

use self::images::Images;
use self::kernel::Loop;
use self::pictures::Pictures;
use self::scene::{Scene, Turn};
use self::score::Series;
use self::stage::{Ground, Medium, Totals, Visit, play};
use crate::args::{BenchArgs, Plan, REPORT_ROUNDS};
use crate::interrupt;
use crate::report::{About, Report};
use crate::rounds::{self, Latency, Point, Sample};

/// Measure how tenants share a drive: shares, isolation, total throughput, reaction
#[derive(clap::Args, Clone, Debug)]
pub struct FairnessArgs {
    /// What all benches have.
    #[command(flatten)]
    pub common: BenchArgs,
    /// Run on this file instead of the drive models; what is in it is lost
    #[arg(long, value_name = "FILE", requires = "overwrite")]
    pub file: Option<PathBuf>,
    /// Allow writing to the file
    #[arg(long)]
    pub overwrite: bool,
    /// As clients see it: `blkmq serve` and a client for each tenant, processes of their own
    #[arg(long, conflicts_with = "file")]
    pub clients: bool,
    /// The front door of --clients
    #[arg(long, value_name = "DOOR", default_value = "nbd", requires = "clients")]
    pub door: Door,
    /// The program of --clients; fio is for NBD, and spins in pauses below 5 ms [default: fio for NBD, else own]
    #[arg(long, value_name = "CLIENT", requires = "clients")]
    pub client: Option<Client>,
    /// Directory for the images of --clients; may be given again [default: the current one, and
    /// /dev/shm]
    #[arg(long, value_name = "DIR", requires = "clients")]
    pub dir: Vec<PathBuf>,
    /// Put the images of each case into all directories, in turn: subvolumes of one filesystem, for example
    #[arg(long, requires = "dir")]
    pub in_turn: bool,
    /// Size of each image of --clients and --kernel, filled before
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = image_bytes)]
    pub size: u64,
    /// Serve the clients with this build of blkmq [default: the one beside this program]
    #[arg(long, value_name = "PROGRAM", requires = "clients")]
    pub server: Option<PathBuf>,
    /// Beside the kernel's own schedulers, on a loop device over the same file; needs root
    #[arg(long)]
    pub kernel: bool,
    /// Measure these tenants instead: WEIGHT:DEPTH:SIZE[:OP][@RATE|/REST],… as in 1:64:64k,2:4:64k:randwrite,1:1:4k@200;
    /// may be given again
    #[arg(long, value_name = "SPEC", value_parser = spec::parse)]
    case: Vec<Scene>,
    /// Sides to measure.
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_parser = side, help = side_help())]
    pub side: Vec<Side>,
    /// What the light tenant's I/O should take at most with bfq-target, in microseconds
    #[arg(long, value_name = "MICROSECONDS", default_value = "250", value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub target: u64,
    /// Draw the light tenant's latencies and the shares over time, a picture for each case, into DIR
    #[arg(long, value_name = "DIR", conflicts_with = "clients")]
    pub pictures: Option<PathBuf>,
    /// Threads of the engine, or of the daemon [default: 2; in process on a file in memory 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub reactors: Option<u16>,
    /// Only cases whose name contains this
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub only: String,
}

/// What divides the drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// An elevator, or none.
    Elevator(&'static ElevatorType),
    /// No elevator, and every tenant, the light one included, capped at its due part of the drive's
    /// capacity.
    Caps,
    /// bfq with a latency target for the light tenant's group.
    Target,
}

/// The front door through which clients come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Door {
    /// NBD on a unix socket.
    Nbd,
    /// vhost-user-blk, one virtqueue each.
    VhostUser,
}

/// The program that loads a tenant's disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Client {
    /// fio with its nbd engine.
    Fio,
    /// This program, which sleeps in every pause.
    Own,
}

/// What a visit is compared with, from the same round.
#[derive(Default)]
struct Reference {
    /// Latency of the victim alone, by case.
    alone: RefCell<BTreeMap<String, Latency>>,
    /// Totals without an elevator, by case.
    none: RefCell<BTreeMap<String, Totals>>,
    /// The data for pictures of all visits.
    pictures: RefCell<Pictures>,
}

/// Runs the bench and prints its report; progress goes to stderr.
///
/// # Errors
/// If an option is out of range, the file cannot be opened or fails, or a result cannot be written.
pub fn main(args: &FairnessArgs) -> Result<()> {
    interrupt::listen()?;
    if args.clients {
        return clients::main(args);
    }
    let pauses = |scene: &&Scene| scene.tenants().iter().any(|tenant| tenant.load.is_light());
    if let Some(scene) = args.case.iter().find(pauses) {
        bail!(
            "--case {} rejected: only clients pause; add --clients",
            scene.case
        );
    }
    if let Some(file) = &args.file {
        std::fs::metadata(file).with_context(|| format!("--file {} rejected", file.display()))?;
    }
    let images = in_memory(args)?;
    let image = images.as_ref().map(|images| images.path(0));
    let file = args.file.clone().or(image);
    let kernel = kernel(args, file.as_deref());
    let ground = Ground {
        // The dispatcher copies a file in memory: a second thread would only be woken, without
        // work.
        reactors: args
            .reactors
            .unwrap_or(if images.is_some() { 1 } else { 2 })
            .into(),
        medium: file.map_or(Medium::Model, Medium::File),
        target: Nanos::from_micros(args.target),
    };
    let scenes = match ground.medium {
        Medium::Model => cases::all(),
        Medium::File(_) => cases::on_file(),
    };
    let scenes = chosen(args, scenes)?;
    let sides = sides(&args.side, args.kernel);
    let reference = Reference::default();
    let mut points = points(&scenes, &sides, &ground, kernel.as_ref(), &reference);
    let common = with_defaults(&args.common);
    // The warm-up of tenants takes at most as long as their measurement.
    let visits = if common.quick {
        2 * points.len()
    } else {
        points.len()
    };
    let plan = common.plan(visits, SET_UP)?;
    let mut report = Report::start("fairness", about(&ground), &plan);
    let rows = rounds::run(&plan, &mut points)?;
    drop(points);
    if let Some(dir) = &args.pictures {
        reference.pictures.borrow().write(dir)?;
    }
    report.finish(rows, &common)
}

/// The options with this bench's own times: the kernel's bfq wants windows of some seconds.
fn with_defaults(common: &BenchArgs) -> BenchArgs {
    let mut common = common.clone();
    if !common.quick {
        let rounds = common.json.as_ref().map_or(ROUNDS_DEFAULT, |_| REPORT_ROUNDS);
        common.seconds.get_or_insert(SECONDS_DEFAULT);
        common.rounds.get_or_insert(rounds);
    }
    common
}

/// A file in memory, where the kernel's schedulers are measured and no file is named.
fn in_memory(args: &FairnessArgs) -> Result<Option<Images>> {
    if !args.kernel || args.file.is_some() {
        return Ok(None);
    }
    let mut images = Images::in_dirs(&[MEMORY.into()], args.size)?;
    images.fill(1)?;
    Ok(Some(images))
}

/// The loop device on the file, if it was requested and is available.
fn kernel(args: &FairnessArgs, file: Option<&Path>) -> Option<Loop> {
    let file = file.filter(|_| args.kernel)?;
    let made = Loop::set_up(file);
    if let Err(error) = &made {
        eprintln!("SKIPPED the kernel's sides: {error:#}");
    }
    made.ok()
}

/// The cases that the user named, or those of the table whose names contain the text of `--only`.
fn chosen(args: &FairnessArgs, table: Vec<Scene>) -> Result<Vec<Scene>> {
    let mut scenes = if args.case.is_empty() {
        table
    } else {
        args.case.clone()
    };
    scenes.retain(|scene| scene.case.contains(&args.only));
    ensure!(
        !scenes.is_empty(),
        "--only {}: no case has that in its name",
        args.only
    );
    Ok(scenes)
}

/// The requested sides, ordered so that each follows those whose results it needs: `caps` follows
/// `none`.
fn sides(asked: &[Side], without_caps: bool) -> Vec<Side> {
    let elevators = sched::BUILT_IN.into_iter().map(Side::Elevator);
    let mut all: Vec<Side> = elevators.collect();
    if !without_caps {
        all.insert(1, Side::Caps);
    }
    all.push(Side::Target);
    all.retain(|side| {
        asked.is_empty() && *side != Side::Target
            || asked.contains(side)
            || *side == Side::Elevator(sched::NONE)
    });
    all
}

fn points<'a>(
    scenes: &'a [Scene],
    sides: &[Side],
    ground: &'a Ground,
    kernel: Option<&'a Loop>,
    reference: &'a Reference,
) -> Vec<Point<'a>> {
    let mut points = Vec::new();
    for scene in scenes {
        let has_meaning = |side: &&Side| match side {
            Side::Target => scene.victim.is_some(),
            Side::Caps => scene.caps_can_bind(),
            Side::Elevator(_) => true,
        };
        for &side in sides.iter().filter(has_meaning) {
            points.push(Point {
                case: scene.case.clone(),
                side: side.name().into(),
                measure: Box::new(move |plan| measure(scene, side, ground, reference, plan)),
            });
            if let (Some(kernel), Side::Elevator(kind)) = (kernel, side) {
                points.push(Point {
                    case: scene.case.clone(),
                    side: format!("kernel-{kind}"),
                    measure: Box::new(move |plan| measure_kernel(scene, kind, kernel, reference, plan)),
                });
            }
        }
    }
    points
}

fn measure(scene: &Scene, side: Side, ground: &Ground, reference: &Reference, plan: &Plan) -> Result<Sample> {
    if side == Side::Elevator(sched::NONE) {
        reference.measure_alone(scene, ground, plan)?;
    }
    let none = reference.none.borrow().get(&scene.case).copied();
    let visit = match side {
        Side::Elevator(kind) => play(scene, ground, kind, None, plan)?,
        Side::Caps => play(
            scene,
            ground,
            sched::NONE,
            none.map(|none| scene.capacity(none.ios, none.bytes)),
            plan,
        )?,
        Side::Target => play(&scene.with_target(ground.target), ground, sched::BFQ, None, plan)?,
    };
    let is_none = side == Side::Elevator(sched::NONE);
    let mut figures = reference.against_none(&scene.case, is_none, visit.steady);
    figures.extend(shares(scene, &visit.series, visit.turned_at, plan));
    if matches!(side, Side::Elevator(kind) if kind != sched::NONE) && scene.crowd.len() > 1 {
        figures.push(("dry_part", visit.dry));
    }
    let latency = Latency::from(&visit.latency);
    figures.extend(reference.against_alone(&scene.case, latency));
    reference.note(scene, side.name(), &visit);
    Ok(Sample {
        ios: visit.ios,
        elapsed: visit.elapsed,
        latency,
        usage: visit.usage,
        figures,
        ..Sample::default()
    })
}

/// Measures the same scene under the kernel's scheduler of that name.
fn measure_kernel(
    scene: &Scene,
    kind: &'static ElevatorType,
    kernel: &Loop,
    reference: &Reference,
    plan: &Plan,
) -> Result<Sample> {
    let case = format!("kernel/{}", scene.case);
    if kind == sched::NONE && scene.victim.is_some() {
        let scene = scene.victim_alone();
        let alone = kernel.play(&scene, kind.name, None, plan)?.total(&scene);
        let mut known = reference.alone.borrow_mut();
        known.insert(case.clone(), alone.latency);
    }
    let visit = kernel.play(scene, kind.name, None, plan)?;
    let total = visit.total(scene);
    let crowd = visit.series.of_first(scene.crowd.len());
    let totals = Totals {
        ios: total.iops(),
        bytes: crowd.rate_since(Duration::ZERO),
    };
    let mut figures = reference.against_none(&case, kind == sched::NONE, totals);
    figures.extend(reference.against_alone(&case, total.latency));
    figures.extend(shares(scene, &crowd, Duration::ZERO, plan));
    if scene.victim.is_some() {
        let mut pictures = reference.pictures.borrow_mut();
        pictures.note_percentiles(&scene.case, &format!("kernel-{kind}"), total.latency);
    }
    Ok(Sample { figures, ..total })
}

/// How the shares compare with the dues: over the whole visit, or after the scene's change.
fn shares(scene: &Scene, series: &Series, turned_at: Duration, plan: &Plan) -> Vec<(&'static str, f64)> {
    let due = scene.due(&scene.tree, &scene.crowd);
    let mut tree = scene.tree.clone();
    let changed = match scene.turn {
        Turn::Nothing if scene.crowd.len() < 2 => return Vec::new(),
        Turn::Nothing => {
            let length = plan.window.min(SHARE_WINDOW);
            return vec![
                ("worst_share_error", series.worst_share_error(&due, length)),
                ("share_error", series.share_error(&due)),
                ("jain", series.jain(&due)),
            ];
        }
        Turn::Weight(weight) => {
            tree.set_weight(scene.crowd[0].group, weight)
                .expect("scenes have weights in range");
            scene.due(&tree, &scene.crowd)
        }
        Turn::Silence => {
            let silent = scene.crowd.len() - 1;
            let mut due = scene.due(&tree, &scene.crowd[..silent]);
            due.push(0.0);
            due
        }
    };
    let reaction = series.reaction(turned_at, &changed);
    // If the shares never get there, the time is infinite, and the report omits it.
    vec![(
        "reaction_ms",
        reaction.map_or(f64::INFINITY, |reaction| reaction.as_secs_f64() * 1e3),
    )]
}

impl Reference {
    /// Records the data for the pictures of a visit.
    fn note(&self, scene: &Scene, side: &str, visit: &Visit) {
        let mut pictures = self.pictures.borrow_mut();
        if scene.victim.is_some() {
            pictures.note_latency(&scene.case, side, &visit.latency);
        }
        if scene.crowd.len() > 1 {
            let due = scene.due(&scene.tree, &scene.crowd);
            pictures.note_shares(&scene.case, side, &due, &visit.series);
        }
    }

    /// Totals as parts of those of the same case without an elevator, in this round.
    fn against_none(&self, case: &str, is_none: bool, totals: Totals) -> Vec<(&'static str, f64)> {
        let mut none = self.none.borrow_mut();
        if is_none {
            none.insert(case.to_owned(), totals);
        }
        let none = none.get(case).copied().unwrap_or(totals);
        vec![
            ("total_vs_none", totals.ios / none.ios.max(1.0)),
            ("bytes_vs_none", totals.bytes / none.bytes.max(1.0)),
        ]
    }

    /// The victim's latency as a part of its latency alone, if there is a victim.
    fn against_alone(&self, case: &str, here: Latency) -> Vec<(&'static str, f64)> {
        let alone = self.alone.borrow();
        let Some(alone) = alone.get(case) else {
            return Vec::new();
        };
        let part = |here: u64, alone: u64| here as f64 / alone.max(1) as f64;
        vec![
            ("victim_p50_vs_alone", part(here.p50_ns, alone.p50_ns)),
            ("victim_p99_vs_alone", part(here.p99_ns, alone.p99_ns)),
            ("victim_p999_vs_alone", part(here.p999_ns, alone.p999_ns)),
        ]
    }

    /// Measures the victim by itself, without an elevator.
    fn measure_alone(&self, scene: &Scene, ground: &Ground, plan: &Plan) -> Result<()> {
        if scene.victim.is_none() {
            return Ok(());
        }
        let alone = scene.victim_alone();
        let visit = play(&alone, ground, sched::NONE, None, plan)?;
        self.alone
            .borrow_mut()
            .insert(scene.case.clone(), Latency::from(&visit.latency));
        Ok(())
    }
}

impl Side {
    /// Its name in the report.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Elevator(kind) => kind.name,
            Self::Caps => "caps",
            Self::Target => "bfq-target",
        }
    }
}

fn side(name: &str) -> Result<Side, String> {
    let found = all_sides().into_iter().find(|side| side.name() == name);
    found.ok_or_else(|| format!("must be one of {}", side_names()))
}

fn side_help() -> String {
    let names = side_names();
    format!("Sides to measure: {names} [default: all but bfq-target; of clients none, bfq]")
}

fn side_names() -> String {
    let names: Vec<&str> = all_sides().into_iter().map(Side::name).collect();
    names.join(", ")
}

fn all_sides() -> Vec<Side> {
    [sides(&[], false), vec![Side::Target]].concat()
}

fn about(ground: &Ground) -> About {
    About {
        question: "how do tenants share a drive?".into(),
        setting: vec![
            ground.medium.description(),
            format!("{} reactor(s), tenants spread over them; a tenant submits again as soon as an I/O has ended; shares are shares of bytes", ground.reactors),
            "caps: no elevator, every tenant, the light one included, capped at its due part of what the drive did with none".into(),
            format!("bfq-target: bfq, and the light tenant's group has a latency target of {} µs", ground.target.0 / 1000),
            "percentiles are the light tenant's where there is one, else the first tenant's; alone: the same tenant by itself, none, in the same round".into(),
        ],
    }
}

fn image_bytes(word: &str) -> Result<u64, String> {
    let bytes = value::size("size", word).map_err(|error| error.to_string())?;
    Some(bytes)
        .filter(|bytes| bytes.is_multiple_of(IMAGE_BYTES_MIN) && *bytes >= IMAGE_BYTES_MIN)
        .ok_or_else(|| "must be a multiple of 16M, as in 1G".into())
}

/// A directory in memory.
const MEMORY: &str = "/dev/shm";
/// Holds some blocks of each tenant when there are as many as allowed.
const IMAGE_BYTES_MIN: u64 = 16 << 20;
const SECONDS_DEFAULT: f64 = 3.0;
const ROUNDS_DEFAULT: u32 = 3;
const SET_UP: Duration = Duration::from_millis(50);
/// Shares are compared with the dues over each window of this length.
const SHARE_WINDOW: Duration = Duration::from_secs(1);
