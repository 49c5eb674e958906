//! Tests whether a file system on a loop device over a disk can be written back while memory is short: the
//! daemon, and a program that writes more than fits in memory, share a small control group.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::Stage;
use super::loops::{Loop, Mounted};
use crate::common::tools::{installed, output_within, run};

/// A control group with little memory, until this is dropped.
struct Small(PathBuf);

impl Small {
    /// Makes a control group; none, with a message, if that is not possible.
    fn make(bytes: u64) -> Option<Self> {
        let name = format!("blkmq-fuse-{}", std::process::id());
        for (root, limit) in [
            ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
            ("/sys/fs/cgroup", "memory.max"),
        ] {
            let dir = Path::new(root).join(&name);
            if std::fs::create_dir(&dir).is_ok() {
                let group = Self(dir);
                if std::fs::write(group.0.join(limit), bytes.to_string()).is_ok() {
                    return Some(group);
                }
            }
        }
        blkmq_testkit::skip("no control group with a limit on its memory can be made");
        None
    }

    fn add(&self, process: u32) {
        std::fs::write(self.0.join("cgroup.procs"), process.to_string())
            .expect("a process can be moved there");
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        // Processes that have just ended are in it for a moment.
        for _ in 0..100 {
            if std::fs::remove_dir(&self.0).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        eprintln!("{} is left behind", self.0.display());
    }
}

/// A mount that is aborted if the test fails, which ends what the kernel waits for.
struct Aborted(PathBuf);

impl Drop for Aborted {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // It is busy, but its requests have ended.
            let _ = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::FORCE);
        }
    }
}

#[test]
fn load_beyond_memory_is_written_back_all_the_same() {
    let Some(mut stage) = Stage::of_size("", 1 << 30) else {
        return;
    };
    if !installed(&["losetup", "mkfs.ext4", "e2fsck", "dd"]) {
        return;
    }
    let Some(group) = Small::make(MEMORY) else { return };
    let Some(device) = Loop::over(&stage.word()) else {
        return;
    };
    run("mkfs.ext4", &["-q", "-F", &device.0]);
    let at = stage.scratch.word("mnt");
    std::fs::create_dir(&at).expect("a directory can be made");
    run("mount", &[&device.0, &at]);
    let mounted = Mounted(at.clone());
    // Dropped before the file system is unmounted, because unmounting may wait for requests that
    // hang.
    let aborted = Aborted(stage.path());
    group.add(stage.daemon().id());
    let noise = stage.scratch.noisy_image("noise", WRITTEN, 3);
    let script = format!(
        "echo $$ > {}/cgroup.procs && dd if={noise} of={at}/file bs=1M && dd if={noise} of={at}/other bs=64K conv=fsync && sync -f {at} && cmp {noise} {at}/file",
        group.0.display()
    );
    let output = output_within(Command::new("sh").args(["-c", &script]), LIMIT);
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    drop(aborted);
    drop(mounted);
    run("e2fsck", &["-f", "-n", &device.0]);
    drop(device);
    stage.stop();
    drop(group);
}

#[test]
fn reactor_touches_no_page_for_the_first_time_while_it_serves() {
    let Some(mut stage) = Stage::of_size("", 1 << 30) else {
        return;
    };
    if !installed(&["losetup", "mkfs.ext4", "dd", "fstrim"]) {
        return;
    }
    if !stage
        .daemon()
        .wait_for(LOG_TIME, |line| line.contains("may wait for each other"))
    {
        blkmq_testkit::skip("the kernel does not wait for write-back here");
        return;
    }
    let Some(device) = Loop::over(&stage.word()) else {
        return;
    };
    run("mkfs.ext4", &["-q", "-F", &device.0]);
    let at = stage.scratch.word("mnt");
    std::fs::create_dir(&at).expect("a directory can be made");
    run("mount", &[&device.0, &at]);
    let mounted = Mounted(at.clone());
    let before = memory_at_rest(stage.daemon().id());
    let script = format!(
        "dd if=/dev/zero of={at}/a bs=1M count=100 && dd if=/dev/zero of={at}/b bs=4K count=5000 oflag=direct && \
         dd if={at}/a of=/dev/null bs=1M iflag=direct && sync -f {at} && rm {at}/a && fstrim {at}"
    );
    run("sh", &["-c", &script]);
    drop(mounted);
    drop(device);
    let mut after = memory_of(stage.daemon().id());
    after.retain(|mapping| !before.contains(mapping));
    assert!(
        after.is_empty(),
        "{after:?}\nbefore:\n{before:?}\n{}",
        stage.daemon().said()
    );
    stage.stop();
}

/// The daemon's own memory, once all reactors have begun to serve.
fn memory_at_rest(daemon: u32) -> Vec<(String, String)> {
    let mut last = memory_of(daemon);
    loop {
        std::thread::sleep(Duration::from_secs(1));
        let now = memory_of(daemon);
        if now == last {
            return now;
        }
        last = now;
    }
}

/// The pages of no file that the daemon has ever touched, for each mapping that has some. Page faults are no measure:
/// pages of the program are mapped at any time.
fn memory_of(daemon: u32) -> Vec<(String, String)> {
    let path = format!("/proc/{daemon}/smaps");
    let all = std::fs::read_to_string(path).expect("our own child's memory");
    let (mut touched, mut mapping) = (Vec::new(), "");
    for line in all.lines() {
        match line.strip_prefix("Anonymous:").map(str::trim) {
            Some("0 kB") => {}
            Some(touched_there) => touched.push((mapping.to_owned(), touched_there.to_owned())),
            None if line.split(' ').next().is_some_and(|word| word.contains('-')) => mapping = line,
            None => {}
        }
    }
    touched
}

/// Memory of the daemon and the writer together.
const MEMORY: u64 = 48 << 20;
/// What is written, twice.
const WRITTEN: u64 = 300 << 20;
const LIMIT: Duration = Duration::from_secs(90);
const LOG_TIME: Duration = Duration::from_secs(2);
