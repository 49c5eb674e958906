//! The bytes in which a front end is handed over to another daemon: the disk as the guest knows it, and the
//! messages that would set the device up again. So another daemon checks them as it checks a front end's.
//! Descriptors are sent beside them, in the order of the messages. They are input from outside: every length
//! has a limit, every fault its own error.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::codec::{BODY_BYTES_MAX, InflightSpec, Message, RegionSpec, RingAddresses};
use super::config_space::QUEUES_MAX;
use super::memory::REGIONS_MAX;
use crate::handover::codec::{DecodeError, Reader, Writer};

/// A front end at rest: no ring is served.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SavedFrontEnd {
    /// The disk's name.
    pub disk: String,
    /// Its size, in bytes.
    pub size: u64,
    /// Its smallest unit, in bytes.
    pub block_size: u32,
    /// Writes are refused.
    pub read_only: bool,
    /// It has had rings served.
    pub is_selected: bool,
    /// The mode of the write cache.
    pub is_writeback: bool,
    /// Nothing is served until a reset.
    pub is_broken: bool,
    /// The device's status.
    pub status: u64,
    /// Rings that are enabled or disabled, without those whose state is the default.
    pub enabled: Vec<(u32, bool)>,
    /// The messages that set the device up.
    pub messages: Vec<Message>,
    /// The received part of a message that has not arrived whole.
    pub received: Vec<u8>,
}

/// A message with its descriptors that sets a device up.
pub(super) type SetUp = (Message, Vec<Arc<OwnedFd>>);

impl SavedFrontEnd {
    /// Decodes it.
    ///
    /// # Errors
    /// The fault in the bytes.
    pub fn parse(bytes: &[u8]) -> Result<Self, DecodeError> {
        Reader::versioned(bytes, ("a front end's version", VERSION), |reader| {
            Ok(Self {
                disk: reader.text("a disk")?,
                size: reader.u64("a disk's size")?,
                block_size: reader.u32("a disk's block size")?,
                read_only: reader.flag("whether a disk is read-only")?,
                is_selected: reader.flag("whether rings are served")?,
                is_writeback: reader.flag("a mode of the cache")?,
                is_broken: reader.flag("whether a device is broken")?,
                status: reader.u64("a status")?,
                enabled: list(
                    reader,
                    "rings that are enabled",
                    usize::from(QUEUES_MAX),
                    |reader| Ok((reader.u32("a ring")?, reader.flag("whether a ring is enabled")?)),
                )?,
                messages: list(reader, "messages", MESSAGES_MAX, message)?,
                received: reader.bytes("part of a message", BODY_BYTES_MAX + 64)?.to_vec(),
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
        for flag in [
            self.read_only,
            self.is_selected,
            self.is_writeback,
            self.is_broken,
        ] {
            writer.u8(flag.into());
        }
        writer.u64(self.status);
        writer.u32(self.enabled.len() as u32);
        for (ring, on) in &self.enabled {
            writer.u32(*ring);
            writer.u8((*on).into());
        }
        writer.u32(self.messages.len() as u32);
        self.messages
            .iter()
            .for_each(|message| write_message(&mut writer, message));
        writer.bytes(&self.received);
        bytes
    }

    /// The number of descriptors of its messages.
    pub fn fds(&self) -> usize {
        self.messages.iter().map(Message::fds).sum()
    }
}

fn list<T>(
    reader: &mut Reader<'_>,
    what: &'static str,
    max: usize,
    read: impl Fn(&mut Reader<'_>) -> Result<T, DecodeError>,
) -> Result<Vec<T>, DecodeError> {
    let count = reader.u32(what)? as usize;
    if count > max {
        return Err(DecodeError::TooLong {
            what,
            length: count as u64,
            max: max as u64,
        });
    }
    (0..count).map(|_| read(reader)).collect()
}

fn message(reader: &mut Reader<'_>) -> Result<Message, DecodeError> {
    Ok(match reader.u8("a message")? {
        0 => Message::SetFeatures(reader.u64("features")?),
        1 => Message::SetProtocolFeatures(reader.u64("protocol features")?),
        2 => Message::AddMemRegion(RegionSpec {
            guest: reader.u64("a region")?,
            bytes: reader.u64("a region")?,
            user: reader.u64("a region")?,
            offset: reader.u64("a region")?,
        }),
        3 => Message::SetInflightFd(InflightSpec {
            bytes: reader.u64("a record of what is in flight")?,
            offset: reader.u64("a record of what is in flight")?,
            queues: reader.u16("a record of what is in flight")?,
            queue_size: reader.u16("a record of what is in flight")?,
        }),
        4 => Message::SetVringNum {
            index: reader.u32("a ring")?,
            size: reader.u32("a ring's size")?,
        },
        5 => Message::SetVringAddr {
            index: reader.u32("a ring")?,
            addresses: RingAddresses {
                desc: reader.u64("a ring's address")?,
                used: reader.u64("a ring's address")?,
                avail: reader.u64("a ring's address")?,
            },
        },
        6 => Message::SetVringBase {
            index: reader.u32("a ring")?,
            base: reader.u32("a ring's base")?,
        },
        7 => Message::SetVringCall {
            index: reader.u32("a ring")?,
            has_fd: true,
        },
        8 => Message::SetVringErr {
            index: reader.u32("a ring")?,
            has_fd: true,
        },
        9 => Message::SetVringKick {
            index: reader.u32("a ring")?,
            has_fd: true,
        },
        10 => Message::SetBackendReqFd,
        other => return Err(DecodeError::Value("a message", other.into())),
    })
}

/// # Panics
/// The message does not set a device up.
fn write_message(writer: &mut Writer<'_>, message: &Message) {
    let mut words = |kind: u8, words: &[u64]| {
        writer.u8(kind);
        words.iter().for_each(|word| writer.u64(*word));
    };
    match message {
        Message::SetFeatures(features) => words(0, &[*features]),
        Message::SetProtocolFeatures(features) => words(1, &[*features]),
        Message::AddMemRegion(region) => words(2, &[region.guest, region.bytes, region.user, region.offset]),
        Message::SetInflightFd(spec) => {
            words(3, &[spec.bytes, spec.offset]);
            writer.u16(spec.queues);
            writer.u16(spec.queue_size);
        }
        Message::SetVringNum { index, size } => write_pair(writer, 4, *index, *size),
        Message::SetVringAddr { index, addresses } => {
            writer.u8(5);
            writer.u32(*index);
            [addresses.desc, addresses.used, addresses.avail]
                .iter()
                .for_each(|address| writer.u64(*address));
        }
        Message::SetVringBase { index, base } => write_pair(writer, 6, *index, *base),
        Message::SetVringCall { index, .. } => write_ring(writer, 7, *index),
        Message::SetVringErr { index, .. } => write_ring(writer, 8, *index),
        Message::SetVringKick { index, .. } => write_ring(writer, 9, *index),
        Message::SetBackendReqFd => words(10, &[]),
        other => unreachable!("{other:?} does not set a device up"),
    }
}

fn write_ring(writer: &mut Writer<'_>, kind: u8, index: u32) {
    writer.u8(kind);
    writer.u32(index);
}

fn write_pair(writer: &mut Writer<'_>, kind: u8, index: u32, value: u32) {
    write_ring(writer, kind, index);
    writer.u32(value);
}

/// The version of these bytes.
const VERSION: u8 = 1;
/// Two of the device, one of each region, the record, the channel, six of each ring.
const MESSAGES_MAX: usize = 4 + REGIONS_MAX + 6 * QUEUES_MAX as usize;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn saved_state_is_read_again_and_refused_wherever_it_is_cut() {
        let index = 3;
        let region = RegionSpec {
            guest: 1,
            bytes: 2,
            user: 3,
            offset: 4,
        };
        let record = InflightSpec {
            bytes: 5,
            offset: 6,
            queues: 7,
            queue_size: 8,
        };
        let addresses = RingAddresses {
            desc: 9,
            used: 10,
            avail: 11,
        };
        let has_fd = true;
        let saved = SavedFrontEnd {
            disk: "vm1".to_owned(),
            size: 1 << 40,
            block_size: 512,
            read_only: false,
            is_selected: true,
            is_writeback: false,
            is_broken: true,
            status: 0x4f,
            enabled: vec![(0, true), (1, false)],
            messages: vec![
                Message::SetFeatures(1 << 30),
                Message::SetProtocolFeatures(1),
                Message::AddMemRegion(region),
                Message::SetInflightFd(record),
                Message::SetVringNum { index, size: 256 },
                Message::SetVringAddr { index, addresses },
                Message::SetVringBase { index, base: 12 },
                Message::SetVringCall { index, has_fd },
                Message::SetVringErr { index, has_fd },
                Message::SetVringKick { index, has_fd },
                Message::SetBackendReqFd,
            ],
            received: vec![1, 2, 3],
        };
        let bytes = saved.bytes();
        assert_eq!(SavedFrontEnd::parse(&bytes).as_ref(), Ok(&saved));
        assert_eq!(saved.fds(), 6);
        for cut in 0..bytes.len() {
            assert!(SavedFrontEnd::parse(&bytes[..cut]).is_err(), "cut at {cut}");
        }
        let long = [&bytes[..], &[0]].concat();
        assert_eq!(SavedFrontEnd::parse(&long), Err(DecodeError::Trailing(1)));
    }
}
