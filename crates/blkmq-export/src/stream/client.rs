//! A client of a protocol of bytes: what it holds between its socket and its disk, and what another daemon needs to
//! continue it. `Client` has its life.

use std::io::IoSlice;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

use blkmq_core::bio::{Bio, Data, Op};
use blkmq_core::time::{Instant, Nanos};
use blkmq_host::disk::{Disk, Hearing};
use blkmq_host::ring::Completion;
use blkmq_host::service::Cx;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, recv, sendmsg};

use super::{Decoded, Door, LEN_MAX, RECEIVED_MAX, Request, StreamProtocol};
use crate::common::buffers::{Buffers, NoMemory};
use crate::common::client::{Client, Protocol, Shutdown};
use crate::common::life::{Event, Life, Resume};
use crate::common::listener::Admitted;
use crate::common::log::Log;
use crate::common::losses::LossCursor;
use crate::common::memory::Account;
use crate::common::payload::Payload;
use crate::common::peer::peer;
use crate::common::readiness::{Presence, Readiness};
use crate::common::sessions::DiskSession;
use crate::handover;
use crate::handover::codec::{BODY_BYTES_MAX, DecodeError, Reader, Writer};

/// The socket of one client, and what is between it and the disk.
pub(super) struct Connection<P> {
    socket: Arc<OwnedFd>,
    readiness: Readiness,
    peer: String,
    received: Vec<u8>,
    /// A request has been decoded that waits for memory.
    is_starved: bool,
    unsent: Vec<u8>,
    /// Bytes that reads in flight will add to those.
    reading: usize,
    /// No more was taken when it was asked for last.
    is_held: bool,
    buffers: Option<Buffers>,
    /// By the cookies of their bios.
    in_flight: Vec<Option<InFlight>>,
    loss_cursor: Option<LossCursor>,
    /// Since when the client has taken no reply although some wait, the rest of a request has not come, and the daemon ends.
    unread_since: Option<Instant>,
    half_since: Option<Instant>,
    draining_since: Option<Instant>,
    door: Arc<Door<P>>,
}

struct InFlight {
    request: Request,
    payload: Option<Payload>,
}

/// A client as another daemon saved it.
#[derive(Debug, Default)]
pub(super) struct Saved {
    /// How it goes on; `None` if nothing was exchanged with it.
    resume: Option<Resume>,
    has_losses: bool,
    received: Vec<u8>,
    unsent: Vec<u8>,
}

/// Makes the client of a socket, new or saved.
pub(super) fn client<P: StreamProtocol>(
    admitted: Admitted,
    door: Arc<Door<P>>,
    saved: Saved,
) -> Client<Connection<P>> {
    let connection = Connection {
        peer: peer(&admitted.socket, false),
        socket: Arc::new(admitted.socket),
        readiness: Readiness::new(),
        received: saved.received,
        is_starved: false,
        unsent: saved.unsent,
        reading: 0,
        is_held: false,
        buffers: None,
        in_flight: Vec::new(),
        loss_cursor: saved.has_losses.then(LossCursor::unsampled),
        unread_since: None,
        half_since: None,
        draining_since: None,
        door,
    };
    let mut client = Client::new(admitted.ticket, admitted.member, connection);
    if let Some(resume) = saved.resume {
        client.life = Life::Saved(resume);
    }
    client
}

impl<P: StreamProtocol> Client<Connection<P>> {
    /// Begins what was received, and receives more, until a limit holds the client back.
    fn take_all(&mut self, cx: &mut Cx<'_>) {
        for _ in 0..RECEIVES_MAX {
            if !self.begin_received(cx) || !self.protocol.readiness.is_readable {
                return;
            }
            self.receive(cx);
        }
        self.come_again(cx);
    }

    fn takes(&self) -> bool {
        let in_flight = self.protocol.in_flight.iter().flatten().count();
        let replies = self.protocol.unsent.len() + self.protocol.reading;
        let is_held = replies >= UNSENT_MAX || in_flight >= DEPTH;
        self.life == Life::Serving && self.refused.is_empty() && !is_held
    }

    /// Returns whether more bytes are needed.
    fn begin_received(&mut self, cx: &mut Cx<'_>) -> bool {
        let mut taken = 0;
        let Some(disk) = self.disk.take() else {
            return false;
        };
        let needs_bytes = loop {
            self.protocol.is_held = !self.takes();
            if self.protocol.is_held {
                break false;
            }
            let received = &self.protocol.received[taken..];
            match self.protocol.door.protocol.decode(&disk, received) {
                Decoded::Incomplete if received.len() >= RECEIVED_MAX => {
                    self.refuse(cx, "a request is longer than may be");
                }
                Decoded::Incomplete => break true,
                Decoded::Malformed(why) => self.refuse(cx, why),
                Decoded::Request(bytes, _) | Decoded::Reply(bytes, _)
                    if bytes == 0 || bytes > received.len() =>
                {
                    self.refuse(cx, "the front door's protocol takes bytes that are not there");
                }
                Decoded::Reply(bytes, reply) => {
                    self.protocol.unsent.extend(reply);
                    taken += bytes;
                }
                Decoded::Request(bytes, request) => {
                    match self.begin(cx, &disk, request, taken..taken + bytes) {
                        Ok(()) => taken += bytes,
                        Err(NoMemory::Now) => {
                            self.protocol.is_starved = true;
                            break false;
                        }
                        Err(NoMemory::OfTheSystem(error)) => {
                            self.warn(cx.now(), format_args!("closed: no memory for a request: {error}"));
                            self.life.apply(Event::Lose);
                        }
                    }
                }
            }
        };
        self.disk = Some(disk);
        self.protocol.received.drain(..taken);
        let is_half = needs_bytes && !self.protocol.received.is_empty();
        let since = self
            .protocol
            .half_since
            .filter(|_| taken == 0)
            .unwrap_or(cx.now());
        self.protocol.half_since = is_half.then_some(since);
        needs_bytes
    }

    fn refuse(&mut self, cx: &Cx<'_>, why: &str) {
        self.warn(cx.now(), format_args!("closed: {why}"));
        self.life.apply(Event::Finish);
    }

    /// Submits a request that came in these bytes.
    fn begin(
        &mut self,
        cx: &mut Cx<'_>,
        disk: &Disk,
        request: Request,
        came_in: Range<usize>,
    ) -> Result<(), NoMemory> {
        let Connection {
            buffers,
            received,
            in_flight,
            is_starved,
            reading,
            ..
        } = &mut self.protocol;
        let mut payload = None;
        if matches!(request.op, Op::Read | Op::Write) && request.len > 0 {
            if request.len > LEN_MAX {
                self.refuse(cx, "a request moves more than may be");
                return Ok(());
            }
            let len = request.len as usize;
            let bytes = received[came_in].get(request.data_at..);
            let data = bytes.and_then(|bytes| bytes.get(..len));
            if request.op == Op::Write && data.is_none() {
                self.refuse(cx, "the front door's protocol takes a write without its data");
                return Ok(());
            }
            let mut taken = buffers.as_mut().expect("a disk is selected").take(len)?;
            match data.filter(|_| request.op == Op::Write) {
                Some(data) => fill(&mut taken, data),
                None => *reading += len,
            }
            payload = Some(taken);
        }
        *is_starved = false;
        let data = payload
            .as_mut()
            .map_or(Data::None, |payload| payload.lend(0..request.len as usize));
        let place = in_flight
            .iter()
            .position(Option::is_none)
            .unwrap_or(in_flight.len());
        if place == in_flight.len() {
            in_flight.push(None);
        }
        in_flight[place] = Some(InFlight { request, payload });
        let bio = Bio {
            op: request.op,
            flags: request.flags,
            disk: disk.id,
            group: disk.group,
            offset: request.offset,
            len: request.len,
            cookie: place as u64,
            data,
            ..Bio::default()
        };
        self.submit(cx, disk.queue, bio);
        Ok(())
    }

    fn receive(&mut self, cx: &Cx<'_>) {
        let Connection {
            socket,
            received,
            readiness,
            ..
        } = &mut self.protocol;
        let before = received.len();
        received.resize(before + RECEIVE_BYTES, 0);
        let result = recv(socket.as_fd(), &mut received[before..], RecvFlags::DONTWAIT);
        let bytes = result.as_ref().map_or(0, |(bytes, _)| *bytes);
        received.truncate(before + bytes);
        match result {
            Ok((0, _)) => self.life.apply(Event::Finish),
            Ok(_) | Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => readiness.is_readable = false,
            Err(errno) => self.lose(cx, errno),
        }
    }

    fn send(&mut self, cx: &Cx<'_>) {
        let Connection {
            socket,
            unsent,
            readiness,
            ..
        } = &mut self.protocol;
        if unsent.is_empty() || readiness.is_blocked() || !self.life.sends() {
            return;
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let pieces = [IoSlice::new(unsent)];
        match sendmsg(
            socket.as_fd(),
            &pieces,
            &mut SendAncillaryBuffer::default(),
            flags,
        ) {
            Ok(sent) => {
                unsent.drain(..sent);
                self.protocol.unread_since = None;
            }
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(errno) => return self.lose(cx, errno),
        }
        if !self.protocol.unsent.is_empty() {
            let socket = self.protocol.socket.as_raw_fd();
            self.protocol.readiness.wait_for_room(cx.ring_client(), socket);
            self.protocol.unread_since.get_or_insert(cx.now());
        }
    }

    fn lose(&mut self, cx: &Cx<'_>, errno: Errno) {
        self.info(cx.now(), format_args!("lost: {errno}"));
        self.life.apply(Event::Lose);
    }

    fn watch(&mut self, cx: &Cx<'_>) {
        if matches!(self.life, Life::Queued | Life::Serving) {
            let socket = self.protocol.socket.as_raw_fd();
            self.protocol.readiness.watch(cx.ring_client(), socket);
        }
    }

    fn follow_peer(&mut self) {
        match self.protocol.readiness.presence() {
            Presence::Reset => self.life.apply(Event::Lose),
            Presence::Left if self.life.is_queued() => self.life.apply(Event::Lose),
            _ => {}
        }
    }
}

impl<P: StreamProtocol> Protocol for Connection<P> {
    fn log(&self) -> &Log {
        &self.door.log
    }

    fn peer(&self) -> Option<&str> {
        Some(&self.peer)
    }

    fn name(client: &Client<Self>) -> String {
        format!("connection of {}", client.protocol.peer)
    }

    fn hearing(client: &Client<Self>) -> Option<Hearing> {
        Some(Hearing {
            who: format!(
                "{} client {}",
                client.protocol.door.log.door(),
                client.protocol.peer
            ),
            otherwise: Some("its protocol has no message for that"),
        })
    }

    fn start(client: &mut Client<Self>, cx: &mut Cx<'_>) -> Result<(), String> {
        let disk = client
            .protocol
            .door
            .disk()
            .clone()
            .ok_or("no disk is served there")?;
        client.select(cx, &disk)?;
        let connection = &mut client.protocol;
        let account = Account::new(
            Arc::clone(&connection.door.common.memory),
            disk.tenant,
            cx.waker(),
        );
        connection.buffers = Some(Buffers::new(account, disk.limits.leaves_buffers));
        connection
            .loss_cursor
            .get_or_insert_with(|| LossCursor::sample(&disk));
        let (door, socket) = (Arc::clone(&connection.door), Arc::clone(&connection.socket));
        let entered = client.enter(cx, &disk, &door.sessions, (&socket, None));
        entered.map_err(|refusal| refusal.to_string())?;
        if disk.read_only {
            client.session.iter_mut().for_each(DiskSession::wait_for_nobody);
        }
        if client.must_wait() {
            client.life.apply(Event::Queue);
        }
        client.disk = Some(disk);
        Ok(())
    }

    fn on_ring(client: &mut Client<Self>, _cx: &mut Cx<'_>, completion: &Completion) {
        if client.protocol.readiness.note(completion) && !client.life.is_at_rest() {
            client.follow_peer();
        }
    }

    fn take_requests(client: &mut Client<Self>, cx: &mut Cx<'_>) {
        client.take_all(cx);
        client.watch(cx);
    }

    fn complete(client: &mut Client<Self>, cx: &mut Cx<'_>, bio: Bio) {
        let Connection {
            in_flight,
            buffers,
            unsent,
            reading,
            loss_cursor,
            door,
            ..
        } = &mut client.protocol;
        let ended = in_flight[bio.cookie as usize].take();
        let InFlight { request, mut payload } = ended.expect("a bio ends once");
        payload.iter_mut().for_each(Payload::take_back);
        let status = match (request.op, &client.disk, loss_cursor) {
            (Op::Flush, Some(disk), Some(cursor)) => cursor.check_and_advance(disk, bio.status),
            _ => bio.status,
        };
        if request.op == Op::Read {
            *reading -= request.len as usize;
        }
        let read = payload
            .as_ref()
            .filter(|_| request.op == Op::Read && status.is_ok());
        let pieces: Vec<&[u8]> = read
            .iter()
            .flat_map(|read| read.slices(0..request.len as usize))
            .collect();
        door.protocol.encode(&request, status, &pieces, unsent);
        if let (Some(payload), Some(buffers)) = (payload, buffers) {
            buffers.put(payload);
        }
        client.take_all(cx);
    }

    fn wake(client: &mut Client<Self>, _cx: &mut Cx<'_>) {
        // Others wait behind it for memory that it cannot take now.
        if client.protocol.is_starved && !client.takes() {
            client.protocol.buffers.iter_mut().for_each(Buffers::give_up);
        }
    }

    fn end_of_batch(client: &mut Client<Self>, cx: &mut Cx<'_>) {
        client.send(cx);
        // It was held for the replies that are gone now.
        if client.protocol.is_held && client.takes() {
            client.come_again(cx);
        }
        let Connection { unsent, received, .. } = &mut client.protocol;
        for bytes in [unsent, received] {
            if bytes.is_empty() {
                bytes.shrink_to(RECEIVE_BYTES);
            }
        }
    }

    fn is_idle(&self, life: Life) -> bool {
        let is_sent = self.unsent.is_empty() || self.readiness.is_blocked() || life.is_queued();
        self.in_flight.iter().all(Option::is_none) && is_sent
    }

    fn save(client: &mut Client<Self>) -> Result<Option<handover::Saved>, String> {
        let has_losses = match (&client.disk, client.protocol.loss_cursor) {
            (Some(disk), Some(cursor)) => cursor.check(disk),
            _ => false,
        };
        let is_open = client.life.is_open();
        let connection = &mut client.protocol;
        connection.buffers.iter_mut().for_each(Buffers::give_up);
        let saved = Saved {
            resume: Some(if is_open { Resume::Serving } else { Resume::Ending }),
            has_losses,
            received: connection.received.clone(),
            unsent: connection.unsent.clone(),
        };
        Ok(Some(handover::Saved {
            door: connection.door.log.door(),
            address: connection.door.address.clone(),
            body: saved.bytes(),
            fds: vec![Arc::clone(&connection.socket)],
        }))
    }

    fn resume(client: &mut Client<Self>, cx: &mut Cx<'_>) {
        client.follow_peer();
        client.watch(cx);
    }

    fn shut_down(client: &mut Client<Self>, cx: &mut Cx<'_>, why: Shutdown) {
        if why == Shutdown::Disk {
            client.info(cx.now(), format_args!("closed: the disk is removed"));
        }
        client.life.apply(Event::Finish);
        client.protocol.draining_since.get_or_insert(cx.now());
    }

    fn wind_up(client: &mut Client<Self>, cx: &mut Cx<'_>) {
        if client.life == Life::Gone {
            client.protocol.unsent.clear();
            for bio in client.refused.drain(..) {
                let ended = client.protocol.in_flight[bio.cookie as usize].take();
                let mut payload = ended.and_then(|ended| ended.payload);
                payload.iter_mut().for_each(Payload::take_back);
                let buffers = client.protocol.buffers.as_mut();
                buffers
                    .zip(payload)
                    .into_iter()
                    .for_each(|(buffers, payload)| buffers.put(payload));
            }
        }
        client.protocol.buffers.iter_mut().for_each(Buffers::give_up);
        if client.refused.is_empty() && client.protocol.has_ended(client.life) {
            client.protocol.readiness.end(cx.ring_client());
        }
    }

    fn has_ended(&self, _life: Life) -> bool {
        self.in_flight.iter().all(Option::is_none) && self.unsent.is_empty()
    }

    fn deadline(client: &mut Client<Self>, _now: Instant) -> Option<(Instant, &'static str)> {
        let Connection {
            unread_since,
            half_since,
            draining_since,
            readiness,
            ..
        } = &client.protocol;
        let draining_since = draining_since.filter(|_| readiness.is_blocked());
        let deadlines = [
            (unread_since, PATIENCE, "replies were not read in time"),
            (half_since, PATIENCE, "the rest of a request did not come in time"),
            (
                &draining_since,
                DRAIN_GRACE,
                "replies were not read in time before the end",
            ),
        ];
        let set = deadlines
            .into_iter()
            .filter_map(|(since, limit, why)| Some(((*since)? + limit, why)));
        set.min_by_key(|(at, _)| *at)
    }
}

impl Saved {
    /// Decodes what another daemon saved: nothing, of a client with which nothing was exchanged.
    ///
    /// # Errors
    /// The fault in the bytes.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, DecodeError> {
        if bytes.is_empty() {
            return Ok(Self::default());
        }
        Reader::versioned(bytes, ("a client's version", VERSION), |reader| {
            let is_open = reader.flag("whether a client goes on")?;
            Ok(Self {
                resume: Some(if is_open { Resume::Serving } else { Resume::Ending }),
                has_losses: reader.flag("whether writes are lost")?,
                received: reader
                    .bytes("what a client sent", RECEIVED_MAX + RECEIVE_BYTES)?
                    .to_vec(),
                unsent: reader
                    .bytes("what a client was not sent", BODY_BYTES_MAX)?
                    .to_vec(),
            })
        })
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut writer = Writer(&mut bytes);
        writer.u8(VERSION);
        writer.u8((self.resume == Some(Resume::Serving)).into());
        writer.u8(self.has_losses.into());
        writer.bytes(&self.received);
        writer.bytes(&self.unsent);
        bytes
    }
}

fn fill(payload: &mut Payload, mut data: &[u8]) {
    let (mut at, end) = (0, data.len());
    while !data.is_empty() {
        let piece = payload.slice_mut(at..end);
        let (now, rest) = data.split_at(piece.len());
        piece.copy_from_slice(now);
        (at, data) = (at + now.len(), rest);
    }
}

/// Requests of a client in flight at most.
const DEPTH: usize = 64;
/// Bytes of replies that wait, or will when reads have ended, at which no more requests are taken.
const UNSENT_MAX: usize = 1 << 20;
/// Bytes of one receive, and receives of one turn.
const RECEIVE_BYTES: usize = 64 << 10;
const RECEIVES_MAX: usize = 8;
/// How long a client may leave replies unread, or a request incomplete.
const PATIENCE: Nanos = Nanos::from_secs(60);
/// How long the daemon's end waits for a client that does not read.
const DRAIN_GRACE: Nanos = Nanos::from_secs(2);
const VERSION: u8 = 1;
