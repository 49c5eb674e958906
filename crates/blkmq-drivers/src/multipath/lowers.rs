//! A worker's own drivers of the paths, with which it issues requests by itself: a set for each hardware
//! context, so that tags do not collide. `worker` calls it on its thread. It exists for measurements, and
//! is made for drives that complete requests at once, at a reap, or by time; completions of others are
//! looked for every 50 µs.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use blkmq_core::driver::{Done, HctxDriver, Issued};
use blkmq_core::ids::HctxId;
use blkmq_core::mapper::multipath::{ByWorker, PathId};
use blkmq_core::time::Nanos;
use blkmq_host::clock::Clock;
use blkmq_host::ring::{RingConfig, RingHandle};

use super::opener::Links;

/// The worker's side of all paths.
pub(super) struct Lowers {
    links: Arc<Links>,
    clock: Clock,
    /// `None` until a path is opened, or if no ring can be made.
    ring: Option<RingHandle>,
    paths: BTreeMap<(HctxId, PathId), Lower>,
    ended: Vec<Done>,
}

/// One path, as one hardware context has it.
struct Lower {
    serial: u64,
    driver: Box<dyn HctxDriver>,
    in_flight: u32,
    is_uncommitted: bool,
}

impl Lowers {
    pub(super) fn new(links: Arc<Links>) -> Self {
        Self {
            links,
            clock: Clock::get(),
            ring: None,
            paths: BTreeMap::new(),
            ended: Vec::new(),
        }
    }

    /// Issues a request to its path. If there is no driver of the path, there is no room.
    pub(super) fn issue(&mut self, hctx: HctxId, job: &ByWorker) -> Issued {
        let now = self.clock.now();
        let Some(lower) = self.lower(hctx, job.path, job.serial) else {
            return Issued::Resource;
        };
        let answer = lower.driver.issue(&job.rq, job.cookie, false, now);
        if answer == Issued::Queued {
            lower.in_flight += 1;
            lower.is_uncommitted = true;
        }
        answer
    }

    fn lower(&mut self, hctx: HctxId, path: PathId, serial: u64) -> Option<&mut Lower> {
        let is_there = self
            .paths
            .get(&(hctx, path))
            .is_some_and(|lower| lower.serial == serial);
        if !is_there {
            let driver = self.open(hctx, path)?;
            let lower = Lower {
                serial,
                driver,
                in_flight: 0,
                is_uncommitted: false,
            };
            // A former path of this number has nothing in flight: otherwise it could not have been
            // removed.
            self.paths.insert((hctx, path), lower);
        }
        self.paths.get_mut(&(hctx, path))
    }

    fn open(&mut self, hctx: HctxId, path: PathId) -> Option<Box<dyn HctxDriver>> {
        if self.ring.is_none() {
            self.ring = RingHandle::new(RingConfig::default()).ok();
        }
        let device = self.links.lock()[path.index()].clone()?;
        device.open_hctx(self.ring.as_ref()?, hctx).ok()
    }

    /// Tells the paths' drivers that no further request follows at once.
    pub(super) fn commit(&mut self) {
        let uncommitted = self.paths.values_mut().filter(|lower| lower.is_uncommitted);
        for lower in uncommitted {
            lower.is_uncommitted = false;
            lower.driver.commit();
        }
    }

    /// Reports the requests that have ended to `ended`.
    pub(super) fn reap(&mut self, mut ended: impl FnMut(HctxId, Done)) {
        if self.paths.values().all(|lower| lower.in_flight == 0) {
            return;
        }
        if let Some(ring) = &self.ring {
            ring.submit();
            ring.reap();
        }
        let now = self.clock.now();
        for (&(hctx, _), lower) in self.paths.iter_mut().filter(|(_, lower)| lower.in_flight > 0) {
            lower.driver.reap(now, &mut self.ended);
            lower.in_flight -= self.ended.len() as u32;
            self.ended.drain(..).for_each(|end| ended(hctx, end));
        }
    }

    /// Waits until the thread is unparked, or something may have ended.
    pub(super) fn wait(&self) {
        let busy = self.paths.values().filter(|lower| lower.in_flight > 0);
        let now = self.clock.now();
        let next = busy.map(|lower| lower.driver.next_event().unwrap_or(now + LOOK));
        match next.min() {
            None => thread::park(),
            Some(at) if at <= now => {}
            Some(at) => thread::park_timeout(Duration::from_nanos(at.since(now).0)),
        }
    }
}

/// Interval at which unannounced completions are looked for.
const LOOK: Nanos = Nanos::from_micros(50);
