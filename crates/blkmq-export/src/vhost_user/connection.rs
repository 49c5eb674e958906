//! A front end's connection as a protocol of `Client`: messages are received whole, wait until the
//! rings that they touch have ended, and are answered one after the other. Rings that are ready become
//! services of their own, spread over the reactors.

pub(super) mod moving;

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use blkmq_core::bio::Bio;
use blkmq_core::ids::ReactorId;
use blkmq_core::time::{Instant, Nanos};
use blkmq_host::disk::{Disk, Hearing};
use blkmq_host::ring::Completion;
use blkmq_host::service::Cx;
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use super::codec::{BODY_BYTES_MAX, FDS_MAX, HEADER_BYTES, Header, Message};
use super::descriptors::{Descriptors, closes_at_once, receive};
use super::device::{Answer, Device, Touched};
use super::queue::Queue;
use crate::common::client::{Client, Protocol, Shutdown};
use crate::common::descriptors;
use crate::common::dialer::{Dialed, Held};
use crate::common::life::{Event, Life};
use crate::common::listener::Admitted;
use crate::common::log::Log;
use crate::common::peer::peer;
use crate::common::readiness::Readiness;
use crate::common::sessions::DiskSessions;
use crate::handover::Saved;

/// A front end.
pub(super) type FrontEnd = Client<Connection>;

/// The socket of one front end, and the device that it has set up.
pub(super) struct Connection {
    socket: Arc<OwnedFd>,
    readiness: Readiness,
    peer: String,
    device: Device,
    /// A message as far as it was received: the header, then the body; with its descriptors.
    received: Vec<u8>,
    fds: Descriptors,
    /// Descriptors that no front end needs to send.
    unwanted: Vec<OwnedFd>,
    /// A message that waits for rings to end.
    pending: Option<(Header, Message, Descriptors)>,
    /// Its rings may be served: it counts among the clients of the disk's group.
    is_selected: bool,
    /// Another daemon continues it.
    is_others: bool,
    /// Whether it is told when the disk grows, as the users of the disk know.
    hears: bool,
    started_at: Instant,
    shared: Shared,
    /// Makes the dialer connect to the front end again when it is dropped.
    _held: Option<Held>,
}

/// What the connections of an address share.
#[derive(Clone, Debug)]
pub(super) struct Shared {
    pub(super) sessions: Arc<DiskSessions>,
    pub(super) log: Arc<Log>,
    pub(super) handshake_deadline: Nanos,
    /// Most data descriptors of a request, as drivers are told.
    pub(super) segments_max: u32,
    /// The address at which they connect.
    pub(super) address: Arc<str>,
    /// Where this daemon connects: the dialer that connects again when the connection has ended.
    pub(super) dialed: Option<Arc<Dialed>>,
}

/// What a connection has for the next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// A whole message.
    Message,
    /// Nothing: more bytes or the end of a ring are waited for, or the connection ends.
    Wait,
}

/// Makes the client of a socket that was admitted.
pub(super) fn client(admitted: Admitted, disk: Disk, shared: Shared) -> FrontEnd {
    descriptors::allow(&admitted.socket);
    let connection = Connection {
        peer: peer(&admitted.socket, admitted.is_tcp),
        socket: Arc::new(admitted.socket),
        readiness: Readiness::new(),
        device: Device::new(disk, shared.segments_max),
        received: Vec::with_capacity(HEADER_BYTES + BODY_BYTES_MAX),
        fds: Descriptors::default(),
        unwanted: Vec::new(),
        pending: None,
        is_selected: false,
        is_others: false,
        hears: false,
        started_at: Instant::default(),
        _held: shared.dialed.as_ref().map(Dialed::hold),
        shared,
    };
    Client::new(admitted.ticket, admitted.member, connection)
}

impl FrontEnd {
    /// Receives messages and executes them, a few at a time.
    fn receive_messages(&mut self, cx: &mut Cx<'_>) {
        for _ in 0..MESSAGES_MAX {
            if self.life != Life::Serving {
                return;
            }
            if self.protocol.pending.is_none() && self.receive(cx) == Step::Wait {
                return;
            }
            if self.handle(cx) == Step::Wait {
                return;
            }
        }
        self.come_again(cx);
    }

    /// Receives a message.
    fn receive(&mut self, cx: &mut Cx<'_>) -> Step {
        loop {
            let received = &self.protocol.received;
            let header = match received.first_chunk::<HEADER_BYTES>().map(Header::parse) {
                Some(Ok(header)) => Some(header),
                Some(Err(error)) => {
                    self.close(cx, &error);
                    return Step::Wait;
                }
                None => None,
            };
            let wanted = HEADER_BYTES + header.map_or(0, |header| header.bytes);
            if let Some(header) = header
                && received.len() == wanted
            {
                return self.parse(cx, header);
            }
            if !self.protocol.readiness.is_readable || !self.receive_up_to(cx, wanted) {
                return Step::Wait;
            }
        }
    }

    fn parse(&mut self, cx: &mut Cx<'_>, header: Header) -> Step {
        let Connection {
            received,
            fds,
            pending,
            ..
        } = &mut self.protocol;
        let fds = std::mem::take(fds);
        let parsed = Message::parse(header, &received[HEADER_BYTES..], fds.len());
        received.clear();
        match parsed {
            Ok(message) => {
                *pending = Some((header, message, fds));
                Step::Message
            }
            Err(error) => {
                self.close(cx, &error);
                Step::Wait
            }
        }
    }

    /// Receives bytes up to a length, and descriptors. Returns whether there were any.
    fn receive_up_to(&mut self, cx: &mut Cx<'_>, wanted: usize) -> bool {
        let connection = &mut self.protocol;
        let at = connection.received.len();
        connection.received.resize(wanted, 0);
        let mut came = Vec::new();
        let received = receive(&connection.socket, &mut connection.received[at..], &mut came);
        connection.received.truncate(at + received.unwrap_or(0));
        let (known, unwanted) = came.into_iter().partition(closes_at_once);
        connection.unwanted = unwanted;
        connection.fds.extend::<Vec<OwnedFd>>(known);
        match received {
            _ if !connection.unwanted.is_empty() => {
                self.close(
                    cx,
                    &"a descriptor that is neither shared memory, nor an event, nor an empty unix stream",
                );
            }
            Ok(_) if connection.fds.len() > FDS_MAX => {
                self.close(cx, &"more descriptors than a message has");
            }
            Ok(0) => self.life.apply(Event::Lose),
            Ok(_) => return true,
            Err(Errno::AGAIN) => connection.readiness.is_readable = false,
            Err(Errno::INTR) => return true,
            Err(errno) => self.close(cx, &errno),
        }
        false
    }

    /// Executes the pending message, if the rings that it touches have ended.
    fn handle(&mut self, cx: &mut Cx<'_>) -> Step {
        let Connection { device, pending, .. } = &mut self.protocol;
        let has_ended =
            |(_, message, _): &mut (Header, Message, Descriptors)| device.stop(&Device::touched(message));
        let Some((header, message, fds)) = pending.take_if(has_ended) else {
            return Step::Wait;
        };
        match device.handle(message, fds) {
            Ok(answer) => self.answer(cx, header, answer),
            Err(refusal) => {
                self.report(cx, format_args!("{refusal}"));
                match header.needs_reply {
                    true => self.send(cx, header, &1_u64.to_ne_bytes(), None),
                    false => self.life.apply(Event::Lose),
                }
            }
        }
        self.start_rings(cx);
        Step::Message
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
        match sendmsg(
            &self.protocol.socket,
            &[IoSlice::new(&reply)],
            &mut ancillary,
            flags,
        ) {
            Ok(sent) if sent == reply.len() => {}
            Ok(_) | Err(Errno::AGAIN) => self.close(cx, &"it does not receive its replies"),
            Err(errno) => self.close(cx, &errno),
        }
    }

    /// Serves every ring that can be, as soon as nobody writes to it any more who was there before.
    fn start_rings(&mut self, cx: &mut Cx<'_>) {
        if self.life != Life::Serving || !self.protocol.device.has_ready() || !self.may_start(cx) {
            return;
        }
        let ready = self.protocol.device.start(|| cx.waker());
        self.note_ends(cx);
        for (index, at) in self.protocol.device.take_unheard() {
            let what = format_args!(
                "ring {index} is not served: its parts at {:#x}, {:#x} and {:#x} do not lie in the memory that is shared",
                at.desc, at.avail, at.used
            );
            self.report(cx, what);
        }
        if !ready.is_empty()
            && let Some(size) = self.protocol.device.take_too_small()
        {
            let what = format_args!(
                "a ring has {size} descriptors, and its driver does without indirect ones: it waits for ever for room for a \
                 request of more than {fits} pieces; set seg_max={fits} at this export and start the monitor again, or \
                 give it a larger queue-size or indirect_desc=on",
                fits = size - 2
            );
            self.report(cx, what);
        }
        let to_repeat: usize = ready.iter().map(|(_, start)| start.ring.to_repeat()).sum();
        if to_repeat > 0 {
            let what = format_args!(
                "{}: {to_repeat} requests were in flight at a kill and are done again",
                Connection::name(self)
            );
            self.protocol.shared.log.info(cx.now(), self.about(), what);
        }
        for (index, start) in ready {
            let reactor = (usize::from(cx.reactor().0) + index) % cx.reactors();
            cx.spawn_on(
                ReactorId(reactor as u16),
                Box::new(move || Box::new(Queue::new(start))),
            );
        }
    }

    /// Returns whether rings may be served. The first one enters the sessions of the disk; a front
    /// end that had the disk and has left, with a record of requests in flight that are done again
    /// here, has to end before.
    fn may_start(&mut self, cx: &mut Cx<'_>) -> bool {
        if self.session.is_none()
            && let Err(refusal) = self.enter_disk(cx)
        {
            self.close(cx, &refusal);
            return false;
        }
        !self.must_wait()
    }

    /// Enters the sessions of the disk.
    ///
    /// # Errors
    /// Why it may not.
    fn enter_disk(&mut self, cx: &Cx<'_>) -> Result<(), String> {
        let disk = self.protocol.device.disk().clone();
        self.count_among(&disk).map_err(|refusal| refusal.to_string())?;
        self.protocol.is_selected = true;
        let sessions = Arc::clone(&self.protocol.shared.sessions);
        let socket = Arc::clone(&self.protocol.socket);
        let entered = self.enter(cx, &disk, &sessions, (&socket, None));
        entered.map_err(|refusal| refusal.to_string())
    }

    fn note_ends(&mut self, cx: &mut Cx<'_>) {
        if let Some(broken) = self.protocol.device.note_ends() {
            self.report(cx, format_args!("device needs a reset: {broken}"));
            self.protocol.device.tell_of_change();
        }
    }

    /// Writes a warning about what the front end has set up.
    #[cold]
    fn report(&self, cx: &Cx<'_>, what: std::fmt::Arguments<'_>) {
        let what = format_args!("{}: {what}", Connection::name(self));
        self.protocol.shared.log.warn(cx.now(), self.about(), what);
    }

    #[cold]
    fn close(&mut self, cx: &mut Cx<'_>, why: &dyn std::fmt::Display) {
        self.warn(cx.now(), format_args!("closed: {why}"));
        self.life.apply(Event::Lose);
    }
}

impl Protocol for Connection {
    /// Its rings are polled instead.
    const POLLS: bool = false;

    fn log(&self) -> &Log {
        &self.shared.log
    }

    fn peer(&self) -> Option<&str> {
        Some(&self.peer)
    }

    fn name(client: &FrontEnd) -> String {
        let Connection { peer, device, .. } = &client.protocol;
        format!("connection of {peer} to {}", device.disk().name)
    }

    fn hearing(client: &FrontEnd) -> Option<Hearing> {
        let Connection { peer, device, .. } = &client.protocol;
        Some(Hearing {
            who: format!("front end {peer}"),
            otherwise: (!device.hears_of_changes()).then_some(CANNOT_HEAR),
        })
    }

    fn start(client: &mut FrontEnd, cx: &mut Cx<'_>) -> Result<(), String> {
        client.protocol.started_at = cx.now();
        let disk = client.protocol.device.disk().clone();
        client.use_disk(cx, &disk)?;
        client.disk = Some(disk);
        match client.protocol.is_selected {
            true => client.enter_disk(cx),
            false => Ok(()),
        }
    }

    fn on_ring(client: &mut FrontEnd, _cx: &mut Cx<'_>, completion: &Completion) {
        // A front end that has hung up is not waited for, even if a message waits for rings to end.
        if client.protocol.readiness.note(completion)
            && (completion.result < 0 || completion.result & HUNG_UP != 0)
        {
            client.life.apply(Event::Lose);
        }
    }

    fn take_requests(client: &mut FrontEnd, cx: &mut Cx<'_>) {
        if client.life == Life::Serving {
            let Connection {
                readiness, socket, ..
            } = &mut client.protocol;
            readiness.watch(cx.ring_client(), socket.as_raw_fd());
        }
        client.receive_messages(cx);
        let hears = client.protocol.device.hears_of_changes();
        if std::mem::replace(&mut client.protocol.hears, hears) != hears {
            client.note_hearing();
        }
        // Sessions that had to end may have ended.
        client.start_rings(cx);
    }

    fn complete(_client: &mut FrontEnd, _cx: &mut Cx<'_>, _bio: Bio) {}

    fn wake(client: &mut FrontEnd, cx: &mut Cx<'_>) {
        client.note_ends(cx);
    }

    fn tell_size(client: &mut FrontEnd) {
        client.protocol.device.tell_of_change();
    }

    fn end_of_batch(client: &mut FrontEnd, cx: &mut Cx<'_>) {
        // A message that waits for rings to end is answered before a hand-over.
        if client.life.is_to_be_saved() && client.life.is_open() && client.protocol.device.stop(&Touched::All)
        {
            client.handle(cx);
        }
    }

    /// A front end that ends is not handed over.
    fn is_idle(&self, life: Life) -> bool {
        life.is_open() && self.pending.is_none() && self.device.stop(&Touched::All)
    }

    fn save(client: &mut FrontEnd) -> Result<Option<Saved>, String> {
        client.save()
    }

    fn resume(client: &mut FrontEnd, cx: &mut Cx<'_>) {
        client.protocol.started_at = cx.now();
    }

    fn leave(client: &mut FrontEnd) {
        client.protocol.is_others = true;
    }

    fn shut_down(client: &mut FrontEnd, cx: &mut Cx<'_>, why: Shutdown) {
        if why == Shutdown::Disk {
            client.warn(cx.now(), format_args!("closed: the disk is removed"));
        }
        client.life.apply(Event::Finish);
    }

    fn wind_up(client: &mut FrontEnd, cx: &mut Cx<'_>) {
        client.protocol.device.stop(&Touched::All);
        client.protocol.readiness.end(cx.ring_client());
    }

    fn has_ended(&self, _life: Life) -> bool {
        !self.device.has_served()
    }

    fn end(client: &mut FrontEnd) {
        let connection = &mut client.protocol;
        if !connection.is_others {
            let unwanted = std::mem::take(&mut connection.unwanted);
            descriptors::let_go(&connection.socket, unwanted, client.ticket.take());
        }
    }

    fn deadline(client: &mut FrontEnd, _now: Instant) -> Option<(Instant, &'static str)> {
        let is_late = !client.protocol.is_selected && client.life == Life::Serving;
        let at = client.protocol.started_at + client.protocol.shared.handshake_deadline;
        is_late.then_some((at, "no ring was set up in time"))
    }
}

const HUNG_UP: i32 = (libc::POLLHUP | libc::POLLERR) as i32;
/// What to do about a front end that has no channel for changes.
const CANNOT_HEAR: &str = "it has not agreed to messages about changes (BACKEND_REQ and CONFIG): have Firecracker ask again by \
                           PATCH /drives/ID with the drive_id alone; Cloud Hypervisor has no command for that, and finds the \
                           new size when the machine starts again";
/// Messages that one turn executes before others have their turns.
const MESSAGES_MAX: usize = 16;
