//! The file descriptors that a client at a unix socket sends to this process: which it may send, and who
//! closes those that nobody asked for.
//!
//! The last close of a descriptor may block: that of a file, for the user-space filesystem of the
//! file; that of a TCP socket, as long as its owner has set it to linger. A client that sends such
//! a descriptor and closes its own makes the receiver of the message block, or the thread that
//! closes the connection. So nobody can send any where none is needed (since Linux 6.16); elsewhere
//! a thread that serves nobody closes the unwanted ones.

mod sys;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;
#[cfg(feature = "vhost-user")]
use std::{mem::MaybeUninit, sync::Arc, thread};

use rustix::fs::{Mode, fchmod};
#[cfg(feature = "vhost-user")]
use rustix::io::ioctl_fionread;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with};
#[cfg(feature = "vhost-user")]
use rustix::net::{RecvAncillaryBuffer, RecvFlags, Shutdown, recvmsg, shutdown};

/// Listens at a path, which is its owner's alone. Clients cannot send descriptors before `allow`, if the system supports that
/// (Linux 6.16).
///
/// # Errors
/// The system's error.
pub fn listen_at(path: &Path) -> io::Result<UnixListener> {
    let socket = socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    refuse(&socket);
    // The path has this mode from the first moment on, whatever the mask of the process is.
    fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    bind(&socket, &SocketAddrUnix::new(path)?)?;
    listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

/// Makes the system refuse descriptors sent to this socket or, if it listens, to its connections.
/// An older system lets them through.
pub(crate) fn refuse(socket: impl AsFd) {
    sys::pass_rights(socket.as_fd(), false);
}

/// The reverse of [`refuse`].
#[cfg(feature = "vhost-user")]
pub(crate) fn allow(socket: impl AsFd) {
    sys::pass_rights(socket.as_fd(), true);
}

/// Ends a connection that may have brought descriptors. A thread of its own, which holds `place`
/// until then, closes the unwanted ones and those that nobody has received. If no thread can be
/// started, they are closed here.
#[cfg(feature = "vhost-user")]
pub(crate) fn let_go(socket: &Arc<OwnedFd>, unwanted: Vec<OwnedFd>, place: impl Send + 'static) {
    // After this nothing more arrives.
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

/// Receives a message, if there is one, and closes its descriptors.
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
/// Clients that wait to be accepted, as for the standard library's listeners.
const BACKLOG: i32 = 128;
