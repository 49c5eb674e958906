//! `mapped`: stripes, linear disks and disks on both, over one to four drives that differ in their limits
//! and caches. One queue is frozen, quiesced and changed meanwhile. [`faults`] and [`power_cut`] add the
//! events that they are named for.

pub(super) mod faults;
pub(super) mod power_cut;

use blkmq_core::limits::Limits;
use blkmq_core::mapper::Below;
use blkmq_core::mapper::table::{MapKind, MapSpec, MemberSpec};

use super::Scenario;
use super::any_elevator;
use crate::mapped::Mapped;
use crate::rng::{Ppm, Rng};
use crate::setup::{self, Control, Setup};
use crate::workload::Workload;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "mapped",
    about: "stripes, linear disks and disks on both, over one to four unlike drives",
    setup,
};

fn setup(rng: &mut Rng) -> Setup {
    let mut setup = over_drives(rng);
    if rng.chance(Ppm::percent(50)) {
        setup.control = Control {
            freeze: 1,
            quiesce: 1,
            switch: 1,
            depth: 1,
            ..Control::every_us(1_000)
        };
    }
    setup
}

/// Mapped disks over drives without faults.
fn over_drives(rng: &mut Rng) -> Setup {
    let base = Setup::base(rng);
    let limits = drive_limits(rng);
    let mut setup = base.with_limits(limits);
    setup.elevator = any_elevator(rng);
    for _ in 0..rng.below(4) {
        let limits = drive_limits(rng);
        let mut drive = setup::flash(rng);
        drive.cache = limits.cache;
        setup.more_drives.push((limits, drive));
    }
    // A physical block begins where a disk begins on its drive.
    setup.disk_blocks = vec![DISK / setup.block(); 2];
    setup.read_only = vec![false; 2];
    setup.mapped = Some(mapped(setup.drives().count() as u32, rng));
    for client in &mut setup.clients {
        *client = Workload {
            blocks_max: rng.pick(&[2, 8, 24]),
            no_merge: Ppm::percent(rng.pick(&[0, 20])),
            ..Workload::mixed(rng)
        };
    }
    setup
}

fn drive_limits(rng: &mut Rng) -> Limits {
    let logical_block = rng.pick(&[1024, 4096]);
    Limits {
        logical_block,
        physical_block: logical_block * rng.pick(&[1, 2, 4]),
        cache: rng.chance(Ppm::percent(80)),
        ..setup::limits(rng)
    }
}

/// A stripe over the first disks of all drives, a linear disk over ranges of the second ones, one
/// on both of these, and a stripe over both disks of the last drive. The last two overlap with the
/// first two.
fn mapped(drives: u32, rng: &mut Rng) -> Mapped {
    let block = rng.pick(&[4096, 8192]);
    let chunk = |rng: &mut Rng| MapKind::Striped {
        chunk: u64::from(block) * rng.pick(&[1, 2, 4]),
    };
    let whole = |below| member(below, 0, None);
    let first: Vec<MemberSpec> = (0..drives).map(|drive| whole(Below::Leaf(2 * drive))).collect();
    let range = |drive: u32, rng: &mut Rng| {
        let blocks = u64::from(DISK / block);
        let start = rng.below(blocks / 2);
        let len = rng.from_to(1, blocks - start);
        let below = Below::Leaf(2 * drive + 1);
        member(below, start * u64::from(block), Some(len * u64::from(block)))
    };
    let second: Vec<MemberSpec> = (0..drives).map(|drive| range(drive, rng)).collect();
    let on_both = vec![
        member(Below::Mapped(0), u64::from(block), Some(5 * u64::from(block))),
        whole(Below::Mapped(1)),
    ];
    let last = [2 * drives - 2, 2 * drives - 1].map(|leaf| whole(Below::Leaf(leaf)));
    let disks = vec![
        (chunk(rng), first),
        (MapKind::Linear, second),
        (MapKind::Linear, on_both),
        (chunk(rng), last.into()),
    ];
    let spec = |(number, (kind, members))| MapSpec {
        name: format!("mapped{number}"),
        kind,
        members,
        block_size: Some(block),
        read_only: false,
    };
    Mapped {
        disks: (0..).zip(disks).map(|disk: (u32, _)| spec(disk)).collect(),
        passed_max: rng.pick(&[1, 64]),
        divided_max: rng.pick(&[1, 4, 64]),
    }
}

fn member(below: Below, start: u64, len: Option<u64>) -> MemberSpec {
    MemberSpec {
        name: format!("{below:?}"),
        below,
        start,
        len,
    }
}

/// Bytes of a drive's disk.
const DISK: u32 = 256 << 10;
