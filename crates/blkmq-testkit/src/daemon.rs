//! `blkmq serve` in the hands of a test: it is started, ready, asked to end, and never left running.
//!
//! What the kernel refuses of a child of our own (a signal, a wait) is a panic; what the daemon itself may do
//! wrong is a panic for tests, and an error from [`Daemon::try_spawn`] and [`Daemon::try_ended_within`].

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};

use super::Scratch;

/// A running daemon; dropping it kills it.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    said: Arc<Mutex<Vec<String>>>,
}

impl Daemon {
    /// Serves the disks, given as after `--disk`, on a unix socket in `scratch`, and waits until it
    /// is ready.
    pub fn serve(scratch: &Scratch, disks: &[&str]) -> Daemon {
        let nbd = format!("unix:{}", scratch.word("nbd.sock"));
        let mut words = Vec::new();
        for disk in disks {
            words.extend(["--disk", disk]);
        }
        words.extend(["--nbd", &nbd]);
        Daemon::start(&words)
    }

    /// Runs `blkmq serve` with these arguments and waits until it is ready.
    pub fn start(words: &[&str]) -> Daemon {
        Daemon::spawn(serve_command(words))
    }

    /// Runs a command that becomes the daemon and waits until it is ready.
    pub fn spawn(command: Command) -> Daemon {
        Daemon::spawn_with_log(command, Stdio::piped())
    }

    /// The same with its standard error elsewhere, so that [`Self::said`] does not have it.
    pub fn spawn_with_log(command: Command, log: Stdio) -> Daemon {
        Daemon::try_spawn(command, log).unwrap_or_else(|error| panic!("{error:#}"))
    }

    /// The same for instruments, which report what went wrong.
    ///
    /// # Errors
    /// If it ends instead, or takes too long; the error has what it said.
    pub fn try_spawn(mut command: Command, log: Stdio) -> Result<Daemon> {
        let shown = format!("{command:?}");
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .with_context(|| format!("starting {shown}"))?;
        // It has the other end of the log, if that is a pipe.
        drop(command);
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        let mut daemon = Daemon {
            child,
            said: Arc::default(),
        };
        daemon.listen(stdout.expect("stdout is piped"));
        stderr.into_iter().for_each(|stderr| daemon.listen(stderr));
        let ready = daemon.wait_for(READY_TIME, |line| line == "ready");
        ensure!(
            ready,
            "{shown}: not ready after {READY_TIME:?}; it said:\n{}",
            daemon.said()
        );
        Ok(daemon)
    }

    /// Returns the address that the daemon printed for the disk.
    pub fn uri(&self, disk: &str) -> String {
        let said = self.lines();
        let wanted = format!("/{disk}");
        let words = said.iter().flat_map(|line| line.split_whitespace());
        let mut uris = words.filter(|word| word.starts_with("nbd"));
        let found = uris.find(|uri| {
            uri.split('?')
                .next()
                .is_some_and(|address| address.ends_with(&wanted))
        });
        found
            .unwrap_or_else(|| panic!("no address for {disk} in:\n{}", said.join("\n")))
            .to_owned()
    }

    /// Returns everything that the daemon has printed. Its log is written by a thread of its own and read by another:
    /// what it has just done may be said a moment later, so this waits until nothing more comes.
    pub fn said(&self) -> String {
        let until = Instant::now() + SETTLE_TIME_MAX;
        let mut count = self.lines().len();
        while Instant::now() < until {
            std::thread::sleep(SETTLE_TIME);
            let now = self.lines().len();
            if std::mem::replace(&mut count, now) == now {
                break;
            }
        }
        self.lines().join("\n")
    }

    /// Says whether the daemon has printed a text, or does so within some seconds.
    pub fn says(&self, text: &str) -> bool {
        let until = Instant::now() + SAY_TIME;
        loop {
            let is_said = self.lines().join("\n").contains(text);
            if is_said || Instant::now() > until {
                return is_said;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Returns the last lines of it.
    pub fn last_words(&self) -> String {
        let lines = self.lines();
        lines[lines.len().saturating_sub(LINES_MAX)..].join("\n")
    }

    /// Returns the lines that it has printed so far. While they are held, no more come.
    pub fn lines(&self) -> MutexGuard<'_, Vec<String>> {
        self.said.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of its process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Returns its process.
    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Returns the CPU time of all its threads so far, in nanoseconds.
    pub fn cpu_ns(&self) -> u64 {
        let threads =
            std::fs::read_dir(format!("/proc/{}/task", self.id())).expect("our own child's threads");
        threads
            .map(|thread| {
                let path = thread.expect("a thread").path().join("schedstat");
                let text = std::fs::read_to_string(&path).expect("the kernel counts CPU time by thread");
                let used = text
                    .split_whitespace()
                    .next()
                    .and_then(|number| number.parse::<u64>().ok());
                used.expect("a number of nanoseconds")
            })
            .sum()
    }

    /// Returns its resident memory.
    pub fn memory_kib(&self) -> u64 {
        let path = format!("/proc/{}/status", self.id());
        let status = std::fs::read_to_string(path).expect("our own child's status");
        let line = status
            .lines()
            .find(|line| line.starts_with("VmRSS:"))
            .expect("the kernel tells the resident size");
        line.split_whitespace()
            .nth(1)
            .and_then(|number| number.parse().ok())
            .expect("a number of KiB")
    }

    /// Returns whether it has not ended.
    pub fn is_running(&mut self) -> bool {
        self.child
            .try_wait()
            .expect("our own child can be asked")
            .is_none()
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).expect("our own child can be signalled");
    }

    /// Kills it at once, during whatever it does, as a power cut would.
    pub fn kill(&self) {
        self.signal(Signal::KILL);
        // Without taking its status, which nobody could take again.
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        waitid(WaitId::Pid(self.pid()), options).expect("our own child can be waited for");
    }

    /// Stops it, until SIGCONT, and returns when all its threads have stopped.
    pub fn pause(&self) {
        self.signal(Signal::STOP);
        let options = WaitIdOptions::STOPPED | WaitIdOptions::NOWAIT;
        waitid(WaitId::Pid(self.pid()), options).expect("our own child can be waited for");
    }

    /// Waits for it to end by itself; the test fails if it takes longer than `limit`.
    pub fn ended_within(&mut self, limit: Duration) -> ExitStatus {
        let ended = self.try_ended_within(limit);
        ended.unwrap_or_else(|| panic!("the daemon still runs after {limit:?}; it said:\n{}", self.said()))
    }

    /// The same for instruments; none if it takes longer.
    pub fn try_ended_within(&mut self, limit: Duration) -> Option<ExitStatus> {
        wait_within(&mut self.child, limit)
    }

    /// Asks it to end (SIGTERM) and checks that it succeeds.
    pub fn stop(mut self) {
        self.signal(Signal::TERM);
        let status = self.ended_within(STOP_TIME);
        assert!(
            status.success(),
            "the daemon ended with {status} after SIGTERM; it said:\n{}",
            self.said()
        );
    }

    /// Collects the lines of a pipe on a thread of its own.
    fn listen(&self, pipe: impl std::io::Read + Send + 'static) {
        let said = Arc::clone(&self.said);
        std::thread::spawn(move || {
            for line in BufReader::new(pipe).lines().map_while(Result::ok) {
                said.lock().unwrap_or_else(PoisonError::into_inner).push(line);
            }
        });
    }

    /// Waits for a line; returns false if the time is up or the daemon has ended.
    pub fn wait_for(&mut self, limit: Duration, wanted: impl Fn(&str) -> bool) -> bool {
        let end = Instant::now() + limit;
        while Instant::now() < end {
            if self.lines().iter().any(|line| wanted(line)) {
                return true;
            }
            if !self.is_running() {
                // Its last output may still be in the pipe.
                std::thread::sleep(Duration::from_millis(100));
                return false;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        false
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Both fail if it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("the daemon said:\n{}", self.said());
        }
    }
}

/// `blkmq serve` with these arguments, not yet started.
pub fn serve_command(words: &[&str]) -> Command {
    let mut command = Command::new(program());
    command.arg("serve").args(words).stdin(Stdio::null());
    command
}

/// The build of the command that is tested: `BLKMQ_BIN`, or the one that cargo has built beside this program.
pub fn program() -> PathBuf {
    std::env::var_os("BLKMQ_BIN").map_or_else(|| beside("blkmq"), PathBuf::from)
}

/// Where cargo builds a program beside this one. A test's own program is a directory deeper.
fn beside(name: &str) -> PathBuf {
    let own = std::env::current_exe().expect("a program can find itself");
    let dir = own.parent().filter(|dir| !dir.ends_with("deps"));
    dir.or_else(|| own.parent()?.parent())
        .expect("programs lie in the build directory")
        .join(name)
}

/// Waits for the child to end; none if it has not after `limit`.
pub fn wait_within(child: &mut Child, limit: Duration) -> Option<ExitStatus> {
    let end = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait().expect("our own child can be asked") {
            return Some(status);
        }
        if Instant::now() > end {
            return None;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Long, because the machine may be busy with other tests, or be an emulated guest.
const READY_TIME: Duration = Duration::from_secs(60);
const STOP_TIME: Duration = Duration::from_secs(20);
const SAY_TIME: Duration = Duration::from_secs(20);
const SETTLE_TIME: Duration = Duration::from_millis(50);
const SETTLE_TIME_MAX: Duration = Duration::from_secs(2);
/// How many lines last words have at most.
const LINES_MAX: usize = 60;
