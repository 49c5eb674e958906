//! The difference between two configurations: the steps that change a running daemon from one to the
//! other, and what cannot be changed while it runs. `live` executes the steps that concern the engine.

use std::collections::BTreeMap;
use std::fmt;

use anyhow::{Result, bail};

use crate::config::Config;
use crate::control::Account;
use crate::disk::{DiskSpec, Source};
use crate::export::ExportSpec;
use crate::queue::QueueSettings;
use crate::same::{Data, check_data};

/// One step from a configuration to another. The same step with the two exchanged undoes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// A disk to be added.
    AddDisk(String),
    /// A disk to be removed.
    RemoveDisk(String),
    /// Another place of an encrypted disk's key, which is looked at when the disk is opened next.
    Key(String),
    /// A group whose configuration is added, changed or removed.
    Group(String),
    /// Changes of queues by their settings, by their disks or by the default for all.
    Queues,
    /// An address to be added.
    AddExport(ExportSpec),
    /// An address to be removed.
    RemoveExport(ExportSpec),
    /// An address that serves other disks, or another number of connections.
    Export(ExportSpec),
    /// The limit of a shutdown.
    ShutdownLimit,
}

impl Change {
    /// The step that undoes this one. `before` is the configuration before it.
    #[must_use]
    pub fn inverse(&self, before: &Config) -> Self {
        match self {
            Self::AddDisk(name) => Self::RemoveDisk(name.clone()),
            Self::RemoveDisk(name) => Self::AddDisk(name.clone()),
            Self::AddExport(export) => Self::RemoveExport(export.clone()),
            Self::RemoveExport(export) => Self::AddExport(export.clone()),
            Self::Export(export) => {
                let was = before.exports.iter().find(|other| is_same_place(other, export));
                Self::Export(was.unwrap_or(export).clone())
            }
            same => same.clone(),
        }
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AddDisk(name) => write!(f, "add disk {name}"),
            Self::RemoveDisk(name) => write!(f, "remove disk {name}"),
            Self::Key(disk) => write!(f, "set key of disk {disk}"),
            Self::Group(path) => write!(f, "set group {path}"),
            Self::Queues => write!(f, "set queues"),
            Self::AddExport(export) => write!(f, "serve at {} {}", export.door, export.address),
            Self::RemoveExport(export) => write!(f, "close {} {}", export.door, export.address),
            Self::Export(export) => write!(f, "change what is served at {} {}", export.door, export.address),
            Self::ShutdownLimit => write!(f, "set shutdown_limit"),
        }
    }
}

/// The steps from one configuration to another, in an order that works; none if both mean the same.
/// `sizes` are those of the disks that are served, in bytes.
///
/// # Errors
/// The first difference that cannot be made while the daemon runs, and what to do instead.
pub fn diff(old: &Config, new: &Config, sizes: &BTreeMap<String, u64>) -> Result<Vec<Change>> {
    check_daemon(old, new)?;
    check_disks(old, new, sizes)?;
    check_queues(old, new)?;
    check_exports(old, new)?;
    let mut changes = Vec::new();
    if old.shutdown_limit != new.shutdown_limit {
        changes.push(Change::ShutdownLimit);
    }
    let keys = new.disks.iter().filter(|disk| has_another_key(disk, old));
    changes.extend(keys.map(|disk| Change::Key(disk.name.clone())));
    exports_that_go(old, new, &mut changes);
    let (upper, lower) = served_in_one(old, new);
    let gone = upper.into_iter().chain(lower);
    let (first, last): (Vec<&DiskSpec>, Vec<&DiskSpec>) =
        gone.partition(|disk| is_in_the_way(disk, old, new));
    let remove = |disk: &&DiskSpec| Change::RemoveDisk(disk.name.clone());
    changes.extend(first.iter().map(remove));
    let configured = new.groups.iter().filter(|group| !old.groups.contains(group));
    changes.extend(configured.map(|group| Change::Group(group.path.clone())));
    let (upper, lower) = served_in_one(new, old);
    let come = lower.into_iter().chain(upper);
    changes.extend(come.map(|disk| Change::AddDisk(disk.name.clone())));
    changes.extend(last.iter().map(remove));
    let names = |config: &Config, path: &str| config.groups.iter().any(|group| group.path == path);
    let forgotten = old.groups.iter().filter(|group| !names(new, &group.path));
    changes.extend(forgotten.map(|group| Change::Group(group.path.clone())));
    if asks_otherwise(old, new) {
        changes.push(Change::Queues);
    }
    exports_that_come(old, new, &mut changes);
    Ok(changes)
}

/// Several exports may have one address whose port the system chooses (`tcp:0`). Which of them a
/// change means cannot be told.
fn check_exports(old: &Config, new: &Config) -> Result<()> {
    for export in &new.exports {
        let [was, is] = [old, new].map(|config| -> Vec<&ExportSpec> {
            let all = config.exports.iter();
            all.filter(|other| is_same_place(other, export)).collect()
        });
        if !was.is_empty() && was.len().max(is.len()) > 1 && was != is {
            bail!(
                "export {} cannot be changed while the daemon runs: there are several of this address; give each its own",
                export.address
            );
        }
    }
    Ok(())
}

fn exports_that_go(old: &Config, new: &Config, changes: &mut Vec<Change>) {
    let stays = |export: &ExportSpec| new.exports.iter().any(|other| is_same_place(other, export));
    let gone = old.exports.iter().filter(|export| !stays(export));
    changes.extend(gone.cloned().map(Change::RemoveExport));
}

fn exports_that_come(old: &Config, new: &Config, changes: &mut Vec<Change>) {
    for export in &new.exports {
        if old.exports.contains(export) {
            continue;
        }
        let is_there = old.exports.iter().any(|other| is_same_place(other, export));
        changes.push(match is_there {
            true => Change::Export(export.clone()),
            false => Change::AddExport(export.clone()),
        });
    }
}

/// Returns whether two are the same address of the same front door.
pub fn is_same_place(one: &ExportSpec, other: &ExportSpec) -> bool {
    one.door == other.door && one.address == other.address
}

/// Returns whether a configuration has a disk that is no path of another: paths are opened with
/// that one.
fn is_served(config: &Config, disk: &DiskSpec) -> bool {
    find(config, &disk.name).is_some() && !config.is_path(&disk.name)
}

/// The disks that one of two configurations serves alone: encrypted ones, and others, on which those may lie.
fn served_in_one<'a>(one: &'a Config, other: &Config) -> (Vec<&'a DiskSpec>, Vec<&'a DiskSpec>) {
    let disks = one.disks.iter();
    let alone = disks.filter(|disk| is_served(one, disk) && !is_served(other, disk));
    alone.partition(|disk| matches!(disk.source, Source::Luks(_)))
}

fn find<'a>(config: &'a Config, name: &str) -> Option<&'a DiskSpec> {
    config.disks.iter().find(|disk| disk.name == name)
}

/// Returns whether a disk has to be removed before another one can be added: it has that one's
/// file or is alone on its queue, or becomes its path, or has it as a path; or it lies on that one's disk, or on
/// one that is in the way.
fn is_in_the_way(disk: &DiskSpec, old: &Config, new: &Config) -> bool {
    if let Source::Luks(source) = &disk.source {
        let below = source.below.as_str();
        let has_other = || new.disks.iter().any(|other| other.below().contains(&below));
        let goes = |below: &DiskSpec| !is_served(new, below) && is_in_the_way(below, old, new);
        return has_other() || find(old, below).is_some_and(goes);
    }
    let is_freed =
        |path: &&str| old.is_path(path) && find(new, path).is_some_and(|disk| is_served(new, disk));
    if new.is_path(&disk.name) || disk.below().iter().any(is_freed) {
        return true;
    }
    let path = |disk: &DiskSpec| Some(disk.source.driver()?.file()?.path.to_owned());
    let (file, queue) = (path(disk), disk.queue_name());
    let is_for = |other: &DiskSpec| {
        let is_alone = || queue.is_some() && other.queue_name() == queue && !disk.may_be_joined_by(other);
        file.is_some() && path(other) == file || is_alone()
    };
    let mut wanted = new.disks.iter().filter(|other| is_for(other));
    wanted.any(|other| find(old, &other.name).is_none())
}

fn check_daemon(old: &Config, new: &Config) -> Result<()> {
    let (old, new) = (fixed(old), fixed(new));
    let value = |keys: &BTreeMap<String, String>, key| keys.get(key).cloned().unwrap_or_else(default);
    let mut keys = old.keys().chain(new.keys());
    match keys.find(|key| old.get(*key) != new.get(*key)) {
        Some(key) => bail!(
            "{key}: cannot be changed while the daemon runs ({was} -> {is}): keep it as `blkmq ctl dump` prints it, which has \
             the flags of the start too, or start a daemon with the new configuration that takes over (--take-over)",
            was = value(&old, key),
            is = value(&new, key)
        ),
        None => Ok(()),
    }
}

/// The keys that cannot be changed while the daemon runs, with their values.
fn fixed(config: &Config) -> BTreeMap<String, String> {
    let own = [
        ("[daemon] reactors", shown(&config.reactors)),
        ("[daemon] wait", config.wait.to_string()),
        ("[daemon] upgrade_socket", shown(&config.upgrade_socket)),
        ("[daemon] sandbox", shown(&config.sandbox)),
        ("[daemon] paths", format!("{:?}", config.paths)),
        ("[control] socket", shown(&config.control.socket)),
        ("[control] readers", listed(&config.control.readers)),
        ("[control] tenants", tenants(&config.control.tenants)),
        ("[metrics] address", shown(&config.metrics.address)),
        (
            "[metrics] allow_insecure",
            config.metrics.allow_insecure.to_string(),
        ),
        (
            "[metrics] group_levels",
            shown(&config.metrics.detail.group_levels),
        ),
        ("[metrics] disks", config.metrics.detail.disks.to_string()),
        ("[metrics] exports", config.metrics.detail.exports.to_string()),
    ];
    let own = own.into_iter().map(|(key, value)| (key.to_owned(), value));
    let of_doors = config.doors.iter().flat_map(|(door, keys)| {
        let shown = move |key| Some((format!("[{door}] {key}"), keys.shown(key)?));
        keys.names().filter_map(shown)
    });
    own.chain(of_doors).collect()
}

/// Users and groups, for people.
fn listed(accounts: &[Account]) -> String {
    match accounts {
        [] => "nobody".to_owned(),
        all => all.iter().map(Account::to_string).collect::<Vec<_>>().join(", "),
    }
}

fn tenants(tenants: &BTreeMap<String, Vec<Account>>) -> String {
    match tenants.is_empty() {
        true => "none".to_owned(),
        false => {
            let all = tenants.iter();
            let all = all.map(|(path, accounts)| format!("{path}: {}", listed(accounts)));
            all.collect::<Vec<_>>().join("; ")
        }
    }
}

/// A value of a key, for people.
fn shown(value: &Option<impl fmt::Debug>) -> String {
    value.as_ref().map_or_else(default, |value| format!("{value:?}"))
}

/// The value of a key that is not given, for people.
fn default() -> String {
    "default".to_owned()
}

fn check_disks(old: &Config, new: &Config, sizes: &BTreeMap<String, u64>) -> Result<()> {
    let below = old.below_mapped();
    for disk in &new.disks {
        // Below a mapped disk, the configured size decides what is where.
        let is_below = below.contains_key(disk.name.as_str());
        let size = sizes.get(&disk.name).copied().filter(|_| !is_below);
        let is_mapped = matches!(disk.source, Source::Mapped(_));
        match find(old, &disk.name) {
            Some(before) => check_same(before, size, disk)?,
            None if is_mapped => bail!(
                "disk {}: lies on other disks, and cannot be added while the daemon runs; start one with the new configuration \
                 that takes over (--take-over)",
                disk.name
            ),
            None => check_joined(old, new, disk)?,
        }
    }
    let mut gone = old.disks.iter().filter(|disk| find(new, &disk.name).is_none());
    match gone.find(|disk| matches!(disk.source, Source::Mapped(_))) {
        Some(disk) => bail!(
            "disk {}: lies on other disks, and cannot be removed while the daemon runs; start one with the new configuration \
             that takes over (--take-over)",
            disk.name
        ),
        None => Ok(()),
    }
}

/// Checks that a new disk can join the disks that are on its queue already, or come to it before.
fn check_joined(old: &Config, new: &Config, disk: &DiskSpec) -> Result<()> {
    let Some(queue) = disk.queue_name().filter(|_| !new.is_path(&disk.name)) else {
        return Ok(());
    };
    let is_there = |other: &DiskSpec| {
        let mut before = new.disks.iter().take_while(|one| one.name != disk.name);
        find(old, &other.name).is_some() || before.any(|one| one.name == other.name)
    };
    let is_against = |other: &&DiskSpec| other.queue_name() == Some(queue) && !other.may_be_joined_by(disk);
    let mut others = new.disks.iter().filter(is_against);
    match others.find(|other| other.name != disk.name && !new.is_path(&other.name) && is_there(other)) {
        Some(other) => bail!(
            "disk {}: queue {queue} has disk {} already, and only disks on files join others on files while the daemon runs, and \
             disks in a cluster others in it: give it a queue= of its own",
            disk.name,
            other.name
        ),
        None => Ok(()),
    }
}

/// Checks that a disk, which has this size if it is served, is what the new configuration asks for, up to
/// the settings for its queue.
fn check_same(one: &DiskSpec, size: Option<u64>, other: &DiskSpec) -> Result<()> {
    let keys = |disk: &DiskSpec| {
        [
            ("queue", shown(&disk.queue)),
            ("group", format!("{:?}", disk.group)),
            ("description", format!("{:?}", disk.description)),
            ("serial", disk.serial()),
            ("export", disk.export().to_owned()),
            ("ro", disk.read_only.to_string()),
            ("block_size", shown(&disk.block_size)),
            ("discard", passes_discards(disk).to_string()),
        ]
    };
    let mut pairs = keys(one).into_iter().zip(keys(other));
    if let Some(((key, was), (_, is))) = pairs.find(|(was, is)| was != is) {
        bail!(
            "disk {}: {key}: cannot be changed while it is served ({was} -> {is}): remove it and add it again",
            one.name
        );
    }
    // A disk that stays keeps its open files, whatever is at their paths now.
    let data = |spec, size| Data {
        spec,
        size,
        files: None,
    };
    if check_data(data(one, size), data(other, None)).is_err() {
        bail!(
            "disk {}: its source with its keys, and its size, cannot be changed while it is served: remove it and add it again; it \
             can grow by blkmq ctl resize",
            one.name
        );
    }
    Ok(())
}

fn has_another_key(disk: &DiskSpec, old: &Config) -> bool {
    let key = |disk: &DiskSpec| match &disk.source {
        Source::Luks(source) => source.key.clone(),
        _ => None,
    };
    find(old, &disk.name).is_some_and(|before| key(before) != key(disk))
}

fn passes_discards(disk: &DiskSpec) -> bool {
    matches!(&disk.source, Source::Luks(source) if source.discard)
}

fn check_queues(old: &Config, new: &Config) -> Result<()> {
    let default = QueueSettings::default();
    let both = old.queues.keys().chain(new.queues.keys());
    for name in both.filter(|name| old.has_queue(name) && new.has_queue(name)) {
        let was = old.queues.get(name).unwrap_or(&default);
        let is = new.queues.get(name).unwrap_or(&default);
        for (key, is_same) in [
            ("timeout", was.timeout == is.timeout),
            ("merges", was.merges == is.merges),
        ] {
            if !is_same {
                bail!(
                    "queue {name}: {key}: cannot be changed while its disks are served: remove them and add them again"
                );
            }
        }
    }
    Ok(())
}

/// Returns whether the settings of a queue differ, as far as can be seen without the list of its
/// disks.
fn asks_otherwise(old: &Config, new: &Config) -> bool {
    let asks = |disk: &DiskSpec| {
        let before = find(old, &disk.name);
        before.is_some_and(|before| (before.sched, before.polling) != (disk.sched, disk.polling))
    };
    (&old.queues, old.sched) != (&new.queues, new.sched) || new.disks.iter().any(asks)
}

#[cfg(test)]
mod tests;
