//! Which clients of one disk's connections have left, as known to the kernel, which may
//! know before their reactors. A client that selects the disk asks. The cost grows with the number
//! that have left, not with the number present: a crowd at one disk does not delay others on its
//! thread.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::buffer::spare_capacity;
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};

/// The sockets of a disk's connections, each under its connection's number.
#[derive(Debug)]
pub(super) struct HangUps(OwnedFd);

impl HangUps {
    /// # Errors
    /// The process has no descriptor left.
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self(epoll::create(CreateFlags::CLOEXEC)?))
    }

    /// Watches a connection's socket from now on.
    ///
    /// # Errors
    /// The system has no memory for it, or watches no more.
    pub(super) fn watch(&self, socket: BorrowedFd<'_>, number: u64) -> io::Result<()> {
        // The system reports resets and failures unasked.
        Ok(epoll::add(
            &self.0,
            socket,
            EventData::new_u64(number),
            EventFlags::RDHUP,
        )?)
    }

    /// Watches a socket no more.
    pub(super) fn forget(&self, socket: BorrowedFd<'_>) {
        if let Err(error) = epoll::delete(&self.0, socket) {
            // Closing the socket ends it, too.
            tracing::warn!("a client's socket is watched until it is closed: {error}");
        }
    }

    /// The numbers of the connections whose clients have left; `watched` connections are watched.
    ///
    /// # Errors
    /// The kernel's error.
    pub(super) fn all(&self, watched: usize) -> io::Result<Vec<u64>> {
        let mut events: Vec<Event> = Vec::with_capacity(watched.max(1));
        epoll::wait(&self.0, spare_capacity(&mut events), Some(&Timespec::default()))?;
        Ok(events.into_iter().map(|event| event.data.u64()).collect())
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn only_who_has_left_is_told_and_as_often_as_is_asked() {
        let hang_ups = HangUps::new().unwrap();
        let mut pairs: Vec<_> = (0..5).map(|_| UnixStream::pair().unwrap()).collect();
        for (number, (_, socket)) in pairs.iter().enumerate() {
            hang_ups.watch(socket.as_fd(), number as u64).unwrap();
        }
        assert!(hang_ups.all(5).unwrap().is_empty());
        let (client, socket) = pairs.remove(3);
        drop(client);
        // Half closed counts as left: nothing more comes.
        pairs[1].0.shutdown(std::net::Shutdown::Write).unwrap();
        for _ in 0..2 {
            let mut all = hang_ups.all(5).unwrap();
            all.sort_unstable();
            assert_eq!(all, [1, 3]);
        }
        hang_ups.forget(socket.as_fd());
        assert_eq!(hang_ups.all(5).unwrap(), [1]);
    }
}
