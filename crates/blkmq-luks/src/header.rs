//! A disk's LUKS header: where its data is, how the data is encrypted, and the key slots. `v1` and `v2` read
//! the two versions; what this crate cannot do is refused by its name.

mod json;
mod v1;
mod v2;

use std::io;

use crate::error::LuksError;
use crate::kdf;
use crate::secret::{KEY_BYTES_MAX, Secret};
use crate::slot::{KeyDigest, Slots, VolumeKey};

/// Bytes of a header, wherever it is.
pub trait ReadAt {
    /// Fills `bytes` from `offset` on.
    ///
    /// # Errors
    /// If there are no such bytes ([`io::ErrorKind::UnexpectedEof`]), or they cannot be read.
    fn read_at(&mut self, offset: u64, bytes: &mut [u8]) -> io::Result<()>;
}

/// A header that has been read and checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// 1 or 2.
    pub version: u8,
    /// The disk's UUID, as it is written.
    pub uuid: String,
    /// Where the data is, and in which sectors.
    pub payload: Payload,
    /// A defect that does not prevent the use, for people.
    pub warning: Option<String>,
    slots: Slots,
    digest: KeyDigest,
}

/// The encrypted data of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Payload {
    /// First byte, on the disk below.
    pub offset: u64,
    /// Bytes; none for all that follow.
    pub size: Option<u64>,
    /// Bytes of a sector: 512, 1024, 2048 or 4096.
    pub sector: u32,
    /// The number of its first sector for the cipher, in units of 512 bytes.
    pub first_sector: u64,
}

impl Header {
    /// Reads a header: the newest intact copy.
    ///
    /// # Errors
    /// There is none, both copies are damaged, or it asks for what is not supported.
    pub fn read(from: &mut dyn ReadAt) -> Result<Self, LuksError> {
        match v2::read(from)? {
            Some(header) => Ok(header),
            None => v1::read(from)?.ok_or(LuksError::NoHeader),
        }
    }

    /// Finds the volume key with a passphrase: opens one slot after the other, without those that cannot be used.
    /// Blocks for as long as the slots' parameters ask, seconds for each by default. `from` is where the header was
    /// read.
    ///
    /// # Errors
    /// No slot opens.
    pub fn unlock(&self, passphrase: &Secret, from: &mut dyn ReadAt) -> Result<VolumeKey, LuksError> {
        // One slot, and the digest of its key, may ask for as much as all of them together.
        self.unlock_within(2 * kdf::COST_MAX, passphrase, from)
    }

    /// The same without the slots behind those that have cost so much: iterations of PBKDF2, or KiB of memory times passes of
    /// Argon2. Each takes about a microsecond.
    ///
    /// # Errors
    /// No slot opens; with those that were not tried.
    pub fn unlock_within(
        &self,
        cost_max: u64,
        passphrase: &Secret,
        from: &mut dyn ReadAt,
    ) -> Result<VolumeKey, LuksError> {
        debug_assert!(
            passphrase.bytes().len() <= KEY_BYTES_MAX,
            "a key of any source is bounded"
        );
        self.slots.open(cost_max, passphrase, &self.digest, from)
    }

    /// Checks a volume key that did not come from a slot.
    ///
    /// # Errors
    /// It is not this disk's.
    pub fn check_key(&self, key: &VolumeKey) -> Result<(), LuksError> {
        match self.digest.accepts(key)? {
            true => Ok(()),
            false => Err(LuksError::WrongKey),
        }
    }
}

impl ReadAt for &[u8] {
    fn read_at(&mut self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        let start = usize::try_from(offset).ok();
        let found = start.and_then(|start| self.get(start..)?.get(..bytes.len()));
        bytes.copy_from_slice(found.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

impl ReadAt for std::fs::File {
    fn read_at(&mut self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        std::os::unix::fs::FileExt::read_exact_at(self, bytes, offset)
    }
}

/// Checks the cipher of sectors or of a slot's area.
fn check_cipher(cipher: &str) -> Result<(), LuksError> {
    match cipher {
        CIPHER => Ok(()),
        _ => Err(LuksError::Unsupported {
            what: format!("the cipher {}", kdf::shown(cipher)),
            allowed: "supported is aes-xts-plain64",
        }),
    }
}

/// Checks how many bytes the key of such a cipher has.
fn check_key_bytes(key_bytes: u64) -> Result<usize, LuksError> {
    match key_bytes {
        32 | 64 => Ok(key_bytes as usize),
        _ => Err(LuksError::Unsupported {
            what: format!("a key of {key_bytes} bytes for aes-xts-plain64"),
            allowed: "supported are 32 and 64 bytes",
        }),
    }
}

/// Checks how a slot splits its key.
fn check_stripes(stripes: u64) -> Result<u32, LuksError> {
    match stripes {
        1..=STRIPES_MAX => Ok(stripes as u32),
        _ => Err(LuksError::damaged(format!("a key slot has {stripes} stripes"))),
    }
}

/// A string that ends at its first zero byte.
fn text(bytes: &[u8]) -> Result<String, LuksError> {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    let text = std::str::from_utf8(&bytes[..end]);
    text.map(str::to_owned)
        .map_err(|_| LuksError::damaged("a name in it is no text"))
}

const CIPHER: &str = "aes-xts-plain64";
/// `cryptsetup` has 4000.
const STRIPES_MAX: u64 = 16_384;
