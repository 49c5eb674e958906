//! Decides what becomes of the open requests of a connection that ends: they are finished and their
//! replies sent, or they are dropped because the client is gone or has given up the connection.

use std::io;

use blkmq_core::time::Instant;
use blkmq_host::disk::Use;
use blkmq_host::service::{Cx, Service};

use super::{CANCEL, Connection, POLL_IN, POLL_OUT};
use crate::common::life::{Event, Life};
use crate::common::predecessors::Membership;

impl Connection {
    /// The client has given up the connection: what it had on its way here it may have sent again
    /// over another connection, and overwritten since. No more of it is begun.
    #[cold]
    pub(super) fn reset(&mut self, now: Instant) {
        if self.life.is_open() {
            self.handle_recv(Err(io::ErrorKind::ConnectionReset.into()), now);
        }
    }

    /// The client has fenced this connection over another one: nothing more is begun.
    #[cold]
    pub(super) fn end_if_fenced(&mut self, now: Instant) {
        if self.life != Life::Gone && self.place.as_ref().is_some_and(Membership::is_fenced) {
            let what = format_args!("{} ended: its client has given it up", self.name());
            self.log().info(now, what);
            self.life.apply(Event::Lose);
        }
    }

    /// The disk is to be removed: open requests are finished.
    #[cold]
    pub(super) fn drain_if_withdrawn(&mut self, cx: &mut Cx<'_>) {
        if self.life.is_open() && self.disk_use.as_ref().is_some_and(Use::is_to_end) {
            let what = format_args!("{} closed: the disk is removed", self.name());
            self.log().info(cx.now(), what);
            self.drain(cx);
        }
    }

    /// Discards the replies of a dead connection, and a write that will never be whole.
    pub(super) fn forget(&mut self) {
        let Self {
            transmit,
            slots,
            session,
            ..
        } = self;
        if session.is_negotiating() || self.disk.is_none() {
            transmit.clear(|_| {});
        } else {
            transmit.clear(|slot| {
                let request = slots.end(slot);
                session.replies().read_sent(&request);
            });
        }
    }

    /// Cancels requests of a client that is gone, if they were not submitted. The queue has the
    /// others; they are waited for.
    pub(super) fn cancel(&mut self) {
        for bio in self.refused.drain(..) {
            let index = bio.cookie as u32;
            self.slots.get(index).take_back(&bio);
            let request = self.slots.end(index);
            self.session.replies().cancel(&request);
        }
        for (slot, _) in self.fences.drain(..) {
            let request = self.slots.end(slot);
            self.session.replies().cancel(&request);
        }
    }

    pub(super) fn abandon_filling(&mut self) {
        if let Some((slot, _)) = self.filling.take() {
            let request = self.slots.end(slot);
            self.session.replies().cancel(&request);
        }
    }

    /// Frees what is not needed any more: replies to a dead client, requests that were not begun,
    /// and at last the socket.
    pub(super) fn wind_up(&mut self, cx: &mut Cx<'_>) {
        if self.life == Life::Gone {
            self.forget();
            self.cancel();
            if let Some(asker) = &self.asker {
                asker.give_up();
            }
        }
        if let Some(place) = &self.place {
            place.leave();
        }
        self.abandon_filling();
        self.starved = None;
        self.slots.give_up();
        if self.is_at_end() {
            self.wire.say_goodbye();
            if std::mem::take(&mut self.is_polling) {
                cx.ring_client().push_cancel(POLL_IN, CANCEL);
            }
            if std::mem::take(&mut self.is_blocked) {
                cx.ring_client().push_cancel(POLL_OUT, CANCEL);
            }
        }
    }

    /// Returns whether all open requests are finished and their replies sent, or cannot be sent.
    pub(super) fn is_at_end(&self) -> bool {
        let is_sent = !self.has_unsent() || self.life == Life::Gone && self.transmit.is_empty();
        self.slots.len() == 0 && is_sent && self.refused.is_empty()
    }
}
