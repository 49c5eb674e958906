//! Adds configured disks to a running engine, each in its group and on its queue, and removes them. A
//! queue is made or removed if necessary. Disks are checked and opened as by [`plan()`](crate::plan()) at
//! the start.

use std::any::Any;
use std::collections::BTreeMap;

use blkmq_core::ids::GroupId;
use blkmq_core::time::Nanos;
use blkmq_drivers::driver::{OpenDisk, Purpose};
use blkmq_host::control::Control;
use blkmq_host::disk::{Disk, MAPPED, QueueId};
use blkmq_host::group_paths::{self, parent_of};
use blkmq_host::{DiskEntry, Error};

use crate::config::Config;
use crate::disk::{DiskSpec, Source};
use crate::group::{self, GroupSpec};
use crate::luks::{Keyring, Known, PlannedLuks};
use crate::plan::ahead::{is_remote, side_by_side};
use crate::plan::settings::{self, Wish};
use crate::plan::{self, OpenedDisk, multipath};
use crate::queue::QueueSettings;

/// A disk that is open, to be added to an engine.
pub struct Opened {
    queue: String,
    member: OpenedDisk,
}

/// Adds a disk of `config` to an engine that has other disks of it already.
///
/// # Errors
/// Why the disk cannot be served, with its name; nothing is changed then.
pub fn add_disk(control: &Control, config: &Config, name: &str) -> anyhow::Result<Disk> {
    add_opened(control, config, name, open_disk(config, name)?)
}

/// Opens a disk of `config`, and its paths. May block for as long as its drive does not answer.
///
/// # Errors
/// Why the disk cannot be served, with its name.
pub fn open_disk(config: &Config, name: &str) -> anyhow::Result<Opened> {
    let spec = spec_of(config, name)?;
    let mut disks = config.disks.clone();
    let mut paths = multipath::Paths::take_from(&mut disks);
    group_paths::check_path(&spec.group)?;
    let (queue, member) = plan::open(spec.clone(), GroupId(0), &mut paths, Purpose::Serve)?;
    Ok(Opened { queue, member })
}

/// Opens those of these disks that are at other hosts, side by side: each may take seconds. By their names.
pub fn open_remote_disks<'a>(
    config: &Config,
    names: impl IntoIterator<Item = &'a str>,
) -> BTreeMap<&'a str, anyhow::Result<Opened>> {
    let mut names: Vec<&str> = names.into_iter().collect();
    names.retain(|name| {
        config
            .disks
            .iter()
            .any(|disk| disk.name == *name && is_remote(disk))
    });
    let opened = side_by_side(&names, |name| open_disk(config, name));
    names.into_iter().zip(opened).collect()
}

/// Adds a disk that is open, as [`add_disk`] does.
///
/// # Errors
/// As for [`add_disk`].
pub fn add_opened(control: &Control, config: &Config, name: &str, opened: Opened) -> anyhow::Result<Disk> {
    let spec = spec_of(config, name)?;
    let Opened { queue, member } = opened;
    match control.queue(&queue) {
        Ok(id) => join(control, config, id, spec, member),
        Err(_) => begin(control, config, queue, spec, member),
    }
}

/// Adds an encrypted disk of which all is known; the disk on which it lies is there.
///
/// # Errors
/// Why the disk cannot be served, with its name; nothing is changed then.
pub fn add_encrypted(
    (control, keyring): (&Control, &Keyring),
    config: &Config,
    name: &str,
    known: Known,
) -> anyhow::Result<Disk> {
    let spec = find(config, name)?;
    let Source::Luks(source) = &spec.source else {
        anyhow::bail!("disk {name}: is not encrypted by this daemon");
    };
    group_paths::check_path(&spec.group)?;
    let queues = control.queues_of(&control.check_below(name, &source.below)?);
    let added = make_group_on(control, config, &queues, spec).and_then(|group| {
        let planned = PlannedLuks {
            spec: spec.clone(),
            source: source.clone(),
            group,
        };
        keyring.add(control, &planned, known)
    });
    if added.is_err() {
        queues
            .iter()
            .for_each(|queue| remove_empty_groups(control, *queue, &spec.group));
    }
    added
}

/// Makes the group of a disk on queues, or finds it.
///
/// # Errors
/// There can be no such group, or it has several numbers there.
fn make_group_on(
    control: &Control,
    config: &Config,
    queues: &[QueueId],
    spec: &DiskSpec,
) -> anyhow::Result<GroupId> {
    let groups = queues
        .iter()
        .map(|queue| make_group(control, config, *queue, &spec.group));
    let groups = groups.collect::<Result<Vec<_>, _>>()?;
    let (name, path) = (&spec.name, &spec.group);
    match groups.first() {
        Some(first) if groups.iter().all(|group| group == first) => Ok(*first),
        _ => anyhow::bail!(
            "disk {name}: its group {path} would have different numbers on the {} queues below: give it the group= of the disk on \
             which it lies, or start a daemon with the new configuration that takes over (--take-over)",
            queues.len()
        ),
    }
}

fn find<'a>(config: &'a Config, name: &str) -> anyhow::Result<&'a DiskSpec> {
    let found = config.disks.iter().find(|disk| disk.name == name);
    found.ok_or_else(|| anyhow::anyhow!("disk {name}: there is no such disk in the configuration"))
}

fn spec_of<'a>(config: &'a Config, name: &str) -> anyhow::Result<&'a DiskSpec> {
    let spec = find(config, name)?;
    if spec.source.is_without_queue() {
        anyhow::bail!("disk {name}: lies on other disks, and cannot be added while the daemon runs");
    }
    Ok(spec)
}

/// Opens a disk that is in a file of this host, as [`add_disk`] would; `None` for other disks.
///
/// # Errors
/// Why the disk cannot be served, with its name.
pub fn open_file(spec: &DiskSpec) -> anyhow::Result<Option<Box<dyn OpenDisk>>> {
    if spec.source.driver().and_then(|driver| driver.file()).is_none() {
        return Ok(None);
    }
    let no_paths = &mut multipath::Paths::take_from(&mut Vec::new());
    let (_, member) = plan::open(spec.clone(), GroupId(0), no_paths, Purpose::Serve)?;
    Ok(Some(member.opened))
}

/// Removes a disk, when its users have released it, at most `limit` later; its queue, if the disk
/// was the last one there; and its group on that queue, if no other disk is in it.
///
/// # Errors
/// Why the disk stays.
pub fn remove_disk(control: &Control, name: &str, limit: Nanos) -> anyhow::Result<()> {
    let disks = control.disks();
    let Some(disk) = disks.iter().find(|disk| disk.name == name) else {
        anyhow::bail!("disk {name}: there is no such disk");
    };
    let below = control.queues_of(disk);
    let path = below
        .first()
        .and_then(|queue| control.group_path(*queue, disk.group));
    control.remove_disk(name, limit)?;
    if disk.queue == MAPPED {
        // At the start, such a group is made on all queues.
        let queues = control.queues().into_iter();
        queues
            .zip(path.iter().cycle())
            .for_each(|((queue, _), path)| remove_empty_groups(control, queue, path));
        return Ok(());
    }
    let is_last = !control.disks().iter().any(|other| other.queue == disk.queue);
    if is_last && control.device(disk.queue)?.is_removable() {
        if let Err(error) = control.remove_queue(disk.queue) {
            // The disk is removed, and its clients have left: what is left of its queue ends with the daemon.
            tracing::error!(disk = name, "disk {name}: removed; its queue stays: {error}");
        }
        return Ok(());
    }
    if let Some(path) = path {
        remove_empty_groups(control, disk.queue, &path);
    }
    Ok(())
}

/// Adds a disk to an existing queue.
fn join(
    control: &Control,
    config: &Config,
    queue: QueueId,
    spec: &DiskSpec,
    member: OpenedDisk,
) -> anyhow::Result<Disk> {
    let OpenedDisk { mut entry, opened } = member;
    let core = control.core(queue)?;
    settings::agrees(spec, core.name(), core.elevator())?;
    // A disk's requests are cut at the blocks of its queue.
    entry.block_size = entry.block_size.max(core.limits().logical_block);
    if !entry.size.is_multiple_of(entry.block_size.into()) {
        anyhow::bail!(
            "disk {}: size {} rejected: must be a multiple of {}, the block size of its queue {}; give it a queue= of its own",
            entry.name,
            entry.size,
            entry.block_size,
            core.name()
        );
    }
    entry.group = make_group(control, config, queue, &spec.group)?;
    let opened: Box<dyn Any + Send> = opened;
    let added = control.add_disk(queue, entry, opened);
    if added.is_err() {
        remove_empty_groups(control, queue, &spec.group);
    }
    Ok(added?)
}

/// Makes a queue for a disk.
fn begin(
    control: &Control,
    config: &Config,
    queue: String,
    spec: &DiskSpec,
    member: OpenedDisk,
) -> anyhow::Result<Disk> {
    let mut groups = vec!["/".to_owned()];
    let group = group::number_of(&mut groups, &spec.group);
    let name = member.entry.name.clone();
    let entry = DiskEntry {
        group,
        ..member.entry
    };
    let member = OpenedDisk { entry, ..member };
    let requests = plan::requests_default(control.queues().len() + 1);
    let default = QueueSettings::default();
    let settings_of = config.queues.get(&queue).unwrap_or(&default);
    let mut made = plan::join(queue, vec![member], settings_of, requests)?;
    plan::set_groups_of(&mut made, &groups, &config.groups)?;
    settings::apply(&mut made, config, plan::Groups::OfItsDisks)?;
    control.add_queue(made)?;
    let disks = control.disks();
    let disk = disks.iter().find(|disk| disk.name == name).cloned();
    disk.ok_or_else(|| anyhow::anyhow!("disk {name}: it is gone already"))
}

/// Finds a group of a queue, or makes it and its parents, as configured.
///
/// # Errors
/// There can be no such group.
pub fn make_group(control: &Control, config: &Config, queue: QueueId, path: &str) -> Result<GroupId, Error> {
    let missing: Vec<&str> = std::iter::successors(Some(path), |path| Some(parent_of(path)))
        .take_while(|path| *path != "/" && control.group(queue, path).is_err())
        .collect();
    let id = control.make_group(queue, path)?;
    for path in missing.iter().rev() {
        let Some(spec) = config.groups.iter().find(|group| group.path == *path) else {
            continue;
        };
        if let Err(error) = set_group(control, queue, spec) {
            remove_empty_groups(control, queue, missing[0]);
            return Err(error);
        }
    }
    Ok(id)
}

/// Gives a group of a queue its weight, caps and latency target.
///
/// # Errors
/// The queue's error.
pub fn set_group(control: &Control, queue: QueueId, spec: &GroupSpec) -> Result<(), Error> {
    if spec.path != "/" {
        control.set_group_weight(queue, &spec.path, spec.weight())?;
    }
    control.set_group_caps(queue, &spec.path, spec.caps)?;
    control.set_group_latency_target(queue, &spec.path, spec.latency_target)
}

/// Changes the settings of a running queue from one wish to another.
///
/// # Errors
/// The queue's error.
pub fn set_queue(control: &Control, queue: QueueId, from: &Wish, to: &Wish) -> Result<(), Error> {
    let core = control.core(queue)?;
    let kind = to.elevator.unwrap_or_default();
    if core.elevator() == kind {
        let defaults = kind.tunables(core.limits());
        let is_set = |name: &str| to.tunables.iter().any(|(other, _)| other == name);
        let was_set = |name: &str| from.tunables.iter().any(|(other, _)| other == name);
        for (name, value) in defaults {
            if was_set(name) && !is_set(name) {
                control.set_tunable(queue, name, value)?;
            }
        }
    } else {
        // A new one has the defaults.
        control.set_elevator(queue, kind)?;
    }
    for (name, value) in &to.tunables {
        control.set_tunable(queue, name, *value)?;
    }
    if from.depth != to.depth {
        control.set_depth(queue, to.depth.unwrap_or(core.depth_default()))?;
    }
    if from.polling.delay != to.polling.delay {
        control.set_poll_policy(queue, to.polling.delay.unwrap_or_default())?;
    }
    if from.polling.io_poll != to.polling.io_poll {
        let is_usual = control.device(queue)?.polling() == blkmq_host::device::Polling::Usual;
        control.set_io_poll(queue, to.polling.io_poll.unwrap_or(is_usual))?;
    }
    Ok(())
}

/// Checks a change of [`set_queue`] against the queue's drive, before anything of it is done.
///
/// # Errors
/// What the drive does not permit.
pub fn check_queue(control: &Control, queue: QueueId, from: &Wish, to: &Wish) -> Result<(), Error> {
    let polls = to.polling.io_poll == Some(true) && from.polling.io_poll != to.polling.io_poll;
    let policy = to
        .polling
        .delay
        .filter(|_| from.polling.delay != to.polling.delay);
    control.check_polling(queue, polls, policy.unwrap_or_default())
}

/// Checks that every drive can be shared with the caps of all groups.
///
/// # Errors
/// The first cap that is rejected.
pub fn check_groups(control: &Control, config: &Config) -> Result<(), Error> {
    for (_, queue) in control.queues() {
        for spec in &config.groups {
            group::check_caps(spec, queue.limits())?;
        }
    }
    Ok(())
}

/// Changes a group to its configuration, or to the default without one, on the queues that have
/// disks in it.
///
/// # Errors
/// A queue's error.
pub fn change_group(control: &Control, config: &Config, path: &str) -> Result<(), Error> {
    let default = GroupSpec::new(path)?;
    let spec = config.groups.iter().find(|group| group.path == path);
    let spec = spec.unwrap_or(&default);
    for (_, queue) in control.queues() {
        group::check_caps(spec, queue.limits())?;
    }
    for (queue, _) in control.queues() {
        if control.group(queue, path).is_ok() {
            set_group(control, queue, spec)?;
        }
    }
    Ok(())
}

/// Gives a group of all queues the settings of `spec`; where it is missing it is made.
///
/// # Errors
/// A queue's error. No queue is changed if a drive cannot be shared with its caps, or a queue has no room for one more group.
pub fn set_group_of_all(control: &Control, spec: &GroupSpec) -> Result<(), Error> {
    let queues = control.queues();
    for (_, queue) in &queues {
        group::check_caps(spec, queue.limits())?;
    }
    let is_missing = |queue: &&(QueueId, _)| control.group(queue.0, &spec.path).is_err();
    let missing: Vec<QueueId> = queues
        .iter()
        .filter(is_missing)
        .map(|(queue, _)| *queue)
        .collect();
    for (at, queue) in missing.iter().enumerate() {
        if let Err(error) = control.make_group(*queue, &spec.path) {
            for queue in &missing[..at] {
                remove_empty_groups(control, *queue, &spec.path);
            }
            return Err(error);
        }
    }
    for (queue, _) in queues {
        set_group(control, queue, spec)?;
    }
    Ok(())
}

/// Removes a group, and its parents, up to the first that is still used.
fn remove_empty_groups(control: &Control, queue: QueueId, path: &str) {
    let mut path = path;
    // In use, or with groups below it: it stays.
    while path != "/" && control.remove_group(queue, path).is_ok() {
        path = parent_of(path);
    }
}
