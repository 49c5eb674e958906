//! The fences of one hardware context: when a change waits for a lost session, and over which connection
//! the server is asked to fence that session. [`fences`](super::super::fences) records which changes wait
//! for which sessions.

use blkmq_core::bio::Status;
use blkmq_core::driver::TimedOut;

use super::{Lost, NbdHctx, State};

impl NbdHctx {
    /// Returns whether a request is a change that must not be sent yet.
    #[inline]
    pub(super) fn must_wait(&self, link: u16, number: u32) -> bool {
        self.ledger.fences().is_any() && self.must_wait_for_fence(link, number)
    }

    #[cold]
    fn must_wait_for_fence(&self, link: u16, number: u32) -> bool {
        let slot = self.slots.get(number);
        let connection = self.links[usize::from(link)].connection.as_ref();
        let Some(session) = connection.and_then(|connection| connection.session) else {
            return false;
        };
        slot.op.is_write() && self.ledger.fences().holds(session.instance, slot.range())
    }

    /// Records that a connection is being given up: from here on, changes that overlap its open
    /// ones have to wait. To be called before these are ended or sent elsewhere.
    #[cold]
    pub(super) fn give_up_session(&mut self, link: u16) {
        let connection = self.links[usize::from(link)].connection.as_mut();
        let Some(session) = connection.and_then(|connection| connection.session.take()) else {
            return;
        };
        let sent = self.slots.iter().map(|(_, slot)| slot);
        let changes = sent.filter(|slot| slot.state == State::Sent(link) && slot.op.is_write());
        let changes = changes.map(|slot| slot.range()).collect();
        self.ledger.fences().lost(session, changes);
    }

    /// Asks a server to fence a session, if a session is lost to whose server a connection here
    /// leads, and no fence is open yet.
    pub(super) fn send_fence(&mut self) {
        let fence = self.slots.fence();
        if !self.ledger.fences().is_any() || self.slots.get(fence).state != State::Idle {
            return;
        }
        for link in 0..self.links.len() as u16 {
            let connection = self.links[usize::from(link)].connection.as_ref();
            let session = connection.and_then(|connection| connection.session);
            let lost = session.and_then(|session| self.ledger.fences().claim(session.instance));
            if let Some(lost) = lost {
                let number = self.slots.fill_fence(lost);
                self.push(link, number);
                return self.send(link);
            }
        }
    }

    /// The server has answered a fence.
    #[cold]
    pub(super) fn end_fence(&mut self, session: u64, status: Status) {
        if !status.is_ok() {
            tracing::warn!(
                source = self.shared.disk.config.text,
                "nbd {}: the server cannot say that a lost connection has ended ({status:?}): a write of it may still land",
                self.shared.disk.config.text
            );
        }
        // Notifies all contexts, including this one.
        self.ledger.fences().over(session);
    }

    /// A change has waited for a fence as long as the queue allows: first the connection that
    /// carried the fence is given up, then the request.
    #[cold]
    pub(super) fn fence_timed_out(&mut self, number: u32) -> TimedOut {
        let slot = self.slots.get_mut(number);
        if std::mem::replace(&mut slot.was_late, true) {
            slot.state = State::Idle;
            self.held.retain(|held| *held != number);
            return TimedOut::Ended;
        }
        if let State::Sent(link) = self.slots.get(self.slots.fence()).state {
            self.lose(link, &Lost::Late);
        }
        TimedOut::Wait
    }
}
