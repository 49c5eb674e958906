//! Decides how the kernel's own schedulers are measured beside ours: a loop device over a file, in memory if none is given, a control group for each
//! tenant, and fio in it; ours runs the same jobs on the same file. Needs root and a kernel that has them, and says what is missing.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use super::scene::{Scene, Tenant};
use super::score::Series;
use crate::args::Plan;
use crate::fio;
use crate::rounds::Sample;

/// A file with a loop device on it. The device, and a file in memory made for it, are gone when this is dropped.
pub(super) struct Loop {
    image: PathBuf,
    /// Where a tmpfs is mounted for the file.
    dir: Option<PathBuf>,
    device: String,
}

/// What fio's processes did.
pub(super) struct Visit {
    pub(super) series: Series,
    pub(super) total: Sample,
}

impl Loop {
    /// Puts a loop device with direct I/O on a file; on a filled one in a tmpfs of its own if none is given.
    ///
    /// # Errors
    /// What is missing: root, losetup, the kernel's bfq, control groups of version 1.
    pub(super) fn set_up(file: Option<&Path>) -> Result<Self> {
        ensure!(fio::is_installed(), "the kernel's side needs fio");
        ensure!(
            Path::new(GROUPS).join("tasks").exists(),
            "the kernel's side needs the blkio controller of control groups at {GROUPS}"
        );
        let mut made = match file {
            Some(file) => Self {
                image: file.to_owned(),
                dir: None,
                device: String::new(),
            },
            None => Self::in_memory()?,
        };
        let image = made.image.to_string_lossy().into_owned();
        let options = ["-f", "--show", "--direct-io=on", "--sector-size", "4096", &image];
        made.device = run("losetup", &options)?;
        let offered = fs::read_to_string(made.attribute("scheduler"))?;
        ensure!(
            offered.contains("bfq"),
            "the kernel offers no bfq on {}: {}",
            made.device,
            offered.trim()
        );
        Ok(made)
    }

    fn in_memory() -> Result<Self> {
        let dir = std::env::temp_dir().join(format!("blkmq-fairness-{}", std::process::id()));
        fs::create_dir(&dir).with_context(|| format!("making {}", dir.display()))?;
        let made = Self {
            image: dir.join("image"),
            dir: Some(dir.clone()),
            device: String::new(),
        };
        let size = format!("size={}m", FILE_MIB + 64);
        run(
            "mount",
            &["-t", "tmpfs", "-o", &size, "tmpfs", &dir.to_string_lossy()],
        )?;
        let block = vec![0x5a; 1 << 20];
        let mut file = fs::File::create(&made.image)?;
        (0..FILE_MIB).try_for_each(|_| std::io::Write::write_all(&mut file, &block))?;
        Ok(made)
    }

    /// The file, for our side.
    pub(super) fn image(&self) -> PathBuf {
        self.image.clone()
    }

    /// Runs a scene's crowd under a scheduler of the kernel, each tenant in a control group of its weight. Its groups must be flat.
    ///
    /// # Errors
    /// If a group cannot be made or fio fails.
    pub(super) fn play(&self, scene: &Scene, scheduler: &str, plan: &Plan) -> Result<Visit> {
        fs::write(self.attribute("scheduler"), scheduler)
            .with_context(|| format!("choosing {scheduler} on {}", self.device))?;
        let weight = |tenant: &Tenant| scene.tree.get(tenant.group).map_or(100, |node| node.weight);
        let tenants: Vec<&Tenant> = scene.crowd.iter().chain(&scene.victim).collect();
        let groups = tenants
            .iter()
            .enumerate()
            .map(|(place, tenant)| Group::make(place, weight(tenant)));
        let groups = groups.collect::<Result<Vec<Group>>>()?;
        let (window, warm_up) = (plan.window, plan.warm_up.max(Duration::from_millis(500)));
        let samples: Result<Vec<Sample>> = std::thread::scope(|scope| {
            let start = |(tenant, group): (&&Tenant, &Group)| {
                let options = self.options(tenant, &group.log());
                let command = group.command();
                scope.spawn(move || fio::run_as(command, &options, warm_up, window))
            };
            let running: Vec<_> = tenants.iter().zip(&groups).map(start).collect();
            let ended = running.into_iter().map(|thread| thread.join());
            ended
                .map(|sample| sample.expect("a thread that waits for fio"))
                .collect()
        });
        let samples = samples?;
        let logs = groups[..scene.crowd.len()]
            .iter()
            .map(|group| read_log(&group.log()));
        let series = join(&logs.collect::<Result<Vec<_>>>()?);
        Ok(Visit {
            series,
            total: sum(&samples, scene.victim.is_some()),
        })
    }

    fn options(&self, tenant: &Tenant, log: &Path) -> Vec<String> {
        let rw = if tenant.op.is_write() {
            "randwrite"
        } else {
            "randread"
        };
        vec![
            format!("--filename={}", self.device),
            "--ioengine=io_uring".into(),
            "--direct=1".into(),
            format!("--rw={rw}"),
            format!("--bs={}", tenant.block_bytes),
            format!("--iodepth={}", tenant.depth),
            format!("--write_bw_log={}", log.display()),
            format!("--log_avg_msec={LOG_MS}"),
        ]
    }

    fn attribute(&self, name: &str) -> PathBuf {
        Path::new("/sys/block")
            .join(self.device.trim_start_matches("/dev/"))
            .join("queue")
            .join(name)
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        if !self.device.is_empty() {
            let _ = run("losetup", &["-d", &self.device]);
        }
        if let Some(dir) = &self.dir {
            let _ = run("umount", &[&dir.to_string_lossy()]);
            let _ = fs::remove_dir(dir);
        }
    }
}

/// A control group of one tenant, and where its fio writes its log.
struct Group {
    dir: PathBuf,
    logs: PathBuf,
}

impl Group {
    fn make(place: usize, weight: u16) -> Result<Self> {
        let name = format!("blkmq-fairness-{}-{place}", std::process::id());
        let dir = Path::new(GROUPS).join(&name);
        fs::create_dir(&dir).with_context(|| format!("making {}", dir.display()))?;
        let logs = std::env::temp_dir().join(name);
        let group = Self { dir, logs };
        fs::create_dir(&group.logs)?;
        let file = group.dir.join("blkio.bfq.weight");
        fs::write(&file, weight.to_string()).with_context(|| format!("writing {}", file.display()))?;
        Ok(group)
    }

    /// A shell that enters the group and becomes fio.
    fn command(&self) -> Command {
        let mut command = Command::new("sh");
        command
            .args(["-c", "echo $$ > \"$0/tasks\" && exec fio \"$@\""])
            .arg(&self.dir);
        command
    }

    fn log(&self) -> PathBuf {
        self.logs.join("bw")
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.dir);
        let _ = fs::remove_dir_all(&self.logs);
    }
}

/// Bytes moved in each step of fio's log, which has lines of `milliseconds, KiB per second, direction, ...`.
fn read_log(prefix: &Path) -> Result<Vec<u64>> {
    let path = PathBuf::from(format!("{}_bw.1.log", prefix.display()));
    let text = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
    let bytes = |line: &str| -> Option<u64> {
        let rate = line.split(',').nth(1)?.trim().parse::<u64>().ok()?;
        Some(rate * 1024 * LOG_MS / 1000)
    };
    text.lines()
        .map(|line| bytes(line).with_context(|| format!("{}: {line:?}", path.display())))
        .collect()
}

/// Puts logs of equal steps side by side, as far as all of them go.
fn join(logs: &[Vec<u64>]) -> Series {
    let steps = logs.iter().map(Vec::len).min().unwrap_or_default();
    let mut sums = vec![0; logs.len()];
    let mut moments = vec![(Duration::ZERO, sums.clone())];
    for step in 0..steps {
        sums.iter_mut().zip(logs).for_each(|(sum, log)| *sum += log[step]);
        moments.push((Duration::from_millis(LOG_MS * (step as u64 + 1)), sums.clone()));
    }
    Series { moments }
}

/// All processes together; the latency is the victim's, who is the last, or the first one's.
fn sum(samples: &[Sample], has_victim: bool) -> Sample {
    let shown = if has_victim {
        samples.last()
    } else {
        samples.first()
    };
    let mut total = Sample {
        ios: 0,
        usage: Default::default(),
        ..shown.cloned().unwrap_or_default()
    };
    for sample in samples {
        total.ios += sample.ios;
        total.usage.cpu_ns += sample.usage.cpu_ns;
        total.usage.switches += sample.usage.switches;
    }
    total
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
const FILE_MIB: u64 = 512;
const LOG_MS: u64 = 100;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_are_joined_as_far_as_all_go() {
        let series = join(&[vec![10, 20, 30], vec![1, 2]]);
        assert_eq!(series.moments.len(), 3);
        assert_eq!(series.moments[2], (Duration::from_millis(200), vec![30, 3]));
    }

    #[test]
    fn a_log_of_fio_is_read_line_by_line() {
        let dir = std::env::temp_dir().join(format!("blkmq-fio-log-{}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        fs::write(
            dir.join("bw_bw.1.log"),
            "100, 2048, 0, 0, 0\n200, 1024, 0, 0, 0\n",
        )
        .unwrap();
        let read = read_log(&dir.join("bw"));
        fs::remove_dir_all(&dir).unwrap();
        assert_eq!(read.unwrap(), [204_800 * 1024 / 1000, 1024 * 1024 / 10]);
    }
}
