//! The fences of lost sessions: changes that overlap open requests of a lost session wait until the
//! server has reported that all of that session has ended. So requests that the network, or the server,
//! still carries cannot land behind their repetition. Contexts that share a ledger share the fences, and
//! so do paths to the same storage.
//!
//! ```text
//!  session lost, with changes under way ─► wanted ─► claimed by a context with a connection to the same server: FENCE sent
//!       overlapping changes are held        ▲  │            │ its connection is lost        │ answered
//!                                           │  └─ another   └───────► wanted                └─► over: what is held goes
//!                                              instance of the server is there: over
//! ```
//!
//! Only a server that knows named sessions (ours) can be asked. `hctx` asks and holds;
//! `docs/exports/nbd.md` has the messages.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use blkmq_sync::CachePadded;

use super::reconnect::Mailbox;

/// A session that has a name at its server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Named {
    /// Its number among those of this process.
    pub(super) number: u64,
    /// The instance of the server that has it.
    pub(super) instance: u64,
}

/// The lost sessions that may still change something.
#[derive(Debug, Default)]
pub(super) struct Fences {
    /// Their number. Alone on its cache line: every change that is sent reads it.
    count: CachePadded<AtomicUsize>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// By number.
    lost: BTreeMap<u64, Lost>,
    /// The contexts that may fence, and hold changes.
    contexts: Vec<Weak<Mailbox>>,
}

#[derive(Debug)]
struct Lost {
    instance: u64,
    /// A context has sent the fence.
    is_claimed: bool,
    changes: Vec<Range>,
}

/// The start of a change, and its bytes.
pub(super) type Range = (u64, u64);

impl Fences {
    /// Registers a context, which is notified when a session wants to be fenced, and when one is.
    pub(super) fn join(&self, context: &Arc<Mailbox>) {
        self.lock().contexts.push(Arc::downgrade(context));
    }

    /// Records a session that was lost while these changes were under way.
    pub(super) fn lost(&self, session: Named, changes: Vec<Range>) {
        if changes.is_empty() {
            return;
        }
        let mut state = self.lock();
        let lost = Lost {
            instance: session.instance,
            is_claimed: false,
            changes,
        };
        state.lost.insert(session.number, lost);
        self.changed(&mut state);
    }

    /// Returns whether any session is to be fenced.
    #[inline]
    pub(super) fn is_any(&self) -> bool {
        // Acquire: pairs with the Release in `changed`, which comes before the requests of the lost session go elsewhere.
        self.count.load(Ordering::Acquire) > 0
    }

    /// Returns whether a change of a range has to wait before it is sent to this instance of a
    /// server.
    #[cold]
    pub(super) fn holds(&self, instance: u64, (offset, len): Range) -> bool {
        let state = self.lock();
        // No room to record one more: all changes are held, and no more sessions are added.
        let is_full = state.lost.len() >= LOST_MAX;
        let overlaps = |change: &Range| change.0 < offset + len && offset < change.0 + change.1;
        let mut there = state.lost.values().filter(|lost| lost.instance == instance);
        there.any(|lost| is_full || lost.changes.iter().any(overlaps))
    }

    /// Takes a session that this instance of a server is to be asked to fence. The taker must
    /// report the result.
    pub(super) fn claim(&self, instance: u64) -> Option<u64> {
        let mut state = self.lock();
        let mut wanted = state.lost.iter_mut();
        let (number, lost) = wanted.find(|(_, lost)| lost.instance == instance && !lost.is_claimed)?;
        lost.is_claimed = true;
        Some(*number)
    }

    /// Everything that the session began has ended, or nobody can find out whether it has.
    pub(super) fn over(&self, number: u64) {
        let mut state = self.lock();
        if state.lost.remove(&number).is_some() {
            self.changed(&mut state);
        }
    }

    /// The connection that carried the fence was lost: another one must send it.
    pub(super) fn release(&self, number: u64) {
        let mut state = self.lock();
        if let Some(lost) = state.lost.get_mut(&number) {
            lost.is_claimed = false;
            self.changed(&mut state);
        }
    }

    /// An instance of a server is gone, with all that it had begun.
    pub(super) fn server_gone(&self, instance: u64) {
        let mut state = self.lock();
        let before = state.lost.len();
        state.lost.retain(|_, lost| lost.instance != instance);
        if state.lost.len() < before {
            self.changed(&mut state);
        }
    }

    /// Makes all contexts check.
    fn changed(&self, state: &mut State) {
        // Release: pairs with the Acquire in `is_any`.
        self.count.store(state.lost.len(), Ordering::Release);
        state.contexts.retain(|context| {
            let context = context.upgrade();
            context.iter().for_each(|context| context.look_at_fences());
            context.is_some()
        });
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Most lost sessions whose changes are recorded.
const LOST_MAX: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;

    fn lost(fences: &Fences, number: u64, instance: u64, changes: &[Range]) {
        fences.lost(Named { number, instance }, changes.to_vec());
    }

    #[test]
    fn changes_wait_that_overlap_what_was_under_way_at_the_same_server() {
        let fences = Fences::default();
        lost(&fences, 1, 7, &[]);
        assert!(!fences.is_any(), "nothing of it can land late");
        lost(&fences, 2, 7, &[(4096, 4096), (65536, 512)]);
        assert!(fences.is_any());
        for (range, holds) in [
            ((0, 4096), false),
            ((0, 4097), true),
            ((8191, 1), true),
            ((8192, 4096), false),
            ((65536, 512), true),
        ] {
            assert_eq!(fences.holds(7, range), holds, "{range:?}");
            assert!(!fences.holds(8, range), "another server");
        }
        assert_eq!((fences.claim(8), fences.claim(7)), (None, Some(2)));
        assert_eq!(fences.claim(7), None, "somebody does it");
        fences.release(2);
        assert_eq!(fences.claim(7), Some(2));
        fences.over(2);
        assert!(!fences.is_any() && !fences.holds(7, (4096, 4096)));
    }

    #[test]
    fn server_that_is_gone_has_nothing_left_to_fence() {
        let fences = Fences::default();
        lost(&fences, 1, 7, &[(0, 512)]);
        lost(&fences, 2, 8, &[(0, 512)]);
        fences.server_gone(7);
        assert!(!fences.holds(7, (0, 512)) && fences.holds(8, (0, 512)));
    }

    #[test]
    fn beyond_the_limit_everything_waits() {
        let fences = Fences::default();
        for number in 0..LOST_MAX as u64 {
            assert!(!fences.holds(7, (0, 512)));
            lost(&fences, number, 7, &[(4096, 512)]);
        }
        assert!(fences.holds(7, (0, 512)));
        fences.over(3);
        assert!(!fences.holds(7, (0, 512)));
    }
}
