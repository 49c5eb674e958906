//! Tests a disk's ublk device, in a guest whose kernel supports it: with fio and file systems, while the
//! daemon is killed and started again, stopped, replaced, and run by a user; and while replacing and
//! recovering it fail.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::initrd::Initrd;
use super::packages::Place;
use super::{SUCCESS, boot_plain, is_said};
use blkmq_testkit::tools::find;

/// What a run does.
#[derive(Clone, Copy, Debug)]
pub(super) enum Test {
    /// All functions of a device, with this many kills of the daemon under load, and as many upgrades.
    Devices { kills: u32 },
    /// Upgrades and recoveries that fail, and little memory.
    Failures,
}

/// Boots a guest in which the daemon serves such devices.
///
/// # Errors
/// If the guest finds anything wrong, or there is no guest.
pub(super) fn run(place: &Place, program: &Path, test: Test) -> Result<()> {
    let mut initrd = Initrd::new(place)?;
    initrd.add_program(program, "blkmq")?;
    for tool in ["mkfs.ext4", "e2fsck", "mkfs.xfs", "xfs_repair"] {
        initrd.add_tool(tool)?;
    }
    let fio = find("fio").context("fio is not installed; run: cargo xtask setup")?;
    initrd.add_installed_tool(&fio, "fio")?;
    initrd.add_module("ublk_drv", "")?;
    initrd.add_module("xfs", "")?;
    let script = format!("{BEGIN}{}", test.script()).replace("SUCCESS", SUCCESS);
    let said = boot_plain(place, &initrd.pack(&script)?, test.time_max())?;
    ensure!(is_said(&said, SUCCESS), "the guest did not say `{SUCCESS}`");
    Ok(())
}

impl Test {
    fn script(self) -> String {
        match self {
            Self::Devices { kills } => {
                let numbers: Vec<_> = (1..=kills).map(|number| number.to_string()).collect();
                DEVICES.replace("KILLS", &numbers.join(" "))
            }
            Self::Failures => FAILURES.to_owned(),
        }
    }

    fn time_max(self) -> Duration {
        match self {
            Self::Devices { kills } => TIME_MAX + KILL_MAX * kills,
            Self::Failures => 2 * TIME_MAX,
        }
    }
}

const TIME_MAX: Duration = Duration::from_secs(240);
/// Time for one kill, and for the load until the next.
const KILL_MAX: Duration = Duration::from_secs(10);
const BEGIN: &str = include_str!("ublk/begin.sh");
const DEVICES: &str = include_str!("ublk/devices.sh");
const FAILURES: &str = include_str!("ublk/failures.sh");
