//! Decides the life of one NBD connection on its reactor: receives, lets the session judge, submits bios, gathers replies,
//! sends them once per batch, and keeps the deadlines. Made by `listener`; bytes go through `receive` and `transmit`.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use blkmq_core::bio::{Bio, Status};
use blkmq_core::time::{Instant, Nanos};
use blkmq_host::disk::Disk;
use blkmq_host::ring::Completion;
use blkmq_host::service::{Cx, Service};
use rustix::net::sockopt;

use super::Door;
use super::admission::Ticket;
use super::buffers::Lack;
use super::log::Log;
use super::lookup::{Answer, Asker, Question};
use super::losses::Heard;
use super::memory::Account;
use super::peer::{peer, watch_for_a_silent_end};
use super::predecessors::{Fenced, Place};
use super::receive::{Receive, Received};
use super::request::{bio, buffer_bytes, error_of, extent};
use super::slots::Slots;
use super::transmit::{Sent, Transmit};
use crate::nbd::codec::ErrorCode;
use crate::nbd::codec::reply::Extent;
use crate::nbd::session::{Event, Op, Request, Session};

/// One client.
pub(super) struct Connection {
    socket: Arc<OwnedFd>,
    /// Who is at the other end, for messages.
    peer: String,
    session: Session,
    receive: Receive,
    transmit: Transmit,
    slots: Slots,
    /// The disk that the client selected, by its place in the engine's table, with what every bio needs of it.
    disk: Option<Disk>,
    /// Writes that may be lost: what it has been told of.
    heard: Heard,
    /// Its place among the connections of the disk; from the selection on.
    place: Option<Place>,
    /// Predecessors have to end before the selection is answered: nothing is received or sent meanwhile.
    is_waiting: bool,
    /// Fences, by their slots, and the sessions that have to end for them.
    fences: Vec<(u32, Fenced)>,
    /// A request for whose payload there is no memory yet.
    starved: Option<Request>,
    /// The write whose payload is being received, and how much of it is there.
    filling: Option<(u32, usize)>,
    /// Bios that the queue had no room for.
    refused: VecDeque<Bio>,
    /// The socket may have bytes to receive.
    is_readable: bool,
    /// The peer sends no more; what it sent last may still be there.
    has_left: bool,
    /// The socket takes no more bytes; a poll waits for that to change.
    is_blocked: bool,
    is_polling: bool,
    /// It is called again in the next turn.
    comes_again: bool,
    closing: Closing,
    /// The session takes no more before replies are sent.
    is_busy: bool,
    /// Since when nothing of what waits was taken by the client; since when the same half message is there; since when
    /// the engine wants to shut down.
    unread_since: Option<Instant>,
    half_since: Option<Instant>,
    draining_since: Option<Instant>,
    /// Since when memory is kept for requests, and there are none.
    spare_since: Option<Instant>,
    /// Messages that were taken whole, and how many there were when `half_since` was set.
    messages: u64,
    half_messages: u64,
    started_at: Instant,
    /// Where what was looked up for it comes; there is one from the selection on.
    asker: Option<Arc<Asker>>,
    door: Arc<Door>,
    ticket: Ticket,
}

/// How far the end of a connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Closing {
    /// It lives.
    No,
    /// Nothing is received any more; what was begun is finished and sent.
    Finishing,
    /// The peer is gone, or has not kept to the rules of time: nothing is sent any more either.
    Dead,
}

impl Connection {
    pub(super) fn new(socket: OwnedFd, is_tcp: bool, door: Arc<Door>, ticket: Ticket) -> Self {
        if is_tcp {
            // Replies are sent in whole batches; waiting for more would only delay them.
            let _ = sockopt::set_tcp_nodelay(&socket, true);
            watch_for_a_silent_end(&socket);
        }
        // A batch of replies should fit; how much is granted is the system's to say.
        let _ = sockopt::set_socket_send_buffer_size(&socket, SOCKET_BUFFER);
        let mut transmit = Transmit::default();
        let session = Session::new(
            Arc::clone(&door.exports),
            door.limits.clone(),
            &mut transmit.heads,
        );
        Self {
            peer: peer(&socket, is_tcp),
            socket: Arc::new(socket),
            session,
            receive: Receive::new(door.limits.receive_bytes_min()),
            transmit,
            slots: Slots::default(),
            disk: None,
            heard: Heard::default(),
            place: None,
            is_waiting: false,
            fences: Vec::new(),
            starved: None,
            filling: None,
            refused: VecDeque::new(),
            is_readable: true,
            has_left: false,
            is_blocked: false,
            is_polling: false,
            comes_again: false,
            closing: Closing::No,
            is_busy: false,
            unread_since: None,
            half_since: None,
            draining_since: None,
            spare_since: None,
            messages: 0,
            half_messages: 0,
            started_at: Instant::default(),
            asker: None,
            door,
            ticket,
        }
    }

    /// Receives and judges until the socket is drained or a limit holds the client back.
    fn take_in(&mut self, cx: &mut Cx<'_>) {
        while self.closing == Closing::No && self.refused.is_empty() && !self.is_waiting {
            let held_back = if self.filling.is_some() {
                false
            } else {
                self.judge(cx)
            };
            if held_back || self.closing != Closing::No || !self.refused.is_empty() {
                return;
            }
            if !self.is_readable || self.is_waiting {
                return;
            }
            let received = match self.filling {
                Some((slot, filled)) => self.fill_payload(cx, slot, filled),
                None => self.receive.fill(self.socket.as_fd()),
            };
            if matches!(received, Ok(Received::Enough)) {
                return self.come_again(cx);
            }
            self.heed(received, cx.now());
        }
    }

    /// Others are due, too; this one goes on in the next turn.
    fn come_again(&mut self, cx: &mut Cx<'_>) {
        if !std::mem::replace(&mut self.comes_again, true) {
            cx.port().push_nop(AGAIN);
        }
    }

    /// Judges what was received. Says whether the session can take no more before replies are sent.
    fn judge(&mut self, cx: &mut Cx<'_>) -> bool {
        self.is_busy = false;
        if let Some(request) = self.starved.take()
            && (!self.begin(cx, request) || !self.refused.is_empty())
        {
            return self.starved.is_some();
        }
        loop {
            let step = self
                .session
                .receive(self.receive.waiting(), &mut self.transmit.heads);
            self.transmit.note_heads();
            self.receive.consume(step.consumed);
            self.messages += u64::from(step.consumed > 0);
            match step.event {
                Event::NeedMore => return false,
                Event::Busy => {
                    self.is_busy = true;
                    return true;
                }
                Event::Request(request) | Event::Write(request) => {
                    if !self.begin(cx, request) {
                        return self.starved.is_some();
                    }
                }
                Event::Selected(export) => self.select(cx, export.id.0 as usize),
                Event::Refused(refused) => tracing::debug!("nbd: {refused:?}"),
                Event::Disconnect => self.close(cx, Closing::Finishing),
                Event::Close(reason) => {
                    self.log()
                        .warn(cx.now(), format_args!("{} closed: {reason}", self.name()));
                    self.close(cx, Closing::Finishing);
                }
            }
            if self.closing != Closing::No || !self.refused.is_empty() || self.is_waiting {
                return false;
            }
        }
    }

    fn select(&mut self, cx: &Cx<'_>, index: usize) {
        let disk = cx.disks()[index].clone();
        if let Err(refusal) = self.ticket.select(disk.group) {
            let what = format_args!("{} to {} refused: {refusal}", self.name(), disk.name);
            self.log().warn(cx.now(), what);
            self.closing = Closing::Dead;
            return;
        }
        let memory = Arc::clone(&self.door.common.memory);
        self.slots
            .set_account(Account::new(memory, disk.group, cx.waker()));
        self.heard = Heard::new(&disk);
        self.asker = Some(Arc::new(Asker::new(cx.waker())));
        let disks = &self.door.common.disks;
        let Some(mut place) = disks.enter(index as u32, &self.socket, self.session.name(), &cx.waker())
        else {
            let what = format_args!("{} refused: another session has its name", self.name());
            self.log().warn(cx.now(), what);
            self.closing = Closing::Dead;
            return;
        };
        // Who could write nothing leaves nothing to wait for.
        self.is_waiting = !disk.read_only && place.must_wait();
        self.place = Some(place);
        self.disk = Some(disk);
    }

    /// Takes what was received of a write's payload. Says whether it is whole, and so submitted.
    fn take_payload(&mut self, cx: &mut Cx<'_>, slot: u32, filled: usize) -> bool {
        let Self { slots, receive, .. } = self;
        let rest = rest_of_payload(slots, slot, filled);
        let bytes = receive.move_into(rest);
        self.payload_came(cx, slot, filled, bytes)
    }

    /// Receives the rest of a write's payload straight into its buffer.
    fn fill_payload(&mut self, cx: &mut Cx<'_>, slot: u32, filled: usize) -> io::Result<Received> {
        let rest = rest_of_payload(&mut self.slots, slot, filled);
        let received = self.receive.receive_into(self.socket.as_fd(), rest)?;
        if let Received::Full(bytes) | Received::Drained(bytes) = received {
            self.payload_came(cx, slot, filled, bytes);
        }
        Ok(received)
    }

    fn payload_came(&mut self, cx: &mut Cx<'_>, slot: u32, filled: usize, bytes: usize) -> bool {
        self.session.payload_taken(bytes as u64);
        let request = self.slots.get(slot).request;
        let filled = filled + bytes;
        let is_whole = filled as u64 == request.length;
        self.filling = (!is_whole).then_some((slot, filled));
        if is_whole {
            self.messages += 1;
            self.submit(cx, slot);
        }
        is_whole
    }

    /// Begins a request. Says whether the next message can be looked at: not while memory or payload are waited for.
    fn begin(&mut self, cx: &mut Cx<'_>, request: Request) -> bool {
        match request.op {
            Op::Cache => self.session.replies().ok(&request, &mut self.transmit.heads),
            _ => {
                let disk = self.disk.as_ref().expect(SELECTED);
                let slot = match self.slots.begin(request, buffer_bytes(&request, disk)) {
                    Ok(slot) => slot,
                    Err(lack) => {
                        self.starve(cx, request, lack);
                        return false;
                    }
                };
                match request.op {
                    Op::Write => return self.take_payload(cx, slot, 0),
                    Op::Fence => self.fence(slot, request.offset),
                    _ => self.submit(cx, slot),
                }
                return true;
            }
        }
        self.transmit.note_heads();
        true
    }

    /// The client has given up another session of its own: that is ended, and waited for.
    #[cold]
    fn fence(&mut self, slot: u32, number: u64) {
        let place = self.place.as_ref().expect(SELECTED);
        match place.fence(number) {
            Some(fenced) => self.fences.push((slot, fenced)),
            None => self.end_fence(slot),
        }
    }

    fn end_fence(&mut self, slot: u32) {
        let request = self.slots.end(slot);
        self.session.replies().ok(&request, &mut self.transmit.heads);
        self.transmit.note_heads();
    }

    /// Replies to the fences whose sessions have ended.
    fn end_fences(&mut self) {
        let ended: Vec<_> = self
            .fences
            .extract_if(.., |(_, fenced)| fenced.has_ended())
            .collect();
        for (slot, _) in ended {
            self.end_fence(slot);
        }
    }

    /// There is no memory for a request now: others have it, and it waits for its turn; or the system has none.
    #[cold]
    fn starve(&mut self, cx: &Cx<'_>, request: Request, lack: Lack) {
        match lack {
            Lack::OfMemory => {
                self.starved = Some(request);
                self.is_busy = true;
            }
            Lack::OfTheSystems(error) => {
                let what = format_args!("{} closed: no memory for a request: {error}", self.name());
                self.log().warn(cx.now(), what);
                self.closing = Closing::Dead;
            }
        }
    }

    fn submit(&mut self, cx: &mut Cx<'_>, index: u32) {
        let disk = self.disk.as_ref().expect(SELECTED);
        let queue = disk.queue;
        let slot = self.slots.get(index);
        let mut bio = bio(&slot.request, disk, index);
        slot.lend_to(&mut bio);
        if let Err(bio) = cx.submit(queue, bio) {
            self.refused.push_back(bio);
        }
    }

    /// A request for block status has paid: its group has read a block, in its turn and within its caps. Now it is looked up.
    fn look_up(&mut self, slot: u32, request: &Request) {
        let disk = self.disk.as_ref().expect(SELECTED);
        let asker = self.asker.as_ref().expect(SELECTED);
        let max = self.session.replies().extents_max(request).min(EXTENTS_MAX);
        let range = (request.offset, request.length);
        let question = Question::new(disk, slot, range, max, asker);
        self.door.common.lookups.ask(question);
    }

    /// Replies with what was looked up meanwhile.
    fn take_answers(&mut self) {
        let answers = self.asker.as_ref().map(|asker| asker.take()).unwrap_or_default();
        for Answer { slot, extents } in answers {
            let request = self.slots.end(slot);
            let (replies, heads) = (self.session.replies(), &mut self.transmit.heads);
            match extents {
                Ok(extents) => {
                    let extents: Vec<Extent> = extents.iter().map(extent).collect();
                    replies.block_status(&request, &extents, heads);
                }
                Err(error) => {
                    let message = format!("the disk cannot say what is allocated: {error}");
                    replies.error(&request, ErrorCode::Io, &message, heads);
                }
            }
            self.transmit.note_heads();
        }
    }

    /// Takes note of what the socket said.
    fn heed(&mut self, received: io::Result<Received>, now: Instant) {
        match received {
            Ok(Received::Full(_) | Received::Enough) => {}
            // A poll tells of what comes later; but an end that came together with these bytes has been told already.
            Ok(Received::Drained(_)) => self.is_readable = self.has_left,
            Ok(Received::Nothing) => self.is_readable = false,
            Ok(Received::End) => {
                let is_between = self.receive.waiting().is_empty() && self.filling.is_none();
                if !is_between {
                    let what = format_args!("{}: the client left in the middle of a message", self.name());
                    self.log().info(now, what);
                }
                self.is_readable = false;
                self.closing = self.closing.max(Closing::Finishing);
            }
            Err(error) => {
                self.log()
                    .info(now, format_args!("{} lost: {error}", self.name()));
                self.closing = Closing::Dead;
            }
        }
    }

    /// The client has given the connection up: what it had on its way, it may have done over another one meanwhile, and
    /// written over. None of it is begun any more.
    #[cold]
    fn reset(&mut self, now: Instant) {
        if self.closing == Closing::No {
            self.heed(Err(io::ErrorKind::ConnectionReset.into()), now);
        }
    }

    /// The client says over another connection that it has given this one up: nothing of it is begun any more.
    #[cold]
    fn end_if_fenced(&mut self, now: Instant) {
        if self.closing < Closing::Dead && self.place.as_ref().is_some_and(Place::is_fenced) {
            let what = format_args!("{} ended: its client has given it up", self.name());
            self.log().info(now, what);
            self.closing = Closing::Dead;
        }
    }

    fn close(&mut self, _cx: &mut Cx<'_>, how: Closing) {
        self.closing = self.closing.max(how);
    }

    /// Sends what has gathered. Says whether buffers became free.
    fn send(&mut self, now: Instant) -> bool {
        let Self {
            socket,
            session,
            transmit,
            slots,
            ..
        } = self;
        let mut any_freed = false;
        let sent = transmit.send(socket.as_fd(), slots, |slots, slot| {
            any_freed = true;
            let request = slots.end(slot);
            session.replies().read_sent(&request);
        });
        match sent {
            Ok((Sent::All, _)) => self.unread_since = None,
            Ok((Sent::Blocked, bytes)) => {
                self.is_blocked = true;
                if bytes > 0 || self.unread_since.is_none() {
                    self.unread_since = Some(now);
                }
            }
            Err(error) => {
                self.log()
                    .info(now, format_args!("{} lost: {error}", self.name()));
                self.closing = Closing::Dead;
            }
        }
        any_freed
    }

    /// Forgets the replies of a dead connection, and a write that will never be whole.
    fn forget(&mut self) {
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

    /// Takes back what was begun for a client that is gone and has not been submitted. What has been is the queue's, and is waited for.
    fn cancel(&mut self) {
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

    fn may_send(&self) -> bool {
        self.closing < Closing::Dead && !self.is_blocked && !self.is_waiting
    }

    fn abandon_filling(&mut self) {
        if let Some((slot, _)) = self.filling.take() {
            self.slots.end(slot);
        }
    }

    /// Keeps the deadlines: the handshake's, the unread reply's, the half message's.
    fn watch_time(&mut self, cx: &mut Cx<'_>) {
        self.watch_half_message(cx.now());
        self.watch_spare(cx.now());
        let deadlines = self.deadlines().into_iter().flatten().map(|(at, _)| at);
        let spare = self.spare_since.map(|since| after(since, SPARE_KEPT));
        match deadlines.chain(spare).min() {
            Some(at) if self.closing < Closing::Dead => cx.set_timer(at),
            _ => cx.clear_timer(),
        }
    }

    /// Gives memory back that is kept for requests which do not come.
    fn watch_spare(&mut self, now: Instant) {
        if self.slots.len() > 0 || !self.slots.has_spare() {
            self.spare_since = None;
        } else if after(*self.spare_since.get_or_insert(now), SPARE_KEPT) <= now {
            self.slots.release_spare();
            self.spare_since = None;
        }
    }

    /// Notes since when half a message waits for its rest. Not while we hold the client back ourselves.
    fn watch_half_message(&mut self, now: Instant) {
        let is_half = self.filling.is_some() || !self.receive.waiting().is_empty();
        let held_back = self.is_busy || !self.refused.is_empty() || self.is_blocked || self.is_waiting;
        if !is_half || held_back {
            self.half_since = None;
        } else if self.half_since.is_none() || self.half_messages != self.messages {
            self.half_since = Some(now);
            self.half_messages = self.messages;
        }
    }

    /// The deadlines that run, with what to say when they have passed.
    fn deadlines(&self) -> [Option<(Instant, &'static str)>; 4] {
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

    fn too_late(&self, now: Instant) -> Option<&'static str> {
        let past = self.deadlines().into_iter().flatten().find(|(at, _)| *at <= now);
        past.map(|(_, reason)| reason)
    }

    /// Names the connection for a message.
    fn log(&self) -> &Log {
        &self.door.log
    }

    fn name(&self) -> String {
        let disk = self.disk.as_ref().map_or("no disk yet", |disk| &disk.name);
        format!("connection of {} to {disk}", self.peer)
    }

    fn poll(&mut self, cx: &mut Cx<'_>) {
        if !self.is_polling && self.closing == Closing::No {
            self.is_polling = true;
            cx.port().push_poll(
                self.socket.as_raw_fd(),
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
        self.ticket.arrive(cx.waker());
        self.transmit.note_heads();
        self.poll(cx);
        self.take_in(cx);
    }

    fn on_ring(&mut self, cx: &mut Cx<'_>, completed: &[Completion]) {
        for completion in completed {
            match completion.user {
                POLL_IN => {
                    self.is_polling = completion.has_more();
                    self.is_readable = true;
                    self.has_left |= completion.result & LEFT != 0;
                    if completion.result >= 0 && completion.result & RESET != 0 {
                        self.reset(cx.now());
                    } else if self.is_waiting && self.has_left {
                        // It has not waited until it was let in.
                        self.closing = Closing::Dead;
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

    fn on_end(&mut self, _cx: &mut Cx<'_>, mut bio: Bio) {
        let index = bio.cookie as u32;
        let slot = self.slots.get(index);
        slot.take_back(&bio);
        let request = slot.request;
        if let (Op::Flush, Some(disk)) = (request.op, &self.disk) {
            bio.status = self.heard.end_flush(disk, bio.status);
        }
        if request.op == Op::BlockStatus && bio.status != Status::Shutdown {
            // Whether the block could be read says nothing about what is allocated.
            return self.look_up(index, &request);
        }
        let (replies, heads) = (self.session.replies(), &mut self.transmit.heads);
        if !bio.status.is_ok() {
            self.slots.end(index);
            let (code, message) = error_of(bio.status, &request);
            replies.error(&request, code, message, heads);
            self.transmit.note_heads();
        } else if request.op == Op::Read && replies.has_holes() && self.slots.reads_as_zeroes(index) {
            self.slots.end(index);
            replies.hole(&request, heads);
            self.transmit.note_heads();
        } else if request.op == Op::Read {
            replies.read(&request, heads);
            self.transmit.note_heads();
            self.transmit.push_data(index, request.length as usize);
        } else {
            self.slots.end(index);
            replies.ok(&request, heads);
            self.transmit.note_heads();
        }
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
        if self.ticket.is_displaced() && self.closing < Closing::Dead {
            let what = format_args!("{} closed: others need its place", self.name());
            self.log().info(cx.now(), what);
            self.closing = Closing::Dead;
        }
        self.end_if_fenced(cx.now());
        if self.is_waiting {
            self.is_waiting = self.place.as_mut().is_some_and(Place::must_wait);
        }
        self.end_fences();
        self.take_answers();
        self.take_in(cx);
    }

    fn on_timer(&mut self, cx: &mut Cx<'_>) {
        if self.closing < Closing::Dead
            && let Some(reason) = self.too_late(cx.now())
        {
            self.log()
                .warn(cx.now(), format_args!("{} closed: {reason}", self.name()));
            self.closing = Closing::Dead;
        }
    }

    fn end_of_batch(&mut self, cx: &mut Cx<'_>) {
        let mut rounds = 0;
        while self.may_send() && !self.transmit.is_empty() {
            rounds += 1;
            if rounds > ROUNDS_MAX {
                self.come_again(cx);
                break;
            }
            let any_freed = self.send(cx.now());
            if self.is_blocked {
                cx.port()
                    .push_poll(self.socket.as_raw_fd(), libc::POLLOUT, false, POLL_OUT);
            }
            if any_freed || self.transmit.is_empty() {
                self.take_in(cx);
            }
        }
        if self.closing == Closing::Dead {
            self.forget();
            self.cancel();
            if let Some(asker) = &self.asker {
                asker.give_up();
            }
        }
        if self.closing > Closing::No {
            if let Some(place) = &self.place {
                place.leave();
            }
            self.abandon_filling();
            self.starved = None;
            self.slots.give_up();
            if self.is_polling && self.is_at_end() {
                self.is_polling = false;
                cx.port().push_cancel(POLL_IN, CANCEL);
                if self.is_blocked {
                    cx.port().push_cancel(POLL_OUT, CANCEL);
                }
            }
        }
        self.receive.begin_turn();
        self.watch_time(cx);
    }

    fn busy(&self) -> bool {
        self.disk.is_some() && self.closing == Closing::No
    }

    fn drain(&mut self, cx: &mut Cx<'_>) {
        self.session.shut_down();
        self.draining_since = Some(cx.now());
        let how = if self.is_waiting {
            Closing::Dead
        } else {
            Closing::Finishing
        };
        self.close(cx, how);
    }

    fn is_finished(&self) -> bool {
        self.closing > Closing::No && self.is_at_end()
    }
}

impl Connection {
    /// Says whether everything begun is finished and sent, or has nobody to be sent to.
    fn is_at_end(&self) -> bool {
        self.slots.len() == 0 && self.transmit.is_empty() && self.refused.is_empty()
    }
}

/// The part of a write's buffer that is still to be received.
fn rest_of_payload(slots: &mut Slots, slot: u32, filled: usize) -> &mut [u8] {
    let slot = slots.get(slot);
    let length = slot.request.length as usize;
    let buffer = slot.buffer.as_mut().expect("a write has a buffer");
    &mut buffer.bytes_mut()[filled..length]
}

fn after(since: Instant, limit: Duration) -> Instant {
    since + Nanos(limit.as_nanos().try_into().unwrap_or(u64::MAX))
}

/// What a poll says of a peer that sends no more; an errno, which has the sign bit, counts too.
const LEFT: i32 = (libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR) as i32 | i32::MIN;
/// What it says of a connection that was reset.
const RESET: i32 = libc::POLLERR as i32;
const POLL_IN: u64 = 0;
const POLL_OUT: u64 = 1;
const CANCEL: u64 = 2;
const AGAIN: u64 = 3;
/// How often one batch sends and takes in more, before others have their turn.
const ROUNDS_MAX: usize = 4;
/// Extents that are looked up for one reply, with about two system calls each. Clients ask on from where a reply ended.
const EXTENTS_MAX: usize = 64;
const SELECTED: &str = "requests follow the selection of an export";
/// How long memory is kept for requests to come.
const SPARE_KEPT: Duration = Duration::from_millis(500);
/// How long a shutdown waits for a client that does not read.
const DRAIN_GRACE: Duration = Duration::from_secs(2);
/// What a connection asks for as its socket's send buffer, in bytes: a batch of 64 replies of 4 KiB, with the kernel's
/// overhead.
const SOCKET_BUFFER: usize = 2 << 20;
