//! The flushes of the daemon itself, of disks whose drives keep unflushed data in this process. A service of
//! one reactor; other threads ask it and wait.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Result, bail};
use blkmq_core::bio::{Bio, Op};
use blkmq_core::ids::ReactorId;
use blkmq_host::counted::counted;
use blkmq_host::disk::Disk;
use blkmq_host::engine::Engine;
use blkmq_host::ring::Completion;
use blkmq_host::service::{Cx, Service, Waker};

/// Asks for flushes.
#[derive(Clone, Debug, Default)]
pub(super) struct Flusher(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    waker: Option<Waker>,
    wanted: Vec<Disk>,
    /// How often flushes were asked for: those of earlier times, which were waited for in vain, may end later.
    round: u64,
    /// Of the disks asked for last: the number of flushes that have not ended, and the disks whose
    /// flushes failed.
    left: usize,
    failed: Vec<String>,
}

impl State {
    fn begin(&mut self, wanted: Vec<Disk>) {
        self.round += 1;
        (self.left, self.failed) = (wanted.len(), Vec::new());
        self.wanted = wanted;
    }

    /// A flush of a round has ended.
    fn end(&mut self, round: u64, failure: Option<String>) {
        if round == self.round {
            self.left -= 1;
            self.failed.extend(failure);
        }
    }
}

struct FlushService {
    shared: Arc<Shared>,
    /// The disks whose flushes are under way, by their cookies, with their rounds.
    disks: Vec<(u64, Disk)>,
    /// Bios for which the queue had no room.
    refused: Vec<(Disk, Bio)>,
    has_ended: bool,
}

impl Flusher {
    /// Makes the service.
    pub(super) fn start(engine: &Engine) -> Self {
        let flusher = Self::default();
        let shared = Arc::clone(&flusher.0);
        let service = move || -> Box<dyn Service> {
            Box::new(FlushService {
                shared,
                disks: Vec::new(),
                refused: Vec::new(),
                has_ended: false,
            })
        };
        engine.add_service(ReactorId(0), Box::new(service));
        flusher
    }

    /// Flushes these disks, in at most `limit`. For one thread at a time.
    ///
    /// # Errors
    /// The disks whose flushes failed, or the time is over.
    pub(super) fn flush(&self, disks: Vec<Disk>, limit: Duration) -> Result<()> {
        let mut state = self.0.state.lock().unwrap_or_else(PoisonError::into_inner);
        if disks.is_empty() {
            return Ok(());
        }
        state.begin(disks);
        let waker = state.waker.clone();
        drop(state);
        waker.iter().for_each(Waker::wake);
        let state = self.0.state.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self
            .0
            .changed
            .wait_timeout_while(state, limit, |state| state.left > 0);
        let (state, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        if timeout.timed_out() {
            bail!(
                "{} not flushed after {limit:?}",
                counted(state.left, "disk was", "disks were")
            );
        }
        if !state.failed.is_empty() {
            bail!("{}", state.failed.join("; "));
        }
        Ok(())
    }
}

impl FlushService {
    fn take_orders(&mut self, cx: &mut Cx<'_>) {
        let mut state = self.shared.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (round, wanted) = (state.round, std::mem::take(&mut state.wanted));
        drop(state);
        for disk in wanted {
            let bio = Bio {
                op: Op::Flush,
                disk: disk.id,
                group: disk.group,
                cookie: self.disks.len() as u64,
                ..Bio::default()
            };
            self.disks.push((round, disk.clone()));
            self.submit(cx, disk, bio);
        }
    }

    fn submit(&mut self, cx: &mut Cx<'_>, disk: Disk, bio: Bio) {
        if let Err(bio) = cx.submit(disk.queue, bio) {
            self.refused.push((disk, bio));
        }
    }
}

impl Service for FlushService {
    fn start(&mut self, cx: &mut Cx<'_>) {
        let mut state = self.shared.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.waker = Some(cx.waker());
        drop(state);
        self.take_orders(cx);
    }

    fn on_ring(&mut self, _cx: &mut Cx<'_>, _completed: &[Completion]) {}

    fn on_end(&mut self, cx: &mut Cx<'_>, bio: Bio) {
        let (round, disk) = &self.disks[bio.cookie as usize];
        let failure = || format!("disk {} cannot be flushed: {:?}", disk.name, bio.status);
        let mut state = self.shared.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.end(*round, (!bio.status.is_ok()).then(failure));
        drop(state);
        self.shared.changed.notify_all();
        if cx.outstanding() == 0 && self.refused.is_empty() {
            self.disks.clear();
        }
    }

    fn on_room(&mut self, cx: &mut Cx<'_>) {
        for (disk, bio) in std::mem::take(&mut self.refused) {
            self.submit(cx, disk, bio);
        }
    }

    fn on_wake(&mut self, cx: &mut Cx<'_>) {
        self.take_orders(cx);
    }

    fn drain(&mut self, _cx: &mut Cx<'_>) {
        self.refused.clear();
        self.has_ended = true;
    }

    fn is_finished(&self) -> bool {
        self.has_ended
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flush_that_was_waited_for_in_vain_counts_for_no_later_one() {
        let mut state = State::default();
        state.begin(Vec::new());
        let first = state.round;
        state.begin(Vec::new());
        state.left = 1;
        state.end(first, Some("late".to_owned()));
        assert_eq!((state.left, state.failed.len()), (1, 0));
        state.end(first + 1, None);
        assert_eq!(state.left, 0);
    }
}
