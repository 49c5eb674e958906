//! The limits of a drive: what it accepts in one request, and the checks of bios and configurations
//! against that. `split` splits bios to these limits, `merge` stays within them, mappers stack them.

use std::fmt;

use crate::bio::{Bio, Flags, Op, Status};

/// Limits of one request to a drive. Sizes are in bytes unless stated otherwise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Smallest unit of addressing: a power of two from 512 to 65536. Default 512.
    pub logical_block: u32,
    /// Offsets and lengths need not be multiples of a block: where whole ones alone can be written, they are read, changed
    /// and written below. Default false.
    pub any_alignment: bool,
    /// Smallest unit the drive writes without reading first: a power of two, at least `logical_block`. Default 4096.
    pub physical_block: u32,
    /// Requests of this size and alignment cost the drive least, in bytes; 0 if it reports none. It is
    /// reported to clients, who may use it; nothing here does. Default 0.
    pub optimal_io: u32,
    /// Largest read or write. Larger bios are split. Default 1 MiB.
    pub transfer_max: u32,
    /// Largest number of memory segments in one request. Default 128.
    pub segments_max: u16,
    /// No read or write crosses a multiple of this; 0 for no such boundary. Default 0.
    pub boundary: u64,
    /// Largest discard; 0 if the drive cannot discard. Default 0.
    pub discard_max: u64,
    /// Smallest size and alignment of a useful discard. Default 4096.
    pub discard_granularity: u32,
    /// Largest write-zeroes request; 0 if the drive has none. Default 0.
    pub zeroes_max: u64,
    /// The drive zeroes a range by writing zeroes, so zeroing is charged and split like writing. Default
    /// false: the drive only notes that the range is not stored, which costs one request.
    pub zeroes_are_written: bool,
    /// The drive has a volatile write cache, so flushes have an effect. Default false.
    pub cache: bool,
    /// The drive supports FUA; otherwise it is emulated by a flush after the write. Default false.
    pub fua: bool,
    /// A read may end with success and leave its buffers unchanged: the lender of the buffers makes sure that
    /// they contain no data of others. Default false.
    pub leaves_buffers: bool,
    /// The drive has a head that seeks, so distance costs time. Elevators wait for a neighbouring request
    /// there. Default false.
    pub rotational: bool,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            logical_block: 512,
            any_alignment: false,
            physical_block: 4096,
            optimal_io: 0,
            transfer_max: 1 << 20,
            segments_max: 128,
            boundary: 0,
            discard_max: 0,
            discard_granularity: 4096,
            zeroes_max: 0,
            zeroes_are_written: false,
            cache: false,
            fua: false,
            leaves_buffers: false,
            rotational: false,
        }
    }
}

/// A limit that a configuration violates: its name, the value and what is allowed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitError {
    /// The field of [`Limits`].
    pub name: &'static str,
    /// Its value.
    pub value: u64,
    /// What it must be.
    pub allowed: &'static str,
}

impl fmt::Display for LimitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} {} rejected: must be {}",
            self.name, self.value, self.allowed
        )
    }
}

impl std::error::Error for LimitError {}

impl Limits {
    /// Checks the limits against each other.
    ///
    /// # Errors
    /// The first field with an invalid value.
    pub fn check(&self) -> Result<(), LimitError> {
        let err = |name, value, allowed| Err(LimitError { name, value, allowed });
        let block = self.logical_block;
        if !block.is_power_of_two() || !(512..=65536).contains(&block) {
            return err("block size", block.into(), "a power of two from 512 to 65536");
        }
        if !self.physical_block.is_power_of_two() || self.physical_block < block {
            return err(
                "physical block size",
                self.physical_block.into(),
                "a power of two, at least the block size",
            );
        }
        if self.transfer_max < block || !self.transfer_max.is_multiple_of(block) {
            return err(
                "largest transfer",
                self.transfer_max.into(),
                "a multiple of the block size",
            );
        }
        if self.segments_max == 0 {
            return err("most segments", 0, "at least 1");
        }
        if !self.boundary.is_multiple_of(u64::from(block)) {
            return err("boundary", self.boundary, "a multiple of the block size, or 0");
        }
        Ok(())
    }

    /// What both of two drives accept: the limits of a disk that lies on both.
    ///
    /// The smallest maximum, the largest block, the least common multiple of the granularities. The boundary
    /// is the greatest common divisor of both: a request that respects it crosses no boundary of either
    /// drive.
    #[must_use]
    pub fn stack(&self, other: &Self) -> Self {
        let logical_block = self.logical_block.max(other.logical_block);
        let whole = |bytes: u64| bytes - bytes % u64::from(logical_block);
        let honours_fua = |limits: &Self| limits.fua || !limits.cache;
        let transfer_max = self.transfer_max.min(other.transfer_max);
        Self {
            logical_block,
            any_alignment: self.any_alignment && other.any_alignment,
            physical_block: self.physical_block.max(other.physical_block),
            optimal_io: match (self.optimal_io, other.optimal_io) {
                (0, one) | (one, 0) => one,
                (one, two) => lcm(one, two),
            },
            transfer_max: whole(transfer_max.into()) as u32,
            segments_max: self.segments_max.min(other.segments_max),
            boundary: gcd(self.boundary, other.boundary),
            discard_max: whole(self.discard_max.min(other.discard_max)),
            discard_granularity: lcm(self.discard_granularity, other.discard_granularity),
            zeroes_max: whole(self.zeroes_max.min(other.zeroes_max)),
            zeroes_are_written: self.zeroes_are_written || other.zeroes_are_written,
            cache: self.cache || other.cache,
            fua: (self.cache || other.cache) && honours_fua(self) && honours_fua(other),
            leaves_buffers: self.leaves_buffers || other.leaves_buffers,
            rotational: self.rotational || other.rotational,
        }
    }

    /// The same limits with another, larger block size.
    #[must_use]
    pub(crate) fn with_block(self, block: u32) -> Self {
        let whole = self.transfer_max - self.transfer_max % block;
        Self {
            logical_block: block,
            physical_block: self.physical_block.max(block),
            transfer_max: whole.max(block),
            ..self
        }
    }

    /// Returns the longest prefix of a bio of `op` at `offset` that fits one request, in bytes, regardless of
    /// segments. 0 if the drive does not support the operation.
    pub fn length_max(&self, op: Op, offset: u64) -> u64 {
        match op {
            Op::Flush => 0,
            Op::Discard => self.discard_max,
            Op::WriteZeroes => self.zeroes_max,
            Op::Read | Op::Write if self.boundary == 0 => u64::from(self.transfer_max),
            Op::Read | Op::Write => u64::from(self.transfer_max).min(self.boundary - offset % self.boundary),
        }
    }

    /// The same for a bio with these modifiers: zeroing that the drive does by writing is split like a write.
    pub fn length_max_with(&self, op: Op, flags: Flags, offset: u64) -> u64 {
        match op {
            Op::WriteZeroes if self.writes_zeroes(flags) => self.zeroes_max.min(self.transfer_max.into()),
            _ => self.length_max(op, offset),
        }
    }

    /// Says whether the drive zeroes a range with these modifiers by writing: if it has no other way, or the
    /// range must stay allocated. False if zeroing must be fast: then the drive refuses instead of writing.
    pub fn writes_zeroes(&self, flags: Flags) -> bool {
        !flags.has(Flags::FAST_ONLY) && (self.zeroes_are_written || flags.has(Flags::NO_UNMAP))
    }

    /// Checks a submitter's bio against a disk of `size` bytes.
    ///
    /// # Errors
    /// The status with which the bio must end: `ReadOnly`, `NotSupported`, or `Invalid` for a range that is
    /// empty, not a multiple of the block size or beyond the end (`NoSpace` for a write beyond the end).
    #[inline]
    pub fn check_bio(&self, bio: &Bio, size: u64, read_only: bool) -> Result<(), Status> {
        if bio.op == Op::Flush {
            return if bio.len == 0 {
                Ok(())
            } else {
                Err(Status::Invalid)
            };
        }
        let mask = match self.any_alignment {
            true => 0,
            false => u64::from(self.logical_block) - 1,
        };
        if bio.len == 0 || (bio.offset | bio.len) & mask != 0 {
            return Err(Status::Invalid);
        }
        if bio.offset > size || bio.len > size - bio.offset {
            return Err(if bio.op.is_write() {
                Status::NoSpace
            } else {
                Status::Invalid
            });
        }
        if bio.op != Op::Read && read_only {
            return Err(Status::ReadOnly);
        }
        if bio.op == Op::Discard && self.discard_max == 0 || bio.op == Op::WriteZeroes && self.zeroes_max == 0
        {
            return Err(Status::NotSupported);
        }
        if bio.op == Op::Read && bio.flags.has_any(Flags::FUA.with(Flags::PREFLUSH)) {
            return Err(Status::Invalid);
        }
        Ok(())
    }
}

/// The greatest common divisor; of 0 and a number, that number.
const fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

/// The least common multiple, or the larger one if that needs more than 32 bits.
pub(crate) fn lcm(a: u32, b: u32) -> u32 {
    let divisor = gcd(a.into(), b.into()).max(1);
    let multiple = u64::from(a) / divisor * u64::from(b);
    u32::try_from(multiple).unwrap_or(a.max(b))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bio(op: Op, offset: u64, len: u64) -> Bio {
        Bio {
            op,
            offset,
            len,
            ..Bio::default()
        }
    }

    #[test]
    fn range_must_lie_on_the_disk_in_whole_blocks() {
        let limits = Limits::default();
        let check = |op, offset, len| limits.check_bio(&bio(op, offset, len), 8192, false);
        assert_eq!(check(Op::Read, 0, 8192), Ok(()));
        assert_eq!(check(Op::Read, 0, 0), Err(Status::Invalid));
        assert_eq!(check(Op::Read, 1, 512), Err(Status::Invalid));
        assert_eq!(check(Op::Read, 512, 8192), Err(Status::Invalid));
        assert_eq!(check(Op::Read, u64::MAX - 511, 512), Err(Status::Invalid));
        assert_eq!(check(Op::Write, 8192, 512), Err(Status::NoSpace));
        assert_eq!(check(Op::Discard, 0, 512), Err(Status::NotSupported));
    }

    #[test]
    fn read_only_disk_refuses_every_change() {
        let limits = Limits {
            discard_max: 1 << 20,
            zeroes_max: 1 << 20,
            ..Limits::default()
        };
        for op in [Op::Write, Op::Discard, Op::WriteZeroes] {
            assert_eq!(
                limits.check_bio(&bio(op, 0, 512), 8192, true),
                Err(Status::ReadOnly)
            );
        }
        assert_eq!(limits.check_bio(&bio(Op::Flush, 0, 0), 8192, true), Ok(()));
    }

    #[test]
    fn boundary_shortens_what_stands_before_it() {
        let limits = Limits {
            boundary: 65536,
            ..Limits::default()
        };
        assert_eq!(limits.length_max(Op::Read, 0), 65536);
        assert_eq!(limits.length_max(Op::Write, 65536 - 512), 512);
    }

    #[test]
    fn block_size_that_is_no_power_of_two_is_named() {
        let error = Limits {
            logical_block: 768,
            ..Limits::default()
        }
        .check()
        .unwrap_err();
        assert_eq!(
            error.to_string(),
            "block size 768 rejected: must be a power of two from 512 to 65536"
        );
    }

    #[test]
    fn stacked_limits_hold_for_both_drives() {
        let one = Limits {
            transfer_max: 96 << 10,
            boundary: 192 << 10,
            discard_max: 1 << 20,
            discard_granularity: 12 << 10,
            optimal_io: 64 << 10,
            cache: true,
            fua: true,
            ..Limits::default()
        };
        let two = Limits {
            logical_block: 4096,
            segments_max: 16,
            boundary: 128 << 10,
            discard_max: 1 << 30,
            discard_granularity: 8 << 10,
            zeroes_max: 1 << 20,
            ..Limits::default()
        };
        let both = one.stack(&two);
        assert_eq!(both, two.stack(&one));
        assert_eq!(both.check(), Ok(()));
        let expected = Limits {
            logical_block: 4096,
            transfer_max: 96 << 10,
            segments_max: 16,
            boundary: 64 << 10,
            discard_max: 1 << 20,
            discard_granularity: 24 << 10,
            optimal_io: 64 << 10,
            zeroes_max: 0,
            cache: true,
            fua: true,
            ..Limits::default()
        };
        assert_eq!(both, expected);
        let without_fua = Limits {
            fua: false,
            ..one.clone()
        };
        assert!(
            !without_fua.stack(&two).fua,
            "one has a cache that it cannot bypass"
        );
        assert_eq!(one.stack(&one), one);
    }
}
