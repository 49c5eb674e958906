//! The keys of encrypted disks in this process, and on their way to a successor: what keeps them from cores,
//! debuggers and changes. `blkmq_config::luks` has the keys, `upgrade` hands them over.

use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::os::fd::OwnedFd;

use anyhow::{Context, Result};
use blkmq_luks::{Secret, VolumeKey};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::process::{DumpableBehavior, set_dumpable_behavior};

/// Has the kernel write no core of this process, and permit no other process of its user to read its memory.
///
/// # Errors
/// The system refuses.
pub(super) fn leave_no_core() -> Result<()> {
    set_dumpable_behavior(DumpableBehavior::NotDumpable).context("cores of this process cannot be prevented")
}

/// Puts a key into memory that nobody can change, for the process that gets the descriptor.
///
/// # Errors
/// The system's error.
pub(super) fn sealed(key: &VolumeKey) -> io::Result<OwnedFd> {
    let memory = memfd_create("blkmq-key", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    let mut file = File::from(memory);
    file.write_all(key.bytes())?;
    let seals = SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
    fcntl_add_seals(&file, seals)?;
    Ok(file.into())
}

/// Takes a key out of such memory.
///
/// # Errors
/// The system's error, or what is there is no key.
pub(super) fn unsealed(memory: OwnedFd) -> io::Result<VolumeKey> {
    let mut file = File::from(memory);
    // Both processes have one position in it.
    file.seek(SeekFrom::Start(0))?;
    Ok(VolumeKey::from_secret(Secret::read_from(file)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_in_sealed_memory_is_read_and_cannot_be_changed() {
        let key = VolumeKey::from_secret(Secret::take(&mut [7; 64]).expect("locked memory"));
        let memory = sealed(&key).expect("a memory file");
        let mut other = File::from(memory.try_clone().expect("a descriptor"));
        assert!(other.write_all(b"x").is_err());
        assert_eq!(unsealed(memory).expect("a key").bytes(), [7; 64]);
    }
}
