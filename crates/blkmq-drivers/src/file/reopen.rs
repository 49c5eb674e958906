//! A disk in a file whose drive was full or gone is opened again: it goes on with the same file, or, where the file's
//! filesystem was mounted again, with the file that is there now. `device` asks for that, and the engine exchanges the two
//! while nothing is under way.

use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::Ordering;

use blkmq_host::device::FileId;
use rustix::fs::SeekFrom;

use super::config::FileConfig;
use super::disk::FileDisk;

impl FileDisk {
    /// Has it served again although data may be lost. Returns the disk that has to take its place, if its filesystem was
    /// mounted again. Blocks: it syncs.
    ///
    /// # Errors
    /// Another file is there, the file is shorter than the disk, or it still cannot be made durable: nothing has changed.
    pub(super) fn reopen(&self) -> io::Result<Option<Self>> {
        match self.look_whether_there()? {
            true => self.go_on().map(|()| None),
            false => self.open_anew().map(Some),
        }
    }

    /// Has a file of an image served again, if it is where it was opened. Returns false if its filesystem was mounted
    /// again. Blocks: it syncs.
    ///
    /// # Errors
    /// As of [`FileDisk::reopen`].
    #[cfg(feature = "qcow2")]
    pub(crate) fn go_on_if_there(&self) -> io::Result<bool> {
        match self.look_whether_there()? {
            true => self.go_on().map(|()| true),
            false => Ok(false),
        }
    }

    /// Returns whether the file is where it was opened; false if its filesystem was mounted again.
    fn look_whether_there(&self) -> io::Result<bool> {
        match std::fs::metadata(&self.path) {
            Ok(there) if Some(FileId::of(&there)) == self.id => Ok(true),
            Ok(there) if self.is_on_another_mount(&there) => Ok(false),
            _ => Err(other(format!(
                "what is at {:?} now is not what was opened: put the file back; if it is another one, remove the disk and add \
                 it, or restart the daemon",
                self.path
            ))),
        }
    }

    /// Goes on with the file.
    fn go_on(&self) -> io::Result<()> {
        let end = rustix::fs::seek(&self.file, SeekFrom::End(0))?;
        let size = self.size().min(self.content_end());
        if end < size {
            return Err(other(format!(
                "it ends at {end}, and the disk at {size}: restore the file first"
            )));
        }
        if !self.read_only {
            self.sync_again(|| Ok(rustix::fs::fdatasync(&self.file)?))?;
        }
        self.lost_from.store(u64::MAX, Ordering::Relaxed);
        self.is_failing.store(false, Ordering::Relaxed);
        self.is_full.store(false, Ordering::Relaxed);
        tracing::info!(source = %self.path.display(), "file {:?}: opened again", self.path);
        Ok(())
    }

    /// Lets flushes succeed again, if the file can be made durable now.
    fn sync_again(&self, sync: impl Fn() -> io::Result<()>) -> io::Result<()> {
        if sync().is_err() {
            // What could not be written before, of which no flush may have told: the kernel reports it once.
            self.note_failed_flush();
        }
        // Before the sync that decides: a flush that fails beside it counts.
        self.flush_failed.store(false, Ordering::Relaxed);
        let synced = sync();
        if synced.is_err() {
            self.note_failed_flush();
        }
        synced.map_err(|error| other(format!("it still cannot be made durable: {error}")))?;
        match self.flush_failed.load(Ordering::Relaxed) {
            true => Err(other("a flush has failed meanwhile: try again".to_owned())),
            false => Ok(()),
        }
    }

    /// Returns whether this file was opened, by another mount of its filesystem: its number and when it was made say so.
    pub(super) fn is_on_another_mount(&self, there: &Metadata) -> bool {
        let inode = self.id.map(|id| id.inode);
        let birth = there.created().ok();
        there.is_file() && Some(there.ino()) == inode && birth.is_some() && birth == self.birth
    }

    /// Opens the file that is there now, in the same way. What the former one had not written is lost.
    fn open_anew(&self) -> io::Result<Self> {
        let config = FileConfig {
            size: Some(self.size().min(self.content_end())),
            create: false,
            ..self.config.clone()
        };
        let new = Self::open(&config).map_err(|error| other(error.to_string()))?;
        let (old, found) = (self.size(), new.size());
        if found < old || (new.block_size, new.is_padded()) != (self.block_size, self.is_padded()) {
            return Err(other(format!(
                "it has {found} bytes in blocks of {} now, and the disk {old} in blocks of {}",
                new.block_size, self.block_size
            )));
        }
        // Growth is noticed by those who ask for it.
        new.size.store(old, Ordering::Relaxed);
        new.note_lost_with(self);
        tracing::info!(
            source = %self.path.display(),
            "file {:?}: opened anew, on another mount of its filesystem",
            self.path
        );
        Ok(new)
    }

    /// Goes on with the counts of the disk that it takes the place of, what that had not written is lost.
    pub(crate) fn note_lost_with(&self, old: &Self) {
        for (new, old) in [
            (&self.losses, &old.losses),
            (&self.seen, &old.seen),
            (&self.errors, &old.errors),
        ] {
            new.store(old.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        self.note_loss();
    }

    fn is_padded(&self) -> bool {
        self.content_end() < u64::MAX
    }
}

fn other(what: String) -> io::Error {
    io::Error::other(what)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;
    use crate::file::Direct;
    use crate::testing::scratch_file;

    #[test]
    fn data_that_a_reopen_finds_lost_is_a_loss_of_which_clients_are_told() {
        let path = scratch_file("reopen", 4096);
        let config = FileConfig {
            path: path.to_path_buf(),
            direct: Direct::Off,
            ..FileConfig::default()
        };
        let disk = FileDisk::open(&config).unwrap();
        let failed = || Err(io::Error::from_raw_os_error(libc::EIO));
        // Syncs, their results last to first, and what the reopen says; and the losses afterwards.
        for (results, is_open, count) in [
            (vec![Ok(()), Ok(())], true, 0),
            (vec![Ok(()), failed()], true, 1),
            (vec![failed(), Ok(())], false, 2),
            (vec![Ok(()), failed()], true, 2),
            (vec![Ok(()), Ok(())], true, 2),
        ] {
            let results = RefCell::new(results);
            let again = disk.sync_again(|| results.borrow_mut().pop().unwrap());
            assert_eq!(again.is_ok(), is_open, "{again:?}");
            assert_eq!(disk.losses().count, count);
            assert_eq!(disk.flush_failed.load(Ordering::Relaxed), !is_open);
        }
    }
}
