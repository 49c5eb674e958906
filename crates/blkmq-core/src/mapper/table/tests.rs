//! Compares maps with their plain definition: a list of where each block lies, joined and distributed block by block.

use proptest::prelude::*;

use super::*;

/// Where each block of a disk lies: the leaf, and the block on it.
type Blocks = Vec<(u32, u64)>;

/// A mapped disk to add: its members are numbers among the leaves and the earlier mapped disks.
#[derive(Clone, Debug)]
struct Plan {
    chunk: Option<u32>,
    members: Vec<(prop::sample::Index, u8, u8)>,
}

fn plans() -> impl Strategy<Value = Vec<Plan>> {
    let member = (any::<prop::sample::Index>(), any::<u8>(), any::<u8>());
    let chunk = prop_oneof![Just(None), (12..15u32).prop_map(Some)];
    let plan =
        (chunk, prop::collection::vec(member, 1..5)).prop_map(|(chunk, members)| Plan { chunk, members });
    prop::collection::vec(plan, 1..6)
}

/// Makes the table and the plain definition. Disks that cannot be made are left out.
fn make(leaves: &[u64], plans: &[Plan]) -> (Table, Vec<Blocks>) {
    let list = leaves
        .iter()
        .enumerate()
        .map(|(id, blocks)| leaf(id as u32, blocks * BLOCK));
    let mut table = Table::new(list.collect());
    let mut plain: Vec<(Below, Blocks)> = (0..leaves.len() as u32)
        .map(|id| {
            (
                Below::Leaf(id),
                (0..leaves[id as usize]).map(|at| (id, at)).collect(),
            )
        })
        .collect();
    for plan in plans {
        let mut ranges = Vec::new();
        let members = plan.members.iter().map(|(index, start, len)| {
            let (below, blocks) = &plain[index.index(plain.len())];
            let start = usize::from(*start) * blocks.len() / 256;
            let len = (1 + usize::from(*len) * blocks.len() / 200).min(blocks.len() - start);
            ranges.push(blocks[start..start + len].to_vec());
            MemberSpec {
                name: "m".to_owned(),
                below: *below,
                start: start as u64 * BLOCK,
                len: Some(len as u64 * BLOCK),
            }
        });
        let spec = MapSpec {
            name: "d".to_owned(),
            members: members.collect(),
            kind: plan
                .chunk
                .map_or(MapKind::Linear, |shift| MapKind::Striped { chunk: 1 << shift }),
            block_size: None,
            read_only: false,
        };
        let Ok(id) = table.add(&spec) else { continue };
        let blocks = match plan.chunk {
            None => ranges.concat(),
            Some(shift) => deal(&ranges, (1 << shift) / BLOCK as usize),
        };
        plain.push((Below::Mapped(id.0), blocks));
    }
    (
        table,
        plain
            .into_iter()
            .skip(leaves.len())
            .map(|(_, blocks)| blocks)
            .collect(),
    )
}

fn deal(ranges: &[Blocks], chunk: usize) -> Blocks {
    let rows = ranges.iter().map(Vec::len).min().unwrap() / chunk;
    let row = |row: usize| {
        ranges
            .iter()
            .flat_map(move |range| &range[row * chunk..(row + 1) * chunk])
    };
    (0..rows).flat_map(row).copied().collect()
}

fn leaf(id: u32, size: u64) -> Leaf {
    Leaf {
        queue: (id % 3) as u16,
        disk: DiskId(id / 3),
        size,
        read_only: false,
        limits: Limits {
            cache: id.is_multiple_of(2),
            ..Limits::default()
        },
    }
}

proptest! {
    #[test]
    fn byte_lies_where_joining_and_dealing_put_it(
        leaves in prop::collection::vec(1..200u64, 1..5),
        plans in plans(),
    ) {
        let (table, plain) = make(&leaves, &plans);
        for (id, blocks) in (0..).map(DiskId).zip(&plain) {
            let disk = &table.disks()[id.index()];
            prop_assert_eq!(disk.size, blocks.len() as u64 * BLOCK);
            for (at, block) in blocks.iter().enumerate() {
                let offset = at as u64 * BLOCK + 100;
                let run = table.locate(id, offset);
                prop_assert_eq!((run.leaf, run.offset), (block.0, block.1 * BLOCK + 100));
                prop_assert_eq!((run.len + 100) % BLOCK, 0);
                let more = (run.len + 100) / BLOCK;
                prop_assert!(more >= 1 && at as u64 + more <= blocks.len() as u64);
                for (next, far) in blocks[at..].iter().zip(0..more) {
                    prop_assert_eq!(*next, (block.0, block.1 + far));
                }
            }
            let mut flushed: Vec<u32> = blocks.iter().map(|block| block.0).filter(|leaf| leaf % 2 == 0).collect();
            flushed.sort_unstable();
            flushed.dedup();
            prop_assert!(flushed.iter().all(|leaf| disk.flushed.contains(leaf)), "{flushed:?}");
        }
    }

    #[test]
    fn shares_of_a_range_are_that_range(
        leaves in prop::collection::vec(1..200u64, 1..5),
        plans in plans(),
        cut in any::<(u8, u8)>(),
    ) {
        let (table, plain) = make(&leaves, &plans);
        for (id, blocks) in (0..).map(DiskId).zip(&plain) {
            let start = usize::from(cut.0) * blocks.len() / 256;
            let end = (start + 1 + usize::from(cut.1) * blocks.len() / 256).min(blocks.len());
            let mut wanted = blocks[start..end].to_vec();
            let mut found = Vec::new();
            for way in 0..table.ways(id) {
                let share = table.share(id, way, start as u64 * BLOCK, end as u64 * BLOCK);
                if let Some(run) = share {
                    let first = run.offset / BLOCK;
                    found.extend((first..first + run.len / BLOCK).map(|block| (run.leaf, block)));
                }
            }
            wanted.sort_unstable();
            found.sort_unstable();
            prop_assert_eq!(found, wanted);
        }
    }
}

fn spec(kind: MapKind, members: &[(Below, u64, Option<u64>)]) -> MapSpec {
    let member = |(below, start, len): &(Below, u64, Option<u64>)| MemberSpec {
        name: "m".to_owned(),
        below: *below,
        start: *start,
        len: *len,
    };
    MapSpec {
        name: "big".to_owned(),
        kind,
        members: members.iter().map(member).collect(),
        block_size: None,
        read_only: false,
    }
}

const WHOLE: (Below, u64, Option<u64>) = (Below::Leaf(0), 0, None);

#[test]
fn impossible_table_is_named_with_its_limit() {
    let chunk = |chunk| MapKind::Striped { chunk };
    let member = |start, len| vec![(Below::Leaf(0), start, len)];
    let text = |spec: &MapSpec| {
        Table::new(vec![leaf(0, 1 << 20)])
            .add(spec)
            .unwrap_err()
            .to_string()
    };
    for (kind, members, part) in [
        (
            MapKind::Linear,
            vec![],
            "0 members rejected: must be from 1 to 256",
        ),
        (MapKind::Linear, vec![WHOLE; 257], "257 members"),
        (
            MapKind::Linear,
            member(1 << 20, None),
            "from byte 1048576 on rejected: m has 1048576 bytes",
        ),
        (
            MapKind::Linear,
            member(512, Some(1 << 20)),
            "with 1048576 bytes from byte 512 on rejected",
        ),
        (
            MapKind::Linear,
            member(100, None),
            "start 100 rejected: must be a multiple of the block size 512",
        ),
        (MapKind::Linear, member(0, Some(700)), "length 700"),
        (
            chunk(5000),
            vec![WHOLE],
            "chunk 5000 rejected: must be a power of two from 4096",
        ),
        (chunk(512), vec![WHOLE], "chunk 512"),
        (
            chunk(1 << 21),
            vec![WHOLE],
            "chunk 2097152 rejected: must be at most 1048576",
        ),
    ] {
        let text = text(&spec(kind, &members));
        assert!(text.starts_with("disk big: ") && text.contains(part), "{text}");
    }
    let mut small = spec(MapKind::Linear, &[WHOLE]);
    small.block_size = Some(256);
    assert!(text(&small).contains("block size 256 rejected: must be a power of two from 512"));
}

#[test]
fn mapped_disks_lie_on_each_other_to_a_bounded_depth() {
    let mut table = Table::new(vec![leaf(0, 1 << 20)]);
    let mut below = Below::Leaf(0);
    for _ in 0..LEVELS_MAX {
        below = Below::Mapped(table.add(&spec(MapKind::Linear, &[(below, 0, None)])).unwrap().0);
    }
    let error = table
        .add(&spec(MapKind::Linear, &[(below, 0, None)]))
        .unwrap_err();
    assert!(
        error
            .to_string()
            .contains("9 mapped disks on each other rejected: must be at most 8")
    );
    let run = table.locate(DiskId(7), 4096);
    assert_eq!((run.leaf, run.offset, run.len), (0, 4096, (1 << 20) - 4096));
}

#[test]
fn ways_down_are_bounded_however_maps_are_stacked() {
    let mut table = Table::new(vec![leaf(0, 1 << 30)]);
    let many: Vec<_> = (0..256)
        .map(|at| (Below::Leaf(0), at << 20, Some(1 << 20)))
        .collect();
    let Ok(first) = table.add(&spec(MapKind::Linear, &many)) else {
        panic!("256 are allowed")
    };
    let seventeen = vec![(Below::Mapped(first.0), 0, Some(1 << 20)); 17];
    let error = table
        .add(&spec(MapKind::Linear, &seventeen))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("4352 ranges of drives below it rejected: must be at most 4096"),
        "{error}"
    );
}

#[test]
fn limits_are_what_all_members_take() {
    let (mut one, mut two) = (leaf(0, 1 << 20), leaf(1, 1 << 20));
    one.limits = Limits {
        discard_max: 1 << 20,
        discard_granularity: 12288,
        zeroes_max: 1 << 20,
        transfer_max: 1 << 16,
        fua: true,
        cache: true,
        ..Limits::default()
    };
    two.limits = Limits {
        logical_block: 4096,
        physical_block: 4096,
        discard_max: 1 << 16,
        discard_granularity: 8192,
        leaves_buffers: true,
        rotational: true,
        boundary: 1 << 20,
        ..Limits::default()
    };
    let members = [(Below::Leaf(0), 0, None), (Below::Leaf(1), 0, None)];
    let mut table = Table::new(vec![one, two]);
    let linear = table.add(&spec(MapKind::Linear, &members)).unwrap();
    let limits = &table.disks()[linear.index()].limits;
    let wanted = Limits {
        logical_block: 4096,
        any_alignment: false,
        physical_block: 4096,
        optimal_io: 0,
        transfer_max: 1 << 16,
        segments_max: 128,
        boundary: 0,
        discard_max: 1 << 16,
        discard_granularity: 24576,
        zeroes_max: 0,
        zeroes_are_written: false,
        cache: true,
        // The other has no cache to bypass.
        fua: true,
        leaves_buffers: true,
        rotational: true,
    };
    assert_eq!(*limits, wanted);
    assert_eq!(limits.check(), Ok(()));
    let striped = table
        .add(&spec(MapKind::Striped { chunk: 8192 }, &members))
        .unwrap();
    let disk = &table.disks()[striped.index()];
    // A granule of 24576 bytes has three chunks of a member, one in each of three rows.
    assert_eq!(disk.limits.discard_granularity, 2 * 24576);
    assert_eq!((disk.size, disk.unused), (2 << 20, 0));
}

#[test]
fn space_beyond_whole_chunks_of_the_smallest_member_is_left_over() {
    let mut table = Table::new(vec![leaf(0, 100 << 10), leaf(1, 1 << 20)]);
    let members = [(Below::Leaf(0), 0, None), (Below::Leaf(1), 0, None)];
    let id = table
        .add(&spec(MapKind::Striped { chunk: 65536 }, &members))
        .unwrap();
    let disk = &table.disks()[id.index()];
    assert_eq!(
        (disk.size, disk.unused),
        (2 << 16, (100 << 10) + (1 << 20) - (2 << 16))
    );
}

const BLOCK: u64 = 512;
