//! End-to-end tests that need the device mapper, null_blk or ublk, in a guest that has them: what a host does to a
//! disk (the whole table of `docs/operate/hosts.md`), and encrypted disks that dm-crypt reads and writes.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::initrd::Initrd;
use super::packages::Place;
use super::{BOOT, RUNNER, SUCCESS, boot_plain, build_command, is_said};
use crate::steps::Steps;
use blkmq_testkit::tools::find;

/// Tests of one kind.
pub(super) struct Kind {
    pub(super) name: &'static str,
    what: &'static str,
    /// What their names begin with.
    tests: &'static str,
    /// This machine's, since they are no part of the guest's packages.
    tools: &'static [&'static str],
    modules: &'static [&'static str],
}

/// Builds the tests for a guest, and has cargo run them by [`boot`].
///
/// # Errors
/// If a test fails or is skipped in the guest, or cannot be built.
pub(super) fn run(steps: &mut Steps, place: &Place, kind: &Kind) -> Result<()> {
    let mut tests = build_command(place, None, "test -p blkmq --test end_to_end");
    // The others need tools that are not there.
    tests.args(["--", "--nocapture", "--test-threads=1", kind.tests]);
    let xtask = std::env::current_exe()?;
    tests.env(RUNNER, format!("{} {BOOT} {}", xtask.display(), kind.name));
    steps.run(kind.what, &mut tests)
}

/// Boots a guest whose first process runs the tests `program`, beside which cargo has put the command.
pub(super) fn boot(place: &Place, kind: &Kind, program: &Path, args: &[String]) -> Result<()> {
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
    for tool in kind.tools {
        let found = find(tool).with_context(|| format!("{tool} is not installed; run: cargo xtask setup"))?;
        initrd.add_installed_tool(&found, tool)?;
    }
    for module in kind.modules {
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

pub(super) const HOSTS: Kind = Kind {
    name: "hosts",
    what: "disks on each kind of host in a guest",
    tests: "hosts::disk_on",
    tools: &[
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
    ],
    modules: &[
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
    ],
};
pub(super) const DM_CRYPT: Kind = Kind {
    name: "dm-crypt",
    what: "encrypted disks and dm-crypt in a guest",
    tests: "luks::device",
    tools: &["cryptsetup"],
    modules: &["loop", "dm-crypt", "xts", "algif_skcipher", "aesni-intel"],
};
/// The emulator has a tenth of the processor's speed, and less beside other loads.
const TIME_MAX: Duration = Duration::from_secs(1800);
const SCRIPT: &str = "\
busybox mount -t configfs configfs /sys/kernel/config
export DM_DISABLE_UDEV=1 BLKMQ_BIN=/bin/blkmq
busybox mkdir -p /run/cryptsetup
busybox echo \"Linux $(busybox uname -r)\"
tests ARGS && busybox echo SUCCESS
";
