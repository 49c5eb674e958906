//! The table of mapped disks: it checks whether a disk's members can carry it, derives its size and
//! limits, and finds the drive's disk that has a byte, through all maps. It is made at set-up, then
//! shared by all threads; [`super::stack`] uses it for each bio.
//!
//! A member is a disk of a queue (a *leaf*) or a mapped disk that is in the table already, so there are no
//! loops. However maps are stacked, a bio goes from the top directly to leaves: it is split once, and its
//! limits were joined at set-up.

use std::fmt;

use super::linear::Linear;
use super::map::Map;
use super::member::{Below, Member};
use super::striped::Striped;
use crate::bio::{Bio, Data, Flags, Op, Status};
use crate::ids::DiskId;
use crate::limits::{Limits, lcm};

/// A disk of a queue, as mapped disks see it.
#[derive(Clone, Debug)]
pub struct Leaf {
    /// The queue's index among the queues of a thread.
    pub queue: u16,
    /// The disk's number on the queue.
    pub disk: DiskId,
    /// Bytes.
    pub size: u64,
    /// Whether writes are refused.
    pub read_only: bool,
    /// The drive's limits, with the disk's block size.
    pub limits: Limits,
}

/// The specification of a mapped disk.
#[derive(Clone, Debug)]
pub struct MapSpec {
    /// Its name, for messages.
    pub name: String,
    /// How its bytes lie on the members.
    pub kind: MapKind,
    /// The members, in order.
    pub members: Vec<MemberSpec>,
    /// Smallest unit of addresses, in bytes. Default: the largest of the members'.
    pub block_size: Option<u32>,
    /// Whether writes are refused, though the members may allow them.
    pub read_only: bool,
}

/// How the bytes of a mapped disk lie on its members.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MapKind {
    /// One member after the other.
    Linear,
    /// In chunks, assigned to the members in turn.
    Striped {
        /// Bytes: a power of two from 4 KiB to 1 GiB, at least the block size. Small chunks spread a single
        /// transfer over several members, large ones let it be one request.
        chunk: u64,
    },
}

/// A range of a disk that a mapped disk lies on.
#[derive(Clone, Debug)]
pub struct MemberSpec {
    /// The disk's name, for messages.
    pub name: String,
    /// The disk.
    pub below: Below,
    /// The range's first byte, a multiple of the mapped disk's block size.
    pub start: u64,
    /// Bytes; none for all bytes that follow.
    pub len: Option<u64>,
}

/// A mapped disk.
#[derive(Debug)]
pub struct MappedDisk {
    /// Bytes.
    pub size: u64,
    /// Unused bytes of the members' ranges: less than a block, less than a chunk, or more than the smallest
    /// member of a stripe has.
    pub unused: u64,
    /// Whether writes are refused: as specified, or because a member refuses them.
    pub read_only: bool,
    /// The joined limits of its members.
    pub limits: Limits,
    map: Map,
    /// Number of maps on each other, this one included.
    levels: usize,
    /// The ways from this disk down to leaves.
    ways: Box<[Way]>,
    /// The leaves with a volatile cache, each once.
    pub(super) flushed: Box<[u32]>,
}

/// A way from a mapped disk to a leaf: the member at each level.
#[derive(Clone, Debug)]
struct Way {
    turns: Vec<u16>,
    leaf: u32,
}

/// A run of bytes on a leaf.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The leaf's index in the table's list.
    pub leaf: u32,
    /// First byte on the leaf's disk.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// All mapped disks of an engine.
#[derive(Debug, Default)]
pub struct Table {
    leaves: Vec<Leaf>,
    disks: Vec<MappedDisk>,
}

/// Why a mapped disk cannot be made; the text names the disk, the value and the limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MapError(String);

impl fmt::Display for MapError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for MapError {}

impl MappedDisk {
    /// The leaves that a flush goes to, by their indices in the table's list.
    pub fn flushed(&self) -> &[u32] {
        &self.flushed
    }

    /// All leaves, by their indices in the table's list; some several times.
    pub fn leaves(&self) -> impl Iterator<Item = u32> {
        self.ways.iter().map(|way| way.leaf)
    }
}

impl Table {
    /// A table without mapped disks, over these disks of queues.
    pub fn new(leaves: Vec<Leaf>) -> Self {
        Self {
            leaves,
            disks: Vec::new(),
        }
    }

    /// Adds a mapped disk; its number is [`Below::Mapped`]'s and its [`DiskId`].
    ///
    /// # Errors
    /// If the members cannot carry it.
    pub fn add(&mut self, spec: &MapSpec) -> Result<DiskId, MapError> {
        let disk = self.build(spec).map_err(|problem| {
            let name = &spec.name;
            MapError(format!("disk {name}: {problem}"))
        })?;
        self.disks.push(disk);
        Ok(DiskId(self.disks.len() as u32 - 1))
    }

    /// The mapped disks, in the order of their numbers.
    pub fn disks(&self) -> &[MappedDisk] {
        &self.disks
    }

    /// The disks of queues.
    pub fn leaves(&self) -> &[Leaf] {
        &self.leaves
    }

    /// Finds where a byte of a mapped disk lies, through all maps, and how many bytes follow it there. The
    /// byte must be on the disk.
    #[inline(always)]
    pub fn locate(&self, disk: DiskId, offset: u64) -> Run {
        let found = self.disks[disk.index()].map.locate(offset);
        match found.member.below {
            Below::Leaf(leaf) => Run {
                leaf,
                offset: found.at,
                len: found.run,
            },
            Below::Mapped(below) => self.locate_below(below, found.at, found.run),
        }
    }

    /// Continues with mapped disk `below`, from which at most `len` bytes are needed.
    #[inline(never)]
    fn locate_below(&self, mut below: u32, mut offset: u64, mut len: u64) -> Run {
        loop {
            let found = self.disks[below as usize].map.locate(offset);
            (offset, len) = (found.at, len.min(found.run));
            match found.member.below {
                Below::Leaf(leaf) => return Run { leaf, offset, len },
                Below::Mapped(next) => below = next,
            }
        }
    }

    /// How many runs a range of a mapped disk can have at most, one for each way down to a leaf.
    pub(super) fn ways(&self, disk: DiskId) -> usize {
        self.disks[disk.index()].ways.len()
    }

    /// Returns the share of the bytes from `start` to `end` that lies on the leaf of one way; none if it is empty.
    pub(super) fn share(&self, disk: DiskId, way: usize, start: u64, end: u64) -> Option<Run> {
        let mut at = &self.disks[disk.index()];
        let way = &at.ways[way];
        let (mut start, mut end) = (start, end);
        for &turn in &way.turns {
            let turn = usize::from(turn);
            (start, end) = at.map.share(turn, start, end);
            if let Below::Mapped(below) = at.map.members()[turn].below {
                at = &self.disks[below as usize];
            }
        }
        (start < end).then_some(Run {
            leaf: way.leaf,
            offset: start,
            len: end - start,
        })
    }

    fn build(&self, spec: &MapSpec) -> Result<MappedDisk, String> {
        let count = spec.members.len();
        if !(1..=MEMBERS_MAX).contains(&count) {
            return Err(format!(
                "{count} members rejected: must be from 1 to {MEMBERS_MAX}"
            ));
        }
        let levels = spec.members.iter().map(|member| self.levels(member.below));
        let levels = 1 + levels.max().unwrap_or(0);
        if levels > LEVELS_MAX {
            return Err(format!(
                "{levels} mapped disks on each other rejected: must be at most {LEVELS_MAX}"
            ));
        }
        let limits = self.limits(spec)?;
        let ranges = self.ranges(spec, limits.logical_block)?;
        let whole: u64 = ranges.iter().map(|(_, len)| len).sum();
        let (map, limits) = shape(spec, ranges, limits)?;
        let ways = self.ways_of(&map);
        if ways.len() > WAYS_MAX {
            let count = ways.len();
            return Err(format!(
                "{count} ranges of drives below it rejected: must be at most {WAYS_MAX}; stack fewer mapped disks on each other"
            ));
        }
        let mut flushed: Vec<u32> = ways.iter().map(|way| way.leaf).collect();
        flushed.sort_unstable();
        flushed.dedup();
        flushed.retain(|leaf| self.leaves[*leaf as usize].limits.cache);
        let read_only = |below| match below {
            Below::Leaf(leaf) => self.leaves[leaf as usize].read_only,
            Below::Mapped(disk) => self.disks[disk as usize].read_only,
        };
        Ok(MappedDisk {
            size: map.size(),
            unused: whole - map.size(),
            read_only: spec.read_only || spec.members.iter().any(|member| read_only(member.below)),
            limits,
            map,
            levels,
            ways: ways.into(),
            flushed: flushed.into(),
        })
    }

    /// Joins the limits of the members.
    fn limits(&self, spec: &MapSpec) -> Result<Limits, String> {
        let mut limits = self.limits_of(spec.members[0].below).clone();
        for member in &spec.members[1..] {
            limits = limits.stack(self.limits_of(member.below));
        }
        // Requests to the drives keep their boundaries by themselves; bytes of this disk are not counted from
        // a boundary.
        limits.boundary = 0;
        let least = limits.logical_block;
        let block = spec.block_size.unwrap_or(least);
        if !block.is_power_of_two() || !(least..=65536).contains(&block) {
            return Err(format!(
                "block size {block} rejected: must be a power of two from {least}, which its members have, to 65536"
            ));
        }
        Ok(limits.with_block(block))
    }

    /// Checks the members' ranges and determines their lengths.
    fn ranges(&self, spec: &MapSpec, block: u32) -> Result<Vec<(Member, u64)>, String> {
        let block = u64::from(block);
        let range = |member: &MemberSpec| {
            let (name, start, size) = (&member.name, member.start, self.size_of(member.below));
            if start >= size {
                return Err(format!(
                    "member {name} from byte {start} on rejected: {name} has {size} bytes"
                ));
            }
            let len = member.len.unwrap_or(size - start);
            if len > size - start {
                return Err(format!(
                    "member {name} with {len} bytes from byte {start} on rejected: {name} has {size} bytes"
                ));
            }
            let asked = member.len.unwrap_or(0);
            for (what, value) in [("start", start), ("length", asked)] {
                if !value.is_multiple_of(block) {
                    return Err(format!(
                        "member {name} with {what} {value} rejected: must be a multiple of the block size {block}"
                    ));
                }
            }
            let len = len - len % block;
            if len == 0 {
                return Err(format!(
                    "member {name} without bytes rejected: must have one block of {block} bytes at least"
                ));
            }
            let below = member.below;
            Ok((Member { below, start }, len))
        };
        spec.members.iter().map(range).collect()
    }

    /// Lists the ways through a new map and those below it.
    fn ways_of(&self, map: &Map) -> Vec<Way> {
        let mut ways = Vec::new();
        for (turn, member) in (0..).zip(map.members()) {
            match member.below {
                Below::Leaf(leaf) => ways.push(Way {
                    turns: vec![turn],
                    leaf,
                }),
                Below::Mapped(disk) => ways.extend(self.disks[disk as usize].ways.iter().map(|way| Way {
                    turns: std::iter::once(turn).chain(way.turns.iter().copied()).collect(),
                    leaf: way.leaf,
                })),
            }
        }
        ways
    }

    fn levels(&self, below: Below) -> usize {
        match below {
            Below::Leaf(_) => 0,
            Below::Mapped(disk) => self.disks[disk as usize].levels,
        }
    }

    fn size_of(&self, below: Below) -> u64 {
        match below {
            Below::Leaf(leaf) => self.leaves[leaf as usize].size,
            Below::Mapped(disk) => self.disks[disk as usize].size,
        }
    }

    fn limits_of(&self, below: Below) -> &Limits {
        match below {
            Below::Leaf(leaf) => &self.leaves[leaf as usize].limits,
            Below::Mapped(disk) => &self.disks[disk as usize].limits,
        }
    }
}

impl MappedDisk {
    /// Says whether a bio is a valid read or write of the common kind, which needs no further check;
    /// [`MappedDisk::check_bio`] and the steps after it are for all others.
    #[inline(always)]
    pub(super) fn is_plain(&self, bio: &Bio) -> bool {
        let mask = u64::from(self.limits.logical_block) - 1;
        let is_one_piece = if let Data::Flat(piece) = &bio.data {
            u64::from(piece.len()) == bio.len
        } else {
            !matches!(bio.data, Data::List(_))
        };
        is_one_piece
            && (bio.op == Op::Read || bio.op == Op::Write && !self.read_only)
            && bio.flags == Flags::NONE
            && (bio.offset | bio.len) & mask == 0
            && bio.len > 0
            && bio.offset <= self.size
            && bio.len <= self.size - bio.offset
    }

    /// Checks a submitter's bio.
    ///
    /// # Errors
    /// The status with which it must end.
    #[inline]
    pub(super) fn check_bio(&self, bio: &Bio) -> Result<(), Status> {
        if bio.flags.has(Flags::REST) || !bio.has_whole_data() {
            return Err(Status::Invalid);
        }
        self.limits.check_bio(bio, self.size, self.read_only)
    }
}

/// Assembles the map of the ranges of the members.
fn shape(spec: &MapSpec, ranges: Vec<(Member, u64)>, mut limits: Limits) -> Result<(Map, Limits), String> {
    let too_large = || "its members have more than 2^64 bytes together".to_owned();
    let MapKind::Striped { chunk } = spec.kind else {
        return Ok((Map::Linear(Linear::new(ranges).ok_or_else(too_large)?), limits));
    };
    let least = CHUNK_MIN.max(limits.logical_block.into());
    if !chunk.is_power_of_two() || !(least..=CHUNK_MAX).contains(&chunk) {
        return Err(format!(
            "chunk {chunk} rejected: must be a power of two from {least} to {CHUNK_MAX}"
        ));
    }
    let smallest = ranges.iter().map(|(_, len)| *len).min().unwrap_or(0);
    let len = smallest - smallest % chunk;
    if len == 0 {
        return Err(format!(
            "chunk {chunk} rejected: must be at most {smallest}, the bytes that the smallest member has"
        ));
    }
    let granule = limits.discard_granularity.max(1);
    if !chunk.is_multiple_of(granule.into()) {
        // The chunks of a member's granule lie a row apart here: only whole rows of granules certainly cover one.
        let row = lcm(granule, chunk as u32).saturating_mul(ranges.len() as u32);
        limits.discard_granularity = row;
    }
    let members = ranges.into_iter().map(|(member, _)| member).collect();
    let map = Striped::new(members, len, chunk).ok_or_else(too_large)?;
    Ok((Map::Striped(map), limits))
}

/// Largest number of mapped disks on each other.
pub const LEVELS_MAX: usize = 8;
/// Largest number of members of one mapped disk.
pub const MEMBERS_MAX: usize = 256;
/// Largest number of ways from a mapped disk down to leaves: a flush or a discard of the whole disk may have
/// to examine all.
const WAYS_MAX: usize = 4096;
const CHUNK_MIN: u64 = 4096;
const CHUNK_MAX: u64 = 1 << 30;

#[cfg(test)]
mod tests;
