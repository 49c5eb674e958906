//! The daemon under test: started on one disk, ready, killed, and never left behind.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

use crate::encryption::Encryption;

/// A running `blkmq serve`; dropping it kills it.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    socket: PathBuf,
    log: File,
}

impl Daemon {
    /// Serves the image under the name [`EXPORT`], and waits until it is ready. Its socket and log are in `dir`.
    ///
    /// # Errors
    /// If it ends instead, with what it said.
    pub fn start(program: &Path, image: &Path, is_direct: bool, dir: &Path) -> Result<Self> {
        Self::start_over(program, image, is_direct, dir, None)
    }

    /// The same; with an encryption, the image is below an encrypted disk of that name.
    pub(crate) fn start_over(
        program: &Path,
        image: &Path,
        is_direct: bool,
        dir: &Path,
        encryption: Option<&Encryption>,
    ) -> Result<Self> {
        let socket = dir.join("nbd.sock");
        let log_path = dir.join("daemon.log");
        // The words of one that was killed stay.
        let log = File::options()
            .create(true)
            .append(true)
            .open(&log_path)
            .context("making the daemon's log")?;
        let direct = if is_direct { "on" } else { "off" };
        let name = encryption.map_or(EXPORT, |_| BELOW);
        let disk = format!(
            "name={name},file={},direct={direct},block_size=512",
            image.display()
        );
        let mut command = Command::new(program);
        command.args(["serve", "--disk", &disk]);
        if let Some(encryption) = encryption {
            command.args(["--disk", &encryption.disk(BELOW)]);
        }
        command.args(["--nbd", &format!("unix:{}", socket.display())]);
        command.stderr(log);
        Self::spawn(command, &socket, File::open(log_path)?)
    }

    /// Runs a command that becomes the daemon, and waits until it is ready. `log` is where what it says can be read.
    ///
    /// # Errors
    /// If it ends instead, with what it said.
    pub fn spawn(mut command: Command, socket: &Path, log: File) -> Result<Self> {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("starting {}", command.get_program().display()))?;
        // It has the other end of the log, if that is a pipe.
        drop(command);
        let stdout = child.stdout.take().expect("stdout is piped");
        let daemon = Self {
            child,
            socket: socket.to_owned(),
            log,
        };
        let mut lines = BufReader::new(stdout).lines().map_while(Result::ok);
        if !lines.any(|line| line == "ready") {
            bail!(
                "the daemon has ended before it was ready: {}",
                daemon.last_words()
            );
        }
        Ok(daemon)
    }

    /// Returns where it serves.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Ends it at once (SIGKILL).
    ///
    /// # Errors
    /// If it cannot be waited for.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill().context("killing the daemon")?;
        self.child.wait().context("waiting for the daemon")?;
        Ok(())
    }

    /// Returns its process.
    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Asks it to end (SIGTERM), and returns how it did; none if it has not within `limit`.
    ///
    /// # Errors
    /// If it cannot be signalled or waited for.
    pub fn terminate(&mut self, limit: Duration) -> Result<Option<ExitStatus>> {
        kill_process(self.pid(), Signal::TERM).context("signalling the daemon")?;
        let end = Instant::now() + limit;
        loop {
            let ended = self.child.try_wait().context("waiting for the daemon")?;
            if ended.is_some() || Instant::now() > end {
                return Ok(ended);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Returns everything in its log; of a pipe, what nobody has read, when it has ended.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn log(&self) -> std::io::Result<String> {
        let (mut bytes, mut log) = (Vec::new(), &self.log);
        // A pipe has no beginning to go back to.
        let _ = log.rewind();
        log.read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Returns the end of its log.
    pub fn last_words(&self) -> String {
        let text = match self.log() {
            Ok(text) => text,
            Err(error) => return format!("its log cannot be read: {error}"),
        };
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(LINES_MAX)..].join("\n")
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Fails where it has ended already, which is as good.
        let _ = self.kill();
    }
}

/// The disk's name.
pub const EXPORT: &str = "vm1";
/// The name of the disk below an encrypted one.
const BELOW: &str = "below";
const LINES_MAX: usize = 40;
