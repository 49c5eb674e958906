//! The comparison of the kernel's own schedulers with ours: a loop device over a file, a control group for
//! each tenant, and fio in it. It needs root and a kernel with these, and reports what is missing.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::processes::{self, Process, Visit};
use super::scene::Scene;
use crate::args::Plan;
use crate::fio;
use crate::loop_device::LoopDevice;
use crate::programs;
use crate::usage::Usage;

/// A loop device that offers the kernel's schedulers.
pub(super) struct Loop(LoopDevice);

impl Loop {
    /// Puts a loop device on a file.
    ///
    /// # Errors
    /// The missing requirement: root, losetup, fio, the kernel's bfq, or version 1 control
    /// groups.
    pub(super) fn set_up(image: &Path) -> Result<Self> {
        ensure!(fio::is_installed(), "the kernel's sides need fio");
        ensure!(
            Path::new(GROUPS).join("tasks").exists(),
            "the kernel's sides need the blkio controller of control groups, version 1, at {GROUPS}"
        );
        let device = LoopDevice::attach(image, 4096)?;
        device.block().choose("bfq")?;
        Ok(Self(device))
    }

    /// Runs a scene's tenants under a scheduler of the kernel, each in a control group of its
    /// weight, and each in a part of so many bytes of the device, or all in all of it. The scene's
    /// groups must be flat.
    ///
    /// # Errors
    /// If a group cannot be made or fio fails.
    pub(super) fn play(
        &self,
        scene: &Scene,
        scheduler: &str,
        part: Option<u64>,
        plan: &Plan,
    ) -> Result<Visit> {
        self.0.block().choose(scheduler)?;
        programs::note_setting(&format!("the kernel's {scheduler}"), self.0.block().tunables());
        let tenants = scene.tenants();
        let groups = tenants.iter().enumerate();
        let groups = groups
            .map(|(place, tenant)| Group::make(place, scene.weight(tenant)))
            .collect::<Result<Vec<Group>>>()?;
        let process = |place: usize, _: &_| {
            Ok(Process::Fio {
                command: groups[place].command(),
                target: [
                    format!("--filename={}", self.0.block().path()),
                    "--ioengine=io_uring".into(),
                    "--direct=1".into(),
                ]
                .into_iter()
                .chain(part.map(|part| format!("--offset={}", place as u64 * part)))
                .chain(part.map(|part| format!("--size={part}")))
                .collect(),
            })
        };
        let mut visit = processes::play(scene, plan, process, Usage::default)?;
        // Here the kernel serves, mostly in the context of the processes themselves.
        for sample in &visit.samples {
            visit.usage.cpu_ns += sample.usage.cpu_ns;
            visit.usage.switches += sample.usage.switches;
        }
        Ok(visit)
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

const GROUPS: &str = "/sys/fs/cgroup/blkio";
