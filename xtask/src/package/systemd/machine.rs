//! A Debian in systemd-nspawn, with the host's network and kernel and a systemd of its own.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::steps::run_shown;

/// A machine that runs; it ends when this is dropped.
pub(super) struct Machine {
    root: PathBuf,
    nspawn: Child,
    /// Its first process, as this host numbers it.
    first: u32,
}

impl Machine {
    pub(super) fn boot(root: &Path) -> Result<Self> {
        let mut nspawn = Command::new("systemd-nspawn");
        nspawn.args(["--quiet", "--register=no", "--keep-unit", "--console=read-only"]);
        nspawn.arg("--machine=blkmq-package").arg("--directory").arg(root);
        // Calls for the sandbox, which nspawn does not know, and a device for exports of FUSE.
        nspawn.arg(format!("--system-call-filter={SANDBOX}"));
        nspawn.args(["--capability=all", "--bind=/dev/fuse"]);
        nspawn.arg("--boot").stdin(Stdio::null()).stdout(Stdio::null());
        let nspawn = nspawn.spawn().context("starting systemd-nspawn")?;
        let (start, id) = (Instant::now(), nspawn.id());
        let mut machine = Self {
            root: root.to_owned(),
            nspawn,
            first: 0,
        };
        loop {
            let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children"))?;
            machine.first = children
                .split_whitespace()
                .next()
                .map_or(0, |first| first.parse().unwrap_or(0));
            let state = machine.run("systemctl is-system-running --wait");
            match state {
                Ok(_) => return Ok(machine),
                // A machine without a network of its own has units that fail.
                Err(error) if format!("{error:#}").contains("degraded") => return Ok(machine),
                Err(error) => ensure!(start.elapsed() < BOOT_MAX, "it does not boot: {error:#}"),
            }
            if let Some(status) = machine.nspawn.try_wait()? {
                bail!("systemd-nspawn has ended: {status}");
            }
            thread::sleep(Duration::from_millis(100));
        }
    }

    /// Runs a command there. Returns what it says.
    pub(super) fn run(&self, words: &str) -> Result<String> {
        ensure!(self.first > 0, "`{words}`: nothing runs there yet");
        let mut command = Command::new("nsenter");
        command.args(["--all", "--target", &self.first.to_string(), "--"]);
        command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        let done = command.args(words.split(' ')).stdin(Stdio::null()).output()?;
        let said = format!(
            "{}{}",
            String::from_utf8_lossy(&done.stdout),
            String::from_utf8_lossy(&done.stderr)
        );
        ensure!(done.status.success(), "`{words}`: {}: {said}", done.status);
        Ok(said)
    }

    /// The number there of the daemon's process.
    pub(super) fn main_pid(&self) -> Result<u32> {
        Ok(self.run("systemctl show -P MainPID blkmq")?.trim().parse()?)
    }

    /// The number here of a process there.
    pub(super) fn host_pid(&self, pid: u32) -> Result<u32> {
        let own = fs::read_link(format!("/proc/{}/ns/pid", self.first))?;
        for process in fs::read_dir("/proc")? {
            let dir = process?.path();
            // Others come and go meanwhile.
            let is_there = fs::read_link(dir.join("ns/pid")).is_ok_and(|namespace| namespace == own);
            let status = fs::read_to_string(dir.join("status")).unwrap_or_default();
            let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
            let mut numbers = numbers.unwrap_or_default().split_whitespace();
            if is_there && numbers.next_back() == Some(&*pid.to_string()) {
                return numbers
                    .next()
                    .context("it has a number here")?
                    .parse()
                    .map_err(Into::into);
            }
        }
        bail!("process {pid} is not there")
    }

    /// A file there, below the root or on what was mounted there since.
    pub(super) fn path(&self, path: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root{path}", self.first))
    }

    /// A socket of the daemon's.
    pub(super) fn socket(&self, name: &str) -> PathBuf {
        self.path(&format!("/run/blkmq/{name}"))
    }

    pub(super) fn write(&self, path: &str, text: &str) -> Result<()> {
        let path = self.path(path);
        fs::create_dir_all(path.parent().context("a file lies in a directory")?)?;
        fs::write(&path, text).with_context(|| path.display().to_string())
    }

    pub(super) fn power_off(mut self) -> Result<()> {
        // It ends before it has an answer.
        let _ = self.run("systemctl poweroff");
        self.first = 0;
        let start = Instant::now();
        while self.nspawn.try_wait()?.is_none() {
            ensure!(start.elapsed() < BOOT_MAX, "{} does not end", self.root.display());
            thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // Its first process outlives systemd-nspawn, and takes all others with it.
        if self.first > 0 {
            let _ = Command::new("kill")
                .args(["-KILL", &self.first.to_string()])
                .status();
        }
        let _ = self.nspawn.kill();
        let _ = self.nspawn.wait();
    }
}

/// Makes a key and a certificate of its own.
pub(super) fn certificate(key: &Path, certificate: &Path) -> Result<()> {
    let mut make = Command::new("openssl");
    make.args([
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
    ]);
    make.args(["-nodes", "-days", "2", "-subj", "/CN=localhost", "-keyout"]);
    make.arg(key).arg("-out").arg(certificate).stderr(Stdio::null());
    run_shown(&mut make)
}

const SANDBOX: &str = "landlock_create_ruleset landlock_add_rule landlock_restrict_self";
const BOOT_MAX: Duration = Duration::from_secs(60);
