//! Timers of a multipath drive: probes of failed paths, failback, and the time limit without a path. The
//! first hardware context runs them, because its reactor always returns to it.

use crate::bio::Status;
use crate::driver::{Issued, TimedOut};
use crate::ids::{Cookie, Tag};
use crate::request::Request;
use crate::time::Instant;

use super::super::{PATHS_MAX, PathId, paths_in};
use super::MultipathHctx;

/// The probes of the first hardware context.
pub(super) struct Checker {
    /// All probes have the same tag, which the queue does not use; each path has one at most.
    tag: Tag,
    generation: u32,
    probes: [Option<Probe>; PATHS_MAX],
    /// When to check the table.
    next: Option<Instant>,
}

struct Probe {
    cookie: Cookie,
    /// The driver may read it until the probe has ended.
    _rq: Box<Request>,
    expires: Instant,
}

impl Checker {
    pub(super) fn new(tag: Tag) -> Self {
        Self {
            tag,
            generation: 0,
            probes: [const { None }; PATHS_MAX],
            next: None,
        }
    }

    pub(super) fn tag(&self) -> Tag {
        self.tag
    }

    /// Notes that the table has changed.
    pub(super) fn look_now(&mut self) {
        self.next = Some(Instant(0));
    }

    #[inline]
    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.next.is_some_and(|at| at <= now)
    }

    pub(super) fn next_event(&self) -> Option<Instant> {
        self.next
    }

    pub(super) fn is_probing(&self, path: usize) -> bool {
        self.probes[path].is_some()
    }

    pub(super) fn is_probing_any(&self) -> bool {
        self.probes.iter().any(Option::is_some)
    }

    fn take(&mut self, path: usize, cookie: Cookie) -> Option<Probe> {
        self.probes[path].take_if(|probe| probe.cookie == cookie)
    }
}

impl MultipathHctx {
    /// Does what is due: timers of the table, probes, probes that took too long.
    pub(super) fn tend(&mut self, now: Instant) {
        let (checks, mut next) = self.shared.tend(now);
        for path in paths_in(checks) {
            self.probe(path, now);
        }
        for path in 0..PATHS_MAX {
            self.expire_probe(path, now);
        }
        let checker = self.checker.as_mut().expect("the first context's");
        let probes = checker.probes.iter().flatten();
        next = probes.map(|probe| probe.expires).chain(next).min();
        checker.next = next;
    }

    /// Handles the end of a probe.
    pub(super) fn probe_ended(&mut self, path: usize, cookie: Cookie, status: Status, now: Instant) {
        let checker = self.checker.as_mut().expect("the first context's");
        if checker.take(path, cookie).is_some() {
            self.probe_told(path, status, now);
        }
    }

    fn probe(&mut self, path: usize, now: Instant) {
        if self.opened & 1 << path == 0 {
            self.look_at_table();
        }
        let checker = self.checker.as_mut().expect("the first context's");
        let Some(driver) = &mut self.lowers[path] else {
            return;
        };
        if checker.is_probing(path) {
            return;
        }
        checker.generation = checker.generation.wrapping_add(1);
        let cookie = Cookie::new(checker.tag, checker.generation);
        let rq = Request::outside(self.opener.probe(PathId(path as u8)));
        match driver.issue(&rq, cookie, true, now) {
            Issued::Done(status) => self.probe_told(path, status, now),
            Issued::Queued => {
                let expires = now + self.view.check_timeout;
                checker.probes[path] = Some(Probe {
                    cookie,
                    _rq: rq,
                    expires,
                });
            }
            // Busy is no result: the next probe may have one.
            Issued::Resource | Issued::DeviceResource => {}
        }
    }

    /// A probe that ends with an error of the medium has reached the medium: the path works.
    fn probe_told(&mut self, path: usize, status: Status, now: Instant) {
        let has_failed = matches!(
            status,
            Status::Io | Status::Transport | Status::Timeout | Status::Shutdown | Status::Requeue
        );
        if !has_failed {
            self.shared.probed(PathId(path as u8), now);
        }
    }

    fn expire_probe(&mut self, path: usize, now: Instant) {
        let checker = self.checker.as_mut().expect("the first context's");
        let Some(probe) = &mut checker.probes[path] else {
            return;
        };
        if probe.expires > now {
            return;
        }
        let cookie = probe.cookie;
        probe.expires = now + self.view.check_timeout;
        let Some(driver) = &mut self.lowers[path] else {
            return;
        };
        if driver.timed_out(cookie) == TimedOut::Ended {
            checker.probes[path] = None;
        }
    }
}
