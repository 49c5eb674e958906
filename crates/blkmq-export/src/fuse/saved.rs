//! The bytes in which a mount is handed over to another daemon: the disk as its users know it, what was
//! negotiated with the kernel, and what an unmount has to do. They are input from outside: every length has a
//! limit, every fault its own error.

use super::mount_table::Entry;
use super::protocol::Agreed;
use crate::handover::codec::{DecodeError, Reader, Writer};

/// A mount at rest: no request is under way.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SavedMount {
    /// The disk's name.
    pub disk: String,
    /// The size that the kernel was told last, in bytes.
    pub size: u64,
    /// The disk's smallest unit, in bytes.
    pub block_size: u32,
    /// Writes are refused.
    pub read_only: bool,
    /// `None` before the kernel's first request.
    pub agreed: Option<Agreed>,
    /// Number of open file descriptions.
    pub opened: u64,
    /// Writes may have been lost without a report through this mount.
    pub has_losses: bool,
    /// The user and the group that own the file.
    pub owner: (u32, u32),
    /// When it was mounted, in seconds since 1970.
    pub since: u64,
    /// The file was made for the mount, and is removed afterwards.
    pub is_made: bool,
    /// The mount's entry in the table of mounts: the filesystem's number and type.
    pub entry: Option<(String, String)>,
}

impl SavedMount {
    /// Decodes it.
    ///
    /// # Errors
    /// The fault in the bytes.
    pub fn parse(bytes: &[u8]) -> Result<Self, DecodeError> {
        Reader::versioned(bytes, ("a mount's version", VERSION), |reader| {
            Ok(Self {
                disk: reader.text("a disk")?,
                size: reader.u64("a disk's size")?,
                block_size: reader.u32("a disk's block size")?,
                read_only: reader.flag("whether a disk is read-only")?,
                agreed: reader.optional("what was agreed on", agreed)?,
                opened: reader.u64("how often a disk is open")?,
                has_losses: reader.flag("whether writes are lost")?,
                owner: (reader.u32("a user")?, reader.u32("a group")?),
                since: reader.u64("a time")?,
                is_made: reader.flag("whether a file was made")?,
                entry: reader.optional("a mount", |reader| {
                    Ok((
                        reader.text("a filesystem's number")?,
                        reader.text("a filesystem's type")?,
                    ))
                })?,
            })
        })
    }

    /// Encodes it.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut writer = Writer(&mut bytes);
        writer.u8(VERSION);
        writer.text(&self.disk);
        writer.u64(self.size);
        writer.u32(self.block_size);
        writer.u8(self.read_only.into());
        writer.optional(self.agreed.as_ref(), |writer, agreed| {
            writer.u32(agreed.minor);
            writer.u32(agreed.data_bytes_max);
        });
        writer.u64(self.opened);
        writer.u8(self.has_losses.into());
        writer.u32(self.owner.0);
        writer.u32(self.owner.1);
        writer.u64(self.since);
        writer.u8(self.is_made.into());
        writer.optional(self.entry.as_ref(), |writer, (device, kind)| {
            writer.text(device);
            writer.text(kind);
        });
        bytes
    }

    /// The mount's entry in the table of mounts.
    pub(super) fn entry(&self) -> Option<Entry> {
        let entry = self.entry.clone();
        entry.map(|(device, kind)| Entry { device, kind })
    }
}

/// A version or a length that is not served here would fail later, so it is refused.
fn agreed(reader: &mut Reader<'_>) -> Result<Agreed, DecodeError> {
    let agreed = Agreed {
        minor: reader.u32("the kernel's version")?,
        data_bytes_max: reader.u32("the longest write")?,
        // A mount with rings is never handed over.
        is_ring: false,
    };
    if !agreed.is_version_served() {
        return Err(DecodeError::Value("the kernel's version", agreed.minor.into()));
    }
    if !agreed.is_length_served() {
        let length = agreed.data_bytes_max.into();
        return Err(DecodeError::Value("the longest write", length));
    }
    Ok(agreed)
}

/// The version of these bytes.
const VERSION: u8 = 1;

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> SavedMount {
        SavedMount {
            disk: "vm1".to_owned(),
            size: 1 << 40,
            block_size: 512,
            read_only: true,
            agreed: Some(Agreed {
                minor: 38,
                data_bytes_max: 1 << 20,
                is_ring: false,
            }),
            opened: 3,
            has_losses: true,
            owner: (1000, 100),
            since: 1 << 33,
            is_made: true,
            entry: Some(("0:55".to_owned(), "fuse.blkmq".to_owned())),
        }
    }

    #[test]
    fn saved_state_is_read_again_and_refused_wherever_it_is_cut() {
        for saved in [example(), SavedMount::default()] {
            let bytes = saved.bytes();
            assert_eq!(SavedMount::parse(&bytes).as_ref(), Ok(&saved));
            for cut in 0..bytes.len() {
                assert!(SavedMount::parse(&bytes[..cut]).is_err(), "cut at {cut}");
            }
            let long = [&bytes[..], &[0]].concat();
            assert_eq!(SavedMount::parse(&long), Err(DecodeError::Trailing(1)));
        }
    }

    #[test]
    fn saved_disk_that_this_daemon_does_not_serve_is_refused() {
        let refused = |minor, data_bytes_max| {
            let agreed = Some(Agreed {
                minor,
                data_bytes_max,
                is_ring: false,
            });
            SavedMount::parse(&SavedMount { agreed, ..example() }.bytes()).unwrap_err()
        };
        let version = |minor| DecodeError::Value("the kernel's version", minor);
        assert_eq!(refused(27, 1 << 20), version(27));
        assert_eq!(refused(99, 1 << 20), version(99));
        let length = DecodeError::Value("the longest write", 1 << 21);
        assert_eq!(refused(38, 1 << 21), length);
        assert_eq!(
            SavedMount::parse(&[2]),
            Err(DecodeError::Value("a mount's version", 2))
        );
    }
}
