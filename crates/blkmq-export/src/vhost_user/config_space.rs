//! The features that a disk has for its driver, and its configuration space (virtio 1.2, 5.2.3 and 5.2.4).

use blkmq_host::disk::Disk;

use super::codec::CONFIG_BYTES_MAX;
use super::request::SECTOR;

/// The features that a driver may use.
pub(super) fn features(disk: &Disk) -> u64 {
    let mut features = SIZE_MAX
        | SEG_MAX
        | BLK_SIZE
        | FLUSH
        | TOPOLOGY
        | CONFIG_WCE
        | MQ
        | INDIRECT
        | EVENT_INDEX
        | PROTOCOL_FEATURES
        | VERSION_1
        | RING_PACKED;
    if disk.read_only {
        features |= READ_ONLY;
    }
    if disk.limits.discard_max > 0 && !disk.read_only {
        features |= DISCARD;
    }
    if disk.limits.zeroes_max > 0 && !disk.read_only {
        features |= WRITE_ZEROES;
    }
    features
}

/// The configuration space, for requests of at most `segments_max` data descriptors. Bytes behind its end read as zeroes.
pub(super) fn space(disk: &Disk, is_writeback: bool, segments_max: u32) -> [u8; CONFIG_BYTES_MAX] {
    let mut space = [0; CONFIG_BYTES_MAX];
    let mut put = |at: usize, bytes: &[u8]| space[at..at + bytes.len()].copy_from_slice(bytes);
    let limits = &disk.limits;
    let physical = (limits.physical_block / disk.block_size).max(1);
    let sectors = |bytes: u64| u32::try_from(bytes / SECTOR).unwrap_or(u32::MAX).to_le_bytes();
    put(0, &(disk.current_size() / SECTOR).to_le_bytes());
    put(8, &SEGMENT_BYTES_MAX.to_le_bytes());
    put(12, &segments_max.to_le_bytes());
    put(20, &disk.block_size.to_le_bytes());
    put(24, &[physical.ilog2() as u8]);
    put(26, &(physical as u16).to_le_bytes());
    put(28, &(limits.optimal_io / disk.block_size).to_le_bytes());
    put(WRITEBACK, &[u8::from(is_writeback)]);
    put(34, &QUEUES_MAX.to_le_bytes());
    put(36, &sectors(range_max(disk, limits.discard_max)));
    put(40, &1_u32.to_le_bytes());
    let granularity = u64::from(limits.discard_granularity.max(disk.block_size));
    put(44, &sectors(granularity));
    put(48, &sectors(range_max(disk, limits.zeroes_max)));
    put(52, &1_u32.to_le_bytes());
    put(56, &[1]);
    space
}

/// The engine splits what is too long for the drive; this limit keeps a driver from one request for
/// the whole disk.
fn range_max(disk: &Disk, of_drive: u64) -> u64 {
    let bytes = of_drive.clamp(u64::from(disk.block_size), RANGE_BYTES_MAX);
    bytes - bytes % u64::from(disk.block_size)
}

const SIZE_MAX: u64 = 1 << 1;
const SEG_MAX: u64 = 1 << 2;
const READ_ONLY: u64 = 1 << 5;
const BLK_SIZE: u64 = 1 << 6;
pub(super) const FLUSH: u64 = 1 << 9;
const TOPOLOGY: u64 = 1 << 10;
pub(super) const CONFIG_WCE: u64 = 1 << 11;
const MQ: u64 = 1 << 12;
const DISCARD: u64 = 1 << 13;
const WRITE_ZEROES: u64 = 1 << 14;
pub(super) const INDIRECT: u64 = 1 << 28;
pub(super) const EVENT_INDEX: u64 = 1 << 29;
pub(super) const PROTOCOL_FEATURES: u64 = 1 << 30;
const VERSION_1: u64 = 1 << 32;
pub(super) const RING_PACKED: u64 = 1 << 34;
/// The offset of the mode of the write cache.
pub(super) const WRITEBACK: usize = 32;
/// Virtqueues of a disk.
pub(super) const QUEUES_MAX: u16 = 64;
/// Bytes of one of them.
const SEGMENT_BYTES_MAX: u32 = 4 << 20;
const RANGE_BYTES_MAX: u64 = 1 << 30;
