//! An NBD connection as a protocol of `Client`: what it holds between the socket and the disk, and what
//! it sends once per batch. `listener` admits connections; `receive` and `transmit` move bytes.
//!
//! ```text
//!  socket ─► intake: receives, lets the session decode ─► requests: begin, submit, end ─► replies, sent once per batch
//!            deadlines: which client is too late          ending: what happens to open requests when the client is gone
//!            moving: how another daemon continues the connection
//! ```

mod deadlines;
mod ending;
mod intake;
mod moving;
mod requests;
mod secure;

use std::os::fd::AsRawFd;
use std::sync::Arc;

use blkmq_core::bio::Bio;
use blkmq_core::time::Instant;
use blkmq_host::disk::Hearing;
use blkmq_host::ring::Completion;
use blkmq_host::service::Cx;
use rustix::net::sockopt;

pub(super) use self::moving::restored;

use self::deadlines::Deadlines;
use self::intake::Intake;
use self::secure::Handshake;
use super::Door;
use super::receive::Receive;
use super::slots::Slots;
use super::transmit::{Sent, Transmit};
use super::wire::Wire;
use crate::common::client::{Client, Protocol, Shutdown};
use crate::common::life::{Event, Life};
use crate::common::listener::Admitted;
use crate::common::log::Log;
use crate::common::lookup::ExtentReplies;
use crate::common::losses::LossCursor;
use crate::common::peer::{peer, watch_for_a_silent_end};
use crate::common::readiness::{Presence, Readiness};
use crate::common::sessions::Fenced;
use crate::handover::Saved;
use crate::nbd::session::Session;

/// A client that speaks NBD.
pub(super) type NbdClient = Client<Connection>;

/// The socket of one client, and what is between it and the disk.
pub(super) struct Connection {
    wire: Wire,
    readiness: Readiness,
    /// The TLS handshake, while it is under way.
    handshake: Option<Handshake>,
    /// The peer, for messages.
    peer: String,
    session: Session,
    receive: Receive,
    intake: Intake,
    transmit: Transmit,
    slots: Slots,
    /// What the client was told of writes that may be lost, once a disk is selected.
    loss_cursor: Option<LossCursor>,
    /// Where answers to look-ups arrive, once a disk is selected.
    extent_replies: Option<Arc<ExtentReplies>>,
    /// Fences, by their slots, and the sessions that have to end for them.
    fences: Vec<(u32, Fenced)>,
    deadlines: Deadlines,
    door: Arc<Door>,
}

/// Makes the client of a socket that was admitted.
pub(super) fn client(admitted: Admitted, door: Arc<Door>) -> NbdClient {
    let Admitted {
        socket,
        is_tcp,
        ticket,
        member,
    } = admitted;
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
    let connection = Connection {
        peer: peer(&socket, is_tcp),
        wire: Wire::new(socket),
        readiness: Readiness::new(),
        handshake: None,
        session,
        receive: Receive::new(door.limits.receive_bytes_min()),
        intake: Intake::Message,
        transmit,
        slots: Slots::default(),
        loss_cursor: None,
        extent_replies: None,
        fences: Vec::new(),
        deadlines: Deadlines::default(),
        door,
    };
    Client::new(ticket, member, connection)
}

impl NbdClient {
    /// Sends what waits. Returns whether buffers became free.
    fn send(&mut self, cx: &Cx<'_>) -> bool {
        let Connection {
            wire,
            session,
            transmit,
            slots,
            deadlines,
            ..
        } = &mut self.protocol;
        let mut any_freed = false;
        let sent = transmit.send(wire, slots, |slots, slot| {
            any_freed = true;
            let request = slots.end(slot);
            session.replies().read_sent(&request);
        });
        match sent {
            Ok((Sent::All | Sent::Enough, _)) => deadlines.unread_since = None,
            Ok((Sent::Blocked, bytes)) => {
                if bytes > 0 || deadlines.unread_since.is_none() {
                    deadlines.unread_since = Some(cx.now());
                }
                self.protocol.wait_for_room(cx);
            }
            Err(error) => {
                self.info(cx.now(), format_args!("lost: {error}"));
                self.life.apply(Event::Lose);
            }
        }
        any_freed
    }

    fn may_send(&self) -> bool {
        self.life.sends() && !self.protocol.readiness.is_blocked()
    }

    /// Acts on what polls have reported of the peer.
    fn follow_peer(&mut self, now: Instant) {
        match self.protocol.readiness.presence() {
            Presence::Reset => self.reset(now),
            // The client left before it was let in.
            Presence::Left if self.life.is_queued() => self.life.apply(Event::Lose),
            _ => {}
        }
    }

    fn watch_socket(&mut self, cx: &Cx<'_>) {
        if matches!(self.life, Life::Queued | Life::Serving) {
            let Connection { readiness, wire, .. } = &mut self.protocol;
            readiness.watch(cx.ring_client(), wire.socket().as_raw_fd());
        }
    }
}

impl Connection {
    /// Returns whether bytes wait to be sent.
    fn has_unsent(&self) -> bool {
        !self.transmit.is_empty() || self.wire.has_unsent()
    }

    fn wait_for_room(&mut self, cx: &Cx<'_>) {
        let socket = self.wire.socket().as_raw_fd();
        self.readiness.wait_for_room(cx.ring_client(), socket);
    }
}

impl Protocol for Connection {
    fn log(&self) -> &Log {
        &self.door.log
    }

    fn peer(&self) -> Option<&str> {
        Some(&self.peer)
    }

    fn name(client: &NbdClient) -> String {
        let peer = &client.protocol.peer;
        match &client.disk {
            Some(disk) => format!("connection of {peer} to {}", disk.name),
            None => format!("connection of {peer}, with no disk yet"),
        }
    }

    fn hearing(client: &NbdClient) -> Option<Hearing> {
        Some(Hearing {
            who: format!("NBD client {}", client.protocol.peer),
            otherwise: Some("NBD has no message for that: it finds the new size when it connects again"),
        })
    }

    fn start(client: &mut NbdClient, cx: &mut Cx<'_>) -> Result<(), String> {
        client.protocol.deadlines.started_at = cx.now();
        if client.protocol.receive.is_missing() {
            return Err("the system has no memory for it".to_owned());
        }
        client.protocol.transmit.note_heads();
        client.reselect(cx)
    }

    fn on_ring(client: &mut NbdClient, cx: &mut Cx<'_>, completion: &Completion) {
        if client.protocol.readiness.note(completion) && !client.life.is_at_rest() {
            client.follow_peer(cx.now());
        }
    }

    fn take_requests(client: &mut NbdClient, cx: &mut Cx<'_>) {
        client.receive_requests(cx);
        client.watch_socket(cx);
    }

    fn complete(client: &mut NbdClient, cx: &mut Cx<'_>, bio: Bio) {
        client.complete_bio(cx, bio);
    }

    fn wake(client: &mut NbdClient, _cx: &mut Cx<'_>) {
        client.protocol.end_fences();
        client.protocol.take_answers();
        client.let_others_have_memory();
    }

    fn end_of_batch(client: &mut NbdClient, cx: &mut Cx<'_>) {
        let mut rounds = 0;
        while client.may_send() && client.protocol.has_unsent() {
            rounds += 1;
            if rounds > ROUNDS_MAX || client.protocol.transmit.has_sent_enough() {
                client.come_again(cx);
                break;
            }
            let any_freed = client.send(cx);
            if any_freed || client.protocol.transmit.is_empty() {
                client.receive_requests(cx);
            }
        }
        let Self {
            wire,
            receive,
            transmit,
            ..
        } = &mut client.protocol;
        wire.begin_turn();
        receive.begin_turn();
        transmit.begin_turn();
    }

    fn is_idle(&self, life: Life) -> bool {
        let kept = usize::from(self.intake.is_payload()) + self.transmit.data_pieces();
        let is_sent = !self.has_unsent() || self.readiness.is_blocked() || life.is_queued();
        self.slots.len() == kept && is_sent
    }

    fn save(client: &mut NbdClient) -> Result<Option<Saved>, String> {
        client.save()
    }

    fn resume(client: &mut NbdClient, cx: &mut Cx<'_>) {
        client.protocol.deadlines.restart(cx.now());
        client.follow_peer(cx.now());
        client.watch_socket(cx);
    }

    fn shut_down(client: &mut NbdClient, cx: &mut Cx<'_>, why: Shutdown) {
        if why == Shutdown::Disk {
            client.info(cx.now(), format_args!("closed: the disk is removed"));
        }
        client.life.apply(Event::Finish);
        client.protocol.session.shut_down();
        client.protocol.deadlines.draining_since = Some(cx.now());
    }

    fn wind_up(client: &mut NbdClient, cx: &mut Cx<'_>) {
        client.wind_up(cx);
    }

    fn has_ended(&self, life: Life) -> bool {
        let is_sent = !self.has_unsent() || life == Life::Gone && self.transmit.is_empty();
        self.slots.len() == 0 && is_sent
    }

    fn deadline(client: &mut NbdClient, now: Instant) -> Option<(Instant, &'static str)> {
        client.next_deadline(now)
    }
}

/// How often one batch sends and takes in more, before the turn passes to others.
const ROUNDS_MAX: usize = 4;
const SELECTED: &str = "requests follow the selection of an export";
/// Size that a connection requests for its socket's send buffer, in bytes: a batch of 64 replies of
/// 4 KiB, with the kernel's overhead.
const SOCKET_BUFFER: usize = 2 << 20;
