//! A client that writes and verifies until it is told to stop, over one connection: an error or a lost connection
//! ends it.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::place::target_dir;

/// Load that runs.
pub(super) struct Load {
    fio: Option<Child>,
    report: PathBuf,
}

impl Load {
    pub(super) fn start(socket: &Path) -> Result<Self> {
        let report = target_dir()?.join("package/fio.json");
        let mut fio = Command::new("fio");
        fio.args([
            "--name=load",
            "--ioengine=nbd",
            "--thread",
            "--rw=randwrite",
            "--bs=4k",
            "--iodepth=16",
        ]);
        fio.arg(format!("--uri=nbd+unix:///vm1?socket={}", socket.display()));
        fio.args([
            "--size=8M",
            "--verify=crc32c",
            "--verify_fatal=1",
            "--verify_backlog=512",
            "--verify_state_save=0",
        ]);
        fio.args(["--time_based", "--runtime=3600", "--output-format=json"]);
        fio.arg(format!("--output={}", report.display()));
        let fio = fio.stdout(Stdio::null()).spawn().context("starting fio")?;
        Ok(Self {
            fio: Some(fio),
            report,
        })
    }

    /// Ends it. Returns how many blocks it has read and verified.
    pub(super) fn stop(mut self) -> Result<u64> {
        let mut fio = self.fio.take().context("it was started")?;
        ensure!(fio.try_wait()?.is_none(), "fio has ended before: {}", self.said());
        // It reports what it has done until then.
        let signal = Command::new("kill")
            .args(["-INT", &fio.id().to_string()])
            .status()?;
        ensure!(signal.success(), "fio cannot be ended");
        fio.wait()?;
        // Lines for people precede it.
        let said = self.said();
        let report = &said[said.find('{').context("fio reports nothing")?..];
        let report: Value = serde_json::from_str(report)?;
        let job = &report["jobs"][0];
        ensure!(job["error"] == 0, "fio: error {}", job["error"]);
        job["read"]["total_ios"].as_u64().context("fio counts reads")
    }

    fn said(&self) -> String {
        std::fs::read_to_string(&self.report).unwrap_or_default()
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        if let Some(mut fio) = self.fio.take() {
            let _ = fio.kill();
            let _ = fio.wait();
        }
    }
}

/// The size of the disk at a socket, as a client is told it.
pub(super) fn size(socket: &Path) -> Result<u64> {
    let uri = format!("nbd+unix:///vm1?socket={}", socket.display());
    let done = Command::new("nbdinfo").args(["--size", &uri]).output()?;
    ensure!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    Ok(String::from_utf8(done.stdout)?.trim().parse()?)
}
