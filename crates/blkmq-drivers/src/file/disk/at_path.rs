//! Whether others find a file that is served at its path. Requests go to the open file whatever becomes of its name, so none
//! of them fails. `device` has it looked at when somebody asks for the state of its disks.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::Ordering;

use blkmq_host::device::{FileId, State};

use super::FileDisk;

impl FileDisk {
    /// Looks what is at its path, and logs a change; where that may take long, as on FUSE and NFS, only if the caller
    /// `may_wait`. What is found while the daemon itself `is_moving` files does not count.
    pub(in crate::file) fn look_at_path(&self, may_wait: bool, is_moving: impl Fn() -> bool) {
        // The names of block devices are made anew by udev, and their drives tell of themselves.
        if self.is_block_device() || self.may_block && !may_wait {
            return;
        }
        // Relaxed: a report, which orders nothing. Of looks at one moment, one logs the change.
        if let Some(found) = self.find_at_path().filter(|_| !is_moving())
            && self.at_path.swap(found, Ordering::Relaxed) != found
        {
            self.log_at_path(found);
        }
    }

    /// What the latest look has found.
    pub(super) fn state_of_path(&self) -> State {
        match self.at_path.load(Ordering::Relaxed) {
            NOTHING => State::Missing,
            ANOTHER => State::Replaced,
            _ => State::Ok,
        }
    }

    /// What is there, if that can be found out.
    fn find_at_path(&self) -> Option<u8> {
        match std::fs::metadata(&self.path) {
            Ok(there) if Some(FileId::of(&there)) == self.id || self.is_on_another_mount(&there) => {
                Some(ITSELF)
            }
            Ok(_) => Some(ANOTHER),
            Err(error) => match error.kind() {
                io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => Some(NOTHING),
                _ => None,
            },
        }
    }

    fn log_at_path(&self, found: u8) {
        let what = match found {
            NOTHING => "nothing is at its path any more",
            ANOTHER => "another file is at its path",
            _ => {
                return tracing::info!(source = %self.path.display(), "file {:?}: is at its path again", self.path);
            }
        };
        let is_deleted = self.file.metadata().is_ok_and(|open| open.nlink() == 0);
        let (whither, then) = match is_deleted {
            true => (
                "a deleted file that nobody can open again",
                "copy it through the daemon (nbdcopy, qemu-img) before that ends, then remove the disk and add it",
            ),
            false => (
                "the one that was opened, which has another name",
                "move that back, or remove the disk and add it to serve what is at the path",
            ),
        };
        tracing::error!(
            source = %self.path.display(),
            "file {:?}: {what}, and what is written goes to {whither}: {then}",
            self.path
        );
    }
}

/// What a look has found at the path.
const ITSELF: u8 = 0;
const NOTHING: u8 = 1;
const ANOTHER: u8 = 2;
