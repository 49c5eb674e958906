//! The mapped disks of an engine, by name: the order in which they are made, the check that no byte is in
//! two of them, and what is allocated on them. `engine` calls it when the queues' disks are known;
//! `blkmq_core::mapper` has the rules of one mapped disk.
//!
//! Mapped disks are numbered like the disks of one more queue ([`MAPPED`]), so a bio is submitted to them, as
//! to others, with a disk's queue and number.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use blkmq_core::ids::{DiskId, GroupId};
use blkmq_core::limits::Limits;
use blkmq_core::mapper::Below;
use blkmq_core::mapper::table::{Leaf, MapKind, MapSpec, MemberSpec, Run, Table};

use crate::device::{Allocation, Extent, Losses, State};
use crate::disk::{Disk, MAPPED, Tenant, Users, too_large};
use crate::error::Error;

/// The specification of a mapped disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MappedSpec {
    /// Its name, unique in the engine.
    pub name: String,
    /// A description, for people. May be empty.
    pub description: String,
    /// As of [`crate::DiskEntry`].
    pub serial: Option<String>,
    /// As of [`crate::DiskEntry`].
    pub export: Option<String>,
    /// The disks that it lies on, and how.
    pub map: MapConfig,
    /// Whether writes are refused, though its members may allow them.
    pub read_only: bool,
    /// Smallest unit of its addresses and lengths, in bytes. Default: the largest of its members'.
    pub block_size: Option<u32>,
    /// The group that front doors account its I/O to, on the queues of its members: it has the same number on
    /// all queues.
    pub group: GroupId,
}

/// The disks that a mapped disk lies on, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MapConfig {
    /// How its bytes are spread.
    pub kind: MapKind,
    /// The members, in order, at most 256.
    pub members: Vec<Member>,
}

/// A range of a disk, mapped or not, that a mapped disk lies on. No byte can be in two ranges.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// The disk's name.
    pub disk: String,
    /// The range's first byte.
    pub start: u64,
    /// Bytes; none for all bytes that follow.
    pub len: Option<u64>,
}

/// Makes the mapped disks and lists them after the others.
///
/// # Errors
/// The first mapped disk that cannot be made: members are missing, lie on each other or are used twice, or
/// `blkmq_core::mapper` rejects it.
pub(crate) fn add(
    disks: &mut Vec<Disk>,
    specs: Vec<MappedSpec>,
    tenant_of: impl Fn(GroupId) -> Tenant,
) -> Result<Arc<Table>, Error> {
    check_names(disks, &specs)?;
    let mut table = Table::new(disks.iter().map(leaf).collect());
    let mut below: BTreeMap<String, Below> = (0..)
        .zip(disks.iter())
        .map(|(id, disk)| (disk.name.clone(), Below::Leaf(id)))
        .collect();
    let leaves: Arc<[Disk]> = disks.clone().into();
    let mut made = Vec::with_capacity(specs.len());
    let mut left = specs;
    while !left.is_empty() {
        let is_next = |spec: &MappedSpec| {
            spec.map
                .members
                .iter()
                .all(|member| below.contains_key(&member.disk))
        };
        let Some(next) = left.iter().position(is_next) else {
            return Err(no_next(&left, &below));
        };
        let spec = left.remove(next);
        let id = table
            .add(&core_spec(&spec, &below))
            .map_err(|error| Error::Disk(error.to_string()))?;
        below.insert(spec.name.clone(), Below::Mapped(id.0));
        made.push((id, spec));
    }
    let table = Arc::new(table);
    let map = Arc::new(MappedAllocation {
        table: Arc::clone(&table),
        leaves,
    });
    for (id, spec) in &made {
        let disk = disk(*id, spec, &map, tenant_of(spec.group));
        if i64::try_from(disk.size).is_err() {
            return Err(Error::Disk(format!(
                "disk {}: {}",
                disk.name,
                too_large(disk.size)
            )));
        }
        disks.push(disk);
    }
    let specs: Vec<MappedSpec> = made.into_iter().map(|(_, spec)| spec).collect();
    take_members(disks, &specs)?;
    Ok(table)
}

fn leaf(disk: &Disk) -> Leaf {
    Leaf {
        queue: disk.queue.0,
        disk: disk.id,
        size: disk.size,
        read_only: disk.read_only,
        limits: Limits {
            logical_block: disk.block_size,
            physical_block: disk.limits.physical_block.max(disk.block_size),
            ..disk.limits.clone()
        },
    }
}

fn disk(id: DiskId, spec: &MappedSpec, map: &Arc<MappedAllocation>, tenant: Tenant) -> Disk {
    let of_core = &map.table.disks()[id.index()];
    if of_core.unused > 0 {
        tracing::info!(
            disk = spec.name,
            "disk {}: {} bytes of its members are not used: they are less than a block or a chunk, or more than its smallest \
             member has",
            spec.name,
            of_core.unused
        );
    }
    Disk {
        name: spec.name.clone(),
        description: spec.description.clone(),
        serial: crate::disk::serial_of(&spec.name, spec.serial.as_deref()),
        export: spec.export.clone().unwrap_or_else(|| spec.name.clone()),
        queue: MAPPED,
        id,
        size: of_core.size,
        read_only: of_core.read_only,
        block_size: of_core.limits.logical_block,
        group: spec.group,
        tenant,
        limits: of_core.limits.clone(),
        allocation: Arc::<MappedAllocation>::clone(map),
        used_by: None,
        number: 0,
        users: Users::default(),
    }
}

fn core_spec(spec: &MappedSpec, below: &BTreeMap<String, Below>) -> MapSpec {
    let member = |member: &Member| MemberSpec {
        name: member.disk.clone(),
        below: below[&member.disk],
        start: member.start,
        len: member.len,
    };
    MapSpec {
        name: spec.name.clone(),
        kind: spec.map.kind,
        members: spec.map.members.iter().map(member).collect(),
        block_size: spec.block_size,
        read_only: spec.read_only,
    }
}

fn check_names(disks: &[Disk], specs: &[MappedSpec]) -> Result<(), Error> {
    for (at, spec) in specs.iter().enumerate() {
        let name = &spec.name;
        if disks.iter().any(|disk| disk.name == *name) || specs[..at].iter().any(|other| other.name == *name)
        {
            return Err(Error::Disk(format!(
                "disk {name}: there are two of this name; rename one"
            )));
        }
    }
    Ok(())
}

/// Says why none of these disks can be made: a member is missing, or there is a loop.
fn no_next(left: &[MappedSpec], below: &BTreeMap<String, Below>) -> Error {
    for spec in left {
        for member in &spec.map.members {
            let is_waiting = left.iter().any(|other| other.name == member.disk);
            if !is_waiting && !below.contains_key(&member.disk) {
                return Error::Disk(format!(
                    "disk {}: there is no disk {} for it to lie on: make one of this name, or take it out",
                    spec.name, member.disk
                ));
            }
        }
    }
    // Every disk left waits for another one: following them leads to some disk a second time.
    let mut chain: Vec<&str> = vec![&left[0].name];
    loop {
        let last = chain.last().copied().unwrap_or_default();
        let spec = left.iter().find(|spec| spec.name == last);
        let members = spec.into_iter().flat_map(|spec| &spec.map.members);
        let next = members
            .map(|member| member.disk.as_str())
            .find(|name| !below.contains_key(*name));
        let next = next.expect("it waits for somebody");
        if let Some(start) = chain.iter().position(|name| *name == next) {
            let mut circle = chain.split_off(start);
            circle.push(next);
            return Error::Disk(format!(
                "disk {next}: it lies on itself ({}): take one of these members out",
                circle.join(" on ")
            ));
        }
        chain.push(next);
    }
}

/// Records which disks use which, and rejects bytes that two would use.
fn take_members(disks: &mut [Disk], specs: &[MappedSpec]) -> Result<(), Error> {
    let mut taken: BTreeMap<&str, Vec<(u64, u64, &str)>> = BTreeMap::new();
    for spec in specs {
        for member in &spec.map.members {
            let disk = disks.iter_mut().find(|disk| disk.name == member.disk);
            let disk = disk.expect("the table has found it");
            disk.used_by.get_or_insert_with(|| spec.name.clone());
            let end = member.start + member.len.unwrap_or(disk.size - member.start);
            let ranges = taken.entry(&member.disk).or_default();
            ranges.push((member.start, end, &spec.name));
        }
    }
    for (disk, mut ranges) in taken {
        ranges.sort_unstable();
        let overlap = ranges.windows(2).find(|pair| pair[1].0 < pair[0].1);
        if let Some(&[one, two]) = overlap.and_then(|pair| pair.first_chunk()) {
            return Err(Error::Disk(format!(
                "disk {}: bytes {} to {} of disk {disk} are used by disk {} too: give each its own, as in {disk}:START:LENGTH",
                two.2,
                two.0,
                one.1.min(two.1),
                one.2
            )));
        }
    }
    Ok(())
}

/// The members' knowledge of allocation, in a mapped disk's order.
struct MappedAllocation {
    table: Arc<Table>,
    leaves: Arc<[Disk]>,
}

impl Allocation for MappedAllocation {
    fn extents(
        &self,
        disk: DiskId,
        offset: u64,
        len: u64,
        max: usize,
        out: &mut Vec<Extent>,
    ) -> io::Result<()> {
        let of_core = self.table.disks().get(disk.index());
        let size = of_core.map_or(0, |disk| disk.size);
        let end = offset.saturating_add(len).min(size);
        if offset >= end || max == 0 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let first = out.len();
        let mut at = offset;
        let mut found = Vec::new();
        for _ in 0..RUNS_MAX {
            if at == end {
                break;
            }
            let run = self.table.locate(disk, at);
            let run = Run {
                len: run.len.min(end - at),
                ..run
            };
            found.clear();
            self.leaves[run.leaf as usize].extents(run.offset, run.len, max, &mut found)?;
            for extent in &found {
                let is_full = out.len() == first + max;
                match out[first..].last_mut() {
                    Some(last) if (last.hole, last.zero) == (extent.hole, extent.zero) => {
                        last.len += extent.len
                    }
                    _ if is_full => return Ok(()),
                    _ => out.push(*extent),
                }
                at += extent.len;
            }
        }
        Ok(())
    }

    fn losses(&self, disk: DiskId) -> Losses {
        let losses = self.flushed(disk).map(Disk::losses);
        losses.fold(Losses::default(), Losses::and)
    }

    fn mark_losses_seen(&self, disk: DiskId) {
        self.flushed(disk).for_each(Disk::mark_losses_seen);
    }

    fn state(&self, disk: DiskId) -> State {
        let of_core = self.table.disks().get(disk.index());
        let leaves = of_core.into_iter().flat_map(|disk| disk.leaves());
        let states = leaves.map(|leaf| self.leaves[leaf as usize].state());
        states.max().unwrap_or_default()
    }
}

impl MappedAllocation {
    /// The leaves that a flush of a disk goes to.
    fn flushed(&self, disk: DiskId) -> impl Iterator<Item = &Disk> {
        let of_core = self.table.disks().get(disk.index());
        let leaves = of_core.into_iter().flat_map(|disk| disk.flushed());
        leaves.map(|leaf| &self.leaves[*leaf as usize])
    }
}

/// Largest number of members' ranges examined for one query of allocation; the answer covers less of a long
/// range then.
const RUNS_MAX: usize = 1024;

#[cfg(test)]
mod tests;
