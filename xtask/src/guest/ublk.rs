//! Decides how the block device that ublk gives a disk is tested, in a guest whose kernel has it: with fio and file systems, while the
//! daemon is killed and started again, stopped, replaced, and run by a user.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::initrd::Initrd;
use super::packages::Place;
use super::{SUCCESS, boot_plain, is_said};
use crate::place::find_tool;

/// Kills of the daemon under load that a run has.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kills(pub(super) u32);

/// Boots a guest in which the daemon serves such devices.
///
/// # Errors
/// If the guest finds anything wrong, or there is no guest.
pub(super) fn run(place: &Place, program: &Path, Kills(kills): Kills) -> Result<()> {
    let mut initrd = Initrd::new(place)?;
    initrd.add_program(program, "blkmq")?;
    for tool in ["mkfs.ext4", "e2fsck"] {
        initrd.add_tool(tool)?;
    }
    let fio = find_tool("fio").context("fio is not installed; run: cargo xtask setup")?;
    initrd.add_installed_tool(&fio, "fio")?;
    initrd.add_module("ublk_drv", "")?;
    let numbers: Vec<_> = (1..=kills).map(|number| number.to_string()).collect();
    let script = SCRIPT
        .replace("KILLS", &numbers.join(" "))
        .replace("SUCCESS", SUCCESS);
    let limit = TIME_MAX + KILL_MAX * kills;
    let said = boot_plain(place, &initrd.pack(&script)?, limit)?;
    ensure!(is_said(&said, SUCCESS), "the guest did not say `{SUCCESS}`");
    Ok(())
}

const TIME_MAX: Duration = Duration::from_secs(240);
/// For one kill, with the load between it and the next.
const KILL_MAX: Duration = Duration::from_secs(10);
const SCRIPT: &str = include_str!("ublk.sh");
