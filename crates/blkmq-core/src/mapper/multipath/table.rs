//! The table of paths: which are usable, which group of them is the current one, and what happens to
//! requests while none is usable. `shared` keeps it behind a lock; this is the state and its transitions,
//! with time as an argument.
//!
//! ```text
//!            a request or a probe fails             fail (message)
//!   Active ─────────────────────────────► Failed ─────────────────► Disabled
//!     ▲  └──────────────── fail (message) ────────────────────────────▲ │
//!     └──── a probe succeeds, or reinstate (message) ◄──── Failed       │
//!     └──── reinstate (message) ◄───────────────────────────────────────┘      remove (message): any ─► Leaving ─► gone
//! ```
//!
//! A path that fails soon after its return is on probation: it is active, and used only while no other is.

use crate::bio::Status;
use crate::time::{Instant, Nanos};

use super::detour::Detours;
use super::{Config, PATHS_MAX, PathId, Selector, paths_in};

/// When a higher-priority group with a path that is back is returned to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Failback {
    /// At once.
    #[default]
    Immediate,
    /// By message only, or when the current group has no usable path left.
    Manual,
    /// This long after one of its paths came back, if that path is still usable.
    After(Nanos),
}

/// What happens to requests while no path is usable (`queue_if_no_path`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NoPath {
    /// They end with an error at once.
    #[default]
    Fail,
    /// They are held until a path is back.
    Queue,
    /// They are held until there has been no path for this long; then they end with an error, until a path is back.
    QueueFor(Nanos),
}

/// The specification of a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathSpec {
    /// Its name, unique in the drive.
    pub name: String,
    /// Its priority group, 0 first.
    pub group: u8,
    /// Its throughput relative to the others, 0 to 100, for `service-time`. With 0 it carries nothing while
    /// there is another path in the group. Default 1.
    pub throughput: u32,
}

/// The state of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathState {
    /// It is used if its group is the current one.
    Active,
    /// A request or a probe failed. It is probed, and used again when a probe succeeds.
    Failed,
    /// An operator has disabled it. Only a message changes that.
    Disabled,
    /// It was removed, and has requests in flight or contexts that have not read the table yet.
    Leaving,
}

/// A path as an operator sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathStats {
    /// Its number.
    pub id: PathId,
    /// Its name.
    pub name: String,
    /// Its priority group, 0 first.
    pub group: u8,
    /// Its relative throughput.
    pub throughput: u32,
    /// Its state.
    pub state: PathState,
    /// Number of changes from active to failed.
    pub fails: u64,
    /// The error of the latest failure.
    pub last_error: Status,
    /// Requests in flight there, of all hardware contexts.
    pub in_flight: u64,
    /// Bytes of the requests in flight.
    pub in_flight_bytes: u64,
    /// Requests that its driver has taken.
    pub ios: u64,
    /// Bytes of these requests.
    pub bytes: u64,
    /// Requests that ended with an error there, including those that continued over another path.
    pub errors: u64,
    /// Moving average of the time that a request adds to the path's busy time, as seen by the hardware
    /// contexts that use the path.
    pub service: Nanos,
}

/// The drive's current group, as an operator sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupStats {
    /// The current group.
    pub current: u8,
    /// Number of changes of the current group.
    pub switches: u64,
    /// The selector.
    pub selector: Selector,
    /// What happens without a usable path.
    pub no_path: NoPath,
    /// There is no usable path.
    pub has_no_path: bool,
    /// Requests fail although they should be held, because there was no path for too long.
    pub gave_up: bool,
    /// When a higher group is returned to.
    pub failback: Failback,
    /// The parts of a request's way that go over the worker.
    pub detours: Detours,
}

#[derive(Debug)]
pub(super) struct Path {
    pub(super) spec: PathSpec,
    pub(super) state: PathState,
    /// Distinguishes it from an earlier path of the same number.
    pub(super) serial: u64,
    pub(super) fails: u64,
    pub(super) last_error: Status,
    /// While failed: when it is probed next, and the interval to the probe after that.
    next_check: Instant,
    pause: Nanos,
    /// When it was last back, and how often in a row it failed soon after: its probes succeed, and what
    /// others ask of it does not.
    back_at: Option<Instant>,
    relapses: u32,
    /// It may relapse once more: it is used only while there is no other, until this time.
    on_probation: bool,
    probation_ends: Instant,
    /// Hardware contexts that have a driver of it, or are about to open one.
    holders: u32,
}

#[derive(Debug)]
pub(super) struct Table {
    pub(super) paths: [Option<Path>; PATHS_MAX],
    pub(super) current: u8,
    pub(super) switches: u64,
    pub(super) selector: Selector,
    pub(super) failback: Failback,
    pub(super) no_path: NoPath,
    pub(super) detours: Detours,
    pub(super) check_interval: Nanos,
    pub(super) check_timeout: Nanos,
    /// When the last usable path was lost.
    pub(super) no_path_since: Option<Instant>,
    /// There was no path for longer than requests are held.
    pub(super) gave_up: bool,
    failback_due: Option<Instant>,
    /// Open hardware contexts, a bit each.
    pub(super) open: u128,
    serials: u64,
}

impl Table {
    pub(super) fn new(config: &Config) -> Self {
        Self {
            paths: [const { None }; PATHS_MAX],
            current: 0,
            switches: 0,
            selector: config.selector,
            failback: config.failback,
            no_path: config.no_path,
            detours: config.detours,
            check_interval: config.check_interval,
            check_timeout: config.check_timeout,
            no_path_since: None,
            gave_up: false,
            failback_due: None,
            open: 0,
            serials: 0,
        }
    }

    pub(super) fn path(&mut self, id: PathId) -> Option<&mut Path> {
        self.paths.get_mut(id.index())?.as_mut()
    }

    pub(super) fn all(&self) -> impl Iterator<Item = (PathId, &Path)> {
        let numbered = self.paths.iter().enumerate();
        numbered.filter_map(|(id, path)| Some((PathId(id as u8), path.as_ref()?)))
    }

    /// Adds a path in a free entry; none if there is none.
    pub(super) fn add(&mut self, spec: PathSpec) -> Option<PathId> {
        let place = self.paths.iter().position(Option::is_none)?;
        self.serials += 1;
        self.paths[place] = Some(Path {
            spec,
            state: PathState::Active,
            serial: self.serials,
            fails: 0,
            last_error: Status::Ok,
            next_check: Instant(0),
            pause: FIRST_CHECK,
            back_at: None,
            relapses: 0,
            on_probation: false,
            probation_ends: Instant(0),
            holders: 0,
        });
        Some(PathId(place as u8))
    }

    /// Removes a path; its entry is free when all contexts have released it.
    pub(super) fn remove(&mut self, id: PathId) {
        if let Some(path) = self.path(id) {
            path.state = PathState::Leaving;
            self.free_if_unheld(id);
        }
    }

    /// Notes that a request or a probe has failed on a path. Says whether that changes the path's state.
    pub(super) fn failed(&mut self, id: PathId, error: Status, now: Instant) -> bool {
        let pause = FIRST_CHECK.min(self.check_interval);
        let Some(path) = self.path(id).filter(|path| path.state == PathState::Active) else {
            return false;
        };
        path.state = PathState::Failed;
        path.fails += 1;
        path.last_error = error;
        path.pause = pause;
        let is_relapse = path.back_at.is_some_and(|at| now < at + STEADY);
        path.relapses = if is_relapse { path.relapses + 1 } else { 0 };
        let probation = Nanos(FIRST_CHECK.0 << path.relapses.min(RELAPSES_MAX));
        path.on_probation = path.relapses > 0;
        path.probation_ends = now + probation.min(PROBATION_MAX);
        path.next_check = now + pause;
        true
    }

    /// Notes that a path is usable again. Says whether that changes the path's state.
    pub(super) fn came_back(&mut self, id: PathId, now: Instant) -> bool {
        let Some(path) = self.path(id).filter(|path| path.state != PathState::Active) else {
            return false;
        };
        path.state = PathState::Active;
        path.back_at = Some(now);
        let group = path.spec.group;
        if !path.on_probation {
            self.fall_back(group, now);
        }
        true
    }

    /// Makes a path usable by message: an operator knows better than its history.
    pub(super) fn reinstate(&mut self, id: PathId, now: Instant) {
        if let Some(path) = self.path(id) {
            path.relapses = 0;
            path.probation_ends = now;
        }
        self.came_back(id, now);
    }

    /// Uses paths again whose probation is over. Says whether there were any.
    fn end_probations(&mut self, now: Instant) -> bool {
        let mut ended = false;
        for place in 0..PATHS_MAX {
            let Some(path) = &mut self.paths[place] else {
                continue;
            };
            if path.on_probation && path.probation_ends <= now {
                path.on_probation = false;
                let (group, is_back) = (path.spec.group, path.state == PathState::Active);
                ended |= is_back;
                if is_back {
                    self.fall_back(group, now);
                }
            }
        }
        ended
    }

    /// Notes that a path of `group` is usable from now on: that group may be returned to.
    pub(super) fn fall_back(&mut self, group: u8, now: Instant) {
        if group < self.current && self.is_usable(self.current) {
            match self.failback {
                Failback::Immediate => self.go_to(group),
                Failback::After(delay) => {
                    self.failback_due.get_or_insert(now + delay);
                }
                Failback::Manual => {}
            }
        }
    }

    /// Starts with the first existing group.
    pub(super) fn start(&mut self) {
        self.current = self.best_group().unwrap_or(0);
    }

    /// Makes a group the current one.
    pub(super) fn go_to(&mut self, group: u8) {
        if self.current != group {
            self.current = group;
            self.switches += 1;
        }
    }

    /// Updates the state that depends on the paths: the current group, and since when there is no path.
    pub(super) fn update_state(&mut self, now: Instant) {
        let best = self.best_group();
        match best {
            Some(best) if !self.is_usable(self.current) => self.go_to(best),
            _ => {}
        }
        if best.is_some() {
            (self.no_path_since, self.gave_up) = (None, false);
        } else {
            self.no_path_since.get_or_insert(now);
            self.gave_up &= matches!(self.no_path, NoPath::QueueFor(_));
        }
        if best.is_none_or(|best| best >= self.current) {
            self.failback_due = None;
        }
    }

    /// Does what has become due. Says whether something has changed.
    pub(super) fn tick(&mut self, now: Instant) -> bool {
        let gives_up = self.gives_up_at().is_some_and(|at| at <= now);
        self.gave_up |= gives_up;
        let fails_back = self.failback_due.take_if(|at| *at <= now).is_some();
        if let Some(best) = self.best_group().filter(|_| fails_back) {
            self.go_to(best);
        }
        let has_ended = self.end_probations(now);
        gives_up || fails_back || has_ended
    }

    /// Takes the failed paths that must be probed now, a bit each.
    pub(super) fn take_due_checks(&mut self, now: Instant) -> u32 {
        let mut due = 0;
        let most = self.check_interval;
        for (place, path) in self.paths.iter_mut().enumerate() {
            let Some(path) = path else { continue };
            if path.state == PathState::Failed && path.next_check <= now {
                due |= 1 << place;
                path.pause = Nanos(path.pause.0 * 2).min(most);
                path.next_check = now + path.pause;
            }
        }
        due
    }

    /// Makes the probes of the failed ones of these paths, a bit each, due.
    pub(super) fn check_now(&mut self, paths: u32, now: Instant) {
        for place in paths_in(paths) {
            if let Some(path) = &mut self.paths[place] {
                path.next_check = path.next_check.min(now);
            }
        }
    }

    /// When the next action is due.
    pub(super) fn next_due(&self) -> Option<Instant> {
        let failed = |(_, path): (_, &Path)| (path.state == PathState::Failed).then_some(path.next_check);
        let checks = self.all().filter_map(failed);
        let probations = self.all().filter(|(_, path)| path.on_probation);
        let probations = probations.map(|(_, path)| path.probation_ends);
        checks
            .chain(probations)
            .chain(self.failback_due)
            .chain(self.gives_up_at())
            .min()
    }

    /// Says whether requests are held while there is no path.
    pub(super) fn holds(&self) -> bool {
        match self.no_path {
            NoPath::Fail => false,
            NoPath::Queue => true,
            NoPath::QueueFor(_) => !self.gave_up,
        }
    }

    /// Notes that a context that has read the table wants a driver of a path.
    pub(super) fn hold(&mut self, id: PathId) {
        if let Some(path) = self.path(id) {
            path.holders += 1;
        }
    }

    /// Notes that a context has no driver of a path, or no longer.
    pub(super) fn release(&mut self, id: PathId) {
        let path = self.path(id).expect("a path that is held is there");
        path.holders -= 1;
        self.free_if_unheld(id);
    }

    pub(super) fn is_usable(&self, group: u8) -> bool {
        self.usable().any(|(_, path)| path.spec.group == group)
    }

    /// The active paths; without those on probation, if there are others.
    pub(super) fn usable(&self) -> impl Iterator<Item = (PathId, &Path)> {
        let active = |path: &Path| path.state == PathState::Active;
        let others = self.all().any(|(_, path)| active(path) && !path.on_probation);
        self.all()
            .filter(move |(_, path)| active(path) && !(path.on_probation && others))
    }

    fn best_group(&self) -> Option<u8> {
        self.usable().map(|(_, path)| path.spec.group).min()
    }

    fn gives_up_at(&self) -> Option<Instant> {
        match self.no_path {
            NoPath::QueueFor(limit) if !self.gave_up => self.no_path_since.map(|since| since + limit),
            _ => None,
        }
    }

    fn free_if_unheld(&mut self, id: PathId) {
        let place = &mut self.paths[id.index()];
        place.take_if(|path| path.state == PathState::Leaving && path.holders == 0);
    }
}

/// How soon after its failure a path is probed; the interval doubles after each probe, up to the configured interval.
const FIRST_CHECK: Nanos = Nanos::from_millis(10);
/// A path that fails within this time of its return has relapsed. Each relapse doubles the time of its probation, up to
/// the longest. A longer time costs the throughput of a path that was down for another reason.
const STEADY: Nanos = Nanos::from_secs(60);
const PROBATION_MAX: Nanos = Nanos::from_secs(60);
const RELAPSES_MAX: u32 = 13;
