//! Which reactor serves a new connection: the next one in turn; and how many clients one
//! turn accepts. A listener is a service of one reactor; the connections that it accepts are
//! services of their own. While another daemon takes over, nobody is accepted.
//!
//! A client is accepted when the listener knows whether there is room for it. Without room nobody
//! is accepted: new clients wait in the kernel's backlog, and the daemon has no more descriptors
//! than it counts.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use blkmq_core::bio::Bio;
use blkmq_core::ids::ReactorId;
use blkmq_core::time::Nanos;
use blkmq_host::ring::Completion;
use blkmq_host::service::{Cx, Service, ServiceFactory, Waker};
use rustix::io::{Errno, ioctl_fionbio};
use rustix::net::{SocketFlags, accept_with, listen};

use super::Common;
use super::admission::{AddressLimits, NoRoom, Ticket};
use super::log::{About, Log};
use super::pace::Pace;
use super::socket::Socket;
use crate::handover::{Phase, Registration, Saved};

/// Makes the connection of a client that was admitted.
pub(crate) type Connect = Box<dyn Fn(Admitted) -> ServiceFactory + Send>;

/// A client that was admitted.
pub(crate) struct Admitted {
    pub(crate) socket: OwnedFd,
    pub(crate) is_tcp: bool,
    /// The client's entry in the counts of connections, as long as it is kept.
    pub(crate) ticket: Ticket,
    /// The client's registration for a hand-over.
    pub(crate) member: Registration,
}

/// Accepts the connections of one address.
pub(crate) struct Listener {
    socket: Option<Socket>,
    common: Arc<Common>,
    /// The number of the address.
    address: u32,
    /// The address, as its socket reports it.
    name: String,
    door: &'static str,
    member: Registration,
    /// Whether clients are accepted.
    phase: Phase,
    log: Arc<Log>,
    connect: Connect,
    next: usize,
    pace: Pace,
    /// A client that was accepted and for which there is no room yet. Shared with a hand-over, which needs no
    /// descriptor more then.
    waiting: Option<Arc<OwnedFd>>,
    /// The last accept failed, and that was logged.
    is_failing: bool,
    is_polling: bool,
    /// Clients may wait to be accepted.
    is_readable: bool,
    comes_again: bool,
    opening: Arc<Opening>,
}

/// Whether clients are admitted at an address; shared with the thread that can close the address.
#[derive(Debug, Default)]
pub(crate) struct Opening {
    is_closed: AtomicBool,
    /// The socket is closed, too.
    has_ended: AtomicBool,
    listener: Mutex<Option<Waker>>,
}

impl Opening {
    /// Admits nobody any more.
    fn close(&self) {
        // Release: pairs with the Acquire where the listener is woken; one that starts later looks, too.
        self.is_closed.store(true, Ordering::Release);
        let waker = self.lock().clone();
        waker.iter().for_each(Waker::wake);
        let start = Instant::now();
        // The next open of the address must find it free, and not lose it.
        while !self.has_ended.load(Ordering::Acquire) && start.elapsed() < CLOSE_MAX {
            thread::sleep(CLOSE_PAUSE);
        }
    }

    /// The listener has begun. Returns whether nobody is to be admitted any more.
    pub(crate) fn begin(&self, waker: Waker) -> bool {
        *self.lock() = Some(waker);
        self.is_closed()
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }

    /// Nobody is admitted any more, and no socket is open for that.
    pub(crate) fn end(&self) {
        self.has_ended.store(true, Ordering::Release);
    }

    fn lock(&self) -> MutexGuard<'_, Option<Waker>> {
        self.listener.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An address that is served; those who serve it can close it.
#[derive(Debug)]
pub(crate) struct OpenAddress {
    opening: Arc<Opening>,
    common: Weak<Common>,
    number: u32,
    door: &'static str,
    name: String,
}

impl OpenAddress {
    pub(crate) fn new(
        opening: &Arc<Opening>,
        common: &Arc<Common>,
        number: u32,
        door: &'static str,
        name: &str,
    ) -> Self {
        Self {
            opening: Arc::clone(opening),
            common: Arc::downgrade(common),
            number,
            door,
            name: name.to_owned(),
        }
    }

    /// Admits nobody any more, and hands nobody over. The address's entry is free when the last
    /// client has left.
    pub(crate) fn close(&self) {
        self.opening.close();
        if let Some(common) = self.common.upgrade() {
            common.handover.remove_door(self.door, &self.name);
            common.connections.remove_address(self.number);
        }
    }

    /// The name of the address.
    #[cfg(feature = "vhost-user")]
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Sets how many connections may be open, to disks of `groups` groups.
    pub(crate) fn set_limits(&self, limits: AddressLimits, groups: u32) {
        if let Some(common) = self.common.upgrade() {
            common.connections.set_limits(self.number, limits, groups);
        }
    }
}

impl Listener {
    /// # Errors
    /// The socket cannot be made non-blocking.
    pub(crate) fn new(
        socket: Socket,
        common: &Arc<Common>,
        address: u32,
        log: &Arc<Log>,
        connect: Connect,
    ) -> io::Result<Self> {
        ioctl_fionbio(&socket, true)?;
        // Fewer than the system allows: a client is accepted or refused within a moment.
        listen(&socket, BACKLOG)?;
        Ok(Self {
            name: socket.address(),
            door: log.door(),
            member: Registration::new(&common.handover),
            phase: Phase::Serving,
            socket: Some(socket),
            common: Arc::clone(common),
            address,
            log: Arc::clone(log),
            connect,
            next: 0,
            pace: Pace::default(),
            waiting: None,
            is_failing: false,
            is_polling: false,
            is_readable: true,
            comes_again: false,
            opening: Arc::default(),
        })
    }

    /// The handle that can close the listener.
    pub(crate) fn address(&self) -> OpenAddress {
        OpenAddress::new(&self.opening, &self.common, self.address, self.door, &self.name)
    }

    /// Accepts waiting clients, a few at a time.
    fn accept(&mut self, cx: &mut Cx<'_>) {
        if self.phase != Phase::Serving {
            return;
        }
        for _ in 0..ACCEPTS_MAX {
            let Some(fd) = self.next_client(cx) else { return };
            if !self.admit(cx, fd) {
                return;
            }
        }
        if !std::mem::replace(&mut self.comes_again, true) {
            cx.ring_client().push_nop(AGAIN);
        }
    }

    /// The client that waits, or the next one in the backlog.
    fn next_client(&mut self, cx: &mut Cx<'_>) -> Option<OwnedFd> {
        let Some(waiting) = self.waiting.take() else {
            return self.accept_one(cx);
        };
        match Arc::try_unwrap(waiting) {
            Ok(fd) => Some(fd),
            Err(shared) => {
                // A hand-over that failed is about to let it go.
                self.waiting = Some(shared);
                cx.set_timer(cx.now() + RETRY);
                None
            }
        }
    }

    fn accept_one(&mut self, cx: &mut Cx<'_>) -> Option<OwnedFd> {
        let socket = self.socket.as_ref()?;
        while self.is_readable {
            if let Some(at) = self.pace.wait(cx.now()) {
                cx.set_timer(at);
                return None;
            }
            match accept_with(socket, SocketFlags::CLOEXEC) {
                Ok(fd) => {
                    self.is_failing = false;
                    self.pace.note(cx.now());
                    return Some(fd);
                }
                Err(Errno::AGAIN) => self.is_readable = false,
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(errno) => {
                    self.failed(cx, errno);
                    return None;
                }
            }
        }
        None
    }

    /// Has a client served, or refuses it. Returns whether the next one can be handled: not while
    /// there is no room yet.
    fn admit(&mut self, cx: &mut Cx<'_>, fd: OwnedFd) -> bool {
        if let Some(Socket::Unix(..)) = self.socket
            && let Err(peer) = self.common.connections.allowed(self.address).check(&fd)
        {
            self.common.connections.note_refused(self.address);
            let name = &self.name;
            let what = format_args!("{name}: {peer} refused: neither in allow_uid nor in allow_gid");
            let about = About {
                client: Some(&peer),
                ..self.about()
            };
            self.log.warn(cx.now(), about, what);
            return true;
        }
        let admitted = self.common.connections.admit(self.address, || cx.waker());
        let ticket = match admitted {
            Ok(ticket) => ticket,
            Err(NoRoom::Yet) => {
                self.waiting = Some(Arc::new(fd));
                return false;
            }
            Err(NoRoom::AtAll(refusal)) => {
                let what = format_args!("connection refused: {refusal}");
                self.log.warn(cx.now(), self.about(), what);
                return true;
            }
        };
        let is_tcp = matches!(self.socket, Some(Socket::Tcp(_)));
        let reactor = ReactorId((self.next % cx.reactors()) as u16);
        self.next += 1;
        let connection = (self.connect)(Admitted {
            socket: fd,
            is_tcp,
            ticket,
            member: Registration::new(&self.common.handover),
        });
        cx.spawn_on(reactor, connection);
        true
    }

    fn poll(&mut self, cx: &mut Cx<'_>) {
        if let Some(socket) = &self.socket
            && !std::mem::replace(&mut self.is_polling, true)
        {
            cx.ring_client()
                .push_poll(socket.as_fd().as_raw_fd(), libc::POLLIN, true, POLL);
        }
    }

    /// Records whether clients are accepted, or are another daemon's.
    fn follow(&mut self, phase: Phase) {
        if std::mem::replace(&mut self.phase, phase) == phase && phase == Phase::Serving {
            return;
        }
        match phase {
            Phase::Serving if self.common.handover.is_inherited(&self.name) => {
                let file = self.common.handover.file_of(&self.name);
                self.socket.iter_mut().for_each(|socket| socket.own(file));
            }
            Phase::Serving => {}
            Phase::Suspended => self.member.settle(self.saved()),
            Phase::Gone => {
                self.socket.iter_mut().for_each(Socket::disown);
                self.waiting = None;
            }
        }
    }

    /// A client that was accepted and not served yet is handed over as one with which nothing was
    /// exchanged.
    fn saved(&self) -> Option<Saved> {
        let waiting = Arc::clone(self.waiting.as_ref()?);
        Some(Saved {
            door: self.door,
            address: self.name.clone(),
            body: Vec::new(),
            fds: vec![waiting],
        })
    }

    /// What lines about the address are about.
    fn about(&self) -> About<'_> {
        About {
            export: Some(&self.name),
            ..About::default()
        }
    }

    fn failed(&mut self, cx: &mut Cx<'_>, errno: Errno) {
        if matches!(errno, Errno::MFILE | Errno::NFILE) {
            self.common.connections.displace_some();
        }
        if !std::mem::replace(&mut self.is_failing, true) {
            let what = format_args!("no connection can be accepted: {errno}; trying again every 100 ms");
            self.log.warn(cx.now(), self.about(), what);
        }
        cx.set_timer(cx.now() + RETRY);
    }
}

impl Service for Listener {
    fn start(&mut self, cx: &mut Cx<'_>) {
        let phase = self.member.arrive(cx.waker());
        if self.opening.begin(cx.waker()) {
            return self.drain(cx);
        }
        self.follow(phase);
        self.poll(cx);
        self.accept(cx);
    }

    fn on_ring(&mut self, cx: &mut Cx<'_>, completed: &[Completion]) {
        for completion in completed {
            match completion.user {
                POLL => {
                    self.is_polling = completion.has_more();
                    self.is_readable = true;
                }
                AGAIN => self.comes_again = false,
                _ => {}
            }
        }
        self.poll(cx);
        self.accept(cx);
    }

    fn on_end(&mut self, _cx: &mut Cx<'_>, _bio: Bio) {}

    fn on_timer(&mut self, cx: &mut Cx<'_>) {
        self.accept(cx);
    }

    fn on_wake(&mut self, cx: &mut Cx<'_>) {
        if self.opening.is_closed() {
            return self.drain(cx);
        }
        self.follow(self.member.phase());
        self.accept(cx);
    }

    fn drain(&mut self, cx: &mut Cx<'_>) {
        if std::mem::take(&mut self.is_polling) {
            cx.ring_client().push_cancel(POLL, CANCEL);
        }
        self.socket = None;
        if !self.opening.is_closed() {
            // At a shutdown: the copy of the socket would let clients connect whom nobody accepts.
            self.common.handover.remove_door(self.door, &self.name);
        }
        self.waiting = None;
        self.opening.end();
    }

    fn is_finished(&self) -> bool {
        self.socket.is_none()
    }
}

/// How long to wait until a reactor has closed a socket.
const CLOSE_MAX: Duration = Duration::from_secs(5);
const CLOSE_PAUSE: Duration = Duration::from_millis(1);
const POLL: u64 = 0;
const CANCEL: u64 = 1;
const AGAIN: u64 = 2;
/// Clients that one turn accepts: about a third of a millisecond, in which nobody else is served.
const ACCEPTS_MAX: usize = 4;
/// Clients that wait to be accepted: those of a quarter of a second.
const BACKLOG: i32 = 512;
/// How long to wait after a failed accept: descriptors may become free.
const RETRY: Nanos = Nanos::from_millis(100);

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    #[test]
    fn client_that_waits_for_room_is_handed_over_without_a_descriptor_more() {
        let path = std::env::temp_dir().join(format!("blkmq-waiting-{}", std::process::id()));
        let listening = UnixListener::bind(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let socket = Socket::Unix(listening, None);
        let common = Arc::new(Common::new(1 << 20, 10));
        let log = Arc::new(Log::new("nbd"));
        let connect: Connect = Box::new(|_| unreachable!("it waits"));
        let mut listener = Listener::new(socket, &common, 0, &log, connect).unwrap();
        let (_client, accepted) = UnixStream::pair().unwrap();
        let number = accepted.as_raw_fd();
        listener.waiting = Some(Arc::new(accepted.into()));
        let saved = listener.saved().unwrap();
        assert_eq!(saved.fds[0].as_raw_fd(), number);
    }
}
