//! Plans the queues of an engine: disks that share a drive's capacity share a queue by default. The
//! drives are opened here, and the engine is started with the result.
//!
//! A disk that names the device whose capacity it uses (`OpenDisk::device`) shares a queue with
//! those that name the same one, so one elevator sees all of their tenants: files on one filesystem
//! do. Others have a queue of their own. `queue=` overrides all of this, within one driver.

pub(crate) mod ahead;
pub mod drives;
pub(crate) mod multipath;
pub mod scheduler;
pub mod settings;

use blkmq_core::ids::GroupId;
use blkmq_core::time::Nanos;
use blkmq_drivers::driver::{Attributes, BLOCK_MIN, OpenDisk, OpenError, Purpose, device_error};
use blkmq_host::group_paths;
use blkmq_host::mapped::MappedSpec;
use blkmq_host::{DiskEntry, Error, QueueSpec};

use self::drives::QueueDrives;
use self::multipath::Paths;
use crate::config::Config;
use crate::disk::{DiskSpec, Source};
use crate::group::{self, GroupSpec};
use crate::luks::PlannedLuks;
use crate::queue::QueueSettings;

/// What to start.
pub struct Plan {
    /// The queues with their drives, open.
    pub queues: Vec<QueueSpec>,
    /// The disks that lie on other disks.
    pub mapped: Vec<MappedSpec>,
    /// The encrypted disks, to be opened when the engine runs.
    pub luks: Vec<PlannedLuks>,
}

/// The groups of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Groups {
    /// Those of its disks, and their parents.
    OfItsDisks,
    /// All groups, with the same numbers on all queues.
    All,
}

/// Opens the disks and joins them into queues, in order.
///
/// # Errors
/// The first fault: a name given twice, a disk that cannot be served or does not fit on its queue,
/// settings of a queue without disks. The text names it, and says what to do.
pub fn plan(config: &Config) -> anyhow::Result<Plan> {
    plan_with(config, Groups::OfItsDisks, Purpose::Serve)
}

/// The same to see whether the disks could be served, also while another process serves them.
///
/// # Errors
/// As [`plan()`], but for locks.
pub fn plan_for_check(config: &Config) -> anyhow::Result<Plan> {
    plan_with(config, Groups::OfItsDisks, Purpose::Check)
}

/// The same for an engine whose users submit I/O of any group to any disk: each queue has all groups, with the same numbers.
///
/// # Errors
/// As [`plan()`].
pub fn plan_with_all_groups(config: &Config) -> anyhow::Result<Plan> {
    plan_with(config, Groups::All, Purpose::Serve)
}

fn plan_with(config: &Config, groups: Groups, purpose: Purpose) -> anyhow::Result<Plan> {
    let (mut plan, numbered) = open_all(config, purpose)?;
    plan.set_groups(groups, &numbered, &config.groups)?;
    settings::warn_of_empty_groups(config);
    for queue in &mut plan.queues {
        let wish = settings::apply(queue, config, groups)?;
        if let Some(reason) = wish.reason(&queue.name) {
            tracing::info!("{reason}");
        }
        let disks = queue.disks.iter().map(|disk| disk.name.as_str());
        if let Some(found) = scheduler::without_effect_with(config, &queue.name, disks, groups)? {
            tracing::warn!("{found}");
        }
    }
    let queues = plan.queues.iter().map(|queue| QueueDrives {
        queue: &queue.name,
        disks: queue.disks.iter().map(|disk| disk.name.as_str()).collect(),
        drives: queue.device.drives(),
    });
    for found in drives::across_queues(config, &queues.collect::<Vec<_>>(), groups) {
        tracing::warn!("{found}");
    }
    Ok(plan)
}

/// Opens the drives of all disks and puts each disk on a queue. Also returns the paths of their
/// groups, numbered over all queues.
fn open_all(config: &Config, purpose: Purpose) -> Result<(Plan, Vec<String>), Error> {
    let mut disks = config.disks.clone();
    let mut groups = vec!["/".to_owned()];
    let mut paths = Paths::take_from(&mut disks);
    let mut members: Vec<(String, Vec<OpenedDisk>)> = Vec::new();
    let (mut mapped, mut luks) = (Vec::new(), Vec::new());
    let below = config.below_mapped();
    let mut ahead = ahead::open(&disks, purpose);
    for spec in disks {
        group_paths::check_path(&spec.group)?;
        let group = group::number_of(&mut groups, &spec.group);
        match &spec.source {
            Source::Mapped(_) => {
                mapped.push(mapped_disk(spec, group)?);
                continue;
            }
            Source::Luks(source) => {
                let source = source.clone();
                luks.push(PlannedLuks { spec, source, group });
                continue;
            }
            Source::Driver(_) | Source::Multipath(_) => {}
        }
        let kept = below.get(spec.name.as_str()).copied();
        let kept = kept.and_then(|user| Some((user, spec.source.driver()?.least_size()?)));
        let opened = ahead.remove(&spec.name);
        let (queue, mut member) = open_as(spec, group, &mut paths, purpose, opened)?;
        if let Some((user, size)) = kept {
            keep_size(&mut member.entry, size, user);
        }
        match members.iter_mut().find(|(name, _)| *name == queue) {
            Some((_, list)) => list.push(member),
            None => members.push((queue, vec![member])),
        }
    }
    paths.check_all_taken()?;
    let is_there = |name: &String| members.iter().any(|(queue, _)| queue == name);
    if let Some(unused) = config.queues.keys().find(|name| !is_there(name)) {
        let known: Vec<&str> = members.iter().map(|(name, _)| name.as_str()).collect();
        let known = known.join(", ");
        return Err(Error::Disk(format!(
            "queue {unused}: no disk lies on it; the queues are: {known}"
        )));
    }
    let requests = requests_default(members.len().max(1));
    let default = QueueSettings::default();
    let build = |(name, list): (String, Vec<OpenedDisk>)| {
        let settings = config.queues.get(&name).unwrap_or(&default);
        join(name, list, settings, requests)
    };
    let queues = members.into_iter().map(build).collect::<Result<_, Error>>()?;
    let plan = Plan { queues, mapped, luks };
    Ok((plan, groups))
}

/// Leaves out what a disk has more than its configured size, since `user` lies on it: what comes behind
/// the disk there must not move when its file has grown.
fn keep_size(disk: &mut DiskEntry, size: u64, user: &str) {
    if size < disk.size {
        tracing::warn!(
            disk = disk.name,
            "disk {}: only the {size} bytes of its size= are used of {}, since disk {user} lies on it",
            disk.name,
            disk.size
        );
        disk.size = size - size % u64::from(disk.block_size);
    }
}

impl Plan {
    /// Gives queues their groups, with weights, caps and latency targets. `numbered` has the paths
    /// by which disks know theirs so far.
    fn set_groups(&mut self, groups: Groups, numbered: &[String], specs: &[GroupSpec]) -> Result<(), Error> {
        for (at, spec) in specs.iter().enumerate() {
            group_paths::check_path(&spec.path)?;
            if specs[..at].iter().any(|other| other.path == spec.path) {
                let path = &spec.path;
                return Err(Error::Disk(format!("group {path}: it is given twice; keep one")));
            }
            for queue in &self.queues {
                group::check_caps(spec, &queue.device.limits())?;
            }
        }
        let mut common = vec!["/".to_owned()];
        if groups == Groups::All {
            common = numbered.to_vec();
            for spec in specs {
                group::number_of(&mut common, &spec.path);
            }
        }
        // A mapped disk's group has one number on the queues of all its members.
        for disk in &mut self.mapped {
            disk.group = group::number_of(&mut common, &numbered[disk.group.index()]);
        }
        for disk in &mut self.luks {
            disk.group = group::number_of(&mut common, &numbered[disk.group.index()]);
        }
        for queue in &mut self.queues {
            let mut paths = common.clone();
            for disk in &mut queue.disks {
                disk.group = group::number_of(&mut paths, &numbered[disk.group.index()]);
            }
            set_groups_of(queue, &paths, specs)?;
        }
        Ok(())
    }
}

/// Gives a queue its groups, in this order.
pub(crate) fn set_groups_of(
    queue: &mut QueueSpec,
    paths: &[String],
    specs: &[GroupSpec],
) -> Result<(), Error> {
    // Where disks may be added, so may their groups.
    let disks = queue.disks.len();
    let more = queue.device.disks_max(disks) - disks;
    queue.groups = group::tree_of(paths, specs, &queue.device.limits(), more as u32)?;
    queue.group_paths = paths.to_vec();
    Ok(())
}

/// A disk that has been opened and waits for the others of its queue.
pub(crate) struct OpenedDisk {
    pub(crate) entry: DiskEntry,
    pub(crate) opened: Box<dyn OpenDisk>,
}

/// A disk that lies on others. The members are looked up when the engine starts.
fn mapped_disk(spec: DiskSpec, group: GroupId) -> Result<MappedSpec, Error> {
    if let Some(queue) = &spec.queue {
        let problem =
            format!("queue={queue} rejected: it has no queue of its own; set queue= in its members");
        return Err(disk_error(&spec.name, problem));
    }
    let Source::Mapped(map) = spec.source else {
        unreachable!("the caller has looked")
    };
    Ok(MappedSpec {
        name: spec.name,
        description: spec.description,
        serial: spec.serial,
        export: spec.export,
        map,
        read_only: spec.read_only,
        block_size: spec.block_size,
        group,
    })
}

/// What a driver is to know of a disk.
fn attributes(spec: &DiskSpec, purpose: Purpose) -> Attributes {
    Attributes {
        read_only: spec.read_only,
        block_size: spec.block_size,
        purpose,
    }
}

/// Opens a disk, and its paths if it has some. Also returns the name of its queue.
pub(crate) fn open(
    spec: DiskSpec,
    group: GroupId,
    paths: &mut Paths,
    purpose: Purpose,
) -> Result<(String, OpenedDisk), Error> {
    open_as(spec, group, paths, purpose, None)
}

/// The same for one that may have been opened ahead.
fn open_as(
    spec: DiskSpec,
    group: GroupId,
    paths: &mut Paths,
    purpose: Purpose,
    ahead: Option<Result<Box<dyn OpenDisk>, OpenError>>,
) -> Result<(String, OpenedDisk), Error> {
    let attributes = attributes(&spec, purpose);
    let mut entry = DiskEntry {
        name: spec.name,
        description: spec.description,
        serial: spec.serial,
        export: spec.export,
        size: 0,
        read_only: spec.read_only,
        block_size: spec.block_size.unwrap_or(BLOCK_MIN),
        group,
    };
    let opened: Box<dyn OpenDisk> = match spec.source {
        Source::Driver(config) => {
            let opened = ahead.unwrap_or_else(|| config.open(&attributes));
            opened.map_err(|error| disk_error(&entry.name, error))?
        }
        Source::Multipath(source) => Box::new(multipath::open(&entry, source, paths, purpose)?),
        Source::Mapped(_) | Source::Luks(_) => {
            return Err(disk_error(
                &entry.name,
                "cannot be a path, since it lies on other disks: name a drive's disk",
            ));
        }
    };
    let shape = opened.shape();
    entry.size = shape.size;
    entry.read_only |= shape.read_only;
    entry.block_size = entry.block_size.max(shape.block_size);
    if entry.size == 0 {
        return Err(disk_error(&entry.name, "has no size; set size="));
    }
    if i64::try_from(entry.size).is_err() {
        return Err(disk_error(&entry.name, blkmq_host::disk::too_large(entry.size)));
    }
    let queue = spec.queue.or_else(|| opened.device());
    let queue = queue.unwrap_or_else(|| entry.name.clone());
    Ok((queue, OpenedDisk { entry, opened }))
}

/// Makes the drive of one queue from its disks.
pub(crate) fn join(
    name: String,
    list: Vec<OpenedDisk>,
    settings: &QueueSettings,
    requests: u32,
) -> Result<QueueSpec, Error> {
    check_kinds(&name, &list)?;
    let (entries, mut opened): (Vec<DiskEntry>, Vec<Box<dyn OpenDisk>>) = list
        .into_iter()
        .map(|member| (member.entry, member.opened))
        .unzip();
    let sizes: Vec<u64> = entries.iter().map(|entry| entry.size).collect();
    let first = opened.remove(0);
    let tags = first.tags();
    let depth_max = settings.depth.unwrap_or(0).max(tags.depth());
    let drive = first.join(&name, opened, &sizes, depth_max)?;
    let mut spec = QueueSpec::new(name, drive);
    spec.disks = entries;
    spec.tags = tags;
    spec.depth = settings.depth;
    spec.requests_per_reactor = requests;
    if let Some(limit) = settings.timeout {
        spec.timeout = Nanos(limit.as_nanos() as u64);
    }
    spec.merges = settings.merges.unwrap_or(spec.merges);
    spec.io_poll = settings.polling.io_poll;
    spec.poll_policy = settings.polling.delay.unwrap_or_default();
    spec.is_polled()?;
    Ok(spec)
}

/// One queue has disks of one driver, which decides whether they can share it.
fn check_kinds(queue: &str, list: &[OpenedDisk]) -> Result<(), Error> {
    let first = &list[0];
    for other in &list[1..] {
        let (one, two) = (&first.entry.name, &other.entry.name);
        let kinds = (first.opened.driver(), other.opened.driver());
        if kinds.0 != kinds.1 {
            let problem = format!(
                "disks {one} ({}) and {two} ({}) cannot share it: a queue has one kind of drive; give one another queue=",
                kinds.0, kinds.1
            );
            return Err(device_error(queue, problem));
        }
        if let Err(reason) = first.opened.share_queue(&*other.opened) {
            let problem = format!("{} {one} and {two} cannot share it: {}", reason.disks, reason.why);
            return Err(device_error(queue, problem));
        }
    }
    Ok(())
}

fn disk_error(name: &str, problem: impl ToString) -> Error {
    Error::Disk(format!("disk {name}: {}", problem.to_string()))
}

/// Requests of each reactor at each of `queues` queues. A request that is held for a cap, or waits
/// behind a neighbour, counts.
pub(crate) fn requests_default(queues: usize) -> u32 {
    let reactors = std::thread::available_parallelism().map_or(1, usize::from);
    (REQUESTS_ALL / (reactors * queues)).clamp(REQUESTS_MIN, REQUESTS_MAX) as u32
}

/// Requests of all reactors at all queues together, and the bounds for one reactor at one queue:
/// room for 16 connections with all their requests in flight, as long as memory for the lists
/// between many reactors allows it.
const REQUESTS_ALL: usize = 65_536;
const REQUESTS_MIN: usize = 128;
const REQUESTS_MAX: usize = 4096;

#[cfg(test)]
mod tests;
