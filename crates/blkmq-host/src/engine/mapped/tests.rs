//! Mapped disks by name: order, loops, ranges, allocation.

use std::sync::Mutex;

use blkmq_core::ids::GroupId;

use super::*;
use crate::disk::QueueId;

/// Reports every other page, from the first on, as a hole; and records the queries.
#[derive(Default)]
struct Pages(Mutex<Vec<(u32, u64, u64)>>);

impl Allocation for Pages {
    fn extents(
        &self,
        disk: DiskId,
        offset: u64,
        len: u64,
        max: usize,
        out: &mut Vec<Extent>,
    ) -> io::Result<()> {
        self.0.lock().unwrap().push((disk.0, offset, len));
        let (mut at, end) = (offset, offset + len);
        for _ in 0..max {
            if at == end {
                break;
            }
            let next = (at / PAGE + 1).saturating_mul(PAGE).min(end);
            let of = if (at / PAGE).is_multiple_of(2) {
                Extent::hole
            } else {
                Extent::data
            };
            out.push(of(next - at));
            at = next;
        }
        Ok(())
    }
}

fn disks(names: &[&str]) -> Vec<Disk> {
    let allocation = Arc::new(Pages::default());
    let disk = |(id, name): (u32, &&str)| Disk {
        name: (*name).to_owned(),
        description: String::new(),
        serial: crate::disk::default_serial(name),
        export: (*name).to_owned(),
        queue: QueueId(0),
        id: DiskId(id),
        size: 1 << 20,
        read_only: false,
        block_size: 512,
        group: GroupId(0),
        tenant: Tenant(0),
        limits: Limits::default(),
        allocation: Arc::<Pages>::clone(&allocation),
        used_by: None,
        number: 0,
        users: Users::default(),
    };
    (0..).zip(names).map(disk).collect()
}

fn add_all(disks: &mut Vec<Disk>, specs: Vec<MappedSpec>) -> Result<Arc<Table>, Error> {
    add(disks, specs, |_| Tenant(0))
}

fn linear(name: &str, members: &[(&str, u64, Option<u64>)]) -> MappedSpec {
    let member = |(disk, start, len): &(&str, u64, Option<u64>)| Member {
        disk: (*disk).to_owned(),
        start: *start,
        len: *len,
    };
    MappedSpec {
        name: name.to_owned(),
        description: String::new(),
        serial: None,
        export: None,
        map: MapConfig {
            kind: MapKind::Linear,
            members: members.iter().map(member).collect(),
        },
        read_only: false,
        block_size: None,
        group: GroupId(0),
    }
}

fn striped(name: &str, chunk: u64, members: &[&str]) -> MappedSpec {
    let members: Vec<_> = members.iter().map(|name| (*name, 0, None)).collect();
    let mut spec = linear(name, &members);
    spec.map.kind = MapKind::Striped { chunk };
    spec
}

fn error(specs: Vec<MappedSpec>) -> String {
    add_all(&mut disks(&["a", "b"]), specs).unwrap_err().to_string()
}

#[test]
fn mapped_disks_may_be_given_in_any_order() {
    let mut all = disks(&["a", "b", "c"]);
    let specs = vec![
        linear("top", &[("stripe", 0, None), ("c", 0, None)]),
        striped("stripe", 65536, &["a", "b"]),
    ];
    let table = add_all(&mut all, specs).unwrap();
    let seen: Vec<_> = all[3..]
        .iter()
        .map(|disk| (disk.name.as_str(), disk.queue, disk.id, disk.size))
        .collect();
    assert_eq!(
        seen,
        [
            ("stripe", MAPPED, DiskId(0), 2 << 20),
            ("top", MAPPED, DiskId(1), 3 << 20)
        ]
    );
    let users: Vec<_> = all.iter().map(|disk| disk.used_by.as_deref()).collect();
    assert_eq!(
        users,
        [Some("stripe"), Some("stripe"), Some("top"), Some("top"), None]
    );
    let run = table.locate(DiskId(1), (2 << 20) + 4096);
    assert_eq!((run.leaf, run.offset), (2, 4096));
}

#[test]
fn disk_may_be_carved_but_no_byte_used_twice() {
    let halves = [(0, Some(512 << 10)), (512 << 10, None)];
    let carve = |halves: [(u64, Option<u64>); 2]| {
        let [one, two] = halves.map(|(start, len)| [("a", start, len)]);
        vec![linear("one", &one), linear("two", &two)]
    };
    assert!(add_all(&mut disks(&["a", "b"]), carve(halves)).is_ok());
    let overlapping = carve([(0, Some(512 << 10)), (256 << 10, None)]);
    let text = error(overlapping);
    assert!(
        text.contains("disk two: bytes 262144 to 524288 of disk a are used by disk one too: give each its own, as in a:START:LENGTH"),
        "{text}"
    );
    let twice = error(vec![striped("s", 4096, &["a", "a"])]);
    assert!(
        twice.contains("disk s: bytes 0 to 1048576 of disk a are used by disk s too"),
        "{twice}"
    );
}

#[test]
fn impossible_mapping_is_named() {
    for (specs, part) in [
        (
            vec![linear("x", &[("z", 0, None)])],
            "disk x: there is no disk z for it to lie on",
        ),
        (
            vec![linear("a", &[("b", 0, None)])],
            "disk a: there are two of this name",
        ),
        (
            vec![linear("x", &[("a", 0, None)]), linear("x", &[("b", 0, None)])],
            "disk x: there are two of this name",
        ),
        (
            vec![linear("x", &[("x", 0, None)])],
            "disk x: it lies on itself (x on x)",
        ),
        (
            vec![
                linear("w", &[("x", 0, None)]),
                linear("x", &[("a", 0, None), ("y", 0, None)]),
                linear("y", &[("x", 0, None)]),
            ],
            "disk x: it lies on itself (x on y on x)",
        ),
        (
            vec![linear("x", &[("a", 1 << 20, None)])],
            "disk x: member a from byte 1048576 on rejected: a has 1048576 bytes",
        ),
        (vec![linear("x", &[])], "disk x: 0 members"),
    ] {
        let text = error(specs);
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn disk_on_a_member_that_is_read_only_or_has_larger_blocks_is_like_it() {
    let mut all = disks(&["a", "b"]);
    all[1].read_only = true;
    all[1].block_size = 4096;
    add_all(&mut all, vec![striped("s", 65536, &["a", "b"])]).unwrap();
    assert!(all[2].read_only);
    assert_eq!((all[2].block_size, all[2].limits.logical_block), (4096, 4096));
}

#[test]
fn allocation_is_that_of_the_members_in_the_mapped_disks_order() {
    let mut all = disks(&["a", "b"]);
    add_all(&mut all, vec![striped("s", 2 * PAGE, &["a", "b"])]).unwrap();
    let ask = |offset, len, max| {
        let mut out = vec![Extent::data(1)];
        all[2].extents(offset, len, max, &mut out).unwrap();
        out.split_off(1)
    };
    // Each chunk is a hole and a page of data, whichever member it is on.
    let wanted: Vec<Extent> = (0..8)
        .flat_map(|_| [Extent::hole(PAGE), Extent::data(PAGE)])
        .collect();
    assert_eq!(ask(0, 16 * PAGE, 100), wanted);
    assert_eq!(ask(0, 16 * PAGE, 3), wanted[..3]);
    assert_eq!(
        ask(PAGE / 2, PAGE, 9),
        [Extent::hole(PAGE / 2), Extent::data(PAGE / 2)]
    );
    let mut out = Vec::new();
    assert!(all[2].extents(2 << 20, 1, 1, &mut out).is_err());
    all[2].extents(0, u64::MAX, 1 << 20, &mut out).unwrap();
    assert_eq!(out.iter().map(|extent| extent.len).sum::<u64>(), 2 << 20);
}

#[test]
fn like_extents_of_neighbours_are_one() {
    let mut all = disks(&["a", "b"]);
    // Odd pages only: all data.
    let odd: Vec<_> = (0..8)
        .map(|page| ("a", (2 * page + 1) * PAGE, Some(PAGE)))
        .collect();
    add_all(&mut all, vec![linear("l", &odd)]).unwrap();
    let mut out = Vec::new();
    all[2].extents(0, 8 * PAGE, 1, &mut out).unwrap();
    assert_eq!(out, [Extent::data(8 * PAGE)]);
}

const PAGE: u64 = 4096;
