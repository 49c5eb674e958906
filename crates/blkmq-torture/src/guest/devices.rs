//! The devices below and above the daemon: null_blk's disks in memory, with or without a cache that a
//! power cut empties, the device mapper's targets on them, and the kernel's NBD client.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::tools::{run, until_free};

/// A disk in memory, made by null_blk; dropping it frees it.
#[derive(Debug)]
pub(super) struct NullDisk {
    name: &'static str,
    sectors: u64,
}

impl NullDisk {
    /// Makes a disk of zeroes. Its volatile cache has `cache_mib`, and it has none if that is 0.
    pub(super) fn new(name: &'static str, bytes: u64, cache_mib: u64) -> Result<Self> {
        let disk = Self {
            name,
            sectors: bytes / 512,
        };
        fs::create_dir(disk.attribute("")).with_context(|| format!("making null_blk's disk {name}"))?;
        disk.set("size", bytes >> 20)?;
        disk.set("blocksize", 512)?;
        disk.set("memory_backed", 1)?;
        disk.set("cache_size", cache_mib)?;
        disk.set("power", 1)?;
        Ok(disk)
    }

    pub(super) fn path(&self) -> PathBuf {
        Path::new("/dev").join(self.name)
    }

    /// Returns the table of a mapped disk that is this one, wholly.
    pub(super) fn table(&self, target: &str, more: &str) -> String {
        format!("0 {} {target} /dev/{} {more}", self.sectors, self.name)
    }

    /// Cuts the power and gives it back. What is in the cache is gone. Nobody may have the disk open.
    pub(super) fn cut_power(&self) -> Result<()> {
        self.set("power", 0)?;
        self.set("power", 1)
    }

    fn set(&self, attribute: &str, value: u64) -> Result<()> {
        let path = self.attribute(attribute);
        fs::write(&path, value.to_string()).with_context(|| format!("writing {value} to {}", path.display()))
    }

    fn attribute(&self, name: &str) -> PathBuf {
        Path::new("/sys/kernel/config/nullb").join(self.name).join(name)
    }
}

impl Drop for NullDisk {
    fn drop(&mut self) {
        let gone = self.set("power", 0);
        if let Err(error) = gone.and_then(|()| Ok(fs::remove_dir(self.attribute(""))?)) {
            eprintln!("null_blk's disk {} stays: {error:#}", self.name);
        }
    }
}

/// A disk of the device mapper; dropping it removes it.
#[derive(Debug)]
pub(super) struct Mapped(&'static str);

impl Mapped {
    pub(super) fn new(name: &'static str, table: &str) -> Result<Self> {
        run("dmsetup", "create", [name, "--table", table])?;
        Ok(Self(name))
    }

    pub(super) fn path(&self) -> PathBuf {
        Path::new("/dev/mapper").join(self.0)
    }

    /// Takes another table between two requests. Filesystems above it are not asked to write anything
    /// before.
    pub(super) fn switch(&self, table: &str) -> Result<()> {
        run("dmsetup", "load", [self.0, "--table", table])?;
        run("dmsetup", "suspend --nolockfs", [self.0])?;
        run("dmsetup", "resume", [self.0])
    }

    /// Puts a mark into the log of dm-log-writes.
    pub(super) fn mark(&self, name: &str) -> Result<()> {
        run("dmsetup", "message", [self.0, "0", "mark", name])
    }

    /// Removes it when nobody has it open any more.
    pub(super) fn remove(self) -> Result<()> {
        let result = self.release();
        std::mem::forget(self);
        result
    }

    fn release(&self) -> Result<()> {
        until_free(|| run("dmsetup", "remove", [self.0]))
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        if let Err(error) = self.release() {
            eprintln!("{error:#}");
        }
    }
}

/// The kernel's NBD client on a server; dropping it disconnects.
#[derive(Debug)]
pub(super) struct NbdDisk;

impl NbdDisk {
    pub(super) fn connect(socket: &Path, export: &str, connections: usize) -> Result<Self> {
        let words = format!("-N {export} -C {connections} -b 512 -unix");
        run("nbd-client", &words, [socket, Path::new(NBD)])?;
        Ok(Self)
    }

    pub(super) fn path(&self) -> PathBuf {
        PathBuf::from(NBD)
    }
}

impl Drop for NbdDisk {
    fn drop(&mut self) {
        if let Err(error) = run("nbd-client", "-d", [NBD]) {
            eprintln!("{error:#}");
        }
    }
}

const NBD: &str = "/dev/nbd0";
