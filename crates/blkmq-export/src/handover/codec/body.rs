//! The values in the body of a message, and in the body of a session: from bytes and to bytes.

use blkmq_host::device::FileId;

use super::{DecodeError, SHORT_BODY_BYTES_MAX, TEXT_BYTES_MAX};

/// Takes values off the front of a body. Each call names its value, for the error.
#[derive(Debug)]
pub struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    /// Reads these bytes.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// Reads all of what a client or device was saved as: a version, and what `read` reads behind it.
    ///
    /// # Errors
    /// If it has another version, is at fault, or goes on.
    pub fn versioned<T>(
        bytes: &'a [u8],
        (what, version): (&'static str, u8),
        read: impl FnOnce(&mut Self) -> Result<T, DecodeError>,
    ) -> Result<T, DecodeError> {
        let mut reader = Self::new(bytes);
        let found = reader.u8(what)?;
        if found != version {
            return Err(DecodeError::Value(what, found.into()));
        }
        let saved = read(&mut reader)?;
        reader.end()?;
        Ok(saved)
    }

    fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], DecodeError> {
        let (head, rest) = self.0.split_first_chunk().ok_or(DecodeError::Truncated(what))?;
        self.0 = rest;
        Ok(*head)
    }

    /// # Errors
    /// If the bytes have ended.
    pub fn u8(&mut self, what: &'static str) -> Result<u8, DecodeError> {
        self.array(what).map(u8::from_le_bytes)
    }

    /// # Errors
    /// If the bytes have ended.
    pub fn u16(&mut self, what: &'static str) -> Result<u16, DecodeError> {
        self.array(what).map(u16::from_le_bytes)
    }

    /// # Errors
    /// If the bytes have ended.
    pub fn u32(&mut self, what: &'static str) -> Result<u32, DecodeError> {
        self.array(what).map(u32::from_le_bytes)
    }

    /// # Errors
    /// If the bytes have ended.
    pub fn u64(&mut self, what: &'static str) -> Result<u64, DecodeError> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A boolean.
    ///
    /// # Errors
    /// The bytes have ended, or the value is neither 0 nor 1.
    pub fn flag(&mut self, what: &'static str) -> Result<bool, DecodeError> {
        match self.u8(what)? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(DecodeError::Value(what, other.into())),
        }
    }

    /// A value that may be missing.
    ///
    /// # Errors
    /// The error of `read`, or the flag before the value is invalid.
    pub fn optional<T>(
        &mut self,
        what: &'static str,
        read: impl FnOnce(&mut Self) -> Result<T, DecodeError>,
    ) -> Result<Option<T>, DecodeError> {
        self.flag(what)?.then(|| read(self)).transpose()
    }

    /// As many bytes as the number before them says.
    ///
    /// # Errors
    /// They are too many, or missing.
    pub fn bytes(&mut self, what: &'static str, max: usize) -> Result<&'a [u8], DecodeError> {
        let length = self.u32(what)? as usize;
        if length > max {
            return Err(too_long(what, length, max));
        }
        let (head, rest) = self
            .0
            .split_at_checked(length)
            .ok_or(DecodeError::Truncated(what))?;
        self.0 = rest;
        Ok(head)
    }

    /// # Errors
    /// The text is too long, missing, or no UTF-8.
    pub fn text(&mut self, what: &'static str) -> Result<String, DecodeError> {
        self.long_text(what, TEXT_BYTES_MAX)
    }

    pub(super) fn long_text(&mut self, what: &'static str, max: usize) -> Result<String, DecodeError> {
        let bytes = self.bytes(what, max)?;
        let text = std::str::from_utf8(bytes).map_err(|_| DecodeError::Text(what))?;
        Ok(text.to_owned())
    }

    pub(super) fn files(&mut self) -> Result<Vec<FileId>, DecodeError> {
        let count = self.u32("a number of files")? as usize;
        if count > FILES_MAX {
            return Err(too_long("a list of files", 16 * count, 16 * FILES_MAX));
        }
        (0..count).map(|_| self.file()).collect()
    }

    pub(super) fn file(&mut self) -> Result<FileId, DecodeError> {
        Ok(FileId {
            device: self.u64("a file's device")?,
            inode: self.u64("a file's inode")?,
        })
    }

    pub(super) fn counts(&mut self) -> Result<Vec<u64>, DecodeError> {
        let count = self.u32("counts")? as usize;
        if count > SHORT_BODY_BYTES_MAX / 8 {
            return Err(too_long("a list of counts", 8 * count, SHORT_BODY_BYTES_MAX));
        }
        (0..count).map(|_| self.u64("counts")).collect()
    }

    /// # Errors
    /// More bytes follow.
    pub fn end(&self) -> Result<(), DecodeError> {
        match self.0.len() {
            0 => Ok(()),
            bytes => Err(DecodeError::Trailing(bytes)),
        }
    }
}

/// Appends values to a body.
#[derive(Debug)]
pub struct Writer<'a>(pub &'a mut Vec<u8>);

impl Writer<'_> {
    /// Appends a byte.
    pub fn u8(&mut self, value: u8) {
        self.0.push(value);
    }

    /// Appends a number.
    pub fn u16(&mut self, value: u16) {
        self.0.extend(value.to_le_bytes());
    }

    /// Appends a number.
    pub fn u32(&mut self, value: u32) {
        self.0.extend(value.to_le_bytes());
    }

    /// Appends a number.
    pub fn u64(&mut self, value: u64) {
        self.0.extend(value.to_le_bytes());
    }

    /// Appends numbers behind their count.
    pub fn counts(&mut self, counts: &[u64]) {
        self.u32(counts.len() as u32);
        counts.iter().for_each(|count| self.u64(*count));
    }

    pub(super) fn files(&mut self, files: &[FileId]) {
        self.u32(files.len() as u32);
        files.iter().for_each(|file| self.file(*file));
    }

    pub(super) fn file(&mut self, file: FileId) {
        self.u64(file.device);
        self.u64(file.inode);
    }

    /// Appends a value that may be missing.
    pub fn optional<T: ?Sized>(&mut self, value: Option<&T>, write: impl FnOnce(&mut Self, &T)) {
        self.u8(value.is_some().into());
        if let Some(value) = value {
            write(self, value);
        }
    }

    /// Appends bytes behind their count.
    pub fn bytes(&mut self, bytes: &[u8]) {
        self.u32(bytes.len() as u32);
        self.0.extend_from_slice(bytes);
    }

    /// Appends a text behind its length. A text that is too long is cut.
    pub fn text(&mut self, text: &str) {
        self.bytes(&text.as_bytes()[..text.floor_char_boundary(TEXT_BYTES_MAX)]);
    }
}

pub(super) fn too_long(what: &'static str, length: usize, max: usize) -> DecodeError {
    DecodeError::TooLong {
        what,
        length: length as u64,
        max: max as u64,
    }
}

/// Most files of one disk.
const FILES_MAX: usize = 1 << 10;
