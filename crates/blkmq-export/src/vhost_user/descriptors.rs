//! Decides which descriptors a front end may send: those whose close never waits for anybody, which are memory, events, and streams
//! with nothing in them. `connection` receives them, and `unmap` closes what is left of them, since to free a guest's memory takes
//! a while.

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;

use rustix::fs::fcntl_get_seals;
use rustix::io::{Errno, ioctl_fionread};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketType, recvmsg, sockopt,
};

use super::unmap;
use crate::common::descriptors::{DESCRIPTORS_MAX, refuse};

/// Descriptors of a message, as far as nobody has taken them.
#[derive(Debug, Default)]
pub(super) struct Descriptors(Vec<OwnedFd>);

impl From<Vec<OwnedFd>> for Descriptors {
    fn from(fds: Vec<OwnedFd>) -> Self {
        Self(fds)
    }
}

impl Deref for Descriptors {
    type Target = Vec<OwnedFd>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl DerefMut for Descriptors {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.0
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        self.0.drain(..).for_each(unmap::close);
    }
}

/// Receives bytes, as many as there are and have room, and descriptors, all of them: what has no room here the system would close
/// on this thread.
pub(super) fn receive(socket: &OwnedFd, into: &mut [u8], fds: &mut Vec<OwnedFd>) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = recvmsg(socket, &mut [IoSliceMut::new(into)], &mut ancillary, flags);
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(came) = message {
            fds.extend(came);
        }
    }
    received.map(|received| received.bytes)
}

/// Says whether the last close of a descriptor waits for nobody. Nor does this question, whatever it is.
pub(super) fn closes_at_once(fd: &OwnedFd) -> bool {
    is_memory(fd) || is_event(fd) || is_empty_stream(fd)
}

/// Says whether a file's pages are in memory by themselves: it can have seals, as on tmpfs and hugetlbfs. Those of another filesystem may
/// have to be waited for, by a thread that serves others, too; so may all else that such a one is asked, even what it is.
pub(super) fn is_memory(fd: impl AsFd) -> bool {
    fcntl_get_seals(fd).is_ok()
}

/// Says whether it is an eventfd. A file could not have this name: those begin with `/`.
pub(super) fn is_event(fd: &OwnedFd) -> bool {
    let link = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()));
    link.is_ok_and(|link| link == Path::new("anon_inode:[eventfd]"))
}

/// Says whether it is a unix stream in which nothing lies, as a channel for changes is; from now on no descriptor comes into it.
fn is_empty_stream(fd: &OwnedFd) -> bool {
    let is_stream = sockopt::socket_domain(fd) == Ok(AddressFamily::UNIX)
        && sockopt::socket_type(fd) == Ok(SocketType::STREAM)
        && sockopt::socket_acceptconn(fd) == Ok(false);
    if is_stream {
        refuse(fd);
    }
    is_stream && ioctl_fionread(fd) == Ok(0)
}
