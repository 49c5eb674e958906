//! Whether a client's socket can be read or written now, as the reactor's ring reports it, and
//! whether the client is still there. A connection asks for the reports; `peer` names the client.

use std::os::fd::RawFd;

use blkmq_host::ring::{Completion, RingClient};

/// What the ring has reported of one socket, and what it has been asked to report.
#[derive(Debug)]
pub(crate) struct Readiness {
    /// There may be bytes to receive.
    pub(crate) is_readable: bool,
    /// The socket takes no more bytes; a poll waits for that to change.
    is_blocked: bool,
    is_polling: bool,
    presence: Presence,
}

/// What a poll has reported of the peer. It never goes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Presence {
    /// The peer may send more.
    Present,
    /// The peer sends no more; its last bytes may still wait in the socket.
    Left,
    /// The connection was reset.
    Reset,
}

impl Readiness {
    /// That of a socket of which nothing is known.
    pub(crate) fn new() -> Self {
        Self {
            is_readable: true,
            is_blocked: false,
            is_polling: false,
            presence: Presence::Present,
        }
    }

    /// Takes note of a completion of the ring. Returns whether it reports the peer.
    pub(crate) fn note(&mut self, completion: &Completion) -> bool {
        match completion.user {
            POLL_IN => {
                self.is_polling = completion.has_more();
                self.is_readable = true;
                self.presence = self.presence.max(Presence::of(completion.result));
                return true;
            }
            POLL_OUT => self.is_blocked = false,
            _ => {}
        }
        false
    }

    /// Has the ring report bytes and the end of the peer.
    pub(crate) fn watch(&mut self, ring: &RingClient, socket: RawFd) {
        if !std::mem::replace(&mut self.is_polling, true) {
            let events = libc::POLLIN | libc::POLLRDHUP;
            ring.push_poll(socket, events, true, POLL_IN);
        }
    }

    /// Has the ring report when the socket takes bytes again.
    pub(crate) fn wait_for_room(&mut self, ring: &RingClient, socket: RawFd) {
        if !std::mem::replace(&mut self.is_blocked, true) {
            ring.push_poll(socket, libc::POLLOUT, false, POLL_OUT);
        }
    }

    /// Ends all polls.
    pub(crate) fn end(&mut self, ring: &RingClient) {
        if std::mem::take(&mut self.is_polling) {
            ring.push_cancel(POLL_IN, CANCEL);
        }
        if std::mem::take(&mut self.is_blocked) {
            ring.push_cancel(POLL_OUT, CANCEL);
        }
    }

    /// Returns whether the socket takes no more bytes now.
    #[inline]
    pub(crate) fn is_blocked(&self) -> bool {
        self.is_blocked
    }

    /// What is known of the peer.
    #[inline]
    pub(crate) fn presence(&self) -> Presence {
        self.presence
    }
}

impl Presence {
    /// What the result of a poll says. An errno, which is negative, says that nothing more comes.
    fn of(result: i32) -> Self {
        match result {
            result if result >= 0 && result & RESET != 0 => Self::Reset,
            result if result < 0 || result & LEFT != 0 => Self::Left,
            _ => Self::Present,
        }
    }
}

const LEFT: i32 = (libc::POLLRDHUP | libc::POLLHUP) as i32;
const RESET: i32 = libc::POLLERR as i32;
const POLL_IN: u64 = 0;
const POLL_OUT: u64 = 1;
const CANCEL: u64 = 2;
