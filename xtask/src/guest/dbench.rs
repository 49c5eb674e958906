//! Measures dbench on a device of ublk, in a guest whose kernel has it.
//!
//! The guest has more processors than the machine: the kernel gives a device a queue for each of them, and
//! requests come to as many reactors.

use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};

use super::initrd::Initrd;
use super::machine::{self, Machine};
use super::packages::Place;
use super::{SUCCESS, is_said};

/// Boots a guest that measures, and shows the tables.
///
/// # Errors
/// If a measurement fails, or there is no guest.
pub(super) fn run(place: &Place, program: &Path) -> Result<()> {
    let mut initrd = Initrd::new(place)?;
    initrd.add_program(program, "blkmq-lab")?;
    for tool in ["dbench", "mkfs.ext4", "mkfs.xfs"] {
        initrd.add_tool(tool)?;
    }
    initrd.add_file("usr/share/dbench/client.txt")?;
    for module in ["ublk_drv", "xfs", "bfq"] {
        initrd.add_module(module, "")?;
    }
    let said = machine::boot(Machine {
        place,
        initrd: &initrd.pack(&SCRIPT.replace("SUCCESS", SUCCESS))?,
        limit: TIME_MAX,
        words: &WORDS.map(str::to_owned),
        heard: &mut |_| {},
    })?;
    ensure!(is_said(&said, SUCCESS), "the guest did not say `{SUCCESS}`");
    Ok(())
}

const TIME_MAX: Duration = Duration::from_secs(1200);
/// The last word of each kind counts.
const WORDS: [&str; 4] = ["-smp", "8", "-m", "2048"];
/// Progress goes through a pipe, since a terminal would show it in place, on a line that does not end.
const SCRIPT: &str = "\
for applet in mount umount; do busybox ln -s busybox /bin/$applet; done
busybox echo \"Linux $(busybox uname -r), $(busybox nproc) processors\"
dbench='blkmq-lab bench single-dispatch --dbench --door ublk --clients 1,4,8 --rounds 1'
{ $dbench --filesystem xfs && $dbench --filesystem ext4 && busybox echo SUCCESS; } 2>&1 | busybox cat
";
