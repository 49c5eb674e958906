//! The dialer, which connects to a peer that listens for this daemon: as soon as the peer is there, and again
//! some time after the connection ended. A service of one reactor, like a listener; the connection is a
//! service of its own.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blkmq_core::bio::Bio;
use blkmq_core::ids::ReactorId;
use blkmq_core::time::{Instant, Nanos};
use blkmq_host::ring::Completion;
use blkmq_host::service::{Cx, Service, Waker};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use super::Common;
use super::listener::{Admitted, Connect, OpenAddress, Opening};
use super::log::{About, Log};
use crate::handover::{Phase, Registration};

/// Connects to one peer.
pub(crate) struct Dialer {
    path: PathBuf,
    common: Arc<Common>,
    /// The number of the address.
    address: u32,
    name: String,
    log: Arc<Log>,
    connect: Connect,
    dialed: Arc<Dialed>,
    opening: Arc<Opening>,
    member: Registration,
    phase: Phase,
    /// Until the next attempt. Doubles with each; a connection that lives long makes it short again.
    pause: Nanos,
    /// When the present connection was made.
    since: Option<Instant>,
    /// The error of the last attempt, so that it is logged once.
    failed: Option<Errno>,
    has_ended: bool,
}

/// The number of connections to the peer: at most one, and for a moment a second one that has been
/// handed over.
#[derive(Debug, Default)]
pub(crate) struct Dialed {
    connections: AtomicU32,
    dialer: Mutex<Option<Waker>>,
}

/// One connection to the peer, as long as this exists.
#[derive(Debug)]
pub(crate) struct Held(Arc<Dialed>);

impl Dialed {
    pub(crate) fn hold(self: &Arc<Self>) -> Held {
        // Relaxed, as is its reading: the waker orders what follows.
        self.connections.fetch_add(1, Ordering::Relaxed);
        Held(Arc::clone(self))
    }

    fn lock(&self) -> MutexGuard<'_, Option<Waker>> {
        self.dialer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Ordering::Relaxed);
        let waker = self.0.lock().clone();
        waker.iter().for_each(Waker::wake);
    }
}

impl Dialer {
    pub(crate) fn new(
        path: PathBuf,
        common: &Arc<Common>,
        address: u32,
        log: &Arc<Log>,
        (connect, dialed): (Connect, &Arc<Dialed>),
    ) -> Self {
        Self {
            name: format!("connect:unix:{}", path.display()),
            path,
            common: Arc::clone(common),
            address,
            log: Arc::clone(log),
            connect,
            dialed: Arc::clone(dialed),
            opening: Arc::default(),
            member: Registration::new(&common.handover),
            phase: Phase::Serving,
            pause: PAUSE_MIN,
            since: None,
            failed: None,
            has_ended: false,
        }
    }

    /// The handle that can close the dialer.
    pub(crate) fn address(&self) -> OpenAddress {
        OpenAddress::new(
            &self.opening,
            &self.common,
            self.address,
            self.log.door(),
            &self.name,
        )
    }

    /// Connects, if there is no connection and this daemon may make one.
    fn dial(&mut self, cx: &mut Cx<'_>) {
        let has_one = self.dialed.connections.load(Ordering::Relaxed) > 0;
        if has_one || self.phase != Phase::Serving || self.has_ended {
            return;
        }
        let pause = self.pause;
        self.pause = Nanos((2 * pause.0).min(PAUSE_MAX.0));
        match self.try_dial() {
            Ok(socket) => {
                self.failed = None;
                self.serve(cx, socket);
            }
            Err(errno) => {
                if self.failed.replace(errno) != Some(errno) {
                    let what = format_args!("{}: nobody can be reached: {errno}; trying again", self.name);
                    let about = About {
                        export: Some(&self.name),
                        ..About::default()
                    };
                    self.log.info(cx.now(), about, what);
                }
                cx.set_timer(cx.now() + pause);
            }
        }
    }

    /// Never blocks: a peer whose backlog is full is also tried again.
    fn try_dial(&self) -> Result<OwnedFd, Errno> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        connect(&socket, &SocketAddrUnix::new(&self.path)?)?;
        Ok(socket)
    }

    fn serve(&mut self, cx: &mut Cx<'_>, socket: OwnedFd) {
        let Ok(ticket) = self.common.connections.admit(self.address, || cx.waker()) else {
            // The limit of connections is reached: closes the connection to the peer, and tries
            // again later.
            cx.set_timer(cx.now() + PAUSE_MAX);
            return;
        };
        let connection = (self.connect)(Admitted {
            socket,
            is_tcp: false,
            ticket,
            member: Registration::new(&self.common.handover),
        });
        self.since = Some(cx.now());
        let reactor = ReactorId((self.address as usize % cx.reactors()) as u16);
        cx.spawn_on(reactor, connection);
    }

    fn follow(&mut self, phase: Phase) {
        self.phase = phase;
        if phase == Phase::Suspended {
            self.member.settle(None);
        }
    }
}

impl Service for Dialer {
    fn start(&mut self, cx: &mut Cx<'_>) {
        *self.dialed.lock() = Some(cx.waker());
        if self.opening.begin(cx.waker()) {
            return self.drain(cx);
        }
        let phase = self.member.arrive(cx.waker());
        self.follow(phase);
        self.dial(cx);
    }

    fn on_ring(&mut self, _cx: &mut Cx<'_>, _completed: &[Completion]) {}

    fn on_end(&mut self, _cx: &mut Cx<'_>, _bio: Bio) {}

    fn on_timer(&mut self, cx: &mut Cx<'_>) {
        self.dial(cx);
    }

    /// The phase has changed, or the connection has ended. Dials later, so that a peer that hangs
    /// up does not keep a reactor busy, and more and more so while it does that at once.
    fn on_wake(&mut self, cx: &mut Cx<'_>) {
        if self.opening.is_closed() {
            return self.drain(cx);
        }
        self.follow(self.member.phase());
        // Relaxed, as in `dial`.
        let has_ended = self.dialed.connections.load(Ordering::Relaxed) == 0;
        let since = self.since.take_if(|_| has_ended);
        // One that was handed over is not known here, and has lived.
        if has_ended && since.is_none_or(|since| cx.now() >= since + LONG_LIFE) {
            self.pause = PAUSE_MIN;
        }
        cx.set_timer(cx.now() + self.pause);
    }

    fn drain(&mut self, cx: &mut Cx<'_>) {
        cx.clear_timer();
        *self.dialed.lock() = None;
        self.has_ended = true;
        self.opening.end();
    }

    fn is_finished(&self) -> bool {
        self.has_ended
    }
}

/// The pause before a peer is tried again, at first and at most.
const PAUSE_MIN: Nanos = Nanos::from_millis(50);
const PAUSE_MAX: Nanos = Nanos::from_secs(2);
/// A connection that lives so long is not one of a peer that hangs up at once.
const LONG_LIFE: Nanos = Nanos::from_secs(1);
