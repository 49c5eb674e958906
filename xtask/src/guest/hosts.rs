//! What a host does to a disk, in a guest that has the device mapper, null_blk and ublk: the end-to-end tests `hosts` walk
//! the whole table of `docs/operate/hosts.md` there.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::initrd::Initrd;
use super::packages::Place;
use super::{BOOT, RUNNER, SUCCESS, boot_plain, build_command, is_said};
use crate::steps::Steps;
use blkmq_testkit::tools::find;

/// Builds the tests for a guest, and has cargo run them by [`boot`].
///
/// # Errors
/// If a test fails or is skipped in the guest, or cannot be built.
pub(super) fn run(steps: &mut Steps, place: &Place) -> Result<()> {
    let mut tests = build_command(place, None, "test -p blkmq --test end_to_end");
    // The others need tools that are not there.
    tests.args(["--", "--nocapture", "--test-threads=1", "hosts::disk_on"]);
    let xtask = std::env::current_exe()?;
    tests.env(RUNNER, format!("{} {BOOT} {NAME}", xtask.display()));
    steps.run("disks on each kind of host in a guest", &mut tests)
}

/// Boots a guest whose first process runs the tests `program`, beside which cargo has put the command.
pub(super) fn boot(place: &Place, program: &Path, args: &[String]) -> Result<()> {
    let mut initrd = Initrd::new(place)?;
    initrd.add_program(program, "tests")?;
    let built = program
        .ancestors()
        .nth(2)
        .context("cargo builds below a directory")?;
    initrd.add_program(&built.join("blkmq"), "blkmq")?;
    for tool in ["dmsetup", "mkfs.ext4", "mkfs.xfs"] {
        initrd.add_tool(tool)?;
    }
    for tool in TOOLS {
        let found = find(tool).with_context(|| format!("{tool} is not installed; run: cargo xtask setup"))?;
        initrd.add_installed_tool(&found, tool)?;
    }
    for module in MODULES {
        initrd.add_module(module, "")?;
    }
    initrd.add_module("null_blk", "nr_devices=0")?;
    let script = SCRIPT
        .replace("ARGS", &args.join(" "))
        .replace("SUCCESS", SUCCESS);
    let said = boot_plain(place, &initrd.pack(&script)?, TIME_MAX)?;
    ensure!(is_said(&said, SUCCESS), "the guest did not say `{SUCCESS}`");
    let skipped = said.lines().find(|line| line.contains("SKIPPED "));
    ensure!(
        skipped.is_none(),
        "a test did not run: {}",
        skipped.unwrap_or_default()
    );
    Ok(())
}

pub(super) const NAME: &str = "hosts";
/// This machine's, since they are no part of the guest's packages.
const TOOLS: [&str; 10] = [
    "nbdinfo",
    "losetup",
    "mount",
    "umount",
    "cp",
    "rmdir",
    "btrfs",
    "mkfs.btrfs",
    "chattr",
    "mksquashfs",
];
const MODULES: [&str; 10] = [
    "loop",
    "fuse",
    "dm-thin-pool",
    "dm-crypt",
    "xts",
    "ublk_drv",
    "xfs",
    "btrfs",
    "squashfs",
    "overlay",
];
const TIME_MAX: Duration = Duration::from_secs(500);
const SCRIPT: &str = "\
busybox mount -t configfs configfs /sys/kernel/config
export DM_DISABLE_UDEV=1 BLKMQ_BIN=/bin/blkmq
busybox echo \"Linux $(busybox uname -r)\"
tests ARGS && busybox echo SUCCESS
";
