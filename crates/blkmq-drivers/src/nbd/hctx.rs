//! A hardware context of an NBD drive: which connection carries a request, and what becomes of the
//! request when that connection is lost.
//!
//! A batch goes through one connection, the least busy, so that it is sent with one call. When a
//! connection is lost, its open requests end with `Transport` or, within `reconnect` seconds, are
//! sent again: every operation here can be repeated. Writes that had been *completed* before and
//! were only in the server's cache cannot be repeated: `ledger` knows when these may be lost, and
//! then the next flush of each context fails. Requests of the lost connection that the server still
//! executes must not land behind their repetition: `fence` holds changes back until the server has
//! ended that session.
//!
//! One hardware context belongs to one reactor. `connection` sends and receives, `reconnect` makes
//! new ones.

mod fence;
mod loss;

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use blkmq_core::bio::{Flags, Op, Status};
use blkmq_core::driver::{Demand, Done, HctxDriver, IdlePolled, Issued, TimedOut};
use blkmq_core::ids::{Cookie, DiskId, HctxId};
use blkmq_core::request::Request;
use blkmq_core::time::{Instant, Nanos};
use blkmq_host::ring::{Completion, RingClient, RingHandle};
use blkmq_nbd::codec::TransmissionFlags;

use super::connection::{Connection, Lost};
use super::device::Shared;
use super::ledger::Ledger;
use super::reconnect::Mailbox;
use super::slots::{Slots, State};

/// The driver's side of one hardware context.
pub(super) struct NbdHctx {
    ring_client: RingClient,
    shared: Arc<Shared>,
    mailbox: Arc<Mailbox>,
    links: Box<[Link]>,
    /// The connection for the batch that is being issued.
    batch: Option<u16>,
    slots: Slots,
    /// Requests without a connection, in the order of their arrival, and changes that wait for a
    /// session to be fenced.
    held: VecDeque<u32>,
    /// What has ended outside of `reap`.
    done: Vec<Done>,
    /// When the last connection was lost, or since when none was made yet; `None` while there is
    /// one.
    down_since: Option<Instant>,
    /// Until the first attempt to connect has ended, no request is refused.
    is_young: bool,
    /// A timer in the ring will trigger the search for expired requests.
    has_heartbeat: bool,
    /// The ledger of writes that may be lost; this context's number there, and what it recorded
    /// last.
    ledger: Arc<Ledger>,
    number: HctxId,
    noted: u64,
    /// Losses that a flush here has reported.
    losses_seen: u64,
    /// The server has a cache that a flush empties.
    has_cache: bool,
    /// A connection was made since the core last asked whether to run this context.
    wants_rerun: bool,
    /// The time of the latest call with a time.
    now: Instant,
    completions: Vec<Completion>,
}

/// An entry for a connection.
struct Link {
    connection: Option<Connection>,
    /// How many connections this entry had: completions for former ones are stale.
    epoch: u32,
    /// When the latest connection was made, and how many in a row were short-lived.
    since: Instant,
    short_lived: u32,
}

impl Link {
    const EMPTY: Self = Self {
        connection: None,
        epoch: 0,
        since: Instant(0),
        short_lived: 0,
    };
}

impl NbdHctx {
    /// Makes a context of `count` slots and `connections` connections on the reactor of `ring`.
    /// Does not wait for the connections.
    pub(super) fn new(
        shared: Arc<Shared>,
        ring: &RingHandle,
        number: HctxId,
        count: usize,
        connections: u16,
    ) -> io::Result<Self> {
        let mut hctx = Self {
            ring_client: ring.open_client(),
            mailbox: Mailbox::new()?,
            links: (0..connections).map(|_| Link::EMPTY).collect(),
            batch: None,
            slots: Slots::new(count),
            held: VecDeque::with_capacity(count),
            done: Vec::with_capacity(count),
            down_since: Some(Instant(0)),
            is_young: true,
            has_heartbeat: false,
            number,
            noted: 0,
            losses_seen: shared.ledger().losses().count,
            ledger: Arc::clone(shared.ledger()),
            has_cache: shared.disk.shape.can(TransmissionFlags::SEND_FLUSH),
            wants_rerun: false,
            now: Instant(0),
            completions: Vec::with_capacity(count),
            shared,
        };
        hctx.ledger.fences().join(&hctx.mailbox);
        hctx.watch_news();
        let first = hctx
            .shared
            .disk
            .first
            .lock()
            .ok()
            .and_then(|mut first| first.take());
        if let Some(dialed) = first {
            hctx.connected(0, dialed);
        }
        for number in 0..connections {
            if hctx.links[usize::from(number)].connection.is_none() {
                hctx.request_connection(number);
            }
        }
        Ok(hctx)
    }

    /// Answers a request that needs no server. `None` if the request is to be sent.
    fn answer(&mut self, rq: &Request) -> Option<Status> {
        let shape = &self.shared.disk.shape;
        match rq.op() {
            _ if rq.disk() != DiskId(0) => Some(Status::Invalid),
            Op::Flush if !shape.can(TransmissionFlags::SEND_FLUSH) => Some(Status::Ok),
            Op::WriteZeroes
                if rq.flags().has(Flags::FAST_ONLY) && !shape.can(TransmissionFlags::SEND_FAST_ZERO) =>
            {
                Some(Status::NotSupported)
            }
            _ => None,
        }
    }

    /// Chooses the connection for a batch: the one with the fewest requests. `None` if there is no
    /// connection.
    #[inline]
    fn lane_for_batch(&mut self) -> Option<u16> {
        if let Some(link) = self.batch {
            return Some(link);
        }
        let up = (0..).zip(&self.links).filter_map(|(number, link)| {
            let connection = link.connection.as_ref()?;
            Some((connection.in_flight, number))
        });
        self.batch = up.min().map(|(_, number)| number);
        self.batch
    }

    /// Returns whether requests wait for a connection instead of failing.
    fn holds(&self) -> bool {
        let Some(since) = self.down_since else {
            return true;
        };
        let reconnect = nanos(self.shared.disk.config.reconnect);
        self.is_young || reconnect > Nanos::ZERO && self.now < since + reconnect
    }

    /// Gives a request to a connection, to be sent with the rest of the batch.
    #[inline]
    fn push(&mut self, link: u16, number: u32) {
        let timeout = nanos(self.shared.disk.config.timeout);
        let slot = self.slots.get_mut(number);
        slot.state = State::Sent(link);
        if slot.op == Op::Flush && !slot.is_fence {
            slot.epoch = self.ledger.flush_sent();
        }
        if timeout > Nanos::ZERO {
            slot.expires = self.now + timeout;
            self.schedule_heartbeat();
        }
        let connection = self.links[usize::from(link)].connection.as_mut();
        connection
            .expect("a connection that is there")
            .push(&mut self.slots, number);
    }

    /// Sends the pushed requests.
    fn send_batch(&mut self) {
        if let Some(link) = self.batch.take() {
            self.send(link);
        }
    }

    fn send(&mut self, number: u16) {
        let link = &mut self.links[usize::from(number)];
        let Some(connection) = &mut link.connection else {
            return;
        };
        if connection.is_blocked {
            return;
        }
        match connection.send(&self.slots) {
            Ok(()) if connection.is_blocked => {
                let user = user(WRITABLE, number, link.epoch);
                self.ring_client
                    .push_poll(connection.fd(), libc::POLLOUT, false, user);
            }
            Ok(()) => {}
            Err(lost) => self.lose(number, &lost),
        }
    }

    /// Receives replies. Requests that ended are appended to `done`.
    fn receive(&mut self, number: u16, done: &mut Vec<Done>) {
        let link = &mut self.links[usize::from(number)];
        let Some(connection) = &mut link.connection else {
            return;
        };
        let received = connection.receive(&mut self.slots, number);
        if matches!(received, Ok(true)) && !std::mem::replace(&mut connection.comes_again, true) {
            self.ring_client.push_nop(user(MORE, number, link.epoch));
        }
        self.take_ended(done);
        if let Err(lost) = received {
            self.lose(number, &lost);
        }
    }

    #[inline]
    fn take_ended(&mut self, done: &mut Vec<Done>) {
        let mut ended = std::mem::take(&mut self.slots.ended);
        for number in ended.drain(..) {
            let slot = self.slots.get(number);
            if slot.is_fence {
                self.end_fence(slot.range().0, slot.status);
                continue;
            }
            let (cookie, mut status) = (slot.cookie, slot.status);
            if slot.op == Op::Flush {
                status = self.end_flush(status, slot.epoch);
            } else if status.is_ok() && slot.leaves_dirt() && self.has_cache {
                self.ledger.wrote(self.number, &mut self.noted);
            } else if status == Status::Io && slot.is_forced() {
                // The server may have flushed for this write, and reported that an earlier one was
                // lost.
                self.ledger.lose();
            }
            self.shared.health.note(status);
            done.push(Done { cookie, status });
        }
        self.slots.ended = ended;
    }

    /// Decides the status of a flush that the server has answered: an error if this flush, or an
    /// earlier loss that no flush here has reported, may have cost writes.
    fn end_flush(&mut self, status: Status, epoch: u64) -> Status {
        if status.is_ok() {
            self.ledger.flushed(epoch);
        } else {
            // A server drops what it could not make durable, and would report success for the next
            // flush.
            self.ledger.lose();
        }
        let losses = self.ledger.losses().count;
        if std::mem::replace(&mut self.losses_seen, losses) == losses {
            return status;
        }
        self.ledger.mark_seen(losses);
        // Of the medium: no other path has the lost writes.
        Status::Medium
    }

    /// Ends a request without a reply; the next `reap` reports it.
    fn end(&mut self, number: u32, status: Status) {
        let slot = self.slots.get_mut(number);
        slot.state = State::Idle;
        if self.done.is_empty() {
            self.ring_client.push_nop(user(CANCEL, 0, 0));
        }
        self.shared.health.note(status);
        self.done.push(Done {
            cookie: slot.cookie,
            status,
        });
    }

    /// Handles completions of the ring.
    #[inline]
    fn take_completion(&mut self, completion: &Completion, done: &mut Vec<Done>) {
        let (kind, number, epoch) = parts(completion.user);
        match kind {
            NEWS => {
                self.take_news();
                if !completion.has_more() {
                    self.watch_news();
                }
            }
            READABLE | WRITABLE | MORE => {
                let link = self.links.get_mut(usize::from(number));
                let Some(connection) = link
                    .filter(|link| link.epoch == epoch)
                    .and_then(|link| link.connection.as_mut())
                else {
                    return;
                };
                if kind == WRITABLE {
                    connection.is_blocked = false;
                    return self.send(number);
                }
                if kind == MORE {
                    connection.comes_again = false;
                } else {
                    connection.note_poll(completion.result);
                    if !completion.has_more() {
                        // The poll has ended: nothing else completes as READABLE, so there is one.
                        self.ring_client
                            .push_poll(connection.fd(), READABLE_EVENTS, true, completion.user);
                    }
                }
                self.receive(number, done);
            }
            HEARTBEAT => {
                self.has_heartbeat = false;
                self.look_for_late();
                if !self.shared.reconnector.start() {
                    self.schedule_heartbeat();
                }
            }
            _ => {}
        }
    }

    /// Gives up connections with an expired request. Checks again while there are requests with a
    /// deadline.
    #[cold]
    fn look_for_late(&mut self) {
        for link in 0..self.links.len() as u16 {
            let sent = self
                .slots
                .iter()
                .filter(|(_, slot)| slot.state == State::Sent(link));
            let late = sent.filter(|(_, slot)| slot.expires <= self.now);
            let late: Vec<u32> = late.map(|(number, _)| number).collect();
            if late.is_empty() {
                continue;
            }
            self.give_up_session(link);
            for number in late {
                if self.slots.get(number).is_fence {
                    continue;
                }
                if std::mem::replace(&mut self.slots.get_mut(number).was_late, true) {
                    self.end(number, Status::Timeout);
                }
            }
            self.lose(link, &Lost::Late);
        }
        if self
            .slots
            .iter()
            .any(|(_, slot)| matches!(slot.state, State::Sent(_)))
        {
            self.schedule_heartbeat();
        }
    }

    /// Makes the ring complete a timer in about a second: a timer for each request would cost as
    /// much as the request.
    #[inline]
    fn schedule_heartbeat(&mut self) {
        if !std::mem::replace(&mut self.has_heartbeat, true) {
            self.ring_client.push_heartbeat(user(HEARTBEAT, 0, 0));
        }
    }

    /// When held requests are to fail.
    fn end_of_hold(&self) -> Option<Instant> {
        if self.held.is_empty() || self.is_young {
            return None;
        }
        let since = self.down_since?;
        Some(since + nanos(self.shared.disk.config.reconnect))
    }

    /// Asserts that all parts are consistent.
    #[cfg(test)]
    pub(super) fn check(&self) {
        for (number, link) in (0..).zip(&self.links) {
            link.connection
                .iter()
                .for_each(|connection| connection.check(&self.slots, number));
        }
        let held = self
            .slots
            .iter()
            .filter(|(_, slot)| slot.state == State::AwaitsConnection);
        assert_eq!(held.count(), self.held.len(), "requests that are held");
    }

    /// How many connections there are.
    #[cfg(test)]
    pub(super) fn connections(&self) -> usize {
        self.links.iter().filter(|link| link.connection.is_some()).count()
    }
}

impl HctxDriver for NbdHctx {
    fn issue(&mut self, rq: &Request, cookie: Cookie, last: bool, now: Instant) -> Issued {
        self.now = now;
        let answer = match self.answer(rq) {
            Some(status) => Err(status),
            None if self.down_since.is_some() && !self.holds() => Err(Status::Transport),
            None => self.slots.fill(rq, cookie),
        };
        let issued = match answer {
            Ok(number) => {
                match self.lane_for_batch() {
                    Some(link) if !self.must_wait(link, number) => self.push(link, number),
                    _ => {
                        self.slots.get_mut(number).state = State::AwaitsConnection;
                        self.held.push_back(number);
                    }
                }
                Issued::Queued
            }
            Err(status) => Issued::Done(status),
        };
        if last {
            self.send_batch();
        }
        issued
    }

    fn commit(&mut self) {
        self.send_batch();
    }

    fn reap(&mut self, now: Instant, done: &mut Vec<Done>) {
        self.now = now;
        if self.ring_client.has_completed() {
            let mut completions = std::mem::take(&mut self.completions);
            self.ring_client.take(&mut completions);
            for completion in completions.drain(..) {
                self.take_completion(&completion, done);
            }
            self.completions = completions;
        }
        if self.end_of_hold().is_some_and(|at| at <= now) {
            self.send_held();
        }
        done.append(&mut self.done);
    }

    /// Connections are also lost and made while nothing is in flight.
    fn idle_polled(&mut self) -> Option<&mut dyn IdlePolled> {
        Some(self)
    }

    fn next_event(&self) -> Option<Instant> {
        self.end_of_hold()
    }

    /// Completions come through the ring in any case, where checking costs no system call.
    fn set_polled(&mut self, on: bool) -> bool {
        on
    }

    /// Gives the connection up: nothing else makes a server drop a request. With `reconnect` the
    /// request is sent once more; if it is late again, it ends.
    fn timed_out(&mut self, cookie: Cookie) -> TimedOut {
        let number = cookie.tag().0;
        let may_wait = !self.shared.disk.config.reconnect.is_zero();
        let slot = self.slots.get_mut(number);
        match slot.state {
            _ if slot.cookie != cookie => TimedOut::Ended,
            State::AwaitsConnection if self.down_since.is_none() => self.fence_timed_out(number),
            State::Idle | State::AwaitsConnection => TimedOut::Wait,
            State::Sent(link) => {
                self.give_up_session(link);
                let slot = self.slots.get_mut(number);
                let is_over = !may_wait || std::mem::replace(&mut slot.was_late, true);
                if is_over {
                    slot.state = State::Idle;
                }
                self.lose(link, &Lost::Late);
                if is_over { TimedOut::Ended } else { TimedOut::Wait }
            }
        }
    }
}

impl IdlePolled for NbdHctx {
    fn next_demand(&mut self) -> Option<Demand> {
        std::mem::take(&mut self.wants_rerun).then_some(Demand::Rerun)
    }
}

impl Drop for NbdHctx {
    fn drop(&mut self) {
        self.shared.reconnector.forget(&self.mailbox);
        self.ring_client.push_cancel(user(NEWS, 0, 0), user(CANCEL, 0, 0));
        for (number, link) in (0..).zip(&mut self.links) {
            let Some(connection) = &mut link.connection else {
                continue;
            };
            self.ledger.session_lost();
            self.shared.health.disconnected();
            let fence = self.slots.get(self.slots.fence());
            if fence.state == State::Sent(number) {
                self.ledger.fences().release(fence.range().0);
            }
            connection.say_goodbye(&self.slots);
            connection.shut();
            for kind in [READABLE, WRITABLE] {
                self.ring_client
                    .push_cancel(user(kind, number, link.epoch), user(CANCEL, 0, 0));
            }
        }
        self.ring_client.ring().submit();
    }
}

fn nanos(duration: std::time::Duration) -> Nanos {
    Nanos(duration.as_nanos() as u64)
}

/// User data of an entry of the ring: its kind, the connection and its epoch.
fn user(kind: u8, link: u16, epoch: u32) -> u64 {
    u64::from(kind) << 40 | u64::from(link) << 24 | u64::from(epoch)
}

fn parts(user: u64) -> (u8, u16, u32) {
    ((user >> 40) as u8, (user >> 24) as u16, user as u32 & EPOCH_MAX)
}

/// There is something to receive, or the end of the stream.
const READABLE: u8 = 0;
/// What is polled for that.
const READABLE_EVENTS: i16 = libc::POLLIN | libc::POLLRDHUP;
/// The socket takes bytes again.
const WRITABLE: u8 = 1;
/// The mailbox has news.
const NEWS: u8 = 2;
/// There may be more to receive.
const MORE: u8 = 3;
/// Time to look for expired requests.
const HEARTBEAT: u8 = 4;
/// To be ignored, or only to have `reap` called.
const CANCEL: u8 = 5;
const EPOCH_MAX: u32 = (1 << 24) - 1;

#[cfg(test)]
mod doubt_tests;
#[cfg(test)]
mod fence_tests;
#[cfg(test)]
mod hostile_tests;
#[cfg(test)]
mod rig;
#[cfg(test)]
mod tests;
