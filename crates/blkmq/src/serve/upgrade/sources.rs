//! The comparison of the disks of two daemons at a take-over: the outgoing daemon sends where the
//! data of its disks are, and the incoming one finds the disks that have other data here. Which of
//! them have clients, and are refused, is known when all members are at rest: see `outgoing`.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, bail};
use blkmq_config::luks::Keyring;
use blkmq_config::same::{Data, Differ, check_data};
use blkmq_config::{Config, DiskSpec, Document, Kind, differing_keys};
use blkmq_export::handover::codec::{Difference, SOURCE_BYTES_MAX, Source};
use blkmq_host::control::Control;
use blkmq_host::device::FileId;
use blkmq_host::disk::MAPPED;

/// Where the data of the running daemon's disks are.
///
/// # Errors
/// A disk has more keys than a message can have.
pub(super) fn of_running(
    (document, config): (&Document, &Config),
    (control, keyring): (&Control, &Keyring),
    connected: &BTreeSet<String>,
) -> Result<Vec<Source>> {
    let (disks, below) = (control.disks(), config.below_mapped());
    let source = |spec: &DiskSpec| {
        let name = spec.name.clone();
        let keys = document.get(Kind::Disk, &name).map(ToString::to_string);
        let keys = keys.unwrap_or_default();
        if keys.len() > SOURCE_BYTES_MAX / 2 {
            bail!("disk {name}: {} bytes of keys cannot be handed over", keys.len());
        }
        let served = disks.iter().find(|disk| disk.name == name);
        Ok(Source {
            keys,
            // Below a mapped disk, the configured size decides what is where.
            size: served
                .map(|disk| disk.size)
                .filter(|_| !below.contains_key(&*name)),
            files: files_of(control, keyring, &name).unwrap_or_default(),
            has_clients: connected.contains(&name),
            disk: name,
        })
    };
    config.disks.iter().map(source).collect()
}

/// The files that contain a disk of this daemon, or its header; `None` if it lies on other disks, or is a path.
fn files_of(control: &Control, keyring: &Keyring, name: &str) -> Option<Vec<FileId>> {
    if let Some(header) = keyring.found(name).header {
        return Some(vec![header]);
    }
    let disks = control.disks();
    let disk = disks
        .iter()
        .find(|disk| disk.name == name && disk.queue != MAPPED)?;
    Some(control.device(disk.queue).ok()?.files(disk.id))
}

/// The disks of the daemon that is taken over.
#[derive(Debug, Default)]
pub(super) struct Predecessor(BTreeMap<String, Source>);

/// The disks of the daemon that takes over.
pub(super) struct Ours<'a> {
    pub(super) document: &'a Document,
    pub(super) config: &'a Config,
    /// The disks that have the same data, whatever a comparison finds.
    pub(super) same: &'a [String],
}

/// How the files of a disk are found here, and how many of them at most.
struct FilesOf<'a> {
    find: &'a dyn Fn(&DiskSpec) -> Option<Vec<FileId>>,
    most: usize,
}

impl Predecessor {
    /// Adds a disk.
    pub(super) fn add(&mut self, source: Source) {
        self.0.insert(source.disk.clone(), source);
    }

    /// Checks the disks that have clients, by the files at their paths: before they are opened, so
    /// that no file is made in the place of one that is missing.
    ///
    /// # Errors
    /// The first disk with other data.
    pub(super) fn check(&self, ours: &Ours<'_>) -> Result<()> {
        let at_path = |spec: &DiskSpec| {
            let path = match &spec.source {
                blkmq_config::Source::Luks(luks) => luks.header.as_deref()?,
                source => source.driver()?.file()?.path,
            };
            Some(std::fs::metadata(path).iter().map(FileId::of).collect())
        };
        // An image has its own file first; those below it are known when it is open.
        let at_path = FilesOf {
            find: &at_path,
            most: 1,
        };
        for name in self
            .0
            .values()
            .filter(|disk| disk.has_clients)
            .map(|disk| &disk.disk)
        {
            if let Some(how) = self.difference(name, ours, &at_path) {
                return Err(refusal(name, &how));
            }
        }
        Ok(())
    }

    /// The disks that have other data here, by the files that are open.
    pub(super) fn differences(
        &self,
        ours: &Ours<'_>,
        control: &Control,
        keyring: &Keyring,
    ) -> Vec<Difference> {
        let opened = FilesOf {
            find: &|spec| files_of(control, keyring, &spec.name),
            most: usize::MAX,
        };
        let other_key = |disk: &String| {
            let is_other = keyring.found(disk).has_other_key && !ours.same.contains(disk);
            is_other.then(|| "another key: its LUKS header is another one".to_owned())
        };
        let difference = |disk: &String| {
            let how = self.difference(disk, ours, &opened).or_else(|| other_key(disk))?;
            Some(Difference {
                disk: disk.clone(),
                how,
            })
        };
        self.0.keys().filter_map(difference).collect()
    }

    /// How a disk, or one below it, differs from that of its name here; `None` also if one of the
    /// two daemons does not have it.
    fn difference(&self, name: &str, ours: &Ours<'_>, files: &FilesOf<'_>) -> Option<String> {
        let theirs = self.0.get(name)?;
        let is = ours.config.disks.iter().find(|disk| disk.name == name)?;
        let keys = ours.document.get(Kind::Disk, name)?;
        if ours.same.iter().any(|same| same == name) {
            return None;
        }
        let (was, their_keys) = match with_attributes_of(keys, theirs) {
            Ok(parsed) => parsed,
            Err(error) => return Some(format!("another source ({error:#})")),
        };
        let found = (files.find)(is);
        let served = Data {
            spec: &was,
            size: theirs.size,
            files: Some(&theirs.files[..theirs.files.len().min(files.most)])
                .filter(|files| !is_unknown(&was, files)),
        };
        let later = Data {
            spec: is,
            size: None,
            files: found.as_deref(),
        };
        match check_data(served, later) {
            Ok(()) => {}
            Err(differ @ Differ::File) => return Some(differ.to_string()),
            Err(differ @ Differ::Source) => {
                let mut keys = differing_keys(Some(&their_keys), Some(keys));
                keys.retain(|text| !is_elsewhere(text));
                return Some(format!("{differ} ({})", keys.join(", ")));
            }
        }
        let mut below = was.below().into_iter();
        below.find_map(|disk| {
            let how = self.difference(disk, ours, files)?;
            Some(format!("disk {disk} below it has {how}"))
        })
    }
}

/// Returns whether a daemon has not said which file a header is in: its header could not be opened, or it is of a version that
/// does not say it.
fn is_unknown(spec: &DiskSpec, files: &[FileId]) -> bool {
    matches!(spec.source, blkmq_config::Source::Luks(_)) && files.is_empty()
}

/// The refusal of a disk with clients.
pub(super) fn refusal(disk: &str, how: &str) -> anyhow::Error {
    anyhow::anyhow!(
        "disk {disk}: it has clients, and in the new configuration {how}: what they have cached would be written into other \
         data; if the data are the same, byte for byte, add --same-data to --take-over for each disk that was moved, as in \
         --same-data {disk}"
    )
}

/// The disk that another daemon has, with those attributes of ours that are no part of its source,
/// and may differ; and its keys.
fn with_attributes_of(ours: &toml::Table, theirs: &Source) -> Result<(DiskSpec, toml::Table)> {
    let mut keys: toml::Table = theirs.keys.parse().context("its keys cannot be read")?;
    for attribute in ATTRIBUTES {
        match ours.get(*attribute) {
            Some(value) => keys.insert((*attribute).to_owned(), value.clone()),
            None => keys.remove(*attribute),
        };
    }
    let mut document = Document::default();
    document.insert(Kind::Disk, &theirs.disk, keys.clone())?;
    let config = document.config()?;
    let spec = config
        .disks
        .into_iter()
        .next()
        .context("a document of one disk")?;
    Ok((spec, keys))
}

/// Returns whether a text that begins with a key is of one that is no part of a source.
fn is_elsewhere(text: &str) -> bool {
    let key = text.split(' ').next().unwrap_or_default();
    SETTINGS.contains(&key)
}

/// Attributes of every disk that its clients are told of, and that are compared as such.
const ATTRIBUTES: &[&str] = &["ro", "read_only", "block_size"];
/// Keys of every disk that do not concern its data.
const SETTINGS: &[&str] = &[
    "queue",
    "sched",
    "io_poll",
    "io_poll_delay",
    "group",
    "description",
    "serial",
    "export",
];
