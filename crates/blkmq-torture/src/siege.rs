//! The siege, which checks what a hostile client may cost others: which attack ([`attack`]) on which daemon
//! ([`scene`]), in which order, with a quiet window before each; and what is checked of a tenant on the same
//! daemon ([`tenant`]) and of the resources that the daemon uses and gives back ([`vitals`]).

pub mod attack;
pub mod latency;
pub mod scene;
pub mod tenant;
pub mod vitals;
mod wire;

use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::history::History;
use crate::medium::SECTOR_BYTES;
use anyhow::{Context, Result, anyhow, bail, ensure};
use blkmq_testkit::{Random, p99};

use crate::siege::attack::{Attack, LOADED_MAX, THREADS, Tally};
use crate::siege::latency::{Latencies, Pair, ms};
use crate::siege::scene::{END_TIME_MAX, Scene, Setting, Target, Unavailable};
use crate::siege::tenant::{GOOD_BYTES, LET_IN_TIME_MAX, Tenant, Visitor, Visits};
use crate::siege::vitals::{Allowance, Resources};

/// The options of a siege.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The daemon's program.
    pub program: PathBuf,
    /// How long the windows take together; starting daemons and waiting for released resources are
    /// not included.
    pub time: Duration,
    /// Seed of the order of the attacks and of their random choices. How much each attack does
    /// depends on the machine.
    pub seed: u64,
    /// Only this attack, by name.
    pub attack: Option<String>,
    /// Only this setting, by name.
    pub setting: Option<String>,
    /// Report p99s of attacks and visits, but judge only the typical p99 of all: the windows are too short, or the machine is too
    /// busy. The longest wait is judged all the same.
    pub is_lenient: bool,
}

/// The result of a siege.
#[derive(Debug, Default)]
pub struct Report {
    latencies: Latencies,
    phases: usize,
    daemons: u64,
    done: u64,
    visits: u64,
    longest_visit: Duration,
    /// The tenant's slowest request during an attack.
    slowest: Duration,
    /// What was skipped, and why.
    skipped: Vec<String>,
}

/// Runs a siege.
///
/// # Errors
/// The first check that fails, with the phase.
pub fn run(plan: &Plan) -> Result<Report> {
    let (attacks, settings) = (plan.attacks()?, plan.settings()?);
    let scene = Scene::new(&plan.program)?;
    let mut report = Report::default();
    if let Some(why) = &scene.no_mounts {
        report
            .skipped
            .push(format!("attacks full, slow and late: no FUSE: {why}"));
    }
    let (rounds, window) = plan.rounds(attacks.len());
    let mut siege = Siege {
        scene: &scene,
        random: Random::new(plan.seed),
        history: Some(History::new(GOOD_BYTES / SECTOR_BYTES)),
        report,
        window,
        is_lenient: plan.is_lenient,
    };
    for round in 0..rounds {
        let mut order = attacks.clone();
        siege.shuffle(&mut order);
        for (number, setting) in settings.iter().enumerate() {
            let is_mine = |index: &usize| (index + round) % settings.len() == number;
            let mine = (0..order.len()).filter(is_mine).map(|index| order[index]);
            siege.attack_daemon(*setting, &mine.collect::<Vec<_>>())?;
        }
    }
    let report = siege.report;
    let typical = report.latencies.typical().unwrap_or_default();
    ensure!(
        typical <= TYPICAL_MAX,
        "the tenant's p99 was {:.0} ms in half of the windows, where {} are allowed\n{report}",
        ms(typical),
        TYPICAL_MAX.as_millis()
    );
    let too_long = report.latencies.too_long();
    ensure!(
        plan.is_lenient || too_long.is_empty(),
        "the tenant waited too long beside: {}\n{report}",
        too_long.join(", ")
    );
    Ok(report)
}

/// A siege under way.
struct Siege<'a> {
    scene: &'a Scene,
    random: Random,
    /// What the tenant's disk must hold; none while a tenant has it.
    history: Option<History>,
    report: Report,
    /// How long an attack takes; the quiet window before it takes half of that.
    window: Duration,
    is_lenient: bool,
}

/// The most that the daemon used of each resource in a window.
#[derive(Clone, Copy, Debug, Default)]
struct Peak {
    descriptors: usize,
    resident_bytes: u64,
}

impl Siege<'_> {
    /// Starts one daemon, runs several attacks on it, and ends it.
    fn attack_daemon(&mut self, setting: Setting, attacks: &[Attack]) -> Result<()> {
        if attacks.is_empty() {
            return Ok(());
        }
        let mut target = match self.scene.start(setting) {
            Ok(target) => target,
            Err(error) if error.is::<Unavailable>() => {
                self.report.skip(format!("setting {}: {error}", setting.name()));
                return Ok(());
            }
            Err(error) => return Err(error.context(format!("setting {}", setting.name()))),
        };
        self.report.daemons += 1;
        let result = self.attack_all(setting, &target, attacks);
        result.with_context(|| format!("the daemon said:\n{}", self.last_words(setting, &target)))?;
        self.end(setting, &mut target).with_context(|| {
            format!(
                "at the end of a daemon in setting {}; it said:\n{}",
                setting.name(),
                self.last_words(setting, &target)
            )
        })
    }

    fn attack_all(&mut self, setting: Setting, target: &Target, attacks: &[Attack]) -> Result<()> {
        let socket = target.daemon.socket();
        let visitor = Visitor::new(socket)?;
        let history = self.history.take().expect("no other tenant");
        let mut tenant = Tenant::start(socket, history, self.random.draw())?;
        visitor.visit(Instant::now(), false)?;
        self.scene.site(target).warm_up();
        thread::sleep(WARM_UP);
        let allowance = Allowance::new(target.daemon.pid(), target.nbd_memory)?;
        for attack in attacks {
            self.report.phases += 1;
            let number = self.report.phases;
            let phase = format!("phase {number}, {} on {}", attack.name(), setting.name());
            let seed = self.random.draw();
            self.phase(target, *attack, &phase, seed, (&mut tenant, &visitor, &allowance))
                .context(phase)?;
        }
        self.history = Some(tenant.finish()?);
        Ok(())
    }

    fn phase(
        &mut self,
        target: &Target,
        attack: Attack,
        phase: &str,
        seed: u64,
        (tenant, visitor, allowance): (&mut Tenant, &Visitor, &Allowance),
    ) -> Result<()> {
        if attack.needs_mounts() && self.scene.no_mounts.is_some() {
            return Ok(());
        }
        tenant.take_latencies()?;
        let (quiet, ..) = self.window(target, None, seed, visitor)?;
        let alone = tenant.take_latencies()?;
        let (tally, visits, peak) = self.window(target, Some(attack), seed, visitor)?;
        let beside = tenant.take_latencies()?;
        debug_assert_eq!(quiet.done, 0, "an attack in a quiet window");
        ensure!(tally.done > 0, "the attack did nothing, so this proves nothing");
        let connections = peak.descriptors.saturating_sub(allowance.before().descriptors) as u64 + SPARE;
        let resident_max = allowance.resident_max(connections, LOADED_MAX);
        ensure!(
            peak.resident_bytes <= resident_max,
            "the daemon took {} MiB beside about {connections} connections, where its documents say {} at most",
            peak.resident_bytes >> 20,
            resident_max >> 20
        );
        ensure!(
            self.is_lenient || !attack.is_timed() || visits.longest <= LET_IN_TIME_MAX,
            "a visitor was let in and had checked everything after {:.0} ms",
            ms(visits.longest)
        );
        allowance.wait_given_back()?;
        let slowest = beside.iter().copied().max().unwrap_or_default();
        ensure!(
            !attack.is_timed() || slowest <= WAIT_MAX,
            "a request of the tenant took {:.0} ms, where {} are allowed",
            ms(slowest),
            WAIT_MAX.as_millis()
        );
        let pair = Pair {
            alone: p99(alone),
            beside: p99(beside),
            allowance: attack.latency_allowance(),
        };
        println!(
            "  {phase}: {} done, {} failed; p99 {:.2} ms, alone {:.2} ms, slowest {:.1} ms; {} visits ({} refused), longest {:.0} ms; {} MiB of {}, {} descriptors",
            tally.done,
            tally.failed,
            ms(pair.beside),
            ms(pair.alone),
            ms(slowest),
            visits.count,
            visits.refused,
            ms(visits.longest),
            peak.resident_bytes >> 20,
            resident_max >> 20,
            peak.descriptors,
        );
        let report = &mut self.report;
        report.done += tally.done;
        report.visits += visits.count;
        if attack.is_timed() {
            report.latencies.note(attack.name(), pair);
            report.slowest = report.slowest.max(slowest);
            report.longest_visit = report.longest_visit.max(visits.longest);
        }
        Ok(())
    }

    /// Has a visitor connect repeatedly for a window, with an attack or without.
    fn window(
        &self,
        target: &Target,
        attack: Option<Attack>,
        seed: u64,
        visitor: &Visitor,
    ) -> Result<(Tally, Visits, Peak)> {
        let time = if attack.is_some() {
            self.window
        } else {
            self.window / 2
        };
        let end = Instant::now() + time;
        let site = self.scene.site(target);
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            let site = &site;
            let attackers: Vec<_> = attack
                .into_iter()
                .flat_map(|attack| (0..attack.threads()).map(move |thread| (attack, thread)))
                .map(|(attack, thread)| {
                    scope.spawn(move || {
                        // The attackers' own computation must not slow the tenant down.
                        let _ = rustix::process::nice(19);
                        attack.run(site, &mut Random::new(seed ^ thread), end)
                    })
                })
                .collect();
            let looking = scope.spawn(|| {
                let _ = rustix::process::nice(19);
                look(target, &is_over)
            });
            let may_be_refused = attack.is_some_and(|attack| !attack.is_timed());
            let visits = visitor.visit(end, may_be_refused);
            let mut tally = Tally::default();
            let mut failed = None;
            for attacker in attackers {
                match attacker.join().map_err(|_| anyhow!("an attacker has panicked")) {
                    Ok(Ok(more)) => tally.add(&more),
                    Ok(Err(error)) | Err(error) => failed = Some(error),
                }
            }
            // Relaxed: nothing else is published with it.
            is_over.store(true, Ordering::Relaxed);
            let peak = looking
                .join()
                .map_err(|_| anyhow!("looking at the daemon has panicked"))?;
            match failed {
                Some(error) => Err(error),
                None => Ok((tally, visits?, peak?)),
            }
        })
    }

    /// Ends the daemon in order.
    fn end(&self, setting: Setting, target: &mut Target) -> Result<()> {
        if setting != Setting::LogFull && setting != Setting::LogUnread {
            let log = target.log()?;
            ensure!(!log.contains(PANICKED), "a thread of the daemon panicked");
        }
        let Some(status) = target.daemon.terminate(END_TIME_MAX) else {
            bail!("it does not end within {END_TIME_MAX:?} of SIGTERM");
        };
        ensure!(status.success(), "it ended with {status} after SIGTERM");
        let log = target.log()?;
        ensure!(!log.contains(PANICKED), "a thread of the daemon panicked");
        Ok(())
    }

    fn last_words(&self, setting: Setting, target: &Target) -> String {
        match setting {
            Setting::LogFull => "nothing that could be written".to_owned(),
            Setting::LogUnread => "nothing that anybody read".to_owned(),
            _ => target.last_words(),
        }
    }

    fn shuffle(&mut self, attacks: &mut [Attack]) {
        for index in (1..attacks.len()).rev() {
            attacks.swap(index, self.random.below(index as u64 + 1) as usize);
        }
    }
}

/// Samples the daemon's resources until the window is over.
fn look(target: &Target, is_over: &AtomicBool) -> Result<Peak> {
    let mut peak = Peak::default();
    // Relaxed, as where it is set.
    while !is_over.load(Ordering::Relaxed) {
        let held = Resources::by(target.daemon.pid())?;
        peak.descriptors = peak.descriptors.max(held.descriptors);
        peak.resident_bytes = peak.resident_bytes.max(held.resident_bytes);
        thread::sleep(LOOK_INTERVAL);
    }
    Ok(peak)
}

impl Plan {
    fn attacks(&self) -> Result<Vec<Attack>> {
        let is_wanted = |attack: &Attack| self.attack.as_ref().is_none_or(|name| name == attack.name());
        let attacks: Vec<_> = Attack::ALL.into_iter().filter(is_wanted).collect();
        let names = Attack::ALL.map(Attack::name).join(", ");
        ensure!(!attacks.is_empty(), "there is no such attack; there are {names}");
        Ok(attacks)
    }

    fn settings(&self) -> Result<Vec<Setting>> {
        let is_wanted = |setting: &Setting| self.setting.as_ref().is_none_or(|name| name == setting.name());
        let settings: Vec<_> = Setting::ALL.into_iter().filter(is_wanted).collect();
        let names = Setting::ALL.map(Setting::name).join(", ");
        ensure!(
            !settings.is_empty(),
            "there is no such setting; there are {names}"
        );
        Ok(settings)
    }

    /// Returns how many times all attacks are run, each on one setting, and how long one takes: no
    /// longer than a p99 needs, and never too short for anything to happen.
    fn rounds(&self, attacks: usize) -> (usize, Duration) {
        let each = WINDOW * 3 / 2;
        let rounds = (self.time.as_secs_f64() / (each.as_secs_f64() * attacks as f64)).round() as usize;
        let rounds = rounds.max(1);
        let window = self.time / (rounds * attacks) as u32 * 2 / 3;
        (rounds, window.max(WINDOW_MIN))
    }
}

impl Report {
    fn skip(&mut self, what: String) {
        if !self.skipped.contains(&what) {
            self.skipped.push(what);
        }
    }

    /// Returns what was skipped, and why.
    pub fn skipped(&self) -> &[String] {
        &self.skipped
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.latencies)?;
        write!(
            f,
            "{} phases on {} daemons: {} things done to them; the tenant saw no error and no wrong byte, and its slowest request took {:.1} ms; \
             {} visitors were let in, within {:.0} ms",
            self.phases,
            self.daemons,
            self.done,
            ms(self.slowest),
            self.visits,
            ms(self.longest_visit),
        )
    }
}

impl Attack {
    /// Threads of this attack.
    fn threads(self) -> u64 {
        if self == Self::Pause { 1 } else { THREADS }
    }
}

/// The longest that a request of the tenant may take in any siege: attacks that make it wait make it
/// wait longer, and a busy machine does not.
const WAIT_MAX: Duration = Duration::from_millis(400);
/// The longest median of the p99s of all windows, in any siege: a busy machine has windows that are longer, but not most of
/// them. A daemon that has everybody wait, also without an attack, is told by nothing else.
const TYPICAL_MAX: Duration = Duration::from_millis(50);
/// How long an attack lasts if there is time.
const WINDOW: Duration = Duration::from_millis(2600);
const WINDOW_MIN: Duration = Duration::from_millis(400);
const WARM_UP: Duration = Duration::from_millis(400);
const LOOK_INTERVAL: Duration = Duration::from_millis(50);
/// Connections that may open and close between two samples.
const SPARE: u64 = 16;
/// In the message of a panic.
const PANICKED: &str = "panicked at";
