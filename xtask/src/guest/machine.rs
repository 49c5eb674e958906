//! Decides how a guest is booted, and what it said: emulated, since no machine of ours lends its
//! processor to guests.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};

use super::packages::{EMULATOR, Place};

/// Boots a guest with this file system, shows what it says, and returns it when the guest has ended.
///
/// # Errors
/// If the emulator cannot be started.
pub(super) fn boot(place: &Place, initrd: &Path, limit: Duration) -> Result<String> {
    let kernel = place.find_file("boot", "vmlinuz-")?;
    // Nobody waits for ever for a guest that hangs.
    let mut emulator = Command::new("timeout");
    emulator
        .arg(limit.as_secs().to_string())
        .arg(place.root().join(EMULATOR));
    for firmware in ["qemu", "seabios"] {
        emulator
            .arg("-L")
            .arg(place.root().join("usr/share").join(firmware));
    }
    emulator
        .args(MACHINE.split_whitespace())
        .arg("-kernel")
        .arg(kernel)
        .arg("-initrd")
        .arg(initrd)
        .args(["-append", "console=ttyS0 loglevel=2 panic=-1"])
        .env("LD_LIBRARY_PATH", place.libraries())
        .stdin(Stdio::null());
    let output = emulator.stderr(Stdio::inherit()).output();
    let output = output.context("starting the emulator")?;
    let said = String::from_utf8_lossy(&output.stdout).replace('\r', "");
    print!("{said}");
    if !output.status.success() {
        println!(
            "    the guest ended with {}, {limit:?} after its start at most",
            output.status
        );
    }
    Ok(said)
}

const MACHINE: &str = "-accel tcg,thread=multi -cpu max -smp 2 -m 1024 -machine q35 -nodefaults -no-reboot -display none -serial stdio";
