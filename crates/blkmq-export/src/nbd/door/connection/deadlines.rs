//! When a client is too late: with the selection of an export, with taking a reply, with the rest of
//! a request, or with the end. `Client` asks after each batch, and when the time has come.

use std::time::Duration;

use blkmq_core::time::{Instant, Nanos};

use super::{Connection, NbdClient};
use crate::nbd::limits::Limits;

/// Since when a client has kept the server waiting.
#[derive(Debug, Default)]
pub(super) struct Deadlines {
    /// It arrived, or continued.
    pub(super) started_at: Instant,
    /// It has taken none of the waiting bytes.
    pub(super) unread_since: Option<Instant>,
    /// The same incomplete message has waited.
    half: Option<Half>,
    /// The engine shuts down.
    pub(super) draining_since: Option<Instant>,
    /// Messages that were taken whole.
    pub(super) messages: u64,
}

/// An incomplete message.
#[derive(Clone, Copy, Debug)]
struct Half {
    since: Instant,
    /// Messages before it.
    messages: u64,
}

impl Deadlines {
    /// All times begin anew.
    pub(super) fn restart(&mut self, now: Instant) {
        (self.unread_since, self.half) = (None, None);
        self.started_at = now;
    }

    /// Records whether the rest of a message is waited for.
    fn watch_half_message(&mut self, now: Instant, is_half: bool) {
        let messages = self.messages;
        self.half = match self.half {
            _ if !is_half => None,
            Some(half) if half.messages == messages => Some(half),
            _ => Some(Half { since: now, messages }),
        };
    }

    /// The deadline that comes first, with the message for the log when it has passed.
    fn first(
        &self,
        limits: &Limits,
        is_negotiating: bool,
        is_blocked: bool,
    ) -> Option<(Instant, &'static str)> {
        let of = |since: Option<Instant>, limit, reason| since.map(|since| (after(since, limit), reason));
        let deadlines = [
            of(
                is_negotiating.then_some(self.started_at),
                limits.handshake_deadline,
                "no export was selected in time (handshake_deadline)",
            ),
            of(
                self.unread_since,
                limits.unread_reply_deadline,
                "replies were not read in time (unread_reply_deadline)",
            ),
            of(
                self.half.map(|half| half.since),
                limits.half_request_deadline,
                "the rest of a request did not come in time (half_request_deadline)",
            ),
            of(
                self.draining_since.filter(|_| is_blocked),
                DRAIN_GRACE,
                "replies were not read in time before the shutdown",
            ),
        ];
        deadlines.into_iter().flatten().min_by_key(|(at, _)| *at)
    }
}

impl NbdClient {
    /// The next deadline. That of an incomplete message does not run while the server itself holds
    /// the client back.
    pub(super) fn next_deadline(&mut self, now: Instant) -> Option<(Instant, &'static str)> {
        let held_back = !self.refused.is_empty() || self.life.is_queued();
        let Connection {
            deadlines,
            intake,
            receive,
            readiness,
            session,
            door,
            ..
        } = &mut self.protocol;
        let is_blocked = readiness.is_blocked();
        let is_half = intake.is_payload() || !receive.waiting().is_empty();
        let held_back = held_back || intake.is_held_back() || is_blocked;
        deadlines.watch_half_message(now, is_half && !held_back);
        deadlines.first(&door.limits, session.is_negotiating(), is_blocked)
    }
}

fn after(since: Instant, limit: Duration) -> Instant {
    since + Nanos(limit.as_nanos().try_into().unwrap_or(u64::MAX))
}

/// How long a shutdown waits for a client that does not read.
const DRAIN_GRACE: Duration = Duration::from_secs(2);
