//! Decides how one front end's connection is served on its reactor: messages are received whole,
//! wait until the rings that they touch have ended, and are answered one after the other. Rings
//! that are ready become services of their own, spread over the reactors.

pub(super) mod moving;

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use blkmq_core::bio::Bio;
use blkmq_core::ids::ReactorId;
use blkmq_core::time::Nanos;
use blkmq_host::disk::{Disk, Use};
use blkmq_host::ring::Completion;
use blkmq_host::service::{Cx, Service};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use self::moving::Moving;
use super::codec::{BODY_BYTES_MAX, FDS_MAX, HEADER_BYTES, Header, Message};
use super::descriptors::{Descriptors, closes_at_once, receive};
use super::device::{Answer, Device, Touched};
use super::queue::Queue;
use crate::common::admission::Ticket;
use crate::common::descriptors;
use crate::common::dialer::{Dialed, Held};
use crate::common::listener::Admitted;
use crate::common::log::Log;
use crate::common::peer::peer;
use crate::common::predecessors::{Disks, Membership};
use crate::handover::Member;

/// One front end.
pub(super) struct Connection {
    socket: Arc<OwnedFd>,
    peer: String,
    device: Device,
    /// A message as far as it was received: the header, then the body; with its descriptors.
    received: Vec<u8>,
    fds: Descriptors,
    /// Descriptors that no front end needs to send.
    unwanted: Vec<OwnedFd>,
    /// A message that waits for rings to end.
    pending: Option<(Header, Message, Descriptors)>,
    is_selected: bool,
    is_closing: bool,
    is_polling: bool,
    is_readable: bool,
    comes_again: bool,
    /// Its entry in the counts of connections.
    ticket: Option<Ticket>,
    /// How far the hand-over to another daemon is.
    moving: Moving,
    /// Another daemon has saved it.
    is_restored: bool,
    /// Another daemon continues it.
    is_others: bool,
    address: Arc<str>,
    member: Member,
    /// The front ends that have rings of a disk, including this one.
    disks: Arc<Disks>,
    place: Option<Membership>,
    /// The registration as a user of the disk.
    disk_use: Option<Use>,
    log: Arc<Log>,
    handshake_deadline: Nanos,
    /// Makes the dialer connect to the front end again when it is dropped.
    _held: Option<Held>,
    /// The size that the front end was told, or has found.
    told_size: u64,
}

/// What the connections of an address share.
#[derive(Clone, Debug)]
pub(super) struct Shared {
    pub(super) disks: Arc<Disks>,
    pub(super) log: Arc<Log>,
    pub(super) handshake_deadline: Nanos,
    /// The address at which they connect.
    pub(super) address: Arc<str>,
    /// Where this daemon connects: the dialer that connects again when the connection has ended.
    pub(super) dialed: Option<Arc<Dialed>>,
}

impl Connection {
    pub(super) fn new(client: Admitted, disk: Disk, shared: Shared) -> Self {
        let Shared {
            disks,
            log,
            handshake_deadline,
            address,
            dialed,
        } = shared;
        descriptors::allow(&client.socket);
        Self {
            peer: peer(&client.socket, client.is_tcp),
            socket: Arc::new(client.socket),
            told_size: disk.current_size(),
            _held: dialed.as_ref().map(Dialed::hold),
            device: Device::new(disk),
            received: Vec::with_capacity(HEADER_BYTES + BODY_BYTES_MAX),
            fds: Descriptors::default(),
            unwanted: Vec::new(),
            pending: None,
            is_selected: false,
            is_closing: false,
            is_polling: false,
            is_readable: true,
            comes_again: false,
            ticket: Some(client.ticket),
            moving: Moving::No,
            is_restored: false,
            is_others: false,
            address,
            member: client.member,
            disks,
            place: None,
            disk_use: None,
            log,
            handshake_deadline,
        }
    }

    /// Receives messages and executes them, a few at a time.
    fn take_in(&mut self, cx: &mut Cx<'_>) {
        for _ in 0..MESSAGES_MAX {
            if self.is_closing || self.moving != Moving::No {
                return;
            }
            if self.pending.is_none() && !self.receive(cx) {
                return;
            }
            if !self.handle(cx) {
                return;
            }
        }
        if !std::mem::replace(&mut self.comes_again, true) {
            cx.ring_client().push_nop(AGAIN);
        }
    }

    /// Receives a message. Returns whether it is whole.
    fn receive(&mut self, cx: &mut Cx<'_>) -> bool {
        loop {
            let header = match self.received.first_chunk::<HEADER_BYTES>().map(Header::parse) {
                Some(Ok(header)) => Some(header),
                Some(Err(error)) => {
                    self.close(cx, &error);
                    return false;
                }
                None => None,
            };
            let wanted = HEADER_BYTES + header.map_or(0, |header| header.bytes);
            if let Some(header) = header
                && self.received.len() == wanted
            {
                return self.parse(cx, header);
            }
            if !self.is_readable || !self.receive_up_to(cx, wanted) {
                return false;
            }
        }
    }

    fn parse(&mut self, cx: &mut Cx<'_>, header: Header) -> bool {
        let fds = std::mem::take(&mut self.fds);
        let parsed = Message::parse(header, &self.received[HEADER_BYTES..], fds.len());
        self.received.clear();
        match parsed {
            Ok(message) => {
                self.pending = Some((header, message, fds));
                true
            }
            Err(error) => {
                self.close(cx, &error);
                false
            }
        }
    }

    /// Receives bytes up to a length, and descriptors. Returns whether there were any.
    fn receive_up_to(&mut self, cx: &mut Cx<'_>, wanted: usize) -> bool {
        let at = self.received.len();
        self.received.resize(wanted, 0);
        let mut came = Vec::new();
        let received = receive(&self.socket, &mut self.received[at..], &mut came);
        self.received.truncate(at + received.unwrap_or(0));
        let (known, unwanted) = came.into_iter().partition(closes_at_once);
        self.unwanted = unwanted;
        self.fds.extend::<Vec<OwnedFd>>(known);
        match received {
            _ if !self.unwanted.is_empty() => {
                self.close(
                    cx,
                    &"a descriptor that is neither shared memory, nor an event, nor an empty unix stream",
                );
            }
            Ok(_) if self.fds.len() > FDS_MAX => self.close(cx, &"more descriptors than a message has"),
            Ok(0) => self.is_closing = true,
            Ok(_) => return true,
            Err(Errno::AGAIN) => self.is_readable = false,
            Err(Errno::INTR) => return true,
            Err(errno) => self.close(cx, &errno),
        }
        false
    }

    /// Executes the pending message, if the rings that it touches have ended. Returns whether they
    /// have.
    fn handle(&mut self, cx: &mut Cx<'_>) -> bool {
        let Some((_, message, _)) = &self.pending else {
            return true;
        };
        if !self.device.stop(&Device::touched(message)) {
            return false;
        }
        let Some((header, message, fds)) = self.pending.take() else {
            return true;
        };
        match self.device.handle(message, fds) {
            Ok(answer) => self.answer(cx, header, answer),
            Err(refusal) => {
                let what = format_args!("{}: {refusal}", self.name());
                self.log.warn(cx.now(), what);
                match header.needs_reply {
                    true => self.send(cx, header, &1_u64.to_ne_bytes(), None),
                    false => self.is_closing = true,
                }
            }
        }
        self.start_rings(cx);
        true
    }

    fn answer(&mut self, cx: &mut Cx<'_>, header: Header, answer: Answer) {
        match answer {
            Answer::Done if header.needs_reply => self.send(cx, header, &0_u64.to_ne_bytes(), None),
            Answer::Done => {}
            Answer::Number(number) => self.send(cx, header, &number.to_ne_bytes(), None),
            Answer::Bytes(bytes) => self.send(cx, header, &bytes, None),
            Answer::Inflight(spec, fd) => {
                let mut body = Vec::new();
                spec.write(&mut body);
                // Some front ends send it with the padding of a C structure.
                body.resize(header.bytes.max(body.len()), 0);
                self.send(cx, header, &body, Some(fd.as_fd()));
            }
        }
    }

    /// Sends a reply. A front end that does not receive the replies that it has asked for is
    /// disconnected.
    fn send(&mut self, cx: &mut Cx<'_>, header: Header, body: &[u8], fd: Option<BorrowedFd<'_>>) {
        let mut reply = Vec::with_capacity(HEADER_BYTES + body.len());
        header.reply(body, &mut reply);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let fds: Vec<BorrowedFd<'_>> = fd.into_iter().collect();
        if !fds.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(&fds));
        }
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        match sendmsg(&self.socket, &[IoSlice::new(&reply)], &mut ancillary, flags) {
            Ok(sent) if sent == reply.len() => {}
            Ok(_) | Err(Errno::AGAIN) => self.close(cx, &"it does not receive its replies"),
            Err(errno) => self.close(cx, &errno),
        }
    }

    /// Serves every ring that can be, as soon as nobody writes to it any more who was there before.
    fn start_rings(&mut self, cx: &mut Cx<'_>) {
        if self.is_closing || self.moving != Moving::No || !self.device.has_ready() || !self.may_start(cx) {
            return;
        }
        let ready = self.device.start(|| cx.waker());
        self.note_ends(cx);
        for (index, at) in self.device.take_unheard() {
            let what = format_args!(
                "{}: ring {index} is not served: its parts at {:#x}, {:#x} and {:#x} do not lie in the memory that is shared",
                self.name(),
                at.desc,
                at.avail,
                at.used
            );
            self.log.warn(cx.now(), what);
        }
        let to_repeat: usize = ready.iter().map(|(_, start)| start.ring.to_repeat()).sum();
        if to_repeat > 0 {
            let what = format_args!(
                "{}: {to_repeat} requests were in flight at a kill and are done again",
                self.name()
            );
            self.log.info(cx.now(), what);
        }
        for (index, start) in ready {
            let reactor = (usize::from(cx.reactor().0) + index) % cx.reactors();
            cx.spawn_on(
                ReactorId(reactor as u16),
                Box::new(move || Box::new(Queue::new(start))),
            );
        }
    }

    /// Returns whether rings may be served. The first one enters the connections of the disk; a
    /// front end that had the disk and has left, with a record of requests in flight that are done
    /// again here, has to end before.
    fn may_start(&mut self, cx: &mut Cx<'_>) -> bool {
        if self.place.is_none() {
            let tenant = self.device.disk().tenant;
            if let Some(Err(refusal)) = self.ticket.as_mut().map(|ticket| ticket.select(tenant)) {
                self.close(cx, &refusal);
                return false;
            }
            self.is_selected = true;
            cx.clear_timer();
            match self
                .disks
                .enter(self.device.disk().number, &self.socket, None, &cx.waker())
            {
                Ok(place) => self.place = Some(place),
                Err(refusal) => {
                    self.close(cx, &refusal);
                    return false;
                }
            }
        }
        self.place.as_mut().is_some_and(|place| !place.must_wait())
    }

    fn note_ends(&mut self, cx: &mut Cx<'_>) {
        if let Some(broken) = self.device.note_ends() {
            let what = format_args!("{}: device needs a reset: {broken}", self.name());
            self.log.warn(cx.now(), what);
            self.device.tell_of_change();
        }
    }

    /// Tells the front end if the disk has grown; during a hand-over the daemon that serves it
    /// afterwards does.
    fn tell_size(&mut self) {
        if self.moving != Moving::No {
            return;
        }
        let size = self.device.disk().current_size();
        if std::mem::replace(&mut self.told_size, size) != size {
            self.device.tell_of_change();
        }
    }

    /// The disk is to be removed, or has been: open requests are finished.
    fn drain_if_withdrawn(&mut self, cx: &mut Cx<'_>) {
        if !self.is_closing && self.disk_use.as_ref().is_none_or(Use::is_to_end) {
            self.close(cx, &"the disk is removed");
            self.end_of_batch(cx);
        }
    }

    #[cold]
    fn close(&mut self, cx: &mut Cx<'_>, why: &dyn std::fmt::Display) {
        let what = format_args!("{} closed: {why}", self.name());
        self.log.warn(cx.now(), what);
        self.is_closing = true;
    }

    fn name(&self) -> String {
        format!("connection of {} to {}", self.peer, self.device.disk().name)
    }

    fn poll(&mut self, cx: &mut Cx<'_>) {
        if !self.is_closing && !std::mem::replace(&mut self.is_polling, true) {
            let events = libc::POLLIN | libc::POLLRDHUP;
            cx.ring_client()
                .push_poll(self.socket.as_raw_fd(), events, true, POLL);
        }
    }
}

impl Service for Connection {
    fn start(&mut self, cx: &mut Cx<'_>) {
        self.ticket
            .iter_mut()
            .for_each(|ticket| ticket.arrive(cx.waker()));
        let phase = self.member.arrive(cx.waker());
        self.member.select(&self.device.disk().name);
        self.disk_use = self.device.disk().users.enter(cx.waker());
        self.drain_if_withdrawn(cx);
        if self.is_restored {
            return self.take_place(cx);
        }
        self.follow(cx, phase);
        cx.set_timer(cx.now() + self.handshake_deadline);
        self.poll(cx);
        self.take_in(cx);
    }

    fn on_ring(&mut self, cx: &mut Cx<'_>, completed: &[Completion]) {
        for completion in completed {
            match completion.user {
                POLL => {
                    self.is_polling = completion.has_more();
                    self.is_readable = true;
                    // A front end that has hung up is not waited for, even if a message waits for
                    // rings to end.
                    self.is_closing |= completion.result < 0 || completion.result & HUNG_UP != 0;
                }
                AGAIN => self.comes_again = false,
                _ => {}
            }
        }
        self.poll(cx);
        self.take_in(cx);
    }

    fn on_end(&mut self, _cx: &mut Cx<'_>, _bio: Bio) {}

    fn on_wake(&mut self, cx: &mut Cx<'_>) {
        self.follow(cx, self.member.phase());
        self.note_ends(cx);
        self.drain_if_withdrawn(cx);
        self.tell_size();
        if !self.is_selected && self.ticket.as_ref().is_some_and(Ticket::is_displaced) {
            self.close(cx, &"others need its place");
        }
        self.take_in(cx);
        // Those that had to end may have ended.
        self.start_rings(cx);
    }

    fn on_timer(&mut self, cx: &mut Cx<'_>) {
        if !self.is_selected && !self.is_closing && self.moving == Moving::No {
            self.close(cx, &"no ring was set up in time");
        }
    }

    fn end_of_batch(&mut self, cx: &mut Cx<'_>) {
        if self.moving == Moving::Stopping {
            self.save_if_at_rest(cx);
        }
        if self.is_closing {
            self.device.stop(&Touched::All);
            if let Some(place) = &self.place {
                place.leave();
            }
            if std::mem::take(&mut self.is_polling) {
                cx.ring_client().push_cancel(POLL, CANCEL);
            }
        }
    }

    fn drain(&mut self, cx: &mut Cx<'_>) {
        self.is_closing = true;
        self.end_of_batch(cx);
    }

    fn is_finished(&self) -> bool {
        self.is_closing && !self.device.has_served()
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if !self.is_others {
            let unwanted = std::mem::take(&mut self.unwanted);
            descriptors::let_go(&self.socket, unwanted, self.ticket.take());
        }
    }
}

const POLL: u64 = 0;
const CANCEL: u64 = 1;
const AGAIN: u64 = 2;
const HUNG_UP: i32 = (libc::POLLHUP | libc::POLLERR) as i32;
/// Messages that one turn executes before others have their turns.
const MESSAGES_MAX: usize = 16;
