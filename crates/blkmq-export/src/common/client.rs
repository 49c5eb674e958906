//! A client on its reactor, whatever its protocol: it arrives, is admitted, selects a disk, waits for
//! room, is handed over to another daemon or continued from one, and ends. A front door implements
//! [`Protocol`], which decodes, encodes and saves; `life` has the states and their transitions.
//!
//! ```text
//!  reactor ─► Client: start, wake, room, timer, drain ─► Protocol: take_requests, complete, save, ...
//!                     │                                       │
//!                     └──────────────► Life ◄─────────────────┘
//! ```

use std::collections::VecDeque;
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use blkmq_core::bio::Bio;
use blkmq_core::time::Instant;
use blkmq_host::device::State;
use blkmq_host::disk::{Disk, Hearing, QueueId, Use};
use blkmq_host::ring::Completion;
use blkmq_host::service::{Cx, Service};

use super::admission::{self, Ticket};
use super::life::{Event, Life, Resume};
use super::log::{About, Log};
use super::sessions::{DiskSession, DiskSessions, Refusal, SessionName};
use crate::handover::{Phase, Registration, Saved};

/// A client. Its protocol's own functions have access to all of it. The order of the fields is that
/// in which they are dropped: its descriptors are closed before others may have its place.
pub(crate) struct Client<P: Protocol> {
    pub(crate) protocol: P,
    pub(crate) life: Life,
    /// The disk that it has selected, with what every bio needs of it.
    pub(crate) disk: Option<Disk>,
    /// Its registration as a user of the disk.
    disk_use: Option<Use>,
    /// Its session among those of the disk.
    pub(crate) session: Option<DiskSession>,
    /// The size that it was told of last, where it is told.
    pub(crate) reported_size: u64,
    /// Bios for which the queue had no room.
    pub(crate) refused: VecDeque<Bio>,
    /// It is called again in the next turn.
    comes_again: bool,
    /// Its entry in the counts of connections, unless it is a part of a client that has one.
    pub(crate) ticket: Option<Ticket>,
    /// Its registration for the hand-over, unless it is a part of a client that has one.
    member: Option<Registration>,
}

/// What a front door does for one client. Each function is called on the client's reactor, and never
/// blocks.
pub(crate) trait Protocol: Sized {
    /// A reactor polls for the client's next request for a while before it sleeps.
    const POLLS: bool = true;

    /// The log of the client's address.
    fn log(&self) -> &Log;

    /// The name of the client for a message.
    fn name(client: &Client<Self>) -> String;

    /// The process or the address at the other end, if messages have one.
    fn peer(&self) -> Option<&str> {
        None
    }

    /// The client is on its reactor; one that another daemon has saved selects its disk again.
    ///
    /// # Errors
    /// Why it cannot be served here.
    fn start(client: &mut Client<Self>, cx: &mut Cx<'_>) -> Result<(), String>;

    /// An entry that the protocol has pushed has completed.
    fn on_ring(client: &mut Client<Self>, cx: &mut Cx<'_>, completion: &Completion);

    /// Takes requests while the client is served and this turn has not taken enough.
    fn take_requests(client: &mut Client<Self>, cx: &mut Cx<'_>);

    /// A bio of the client has ended.
    fn complete(client: &mut Client<Self>, cx: &mut Cx<'_>, bio: Bio);

    /// Somebody has woken the client; not while it is at rest.
    fn wake(client: &mut Client<Self>, cx: &mut Cx<'_>);

    /// The disk has another size than the client was told.
    fn tell_size(_client: &mut Client<Self>) {}

    /// How the client learns that its disk has grown; `None` for a part of one.
    fn hearing(_client: &Client<Self>) -> Option<Hearing> {
        None
    }

    /// A batch of calls is over: replies are sent.
    fn end_of_batch(_client: &mut Client<Self>, _cx: &mut Cx<'_>) {}

    /// Returns whether all requests that were begun are answered, as far as the client takes replies.
    fn is_idle(&self, life: Life) -> bool;

    /// Saves the client, which is idle; `None` if no other process can continue it.
    ///
    /// # Errors
    /// Why it cannot be handed over.
    fn save(client: &mut Client<Self>) -> Result<Option<Saved>, String>;

    /// The client continues after a hand-over that failed, or on this daemon, which has taken over.
    fn resume(client: &mut Client<Self>, cx: &mut Cx<'_>);

    /// Another daemon serves the client, or the one that has it goes on.
    fn leave(_client: &mut Client<Self>) {}

    /// The client is to end: now, or when what it is has been taken from those who use it.
    fn shut_down(client: &mut Client<Self>, cx: &mut Cx<'_>, why: Shutdown);

    /// The client ends: frees what it does not need any more. Called after each batch until then.
    fn wind_up(client: &mut Client<Self>, cx: &mut Cx<'_>);

    /// Returns whether nothing of a client that ends is under way.
    fn has_ended(&self, life: Life) -> bool;

    /// The client is about to be dropped. Its place in the counts is free when its ticket is dropped.
    fn end(_client: &mut Client<Self>) {}

    /// The next time at which the client is too late with something, and what the log says then.
    fn deadline(_client: &mut Client<Self>, _now: Instant) -> Option<(Instant, &'static str)> {
        None
    }
}

/// Why a client is to end although it is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shutdown {
    /// The daemon ends.
    Daemon,
    /// The disk is removed.
    Disk,
}

impl<P: Protocol> Client<P> {
    pub(crate) fn new(ticket: Ticket, member: Registration, protocol: P) -> Self {
        let mut client = Self::part(Some(member), protocol);
        client.ticket = Some(ticket);
        client
    }

    /// Makes a part of a client that has more than one: another part counts as the connection.
    pub(crate) fn part(member: Option<Registration>, protocol: P) -> Self {
        Self {
            protocol,
            life: Life::Arriving,
            disk: None,
            disk_use: None,
            session: None,
            reported_size: 0,
            refused: VecDeque::new(),
            comes_again: false,
            ticket: None,
            member,
        }
    }

    /// Counts it among the clients of a disk's group, and makes it a user of the disk.
    ///
    /// # Errors
    /// Why it may not.
    pub(crate) fn select(&mut self, cx: &Cx<'_>, disk: &Disk) -> Result<(), String> {
        self.count_among(disk).map_err(|refusal| refusal.to_string())?;
        self.use_disk(cx, disk)
    }

    /// Counts it among the clients of a disk's group. One that another daemon has saved was counted
    /// there.
    ///
    /// # Errors
    /// The group may have no more.
    pub(crate) fn count_among(&mut self, disk: &Disk) -> Result<(), admission::Refusal> {
        match &mut self.ticket {
            Some(ticket) if self.life.is_at_rest() => ticket.reselect(disk.tenant),
            Some(ticket) => ticket.select(disk.tenant)?,
            None => {}
        }
        Ok(())
    }

    /// Makes it a user of a disk.
    ///
    /// # Errors
    /// The disk is removed, or locked.
    pub(crate) fn use_disk(&mut self, cx: &Cx<'_>, disk: &Disk) -> Result<(), String> {
        if !self.life.is_at_rest() {
            self.reported_size = disk.current_size();
        }
        self.disk_use = match &self.ticket {
            Some(_) => disk.users.enter(cx.waker()),
            None => disk.users.enter_as_part(cx.waker()),
        };
        if self.disk_use.is_none() {
            return Err(match disk.state() {
                State::Locked => "the disk is locked: blkmq ctl unlock opens it".to_owned(),
                _ => "the disk is removed".to_owned(),
            });
        }
        self.note_hearing();
        self.member.iter().for_each(|member| member.select(&disk.name));
        Ok(())
    }

    /// Is no user of a disk any more that it was refused after all.
    #[cfg(feature = "nbd")]
    pub(crate) fn leave_disk(&mut self) {
        (self.session, self.disk_use) = (None, None);
    }

    /// Has the users of the disk know how it learns that the disk has grown.
    pub(crate) fn note_hearing(&self) {
        if let Some(entry) = &self.disk_use
            && let Some(hearing) = P::hearing(self)
        {
            entry.hears(hearing);
        }
    }

    /// Has a client that was made by a daemon that takes over wait until that daemon serves: nobody
    /// else can continue it.
    #[cfg(any(feature = "fuse", feature = "ublk"))]
    pub(crate) fn rest_if_suspended(&mut self) {
        if self.phase() != Phase::Serving && self.life == Life::Arriving {
            self.life = Life::Saved(Resume::Serving);
        }
    }

    fn phase(&self) -> Phase {
        self.member.as_ref().map_or(Phase::Serving, Registration::phase)
    }

    /// Enters the sessions of a disk: earlier ones may have to end first.
    ///
    /// # Errors
    /// Why it may not.
    pub(crate) fn enter(
        &mut self,
        cx: &Cx<'_>,
        disk: &Disk,
        sessions: &Arc<DiskSessions>,
        (socket, name): (&Arc<OwnedFd>, Option<SessionName>),
    ) -> Result<(), Refusal> {
        let mut session = sessions.enter(disk.number, socket, name, &cx.waker())?;
        // All requests of other clients ended before they were handed over.
        if self.life.is_at_rest() {
            session.wait_for_nobody();
        }
        self.session = Some(session);
        Ok(())
    }

    /// Returns whether earlier sessions of the disk have to end first.
    pub(crate) fn must_wait(&mut self) -> bool {
        self.session.as_mut().is_some_and(DiskSession::must_wait)
    }

    /// Makes room for what so many requests need that are refused or end at once. Only for clients whose reactor must not
    /// wait for memory while it serves: others have as much as they have needed.
    pub(crate) fn reserve(&mut self, cx: &Cx<'_>, requests: usize) {
        self.refused.reserve(requests);
        cx.ring_client().reserve(requests);
    }

    /// Submits a bio, now or as soon as there is room.
    #[inline]
    pub(crate) fn submit(&mut self, cx: &mut Cx<'_>, queue: QueueId, bio: Bio) {
        if let Err(bio) = cx.submit(queue, bio) {
            self.refused.push_back(bio);
        }
    }

    /// Ends this turn for the benefit of others; the client goes on in the next turn.
    pub(crate) fn come_again(&mut self, cx: &Cx<'_>) {
        if !std::mem::replace(&mut self.comes_again, true) {
            cx.ring_client().push_nop(AGAIN);
        }
    }

    /// Writes a warning about the client.
    #[cold]
    pub(crate) fn warn(&self, now: Instant, what: fmt::Arguments<'_>) {
        self.warn_about(now, None, what);
    }

    /// The same about a disk that it has not selected.
    #[cold]
    pub(crate) fn warn_about(&self, now: Instant, disk: Option<&str>, what: fmt::Arguments<'_>) {
        let about = About {
            disk: disk.or(self.about().disk),
            ..self.about()
        };
        let what = format_args!("{} {what}", P::name(self));
        self.protocol.log().warn(now, about, what);
    }

    /// Writes an event of the client that is no defect.
    #[cold]
    pub(crate) fn info(&self, now: Instant, what: fmt::Arguments<'_>) {
        let what = format_args!("{} {what}", P::name(self));
        self.protocol.log().info(now, self.about(), what);
    }

    /// What lines about the client are about.
    pub(crate) fn about(&self) -> About<'_> {
        About {
            disk: self.disk.as_ref().map(|disk| disk.name.as_str()),
            client: self.protocol.peer(),
            export: None,
        }
    }

    /// Follows the phase of a hand-over.
    fn follow(&mut self, cx: &mut Cx<'_>) {
        let before = self.life;
        let Some(member) = &self.member else { return };
        let phase = member.phase();
        self.life.apply(match phase {
            Phase::Serving => Event::Resume,
            Phase::Suspended if before.is_at_rest() && member.has_settled() => return,
            Phase::Suspended => Event::Suspend,
            Phase::Gone => Event::Leave,
        });
        match phase {
            _ if self.life == before => {}
            Phase::Serving => P::resume(self, cx),
            Phase::Suspended => {}
            Phase::Gone => P::leave(self),
        }
    }

    /// Hands the client over if nothing of it is under way.
    fn save_if_idle(&mut self, cx: &Cx<'_>) {
        if !self.refused.is_empty() || cx.outstanding() > 0 || !self.protocol.is_idle(self.life) {
            return;
        }
        self.life.apply(Event::Settle);
        let saved = P::save(self);
        self.report_rest(saved);
    }

    /// Tells the hand-over that the client is at rest, or why it cannot be.
    fn report_rest(&self, saved: Result<Option<Saved>, String>) {
        let Some(member) = &self.member else { return };
        match saved {
            Ok(saved) => member.settle(saved),
            Err(why) => member.fail(format!("{}: {why}", P::name(self))),
        }
    }

    /// Takes note of what others have decided about the client.
    fn look_around(&mut self, cx: &mut Cx<'_>) {
        if self.life != Life::Gone && self.ticket.as_ref().is_some_and(Ticket::is_displaced) {
            self.info(cx.now(), format_args!("closed: others need its place"));
            self.life.apply(Event::Lose);
        }
        if self.life != Life::Gone && self.session.as_ref().is_some_and(DiskSession::is_fenced) {
            self.info(cx.now(), format_args!("ended: its client has given it up"));
            self.life.apply(Event::Lose);
        }
        if self.life.is_open() && self.disk_use.as_ref().is_some_and(Use::is_to_end) {
            P::shut_down(self, cx, Shutdown::Disk);
        }
        if self.life.is_queued() && !self.must_wait() {
            self.life.apply(Event::Serve);
        }
        if self.life == Life::Serving
            && let Some(disk) = &self.disk
        {
            let size = disk.current_size();
            if std::mem::replace(&mut self.reported_size, size) != size {
                P::tell_size(self);
            }
        }
    }
}

impl<P: Protocol> Service for Client<P> {
    fn start(&mut self, cx: &mut Cx<'_>) {
        self.ticket
            .iter_mut()
            .for_each(|ticket| ticket.arrive(cx.waker()));
        if let Some(member) = &self.member {
            member.arrive(cx.waker());
        }
        if let Err(why) = P::start(self, cx) {
            self.warn(cx.now(), format_args!("closed: {why}"));
            self.report_rest(Err(why));
            return self.life.apply(Event::Lose);
        }
        if self.life.is_at_rest() {
            return self.report_rest(Ok(None));
        }
        self.life.apply(Event::Serve);
        self.follow(cx);
        self.look_around(cx);
        P::take_requests(self, cx);
    }

    fn on_ring(&mut self, cx: &mut Cx<'_>, completed: &[Completion]) {
        for completion in completed {
            match completion.user {
                AGAIN => self.comes_again = false,
                _ => P::on_ring(self, cx, completion),
            }
        }
        P::take_requests(self, cx);
    }

    fn on_end(&mut self, cx: &mut Cx<'_>, bio: Bio) {
        P::complete(self, cx, bio);
    }

    fn on_room(&mut self, cx: &mut Cx<'_>) {
        let queue = self.disk.as_ref().expect("a bio was refused").queue;
        while let Some(bio) = self.refused.pop_front() {
            if let Err(bio) = cx.submit(queue, bio) {
                self.refused.push_front(bio);
                return;
            }
        }
        P::take_requests(self, cx);
    }

    fn on_wake(&mut self, cx: &mut Cx<'_>) {
        self.follow(cx);
        if self.life.is_at_rest() {
            return;
        }
        self.look_around(cx);
        P::wake(self, cx);
        P::take_requests(self, cx);
    }

    fn on_timer(&mut self, cx: &mut Cx<'_>) {
        if self.life == Life::Gone || self.life.is_at_rest() {
            return;
        }
        if let Some((at, reason)) = P::deadline(self, cx.now())
            && at <= cx.now()
        {
            self.warn(cx.now(), format_args!("closed: {reason}"));
            self.life.apply(Event::Lose);
        }
    }

    fn end_of_batch(&mut self, cx: &mut Cx<'_>) {
        P::end_of_batch(self, cx);
        if self.life.is_to_be_saved() {
            self.save_if_idle(cx);
        }
        if self.life.is_ending() {
            if let Some(session) = &self.session {
                session.leave();
            }
            P::wind_up(self, cx);
        }
        match P::deadline(self, cx.now()) {
            Some((at, _)) if self.life != Life::Gone && !self.life.is_at_rest() => cx.set_timer(at),
            _ => cx.clear_timer(),
        }
    }

    fn busy(&self) -> bool {
        P::POLLS && self.disk.is_some() && self.life.is_open()
    }

    fn drain(&mut self, cx: &mut Cx<'_>) {
        if self.phase() == Phase::Gone {
            return self.follow(cx);
        }
        P::shut_down(self, cx, Shutdown::Daemon);
    }

    fn is_finished(&self) -> bool {
        self.life.is_ending() && self.refused.is_empty() && self.protocol.has_ended(self.life)
    }
}

impl<P: Protocol> Drop for Client<P> {
    fn drop(&mut self) {
        P::end(self);
    }
}

/// The number of the entry with which a client comes again: those of protocols are smaller.
const AGAIN: u64 = u32::MAX as u64;
