//! Decides how it is found out whether the daemon that serves a path lives, without waiting for one that
//! does not answer.

use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use rustix::io::Errno;

/// What is known of the daemon that serves a path.
pub(super) enum Daemon {
    Alive,
    Dead,
    /// Whoever should ask it was ended by somebody.
    NotAsked,
}

/// A question to the daemon that serves a path: what its file looks like. A process of its own asks, since
/// whoever asks a daemon that does not answer may hang so that nothing ends it.
pub(super) enum Question {
    Process(Child),
    /// Where there is no such program; the end of this process may have to wait for it.
    Thread(Receiver<Daemon>),
    Answered,
}

impl Question {
    pub(super) fn ask(path: &Path) -> Self {
        let mut command = Command::new("stat");
        // The kernel answers from memory for a second after somebody has looked.
        command
            .args(["--cached=never", "--"])
            .arg(path)
            .env("LC_ALL", "C");
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        command
            .spawn()
            .map_or_else(|_| Self::ask_by_thread(path), Self::Process)
    }

    fn ask_by_thread(path: &Path) -> Self {
        let (path, (sender, receiver)) = (path.to_owned(), sync_channel(1));
        let look = move || {
            let how = AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_FORCE_SYNC;
            let _ = sender.send(match statx(CWD, path, how, StatxFlags::BASIC_STATS) {
                Err(Errno::NOTCONN | Errno::CONNABORTED) => Daemon::Dead,
                _ => Daemon::Alive,
            });
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
        let mut said = String::new();
        if let Some(stderr) = &mut child.stderr {
            let _ = stderr.read_to_string(&mut said);
        }
        *self = Self::Answered;
        let said = said.to_lowercase();
        match ended {
            // In the words of both C libraries; the second if the daemon died during the question.
            _ if said.contains("not connected") || said.contains("connection abort") => Some(Daemon::Dead),
            Ended::WithError if said.contains("option") => {
                *self = Self::ask_by_thread(path);
                self.answer_within(limit, path)
            }
            Ended::WithSuccess | Ended::WithError => Some(Daemon::Alive),
            Ended::Killed => Some(Daemon::NotAsked),
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

/// How a process ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ended {
    WithSuccess,
    /// Or nobody knows how, as where `SIGCHLD` is ignored.
    WithError,
    Killed,
}

/// How a process ended; `None` if it has not.
fn ended_within(child: &mut Child, limit: Duration) -> Option<Ended> {
    let start = Instant::now();
    loop {
        match child.try_wait() {
            Ok(None) if start.elapsed() < limit => thread::sleep(PAUSE),
            Ok(None) => return None,
            Ok(Some(status)) if status.success() => return Some(Ended::WithSuccess),
            Ok(Some(status)) if status.code().is_none() => return Some(Ended::Killed),
            Ok(Some(_)) | Err(_) => return Some(Ended::WithError),
        }
    }
}

/// How long a process that is killed may take to end.
const LAST_MOMENT: Duration = Duration::from_millis(100);
const PAUSE: Duration = Duration::from_millis(2);
