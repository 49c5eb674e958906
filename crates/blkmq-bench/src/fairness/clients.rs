//! The shares of the drive as clients see them: for each visit a daemon and an fio for each tenant, in
//! processes of their own. The kernel's schedulers, on a loop device over the same files, are measured in the
//! same round.

mod figures;
mod server;
mod table;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use blkmq_core::group::ROOT;
use blkmq_core::sched::{self, ElevatorType};

use self::figures::{Alone, Outcome, may_lack_depth};
use self::server::{Drive, Server};
use super::images::Images;
use super::kernel::Loop;
use super::processes::Visit;
use super::scene::{Load, Scene};
use super::stage::warm_up;
use super::{FairnessArgs, MEMORY, Side, cases, chosen};
use crate::args::{BenchArgs, Plan};
use crate::fio;
use crate::report::{About, Report, Row};
use crate::rounds::{self, Point, Sample};

/// One directory with images, and what lies on them.
struct Ground {
    /// Its name in cases: its filesystem, with a number if it is not the first of that type.
    label: String,
    images: Images,
    kernel: Option<Loop>,
}

/// A scene, and its drive.
struct Case {
    scene: Scene,
    drive: On,
}

/// The kind of drive that a case is about.
#[derive(Clone, Copy, PartialEq, Eq)]
enum On {
    Images,
    /// A disk of another server.
    Nbd,
    /// A modelled drive: null disks with these keys.
    Model(&'static str),
}

/// Who serves the disks, and so schedules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Family {
    Daemon,
    Kernel,
}

/// The data that visits share.
struct Bench {
    server: Server,
    /// Totals of this round without a scheduler, by case and family.
    none: RefCell<BTreeMap<(String, Family), f64>>,
    /// Results of loads alone, and the round in which each was measured.
    alone: RefCell<BTreeMap<(String, Family), (u32, Alone)>>,
}

/// A side of a case, as a visit measures it.
struct Visited<'a> {
    ground: &'a Ground,
    case: &'a Case,
    family: Family,
    kind: &'static ElevatorType,
    /// One for each visit.
    outcomes: RefCell<Vec<Outcome>>,
}

/// Runs the bench and prints its report; progress goes to stderr.
///
/// # Errors
/// If an option is out of range, a directory cannot take the images, the daemon or a client fails,
/// or a result cannot be written.
pub(super) fn main(args: &FairnessArgs) -> Result<()> {
    ensure!(
        fio::is_installed() && fio::has_engine("nbd"),
        "--clients needs fio with its nbd engine: install it"
    );
    let kinds = kinds(&args.side)?;
    let cases = cases_of(args)?;
    let server = Server {
        program: program(args)?,
        reactors: args.reactors.unwrap_or(REACTORS_DEFAULT),
    };
    let grounds = grounds(args, &cases)?;
    let bench = Bench {
        server,
        none: RefCell::default(),
        alone: RefCell::default(),
    };
    let visited = visited(&grounds, &cases, &kinds);
    let plan = plan(&args.common, visited.len())?;
    let about = about(&bench.server, &grounds, &plan);
    let mut report = Report::start("fairness", about, &plan);
    let mut points: Vec<Point<'_>> = visited.iter().map(|visited| visited.point(&bench)).collect();
    let rows = rounds::run(&plan, &mut points)?;
    drop(points);
    let (mut of_cases, mut of_tenants) = (Vec::new(), Vec::new());
    for (mut row, visited) in rows.into_iter().zip(&visited) {
        let outcomes = visited.outcomes.borrow();
        row.figures = figures::of_case(&outcomes);
        of_tenants.extend(figures::of_tenants(&visited.case.scene, &row, &outcomes));
        of_cases.push(row);
    }
    let table = table::draw(&of_cases, &of_tenants);
    let rows: Vec<Row> = of_cases.into_iter().chain(of_tenants).collect();
    report.finish_with(&table, rows, &args.common)
}

/// The requested schedulers, and always `none`, with which the others are compared.
fn kinds(asked: &[Side]) -> Result<Vec<&'static ElevatorType>> {
    let mut kinds = vec![sched::NONE];
    for side in asked {
        match side {
            Side::Elevator(kind) if kinds.contains(kind) => {}
            Side::Elevator(kind) => kinds.push(*kind),
            _ => ensure!(
                false,
                "--side {} rejected with --clients: must be one of {}",
                side.name(),
                sched::Registry::default().names()
            ),
        }
    }
    if asked.is_empty() {
        kinds.push(sched::BFQ);
    }
    Ok(kinds)
}

fn cases_of(args: &FairnessArgs) -> Result<Vec<Case>> {
    let over_nbd = cases::over_nbd();
    let mut scenes = cases::of_clients();
    scenes.push(over_nbd.clone());
    let models = cases::on_models();
    scenes.extend(models.iter().map(|(scene, _)| scene.clone()));
    if args.common.quick && args.only.is_empty() {
        scenes.truncate(1);
    }
    let case = |scene: Scene| {
        let model = models.iter().find(|(model, _)| model.case == scene.case);
        let drive = match model {
            Some((_, keys)) => On::Model(keys),
            None if scene.case == over_nbd.case => On::Nbd,
            None => On::Images,
        };
        Case { scene, drive }
    };
    Ok(chosen(args, scenes)?.into_iter().map(case).collect())
}

/// The directories, with images for the largest case and, if requested and possible, a loop device
/// on the first.
fn grounds(args: &FairnessArgs, cases: &[Case]) -> Result<Vec<Ground>> {
    let needed = |case: &Case| match case.drive {
        On::Images => case.scene.tenants().len(),
        On::Nbd | On::Model(_) => 1,
    };
    let count = cases.iter().map(needed).max().unwrap_or(1);
    let mut grounds: Vec<Ground> = Vec::new();
    for dir in dirs(&args.dir) {
        let mut images = Images::in_dir(&dir, args.size)?;
        images.fill(count)?;
        let same = grounds
            .iter()
            .filter(|other| other.images.filesystem() == images.filesystem());
        let label = match same.count() {
            0 => images.filesystem().to_owned(),
            others => format!("{}-{}", images.filesystem(), others + 1),
        };
        let kernel = args.kernel.then(|| Loop::set_up(&images.path(0)));
        let kernel = kernel.and_then(|kernel| match kernel {
            Ok(kernel) => Some(kernel),
            Err(error) => {
                eprintln!("SKIPPED the kernel's sides on {label}: {error:#}");
                None
            }
        });
        grounds.push(Ground {
            label,
            images,
            kernel,
        });
    }
    Ok(grounds)
}

/// The requested directories; by default the current one, and one in memory if that is another
/// filesystem.
fn dirs(asked: &[PathBuf]) -> Vec<PathBuf> {
    if !asked.is_empty() {
        return asked.to_vec();
    }
    let device = |dir: &Path| std::fs::metadata(dir).ok().map(|meta| meta.dev());
    let (here, memory) = (PathBuf::from("."), PathBuf::from(MEMORY));
    match device(&memory) {
        None => {
            eprintln!("SKIPPED the cases in memory: there is no {MEMORY}");
            vec![here]
        }
        there if there == device(&here) => vec![here],
        _ => vec![here, memory],
    }
}

fn program(args: &FairnessArgs) -> Result<PathBuf> {
    match &args.server {
        Some(program) => program
            .canonicalize()
            .with_context(|| format!("--server {} rejected", program.display())),
        None => crate::server::daemon(),
    }
}

fn plan(common: &BenchArgs, visits: usize) -> Result<Plan> {
    let mut common = common.clone();
    if !common.quick {
        common.seconds.get_or_insert(super::SECONDS_DEFAULT);
        common.rounds.get_or_insert(super::ROUNDS_DEFAULT);
    }
    // The warm-up of tenants takes at most as long as their measurement; some visits are of one
    // tenant alone.
    common.plan(3 * visits, SET_UP)
}

/// All visits of a round, the sides of a case one after the other.
fn visited<'a>(
    grounds: &'a [Ground],
    cases: &'a [Case],
    kinds: &[&'static ElevatorType],
) -> Vec<Visited<'a>> {
    let mut visited = Vec::new();
    for (place, ground) in grounds.iter().enumerate() {
        for case in cases {
            if place > 0 && matches!(case.drive, On::Model(_)) {
                continue;
            }
            for &kind in kinds {
                let families = [
                    Some(Family::Daemon),
                    (ground.kernel.is_some() && case.drive == On::Images).then_some(Family::Kernel),
                ];
                visited.extend(families.into_iter().flatten().map(|family| Visited {
                    ground,
                    case,
                    family,
                    kind,
                    outcomes: RefCell::default(),
                }));
            }
        }
    }
    visited
}

impl Visited<'_> {
    fn point<'a>(&'a self, bench: &'a Bench) -> Point<'a> {
        let mut round = 0;
        Point {
            case: self.name(),
            side: match self.family {
                Family::Daemon => self.kind.name.into(),
                Family::Kernel => format!("kernel-{}", self.kind),
            },
            measure: Box::new(move |plan| {
                round += 1;
                self.measure(bench, round, plan)
            }),
        }
    }

    fn name(&self) -> String {
        match self.case.drive {
            On::Model(_) => self.case.scene.case.clone(),
            _ => format!("{}/{}", self.ground.label, self.case.scene.case),
        }
    }

    fn measure(&self, bench: &Bench, round: u32, plan: &Plan) -> Result<Sample> {
        let scene = &self.case.scene;
        let alone = scene.tenants().into_iter().zip(may_lack_depth(scene));
        let alone = alone.map(|(tenant, is_asked)| {
            is_asked
                .then(|| self.alone(bench, tenant.load, round, plan))
                .transpose()
        });
        let alone = alone.collect::<Result<Vec<_>>>()?;
        let visit = self.play(bench, scene, self.kind, plan)?;
        let key = (self.name(), self.family);
        let none = self
            .kind
            .is_some()
            .then(|| bench.none.borrow().get(&key).copied());
        let none = none.flatten();
        let outcome = Outcome::new(scene, &visit, none, &alone);
        if self.kind == sched::NONE {
            bench.none.borrow_mut().insert(key, outcome.total);
        }
        self.outcomes.borrow_mut().push(outcome);
        Ok(visit.total(scene))
    }

    /// The result of a load alone, without a scheduler; it is measured once in a round, whichever
    /// cases need it.
    fn alone(&self, bench: &Bench, load: Load, round: u32, plan: &Plan) -> Result<Alone> {
        let drive = match self.case.drive {
            On::Images => "",
            On::Nbd => "nbd/",
            On::Model(keys) => keys,
        };
        let key = (format!("{}/{drive}{load}", self.ground.label), self.family);
        let known = bench.alone.borrow().get(&key).copied();
        if let Some((_, alone)) = known.filter(|(found, _)| *found == round) {
            return Ok(alone);
        }
        let scene = Scene::new(format!("{load} alone")).tenant(ROOT, 100, load);
        let visit = self
            .play(bench, &scene, sched::NONE, plan)
            .with_context(|| scene.case.clone())?;
        let alone = Alone {
            bytes: visit.series.rates().iter().sum(),
            latency: visit.samples[0].latency,
        };
        bench.alone.borrow_mut().insert(key, (round, alone));
        Ok(alone)
    }

    fn play(&self, bench: &Bench, scene: &Scene, kind: &'static ElevatorType, plan: &Plan) -> Result<Visit> {
        let images = &self.ground.images;
        match (self.family, &self.ground.kernel) {
            (Family::Kernel, Some(kernel)) => kernel.play(scene, kind.name, plan),
            _ => {
                let drive = match self.case.drive {
                    On::Images => Drive::Images(images),
                    On::Nbd => Drive::Nbd(images),
                    On::Model(keys) => Drive::Model(keys),
                };
                bench.server.play(scene, kind, &drive, plan)
            }
        }
    }
}

fn about(server: &Server, grounds: &[Ground], plan: &Plan) -> About {
    let mut setting: Vec<String> = grounds
        .iter()
        .map(|ground| {
            let direct = if ground.images.is_direct() {
                "past"
            } else {
                "through"
            };
            format!(
                "{}: {}, {direct} the page cache",
                ground.label,
                ground.images.description()
            )
        })
        .collect();
    setting.extend([
        format!(
            "blkmq serve, {} reactor(s), afresh for each visit: one queue, one unix socket, a disk and a group for each tenant; an fio each, nbd engine",
            server.reactors
        ),
        "kernel-…: the kernel's scheduler on a loop device over the first file, direct I/O, a control group and an fio with io_uring each".into(),
        format!(
            "tenants run for {} ms before; shares are of bytes, over the time in which all are measured; worst: of all visits",
            warm_up(plan).as_millis()
        ),
        "of alone: of what the same tenant has by itself with none in this round, where it may have too little under way for its due; \
         alone of due: below 1 it cannot have its due".into(),
        "of none: of the same family without a scheduler in this round; CPU/IO: of the daemon, or of the kernel's clients".into(),
    ]);
    About {
        question: "how do tenants share a drive, as clients see it?".into(),
        setting,
    }
}

const REACTORS_DEFAULT: u16 = 2;
/// Time to start and end a daemon and its clients.
const SET_UP: Duration = Duration::from_millis(800);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn none_is_always_measured_and_bfq_unless_others_are_asked_for() {
        assert_eq!(kinds(&[]).unwrap(), [sched::NONE, sched::BFQ]);
        let asked = [Side::Elevator(sched::KYBER), Side::Elevator(sched::NONE)];
        assert_eq!(kinds(&asked).unwrap(), [sched::NONE, sched::KYBER]);
        let error = kinds(&[Side::Caps]).unwrap_err().to_string();
        assert!(
            error.contains("--side caps rejected with --clients: must be one of none, mq-deadline"),
            "{error}"
        );
    }
}
