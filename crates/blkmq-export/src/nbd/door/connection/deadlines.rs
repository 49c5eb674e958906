//! Decides which client is too late: with the selection of an export, with taking a reply, with the
//! rest of a request, or with the end.

use std::time::Duration;

use blkmq_core::time::{Instant, Nanos};
use blkmq_host::service::Cx;

use super::Connection;
use crate::common::life::Life;

impl Connection {
    /// Enforces the deadlines: of the handshake, the unread reply and the incomplete message.
    pub(super) fn watch_time(&mut self, cx: &mut Cx<'_>) {
        self.watch_half_message(cx.now());
        let deadlines = self.deadlines().into_iter().flatten().map(|(at, _)| at);
        match deadlines.min() {
            Some(at) if self.life != Life::Gone => cx.set_timer(at),
            _ => cx.clear_timer(),
        }
    }

    /// Records since when an incomplete message waits for its rest. Not while the server itself
    /// holds the client back.
    pub(super) fn watch_half_message(&mut self, now: Instant) {
        let is_half = self.filling.is_some() || !self.receive.waiting().is_empty();
        let held_back = self.is_busy || !self.refused.is_empty() || self.is_blocked || self.life.is_queued();
        if !is_half || held_back {
            self.half_since = None;
        } else if self.half_since.is_none() || self.half_messages != self.messages {
            self.half_since = Some(now);
            self.half_messages = self.messages;
        }
    }

    /// The deadlines that run, each with the message for the log when it has passed.
    pub(super) fn deadlines(&self) -> [Option<(Instant, &'static str)>; 4] {
        let limits = &self.door.limits;
        let of = |since: Option<Instant>, limit, reason| since.map(|since| (after(since, limit), reason));
        let negotiating = self.session.is_negotiating().then_some(self.started_at);
        [
            of(
                negotiating,
                limits.handshake_deadline,
                "no export was selected in time (handshake_deadline)",
            ),
            of(
                self.unread_since,
                limits.unread_reply_deadline,
                "replies were not read in time (unread_reply_deadline)",
            ),
            of(
                self.half_since,
                limits.half_request_deadline,
                "the rest of a request did not come in time (half_request_deadline)",
            ),
            of(
                self.draining_since.filter(|_| self.is_blocked),
                DRAIN_GRACE,
                "replies were not read in time before the shutdown",
            ),
        ]
    }

    pub(super) fn too_late(&self, now: Instant) -> Option<&'static str> {
        let past = self.deadlines().into_iter().flatten().find(|(at, _)| *at <= now);
        past.map(|(_, reason)| reason)
    }
}

fn after(since: Instant, limit: Duration) -> Instant {
    since + Nanos(limit.as_nanos().try_into().unwrap_or(u64::MAX))
}

/// How long a shutdown waits for a client that does not read.
const DRAIN_GRACE: Duration = Duration::from_secs(2);
