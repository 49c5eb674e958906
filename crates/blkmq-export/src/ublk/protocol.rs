//! The bytes of ublk (`linux/ublk_cmd.h`): a device's description and parameters, commands to the control
//! device, and the descriptor of a request. Numbers are in the machine's byte order.

use std::fmt;

use blkmq_core::bio::{Flags, Op};
use blkmq_host::disk::Disk;

/// Bytes of a device's description.
pub const INFO_BYTES: usize = 64;
/// Bytes of its parameters that are used here.
pub const PARAMETERS_BYTES: usize = 60;
/// Bytes of a request's descriptor.
pub const DESCRIPTOR_BYTES: usize = 24;
/// Most descriptors of a queue; also the distance between those of two queues.
pub const DEPTH_MAX: usize = 4096;
/// The longest read or write, in bytes.
pub const DATA_BYTES_MAX: u32 = 128 << 10;
/// Device numbers are below this.
pub const NUMBERS: u32 = 1 << 20;
/// Largest block of a device, in bytes: a page.
pub const BLOCK_BYTES_MAX: u32 = 4096;

/// The description of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceInfo {
    /// The number of its queues.
    pub queues: u16,
    /// Most requests under way in each.
    pub depth: u16,
    /// One of [`STOPPED`], [`LIVE`] and [`QUIESCED`], or another state of the kernel.
    pub state: u16,
    /// The longest read or write, in bytes.
    pub data_bytes_max: u32,
    /// Its number.
    pub number: u32,
    /// The process that serves it, or served it last; -1 if none.
    pub process: i32,
    /// Its features, as the kernel numbers them.
    pub features: u64,
    /// A value that the kernel only stores: [`identity`] of its disk.
    pub identity: u64,
}

impl DeviceInfo {
    /// Decodes it.
    pub fn parse(bytes: &[u8; INFO_BYTES]) -> Self {
        Self {
            queues: u16::from_ne_bytes(part(bytes, 0)),
            depth: u16::from_ne_bytes(part(bytes, 2)),
            state: u16::from_ne_bytes(part(bytes, 4)),
            data_bytes_max: u32::from_ne_bytes(part(bytes, 8)),
            number: u32::from_ne_bytes(part(bytes, 12)),
            process: i32::from_ne_bytes(part(bytes, 16)),
            features: u64::from_ne_bytes(part(bytes, 24)),
            identity: u64::from_ne_bytes(part(bytes, 32)),
        }
    }

    /// Encodes it.
    pub fn bytes(&self) -> [u8; INFO_BYTES] {
        let mut bytes = [0; INFO_BYTES];
        put(&mut bytes, 0, &self.queues.to_ne_bytes());
        put(&mut bytes, 2, &self.depth.to_ne_bytes());
        put(&mut bytes, 4, &self.state.to_ne_bytes());
        put(&mut bytes, 8, &self.data_bytes_max.to_ne_bytes());
        put(&mut bytes, 12, &self.number.to_ne_bytes());
        put(&mut bytes, 16, &self.process.to_ne_bytes());
        put(&mut bytes, 24, &self.features.to_ne_bytes());
        put(&mut bytes, 32, &self.identity.to_ne_bytes());
        bytes
    }

    /// Returns whether it has a feature.
    pub fn has(&self, feature: u64) -> bool {
        self.features & feature == feature
    }

    /// Returns whether the device can be served here: a kernel may have granted less than was asked
    /// for.
    pub fn is_served(&self) -> bool {
        let depth = usize::from(self.depth);
        self.queues > 0
            && (1..=DEPTH_MAX).contains(&depth)
            && (BLOCK_BYTES_MAX..=DATA_BYTES_MAX).contains(&self.data_bytes_max)
    }
}

/// The parameters that describe a device's disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Parameters {
    /// Bytes, a multiple of [`SECTOR`].
    pub size: u64,
    /// The smallest unit of its addresses and lengths, in bytes; a power of two.
    pub block_size: u32,
    /// The physical block, which is written whole, in bytes; a power of two.
    pub physical_block: u32,
    /// The I/O size that costs the drive least, in bytes; 0 if unknown.
    pub optimal_io: u32,
    /// The longest read or write, in bytes.
    pub data_bytes_max: u32,
    /// Writes are refused.
    pub read_only: bool,
    /// The longest discard, in bytes; 0 if there is none.
    pub discard_max: u64,
    /// The unit of discards, in bytes.
    pub discard_granularity: u32,
    /// The longest zeroing, in bytes; 0 if there is none.
    pub zeroes_max: u64,
}

impl Parameters {
    /// The parameters of a disk.
    pub fn of(disk: &Disk, data_bytes_max: u32) -> Self {
        let limits = &disk.limits;
        let block = u64::from(disk.block_size);
        let max = |of_drive: u64| match disk.read_only || of_drive == 0 {
            true => 0,
            false => of_drive.clamp(block, RANGE_BYTES_MAX) / block * block,
        };
        Self {
            size: disk.current_size(),
            block_size: disk.block_size,
            physical_block: limits.physical_block.clamp(disk.block_size, BLOCK_BYTES_MAX),
            optimal_io: limits.optimal_io,
            data_bytes_max,
            read_only: disk.read_only,
            discard_max: max(limits.discard_max),
            discard_granularity: limits.discard_granularity.max(disk.block_size),
            zeroes_max: max(limits.zeroes_max),
        }
    }

    /// Encodes them.
    pub fn bytes(&self) -> [u8; PARAMETERS_BYTES] {
        let mut bytes = [0; PARAMETERS_BYTES];
        let attributes = VOLATILE_CACHE | FUA_IS_KNOWN | if self.read_only { READ_ONLY } else { 0 };
        let shift = |bytes: u32| bytes.max(1).ilog2() as u8;
        let physical = shift(self.physical_block);
        let optimal = shift(self.optimal_io).max(physical);
        let shifts = [shift(self.block_size), physical, optimal, physical];
        let sectors = |bytes: u64| u32::try_from(bytes / SECTOR).unwrap_or(u32::MAX).to_ne_bytes();
        put(&mut bytes, 0, &(PARAMETERS_BYTES as u32).to_ne_bytes());
        put(&mut bytes, 4, &(BASIC | DISCARD).to_ne_bytes());
        put(&mut bytes, 8, &attributes.to_ne_bytes());
        put(&mut bytes, 12, &shifts);
        put(&mut bytes, 16, &sectors(self.data_bytes_max.into()));
        put(&mut bytes, 24, &(self.size / SECTOR).to_ne_bytes());
        put(&mut bytes, 44, &self.discard_granularity.to_ne_bytes());
        put(&mut bytes, 48, &sectors(self.discard_max));
        put(&mut bytes, 52, &sectors(self.zeroes_max));
        put(&mut bytes, 56, &1_u16.to_ne_bytes());
        bytes
    }

    /// Decodes what users of a device rely on; the rest is as by default.
    pub fn parse(bytes: &[u8; PARAMETERS_BYTES]) -> Self {
        let attributes = u32::from_ne_bytes(part(bytes, 8));
        let [shift] = part(bytes, 12);
        Self {
            size: u64::from_ne_bytes(part(bytes, 24)).saturating_mul(SECTOR),
            block_size: 1_u32.checked_shl(u32::from(shift)).unwrap_or(0),
            read_only: attributes & READ_ONLY != 0,
            ..Self::default()
        }
    }
}

/// What a request asks of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The operation.
    pub op: Op,
    /// Its modifiers.
    pub flags: Flags,
    /// Where it begins, in bytes.
    pub offset: u64,
    /// Its length in bytes; 0 for a flush.
    pub len: u64,
}

/// The limits of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Bytes of the disk.
    pub size: u64,
    /// The unit of addresses and lengths, in bytes.
    pub block_size: u32,
    /// Writes are refused.
    pub read_only: bool,
    /// The longest read or write, in bytes.
    pub data_bytes_max: u32,
    /// Where the data of this request lies.
    pub memory: u64,
}

/// Why a request is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// An unknown operation.
    Unsupported(u8),
    /// Not a range of whole blocks of the disk: start and length, in sectors.
    Range(u64, u32),
    /// Longer than there is memory for: its length in bytes.
    TooLong(u64),
    /// The disk is read-only.
    ReadOnly,
    /// Its data is not in the agreed memory.
    Elsewhere(u64),
}

impl Refused {
    /// The errno of Linux.
    pub fn errno(self) -> i32 {
        match self {
            Self::Unsupported(_) => libc::EOPNOTSUPP,
            Self::ReadOnly => libc::EROFS,
            _ => libc::EIO,
        }
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unsupported(op) => write!(f, "operation {op} is not known"),
            Self::Range(start, count) => write!(f, "{count} sectors at {start} are no blocks of the disk"),
            Self::TooLong(bytes) => write!(f, "{bytes} bytes are more than were agreed on"),
            Self::ReadOnly => f.write_str("the disk is read-only"),
            Self::Elsewhere(memory) => write!(f, "data at {memory:#x} is not where it was agreed to be"),
        }
    }
}

impl Request {
    /// Decodes a descriptor.
    ///
    /// # Errors
    /// Why the request is refused.
    pub fn parse(bytes: &[u8; DESCRIPTOR_BYTES], shape: &Shape) -> Result<Self, Refused> {
        let word = u32::from_ne_bytes(part(bytes, 0));
        let sectors = u32::from_ne_bytes(part(bytes, 4));
        let start = u64::from_ne_bytes(part(bytes, 8));
        let memory = u64::from_ne_bytes(part(bytes, 16));
        let op = match word as u8 {
            OP_READ => Op::Read,
            OP_WRITE => Op::Write,
            OP_FLUSH => return Ok(Self::flush()),
            OP_DISCARD => Op::Discard,
            OP_WRITE_ZEROES => Op::WriteZeroes,
            other => return Err(Refused::Unsupported(other)),
        };
        let len = u64::from(sectors) * SECTOR;
        let is_block = |bytes: u64| bytes.is_multiple_of(shape.block_size.into());
        let offset = start.checked_mul(SECTOR).filter(|offset| {
            let end = offset.checked_add(len);
            len > 0 && is_block(*offset) && is_block(len) && end.is_some_and(|end| end <= shape.size)
        });
        let offset = offset.ok_or(Refused::Range(start, sectors))?;
        if op.is_write() && shape.read_only {
            return Err(Refused::ReadOnly);
        }
        if op.has_data() && len > shape.data_bytes_max.into() {
            return Err(Refused::TooLong(len));
        }
        if op.has_data() && memory != shape.memory {
            return Err(Refused::Elsewhere(memory));
        }
        let flags = flags(op, word);
        Ok(Self {
            op,
            flags,
            offset,
            len,
        })
    }

    fn flush() -> Self {
        Self {
            op: Op::Flush,
            flags: Flags::NONE,
            offset: 0,
            len: 0,
        }
    }
}

/// The other flags are hints of priority or purpose.
fn flags(op: Op, word: u32) -> Flags {
    let durable = match op {
        Op::Write | Op::WriteZeroes if word & FUA != 0 => Flags::FUA,
        _ => Flags::NONE,
    };
    match op {
        Op::WriteZeroes if word & NO_UNMAP != 0 => durable.with(Flags::NO_UNMAP),
        _ => durable,
    }
}

/// Bytes of a command to the control device.
pub(super) const CONTROL_BYTES: usize = 32;

/// A command to the control device, about the device of this number, with a value and memory whose
/// first bytes are its path.
pub(super) fn control(number: u32, value: u64, memory: (u64, u16), path_bytes: u16) -> [u8; CONTROL_BYTES] {
    let mut bytes = [0; CONTROL_BYTES];
    put(&mut bytes, 0, &number.to_ne_bytes());
    // No queue.
    put(&mut bytes, 4, &u16::MAX.to_ne_bytes());
    put(&mut bytes, 6, &memory.1.to_ne_bytes());
    put(&mut bytes, 8, &memory.0.to_ne_bytes());
    put(&mut bytes, 16, &value.to_ne_bytes());
    put(&mut bytes, 24, &path_bytes.to_ne_bytes());
    bytes
}

/// Bytes of a command for one request of a queue.
pub(super) const REQUEST_BYTES: usize = 16;

/// A command that lends memory for a request, with the result of the last one.
pub(super) fn request(queue: u16, tag: u16, result: i32, memory: u64) -> [u8; REQUEST_BYTES] {
    let mut bytes = [0; REQUEST_BYTES];
    put(&mut bytes, 0, &queue.to_ne_bytes());
    put(&mut bytes, 2, &tag.to_ne_bytes());
    put(&mut bytes, 4, &result.to_ne_bytes());
    put(&mut bytes, 8, &memory.to_ne_bytes());
    bytes
}

/// Identifies the disk of a device (FNV-1a of its name); the kernel stores it for the daemon.
pub fn identity(disk: &str) -> u64 {
    let bytes = b"blkmq ".iter().chain(disk.as_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

fn part<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let part = bytes[at..].first_chunk();
    *part.expect("all places are within what they are read from")
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes[at..at + value.len()].copy_from_slice(value);
}

/// The ioctl number of a command, from its direction and size.
const fn ioctl(direction: u32, bytes: usize, number: u32) -> u32 {
    direction << 30 | (bytes as u32) << 16 | (b'u' as u32) << 8 | number
}

const READS: u32 = 2;
const READS_AND_WRITES: u32 = 3;
pub(super) const ADD: u32 = ioctl(READS_AND_WRITES, CONTROL_BYTES, 0x04);
pub(super) const DELETE: u32 = ioctl(READS_AND_WRITES, CONTROL_BYTES, 0x05);
pub(super) const START: u32 = ioctl(READS_AND_WRITES, CONTROL_BYTES, 0x06);
pub(super) const STOP: u32 = ioctl(READS_AND_WRITES, CONTROL_BYTES, 0x07);
pub(super) const SET_PARAMETERS: u32 = ioctl(READS_AND_WRITES, CONTROL_BYTES, 0x08);
pub(super) const GET_PARAMETERS: u32 = ioctl(READS, CONTROL_BYTES, 0x09);
pub(super) const START_RECOVERY: u32 = ioctl(READS_AND_WRITES, CONTROL_BYTES, 0x10);
pub(super) const END_RECOVERY: u32 = ioctl(READS_AND_WRITES, CONTROL_BYTES, 0x11);
pub(super) const GET_INFO: u32 = ioctl(READS, CONTROL_BYTES, 0x12);
pub(super) const DELETE_LATER: u32 = ioctl(READS, CONTROL_BYTES, 0x14);
pub(super) const SET_SIZE: u32 = ioctl(READS_AND_WRITES, CONTROL_BYTES, 0x15);
pub(super) const FETCH: u32 = ioctl(READS_AND_WRITES, REQUEST_BYTES, 0x20);
pub(super) const COMMIT_AND_FETCH: u32 = ioctl(READS_AND_WRITES, REQUEST_BYTES, 0x21);

/// It is stopped, or was not started.
pub const STOPPED: u16 = 0;
/// It is served, or its daemon is ending.
pub const LIVE: u16 = 1;
/// Its daemon has ended, and requests wait for another one.
pub const QUIESCED: u16 = 2;

/// Requests wait for another daemon when this one ends.
pub const RECOVERY: u64 = 1 << 3;
/// Requests that the former daemon had begun are sent again.
pub const REISSUE: u64 = 1 << 4;
/// An unprivileged user serves it.
pub const UNPRIVILEGED: u64 = 1 << 5;
/// Commands have the numbers of `ioctl`.
pub const IOCTL_NUMBERS: u64 = 1 << 6;
/// Its size can change.
pub const RESIZABLE: u64 = 1 << 10;

const OP_READ: u8 = 0;
const OP_WRITE: u8 = 1;
const OP_FLUSH: u8 = 2;
const OP_DISCARD: u8 = 3;
const OP_WRITE_ZEROES: u8 = 5;
const FUA: u32 = 1 << 13;
const NO_UNMAP: u32 = 1 << 15;
const BASIC: u32 = 1;
const DISCARD: u32 = 1 << 1;
const READ_ONLY: u32 = 1;
const VOLATILE_CACHE: u32 = 1 << 2;
const FUA_IS_KNOWN: u32 = 1 << 3;
/// Bytes of the unit of ranges, whatever the block size.
pub const SECTOR: u64 = 512;
/// The engine splits what is too long for the drive; this limit keeps the kernel from one request
/// for the whole disk.
const RANGE_BYTES_MAX: u64 = 1 << 30;

#[cfg(test)]
mod tests;
