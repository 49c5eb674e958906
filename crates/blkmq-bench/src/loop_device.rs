//! A file as a block device of the kernel: a loop device with direct I/O, which is removed automatically.
//! Needs root and losetup, and reports what is missing.

use std::fs::File;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::block_device::BlockDevice;

/// A loop device with direct I/O on a file. The kernel removes it when this is dropped and no other
/// process has it open, or when this process ends.
pub(crate) struct LoopDevice {
    block: BlockDevice,
    /// The kernel removes the device at its last close.
    _open: File,
}

impl LoopDevice {
    /// Makes a loop device with sectors of `sector_bytes` bytes on a file.
    ///
    /// # Errors
    /// What is missing: root, losetup, a filesystem with direct I/O.
    pub(crate) fn attach(image: &Path, sector_bytes: u32) -> Result<Self> {
        let (image, sector) = (image.to_string_lossy().into_owned(), sector_bytes.to_string());
        let options = ["-f", "--show", "--direct-io=on", "--sector-size", &sector, &image];
        let device = run("losetup", &options)?;
        let open = File::open(&device).with_context(|| format!("opening {device}"));
        // While the device is open, this makes its last close remove it.
        run("losetup", &["-d", &device])?;
        let made = Self {
            _open: open?,
            block: BlockDevice::new(device),
        };
        ensure!(
            made.block.read("loop/dio")? == "1",
            "{} does no direct I/O: choose a file on another filesystem",
            made.block.path()
        );
        Ok(made)
    }

    /// Itself, without how it was made.
    pub(crate) const fn block(&self) -> &BlockDevice {
        &self.block
    }
}

impl Drop for LoopDevice {
    /// The kernel keeps the scheduler for the next file on the same device: `bfq` would share what others measure there.
    fn drop(&mut self) {
        if let Err(error) = self.block.choose("none") {
            eprintln!("{error:#}");
        }
    }
}

/// Runs a program and returns what it printed.
///
/// # Errors
/// If it cannot be started, or fails; the error contains its message.
pub(crate) fn run(program: &str, args: &[&str]) -> Result<String> {
    let output = Command::new(program)
        .args(args)
        .output()
        .with_context(|| format!("starting {program}"))?;
    if !output.status.success() {
        bail!(
            "{program} {}: {}",
            args.join(" "),
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
