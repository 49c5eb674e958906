//! Decides what one NBD connection does on its reactor: how it reacts to events, and what it sends
//! once per batch. `listener` makes connections; `receive` and `transmit` move bytes.
//!
//! ```text
//!  socket ─► intake: receives, lets the session judge ─► requests: begin, submit, end ─► replies, sent once per batch
//!            deadlines: which client is too late         ending: what happens to open requests when the client is gone
//!            moving: how another daemon continues the connection
//! ```

mod deadlines;
mod ending;
mod intake;
mod moving;
mod requests;
mod secure;

use std::collections::VecDeque;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use blkmq_core::bio::Bio;
use blkmq_core::time::Instant;
use blkmq_host::disk::{Disk, Use};
use blkmq_host::ring::Completion;
use blkmq_host::service::{Cx, Service};
use rustix::net::sockopt;

use self::moving::Restored;
use self::secure::Handshake;
use super::Door;
use super::receive::Receive;
use super::slots::Slots;
use super::transmit::{Sent, Transmit};
use super::wire::Wire;
use crate::common::admission::Ticket;
use crate::common::life::{Event, Life};
use crate::common::listener::Client;
use crate::common::log::Log;
use crate::common::lookup::Asker;
use crate::common::losses::Heard;
use crate::common::peer::{peer, watch_for_a_silent_end};
use crate::common::predecessors::{Fenced, Membership};
use crate::handover::Member;
use crate::nbd::session::{Request, Session};

/// One client.
pub(super) struct Connection {
    wire: Wire,
    /// The TLS handshake, while it is under way.
    handshake: Option<Handshake>,
    /// The peer, for messages.
    peer: String,
    session: Session,
    receive: Receive,
    transmit: Transmit,
    slots: Slots,
    /// The disk that the client selected, with what every bio needs of it.
    disk: Option<Disk>,
    /// The registration of the connection as a user of the disk.
    disk_use: Option<Use>,
    /// What the client was told of writes that may be lost.
    heard: Heard,
    /// The place of the connection among those of its disk, once a disk is selected.
    place: Option<Membership>,
    /// Fences, by their slots, and the sessions that have to end for them.
    fences: Vec<(u32, Fenced)>,
    /// A request that waits for memory for its payload.
    starved: Option<Request>,
    /// The write whose payload is being received, and how many bytes of it have arrived.
    filling: Option<(u32, usize)>,
    /// Bios for which the queue had no room.
    refused: VecDeque<Bio>,
    /// The socket may have bytes to receive.
    is_readable: bool,
    /// The peer sends no more; its last bytes may still wait in the socket.
    has_left: bool,
    /// The socket takes no more bytes; a poll waits for that to change.
    is_blocked: bool,
    is_polling: bool,
    /// The connection is called again in the next turn.
    comes_again: bool,
    life: Life,
    /// The session takes no more until replies are sent.
    is_busy: bool,
    /// Since when the client has taken none of the waiting bytes; since when the same incomplete
    /// message has waited; since when the engine shuts down.
    unread_since: Option<Instant>,
    half_since: Option<Instant>,
    draining_since: Option<Instant>,
    /// Messages that were taken whole, and their number when `half_since` was set.
    messages: u64,
    half_messages: u64,
    started_at: Instant,
    /// Where answers to look-ups arrive; set once a disk is selected.
    asker: Option<Arc<Asker>>,
    /// Poll results that arrived while the connection was at rest.
    missed: i32,
    /// What another daemon has saved beside the session, until the connection arrives.
    restored: Option<Restored>,
    door: Arc<Door>,
    ticket: Ticket,
    member: Member,
}

impl Connection {
    pub(super) fn new(client: Client, door: Arc<Door>) -> Self {
        let Client {
            socket,
            is_tcp,
            ticket,
            member,
        } = client;
        if is_tcp {
            // Replies are sent in whole batches; Nagle's algorithm would only delay them.
            let _ = sockopt::set_tcp_nodelay(&socket, true);
            watch_for_a_silent_end(&socket);
        }
        // A batch of replies should fit; the system decides how much it grants.
        let _ = sockopt::set_socket_send_buffer_size(&socket, SOCKET_BUFFER);
        let mut transmit = Transmit::default();
        let offered = door.offered();
        let exports = Arc::clone(&offered.exports);
        let mut session = Session::new(exports, door.limits.clone(), &mut transmit.heads);
        session.offer_tls(offered.tls.mode);
        Self {
            peer: peer(&socket, is_tcp),
            wire: Wire::new(socket),
            handshake: None,
            session,
            receive: Receive::new(door.limits.receive_bytes_min()),
            transmit,
            slots: Slots::default(),
            disk: None,
            disk_use: None,
            heard: Heard::default(),
            place: None,
            fences: Vec::new(),
            starved: None,
            filling: None,
            refused: VecDeque::new(),
            is_readable: true,
            has_left: false,
            is_blocked: false,
            is_polling: false,
            comes_again: false,
            life: Life::Arriving,
            is_busy: false,
            unread_since: None,
            half_since: None,
            draining_since: None,
            messages: 0,
            half_messages: 0,
            started_at: Instant::default(),
            asker: None,
            missed: 0,
            restored: None,
            door,
            ticket,
            member,
        }
    }

    /// Sends what waits. Returns whether buffers became free.
    fn send(&mut self, now: Instant) -> bool {
        let Self {
            wire,
            session,
            transmit,
            slots,
            ..
        } = self;
        let mut any_freed = false;
        let sent = transmit.send(wire, slots, |slots, slot| {
            any_freed = true;
            let request = slots.end(slot);
            session.replies().read_sent(&request);
        });
        match sent {
            Ok((Sent::All | Sent::Enough, _)) => self.unread_since = None,
            Ok((Sent::Blocked, bytes)) => {
                self.is_blocked = true;
                if bytes > 0 || self.unread_since.is_none() {
                    self.unread_since = Some(now);
                }
            }
            Err(error) => {
                self.log()
                    .info(now, format_args!("{} lost: {error}", self.name()));
                self.life.apply(Event::Lose);
            }
        }
        any_freed
    }

    /// Returns whether bytes wait to be sent.
    fn has_unsent(&self) -> bool {
        !self.transmit.is_empty() || self.wire.has_unsent()
    }

    /// Makes the ring report when the socket takes bytes again.
    fn wait_for_room(&mut self, cx: &mut Cx<'_>) {
        self.is_blocked = true;
        let socket = self.wire.socket().as_raw_fd();
        cx.ring_client().push_poll(socket, libc::POLLOUT, false, POLL_OUT);
    }

    fn may_send(&self) -> bool {
        self.life.sends() && !self.is_blocked
    }

    fn log(&self) -> &Log {
        &self.door.log
    }

    /// The name of the connection for a message.
    fn name(&self) -> String {
        match &self.disk {
            Some(disk) => format!("connection of {} to {}", self.peer, disk.name),
            None => format!("connection of {}, with no disk yet", self.peer),
        }
    }

    /// Records what a poll reports of the peer.
    fn polled(&mut self, result: i32, now: Instant) {
        self.has_left |= result & LEFT != 0;
        if result >= 0 && result & RESET != 0 {
            self.reset(now);
        } else if self.life.is_queued() && self.has_left {
            // The client left before it was let in.
            self.life.apply(Event::Lose);
        }
    }

    fn poll(&mut self, cx: &mut Cx<'_>) {
        if !self.is_polling && matches!(self.life, Life::Queued | Life::Serving) {
            self.is_polling = true;
            cx.ring_client().push_poll(
                self.wire.socket().as_raw_fd(),
                libc::POLLIN | libc::POLLRDHUP,
                true,
                POLL_IN,
            );
        }
    }
}

impl Service for Connection {
    fn start(&mut self, cx: &mut Cx<'_>) {
        self.started_at = cx.now();
        if self.receive.is_missing() {
            let what = format!("{} closed: the system has no memory for it", self.name());
            self.log().warn(cx.now(), format_args!("{what}"));
            self.life.apply(Event::Lose);
            self.member.fail(what);
            return;
        }
        self.ticket.arrive(cx.waker());
        self.transmit.note_heads();
        let phase = self.member.arrive(cx.waker());
        if let Some(restored) = self.restored.take() {
            return self.take_place(cx, restored);
        }
        self.life.apply(Event::Serve);
        self.follow(cx, phase);
        self.poll(cx);
        self.take_in(cx);
    }

    fn on_ring(&mut self, cx: &mut Cx<'_>, completed: &[Completion]) {
        for completion in completed {
            match completion.user {
                POLL_IN => {
                    self.is_polling = completion.has_more();
                    self.is_readable = true;
                    if self.life.is_at_rest() {
                        self.missed |= completion.result;
                    } else {
                        self.polled(completion.result, cx.now());
                    }
                }
                POLL_OUT => self.is_blocked = false,
                AGAIN => self.comes_again = false,
                _ => {}
            }
        }
        self.take_in(cx);
        self.poll(cx);
    }

    fn on_end(&mut self, cx: &mut Cx<'_>, bio: Bio) {
        self.ended(cx, bio);
    }

    fn on_room(&mut self, cx: &mut Cx<'_>) {
        let queue = self.disk.as_ref().expect("a bio was refused").queue;
        while let Some(bio) = self.refused.pop_front() {
            if let Err(bio) = cx.submit(queue, bio) {
                self.refused.push_front(bio);
                return;
            }
        }
        self.take_in(cx);
    }

    fn on_wake(&mut self, cx: &mut Cx<'_>) {
        self.follow(cx, self.member.phase());
        if self.life.is_at_rest() {
            return;
        }
        if self.ticket.is_displaced() && self.life != Life::Gone {
            let what = format_args!("{} closed: others need its place", self.name());
            self.log().info(cx.now(), what);
            self.life.apply(Event::Lose);
        }
        self.end_if_fenced(cx.now());
        self.drain_if_withdrawn(cx);
        if self.life.is_queued() && !self.place.as_mut().is_some_and(Membership::must_wait) {
            self.life.apply(Event::Serve);
        }
        self.end_fences();
        self.take_answers();
        self.take_in(cx);
    }

    fn on_timer(&mut self, cx: &mut Cx<'_>) {
        if self.life != Life::Gone
            && !self.life.is_at_rest()
            && let Some(reason) = self.too_late(cx.now())
        {
            self.log()
                .warn(cx.now(), format_args!("{} closed: {reason}", self.name()));
            self.life.apply(Event::Lose);
        }
    }

    fn end_of_batch(&mut self, cx: &mut Cx<'_>) {
        let mut rounds = 0;
        while self.may_send() && self.has_unsent() {
            rounds += 1;
            if rounds > ROUNDS_MAX || self.transmit.has_sent_enough() {
                self.come_again(cx);
                break;
            }
            let any_freed = self.send(cx.now());
            if self.is_blocked {
                self.wait_for_room(cx);
            }
            if any_freed || self.transmit.is_empty() {
                self.take_in(cx);
            }
        }
        if self.life.is_to_be_saved() {
            self.save_if_at_rest(cx);
        }
        if self.life.is_ending() {
            self.wind_up(cx);
        }
        self.wire.begin_turn();
        self.receive.begin_turn();
        self.transmit.begin_turn();
        self.watch_time(cx);
    }

    fn busy(&self) -> bool {
        self.disk.is_some() && self.life.is_open()
    }

    fn drain(&mut self, cx: &mut Cx<'_>) {
        self.session.shut_down();
        self.draining_since = Some(cx.now());
        self.life.apply(Event::Finish);
    }

    fn is_finished(&self) -> bool {
        self.life.is_ending() && self.is_at_end()
    }
}

/// Poll results of a peer that sends no more; an errno, which has the sign bit, counts too.
const LEFT: i32 = (libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR) as i32 | i32::MIN;
/// Poll result of a connection that was reset.
const RESET: i32 = libc::POLLERR as i32;
const POLL_IN: u64 = 0;
const POLL_OUT: u64 = 1;
const CANCEL: u64 = 2;
const AGAIN: u64 = 3;
/// How often one batch sends and takes in more, before the turn passes to others.
const ROUNDS_MAX: usize = 4;
const SELECTED: &str = "requests follow the selection of an export";
/// Size that a connection requests for its socket's send buffer, in bytes: a batch of 64 replies of
/// 4 KiB, with the kernel's overhead.
const SOCKET_BUFFER: usize = 2 << 20;
