//! The descriptors that a front end may send: those whose close never blocks, which are memory, events, and
//! empty streams. `connection` receives them, and `unmap` closes the remaining ones, since freeing a guest's
//! memory takes a while.

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

/// Descriptors of a message that were not taken yet.
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

/// Receives bytes, as many as there are and fit, and all descriptors: the system would close those
/// that do not fit on this thread.
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

/// Returns whether the last close of a descriptor never blocks. The check does not block either,
/// for any descriptor.
pub(super) fn closes_at_once(fd: &OwnedFd) -> bool {
    is_memory(fd) || is_event(fd) || is_empty_stream(fd)
}

/// Returns whether a file's pages are memory: such a file can have seals, as on tmpfs and
/// hugetlbfs. Pages of another filesystem may have to be waited for, even by a thread that serves
/// others; so may any other question to such a filesystem, even for its type.
pub(super) fn is_memory(fd: impl AsFd) -> bool {
    fcntl_get_seals(fd).is_ok()
}

/// Returns whether it is an eventfd. A file could not have this name: names of files begin with
/// `/`.
pub(super) fn is_event(fd: &OwnedFd) -> bool {
    let link = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()));
    link.is_ok_and(|link| link == Path::new("anon_inode:[eventfd]"))
}

/// Returns whether it is an empty unix stream, as a channel for changes is; from now on no
/// descriptor comes into it.
fn is_empty_stream(fd: &OwnedFd) -> bool {
    let is_stream = sockopt::socket_domain(fd) == Ok(AddressFamily::UNIX)
        && sockopt::socket_type(fd) == Ok(SocketType::STREAM)
        && sockopt::socket_acceptconn(fd) == Ok(false);
    if is_stream {
        refuse(fd);
    }
    is_stream && ioctl_fionread(fd) == Ok(0)
}
