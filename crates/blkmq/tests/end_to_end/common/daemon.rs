//! `blkmq serve` in the hands of a test: it is started, ready, asked to end, and never left running.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::Scratch;

/// A running daemon; dropping it kills it.
pub(crate) struct Daemon {
    child: Child,
    said: Arc<Mutex<Vec<String>>>,
}

impl Daemon {
    /// Serves the disks, given as after `--disk`, on a unix socket in `scratch`, and waits until it
    /// is ready.
    pub(crate) fn serve(scratch: &Scratch, disks: &[&str]) -> Daemon {
        let nbd = format!("unix:{}", scratch.word("nbd.sock"));
        let mut words = Vec::new();
        for disk in disks {
            words.extend(["--disk", disk]);
        }
        words.extend(["--nbd", &nbd]);
        Daemon::start(&words)
    }

    /// Runs `blkmq serve` with these arguments and waits until it is ready.
    pub(crate) fn start(words: &[&str]) -> Daemon {
        Daemon::spawn(serve_command(words))
    }

    /// Runs a command that becomes the daemon and waits until it is ready.
    pub(crate) fn spawn(command: Command) -> Daemon {
        Daemon::spawn_with_log(command, Stdio::piped())
    }

    /// The same with its standard error elsewhere, so that [`Self::said`] does not have it.
    pub(crate) fn spawn_with_log(mut command: Command, log: Stdio) -> Daemon {
        let shown = format!("{command:?}");
        let child = command
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .unwrap_or_else(|error| panic!("{shown}: {error}"));
        let mut daemon = Daemon {
            child,
            said: Arc::default(),
        };
        let stdout = daemon.child.stdout.take().expect("stdout is piped");
        daemon.listen(stdout);
        if let Some(stderr) = daemon.child.stderr.take() {
            daemon.listen(stderr);
        }
        let ready = daemon.wait_for(READY_TIME, |line| line == "ready");
        assert!(
            ready,
            "{shown}: not ready after {READY_TIME:?}; it said:\n{}",
            daemon.said()
        );
        daemon
    }

    /// The address that the daemon printed for the disk.
    pub(crate) fn uri(&self, disk: &str) -> String {
        let said = self.said.lock().expect("no reader panics");
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

    /// Everything that the daemon has printed so far.
    pub(crate) fn said(&self) -> String {
        self.said.lock().expect("no reader panics").join("\n")
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// The CPU time of all its threads so far, in nanoseconds.
    pub(crate) fn cpu_ns(&self) -> u64 {
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

    /// Its resident memory.
    pub(crate) fn memory_kib(&self) -> u64 {
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

    pub(crate) fn is_running(&mut self) -> bool {
        self.child
            .try_wait()
            .expect("our own child can be asked")
            .is_none()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.child.id() as i32).expect("a child has an id");
        kill_process(pid, signal).expect("our own child can be signalled");
    }

    /// Kills it at once, during whatever it does, as a power cut would.
    pub(crate) fn kill(mut self) {
        self.child.kill().expect("our own child can be killed");
        self.child.wait().expect("our own child can be waited for");
    }

    /// Waits for it to end by itself; the test fails if it takes longer than `limit`.
    pub(crate) fn ended_within(&mut self, limit: Duration) -> ExitStatus {
        let ended = wait_within(&mut self.child, limit);
        ended.unwrap_or_else(|| panic!("the daemon still runs after {limit:?}; it said:\n{}", self.said()))
    }

    /// Asks it to end (SIGTERM) and checks that it succeeds.
    pub(crate) fn stop(mut self) {
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
                said.lock()
                    .expect("no test panics while it holds this")
                    .push(line);
            }
        });
    }

    /// Waits for a line; returns false if the time is up or the daemon has ended.
    pub(crate) fn wait_for(&mut self, limit: Duration, wanted: impl Fn(&str) -> bool) -> bool {
        let end = Instant::now() + limit;
        while Instant::now() < end {
            if self
                .said
                .lock()
                .expect("no reader panics")
                .iter()
                .any(|line| wanted(line))
            {
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
            eprintln!(
                "the daemon said:\n{}",
                self.said.lock().map(|said| said.join("\n")).unwrap_or_default()
            );
        }
    }
}

/// `blkmq serve` with these arguments, not yet started.
pub(crate) fn serve_command(words: &[&str]) -> Command {
    let mut command = Command::new(program());
    command.arg("serve").args(words).stdin(Stdio::null());
    command
}

/// The build of the command that is tested.
pub(crate) fn program() -> PathBuf {
    std::env::var_os("BLKMQ_BIN")
        .unwrap_or_else(|| env!("CARGO_BIN_EXE_blkmq").into())
        .into()
}

/// Waits for the child to end; none if it has not after `limit`.
pub(crate) fn wait_within(child: &mut Child, limit: Duration) -> Option<ExitStatus> {
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

const READY_TIME: Duration = Duration::from_secs(20);
const STOP_TIME: Duration = Duration::from_secs(20);
