//! Decides how a file becomes a block device of the kernel: a loop device with direct I/O, which is
//! removed automatically. Needs root and losetup, and reports what is missing.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

/// A loop device with direct I/O on a file. The kernel removes it when this is dropped and no other
/// process has it open, or when this process ends.
pub(crate) struct LoopDevice {
    device: String,
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
        let made = Self { _open: open?, device };
        ensure!(
            made.read("loop/dio")? == "1",
            "{} does no direct I/O: choose a file on another filesystem",
            made.device
        );
        Ok(made)
    }

    /// Its path.
    pub(crate) fn path(&self) -> &str {
        &self.device
    }

    /// Chooses one of the kernel's schedulers for it.
    ///
    /// # Errors
    /// If the kernel does not offer it.
    pub(crate) fn choose(&self, scheduler: &str) -> Result<()> {
        let offered = self.read(SCHEDULER)?;
        ensure!(
            offered.contains(scheduler),
            "the kernel offers no {scheduler} on {}: {offered}; load its module",
            self.device,
        );
        self.write(SCHEDULER, scheduler)
    }

    /// Sets one of its attributes in sysfs, such as `queue/rotational`.
    ///
    /// # Errors
    /// The system's error.
    pub(crate) fn write(&self, attribute: &str, value: &str) -> Result<()> {
        let path = self.attribute(attribute);
        fs::write(&path, value).with_context(|| format!("writing {value} to {}", path.display()))
    }

    fn read(&self, attribute: &str) -> Result<String> {
        let path = self.attribute(attribute);
        let value = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
        Ok(value.trim().to_owned())
    }

    fn attribute(&self, name: &str) -> PathBuf {
        Path::new("/sys/block")
            .join(self.device.trim_start_matches("/dev/"))
            .join(name)
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

const SCHEDULER: &str = "queue/scheduler";
