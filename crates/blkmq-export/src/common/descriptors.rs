//! Decides which file descriptors a client at a unix socket may leave with this process, and who closes those that nobody asked for.
//!
//! The last close of some waits: that of a file for the filesystem in user space that it is of, that of a TCP socket as long as its
//! owner has chosen to linger. Who sends one and closes its own has whoever takes the message wait, or whoever closes the connection.
//! So nobody can send any where none is needed (since Linux 6.16); and where some are, a thread that serves nobody closes the rest.

mod sys;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;
#[cfg(feature = "vhost-user")]
use std::{mem::MaybeUninit, sync::Arc, thread};

#[cfg(feature = "vhost-user")]
use rustix::io::ioctl_fionread;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with};
#[cfg(feature = "vhost-user")]
use rustix::net::{RecvAncillaryBuffer, RecvFlags, Shutdown, recvmsg, shutdown};

/// Listens at a path. Who connects cannot send descriptors: not before `allow`, if the system can tell (Linux 6.16).
///
/// # Errors
/// What the system says.
pub fn listen_at(path: &Path) -> io::Result<UnixListener> {
    let socket = socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    refuse(&socket);
    bind(&socket, &SocketAddrUnix::new(path)?)?;
    listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

/// Has descriptors refused that somebody would send to this socket or, if it listens, to those that come of it. An older system
/// lets them through.
pub(crate) fn refuse(socket: impl AsFd) {
    sys::pass_rights(socket.as_fd(), cfg!(blkmq_mutant = "descriptors"));
}

/// The reverse of [`refuse`].
#[cfg(feature = "vhost-user")]
pub(crate) fn allow(socket: impl AsFd) {
    sys::pass_rights(socket.as_fd(), true);
}

/// Ends a connection that may have brought descriptors. Those that were not wanted, and those that nobody has received, are closed by
/// a thread of their own, which has `place` until then. If there can be no thread, here.
#[cfg(feature = "vhost-user")]
pub(crate) fn let_go(socket: &Arc<OwnedFd>, unwanted: Vec<OwnedFd>, place: impl Send + 'static) {
    // Nothing more comes.
    let _ = shutdown(socket, Shutdown::Both);
    if unwanted.is_empty() && ioctl_fionread(socket) == Ok(0) {
        return;
    }
    let socket = Arc::clone(socket);
    let close = move || {
        drop(unwanted);
        while receive_nothing(&socket) {}
        drop(place);
    };
    let _ = thread::Builder::new().name("close".to_owned()).spawn(close);
}

/// Receives a message, if there is one, and closes what came with it.
#[cfg(feature = "vhost-user")]
fn receive_nothing(socket: &OwnedFd) -> bool {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = [0; 4096];
    let mut into = [io::IoSliceMut::new(&mut bytes)];
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    recvmsg(socket, &mut into, &mut ancillary, flags).is_ok_and(|received| received.bytes > 0)
}

/// Descriptors that the system lets one message carry.
#[cfg(feature = "vhost-user")]
pub(crate) const DESCRIPTORS_MAX: usize = 253;
/// Clients that wait to be accepted, as of the standard library's listeners.
const BACKLOG: i32 = 128;
