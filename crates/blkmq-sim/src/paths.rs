//! The paths to the drive of a multipath history: each works, is cut, or hangs, and all lead to the same
//! medium. `world` makes their states change and messages arrive; `drive::modelled_hctx` shows the oracle
//! the core's view above the paths.
//!
//! When a path is cut, the drive drops its requests, and the path reports that the transport
//! failed; new requests fail at once. A path that hangs takes requests and reports no ends; when it
//! works again, the requests that it took have failed.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};

use blkmq_core::bio::{Bio, Op, Status};
use blkmq_core::driver::{Done, HctxDriver, Issued, TimedOut};
use blkmq_core::ids::{Cookie, HctxId};
use blkmq_core::mapper::multipath::{
    Config, Failback, Kick, Multipath, MultipathHctx, NoPath, Opener, PathId, PathSpec, Selector,
};
use blkmq_core::request::Request;
use blkmq_core::time::{Instant, Nanos};

use crate::drive::modelled_hctx::Way;
use crate::rng::{Ppm, Rng};
use crate::stage::Stage;

/// The paths of a history.
#[derive(Clone, Debug)]
pub struct Spec {
    /// The priority group of each path.
    pub groups: Vec<u8>,
    /// The selector at the start.
    pub selector: Selector,
    /// When requests return to a higher group.
    pub failback: Failback,
    /// What happens to requests without a path.
    pub no_path: NoPath,
    /// Time between two probes.
    pub check_interval: Nanos,
    /// Time between two changes of a path's state, at least and at most.
    pub every: (Nanos, Nanos),
    /// How often a message of an operator replaces such a change.
    pub messages: Ppm,
}

/// The state of a path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Weather {
    #[default]
    Fine,
    Cut,
    Hung,
}

/// The paths, shared by all reactors.
#[derive(Debug)]
pub struct Paths {
    pub(crate) multipath: Arc<Multipath>,
    spec: Spec,
    hctxs: u16,
    block: u32,
    /// By path number: its state, and how often that has changed.
    weather: [Cell<(Weather, u64)>; PATHS_MAX],
    kicks: Arc<Kicks>,
    rng: RefCell<Rng>,
    names: Cell<u32>,
}

/// Hardware contexts that must be run.
#[derive(Debug, Default)]
struct Kicks(Mutex<Vec<HctxId>>);

impl Kick for Kicks {
    fn kick(&self, hctx: HctxId) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(hctx);
    }
}

impl Paths {
    /// Makes the paths.
    pub(crate) fn new(spec: Spec, hctxs: u16, block: u32, rng: Rng) -> Self {
        let paths = spec.groups.iter().enumerate();
        let paths = paths.map(|(at, &group)| path(at as u32, group)).collect();
        let multipath = Multipath::new(Config {
            selector: spec.selector,
            failback: spec.failback,
            no_path: spec.no_path,
            check_interval: spec.check_interval,
            check_timeout: Nanos(spec.check_interval.0 * 2),
            ..Config::new("sim", paths)
        });
        let multipath = multipath.expect("a scenario's paths are possible");
        let kicks = Arc::new(Kicks::default());
        multipath.set_kick(Arc::clone(&kicks) as Arc<dyn Kick>);
        Self {
            multipath,
            names: Cell::new(spec.groups.len() as u32),
            spec,
            hctxs,
            block,
            weather: Default::default(),
            kicks,
            rng: RefCell::new(rng),
        }
    }

    /// Opens the driver of a hardware context.
    pub(crate) fn open(self: &Rc<Self>, hctx: HctxId, depth: u32, stage: &Rc<Stage>) -> Box<dyn HctxDriver> {
        let opener = PathOpener {
            paths: Rc::clone(self),
            hctx,
            stage: Rc::clone(stage),
        };
        let opened = MultipathHctx::open(&self.multipath, hctx, depth, Box::new(opener));
        Box::new(opened.unwrap_or_else(|path| panic!("path {path:?} does not open")))
    }

    /// Returns when a path's state changes next.
    pub(crate) fn next_change(&self, now: Instant) -> Instant {
        let (least, most) = self.spec.every;
        now + Nanos(self.rng.borrow_mut().from_to(least.0, most.0))
    }

    /// Changes the state of one path, or passes on a message of an operator.
    pub(crate) fn change(&self, now: Instant) {
        let mut rng = self.rng.borrow_mut();
        if rng.chance(self.spec.messages) {
            self.message(&mut rng, now);
            return;
        }
        let path = &self.weather[rng.below(PATHS_MAX as u64) as usize];
        let (weather, changes) = path.get();
        let next = match weather {
            Weather::Fine => rng.pick(&[Weather::Cut, Weather::Cut, Weather::Hung]),
            Weather::Cut | Weather::Hung => Weather::Fine,
        };
        path.set((next, changes + 1));
    }

    /// Returns what is wrong with an end that the core gets. While there is a path, or requests are
    /// held, only errors of the medium may appear.
    pub(crate) fn fault_of(&self, status: Status) -> Option<String> {
        if matches!(status, Status::Ok | Status::Requeue | Status::Medium) {
            return None;
        }
        let groups = self.multipath.group_stats();
        let is_to_fail = groups.has_no_path && (groups.no_path == NoPath::Fail || groups.gave_up);
        let is_right = status == Status::Transport && is_to_fail;
        (!is_right).then(|| format!("a request ended with {status:?} above the paths: {groups:?}"))
    }

    /// Says whether a path hangs, so that only a time limit can continue the work.
    pub(crate) fn hangs(&self) -> bool {
        self.weather.iter().any(|path| path.get().0 == Weather::Hung)
    }

    /// Takes the contexts that must be run.
    pub(crate) fn take_kicks(&self) -> Vec<HctxId> {
        std::mem::take(&mut *self.kicks.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns what is not at rest although all bios have ended.
    pub(crate) fn fault_at_rest(&self) -> Option<String> {
        let paths = self.multipath.path_stats();
        let busy = paths
            .into_iter()
            .find(|path| (path.in_flight, path.in_flight_bytes) != (0, 0));
        busy.map(|path| format!("a path counts requests at rest: {path:?}"))
    }

    fn message(&self, rng: &mut Rng, now: Instant) {
        let paths = self.multipath.path_stats();
        let some = paths[rng.below(paths.len() as u64) as usize].id;
        // The result does not matter: an impossible request must be refused.
        let _ = match rng.below(12) {
            0 => self.multipath.fail_path(some, now),
            1..=3 => self.multipath.reinstate_path(some, now),
            4 => self.multipath.switch_group(rng.below(3) as u8, now),
            5 if paths.len() < PATHS_MAX => {
                let name = self.names.replace(self.names.get() + 1);
                self.multipath
                    .add_path(path(name, rng.below(3) as u8), now)
                    .map(|_| ())
            }
            6 => self.multipath.remove_path(some, now),
            7 => self.multipath.set_throughput(some, rng.below(4) as u32, now),
            8 => {
                self.multipath.set_selector(rng.pick(&Selector::ALL), now);
                Ok(())
            }
            9 => {
                let after = Failback::After(Nanos::from_millis(2));
                self.multipath
                    .set_failback(rng.pick(&[Failback::Immediate, Failback::Manual, after]), now);
                Ok(())
            }
            10 => {
                let limited = NoPath::QueueFor(Nanos::from_millis(1));
                self.multipath
                    .set_no_path(rng.pick(&[NoPath::Fail, NoPath::Queue, limited]), now);
                Ok(())
            }
            _ => Ok(()),
        };
    }
}

fn path(name: u32, group: u8) -> PathSpec {
    PathSpec {
        name: format!("p{name}"),
        group,
        throughput: 1 + name % 2,
    }
}

struct PathOpener {
    paths: Rc<Paths>,
    hctx: HctxId,
    stage: Rc<Stage>,
}

impl Opener for PathOpener {
    fn open(&mut self, path: PathId) -> Option<Box<dyn HctxDriver>> {
        // Each path has one entry to the drive for each context.
        let way = u16::from(path.0) * self.paths.hctxs + self.hctx.0;
        Some(Box::new(PathPort {
            way: Way::new(0, way, Rc::clone(&self.stage)),
            paths: Rc::clone(&self.paths),
            stage: Rc::clone(&self.stage),
            path: path.index(),
            changes: self.paths.weather[path.index()].get().1,
            at_drive: Vec::new(),
            swallowed: Vec::new(),
            ended: Vec::new(),
        }))
    }

    fn probe(&mut self, _path: PathId) -> Bio {
        Bio {
            op: Op::Read,
            len: self.paths.block.into(),
            ..Bio::default()
        }
    }

    fn keep_memory(&mut self) {}
}

/// A hardware context's way to the drive over one path.
struct PathPort {
    way: Way,
    paths: Rc<Paths>,
    stage: Rc<Stage>,
    path: usize,
    /// Changes of the path's state that it has processed.
    changes: u64,
    at_drive: Vec<Cookie>,
    swallowed: Vec<Cookie>,
    ended: Vec<Done>,
}

impl PathPort {
    /// Reads the path's state. After a change, the requests of a path that hung or was cut have
    /// failed.
    fn weather(&mut self) -> Weather {
        let (weather, changes) = self.paths.weather[self.path].get();
        if std::mem::replace(&mut self.changes, changes) != changes && weather != Weather::Hung {
            let lost = |cookie: Cookie| Done {
                cookie,
                status: Status::Transport,
            };
            self.ended.extend(self.swallowed.drain(..).map(lost));
            if weather == Weather::Cut {
                // The drive keeps some of the requests, and reports their ends itself.
                let (way, ended) = (&mut self.way, &mut self.ended);
                self.at_drive.retain(|&cookie| {
                    let is_bound = way.timed_out(cookie) == TimedOut::Wait;
                    ended.extend((!is_bound).then(|| lost(cookie)));
                    is_bound
                });
            }
        }
        weather
    }
}

impl HctxDriver for PathPort {
    fn issue(&mut self, rq: &Request, cookie: Cookie, last: bool, now: Instant) -> Issued {
        match self.weather() {
            Weather::Cut => Issued::Done(Status::Transport),
            Weather::Hung => {
                self.swallowed.push(cookie);
                Issued::Queued
            }
            Weather::Fine => {
                let answer = self.way.issue(rq, cookie, last, now);
                if answer == Issued::Queued {
                    self.at_drive.push(cookie);
                }
                if last {
                    self.way.commit();
                }
                answer
            }
        }
    }

    fn commit(&mut self) {
        self.way.commit();
    }

    fn reap(&mut self, now: Instant, done: &mut Vec<Done>) {
        if self.weather() == Weather::Hung {
            return;
        }
        // Requests of a cut path are first; the drive may report them as well, later.
        done.append(&mut self.ended);
        let first = done.len();
        self.way.reap(now, done);
        self.at_drive
            .retain(|cookie| done[first..].iter().all(|end| end.cookie != *cookie));
    }

    fn next_event(&self) -> Option<Instant> {
        let (weather, changes) = self.paths.weather[self.path].get();
        if !self.ended.is_empty() || changes != self.changes {
            return Some(self.stage.now.get());
        }
        if weather == Weather::Hung {
            None
        } else {
            self.way.next_event()
        }
    }

    fn timed_out(&mut self, cookie: Cookie) -> TimedOut {
        let before = self.swallowed.len();
        self.swallowed.retain(|other| *other != cookie);
        if self.swallowed.len() < before {
            return TimedOut::Ended;
        }
        let answer = self.way.timed_out(cookie);
        if answer == TimedOut::Ended {
            self.at_drive.retain(|other| *other != cookie);
        }
        answer
    }
}

/// How many paths a history has at most.
pub(crate) const PATHS_MAX: usize = 6;
