//! Tests whether programs that have a disk open as a file continue when another daemon takes over: under load
//! that checks every byte, and with a file system on a loop device. Also that the running daemon continues if
//! the other one cannot take over, or ends at any step.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::mount::{UnmountFlags, unmount};

use super::loops::{Loop, Mounted};
use super::{DISK_BYTES, STEP, Stage, aligned_of, may_mount};
use crate::common::daemon::serve_command;
use crate::common::pattern::{BLOCK, block};
use crate::common::tools::{installed, output_within, run};
use crate::common::{Daemon, Scratch};
use crate::upgrade::refusals::{STEPS, pretend};

/// Threads that write, read and check without a pause, each in its own blocks. An error or a wrong
/// byte panics.
struct Load {
    is_over: Arc<AtomicBool>,
    done: Arc<AtomicU64>,
    slowest_ns: Arc<AtomicU64>,
    /// Each returns how many times it has written its blocks.
    threads: Vec<JoinHandle<u64>>,
}

impl Load {
    fn start(stage: &Stage) -> Self {
        let (is_over, done, slowest_ns) = (Arc::default(), Arc::default(), Arc::default());
        let thread = |number: u64| {
            let (file, is_over) = (stage.open(), Arc::clone(&is_over));
            let (done, slowest_ns) = (Arc::clone(&done), Arc::clone(&slowest_ns));
            std::thread::spawn(move || write_and_check(&file, number * BLOCKS, &is_over, &done, &slowest_ns))
        };
        let threads = (0..THREADS).map(thread).collect();
        Self {
            is_over,
            done,
            slowest_ns,
            threads,
        }
    }

    /// Returns the time of the slowest request since the last call.
    fn take_slowest(&self) -> Duration {
        Duration::from_nanos(self.slowest_ns.swap(0, Ordering::Relaxed))
    }

    /// Waits for some more requests.
    fn wait_for_more(&self) {
        let (before, start) = (self.done.load(Ordering::Relaxed), Instant::now());
        while self.done.load(Ordering::Relaxed) < before + 4 * THREADS {
            assert!(start.elapsed() < TIME, "nobody is served any more");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Ends the load. Returns how many requests there were, and how many times each thread has
    /// written its blocks.
    fn stop(self) -> (u64, Vec<u64>) {
        self.is_over.store(true, Ordering::Relaxed);
        let threads = self.threads.into_iter();
        let generations = threads.map(|thread| thread.join().expect("nobody saw an error, or a wrong byte"));
        let generations = generations.collect();
        (self.done.load(Ordering::Relaxed), generations)
    }
}

fn write_and_check(
    file: &File,
    first: u64,
    is_over: &AtomicBool,
    done: &AtomicU64,
    slowest_ns: &AtomicU64,
) -> u64 {
    let mut read = aligned_of(0, 0);
    let timed = |request: &mut dyn FnMut() -> std::io::Result<()>| {
        let start = Instant::now();
        request().expect("a request over an upgrade");
        slowest_ns.fetch_max(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
        done.fetch_add(1, Ordering::Relaxed);
    };
    let mut generation = 0;
    while !is_over.load(Ordering::Relaxed) {
        generation += 1;
        for number in first..first + BLOCKS {
            let written = aligned_of(number, generation);
            timed(&mut || file.write_all_at(&written.0, number * STEP));
            timed(&mut || file.read_exact_at(&mut read.0, number * STEP));
            assert!(read.0 == written.0, "block {number}, generation {generation}");
        }
        timed(&mut || file.sync_data());
    }
    generation
}

impl Stage {
    /// A daemon that can be upgraded; none, with a message, if nothing can be mounted.
    fn to_upgrade() -> Option<Self> {
        let scratch = Scratch::new();
        if !may_mount() {
            return None;
        }
        scratch.image("vm1.raw", DISK_BYTES);
        let mut stage = Self {
            daemon: None,
            scratch,
        };
        stage.daemon = Some(stage.start("--upgrade-socket"));
        Some(stage)
    }

    fn words(&self, last: &str) -> Vec<String> {
        let disk = format!("name=vm1,file={}", self.scratch.word("vm1.raw"));
        let address = format!("unix:{}", self.scratch.word("up.sock"));
        let words = [
            "--disk",
            &disk,
            "--fuse",
            &self.word(),
            "--control",
            "none",
            last,
            &address,
        ];
        words.map(str::to_owned).into()
    }

    fn start(&self, last: &str) -> Daemon {
        let words = self.words(last);
        Daemon::start(&words.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// Has another daemon take over; the previous one has ended with success when this returns.
    fn upgrade(&mut self) {
        let new = self.start("--take-over");
        let mut old = self.daemon.replace(new).expect("it serves");
        let status = old.ended_within(TIME);
        assert!(status.success(), "{status}:\n{}", old.said());
    }

    /// The output of a daemon that must fail to take over.
    fn fail_to_upgrade(&self, words: &[String]) -> String {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let output = output_within(&mut serve_command(&words), TIME);
        assert!(!output.status.success(), "it took over");
        String::from_utf8_lossy(&output.stderr).into_owned()
    }
}

#[test]
fn load_goes_on_over_upgrades_without_an_error_and_the_mount_is_the_same() {
    let Some(mut stage) = Stage::to_upgrade() else {
        return;
    };
    let mount = std::fs::metadata(stage.path()).unwrap().dev();
    let load = Load::start(&stage);
    let mut pauses = Vec::new();
    for _ in 0..UPGRADES {
        load.wait_for_more();
        load.take_slowest();
        stage.upgrade();
        load.wait_for_more();
        pauses.push(load.take_slowest());
    }
    let (done, generations) = load.stop();
    eprintln!("{UPGRADES} upgrades beside {done} requests; the slowest request of each: {pauses:?}");
    assert_eq!(std::fs::metadata(stage.path()).unwrap().dev(), mount);
    let image = stage.scratch.path("vm1.raw");
    let path = stage.path();
    // All users have closed the file, so the daemons must leave nothing behind.
    let said = stage.daemon().said();
    stage.daemon.take().expect("it serves").stop();
    assert!(!said.contains("unmounted while open"), "{said}");
    assert!(!path.exists(), "the file that the first daemon made is gone");
    let image = std::fs::read(image).unwrap();
    for (thread, generation) in (0..).zip(generations) {
        for number in thread * BLOCKS..(thread + 1) * BLOCKS {
            let at = number as usize * BLOCK;
            assert!(
                image[at..at + BLOCK] == block(number, generation),
                "block {number}"
            );
        }
    }
}

#[test]
fn daemon_that_cannot_take_over_leaves_the_mount_to_the_running_one() {
    let Some(mut stage) = Stage::to_upgrade() else {
        return;
    };
    let load = Load::start(&stage);
    let small = stage.scratch.image("small.raw", DISK_BYTES / 2);
    let image = stage.scratch.word("vm1.raw");
    for (disk, reason) in [
        (format!("name=vm1,file={small}"), "a size of"),
        (format!("name=vm2,file={image}"), "not in the new configuration"),
        (format!("name=vm1,file={image},ro=on"), "read-only in the new"),
    ] {
        let mut words = stage.words("--take-over");
        words[1] = disk;
        words.extend(["--same-data", "vm1"].map(str::to_owned));
        let said = stage.fail_to_upgrade(&words);
        assert!(said.contains(reason), "{said}");
        load.wait_for_more();
    }
    let mut words = stage.words("--take-over");
    words[3] = stage.scratch.word("elsewhere");
    let said = stage.fail_to_upgrade(&words);
    assert!(said.contains("nobody serves fuse at"), "{said}");
    assert!(!stage.scratch.path("elsewhere").exists(), "its own mount is gone");
    for round in 0..2 * (STEPS + 1) {
        drop(pretend(&stage.scratch.path("up.sock"), round % (STEPS + 1)));
        load.wait_for_more();
    }
    stage.upgrade();
    load.wait_for_more();
    load.stop();
    stage.stop();
}

#[test]
fn requests_in_the_drive_are_waited_for_or_the_upgrade_fails() {
    if !may_mount() {
        return;
    }
    let mut stage = Stage {
        daemon: None,
        scratch: Scratch::new(),
    };
    let words = |last: &str| {
        let mut words = stage.words(last);
        words[1] = "name=vm1,null=64M,latency=3s".to_owned();
        words
    };
    let (first, next) = (words("--upgrade-socket"), words("--take-over"));
    stage.daemon = Some(Daemon::start(
        &first.iter().map(String::as_str).collect::<Vec<_>>(),
    ));
    let file = stage.open();
    let reader = std::thread::spawn(move || file.read_exact_at(&mut aligned_of(0, 0).0, 0));
    std::thread::sleep(Duration::from_millis(300));
    let said = stage.fail_to_upgrade(&next);
    assert!(said.contains("have requests in flight"), "{said}");
    reader.join().expect("it ends").expect("its read ends well");
    stage.stop();
}

#[test]
fn mount_that_is_open_over_an_upgrade_is_not_unmounted_and_can_be_mounted_anew() {
    let Some(mut stage) = Stage::to_upgrade() else {
        return;
    };
    let file = stage.open();
    stage.upgrade();
    assert!(
        unmount(stage.path(), UnmountFlags::empty()).is_err(),
        "it is open"
    );
    drop(file);
    unmount(stage.path(), UnmountFlags::empty()).unwrap();
    let is_said = |line: &str| line.contains("somebody has unmounted it, and it is not served any more");
    assert!(stage.daemon().wait_for(TIME, is_said));
    // The next daemon finds a file that it can mount over.
    stage.upgrade();
    let file = stage.open();
    file.write_all_at(&aligned_of(1, 1).0, STEP).unwrap();
    stage.upgrade();
    let mut read = aligned_of(0, 0);
    file.read_exact_at(&mut read.0, STEP).unwrap();
    assert!(read.0 == aligned_of(1, 1).0);
    drop(file);
    stage.stop();
}

#[test]
fn disk_over_its_own_image_is_not_handed_over() {
    if !may_mount() {
        return;
    }
    let mut stage = Stage {
        daemon: None,
        scratch: Scratch::new(),
    };
    let image = stage.scratch.image("disk", DISK_BYTES);
    let words = |last: &str| {
        let mut words = stage.words(last);
        words[1] = format!("name=vm1,file={image}");
        words
    };
    let (first, mut next) = (words("--upgrade-socket"), words("--take-over"));
    stage.daemon = Some(Daemon::start(
        &first.iter().map(String::as_str).collect::<Vec<_>>(),
    ));
    let file = stage.open();
    let said = stage.fail_to_upgrade(&next);
    assert!(said.contains("another file at the same path"), "{said}");
    next.extend(["--same-data", "vm1"].map(str::to_owned));
    let said = stage.fail_to_upgrade(&next);
    assert!(
        said.contains("mounted over a file that this daemon needs"),
        "{said}"
    );
    file.write_all_at(&aligned_of(1, 1).0, STEP).unwrap();
    drop(file);
    stage.stop();
}

#[test]
fn file_system_on_a_loop_device_is_whole_after_upgrades() {
    let Some(mut stage) = Stage::to_upgrade() else {
        return;
    };
    if !installed(&["losetup", "mkfs.ext4", "e2fsck"]) {
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
    let contents = |number: usize| vec![number as u8 + 1; 300_000];
    for number in 0..3 {
        std::fs::write(format!("{at}/file{number}"), contents(number)).unwrap();
        stage.upgrade();
    }
    drop(mounted);
    run("e2fsck", &["-f", "-n", &device.0]);
    run("mount", &[&device.0, &at]);
    let mounted = Mounted(at.clone());
    for number in 0..3 {
        let found = std::fs::read(format!("{at}/file{number}")).unwrap();
        assert!(found == contents(number), "file{number}");
    }
    drop(mounted);
    drop(device);
    stage.stop();
}

const THREADS: u64 = 4;
/// Blocks of each thread.
const BLOCKS: u64 = 32;
const UPGRADES: usize = 5;
const TIME: Duration = Duration::from_secs(20);
