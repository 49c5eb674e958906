//! The file into which records are written, past the page cache where the file allows it, because copies into
//! the page cache would cost more than the rest of the trace.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use anyhow::{Context, Result};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;

/// A file or the standard output, and a buffer of records for it.
pub(super) struct Output {
    name: String,
    file: File,
    /// Whether writes bypass the page cache (O_DIRECT), and so must be whole pages in memory and in the file.
    is_direct: bool,
    /// The records, after `start` bytes of padding up to a page boundary. It never grows beyond its first allocation.
    bytes: Vec<u8>,
    start: usize,
}

impl AsFd for Output {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Output {
    /// Creates a file.
    ///
    /// # Errors
    /// The file cannot be created.
    pub(super) fn create(path: &Path) -> Result<Self> {
        let name = path.display().to_string();
        let mut options = File::options();
        options.write(true).create(true).truncate(true);
        // A FIFO without a reader is an error, and not waited for.
        options.custom_flags(libc::O_NONBLOCK);
        let open = || {
            let file = options.open(path)?;
            set_flag(&file, OFlags::NONBLOCK, false)?;
            let is_direct = file.metadata()?.is_file() && set_flag(&file, OFlags::DIRECT, true).is_ok();
            io::Result::Ok((file, is_direct))
        };
        let (file, is_direct) = open().with_context(|| format!("{name} cannot be written"))?;
        Ok(Self::new(name, file, is_direct))
    }

    /// Duplicates the standard output, to bypass the line buffer of the standard library.
    ///
    /// # Errors
    /// The standard output is closed.
    pub(super) fn stdout() -> Result<Self> {
        let file = File::from(io::stdout().as_fd().try_clone_to_owned()?);
        Ok(Self::new("the standard output".to_owned(), file, false))
    }

    fn new(name: String, file: File, is_direct: bool) -> Self {
        let mut bytes: Vec<u8> = Vec::with_capacity(FULL_BYTES + ROOM_BYTES + PAGE_BYTES);
        let start = bytes.as_ptr().align_offset(PAGE_BYTES);
        bytes.resize(start, 0);
        Self {
            name,
            file,
            is_direct,
            bytes,
            start,
        }
    }

    /// The buffer to which the next records are appended: at most [`ROOM_BYTES`] before [`Self::write_if_full`] is called.
    #[inline]
    pub(super) fn room(&mut self) -> &mut Vec<u8> {
        &mut self.bytes
    }

    /// Writes if the buffer is full.
    ///
    /// # Errors
    /// The file cannot be written.
    #[inline]
    pub(super) fn write_if_full(&mut self) -> Result<()> {
        debug_assert!(
            self.bytes.len() <= self.start + FULL_BYTES + ROOM_BYTES,
            "too many records"
        );
        match self.bytes.len() >= self.start + FULL_BYTES {
            true => self.write(FULL_BYTES),
            false => Ok(()),
        }
    }

    /// Writes the buffer, unless writes bypass the page cache: those wait for a full buffer.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(super) fn show(&mut self) -> Result<()> {
        match self.is_direct {
            true => Ok(()),
            false => self.write(self.bytes.len() - self.start),
        }
    }

    /// Writes the rest of the buffer.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(super) fn finish(&mut self) -> Result<()> {
        self.be_buffered()?;
        self.show()
    }

    #[cold]
    fn write(&mut self, len: usize) -> Result<()> {
        let is_refused = |error: &io::Error| Errno::from_io_error(error) == Some(Errno::INVAL);
        let (start, end) = (self.start, self.start + len);
        let mut written = self.file.write_all(&self.bytes[start..end]);
        if self.is_direct && written.as_ref().is_err_and(is_refused) {
            // Some filesystems refuse direct writes only here.
            self.be_buffered()?;
            written = self.file.write_all(&self.bytes[start..end]);
        }
        written.with_context(|| format!("{} cannot be written", self.name))?;
        self.bytes.copy_within(end.., start);
        self.bytes.truncate(self.bytes.len() - len);
        Ok(())
    }

    fn be_buffered(&mut self) -> Result<()> {
        if std::mem::take(&mut self.is_direct) {
            set_flag(&self.file, OFlags::DIRECT, false)
                .with_context(|| format!("{} cannot be written", self.name))?;
        }
        Ok(())
    }
}

fn set_flag(file: &File, flag: OFlags, is_set: bool) -> rustix::io::Result<()> {
    let mut flags = fcntl_getfl(file)?;
    flags.set(flag, is_set);
    fcntl_setfl(file, flags)
}

/// The size of a write: whole pages.
const FULL_BYTES: usize = 1 << 20;
/// Room for the records of one event and the notices before it.
pub(super) const ROOM_BYTES: usize = 16 << 10;
/// The alignment of direct writes in memory and in length; every known filesystem accepts it.
const PAGE_BYTES: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_has_all_that_was_appended_whatever_its_length() {
        let path = std::env::temp_dir().join(format!("blkmq-output-{}", std::process::id()));
        for records in [0, 1, 5461, 5462, 20_000] {
            let mut output = Output::create(&path).expect("a file");
            let mut expected = Vec::new();
            for number in 0..records {
                let record = [number as u8; 48];
                expected.extend_from_slice(&record);
                output.room().extend_from_slice(&record);
                output.write_if_full().expect("it is written");
            }
            output.finish().expect("it is written");
            assert!(
                std::fs::read(&path).expect("it is there") == expected,
                "{records} records"
            );
        }
        std::fs::remove_file(&path).expect("it is there");
    }
}
