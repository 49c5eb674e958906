//! The mapped disks of a history, and where their bytes must be: computed block by block from the
//! specification, differently from the core's tables, so that the oracle can compare the two. `world`
//! makes the core's tables from the same specification.

use std::collections::BTreeSet;

use blkmq_core::ids::DiskId;
use blkmq_core::mapper::Below;
use blkmq_core::mapper::table::{Leaf, MapKind, MapSpec, MemberSpec, Table};

use crate::oracle::DiskRules;
use crate::setup::{Sabotage, Setup};

/// The mapped disks of a history, used by its clients.
#[derive(Clone, Debug)]
pub struct Mapped {
    /// In the order of their numbers. Leaves are numbered through all disks of the first drive,
    /// then those of the next. Each states the one block size that all have.
    pub disks: Vec<MapSpec>,
    /// How many bios each reactor may have under way that were passed whole to a member.
    pub passed_max: u32,
    /// How many bios each reactor may have under way in parts.
    pub divided_max: u32,
}

/// Where the bytes of a disk lie.
#[derive(Clone, Debug, Default)]
pub struct Layout {
    /// The drives' blocks, in the disk's order.
    pub blocks: Vec<u32>,
    /// The indices of the blocks at which a new part of a bio begins.
    pub cuts: BTreeSet<usize>,
    /// The drives' disks below it, by their first blocks. They include disks of a member that are
    /// outside this disk's part of the member, because a flush goes to the whole member.
    pub leaves: BTreeSet<u32>,
}

impl Layout {
    /// A disk that lies on contiguous blocks.
    pub fn plain(blocks: std::ops::Range<u32>) -> Self {
        Self {
            leaves: BTreeSet::from([blocks.start]),
            blocks: blocks.collect(),
            cuts: BTreeSet::new(),
        }
    }

    /// Adds a piece of another disk.
    fn append(&mut self, from: &Self, piece: std::ops::Range<usize>) {
        let offset = self.blocks.len();
        self.cuts.insert(offset);
        let cuts = from.cuts.range(piece.clone());
        self.cuts.extend(cuts.map(|cut| offset + cut - piece.start));
        self.blocks.extend_from_slice(&from.blocks[piece]);
        self.leaves.extend(&from.leaves);
    }
}

impl Mapped {
    /// Bytes of a block of these disks.
    pub fn block(&self) -> u32 {
        self.disks[0].block_size.expect("it is said")
    }

    /// Returns where each mapped disk lies; `leaves` are the layouts of the drives' disks, in
    /// blocks of `unit` bytes.
    fn layouts(&self, leaves: &[Layout], unit: u64) -> Vec<Layout> {
        let mut layouts: Vec<Layout> = Vec::new();
        for spec in &self.disks {
            let pieces: Vec<_> = spec
                .members
                .iter()
                .map(|member| {
                    let below = match member.below {
                        Below::Leaf(leaf) => &leaves[leaf as usize],
                        Below::Mapped(disk) => &layouts[disk as usize],
                    };
                    (below, piece(member, below, u64::from(self.block()) / unit, unit))
                })
                .collect();
            layouts.push(join(spec.kind, &pieces, unit));
        }
        layouts
    }
}

/// The blocks of the lower disk that a member uses, in whole blocks of the mapped disk.
fn piece(member: &MemberSpec, below: &Layout, block: u64, unit: u64) -> std::ops::Range<usize> {
    let start = member.start / unit;
    let rest = below.blocks.len() as u64 - start;
    let len = member.len.map_or(rest, |len| len / unit);
    start as usize..(start + len - len % block) as usize
}

fn join(kind: MapKind, pieces: &[(&Layout, std::ops::Range<usize>)], unit: u64) -> Layout {
    let mut layout = Layout::default();
    match kind {
        MapKind::Linear => pieces
            .iter()
            .for_each(|(below, piece)| layout.append(below, piece.clone())),
        MapKind::Striped { chunk } => {
            let chunk = (chunk / unit) as usize;
            let rows = pieces.iter().map(|(_, piece)| piece.len() / chunk).min();
            for row in 0..rows.unwrap_or(0) {
                for (below, piece) in pieces {
                    let first = piece.start + row * chunk;
                    layout.append(below, first..first + chunk);
                }
            }
        }
    }
    layout
}

/// Returns the oracle's rules for the disks that clients use.
pub(crate) fn disk_rules(setup: &Setup) -> Vec<DiskRules> {
    let plain = |(number, (limits, _))| {
        let disks = setup.places(number).into_iter().zip(&setup.read_only);
        disks.map(move |(place, &read_only)| DiskRules {
            limits: blkmq_core::limits::Limits::clone(limits),
            read_only,
            layout: Layout::plain(place.first..place.first + place.blocks),
        })
    };
    let plain: Vec<DiskRules> = setup.drives().enumerate().flat_map(plain).collect();
    let Some(mapped) = &setup.mapped else { return plain };
    let leaves: Vec<Layout> = plain.into_iter().map(|disk| disk.layout).collect();
    let layouts = mapped.layouts(&leaves, setup.block().into());
    let table = table(setup, None);
    let disks = layouts.into_iter().zip(table.disks());
    disks
        .map(|(layout, disk)| DiskRules {
            limits: disk.limits.clone(),
            read_only: disk.read_only,
            layout,
        })
        .collect()
}

/// Makes the core's tables, with `sabotage` from a wrong description.
pub(crate) fn table(setup: &Setup, sabotage: Option<Sabotage>) -> Table {
    let block = u64::from(setup.block());
    let leaf = |queue: usize, disk: usize, limits: &blkmq_core::limits::Limits| {
        let mut limits = limits.clone();
        // The core sends no flush to a drive without a cache.
        limits.cache &= sabotage != Some(Sabotage::FlushLeavesOutMember) || queue > 0;
        Leaf {
            queue: queue as u16,
            disk: DiskId(disk as u32),
            size: u64::from(setup.disk_blocks[disk]) * block,
            read_only: setup.read_only[disk],
            limits,
        }
    };
    let disks = 0..setup.disk_blocks.len();
    let leaves = setup
        .drives()
        .enumerate()
        .flat_map(|(queue, (limits, _))| disks.clone().map(move |disk| (queue, disk, limits)));
    let mut table = Table::new(
        leaves
            .map(|(queue, disk, limits)| leaf(queue, disk, limits))
            .collect(),
    );
    let specs = setup.mapped.iter().flat_map(|mapped| &mapped.disks);
    for spec in specs {
        let mut spec = spec.clone();
        if sabotage == Some(Sabotage::AddressesNextChunk) {
            spec.members.rotate_left(1);
        }
        table.add(&spec).expect("a scenario's mapped disks are possible");
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(kind: MapKind, members: &[(Below, u64, Option<u64>)]) -> MapSpec {
        let member = |&(below, start, len): &(Below, u64, Option<u64>)| MemberSpec {
            name: "m".to_owned(),
            below,
            start,
            len,
        };
        MapSpec {
            name: "d".to_owned(),
            kind,
            members: members.iter().map(member).collect(),
            block_size: Some(4096),
            read_only: false,
        }
    }

    #[test]
    fn stripes_deal_chunks_out_and_a_linear_disk_on_them_follows() {
        let mapped = Mapped {
            disks: vec![
                spec(
                    MapKind::Striped { chunk: 8192 },
                    &[(Below::Leaf(0), 0, None), (Below::Leaf(1), 4096, None)],
                ),
                spec(
                    MapKind::Linear,
                    &[
                        (Below::Mapped(0), 4096, Some(8192)),
                        (Below::Leaf(0), 16384, None),
                    ],
                ),
            ],
            passed_max: 1,
            divided_max: 1,
        };
        // The second disk has 5 blocks left: two chunks, and one unused block.
        let leaves = [Layout::plain(0..6), Layout::plain(10..16)];
        let layouts = mapped.layouts(&leaves, 4096);
        assert_eq!(layouts[0].blocks, [0, 1, 11, 12, 2, 3, 13, 14]);
        assert_eq!(layouts[0].cuts, BTreeSet::from([0, 2, 4, 6]));
        assert_eq!(layouts[1].blocks, [1, 11, 4, 5]);
        assert_eq!(layouts[1].cuts, BTreeSet::from([0, 1, 2]));
    }
}
