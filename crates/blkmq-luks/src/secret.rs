//! Memory for keys: locked against swapping, left out of core dumps, wiped before it is given back. The
//! other modules keep volume keys, passphrases and key schedules in it.

mod sys;

use std::fmt;
use std::io::{self, Read};

pub use sys::Locked;
use sys::Pages;
#[cfg(target_arch = "x86_64")]
pub(crate) use sys::{clear_registers, wipe_below};
use zeroize::Zeroize;

/// Secret bytes. They are never shown.
pub struct Secret {
    pages: Pages,
    len: usize,
}

impl Secret {
    /// Makes a secret of `len` zero bytes.
    ///
    /// # Errors
    /// The system's error, if there is no memory that can be locked.
    pub fn zeroed(len: usize) -> io::Result<Self> {
        let pages = Pages::new(len)?;
        Ok(Self { pages, len })
    }

    /// Moves bytes into a secret: wipes `bytes`.
    ///
    /// # Errors
    /// As for [`Secret::zeroed`].
    pub fn take(bytes: &mut [u8]) -> io::Result<Self> {
        let made = Self::zeroed(bytes.len());
        let made = made.map(|mut secret| {
            secret.bytes_mut().copy_from_slice(bytes);
            secret
        });
        bytes.zeroize();
        made
    }

    /// Reads to the end, as `cryptsetup --key-file` does: each byte counts, also a newline at the end.
    ///
    /// # Errors
    /// The reader's error, or `InvalidData` for nothing at all or more than [`KEY_BYTES_MAX`] bytes.
    pub fn read_from(mut reader: impl Read) -> io::Result<Self> {
        let mut whole = Self::zeroed(KEY_BYTES_MAX + 1)?;
        let mut len = 0;
        while len <= KEY_BYTES_MAX {
            match reader.read(&mut whole.bytes_mut()[len..]) {
                Ok(0) => break,
                Ok(count) => len += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        let refuse = |problem: String| Err(io::Error::new(io::ErrorKind::InvalidData, problem));
        match len {
            0 => refuse("it is empty".to_owned()),
            1..=KEY_BYTES_MAX => {
                whole.len = len;
                whole.copy()
            }
            _ => refuse(format!("it has more than {KEY_BYTES_MAX} bytes")),
        }
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.pages.bytes()[..self.len]
    }

    /// The bytes, to be written.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.pages.bytes_mut()[..self.len]
    }

    /// Another copy.
    ///
    /// # Errors
    /// As for [`Secret::zeroed`].
    pub fn copy(&self) -> io::Result<Self> {
        let mut copy = Self::zeroed(self.len)?;
        copy.bytes_mut().copy_from_slice(self.bytes());
        Ok(copy)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret { .. }")
    }
}

/// Overwrites what computations with keys have left on this thread's stack and in its registers. Call it when they
/// have returned. It does not reach the caller's own frame: compute in a function that is not inlined
/// (`#[inline(never)]`).
pub fn wipe_stack() {
    sys::wipe_below::<STACK_BYTES>();
    sys::clear_registers();
}

/// The same for what [`crate::Xts`] has left: fewer bytes, in less than a microsecond.
pub fn wipe_stack_of_sectors() {
    sys::wipe_below::<SECTORS_STACK_BYTES>();
    sys::clear_registers();
}

/// Largest passphrase, in bytes: all of it is locked while it is read.
pub const KEY_BYTES_MAX: usize = 64 << 10;
/// More than the deepest call from here uses.
const STACK_BYTES: usize = 128 << 10;
const SECTORS_STACK_BYTES: usize = 32 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_of_a_file_keeps_every_byte() {
        let secret = Secret::read_from(&b"a\0key\n"[..]).unwrap();
        assert_eq!(secret.bytes(), b"a\0key\n");
        assert_eq!(secret.copy().unwrap().bytes(), b"a\0key\n");
        assert_eq!(format!("{secret:?}"), "Secret { .. }");
    }

    #[test]
    fn key_without_bytes_or_with_too_many_is_refused() {
        let error = Secret::read_from(&b""[..]).unwrap_err();
        assert_eq!(error.to_string(), "it is empty");
        let error = Secret::read_from(io::repeat(1)).unwrap_err();
        assert_eq!(error.to_string(), "it has more than 65536 bytes");
    }

    #[test]
    fn bytes_that_are_taken_are_wiped_where_they_were() {
        let mut bytes = *b"secret";
        let secret = Secret::take(&mut bytes).unwrap();
        assert_eq!((secret.bytes(), bytes), (&b"secret"[..], [0; 6]));
    }
}
