//! The daemon under test: started on one disk, at a socket in the scratch directory.

use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::Result;
use rustix::process::Signal;

use crate::encryption::Encryption;

/// A running `blkmq serve`, and where it serves; dropping it kills it.
#[derive(Debug)]
pub struct Daemon {
    process: blkmq_testkit::Daemon,
    socket: PathBuf,
}

impl Daemon {
    /// Serves the image under the name [`EXPORT`], and waits until it is ready. Its socket is in `dir`.
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
        let direct = if is_direct { "on" } else { "off" };
        let name = encryption.map_or(EXPORT, |_| BELOW);
        let disk = format!(
            "name={name},file={},direct={direct},block_size=512",
            image.display()
        );
        let mut words = vec!["--disk".to_owned(), disk];
        if let Some(encryption) = encryption {
            words.extend(["--disk".to_owned(), encryption.disk(BELOW)]);
        }
        Self::serve(program, &words, dir)
    }

    /// Serves what the words of the command line say, and waits until it is ready. Its socket is in `dir`.
    ///
    /// # Errors
    /// If it ends instead, with what it said.
    pub(crate) fn serve(program: &Path, words: &[String], dir: &Path) -> Result<Self> {
        let socket = dir.join("nbd.sock");
        let mut command = Command::new(program);
        command.arg("serve").args(words).stdin(Stdio::null());
        command.args(["--nbd", &format!("unix:{}", socket.display())]);
        Self::spawn(command, &socket, Stdio::piped())
    }

    /// Runs a command that becomes the daemon, and waits until it is ready. What it says on a piped log is in
    /// its last words.
    ///
    /// # Errors
    /// If it ends instead, with what it said.
    pub fn spawn(command: Command, socket: &Path, log: Stdio) -> Result<Self> {
        Ok(Self {
            process: blkmq_testkit::Daemon::try_spawn(command, log)?,
            socket: socket.to_owned(),
        })
    }

    /// Returns where it serves.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Asks it to end (SIGTERM), and returns how it did; none if it has not within `limit`.
    pub fn terminate(&mut self, limit: Duration) -> Option<ExitStatus> {
        self.process.signal(Signal::TERM);
        self.process.try_ended_within(limit)
    }
}

impl Deref for Daemon {
    type Target = blkmq_testkit::Daemon;

    fn deref(&self) -> &Self::Target {
        &self.process
    }
}

/// The disk's name.
pub const EXPORT: &str = "vm1";
/// The name of the disk below an encrypted one.
const BELOW: &str = "below";
