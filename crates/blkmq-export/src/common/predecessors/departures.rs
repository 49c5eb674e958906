//! Decides whose client has left, of all connections of one disk, as the kernel knows before their reactors may. Who selects the disk
//! asks. What that costs grows with those who have left, not with those who are there: a crowd at one disk holds up nobody else
//! on its thread.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::buffer::spare_capacity;
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};

/// The sockets of a disk's connections, each under its connection's number.
#[derive(Debug)]
pub(super) struct Departures(OwnedFd);

impl Departures {
    /// # Errors
    /// If the process has no descriptor left.
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self(epoll::create(CreateFlags::CLOEXEC)?))
    }

    /// Looks at a connection's socket from now on.
    ///
    /// # Errors
    /// If the system has no memory for it, or watches no more.
    pub(super) fn watch(&self, socket: BorrowedFd<'_>, number: u64) -> io::Result<()> {
        // That a connection is reset or fails is told without being asked for.
        Ok(epoll::add(
            &self.0,
            socket,
            EventData::new_u64(number),
            EventFlags::RDHUP,
        )?)
    }

    /// Looks at a socket no more.
    pub(super) fn forget(&self, socket: BorrowedFd<'_>) {
        epoll::delete(&self.0, socket).expect("a socket that is watched");
    }

    /// The numbers of the connections whose clients have left, of at most so many that are watched.
    ///
    /// # Errors
    /// If the kernel cannot say.
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
        let departures = Departures::new().unwrap();
        let mut pairs: Vec<_> = (0..5).map(|_| UnixStream::pair().unwrap()).collect();
        for (number, (_, socket)) in pairs.iter().enumerate() {
            departures.watch(socket.as_fd(), number as u64).unwrap();
        }
        assert!(departures.all(5).unwrap().is_empty());
        let (client, socket) = pairs.remove(3);
        drop(client);
        // Half closed is left as well: nothing more comes.
        pairs[1].0.shutdown(std::net::Shutdown::Write).unwrap();
        for _ in 0..2 {
            let mut all = departures.all(5).unwrap();
            all.sort_unstable();
            assert_eq!(all, [1, 3]);
        }
        departures.forget(socket.as_fd());
        assert_eq!(departures.all(5).unwrap(), [1]);
    }
}
