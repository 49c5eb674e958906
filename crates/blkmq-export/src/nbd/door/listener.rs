//! Decides which reactor a new connection lives on: the next one in turn; and how many clients one turn accepts. A service of one
//! reactor; the connections it accepts are services of their own.
//!
//! A client is accepted when it is known whether there is room for it. While there is none yet nobody is accepted: those who come
//! wait in the kernel's backlog, and the daemon has no more descriptors than it counts.

use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;

use blkmq_core::bio::Bio;
use blkmq_core::ids::ReactorId;
use blkmq_core::time::Nanos;
use blkmq_host::ring::Completion;
use blkmq_host::service::{Cx, Service};
use rustix::io::{Errno, ioctl_fionbio};
use rustix::net::{SocketFlags, accept_with, listen};

use super::Door;
use super::admission::NoRoom;
use super::connection::Connection;
use super::pace::Pace;

/// A socket that listens.
#[derive(Debug)]
pub enum Socket {
    /// A unix socket; the path, if any, is removed when the door closes.
    Unix(UnixListener, Option<PathBuf>),
    /// A TCP socket.
    Tcp(TcpListener),
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(listener, _) => listener.as_fd(),
            Self::Tcp(listener) => listener.as_fd(),
        }
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        if let Self::Unix(_, Some(path)) = self {
            // Gone already is as good.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Accepts the connections of one address.
pub(super) struct Listener {
    socket: Option<Socket>,
    door: Arc<Door>,
    next: usize,
    pace: Pace,
    /// Accepted, and there is no room for it yet.
    waiting: Option<OwnedFd>,
    /// The last accept failed, and that was logged.
    is_failing: bool,
    is_polling: bool,
    /// Somebody may wait to be accepted.
    is_readable: bool,
    comes_again: bool,
}

impl Listener {
    /// # Errors
    /// If the socket cannot be asked without waiting.
    pub(super) fn new(socket: Socket, door: Arc<Door>) -> io::Result<Self> {
        ioctl_fionbio(&socket, true)?;
        // Fewer than the system allows: who comes is accepted or refused in a moment.
        listen(&socket, BACKLOG)?;
        Ok(Self {
            socket: Some(socket),
            door,
            next: 0,
            pace: Pace::default(),
            waiting: None,
            is_failing: false,
            is_polling: false,
            is_readable: true,
            comes_again: false,
        })
    }

    /// Accepts those who wait, some at a time.
    fn accept(&mut self, cx: &mut Cx<'_>) {
        for _ in 0..ACCEPTS_MAX {
            let fd = match self.waiting.take() {
                Some(fd) => fd,
                None => match self.accept_one(cx) {
                    Some(fd) => fd,
                    None => return,
                },
            };
            if !self.admit(cx, fd) {
                return;
            }
        }
        if !std::mem::replace(&mut self.comes_again, true) {
            cx.port().push_nop(AGAIN);
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

    /// Has a client served, or turns it away. Says whether the next one can be looked at: not while there is no room yet.
    fn admit(&mut self, cx: &mut Cx<'_>, fd: OwnedFd) -> bool {
        let ticket = match self
            .door
            .common
            .connections
            .admit(self.door.address, || cx.waker())
        {
            Ok(ticket) => ticket,
            Err(NoRoom::Yet) => {
                self.waiting = Some(fd);
                return false;
            }
            Err(NoRoom::AtAll(refusal)) => {
                let log = &self.door.log;
                log.warn(cx.now(), format_args!("connection refused: {refusal}"));
                return true;
            }
        };
        let is_tcp = matches!(self.socket, Some(Socket::Tcp(_)));
        let door = Arc::clone(&self.door);
        let reactor = ReactorId((self.next % cx.reactors()) as u16);
        self.next += 1;
        cx.spawn_on(
            reactor,
            Box::new(move || Box::new(Connection::new(fd, is_tcp, door, ticket))),
        );
        true
    }

    fn poll(&mut self, cx: &mut Cx<'_>) {
        if let Some(socket) = &self.socket
            && !std::mem::replace(&mut self.is_polling, true)
        {
            cx.port()
                .push_poll(socket.as_fd().as_raw_fd(), libc::POLLIN, true, POLL);
        }
    }

    fn failed(&mut self, cx: &mut Cx<'_>, errno: Errno) {
        if matches!(errno, Errno::MFILE | Errno::NFILE) {
            self.door.common.connections.displace_some();
        }
        if !std::mem::replace(&mut self.is_failing, true) {
            let what = format_args!("no connection can be accepted: {errno}; trying again every 100 ms");
            self.door.log.warn(cx.now(), what);
        }
        cx.set_timer(cx.now() + RETRY);
    }
}

impl Service for Listener {
    fn start(&mut self, cx: &mut Cx<'_>) {
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
        self.accept(cx);
    }

    fn drain(&mut self, cx: &mut Cx<'_>) {
        if self.is_polling {
            cx.port().push_cancel(POLL, CANCEL);
        }
        self.socket = None;
        self.waiting = None;
    }

    fn is_finished(&self) -> bool {
        self.socket.is_none()
    }
}

const POLL: u64 = 0;
const CANCEL: u64 = 1;
const AGAIN: u64 = 2;
/// Clients that one turn accepts: a third of a millisecond or so, in which nobody else is served.
const ACCEPTS_MAX: usize = 4;
/// Clients that wait to be accepted: a quarter of a second's.
const BACKLOG: i32 = 512;
/// How long to wait after a failed accept: descriptors may become free.
const RETRY: Nanos = Nanos::from_millis(100);
