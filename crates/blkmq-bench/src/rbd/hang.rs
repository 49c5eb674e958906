//! A local disk that is measured next to an image of another cluster whose OSD does not answer, with requests
//! of that image in flight; and with that image idle.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};

use super::RbdArgs;
use super::sides::{ours, through_nbd};
use crate::args::Plan;
use crate::fio;
use crate::rounds::Sample;
use crate::server::Running;
use crate::usage::Usage;
use blkmq_testkit::Scratch;

/// Measures the local disk, while the OSD `stopped` is stopped if there is one to be stopped.
pub(super) fn measure(args: &RbdArgs, other: &Path, stopped: Option<u32>, plan: &Plan) -> Result<Sample> {
    let dir = Scratch::new();
    let (socket, file) = (dir.path("s"), dir.path("local.raw"));
    std::fs::write(&file, vec![0x5a; LOCAL_BYTES])?;
    let far = format!(
        "name=far,rbd={},conf={},id={}",
        args.image,
        other.display(),
        args.id
    );
    let mut command = ours()?;
    command
        .args(["--reactors", "1"])
        .args(["--disk", &format!("name=local,file={}", file.display())])
        .args(["--disk", &far])
        .args(["--nbd", &format!("unix:{}", socket.display())]);
    let running = Running::start(command, dir, socket)?;
    let waiting = match stopped {
        Some(osd) => Some((Load::start(running.place())?, Stopped::stop(osd)?)),
        None => None,
    };
    // What the OSD had answered before is on its way.
    sleep(PAUSE);
    let mut options = through_nbd("local", running.place());
    options.extend(["--rw=randread", "--bs=4k", "--iodepth=1"].map(str::to_owned));
    let before = Usage::of(running.pid())?;
    let sample = fio::run(&options, Duration::ZERO, plan.window).with_context(|| running.last_words())?;
    let used = Usage::of(running.pid())? - before;
    if let Some((mut load, osd)) = waiting {
        ensure!(load.is_running(), "the writes to the other cluster have ended");
        drop(osd);
        drop(load);
    }
    Ok(Sample {
        client: Some(sample.usage),
        usage: used,
        ..sample
    })
}

/// Writes to the image of the other cluster, without an end.
struct Load(Child);

impl Load {
    fn start(socket: &Path) -> Result<Self> {
        let child = Command::new("fio")
            .args(["--thread", "--name=far"])
            .args(through_nbd("far", socket))
            .args(["--rw=randwrite", "--bs=4k", "--iodepth=64", "--numjobs=2"])
            .args(["--time_based", "--runtime=1d"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let load = Self(child.context("starting fio")?);
        sleep(UNDER_WAY);
        Ok(load)
    }

    fn is_running(&mut self) -> bool {
        matches!(self.0.try_wait(), Ok(None))
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A process that is stopped until this is dropped.
struct Stopped(Pid);

impl Stopped {
    fn stop(pid: u32) -> Result<Self> {
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let pid = pid.context("--other-osd is no process")?;
        kill_process(pid, Signal::STOP).context("stopping the other cluster's OSD")?;
        Ok(Self(pid))
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        let _ = kill_process(self.0, Signal::CONT);
    }
}

const LOCAL_BYTES: usize = 64 << 20;
/// Until all writes of the load are under way.
const UNDER_WAY: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(300);
