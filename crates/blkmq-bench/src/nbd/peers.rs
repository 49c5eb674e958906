//! The servers that are compared, each started so that the comparison is fair: a null disk that touches no
//! data, one unix socket, otherwise its own defaults. `server` runs it.

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result};

use crate::server::{Running, daemon};
use blkmq_testkit::Scratch;

/// The servers that can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Side {
    /// Another build of blkmq.
    Before,
    /// This program.
    Ours,
    /// qemu-storage-daemon with its null-co driver.
    QemuStorageDaemon,
    /// nbdkit's null plugin with its default of 16 threads per connection.
    Nbdkit,
    /// The same with one thread per connection.
    NbdkitT1,
}

impl Side {
    /// All of them, in the order of visits.
    pub(crate) const ALL: [Self; 5] = [
        Self::Before,
        Self::Ours,
        Self::QemuStorageDaemon,
        Self::Nbdkit,
        Self::NbdkitT1,
    ];

    /// Says whether it is another project's server.
    pub(crate) const fn is_peer(self) -> bool {
        !matches!(self, Self::Before | Self::Ours)
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Before => "before",
            Self::Ours => "ours",
            Self::QemuStorageDaemon => "qemu-storage-daemon",
            Self::Nbdkit => "nbdkit",
            Self::NbdkitT1 => "nbdkit-t1",
        }
    }
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A server that can be started.
pub(crate) struct Server {
    side: Side,
    program: PathBuf,
    version: String,
}

impl Server {
    /// Finds the side's program; `before` is the program of [`Side::Before`].
    ///
    /// # Errors
    /// If the program does not exist or does not report its version.
    pub(crate) fn find(side: Side, before: Option<&Path>) -> Result<Self> {
        let program = match side {
            Side::Before => before.context("no program named")?.to_owned(),
            Side::Ours => daemon()?,
            Side::QemuStorageDaemon => "qemu-storage-daemon".into(),
            Side::Nbdkit | Side::NbdkitT1 => "nbdkit".into(),
        };
        let output = Command::new(&program)
            .arg("--version")
            .stdin(Stdio::null())
            .output()
            .with_context(|| format!("{} cannot be started: is it installed?", program.display()))?;
        let said = String::from_utf8_lossy(&output.stdout);
        Ok(Self {
            side,
            program,
            version: said.lines().next().unwrap_or_default().to_owned(),
        })
    }

    /// The side's name in reports; ours is `after` if there is also a `before`.
    pub(crate) fn name(&self, has_before: bool) -> &'static str {
        match self.side {
            Side::Ours if has_before => "after",
            side => side.name(),
        }
    }

    /// Version and set-up, for the report.
    pub(crate) fn description(&self) -> String {
        let set_up = match self.side {
            Side::Before | Side::Ours => "null disk, reactors by default",
            Side::QemuStorageDaemon => "null-co, read-zeroes=on",
            Side::Nbdkit => "null plugin, 16 threads per connection",
            Side::NbdkitT1 => "null plugin, one thread per connection",
        };
        format!("{}; {set_up}", self.version)
    }

    /// Starts it on a socket of its own and waits until it serves.
    ///
    /// # Errors
    /// If it ends, or does not serve within a minute; the error contains its output.
    pub(crate) fn start(&self) -> Result<Running> {
        let dir = Scratch::new();
        let socket = dir.path("s");
        Running::start(self.command(&socket), dir, socket)
    }

    fn command(&self, socket: &Path) -> Command {
        let mut command = Command::new(&self.program);
        let socket = socket.display();
        match self.side {
            Side::Before | Side::Ours => command
                .args(["serve", "--disk", &format!("name={EXPORT},null=1T")])
                .args(["--nbd", &format!("unix:{socket}")]),
            Side::QemuStorageDaemon => command
                .args([
                    "--blockdev",
                    "driver=null-co,node-name=null0,size=1099511627776,read-zeroes=on",
                ])
                .args([
                    "--nbd-server",
                    &format!("addr.type=unix,addr.path={socket},max-connections=100"),
                ])
                .args([
                    "--export",
                    &format!("type=nbd,id=e0,node-name=null0,name={EXPORT},writable=on"),
                ]),
            Side::Nbdkit => command.args(["-f", "-U", &socket.to_string(), "null", "1T"]),
            Side::NbdkitT1 => command.args(["-f", "-t", "1", "-U", &socket.to_string(), "null", "1T"]),
        };
        command
    }
}

/// The name under which the disk is exported; nbdkit takes any.
pub(crate) const EXPORT: &str = "bench";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn server_that_fails_is_an_error_with_its_words_and_leaves_nothing_behind() {
        let server = Server {
            side: Side::Before,
            program: "ls".into(),
            version: String::new(),
        };
        let error = server.start().err().expect("ls is no server").to_string();
        assert!(
            error.contains("the server ended") && error.contains("ls"),
            "{error}"
        );
    }

    #[test]
    fn program_that_is_not_there_is_named() {
        let error = Server::find(Side::Before, Some(Path::new("no-such-program-here")))
            .err()
            .expect("it cannot be found");
        assert!(error.to_string().contains("no-such-program-here"));
    }
}
