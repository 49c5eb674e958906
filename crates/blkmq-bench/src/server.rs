//! A server as a process of its own: started on a unix socket or at a file, waited for until it serves there,
//! and ended in all cases. `nbd` compares servers, `fairness` runs tenants on ours.

use std::fs::{self, File};
use std::io::Read as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use blkmq_testkit::Scratch;
use rustix::process::{Pid, Signal, kill_process};

use crate::programs;

/// The daemon that benches measure: `BLKMQ_BIN`, or the `blkmq` beside this program.
///
/// # Errors
/// If it is not there.
pub(crate) fn daemon() -> Result<PathBuf> {
    let program = blkmq_testkit::daemon::program();
    ensure!(
        program.is_file(),
        "{} is not there: build it (cargo build --release -p blkmq), or name one in BLKMQ_BIN",
        program.display()
    );
    Ok(program)
}

/// A running server; dropping it ends it.
pub(crate) struct Running {
    child: Child,
    dir: Scratch,
    place: PathBuf,
}

impl Running {
    /// Starts a command that becomes an NBD server on `socket`, and waits until it greets a client.
    /// The server owns `dir`, which is removed with it.
    ///
    /// # Errors
    /// If it ends, or does not serve within a minute; the error contains its output.
    pub(crate) fn start(command: Command, dir: Scratch, socket: PathBuf) -> Result<Self> {
        Self::start_until(command, dir, socket, greets)
    }

    /// The same with a server at `place` that serves once `is_served` is true.
    ///
    /// # Errors
    /// If it ends, or does not serve within a minute; the error contains its output.
    pub(crate) fn start_until(
        mut command: Command,
        dir: Scratch,
        place: PathBuf,
        is_served: fn(&Path) -> bool,
    ) -> Result<Self> {
        programs::note(&command);
        let errors = File::create(dir.path("stderr")).context("making a file for the server's messages")?;
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(errors)
            .spawn()
            .with_context(|| format!("starting {}", command.get_program().display()))?;
        let mut running = Self { child, dir, place };
        running.wait_until(is_served)?;
        Ok(running)
    }

    /// Where it serves.
    pub(crate) fn place(&self) -> &Path {
        &self.place
    }

    /// Its own directory.
    pub(crate) fn dir(&self) -> &Scratch {
        &self.dir
    }

    /// Its process.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Its output on stderr, for an error message.
    pub(crate) fn last_words(&self) -> String {
        let said = fs::read_to_string(self.dir.path("stderr")).unwrap_or_default();
        match said.trim() {
            "" => "the server said nothing".into(),
            said => format!("the server said: {said}"),
        }
    }

    fn wait_until(&mut self, is_served: fn(&Path) -> bool) -> Result<()> {
        let start = Instant::now();
        while !is_served(&self.place) {
            if let Some(status) = self.child.try_wait().context("waiting for the server")? {
                bail!("the server ended ({status}); {}", self.last_words());
            }
            if start.elapsed() > SERVE_WITHIN {
                bail!(
                    "the server does not serve after {SERVE_WITHIN:?}; {}",
                    self.last_words()
                );
            }
            sleep(Duration::from_millis(3));
        }
        Ok(())
    }
}

/// Whether an NBD server at `socket` greets. A server that listens may not: `qemu-nbd` opens its
/// image later, and may fail to.
fn greets(socket: &Path) -> bool {
    let Ok(mut client) = UnixStream::connect(socket) else {
        return false;
    };
    let mut greeting = [0; GREETING.len()];
    client.set_read_timeout(Some(GREET_WITHIN)).is_ok()
        && client.read_exact(&mut greeting).is_ok()
        && greeting == *GREETING
}

impl Drop for Running {
    fn drop(&mut self) {
        // SIGTERM first, so that it drains and removes its socket; it is killed if it does not end.
        if let Some(pid) = Pid::from_raw(self.child.id() as i32) {
            let _ = kill_process(pid, Signal::TERM);
        }
        let start = Instant::now();
        while matches!(self.child.try_wait(), Ok(None)) {
            if start.elapsed() > END_WITHIN {
                let _ = self.child.kill();
                let _ = self.child.wait();
                break;
            }
            sleep(Duration::from_millis(2));
        }
    }
}

/// Each NBD server's first bytes.
const GREETING: &[u8; 8] = b"NBDMAGIC";
/// How long to wait for the greeting: a server may listen and still be opening its image. Then it
/// is asked again.
const GREET_WITHIN: Duration = Duration::from_secs(1);
/// A server of a disk in a Ceph cluster may have to wait for another's lock.
const SERVE_WITHIN: Duration = Duration::from_secs(60);
/// A killed server leaves such a lock behind, so it has time to end.
const END_WITHIN: Duration = Duration::from_secs(10);
