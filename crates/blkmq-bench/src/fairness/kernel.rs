//! Decides how the kernel's own schedulers are measured beside ours: a loop device over a file, a control group for each
//! tenant, and fio in it. Needs root and a kernel that has them, and says what is missing.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use super::processes::{self, Process, Visit};
use super::scene::Scene;
use crate::args::Plan;
use crate::fio;
use crate::usage::Usage;

/// A loop device with direct I/O on a file. The kernel takes it away when this is dropped, or when this process ends.
pub(super) struct Loop {
    device: String,
    /// Whoever has it open last takes it along.
    _open: File,
}

impl Loop {
    /// Puts a loop device on a file.
    ///
    /// # Errors
    /// What is missing: root, losetup, fio, the kernel's bfq, control groups of version 1.
    pub(super) fn set_up(image: &Path) -> Result<Self> {
        ensure!(fio::is_installed(), "the kernel's sides need fio");
        ensure!(
            Path::new(GROUPS).join("tasks").exists(),
            "the kernel's sides need the blkio controller of control groups, version 1, at {GROUPS}"
        );
        let image = image.to_string_lossy().into_owned();
        let options = ["-f", "--show", "--direct-io=on", "--sector-size", "4096", &image];
        let device = run("losetup", &options)?;
        let open = File::open(&device).with_context(|| format!("opening {device}"));
        // While somebody has it open, this has it go with the last one.
        run("losetup", &["-d", &device])?;
        let made = Self { _open: open?, device };
        let dio = fs::read_to_string(made.attribute("loop/dio"))?;
        ensure!(
            dio.trim() == "1",
            "{} does no direct I/O: choose a file on another filesystem",
            made.device
        );
        let offered = fs::read_to_string(made.attribute("queue/scheduler"))?;
        ensure!(
            offered.contains("bfq"),
            "the kernel offers no bfq on {}: {}; load the module bfq",
            made.device,
            offered.trim()
        );
        Ok(made)
    }

    /// Runs a scene's tenants under a scheduler of the kernel, each in a control group of its weight. Its groups must be flat.
    ///
    /// # Errors
    /// If a group cannot be made or fio fails.
    pub(super) fn play(&self, scene: &Scene, scheduler: &str, plan: &Plan) -> Result<Visit> {
        fs::write(self.attribute("queue/scheduler"), scheduler)
            .with_context(|| format!("choosing {scheduler} on {}", self.device))?;
        let tenants = scene.tenants();
        let groups = tenants.iter().enumerate();
        let groups = groups
            .map(|(place, tenant)| Group::make(place, scene.weight(tenant)))
            .collect::<Result<Vec<Group>>>()?;
        let process = |place: usize, _: &_| {
            Ok(Process {
                command: groups[place].command(),
                target: vec![
                    format!("--filename={}", self.device),
                    "--ioengine=io_uring".into(),
                    "--direct=1".into(),
                ],
            })
        };
        let mut visit = processes::play(scene, plan, process, Usage::default)?;
        // Who serves here is the kernel, much of it on behalf of the processes themselves.
        for sample in &visit.samples {
            visit.usage.cpu_ns += sample.usage.cpu_ns;
            visit.usage.switches += sample.usage.switches;
        }
        Ok(visit)
    }

    fn attribute(&self, name: &str) -> PathBuf {
        Path::new("/sys/block")
            .join(self.device.trim_start_matches("/dev/"))
            .join(name)
    }
}

/// A control group of one tenant.
struct Group(PathBuf);

impl Group {
    fn make(place: usize, weight: u16) -> Result<Self> {
        let name = format!("blkmq-fairness-{}-{place}", std::process::id());
        let dir = Path::new(GROUPS).join(name);
        fs::create_dir(&dir).with_context(|| format!("making {}", dir.display()))?;
        let group = Self(dir);
        let file = group.0.join("blkio.bfq.weight");
        fs::write(&file, weight.to_string()).with_context(|| format!("writing {}", file.display()))?;
        Ok(group)
    }

    /// A shell that enters the group and becomes fio.
    fn command(&self) -> Command {
        let mut command = Command::new("sh");
        command
            .args(["-c", "echo $$ > \"$0/tasks\" && exec fio \"$@\""])
            .arg(&self.0);
        command
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

/// Runs a program and returns what it printed.
fn run(program: &str, args: &[&str]) -> Result<String> {
    let output = Command::new(program)
        .args(args)
        .output()
        .with_context(|| format!("starting {program}"))?;
    if !output.status.success() {
        bail!(
            "{program} {}: {}",
            args.join(" "),
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

const GROUPS: &str = "/sys/fs/cgroup/blkio";
