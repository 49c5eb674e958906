//! A Ceph cluster that `cargo xtask ceph` has started, as the tests use it: its images, and its OSD, which
//! they stop and kill.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::common::tools::{Said, output_within, run};

/// The cluster, for one test at a time, because a test that stops the OSD would disturb others.
pub(super) struct Ceph {
    directory: PathBuf,
    _alone: MutexGuard<'static, ()>,
}

/// An image; dropping it removes it.
pub(super) struct Image<'a> {
    ceph: &'a Ceph,
    pub(super) name: &'static str,
}

/// A stopped OSD; dropping this continues it.
pub(super) struct Stopped(Pid);

impl Ceph {
    /// The cluster that the environment names. Without one the test is skipped with a message.
    pub(super) fn find() -> Option<Self> {
        static ALONE: Mutex<()> = Mutex::new(());
        let Some(directory) = std::env::var_os("BLKMQ_CEPH") else {
            blkmq_testkit::skip("no Ceph cluster; `cargo xtask ceph --test` runs these tests on one");
            return None;
        };
        Some(Self {
            directory: directory.into(),
            // The lock is poisoned if another test has failed; this one makes its own images.
            _alone: ALONE.lock().unwrap_or_else(PoisonError::into_inner),
        })
    }

    /// Makes an image of `size`, with `more` arguments for `rbd create`.
    pub(super) fn image_with(&self, name: &'static str, size: &str, more: &[&str]) -> Image<'_> {
        self.rbd(&[&["create", "--size", size, name], more].concat());
        Image { ceph: self, name }
    }

    pub(super) fn image(&self, name: &'static str, size: &str) -> Image<'_> {
        self.image_with(name, size, &[])
    }

    /// Makes an image of a file.
    pub(super) fn imported(&self, name: &'static str, file: &str) -> Image<'_> {
        self.rbd(&["import", file, name]);
        Image { ceph: self, name }
    }

    /// A disk `name` on an image or a snapshot.
    pub(super) fn disk(&self, name: &str, image: &str, keys: &str) -> String {
        format!("name={name},rbd=rbd/{image},id=blkmq,conf={}{keys}", self.conf())
    }

    /// Runs `rbd` with these arguments and checks that it succeeds.
    pub(super) fn rbd(&self, words: &[&str]) -> Said {
        run("rbd", &[&["-c", &self.conf()], words].concat())
    }

    /// Bars the clients that have an image open for writing, as another client does that takes its lock.
    pub(super) fn bar_watchers_of(&self, image: &str) {
        let status = self.rbd(&["status", "--format", "json", image]).stdout;
        let status: serde_json::Value = serde_json::from_str(&status).expect("JSON");
        let watchers = status["watchers"].as_array().expect("a list");
        assert!(!watchers.is_empty(), "nobody has {image} open");
        for watcher in watchers {
            let address = watcher["address"].as_str().expect("a text");
            run("ceph", &["-c", &self.conf(), "osd", "blocklist", "add", address]);
        }
    }

    /// Says whether the OSD's store survives it.
    pub(super) fn outlives_its_osd(&self) -> bool {
        self.directory.join("osd/block").exists()
    }

    /// Says whether clients have to show a key.
    pub(super) fn has_keys(&self) -> bool {
        self.directory.join("blkmq.keyring").exists()
    }

    /// How long after its last word a client that has an image open is forgotten.
    pub(super) fn watch_time(&self) -> Duration {
        let conf = std::fs::read_to_string(self.conf()).expect("the cluster's configuration");
        let seconds = conf
            .lines()
            .find_map(|line| line.strip_prefix("osd client watch timeout = "));
        let seconds = seconds.and_then(|seconds| seconds.parse().ok());
        Duration::from_secs(seconds.expect("it has a number of seconds"))
    }

    /// Stops the OSD, so that it answers nothing.
    pub(super) fn stop_osd(&self) -> Stopped {
        let pid = self.osd();
        kill_process(pid, Signal::STOP).expect("it runs");
        Stopped(pid)
    }

    /// Has Ceph write an image to a file.
    pub(super) fn export(&self, image: &str, file: &str) {
        self.rbd(&["export", "--no-progress", image, file]);
    }

    /// Kills the OSD, as a power cut would, and starts it again.
    pub(super) fn kill_and_start_osd(&self, pause: Duration) {
        kill_process(self.osd(), Signal::KILL).expect("it runs");
        std::thread::sleep(pause);
        let mut command = Command::new("ceph-osd");
        // Its output is discarded, because it runs on after the test.
        command
            .args(["-i", "0", "-c", &self.conf()])
            .stdout(std::process::Stdio::null());
        let started = command.stderr(std::process::Stdio::null()).status();
        assert!(
            started.expect("it is installed").success(),
            "the OSD does not start again"
        );
    }

    fn osd(&self) -> Pid {
        let file = self.directory.join("osd.0.pid");
        let pid = std::fs::read_to_string(file).expect("the OSD runs");
        Pid::from_raw(pid.trim().parse().expect("a number")).expect("of a process")
    }

    pub(super) fn conf(&self) -> String {
        let conf = self.directory.join("ceph.conf");
        conf.to_str().expect("a path in UTF-8").to_owned()
    }
}

impl Drop for Image<'_> {
    fn drop(&mut self) {
        let mut command = Command::new("rbd");
        command.args(["-c", &self.ceph.conf()]);
        if std::thread::panicking() {
            eprintln!("image {} is left", self.name);
            return;
        }
        let _ = output_within(
            Command::new("rbd").args(["-c", &self.ceph.conf(), "snap", "purge", self.name]),
            LONG,
        );
        let removed = output_within(command.args(["rm", self.name]), LONG);
        assert!(
            removed.status.success(),
            "image {} cannot be removed: {}",
            self.name,
            String::from_utf8_lossy(&removed.stderr)
        );
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        let _ = kill_process(self.0, Signal::CONT);
    }
}

/// The path of the library that the driver loads, if it is installed.
pub(super) fn library() -> Option<PathBuf> {
    let triple = format!("/usr/lib/{}-linux-gnu/librbd.so.1", std::env::consts::ARCH);
    std::fs::canonicalize(Path::new(&triple)).ok()
}

const LONG: Duration = Duration::from_secs(60);
