//! Tests whether file systems on a loop device over a disk can be made, used, unmounted, and are found
//! intact.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use super::Stage;
use crate::common::tools::{installed, run, try_run};

/// A loop device, until this is dropped.
pub(super) struct Loop(pub(super) String);

impl Loop {
    /// Attaches a loop device with direct I/O to a file; none, with a message, if that is not
    /// possible.
    pub(super) fn over(path: &str) -> Option<Self> {
        let words = ["--find", "--show", "--direct-io=on", path];
        let said = try_run("losetup", &words);
        if !said.success {
            blkmq_testkit::skip(&format!("no loop device: {}", said.stderr));
            return None;
        }
        let device = said.stdout.trim().to_owned();
        let listed = run("losetup", &["--list", "--noheadings", "--output", "DIO", &device]);
        assert_eq!(listed.stdout.trim(), "1", "it goes past the page cache");
        Some(Self(device))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        // A failure shows by what is left; a second panic would end all tests.
        let _ = try_run("losetup", &["--detach", &self.0]);
    }
}

/// A mounted file system, until this is dropped.
pub(super) struct Mounted(pub(super) String);

impl Drop for Mounted {
    fn drop(&mut self) {
        if !try_run("umount", &[&self.0]).success {
            let _ = try_run("umount", &["--lazy", &self.0]);
        }
    }
}

fn a_file_system_lives(make: &[&str], check: &[&str], keys: &str) {
    if let Some(stage) = Stage::of_size(keys, 512 << 20) {
        a_file_system_lives_on(stage, make, check);
    }
}

/// Makes a file system on a stage's disk, uses it, mounts it again and checks it.
pub(crate) fn a_file_system_lives_on(stage: Stage, make: &[&str], check: &[&str]) {
    if !installed(&["losetup", make[0], check[0]]) {
        return;
    }
    let Some(device) = Loop::over(&stage.word()) else {
        return;
    };
    let with = |words: &[&str]| run(words[0], &[&words[1..], &[&*device.0]].concat());
    with(make);
    let at = stage.scratch.word("mnt");
    std::fs::create_dir(&at).expect("a directory can be made");
    run("mount", &[&device.0, &at]);
    let mounted = Mounted(at.clone());
    for number in 0..40_usize {
        let mut file = File::create(Path::new(&at).join(format!("file{number}"))).unwrap();
        file.write_all(&contents(number)).unwrap();
        if number % 5 == 0 {
            file.sync_all().unwrap();
        }
    }
    (0..40)
        .step_by(3)
        .for_each(|number| std::fs::remove_file(format!("{at}/file{number}")).unwrap());
    // Free space is discarded; a loop device that cannot discard reports that.
    let trimmed = try_run("fstrim", &[&at]);
    assert!(trimmed.success, "{}", trimmed.stderr);
    drop(mounted);
    with(check);
    run("mount", &[&device.0, &at]);
    let mounted = Mounted(at.clone());
    for number in (0..40).filter(|number| number % 3 != 0) {
        let found = std::fs::read(format!("{at}/file{number}")).unwrap();
        assert!(found == contents(number), "file{number}");
    }
    drop(mounted);
    drop(device);
    stage.stop();
}

fn contents(number: usize) -> Vec<u8> {
    (0..number * 50_021)
        .map(|index| (index * 31 + index / 509 + number) as u8)
        .collect()
}

#[test]
fn ext4_on_a_loop_device_is_whole() {
    a_file_system_lives(&["mkfs.ext4", "-q", "-F"], &["e2fsck", "-f", "-n"], "");
}

#[test]
fn xfs_on_a_loop_device_is_whole_with_a_scheduler_below() {
    a_file_system_lives(&["mkfs.xfs", "-q", "-f"], &["xfs_repair", "-n"], ",sched=bfq");
}
