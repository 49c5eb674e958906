//! Decides which writes may be lost with a server: those that were completed and that no flush has covered when the server, or
//! what it kept in memory, is gone. All hardware contexts of a drive share one ledger; so do paths to the same storage.
//!
//! Time is counted in flushes: each flush that is sent begins an *epoch*, and a context notes the epoch in which its latest
//! write ended. A flush that was sent at the end of an epoch and has succeeded covers what ended in that epoch and before.
//!
//! ```text
//!  write ends: context is dirty in this epoch       flush sent: epoch + 1       flush answered: durable = its epoch
//!  sessions are gone, a new one is made:   dirty beyond `durable`?  ──► losses + 1: every user's next flush fails, once
//! ```
//!
//! Whether the server still is the one that took the writes is decided when a session is made. A server that names the instance
//! it is (ours does) has kept its memory if the name is the same. Of another one nothing is known but that a session which
//! was there all the time leads to the same one: so there is a loss when no session was left.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use blkmq_core::ids::{HctxId, REACTORS_MAX};
use blkmq_sync::CachePadded;

use crate::driver::Losses;

/// What is known of the durability of what was written to one server's disk.
#[derive(Debug)]
pub struct Ledger {
    /// The current epoch, from 1 on. Alone on its line: every write that ends reads it.
    epoch: CachePadded<AtomicU64>,
    /// The last epoch that is covered.
    durable: AtomicU64,
    /// How often writes may have been lost, and how many of these times at least one user has been told of.
    losses: AtomicU64,
    told: AtomicU64,
    sessions: Mutex<Sessions>,
    /// By hardware context: the epoch in which its latest write ended. Written once an epoch, so the lines may be shared.
    dirty: Box<[AtomicU64]>,
}

/// The connections that are there.
#[derive(Debug, Default)]
struct Sessions {
    count: u32,
    /// What the server of the latest one says it is.
    instance: Option<u64>,
}

impl Default for Ledger {
    fn default() -> Self {
        Self {
            epoch: CachePadded::new(AtomicU64::new(1)),
            durable: AtomicU64::new(0),
            losses: AtomicU64::new(0),
            told: AtomicU64::new(0),
            sessions: Mutex::default(),
            dirty: (0..REACTORS_MAX).map(|_| AtomicU64::new(0)).collect(),
        }
    }
}

// SeqCst throughout: a write that ended before a flush was sent, or before a session was made, on whichever thread, must be
// seen there. What is on the way of each write is one load of a line that is written once a flush.
impl Ledger {
    /// Notes that a write which only a flush makes durable has ended. `latest` is the context's own memory of what it noted.
    #[inline]
    pub(super) fn wrote(&self, hctx: HctxId, latest: &mut u64) {
        let epoch = self.epoch.load(Ordering::SeqCst);
        if *latest != epoch {
            *latest = epoch;
            self.dirty[hctx.index()].fetch_max(epoch, Ordering::SeqCst);
        }
    }

    /// Begins an epoch with a flush that is about to be sent. Returns the one that it covers if it succeeds.
    pub(super) fn flush_sent(&self) -> u64 {
        self.epoch.fetch_add(1, Ordering::SeqCst)
    }

    /// A flush has succeeded.
    pub(super) fn flushed(&self, epoch: u64) {
        self.durable.fetch_max(epoch, Ordering::SeqCst);
    }

    /// What was written may be lost, as the server says itself.
    pub(super) fn lose(&self) {
        self.losses.fetch_add(1, Ordering::SeqCst);
        self.flushed(self.flush_sent());
    }

    /// A session has been made. Says whether writes may have been lost between the ones before and this one.
    pub(super) fn session_made(&self, instance: Option<u64>) -> bool {
        let mut sessions = self.sessions();
        let has_survived = match (sessions.instance, instance) {
            (Some(before), Some(now)) => before == now,
            _ => sessions.count > 0,
        };
        sessions.count += 1;
        sessions.instance = instance;
        let is_loss = !has_survived && self.is_dirty();
        if is_loss {
            self.lose();
        }
        is_loss
    }

    /// A session is over.
    pub(super) fn session_lost(&self) {
        let mut sessions = self.sessions();
        debug_assert!(sessions.count > 0, "a session ends that was not made");
        sessions.count = sessions.count.saturating_sub(1);
    }

    /// Says whether there are writes that no flush has covered.
    pub(super) fn is_dirty(&self) -> bool {
        let durable = self.durable.load(Ordering::SeqCst);
        self.dirty
            .iter()
            .any(|epoch| epoch.load(Ordering::SeqCst) > durable)
    }

    /// How often writes may have been lost.
    pub(crate) fn losses(&self) -> Losses {
        Losses {
            told: self.told.load(Ordering::SeqCst),
            count: self.losses.load(Ordering::SeqCst),
        }
    }

    /// A user has been told of the first `count` losses.
    pub(crate) fn tell(&self, count: u64) {
        self.told.fetch_max(count, Ordering::SeqCst);
    }

    fn sessions(&self) -> MutexGuard<'_, Sessions> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ledger() -> (Ledger, u64) {
        let ledger = Ledger::default();
        assert!(!ledger.session_made(None));
        (ledger, 0)
    }

    #[test]
    fn what_ended_after_a_flush_was_sent_is_not_covered_by_it() {
        let (ledger, mut latest) = ledger();
        ledger.wrote(HctxId(0), &mut latest);
        let flush = ledger.flush_sent();
        ledger.flushed(flush);
        assert!(!ledger.is_dirty());
        let flush = ledger.flush_sent();
        ledger.wrote(HctxId(3), &mut 0);
        ledger.flushed(flush);
        assert!(ledger.is_dirty());
        ledger.session_lost();
        assert!(ledger.session_made(None));
        assert_eq!(ledger.losses(), Losses { count: 1, told: 0 });
        assert!(!ledger.is_dirty(), "what is lost is accounted for");
    }

    #[test]
    fn a_session_that_was_there_all_the_time_leads_to_the_same_server() {
        let (ledger, mut latest) = ledger();
        assert!(!ledger.session_made(None));
        ledger.wrote(HctxId(0), &mut latest);
        ledger.session_lost();
        assert!(!ledger.session_made(None));
        ledger.session_lost();
        ledger.session_lost();
        assert!(ledger.session_made(None), "none was left");
    }

    #[test]
    fn a_server_that_names_its_instance_is_believed() {
        let ledger = Ledger::default();
        ledger.session_made(Some(7));
        ledger.wrote(HctxId(0), &mut 0);
        ledger.session_lost();
        assert!(!ledger.session_made(Some(7)), "it has kept its memory");
        assert!(
            ledger.session_made(Some(8)),
            "the session that is still counted leads to a server that is gone"
        );
    }
}
