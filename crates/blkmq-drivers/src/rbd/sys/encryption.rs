//! librbd's own encryption of an image, which is loaded when the image has been opened. It came with Ceph 16.

use std::ffi::{c_char, c_int};
use std::io;

use super::super::config::Encryption;
use super::{Handle, RawImage, check};

pub(super) type LoadEncryption = unsafe extern "C" fn(Handle, c_int, *mut EncryptionOptions, usize) -> c_int;

/// `rbd_encryption_luks1_format_options_t`, and the same for LUKS2. What is loaded has its algorithm in its header.
#[repr(C)]
pub(super) struct EncryptionOptions {
    algorithm: c_int,
    passphrase: *const c_char,
    passphrase_len: usize,
}

impl RawImage {
    /// Has librbd decrypt what is read from now on, and encrypt what is written. Call it before any other thread has the
    /// image. May block, also for as long as the key slots take.
    ///
    /// # Errors
    /// Ceph's error; `EPERM` if no key slot opens.
    pub(in crate::rbd) fn load_encryption(&self, format: Encryption, passphrase: &[u8]) -> io::Result<()> {
        let Some(load) = self.library().load_encryption else {
            return Err(io::Error::other("its library is older than Ceph 16"));
        };
        let mut options = EncryptionOptions {
            algorithm: AES256,
            passphrase: passphrase.as_ptr().cast(),
            passphrase_len: passphrase.len(),
        };
        let format = match format {
            Encryption::Luks1 => 0,
            Encryption::Luks2 => 1,
        };
        // SAFETY: the image is open; the options are those of this format, and librbd copies the passphrase, whose length
        // is given.
        let loaded = unsafe {
            load(
                self.handle,
                format,
                &raw mut options,
                size_of::<EncryptionOptions>(),
            )
        };
        check(loaded).map(drop)
    }
}

/// `RBD_ENCRYPTION_ALGORITHM_AES256`.
const AES256: c_int = 1;
