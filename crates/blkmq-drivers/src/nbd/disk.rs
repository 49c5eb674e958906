//! A server's export as the engine sees it: its size, its limits, and what must not change when a
//! connection is made again. `device` serves it.

use std::sync::Mutex;

use blkmq_core::limits::Limits;
use blkmq_nbd::client::Agreed;
use blkmq_nbd::codec::{HeaderStyle, TransmissionFlags};

use super::config::NbdConfig;
use super::dial::{DialError, Dialed, dial};
use super::slots::SEGMENTS_MAX;

/// An export of a server, with the connection that was made to learn its properties.
#[derive(Debug)]
pub struct NbdDisk {
    pub(super) config: NbdConfig,
    pub(super) shape: Shape,
    /// For the first hardware context that needs one.
    pub(super) first: Mutex<Option<Dialed>>,
}

/// Why an export cannot be a disk.
#[derive(Debug, thiserror::Error)]
pub enum NbdError {
    /// No connection.
    #[error("nbd {uri}: {error}")]
    Dial {
        /// The URI.
        uri: String,
        /// The obstacle.
        error: DialError,
    },
    /// The export is one that this driver cannot use.
    #[error("nbd {uri}: {problem}")]
    Export {
        /// The URI.
        uri: String,
        /// What is wrong with it.
        problem: String,
    },
}

/// The properties of an export on which the engine relies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    /// Bytes, as reported by the server.
    pub(super) size: u64,
    flags: TransmissionFlags,
    /// The smallest unit, from 512 on, and the preferred one.
    block: u32,
    preferred: u32,
    payload_max: u32,
    /// Whether lengths may be longer than 32 bits.
    has_long_lengths: bool,
}

impl NbdDisk {
    /// Connects and learns the export's properties. Blocks for at most `connect_timeout`.
    ///
    /// # Errors
    /// No connection, or an export without a block, with an invalid block size, or with a size that
    /// is no multiple of it.
    pub fn open(config: &NbdConfig) -> Result<Self, NbdError> {
        let uri = || config.text.clone();
        let dialed = dial(config, false).map_err(|error| NbdError::Dial { uri: uri(), error })?;
        let shape = Shape::of(&dialed.agreed).map_err(|problem| NbdError::Export { uri: uri(), problem })?;
        // Reconnections read the files as well, and do not say it again.
        let tls = config.tls().ok().flatten();
        for problem in tls.iter().flat_map(blkmq_tls::Client::left_out) {
            tracing::warn!(
                source = config.text,
                "nbd {}: an authority is left out: {problem}",
                config.text
            );
        }
        let mut config = config.clone();
        let wanted = config.connections.unwrap_or(2);
        if wanted > 1 && !shape.can(TransmissionFlags::CAN_MULTI_CONN) {
            if config.connections.is_some() {
                tracing::warn!(
                    source = config.text,
                    "nbd {}: connections={wanted} is not possible, one is used: the server does not say that a flush on one \
                     connection covers the writes on others (CAN_MULTI_CONN)",
                    config.text
                );
            }
            config.connections = Some(1);
        }
        Ok(Self {
            config,
            shape,
            first: Mutex::new(Some(dialed)),
        })
    }

    /// Bytes, a multiple of the block size.
    pub fn size(&self) -> u64 {
        self.shape.size
    }

    /// Smallest unit of addresses and lengths, in bytes.
    pub fn block_size(&self) -> u32 {
        self.shape.block
    }

    /// Returns whether writes are refused, by the server or by configuration.
    pub fn is_read_only(&self) -> bool {
        self.config.read_only || self.shape.can(TransmissionFlags::READ_ONLY)
    }

    /// The limits of one request.
    pub(super) fn limits(&self) -> Limits {
        let shape = &self.shape;
        let if_can = |flag, bytes| if shape.can(flag) { bytes } else { 0 };
        let whole_blocks = |bytes: u64| bytes - bytes % u64::from(shape.block);
        let range_max = whole_blocks(if shape.has_long_lengths {
            RANGE_MAX_LONG
        } else {
            RANGE_MAX
        });
        let cache = shape.can(TransmissionFlags::SEND_FLUSH);
        let rotates = shape.can(TransmissionFlags::ROTATIONAL);
        Limits {
            logical_block: shape.block,
            physical_block: shape.preferred,
            transfer_max: whole_blocks(shape.payload_max.min(TRANSFER_MAX).into()) as u32,
            segments_max: SEGMENTS_MAX as u16,
            discard_max: if_can(TransmissionFlags::SEND_TRIM, range_max),
            zeroes_max: if_can(TransmissionFlags::SEND_WRITE_ZEROES, range_max),
            // A server that can report that zeroing would be slow has a fast method, and writes
            // zeroes where that fails.
            zeroes_are_written: !shape.can(TransmissionFlags::SEND_FAST_ZERO),
            cache,
            fua: shape.can(TransmissionFlags::SEND_FUA),
            rotational: self.config.rotational.unwrap_or(rotates),
            ..Limits::default()
        }
    }
}

impl Shape {
    /// Takes the negotiated properties, if the engine can work with them.
    pub(super) fn of(agreed: &Agreed) -> Result<Self, String> {
        let (minimum, preferred, payload_max) = agreed.block_sizes.map_or((1, 4096, PAYLOAD_MAX), |sizes| {
            (sizes.minimum, sizes.preferred, sizes.payload_max)
        });
        let block = minimum.max(512);
        if !block.is_power_of_two() || block > 65536 {
            return Err(format!(
                "the server's smallest block of {minimum} bytes rejected: must be a power of two up to 65536"
            ));
        }
        if payload_max < block {
            return Err(format!(
                "the server's longest payload of {payload_max} bytes rejected: must be at least one block, {block}"
            ));
        }
        if agreed.size_bytes < u64::from(block) || agreed.size_bytes > i64::MAX as u64 {
            return Err(format!(
                "the export's size of {} bytes rejected: must be from one block, {block}, to 2^63 - 1",
                agreed.size_bytes
            ));
        }
        let rest = agreed.size_bytes % u64::from(block);
        if rest > 0 {
            return Err(format!(
                "the export's size of {} bytes rejected: must be a multiple of its smallest block, {block}, or its last {rest} bytes \
                 could not be used; have the server export {} bytes",
                agreed.size_bytes,
                agreed.size_bytes - rest + u64::from(block)
            ));
        }
        let preferred = if preferred.is_power_of_two() {
            preferred
        } else {
            4096
        };
        Ok(Self {
            size: agreed.size_bytes,
            flags: agreed.flags,
            block,
            preferred: preferred.clamp(block, 1 << 30),
            payload_max,
            has_long_lengths: agreed.style == HeaderStyle::Extended,
        })
    }

    /// Returns whether the server offers something.
    pub(super) fn can(&self, flag: TransmissionFlags) -> bool {
        self.flags.contains(flag)
    }

    /// Checks that the properties negotiated now suit the former ones: requests that fitted must
    /// fit.
    ///
    /// # Errors
    /// The property that has changed.
    pub(super) fn check_still(&self, agreed: &Agreed) -> Result<(), String> {
        let now = Self::of(agreed)?;
        if now.size != self.size {
            return Err(format!(
                "the export has {} bytes now, and had {}: restart to take the new size",
                now.size, self.size
            ));
        }
        if now.block > self.block || now.payload_max < self.payload_max.min(TRANSFER_MAX) {
            return Err(format!(
                "the export takes blocks from {} and payloads up to {} bytes now, and took {} and {}",
                now.block, now.payload_max, self.block, self.payload_max
            ));
        }
        let read_only = TransmissionFlags::READ_ONLY;
        if now.can(read_only) && !self.can(read_only) {
            return Err("the export is read-only now, and was not".to_owned());
        }
        if !now.flags.contains(TransmissionFlags(self.flags.0 & RELIED_ON.0)) {
            let (was, is) = (self.flags, now.flags);
            return Err(format!(
                "the export can do less than before: {is:?}, and had {was:?}"
            ));
        }
        if self.has_long_lengths && !now.has_long_lengths {
            return Err("the server has no extended headers any more".to_owned());
        }
        Ok(())
    }
}

/// The capabilities that were reported to the engine.
const RELIED_ON: TransmissionFlags = TransmissionFlags::SEND_FLUSH
    .with(TransmissionFlags::SEND_FUA)
    .with(TransmissionFlags::SEND_TRIM)
    .with(TransmissionFlags::SEND_WRITE_ZEROES)
    .with(TransmissionFlags::SEND_FAST_ZERO)
    .with(TransmissionFlags::CAN_MULTI_CONN);
/// Longest payload that every server accepts which does not name another (protocol, "Size
/// constraints").
const PAYLOAD_MAX: u32 = 32 << 20;
/// Largest read or write, in bytes: larger ones only delay others behind them.
const TRANSFER_MAX: u32 = 1 << 20;
/// Largest discard or zeroing in one request, in bytes, with 32 bits and with 64 bits for the length.
const RANGE_MAX: u64 = 2 << 30;
const RANGE_MAX_LONG: u64 = 1 << 40;

#[cfg(test)]
mod tests {
    use super::*;
    use blkmq_nbd::codec::option_reply::BlockSizes;

    fn agreed() -> Agreed {
        Agreed {
            style: HeaderStyle::Structured,
            size_bytes: 1 << 20,
            flags: TransmissionFlags::HAS_FLAGS
                .with(TransmissionFlags::SEND_FLUSH)
                .with(TransmissionFlags::SEND_TRIM),
            block_sizes: None,
            allocation_context: None,
            instance: None,
        }
    }

    fn disk(agreed: &Agreed) -> NbdDisk {
        NbdDisk {
            config: NbdConfig::new("nbd://x/").unwrap(),
            shape: Shape::of(agreed).unwrap(),
            first: Mutex::new(None),
        }
    }

    #[test]
    fn limits_are_what_the_server_says() {
        let limits = disk(&agreed()).limits();
        assert_eq!(limits.check(), Ok(()));
        assert_eq!((limits.logical_block, limits.physical_block), (512, 4096));
        assert_eq!((limits.discard_max, limits.zeroes_max), (2 << 30, 0));
        assert!(limits.cache && !limits.fua && !limits.rotational);
        assert!(limits.zeroes_are_written, "as far as is known");
        let rich = Agreed {
            style: HeaderStyle::Extended,
            flags: TransmissionFlags(0xffff),
            block_sizes: Some(BlockSizes {
                minimum: 4096,
                preferred: 65536,
                payload_max: 300_000,
            }),
            ..agreed()
        };
        let disk = disk(&rich);
        let limits = disk.limits();
        assert_eq!(limits.check(), Ok(()));
        assert_eq!((limits.logical_block, limits.physical_block), (4096, 65536));
        assert_eq!((limits.transfer_max, limits.discard_max), (73 * 4096, 1 << 40));
        assert!(limits.fua && limits.rotational && disk.is_read_only());
        assert!(!limits.zeroes_are_written);
        assert_eq!(disk.size(), 1 << 20);
    }

    #[test]
    fn export_that_cannot_be_a_disk_is_refused() {
        let sizes = |minimum, payload_max| {
            Some(BlockSizes {
                minimum,
                preferred: 4096,
                payload_max,
            })
        };
        for (size_bytes, block_sizes, words) in [
            (0, None, "size of 0 bytes"),
            (1 << 63, None, "2^63"),
            (
                1000,
                None,
                "size of 1000 bytes rejected: must be a multiple of its smallest block, 512",
            ),
            (
                (1 << 20) + 512,
                sizes(4096, 1 << 20),
                "have the server export 1052672 bytes",
            ),
            (1 << 20, sizes(1 << 17, 1 << 20), "smallest block of 131072"),
            (1 << 20, sizes(768, 1 << 20), "smallest block of 768"),
            (1 << 20, sizes(4096, 512), "longest payload of 512"),
        ] {
            let agreed = Agreed {
                size_bytes,
                block_sizes,
                ..agreed()
            };
            let problem = Shape::of(&agreed).unwrap_err();
            assert!(problem.contains(words), "{problem}");
        }
    }

    #[test]
    fn server_that_comes_back_must_offer_what_it_did() {
        let shape = Shape::of(&agreed()).unwrap();
        assert_eq!(shape.check_still(&agreed()), Ok(()));
        let with = |change: fn(&mut Agreed)| {
            let mut agreed = agreed();
            change(&mut agreed);
            shape.check_still(&agreed).unwrap_err()
        };
        assert!(with(|agreed| agreed.size_bytes = 2 << 20).contains("2097152 bytes now, and had 1048576"));
        let flags = |agreed: &mut Agreed| agreed.flags = TransmissionFlags::HAS_FLAGS;
        assert!(with(flags).contains("less than before"));
        let read_only = |agreed: &mut Agreed| agreed.flags = agreed.flags.with(TransmissionFlags::READ_ONLY);
        assert!(with(read_only).contains("read-only now"));
        let blocks = |agreed: &mut Agreed| {
            agreed.block_sizes = Some(BlockSizes {
                minimum: 4096,
                preferred: 4096,
                payload_max: 1 << 20,
            });
        };
        assert!(with(blocks).contains("blocks from 4096"));
    }
}
