//! Locks of images on NFS, in a guest: the kernel's server, and two hosts of it that exclude one another.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::initrd::Initrd;
use super::packages::Place;
use super::{SUCCESS, boot_plain, is_said};
use blkmq_testkit::tools::find;

/// Boots a guest in which daemons of two hosts want one image.
///
/// # Errors
/// If the guest finds anything wrong, or there is no guest.
pub(super) fn run(place: &Place, program: &Path) -> Result<()> {
    let mut initrd = Initrd::new(place)?;
    initrd.add_installed_tool(program, "blkmq")?;
    let nbdcopy = find("nbdcopy").context("nbdcopy is not installed; run: cargo xtask setup")?;
    initrd.add_installed_tool(&nbdcopy, "nbdcopy")?;
    for module in ["nfsd", "nfsv4", "veth"] {
        initrd.add_module(module, "")?;
    }
    let script = SCRIPT.replace("SUCCESS", SUCCESS);
    let said = boot_plain(place, &initrd.pack(&script)?, TIME_MAX)?;
    ensure!(is_said(&said, SUCCESS), "the guest did not say `{SUCCESS}`");
    Ok(())
}

pub(super) const TEST: &str = "nfs";
const TIME_MAX: Duration = Duration::from_secs(180);
const SCRIPT: &str = include_str!("nfs/script.sh");
