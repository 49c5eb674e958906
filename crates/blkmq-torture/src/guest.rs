//! The proofs in a guest, where the kernel has the devices for them: filesystems on a disk of ours above
//! dm-log-writes ([`log_writes`]), and drives that lose their power or fail for a while, below the file
//! driver ([`power_cuts`], [`failing`]).
//!
//! All of it needs root, configfs, and the modules null_blk, nbd, dm-mod, dm-log-writes and
//! dm-flakey, and changes the machine it runs on: it is for a guest that is thrown away, as `cargo
//! xtask guest` boots one.

mod devices;
pub mod failing;
pub(crate) mod file_load;
pub mod log_writes;
pub mod power_cuts;
pub(crate) mod tools;

use std::path::{Path, PathBuf};

use anyhow::Result;

/// What is to be tried.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The daemon's program.
    pub program: PathBuf,
    /// What chance starts from.
    pub seed: u64,
}

/// A filesystem of the kernel's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filesystem {
    /// ext4, with the journal that `mkfs.ext4` makes.
    Ext4,
    /// XFS.
    Xfs,
}

impl Filesystem {
    /// Both of them.
    pub const ALL: [Self; 2] = [Self::Ext4, Self::Xfs];

    /// Returns its name, as `mount -t` has it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ext4 => "ext4",
            Self::Xfs => "xfs",
        }
    }

    /// Returns the size of a small one: `mkfs.xfs` makes none below 300 MiB.
    pub(crate) fn bytes(self) -> u64 {
        match self {
            Self::Ext4 => 64 << 20,
            Self::Xfs => 304 << 20,
        }
    }

    pub(crate) fn make(self, device: &Path) -> Result<()> {
        match self {
            Self::Ext4 => tools::run(
                "mkfs.ext4",
                "-q -F -b 4096 -E nodiscard,lazy_itable_init=0",
                [device],
            ),
            Self::Xfs => tools::run("mkfs.xfs", "-q -f -K", [device]),
        }
    }

    /// Checks one that is not mounted, and has recovered its journal. Returns what is wrong with it.
    pub(crate) fn check(self, device: &Path) -> Result<(), String> {
        let checked = match self {
            Self::Ext4 => tools::run("e2fsck", "-fn", [device]),
            Self::Xfs => tools::run("xfs_repair", "-n", [device]),
        };
        checked.map_err(|error| format!("{error:#}"))
    }

    pub(crate) fn mount(self, device: &Path, dir: &Path) -> Result<Mounted> {
        std::fs::create_dir_all(dir)?;
        tools::run("mount", &format!("-t {}", self.name()), [device, dir])?;
        Ok(Mounted(dir.to_owned()))
    }
}

/// A mounted filesystem; dropping it unmounts it as well as that goes.
#[derive(Debug)]
pub(crate) struct Mounted(PathBuf);

impl Mounted {
    pub(crate) fn unmount(self) -> Result<()> {
        let result = self.release();
        std::mem::forget(self);
        result
    }

    /// A process that was just killed may hold it for a moment.
    fn release(&self) -> Result<()> {
        tools::until_free(|| tools::run("umount", "", [&self.0]))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if let Err(error) = self.release() {
            eprintln!("{error:#}");
        }
    }
}
