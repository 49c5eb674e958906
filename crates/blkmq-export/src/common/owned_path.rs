//! The path of a socket that this process has made, and removes at its end: only while that socket
//! is there, and not what somebody else has put in its place. `socket` opens addresses with it.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use blkmq_host::device::FileId;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use super::credentials::Credentials;
use super::socket::OpenError;
use super::turn::Turn;

/// A path at which a socket of this process is. Dropping it removes the path, which has to be done
/// before the socket is closed: nobody takes a path where somebody listens.
#[derive(Debug)]
pub struct OwnedPath {
    path: PathBuf,
    file: FileId,
}

/// A path at which nobody listens, for as long as this exists: other daemons wait before they look.
#[derive(Debug)]
pub struct FreePath {
    path: PathBuf,
    _turn: Turn,
}

/// What is at a path.
enum Found {
    Nothing,
    /// A socket where nobody listens.
    Stale,
    Living,
    /// Nobody will serve there, since the process has ended; the kernel has yet to close its socket.
    Dead,
}

impl FreePath {
    /// Finds a path free, or removes a socket where nobody listens any more, such as that of a killed
    /// daemon. Blocks for some seconds if the last requests of that daemon have not ended yet.
    ///
    /// # Errors
    /// Somebody listens there, or it is no socket. The text does not name the path.
    pub fn find(path: &Path) -> Result<Self, OpenError> {
        let start = Instant::now();
        loop {
            let turn = Turn::wait_for(path);
            match look(path)? {
                Found::Dead if start.elapsed() < LAST_REQUESTS_MAX => {
                    drop(turn);
                    thread::sleep(LOOK_AGAIN);
                    continue;
                }
                Found::Living | Found::Dead => {
                    let what = "another server listens there: stop it, or choose another path";
                    return Err(OpenError::new(what));
                }
                Found::Stale => remove(path)?,
                Found::Nothing => {}
            }
            return Ok(Self {
                path: path.to_owned(),
                _turn: turn,
            });
        }
    }

    /// Takes ownership of the socket that this process has made there.
    ///
    /// # Errors
    /// The system's error.
    pub fn own(self) -> io::Result<OwnedPath> {
        OwnedPath::of(self.path)
    }
}

impl OwnedPath {
    /// Takes ownership of what is at a path.
    ///
    /// # Errors
    /// The system's error: nothing is there, for instance.
    pub fn of(path: PathBuf) -> io::Result<Self> {
        let file = FileId::of(&fs::symlink_metadata(&path)?);
        Ok(Self { path, file })
    }

    /// Takes ownership of a socket of another process, which has this identity.
    pub(crate) fn inherited(path: PathBuf, file: FileId) -> Self {
        Self { path, file }
    }

    /// The identity of the socket there.
    pub(crate) fn file(&self) -> FileId {
        self.file
    }

    /// Leaves the path to another process.
    pub(crate) fn leave(self) {
        std::mem::forget(self);
    }
}

impl Drop for OwnedPath {
    fn drop(&mut self) {
        let found = fs::symlink_metadata(&self.path);
        if found.is_ok_and(|found| FileId::of(&found) == self.file) {
            // Somebody else may remove it in this moment.
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn look(path: &Path) -> Result<Found, OpenError> {
    let Ok(found) = fs::symlink_metadata(path) else {
        return Ok(Found::Nothing);
    };
    if !found.file_type().is_socket() {
        let what = "there is something else than a socket: choose another path, or move it away";
        return Err(OpenError::new(what));
    }
    match reach(path) {
        Ok(socket) if is_of_the_dead(&socket) => Ok(Found::Dead),
        // Its backlog is full.
        Ok(_) | Err(Errno::AGAIN) => Ok(Found::Living),
        Err(Errno::NOENT) => Ok(Found::Nothing),
        Err(Errno::CONNREFUSED) => Ok(Found::Stale),
        Err(error) => Err(OpenError::new(format!(
            "cannot tell whether the socket is in use: {error}"
        ))),
    }
}

/// Connects, without waiting for a server that does not accept.
fn reach(path: &Path) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// Returns whether the process that began to listen at the other end has ended. Another one may
/// have taken over since.
fn is_of_the_dead(socket: &OwnedFd) -> bool {
    Credentials::of_peer(socket).is_ok_and(|peer| peer.has_ended())
}

fn remove(path: &Path) -> Result<(), OpenError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(OpenError::new("old socket stays").with_source(error))
        }
        _ => Ok(()),
    }
}

/// How long a daemon that was killed may keep a socket.
const LAST_REQUESTS_MAX: Duration = Duration::from_secs(5);
const LOOK_AGAIN: Duration = Duration::from_millis(20);

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;
    use crate::common::listen_at;

    fn scratch(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("blkmq-{name}-{}", std::process::id()))
    }

    #[test]
    fn socket_path_that_somebody_else_has_taken_stays() {
        let path = scratch("taken");
        let free = FreePath::find(&path).unwrap();
        let ours = listen_at(&path).unwrap();
        let owned = free.own().unwrap();
        fs::remove_file(&path).unwrap();
        let theirs = UnixListener::bind(&path).unwrap();
        drop((owned, ours));
        UnixStream::connect(&path).expect("theirs is still there");
        drop(theirs);
        fs::remove_file(&path).unwrap();
    }

    #[test]
    fn socket_path_that_is_stale_goes_to_one_of_those_who_start_at_once() {
        let dir = scratch("stale-race");
        fs::create_dir_all(&dir).unwrap();
        let path = dir.join("socket");
        for round in 0..50 {
            drop(UnixListener::bind(&path).unwrap());
            let start = || -> Result<_, OpenError> {
                let free = FreePath::find(&path)?;
                let listener = listen_at(&path).map_err(|error| OpenError::new(error.to_string()))?;
                Ok((free.own().unwrap(), listener))
            };
            let served = thread::scope(|scope| {
                let all: Vec<_> = (0..8).map(|_| scope.spawn(start)).collect();
                let all = all.into_iter().map(|one| one.join().unwrap());
                all.filter_map(Result::ok).collect::<Vec<_>>()
            });
            assert_eq!(served.len(), 1, "round {round}");
            UnixStream::connect(&path).expect("it is reached");
            drop(served);
            assert!(!path.exists());
        }
        fs::remove_dir(&dir).unwrap();
    }

    #[test]
    fn socket_path_of_a_server_whose_backlog_is_full_is_not_waited_for() {
        let path = scratch("backlog");
        let listener = listen_at(&path).unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        let _waiting: Vec<_> = (0..4).map(|_| reach(&path)).collect();
        assert_eq!(reach(&path).err(), Some(Errno::AGAIN), "no test");
        let error = FreePath::find(&path).map(drop).unwrap_err().to_string();
        assert!(error.contains("another server listens there"), "{error}");
        fs::remove_file(&path).unwrap();
    }
}
