//! Measures the cost of many images: threads, memory and descriptors of a daemon that serves images of
//! two clusters, when idle and after each image was written and read.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;

use super::cluster::Cluster;
use blkmq_testkit::tools::find;

/// Serves no image, one image, and `count` images of `clusters` alternately, and prints the cost of
/// each.
///
/// # Errors
/// If an image cannot be made, or a daemon does not serve.
pub(super) fn measure(program: &Path, clusters: &[PathBuf], count: u64) -> Result<()> {
    let images: Vec<(String, PathBuf)> = (0..count)
        .map(|number| {
            let cluster = &clusters[number as usize % clusters.len()];
            (format!("many{number}"), Cluster::conf_in(cluster))
        })
        .collect();
    for (name, conf) in &images {
        let rbd = find("rbd").context("rbd is not installed")?;
        let made = Command::new(rbd)
            .arg("-c")
            .arg(conf)
            .args(["create", "--size", IMAGE_SIZE, name])
            .status()?;
        ensure!(made.success(), "image {name} cannot be made: {made}");
    }
    println!("    | images | clusters | threads | RSS, MiB | descriptors | opened in, s |");
    println!("    |---|---|---|---|---|---|");
    let mut shown: Vec<usize> = vec![0, 1, 2, images.len()];
    shown.retain(|shown| *shown <= images.len());
    shown.dedup();
    for number in shown {
        let used = &images[..number];
        let start = Instant::now();
        let daemon = Daemon::start(program, used)?;
        let opened = start.elapsed().as_secs_f64();
        // The memory that opening needed for a moment is given back.
        thread::sleep(SETTLE);
        daemon.print(number, clusters.len(), "idle", opened)?;
        if number > 0 && find("qemu-io").is_some() {
            for (name, _) in used {
                daemon.load(name)?;
            }
            daemon.print(number, clusters.len(), "after 16 MiB written to each", opened)?;
        }
    }
    Ok(())
}

/// A daemon that serves images; dropping it ends it.
struct Daemon {
    process: blkmq_testkit::Daemon,
    socket: PathBuf,
}

impl Daemon {
    fn start(program: &Path, images: &[(String, PathBuf)]) -> Result<Self> {
        let socket = std::env::temp_dir().join(format!("blkmq-images-{}.sock", std::process::id()));
        let mut command = Command::new(program);
        command.args(["serve", "--control", "none", "--disk", "name=none,null=1G"]);
        command.args(["--nbd", &format!("unix:{}", socket.display())]);
        for (name, conf) in images {
            let disk = format!("name={name},rbd=rbd/{name},id=blkmq,conf={}", conf.display());
            command.args(["--disk", &disk]);
        }
        command.env("BLKMQ_LOG", "warn");
        let process = blkmq_testkit::Daemon::try_spawn(command, Stdio::inherit())?;
        Ok(Self { process, socket })
    }

    /// Writes and reads a whole image.
    fn load(&self, image: &str) -> Result<()> {
        let uri = format!("nbd+unix:///{image}?socket={}", self.socket.display());
        let words = [
            "-f",
            "raw",
            "-c",
            "write -P 7 0 16M",
            "-c",
            "read -P 7 0 16M",
            &uri,
        ];
        let output = Command::new("qemu-io").args(words).output()?;
        let said = String::from_utf8_lossy(&output.stdout);
        ensure!(
            output.status.success() && !said.contains("failed"),
            "qemu-io on {image}: {said}"
        );
        Ok(())
    }

    fn print(&self, images: usize, clusters: usize, when: &str, opened: f64) -> Result<()> {
        let of = |what: &str| PathBuf::from(format!("/proc/{}/{what}", self.process.id()));
        let count = |what: &str| -> Result<usize> { Ok(fs::read_dir(of(what))?.count()) };
        let status = fs::read_to_string(of("status"))?;
        let rss = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib: f64 = rss
            .and_then(|rest| rest.split_whitespace().next()?.parse().ok())
            .context("no VmRSS")?;
        println!(
            "    | {images}, {when} | {} | {} | {:.0} | {} | {opened:.1} |",
            images.min(clusters),
            count("task")?,
            kib / 1024.0,
            count("fd")?
        );
        Ok(())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // After a SIGTERM its locks are free at once.
        if self.process.is_running() {
            self.process.signal(Signal::TERM);
            self.process.try_ended_within(END_MAX);
        }
    }
}

const IMAGE_SIZE: &str = "16M";
const END_MAX: Duration = Duration::from_secs(60);
const SETTLE: Duration = Duration::from_secs(1);
