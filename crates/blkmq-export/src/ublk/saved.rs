//! The bytes in which a device is handed over to another daemon: the disk as its users know it. They are
//! input from outside: every length has a limit, every fault its own error.

use crate::handover::codec::{DecodeError, Reader, Writer};

/// A device at rest: no request is under way.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SavedDevice {
    /// The disk's name.
    pub disk: String,
    /// Its number.
    pub number: u32,
    /// The size that the kernel was told last, in bytes.
    pub size: u64,
    /// The disk's smallest unit, in bytes.
    pub block_size: u32,
    /// Writes are refused.
    pub read_only: bool,
    /// Writes may have been lost without a report through this device.
    pub has_losses: bool,
}

impl SavedDevice {
    /// Decodes it.
    ///
    /// # Errors
    /// The fault in the bytes.
    pub fn parse(bytes: &[u8]) -> Result<Self, DecodeError> {
        Reader::versioned(bytes, ("a device's version", VERSION), |reader| {
            Ok(Self {
                disk: reader.text("a disk")?,
                number: reader.u32("a device's number")?,
                size: reader.u64("a disk's size")?,
                block_size: reader.u32("a disk's block size")?,
                read_only: reader.flag("whether a disk is read-only")?,
                has_losses: reader.flag("whether writes are lost")?,
            })
        })
    }

    /// Encodes it.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut writer = Writer(&mut bytes);
        writer.u8(VERSION);
        writer.text(&self.disk);
        writer.u32(self.number);
        writer.u64(self.size);
        writer.u32(self.block_size);
        writer.u8(self.read_only.into());
        writer.u8(self.has_losses.into());
        bytes
    }
}

/// The version of these bytes.
const VERSION: u8 = 1;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn saved_state_is_read_again_and_refused_wherever_it_is_cut() {
        let saved = SavedDevice {
            disk: "vm1".to_owned(),
            number: 3,
            size: 1 << 40,
            block_size: 4096,
            read_only: true,
            has_losses: true,
        };
        let bytes = saved.bytes();
        assert_eq!(SavedDevice::parse(&bytes).as_ref(), Ok(&saved));
        for cut in 0..bytes.len() {
            assert!(SavedDevice::parse(&bytes[..cut]).is_err(), "cut at {cut}");
        }
        let long = [&bytes[..], &[0]].concat();
        assert_eq!(SavedDevice::parse(&long), Err(DecodeError::Trailing(1)));
        assert!(SavedDevice::parse(&[2]).is_err());
    }
}
