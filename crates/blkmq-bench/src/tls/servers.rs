//! The servers that are compared, each with TLS and without, and with noise on its disk.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::server::{Running, daemon};
use blkmq_testkit::Scratch;

/// The servers that can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Side {
    /// This program.
    Ours,
    /// nbdkit's memory plugin.
    Nbdkit,
    /// qemu-nbd, on a file.
    QemuNbd,
}

impl Side {
    pub(super) const ALL: [Self; 3] = [Self::Ours, Self::Nbdkit, Self::QemuNbd];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Ours => "ours",
            Self::Nbdkit => "nbdkit",
            Self::QemuNbd => "qemu-nbd",
        }
    }

    fn program(self) -> Result<PathBuf> {
        match self {
            Self::Ours => daemon(),
            side => Ok(side.name().into()),
        }
    }

    /// Returns the version of the server.
    ///
    /// # Errors
    /// If it is not installed.
    pub(super) fn version(self) -> Result<String> {
        let output = Command::new(self.program()?)
            .arg("--version")
            .stdin(Stdio::null())
            .output();
        let output =
            output.with_context(|| format!("{} cannot be started: is it installed?", self.name()))?;
        let said = String::from_utf8_lossy(&output.stdout);
        Ok(said.lines().next().unwrap_or_default().to_owned())
    }
}

/// An authority with certificates of a server and a client, in files named as NBD programs expect,
/// and noise for the disks.
pub(super) struct Credentials(Scratch);

impl Credentials {
    /// Makes them with openssl.
    ///
    /// # Errors
    /// If openssl is not installed, or fails.
    pub(super) fn make() -> Result<Self> {
        let made = Self(Scratch::new());
        made.authority()?;
        made.certificate("server", "localhost")?;
        made.certificate("client", "bench")?;
        let mut noise = Vec::with_capacity(DISK_BYTES);
        let random = fs::File::open("/dev/urandom")?;
        random.take(DISK_BYTES as u64).read_to_end(&mut noise)?;
        fs::write(made.path("noise"), noise)?;
        Ok(made)
    }

    fn path(&self, file: &str) -> PathBuf {
        self.0.path(file)
    }

    fn word(&self, file: &str) -> String {
        self.path(file).display().to_string()
    }

    fn directory(&self) -> String {
        self.word("").trim_end_matches('/').to_owned()
    }

    fn authority(&self) -> Result<()> {
        let (key, certificate) = (self.word("ca-key.pem"), self.word("ca-cert.pem"));
        openssl(&format!(
            "req -x509 -days 30 {NEW_KEY} -subj /CN=bench-authority -keyout {key} -out {certificate}"
        ))
    }

    fn certificate(&self, role: &str, name: &str) -> Result<()> {
        let [key, request, names, certificate] =
            ["-key.pem", ".csr", ".ext", "-cert.pem"].map(|end| self.word(&format!("{role}{end}")));
        fs::write(&names, format!("subjectAltName=DNS:{name}\n"))?;
        openssl(&format!(
            "req {NEW_KEY} -subj /CN={name} -keyout {key} -out {request}"
        ))?;
        let (ca, ca_key) = (self.word("ca-cert.pem"), self.word("ca-key.pem"));
        openssl(&format!(
            "x509 -req -in {request} -CA {ca} -CAkey {ca_key} -CAcreateserial -days 30 -extfile {names} -out {certificate}"
        ))
    }
}

/// A running server with noise on its disk.
pub(super) struct Server {
    running: Running,
    pub(super) uri: String,
}

impl Server {
    /// Starts a server.
    ///
    /// # Errors
    /// If it does not serve, or its disk cannot be filled.
    pub(super) fn start(side: Side, by_tls: bool, credentials: &Credentials) -> Result<Self> {
        let dir = Scratch::new();
        let socket = dir.path("s");
        let command = command(side, by_tls, credentials, &socket, &dir)?;
        let running = Running::start(command, dir, socket)?;
        let (scheme, rest) = if by_tls {
            let directory = credentials.directory();
            (
                "nbds+unix",
                format!("&tls-certificates={directory}&tls-hostname=localhost"),
            )
        } else {
            ("nbd+unix", String::new())
        };
        let uri = format!("{scheme}:///bench?socket={}{rest}", running.place().display());
        let server = Self { running, uri };
        if side != Side::QemuNbd {
            server.fill(credentials)?;
        }
        Ok(server)
    }

    pub(super) fn pid(&self) -> u32 {
        self.running.pid()
    }

    fn fill(&self, credentials: &Credentials) -> Result<()> {
        let output = Command::new("nbdcopy")
            .arg(credentials.path("noise"))
            .arg(&self.uri)
            .stdin(Stdio::null())
            .output()
            .context("nbdcopy cannot be started: apt-get install libnbd-bin")?;
        ensure!(
            output.status.success(),
            "nbdcopy to {}: {}",
            self.uri,
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(())
    }
}

fn command(
    side: Side,
    by_tls: bool,
    credentials: &Credentials,
    socket: &Path,
    dir: &Scratch,
) -> Result<Command> {
    let mut command = Command::new(side.program()?);
    let (socket, pki) = (socket.display().to_string(), credentials.directory());
    match side {
        Side::Ours => {
            command
                .args(["serve", "--control", "none", "--nbd", &format!("unix:{socket}")])
                .args(["--disk", &format!("name=bench,ram={DISK_BYTES}")]);
            if by_tls {
                let path = |file| credentials.path(file);
                command.args(["--tls", "require"]);
                command.arg("--tls-certificate").arg(path("server-cert.pem"));
                command.arg("--tls-key").arg(path("server-key.pem"));
                command.arg("--tls-ca").arg(path("ca-cert.pem"));
            }
        }
        Side::Nbdkit => {
            command.args(["-f", "-U", &socket]);
            if by_tls {
                command.args(["--tls=require", "--tls-verify-peer"]);
                command.arg(format!("--tls-certificates={pki}"));
            }
            command.args(["memory", &DISK_BYTES.to_string()]);
        }
        Side::QemuNbd => {
            let image = dir.path("image");
            fs::copy(credentials.path("noise"), &image)?;
            command.args(["-t", "-f", "raw", "-x", "bench", "-k", &socket]);
            if by_tls {
                let object = format!("tls-creds-x509,id=t,dir={pki},endpoint=server,verify-peer=on");
                command.args(["--object", &object, "--tls-creds", "t"]);
            }
            command.arg(image);
        }
    }
    Ok(command)
}

fn openssl(words: &str) -> Result<()> {
    let output = Command::new("openssl")
        .args(words.split_whitespace())
        .stdin(Stdio::null())
        .output()
        .context("openssl cannot be started: apt-get install openssl")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "openssl {words}: {said}");
    Ok(())
}

const NEW_KEY: &str = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes";
const DISK_BYTES: usize = 128 << 20;
