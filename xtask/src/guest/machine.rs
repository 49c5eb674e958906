//! Boots a guest, and reads its output. The guest is emulated, since none of our machines offers
//! virtualization.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};

use super::packages::{EMULATOR, Place};

/// A guest to boot.
pub(super) struct Machine<'a> {
    pub(super) place: &'a Place,
    /// Its file system.
    pub(super) initrd: &'a Path,
    /// The time limit after which it is killed.
    pub(super) limit: Duration,
    /// More arguments for the emulator.
    pub(super) words: &'a [String],
    /// Called with each line of its output, at once.
    pub(super) heard: &'a mut dyn FnMut(&str),
}

/// Boots a guest, shows its output, and returns it when the guest has ended.
///
/// # Errors
/// If the emulator cannot be started.
pub(super) fn boot(machine: Machine<'_>) -> Result<String> {
    let Machine {
        place,
        initrd,
        limit,
        words,
        heard,
    } = machine;
    let kernel = place.find_file("boot", "vmlinuz-")?;
    // A guest that hangs is killed after the time limit.
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
        .args(words)
        .env("LD_LIBRARY_PATH", place.libraries())
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    let mut emulator = emulator.spawn().context("starting the emulator")?;
    let mut said = String::new();
    for line in BufReader::new(emulator.stdout.take().context("it is piped")?).split(b'\n') {
        let line = String::from_utf8_lossy(&line?).replace('\r', "");
        println!("{line}");
        heard(&line);
        said.extend([&line, "\n"]);
    }
    let status = emulator.wait()?;
    if !status.success() {
        println!("    the guest ended with {status}, {limit:?} after its start at most");
    }
    Ok(said)
}

const MACHINE: &str = "-accel tcg,thread=multi -cpu max -smp 2 -m 1024 -machine q35 -nodefaults -no-reboot -display none -serial stdio";
