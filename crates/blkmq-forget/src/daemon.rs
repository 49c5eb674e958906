//! Decides how the daemon under test is held: started on one disk, ready, killed, and never left behind.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use blkmq_export::nbd::codec::CommandFlags;
use blkmq_export::nbd::codec::request::{self, RequestHeader};

use crate::connection::Connection;

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
        let socket = dir.join("nbd.sock");
        let log_path = dir.join("daemon.log");
        // The words of one that was killed stay.
        let log = File::options()
            .create(true)
            .append(true)
            .open(&log_path)
            .context("making the daemon's log")?;
        let direct = if is_direct { "on" } else { "off" };
        let disk = format!(
            "name={EXPORT},file={},direct={direct},block_size=512",
            image.display()
        );
        let mut child = Command::new(program)
            .args([
                "serve",
                "--disk",
                &disk,
                "--nbd",
                &format!("unix:{}", socket.display()),
            ])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .with_context(|| format!("starting {}", program.display()))?;
        let stdout = child.stdout.take().expect("stdout is piped");
        let daemon = Self {
            child,
            socket,
            log: File::open(log_path)?,
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

    /// Reads so many bytes of the disk, from its beginning.
    ///
    /// # Errors
    /// If a read fails.
    pub fn read_all(&self, bytes: usize) -> Result<Vec<u8>> {
        let mut connection = Connection::open(&self.socket, EXPORT)?;
        let (mut found, mut ended) = (Vec::with_capacity(bytes), Vec::new());
        for offset in (0..bytes).step_by(READ_BYTES) {
            let header = RequestHeader {
                cookie: 0,
                offset: offset as u64,
                length: READ_BYTES as u64,
                command: request::Command::READ,
                flags: CommandFlags::NONE,
            };
            connection.send(header, &[], READ_BYTES, ())?;
            while ended.is_empty() {
                ensure!(connection.receive(&mut ended)?, "the server has hung up");
            }
            let read = ended.pop().expect("looked at above");
            ensure!(
                read.error == 0,
                "a read after the crash failed with error {}",
                read.error
            );
            found.extend(read.data);
        }
        Ok(found)
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

    /// Returns the end of its log.
    pub fn last_words(&self) -> String {
        let mut text = String::new();
        let mut log = &self.log;
        let read = log.rewind().and_then(|()| log.read_to_string(&mut text));
        if let Err(error) = read {
            return format!("its log cannot be read: {error}");
        }
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
/// What a disk's size must be a multiple of.
const READ_BYTES: usize = 256 << 10;
const LINES_MAX: usize = 40;
