//! Decides which reactor a new connection lives on: the next one in turn. A service of one reactor; the connections it
//! accepts are services of their own.

use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;

use blkmq_core::bio::Bio;
use blkmq_core::ids::ReactorId;
use blkmq_core::time::Nanos;
use blkmq_host::ring::Completion;
use blkmq_host::service::{Cx, Service};

use super::connection::Connection;
use super::{Door, sys};

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
    /// The last accept failed, and that was logged.
    is_failing: bool,
    is_accepting: bool,
}

impl Listener {
    pub(super) fn new(socket: Socket, door: Arc<Door>) -> Self {
        Self {
            socket: Some(socket),
            door,
            next: 0,
            is_failing: false,
            is_accepting: false,
        }
    }

    fn accept(&mut self, cx: &mut Cx<'_>) {
        if let Some(socket) = &self.socket
            && !self.is_accepting
        {
            self.is_accepting = true;
            cx.port().push_accept(socket.as_fd().as_raw_fd(), ACCEPT);
        }
    }

    fn accepted(&mut self, cx: &mut Cx<'_>, fd: RawFd) {
        let fd = sys::accepted(fd);
        self.is_failing = false;
        let ticket = match self.door.common.connections.admit(self.door.address) {
            Ok(ticket) => ticket,
            Err(refusal) => {
                let log = &self.door.log;
                log.warn(cx.now(), format_args!("connection refused: {refusal}"));
                return;
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
    }

    fn failed(&mut self, cx: &mut Cx<'_>, errno: i32) {
        if matches!(errno, libc::EMFILE | libc::ENFILE) {
            self.door.common.connections.displace_some();
        }
        if !std::mem::replace(&mut self.is_failing, true) {
            let error = io::Error::from_raw_os_error(errno);
            let what = format_args!("no connection can be accepted: {error}; trying again every 100 ms");
            self.door.log.warn(cx.now(), what);
        }
        cx.set_timer(cx.now() + RETRY);
    }
}

impl Service for Listener {
    fn start(&mut self, cx: &mut Cx<'_>) {
        self.accept(cx);
    }

    fn on_ring(&mut self, cx: &mut Cx<'_>, completed: &[Completion]) {
        for completion in completed.iter().filter(|completion| completion.user == ACCEPT) {
            self.is_accepting = completion.has_more();
            match completion.result {
                fd if fd >= 0 => self.accepted(cx, fd),
                _ if self.socket.is_none() => {}
                errno => self.failed(cx, -errno),
            }
        }
        if !self.is_failing {
            self.accept(cx);
        }
    }

    fn on_end(&mut self, _cx: &mut Cx<'_>, _bio: Bio) {}

    fn on_timer(&mut self, cx: &mut Cx<'_>) {
        self.accept(cx);
    }

    fn drain(&mut self, cx: &mut Cx<'_>) {
        if self.is_accepting {
            cx.port().push_cancel(ACCEPT, CANCEL);
        }
        self.socket = None;
    }

    fn is_finished(&self) -> bool {
        self.socket.is_none()
    }
}

const ACCEPT: u64 = 0;
const CANCEL: u64 = 1;
/// How long to wait after a failed accept: descriptors may become free.
const RETRY: Nanos = Nanos::from_millis(100);
