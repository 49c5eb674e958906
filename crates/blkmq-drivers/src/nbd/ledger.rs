//! The ledger of writes that may be lost with a server: those that were completed and not covered by a
//! flush when the server, or its memory, is gone. All hardware contexts of a drive share one ledger; so
//! do paths to the same storage.
//!
//! Time is counted in flushes: each flush that is sent begins an *epoch*, and a context records the
//! epoch in which its latest write ended. A flush that was sent at the end of an epoch and has
//! succeeded covers what ended in that epoch and before.
//!
//! ```text
//!  write ends: context is dirty in this epoch       flush sent: epoch + 1       flush answered: durable = its epoch
//!  sessions are gone, a new one is made:   dirty beyond `durable`?  ──► losses + 1: every user's next flush fails, once
//! ```
//!
//! A new session decides whether the server is still the one that took the writes. A server that
//! names its instance (ours does) has kept its memory if it gives the same name as before at the
//! same place. Of other servers it is only known that a session that existed all the time leads to
//! the same one: so there is a loss when no session was left.
//!
//! The users of a ledger also share the fences: which changes wait for the end of a lost session.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use blkmq_core::ids::{HctxId, REACTORS_MAX};
use blkmq_host::device::Losses;
use blkmq_sync::CachePadded;

use super::fences::Fences;

/// The state of durability of what was written to one server's disk.
#[derive(Debug)]
pub struct Ledger {
    /// The current epoch, from 1 on. Alone on its cache line: every write that ends reads it.
    epoch: CachePadded<AtomicU64>,
    /// The last epoch that is covered.
    durable: AtomicU64,
    /// How often writes may have been lost, and of how many of these losses at least one user was
    /// told.
    losses: AtomicU64,
    seen: AtomicU64,
    sessions: Mutex<Sessions>,
    fences: Fences,
    /// By hardware context: the epoch in which its latest write ended. Written once an epoch, so
    /// cache lines may be shared.
    dirty: Box<[AtomicU64]>,
}

/// The present connections.
#[derive(Debug, Default)]
struct Sessions {
    count: u32,
    /// By place: the instance that the server of the latest one reported.
    instances: BTreeMap<u64, Option<u64>>,
    /// Instances that another one has replaced.
    gone: VecDeque<u64>,
}

impl Default for Ledger {
    fn default() -> Self {
        Self {
            epoch: CachePadded::new(AtomicU64::new(1)),
            durable: AtomicU64::new(0),
            losses: AtomicU64::new(0),
            seen: AtomicU64::new(0),
            sessions: Mutex::default(),
            fences: Fences::default(),
            dirty: (0..REACTORS_MAX).map(|_| AtomicU64::new(0)).collect(),
        }
    }
}

// SeqCst throughout: a write that ended before a flush was sent, or before a session was made, on
// whichever thread, must be visible there. The cost for each write is one load of a line that is
// written once a flush.
impl Ledger {
    /// Records that a write which only a flush makes durable has ended. `latest` is the context's
    /// own copy of its record.
    #[inline]
    pub(super) fn wrote(&self, hctx: HctxId, latest: &mut u64) {
        let epoch = self.epoch.load(Ordering::SeqCst);
        if *latest != epoch {
            *latest = epoch;
            self.dirty[hctx.index()].fetch_max(epoch, Ordering::SeqCst);
        }
    }

    /// Begins an epoch with a flush that is about to be sent. Returns the epoch that the flush
    /// covers if it succeeds.
    pub(super) fn flush_sent(&self) -> u64 {
        self.epoch.fetch_add(1, Ordering::SeqCst)
    }

    /// A flush has succeeded.
    pub(super) fn flushed(&self, epoch: u64) {
        self.durable.fetch_max(epoch, Ordering::SeqCst);
    }

    /// Writes may be lost, as the server itself reported.
    pub(super) fn lose(&self) {
        self.losses.fetch_add(1, Ordering::SeqCst);
        self.flushed(self.flush_sent());
    }

    /// Records a new session with the server at a place. Returns whether writes may have been lost
    /// between the earlier sessions and this one.
    pub(super) fn session_made(&self, place: u64, instance: Option<u64>) -> bool {
        let mut sessions = self.sessions();
        let before = sessions.instances.get(&place).copied().flatten();
        let has_survived = match (before, instance) {
            (Some(_), _) => before == instance,
            (None, Some(_)) if sessions.instances.values().any(|known| *known == instance) => true,
            _ => sessions.count > 0,
        };
        sessions.count += 1;
        sessions.instances.insert(place, instance);
        if let Some(gone) = before.filter(|before| Some(*before) != instance)
            && sessions.replace(gone, instance)
        {
            self.fences.server_gone(gone);
        }
        let is_loss = !has_survived && self.is_dirty();
        if is_loss {
            self.lose();
        }
        is_loss
    }

    /// The changes that have to wait for the end of a lost session.
    pub(super) fn fences(&self) -> &Fences {
        &self.fences
    }

    /// A session is over.
    pub(super) fn session_lost(&self) {
        let mut sessions = self.sessions();
        debug_assert!(sessions.count > 0, "a session ends that was not made");
        sessions.count = sessions.count.saturating_sub(1);
    }

    /// Returns whether there are writes that no flush has covered.
    pub(super) fn is_dirty(&self) -> bool {
        let durable = self.durable.load(Ordering::SeqCst);
        self.dirty
            .iter()
            .any(|epoch| epoch.load(Ordering::SeqCst) > durable)
    }

    /// How often writes may have been lost.
    pub(crate) fn losses(&self) -> Losses {
        Losses {
            seen: self.seen.load(Ordering::SeqCst),
            count: self.losses.load(Ordering::SeqCst),
        }
    }

    /// Records that a user has seen the first `count` losses.
    pub(crate) fn mark_seen(&self, count: u64) {
        self.seen.fetch_max(count, Ordering::SeqCst);
    }

    fn sessions(&self) -> MutexGuard<'_, Sessions> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Sessions {
    /// An instance of a server has replaced another one, at every place of that one. Returns
    /// whether this is so: not if the other one was replaced before, and this report of it is late.
    fn replace(&mut self, gone: u64, now: Option<u64>) -> bool {
        if now.is_some_and(|now| self.gone.contains(&now)) {
            return false;
        }
        for known in self.instances.values_mut().filter(|known| **known == Some(gone)) {
            *known = now;
        }
        if self.gone.len() == GONE_MAX {
            self.gone.pop_front();
        }
        self.gone.push_back(gone);
        true
    }
}

/// Most gone instances that are remembered. No reports of older ones are under way any more.
const GONE_MAX: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    fn ledger() -> (Ledger, u64) {
        let ledger = Ledger::default();
        assert!(!ledger.session_made(0, None));
        (ledger, 0)
    }

    #[test]
    fn write_that_ends_after_a_flush_was_sent_is_not_covered_by_it() {
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
        assert!(ledger.session_made(0, None));
        assert_eq!(ledger.losses(), Losses { count: 1, seen: 0 });
        assert!(!ledger.is_dirty(), "what is lost is accounted for");
    }

    #[test]
    fn session_that_was_there_all_the_time_leads_to_the_same_server() {
        let (ledger, mut latest) = ledger();
        assert!(!ledger.session_made(0, None));
        ledger.wrote(HctxId(0), &mut latest);
        ledger.session_lost();
        assert!(!ledger.session_made(0, None));
        ledger.session_lost();
        ledger.session_lost();
        assert!(ledger.session_made(0, None), "none was left");
    }

    #[test]
    fn server_that_names_its_instance_is_believed() {
        let ledger = Ledger::default();
        ledger.session_made(0, Some(7));
        ledger.wrote(HctxId(0), &mut 0);
        ledger.session_lost();
        assert!(!ledger.session_made(0, Some(7)), "it has kept its memory");
        assert!(
            ledger.session_made(0, Some(8)),
            "the session that is still counted leads to a server that is gone"
        );
        ledger.wrote(HctxId(0), &mut 0);
        assert!(
            ledger.session_made(0, None),
            "one that does not know has taken its place"
        );
    }

    #[test]
    fn places_of_one_server_know_it_together_and_places_of_others_do_not() {
        let ledger = Ledger::default();
        ledger.session_made(0, Some(7));
        ledger.session_made(1, Some(7));
        ledger.session_made(2, Some(9));
        ledger.wrote(HctxId(0), &mut 0);
        assert!(
            !ledger.session_made(1, Some(7)),
            "the other server is another one"
        );
        assert!(ledger.session_made(0, Some(8)), "the first has started again");
        ledger.wrote(HctxId(0), &mut 1);
        assert!(!ledger.session_made(1, Some(8)), "that is known");
    }

    #[test]
    fn late_word_of_a_server_that_is_gone_ends_no_fence_of_the_next_one() {
        use crate::nbd::fences::Named;
        let ledger = Ledger::default();
        ledger.session_made(0, Some(7));
        ledger.session_made(0, Some(8));
        let session = Named {
            number: 1,
            instance: 8,
        };
        ledger.fences().lost(session, vec![(0, 512)]);
        ledger.session_made(0, Some(7));
        assert!(ledger.fences().is_any());
        ledger.session_made(0, Some(8));
        ledger.session_made(0, Some(10));
        assert!(!ledger.fences().is_any(), "it is gone itself");
    }
}
