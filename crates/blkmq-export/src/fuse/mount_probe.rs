//! A probe to the daemon that serves a path, to find out whether it lives, without waiting for one that
//! does not answer.

use std::env;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use rustix::io::Errno;

/// What is known of the daemon that serves a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Daemon {
    Alive,
    Dead,
    /// Whoever should ask it was ended by somebody.
    NotAsked,
}

/// A probe to the daemon that serves a path: what its file looks like. A process of its own asks, since
/// whoever asks a daemon that does not answer may hang so that nothing ends it.
pub(super) enum MountProbe {
    Process(Child),
    /// Where the program cannot be started for it ([`answer`]); the end of this process may have to wait for it.
    Thread(Receiver<Daemon>),
    Answered,
}

impl MountProbe {
    pub(super) fn ask(path: &Path) -> Self {
        // Relaxed: it is set before there are other threads.
        let asked = CAN_ASK.load(Ordering::Relaxed).then(|| {
            let mut command = Command::new("/proc/self/exe");
            command.arg(ASK).arg(path);
            command
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null());
            command.spawn()
        });
        match asked {
            Some(Ok(child)) => Self::Process(child),
            _ => Self::ask_by_thread(path),
        }
    }

    fn ask_by_thread(path: &Path) -> Self {
        let (path, (sender, receiver)) = (path.to_owned(), sync_channel(1));
        let look = move || {
            let _ = sender.send(Daemon::of(look_at(&path)));
        };
        let _ = thread::Builder::new().spawn(look);
        Self::Thread(receiver)
    }

    /// The answer about that path; `None` if there is none yet.
    pub(super) fn answer_within(&mut self, limit: Duration, path: &Path) -> Option<Daemon> {
        let child = match self {
            Self::Process(child) => child,
            Self::Thread(receiver) => return receiver.recv_timeout(limit).ok(),
            Self::Answered => return None,
        };
        let ended = ended_within(child, limit)?;
        *self = Self::Answered;
        match ended {
            Ended::With(errno) => Some(Daemon::of(errno)),
            Ended::Killed => Some(Daemon::NotAsked),
            Ended::Unknown => {
                *self = Self::ask_by_thread(path);
                self.answer_within(limit, path)
            }
        }
    }

    /// Waits no longer.
    pub(super) fn give_up(self) {
        if let Self::Process(mut child) = self {
            let _ = child.kill();
            if ended_within(&mut child, LAST_MOMENT).is_none() {
                // It ends when the daemon goes on or ends.
                let _ = thread::Builder::new().spawn(move || child.wait());
            }
        }
    }
}

/// Asks what a path's file looks like and ends, if this process was started for that. Otherwise processes
/// like this one are started for such probes from now on. To be called first in `main`.
pub fn answer() {
    let words: Vec<_> = env::args_os().skip(1).collect();
    if let [word, path] = words.as_slice()
        && word == ASK
    {
        std::process::exit(look_at(Path::new(path)));
    }
    CAN_ASK.store(true, Ordering::Relaxed);
}

/// Looks at a file, past the kernel's memory: it answers from there for a second after somebody has looked.
/// Returns the errno, or 0.
fn look_at(path: &Path) -> i32 {
    let how = AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_FORCE_SYNC;
    let looked = statx(CWD, path, how, StatxFlags::BASIC_STATS);
    looked.map_or_else(Errno::raw_os_error, |_| 0)
}

impl Daemon {
    /// What the errno of a look at its file says.
    fn of(errno: i32) -> Self {
        match errno {
            // The second if the daemon died during the probe.
            libc::ENOTCONN | libc::ECONNABORTED => Self::Dead,
            _ => Self::Alive,
        }
    }
}

/// How a process ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ended {
    /// With this exit status.
    With(i32),
    Killed,
    /// As where `SIGCHLD` is ignored.
    Unknown,
}

/// How a process ended; `None` if it has not.
fn ended_within(child: &mut Child, limit: Duration) -> Option<Ended> {
    let start = Instant::now();
    loop {
        match child.try_wait() {
            Ok(None) if start.elapsed() < limit => thread::sleep(PAUSE),
            Ok(None) => return None,
            Ok(Some(status)) => return Some(status.code().map_or(Ended::Killed, Ended::With)),
            Err(_) => return Some(Ended::Unknown),
        }
    }
}

/// Whether [`answer`] has been called: processes of this program can ask.
static CAN_ASK: AtomicBool = AtomicBool::new(false);
/// The first word of a process that is started for a probe.
const ASK: &str = "fuse-ask";
/// How long a process that is killed may take to end.
const LAST_MOMENT: Duration = Duration::from_millis(100);
const PAUSE: Duration = Duration::from_millis(2);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probe_of_a_path_is_not_answered_by_the_name_of_the_path() {
        let path = env::temp_dir().join("Transport endpoint is not connected");
        let mut probe = MountProbe::ask(&path);
        let answer = probe.answer_within(Duration::from_secs(10), &path);
        assert_eq!(answer, Some(Daemon::Alive), "nothing is there");
        assert_eq!(Daemon::of(libc::ENOTCONN), Daemon::Dead);
    }
}
