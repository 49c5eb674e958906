//! What becomes of the open requests of a connection that ends: they are finished and their replies
//! sent, or they are dropped because the client is gone or has given up the connection.

use std::io;

use blkmq_core::time::Instant;
use blkmq_host::service::Cx;

use super::intake::Intake;
use super::{Connection, NbdClient};
use crate::common::client::Protocol;
use crate::common::life::Life;

impl NbdClient {
    /// The client has given up the connection: what it had on its way here it may have sent again
    /// over another connection, and overwritten since. No more of it is begun.
    #[cold]
    pub(super) fn reset(&mut self, now: Instant) {
        if self.life.is_open() {
            self.handle_recv(Err(io::ErrorKind::ConnectionReset.into()), now);
        }
    }

    /// Cancels bios of a client that is gone, if they were not submitted. The queue has the others;
    /// they are waited for.
    fn cancel_refused(&mut self) {
        for bio in self.refused.drain(..) {
            let index = bio.cookie as u32;
            self.protocol.slots.get(index).take_back(&bio);
            self.protocol.cancel(index);
        }
    }

    /// Frees what is not needed any more: replies to a client that is gone, requests that were not
    /// begun, and at last the socket.
    pub(super) fn wind_up(&mut self, cx: &mut Cx<'_>) {
        if self.life == Life::Gone {
            self.forget_replies();
            self.cancel_refused();
            self.protocol.cancel_fences();
        }
        let connection = &mut self.protocol;
        // A write that will never be whole.
        if let Intake::Payload { slot, .. } = std::mem::replace(&mut connection.intake, Intake::Message) {
            connection.cancel(slot);
        }
        connection.slots.give_up();
        if self.refused.is_empty() && self.protocol.has_ended(self.life) {
            self.protocol.wire.say_goodbye();
            self.protocol.readiness.end(cx.ring_client());
        }
    }

    fn forget_replies(&mut self) {
        let Connection {
            transmit,
            slots,
            session,
            ..
        } = &mut self.protocol;
        if session.is_negotiating() || self.disk.is_none() {
            transmit.clear(|_| {});
        } else {
            transmit.clear(|slot| {
                let request = slots.end(slot);
                session.replies().read_sent(&request);
            });
        }
    }
}

impl Connection {
    /// A request ends without a reply.
    fn cancel(&mut self, slot: u32) {
        let request = self.slots.end(slot);
        self.session.replies().cancel(&request);
    }

    /// Nobody waits for fences and look-ups any more.
    fn cancel_fences(&mut self) {
        for (slot, _) in std::mem::take(&mut self.fences) {
            self.cancel(slot);
        }
        if let Some(extent_replies) = &self.extent_replies {
            extent_replies.give_up();
        }
    }
}
