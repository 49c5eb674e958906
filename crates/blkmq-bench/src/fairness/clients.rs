//! The shares of the drive as clients see them: for each visit a daemon and a client for each tenant, in
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
use blkmq_core::sched;

use self::figures::{Alone, Outcome, Reference, Totals, may_lack_depth};
use self::server::{Drive, Schedule, Server, images_of, part};
use super::images::Images;
use super::kernel::Loop;
use super::processes::Visit;
use super::scene::{Load, Scene};
use super::stage::{CAP_MIN, warm_up};
use super::{Client, Door, FairnessArgs, MEMORY, Side, cases, with_defaults};
use crate::args::{BenchArgs, Plan};
use crate::fio;
use crate::report::{About, Report, Row};
use crate::rounds::{self, Point, Sample};

/// One directory with images, and what lies on them.
struct Ground {
    /// Its name in cases: its filesystem, with a number if it is not the first of that type.
    label: String,
    images: Images,
    /// All tenants are on the first image, for the sake of the kernel's sides.
    has_one: bool,
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
    none: RefCell<BTreeMap<(String, Family), Totals>>,
    /// Results of loads alone, and the round in which each was measured.
    alone: RefCell<BTreeMap<(String, Family), (u32, Alone)>>,
}

/// A side of a case, as a visit measures it.
struct Visited<'a> {
    ground: &'a Ground,
    case: &'a Case,
    family: Family,
    side: Side,
    /// One for each visit.
    outcomes: RefCell<Vec<Outcome>>,
}

/// Runs the bench and prints its report; progress goes to stderr.
///
/// # Errors
/// If an option is out of range, a directory cannot take the images, the daemon or a client fails,
/// or a result cannot be written.
pub(super) fn main(args: &FairnessArgs) -> Result<()> {
    let client = client(args)?;
    let sides = sides(&args.side)?;
    let cases = cases_of(args)?;
    let server = Server {
        program: program(args)?,
        reactors: args.reactors.unwrap_or(REACTORS_DEFAULT),
        door: args.door,
        client,
    };
    let grounds = grounds(args, &cases)?;
    let bench = Bench {
        server,
        none: RefCell::default(),
        alone: RefCell::default(),
    };
    let visited = visited(&grounds, &cases, &sides, &args.only);
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
        row.by_round.extend(figures::rounds_of_case(&outcomes));
        of_tenants.extend(figures::of_tenants(&visited.case.scene, &row, &outcomes));
        of_cases.push(row);
    }
    let table = table::draw(&of_cases, &of_tenants);
    let rows: Vec<Row> = of_cases.into_iter().chain(of_tenants).collect();
    report.finish_with(&table, rows, &args.common)
}

/// The clients' program.
///
/// # Errors
/// If it cannot be used here.
fn client(args: &FairnessArgs) -> Result<Client> {
    let by_default = match args.door {
        Door::Nbd => Client::Fio,
        Door::VhostUser => Client::Own,
    };
    let client = args.client.unwrap_or(by_default);
    ensure!(
        client == Client::Own || args.door == Door::Nbd,
        "--client fio rejected with --door vhost-user: fio has no engine for it; leave --client out"
    );
    ensure!(
        client == Client::Own || fio::is_installed() && fio::has_engine("nbd"),
        "--clients needs fio with its nbd engine: install it, or add --client own"
    );
    Ok(client)
}

/// The requested sides, after `none`, with which the others are compared and from which caps are known.
fn sides(asked: &[Side]) -> Result<Vec<Side>> {
    let none = Side::Elevator(sched::NONE);
    let mut sides = vec![none];
    for &side in asked {
        ensure!(
            side != Side::Target,
            "--side {} rejected with --clients: must be one of caps, {}",
            side.name(),
            sched::Registry::default().names()
        );
        if !sides.contains(&side) {
            sides.push(side);
        }
    }
    if asked.is_empty() {
        sides.push(Side::Elevator(sched::BFQ));
    }
    Ok(sides)
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
    let labels: Vec<String> = (dirs(args).iter())
        .map(|dir| Ok(Images::in_dirs(dir, args.size)?.filesystem().to_owned()))
        .collect::<Result<_>>()?;
    let scenes = match args.case.is_empty() {
        true => scenes,
        false => args.case.clone(),
    };
    let case = |scene: Scene| {
        let model = models.iter().find(|(model, _)| model.case == scene.case);
        let drive = match model {
            Some((_, keys)) => On::Model(keys),
            None if scene.case == over_nbd.case => On::Nbd,
            None => On::Images,
        };
        Case { scene, drive }
    };
    let mut cases: Vec<Case> = scenes.into_iter().map(case).collect();
    cases.retain(|case| labels.iter().any(|label| case.name(label).contains(&args.only)));
    ensure!(
        !cases.is_empty(),
        "--only {}: no case has that in its name",
        args.only
    );
    Ok(cases)
}

impl Case {
    /// Its name in the report, on the images of a ground.
    fn name(&self, label: &str) -> String {
        match self.drive {
            On::Model(_) => self.scene.case.clone(),
            _ => format!("{label}/{}", self.scene.case),
        }
    }
}

/// The directories, with images for the largest case and, if requested and possible, a loop device
/// on the first.
fn grounds(args: &FairnessArgs, cases: &[Case]) -> Result<Vec<Ground>> {
    let needed = |case: &Case| match case.drive {
        // A drive is not equally fast everywhere, so the kernel's tenants and the daemon's have one file.
        On::Images if !args.kernel => images_of(&case.scene),
        On::Images | On::Nbd | On::Model(_) => 1,
    };
    let count = cases.iter().map(needed).max().unwrap_or(1);
    let mut grounds: Vec<Ground> = Vec::new();
    for dirs in dirs(args) {
        let mut images = Images::in_dirs(&dirs, args.size)?;
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
            has_one: args.kernel,
            kernel,
        });
    }
    Ok(grounds)
}

/// The requested directories, those together whose images share a drive; by default the current one, and one in memory if
/// that is another filesystem.
fn dirs(args: &FairnessArgs) -> Vec<Vec<PathBuf>> {
    let each = |dirs: Vec<PathBuf>| dirs.into_iter().map(|dir| vec![dir]).collect();
    match args.dir.is_empty() {
        true => each(default_dirs()),
        false if args.in_turn => vec![args.dir.clone()],
        false => each(args.dir.clone()),
    }
}

fn default_dirs() -> Vec<PathBuf> {
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
    // The warm-up of tenants takes at most as long as their measurement; some visits are of one
    // tenant alone.
    with_defaults(common).plan(3 * visits, SET_UP)
}

/// All visits of a round, the sides of a case one after the other.
fn visited<'a>(grounds: &'a [Ground], cases: &'a [Case], sides: &[Side], only: &str) -> Vec<Visited<'a>> {
    let mut visited = Vec::new();
    for (place, ground) in grounds.iter().enumerate() {
        for case in cases {
            let is_again = place > 0 && matches!(case.drive, On::Model(_));
            if is_again || !case.name(&ground.label).contains(only) {
                continue;
            }
            let can_bind = |side: &&Side| **side != Side::Caps || case.scene.caps_can_bind();
            for &side in sides.iter().filter(can_bind) {
                let is_kernels = matches!(side, Side::Elevator(_)) && ground.kernel.is_some();
                let families = [
                    Some(Family::Daemon),
                    (is_kernels && case.drive == On::Images).then_some(Family::Kernel),
                ];
                visited.extend(families.into_iter().flatten().map(|family| Visited {
                    ground,
                    case,
                    family,
                    side,
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
                Family::Daemon => self.side.name().into(),
                Family::Kernel => format!("kernel-{}", self.side.name()),
            },
            measure: Box::new(move |plan| {
                round += 1;
                self.measure(bench, round, plan)
            }),
        }
    }

    fn name(&self) -> String {
        self.case.name(&self.ground.label)
    }

    fn measure(&self, bench: &Bench, round: u32, plan: &Plan) -> Result<Sample> {
        let scene = &self.case.scene;
        let light = scene.light_places();
        let alone = (0..).zip(scene.tenants()).zip(may_lack_depth(scene));
        let alone = alone.map(|((place, tenant), is_asked)| {
            (is_asked || light.contains(&place))
                .then(|| self.alone(bench, tenant.load, round, plan))
                .transpose()
        });
        let alone = alone.collect::<Result<Vec<_>>>()?;
        let key = (self.name(), self.family);
        let is_none = self.side == Side::Elevator(sched::NONE);
        let none = bench.none.borrow().get(&key).copied().filter(|_| !is_none);
        let reference = Reference {
            none,
            alone,
            flood_request: self.flood_request(bench, round, plan)?,
        };
        let visit = self.play(bench, scene, self.side, none, plan)?;
        let outcome = Outcome::new(scene, &visit, &reference);
        if is_none {
            bench.none.borrow_mut().insert(key, outcome.totals);
        }
        self.outcomes.borrow_mut().push(outcome);
        Ok(visit.total(scene))
    }

    /// What one request of the floods takes by itself, of the slowest of them, if there are light tenants beside.
    fn flood_request(&self, bench: &Bench, round: u32, plan: &Plan) -> Result<Option<Duration>> {
        let scene = &self.case.scene;
        let light = scene.light_places();
        let mut longest = None;
        for (place, tenant) in scene.tenants().iter().enumerate() {
            if !light.is_empty() && !light.contains(&place) {
                let alone = self.alone(bench, tenant.load.one_at_a_time(), round, plan)?;
                longest = longest.max(Some(Duration::from_nanos(alone.latency.p50_ns)));
            }
        }
        Ok(longest)
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
            .play(bench, &scene, Side::Elevator(sched::NONE), None, plan)
            .with_context(|| scene.case.clone())?;
        let alone = Alone {
            bytes: visit.series.rates().iter().sum(),
            latency: visit.samples[0].latency,
        };
        bench.alone.borrow_mut().insert(key, (round, alone));
        Ok(alone)
    }

    fn play(
        &self,
        bench: &Bench,
        scene: &Scene,
        side: Side,
        none: Option<Totals>,
        plan: &Plan,
    ) -> Result<Visit> {
        let images = &self.ground.images;
        let schedule = match side {
            Side::Elevator(kind) => Schedule { kind, caps: None },
            Side::Caps | Side::Target => Schedule {
                kind: sched::NONE,
                caps: none.map(|none| caps(scene, none)),
            },
        };
        match (self.family, &self.ground.kernel) {
            (Family::Kernel, Some(kernel)) => {
                let part = part(images.each_bytes(), scene.tenants().len());
                kernel.play(scene, schedule.kind.name, Some(part), plan)
            }
            _ => {
                let drive = match self.case.drive {
                    On::Images if self.ground.has_one => Drive::Parts(images),
                    On::Images => Drive::Images(images),
                    On::Nbd => Drive::Nbd(images),
                    On::Model(keys) => Drive::Model(keys),
                };
                bench.server.play(scene, &schedule, &drive, plan)
            }
        }
    }
}

/// The due part of each tenant, light ones included, of what all had without a scheduler, in bytes per second.
fn caps(scene: &Scene, none: Totals) -> Vec<u64> {
    let due = scene.due(&scene.tree, &scene.tenants());
    due.iter()
        .map(|due| (none.all * due).max(CAP_MIN) as u64)
        .collect()
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
            "blkmq serve, {} reactor(s), afresh for each visit: one queue, a disk and a group for each tenant; {} each",
            server.reactors,
            match (server.client, server.door) {
                (Client::Fio, _) => "fio's nbd engine",
                (Client::Own, Door::Nbd) => "a client of blkmq-lab, over NBD,",
                (Client::Own, Door::VhostUser) => "a client of blkmq-lab, over vhost-user-blk,",
            }
        ),
        "caps: no scheduler, each tenant capped at its due part of what all had with none in this round".into(),
        "kernel-…: the kernel's scheduler on a loop device over the file, direct I/O, a control group and an fio with io_uring each; \
         with these sides, tenants of all sides have equal parts of one file"
            .into(),
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
    fn none_is_always_measured_first_and_bfq_unless_others_are_asked_for() {
        let none = Side::Elevator(sched::NONE);
        assert_eq!(sides(&[]).unwrap(), [none, Side::Elevator(sched::BFQ)]);
        let asked = [Side::Caps, Side::Elevator(sched::KYBER), none];
        assert_eq!(
            sides(&asked).unwrap(),
            [none, Side::Caps, Side::Elevator(sched::KYBER)]
        );
        let error = sides(&[Side::Target]).unwrap_err().to_string();
        assert!(
            error.contains(
                "--side bfq-target rejected with --clients: must be one of caps, none, mq-deadline"
            ),
            "{error}"
        );
    }

    #[test]
    fn each_tenant_is_capped_at_its_due_part_of_none() {
        let scene = super::super::spec::parse("1:64:64k,3:4:64k").unwrap();
        let none = Totals {
            all: 400e6,
            floods: 400e6,
        };
        assert_eq!(caps(&scene, none), [100_000_000, 300_000_000]);
        assert_eq!(
            caps(
                &scene,
                Totals {
                    all: 1e6,
                    floods: 1e6
                }
            ),
            [1 << 20; 2]
        );
    }
}
