//! Installs the system's programs that the tests use, where they are missing.
//!
//! No error here is fatal: a test whose tool is missing is skipped and reports it.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::process::Command;

use anyhow::Result;

use crate::steps::{Steps, run_shown};
use blkmq_testkit::tools::find;

/// # Errors
/// None at present: packages that cannot be installed are reported, and the tests that need them
/// are skipped.
pub(crate) fn run(steps: &mut Steps) -> Result<()> {
    let missing = missing_packages();
    if missing.is_empty() {
        return steps.time("set-up", || {
            println!("    every tool that the tests use is installed");
            Ok(())
        });
    }
    let list = missing.into_iter().collect::<Vec<_>>().join(" ");
    let by_hand = format!("apt-get install -y -qq --no-install-recommends {list}");
    if !is_root() {
        steps.skip(
            "set-up",
            &format!("not root; tests without their tools will skip; run: sudo {by_hand}"),
        );
        return Ok(());
    }
    if find("apt-get").is_none() {
        steps.skip(
            "set-up",
            &format!("no apt-get here; install what is named as on Debian: {list}"),
        );
        return Ok(());
    }
    steps.time("set-up", || {
        println!("    installing: {list}");
        let installed = run_shown(&mut apt("update -qq"))
            .and_then(|()| run_shown(&mut apt(&by_hand["apt-get ".len()..])));
        if let Err(error) = installed {
            println!("    WARNING: {error:#}; tests that need these tools will skip: {list}");
        }
        Ok(())
    })
}

/// The Debian packages of every tool that is not found.
fn missing_packages() -> BTreeSet<&'static str> {
    TOOLS
        .iter()
        .filter(|(tool, _)| find(tool).is_none())
        .map(|(_, package)| *package)
        .collect()
}

fn apt(words: &str) -> Command {
    let mut command = Command::new("apt-get");
    command
        .args(words.split_whitespace())
        .env("DEBIAN_FRONTEND", "noninteractive");
    command
}

pub(crate) fn is_root() -> bool {
    std::fs::metadata("/proc/self").is_ok_and(|own| own.uid() == 0)
}

/// A program and the Debian package that has it.
const TOOLS: [(&str, &str); 29] = [
    ("fio", "fio"),
    ("blkparse", "blktrace"),
    ("dbench", "dbench"),
    ("fusermount3", "fuse3"),
    ("nbdkit", "nbdkit"),
    ("nbdinfo", "libnbd-bin"),
    ("nbdcopy", "libnbd-bin"),
    ("promtool", "prometheus"),
    ("qemu-img", "qemu-utils"),
    ("qemu-io", "qemu-utils"),
    ("qemu-storage-daemon", "qemu-system-common"),
    ("mkfs.ext4", "e2fsprogs"),
    ("debugfs", "e2fsprogs"),
    ("e2fsck", "e2fsprogs"),
    ("mkfs.xfs", "xfsprogs"),
    ("xfs_repair", "xfsprogs"),
    ("mkfs.btrfs", "btrfs-progs"),
    ("mksquashfs", "squashfs-tools"),
    ("valgrind", "valgrind"),
    ("ip", "iproute2"),
    ("runc", "runc"),
    ("busybox", "busybox-static"),
    ("jq", "jq"),
    ("kill", "procps"),
    ("tmux", "tmux"),
    ("xz", "xz-utils"),
    ("cryptsetup", "cryptsetup-bin"),
    ("openssl", "openssl"),
    ("pkg-config", "pkg-config"),
];
