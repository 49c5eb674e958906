//! The user and the process at the other end of a unix socket. Who may do what is decided by the
//! user: a process in a PID namespace that this one cannot see has no number here.

mod sys;

use std::fmt;
use std::io;
use std::os::fd::AsFd;

use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};

/// The peer of a unix socket when it connected or began to listen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// Its process, if that has a number here.
    pub process: Option<Pid>,
    /// Its user, effective at that time.
    pub user: u32,
}

impl Credentials {
    /// Those of a socket's peer.
    ///
    /// # Errors
    /// The system's error.
    pub fn of_peer(socket: impl AsFd) -> io::Result<Self> {
        let (pid, user) = sys::peer(socket.as_fd())?;
        let process = Some(pid).filter(|pid| *pid > 0).and_then(Pid::from_raw);
        Ok(Self { process, user })
    }

    /// The groups of a socket's peer: its own, and those of which it is a member as well.
    ///
    /// # Errors
    /// The system's error.
    pub fn groups_of_peer(socket: impl AsFd) -> io::Result<Vec<u32>> {
        sys::peer_groups(socket.as_fd())
    }

    /// Returns whether its process is known to have ended, or to be about to.
    pub(crate) fn has_ended(&self) -> bool {
        self.process.is_some_and(has_ended)
    }
}

/// Returns whether a process is gone, or known to be ending: also one whose parent has not taken its status yet.
pub(crate) fn has_ended(process: Pid) -> bool {
    let is_gone = || test_kill_process(process) == Err(Errno::SRCH);
    let pid = process.as_raw_nonzero().get().unsigned_abs();
    blkmq_host::process::has_ended(pid).unwrap_or_else(is_gone)
}

impl fmt::Display for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.process {
            Some(process) => write!(f, "process {} of user {}", process.as_raw_nonzero(), self.user),
            None => write!(f, "a process of user {} in another PID namespace", self.user),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use rustix::process::{WaitId, WaitIdOptions, waitid};

    use super::*;

    #[test]
    fn peer_is_this_process_at_a_pair_of_sockets() {
        let (one, _other) = UnixStream::pair().unwrap();
        let found = Credentials::of_peer(&one).unwrap();
        let ours = std::process::id();
        assert_eq!(
            found.to_string(),
            format!("process {ours} of user {}", found.user)
        );
        assert_eq!(found.user, rustix::process::geteuid().as_raw());
        assert!(!found.has_ended());
    }

    #[test]
    fn peer_has_ended_before_its_parent_takes_its_status() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let process = Pid::from_child(&child);
        let peer = Credentials {
            process: Some(process),
            user: 0,
        };
        assert!(!peer.has_ended());
        child.kill().unwrap();
        // Without taking it.
        waitid(
            WaitId::Pid(process),
            WaitIdOptions::EXITED | WaitIdOptions::NOWAIT,
        )
        .unwrap();
        assert!(peer.has_ended());
        child.wait().unwrap();
        assert!(peer.has_ended());
    }

    #[test]
    fn peer_without_a_number_has_not_ended_and_is_named_by_its_user() {
        let peer = Credentials {
            process: None,
            user: 7,
        };
        assert!(!peer.has_ended());
        assert_eq!(peer.to_string(), "a process of user 7 in another PID namespace");
    }
}
