//! What a change needs of files and of other hosts, asked for before the change begins and with no
//! lock held: a drive that does not answer then holds up this change alone.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use blkmq_config::diff::Change;
use blkmq_config::live::{self, Opened};
use blkmq_config::luks::Known;
use blkmq_config::{Config, Document, describe};

use super::Running;
use super::encrypted::encrypted;
use crate::serve::last_sync::Files;
use crate::serve::{dry_run, keys};

/// A change that is possible, as far as could be seen without opening anything.
pub(super) struct Planned {
    /// The number of changes before it.
    pub(super) seen: u64,
    pub(super) old: Config,
    pub(super) new: Config,
    pub(super) document: Document,
    pub(super) changes: Vec<Change>,
    /// The steps, for people.
    pub(super) texts: Vec<String>,
}

impl Planned {
    pub(super) fn new(
        seen: u64,
        (old, was): (Config, &Document),
        (new, document): (Config, Document),
        changes: Vec<Change>,
    ) -> Self {
        let texts = changes.iter().map(|change| describe(change, was, &document));
        Self {
            seen,
            texts: texts.collect(),
            old,
            new,
            document,
            changes,
        }
    }
}

impl Running {
    /// Checks that a change is possible and permitted by `may`, as far as could be seen without opening anything: the file of
    /// a disk may not be there yet.
    ///
    /// # Errors
    /// As of [`Running::change_if`].
    pub(crate) fn check_change(
        &self,
        edit: impl Fn(&mut Document) -> Result<()>,
        may: impl Fn(&[Change]) -> Result<()>,
    ) -> Result<()> {
        let planned = self.planned(edit)?;
        may(&planned.changes)?;
        self.sandbox.check(&planned.old, &planned.new)
    }
}

/// A new disk that is open, with its files for the end.
pub(super) struct OpenedDisk {
    pub(super) disk: Opened,
    pub(super) files: Files,
}

impl OpenedDisk {
    /// Opens a disk of `config`. Blocks for as long as its drive does not answer.
    ///
    /// # Errors
    /// Why it cannot be served.
    fn open(config: &Config, name: &str) -> Result<Self> {
        Self::with_files(live::open_disk(config, name)?, config, name)
    }

    fn with_files(disk: Opened, config: &Config, name: &str) -> Result<Self> {
        let files = Files::open_of(config, name)?;
        Ok(Self { disk, files })
    }
}

/// New disks that are open, by name.
#[derive(Default)]
pub(super) struct Prepared {
    disks: BTreeMap<String, OpenedDisk>,
    /// What was found of encrypted ones.
    pub(super) keys: BTreeMap<String, Known>,
}

impl Prepared {
    /// Opens the new disks, those at other hosts first and side by side, and reads the files of new and changed
    /// addresses to see that they can be read. A disk that takes the place of one that goes is opened by its step, when that one is
    /// gone.
    ///
    /// # Errors
    /// The step that cannot be made, and why.
    pub(super) fn make(planned: &Planned) -> Result<Self> {
        dry_run::check_exports(&planned.new)?;
        keys::leave_no_core_with_keys(&planned.new.disks)?;
        let mut prepared = Self::default();
        let (config, changes) = (&planned.new, &planned.changes);
        let removal = changes
            .iter()
            .position(|change| matches!(change, Change::RemoveDisk(_)));
        let before = &changes[..removal.unwrap_or(changes.len())];
        let names = before.iter().filter_map(|change| match change {
            Change::AddDisk(name) if encrypted(config, name).is_none() => Some(name.as_str()),
            _ => None,
        });
        let mut remote = live::open_remote_disks(config, names.clone());
        for name in names {
            let opened = match remote.remove(name) {
                Some(disk) => disk.and_then(|disk| OpenedDisk::with_files(disk, config, name)),
                None => OpenedDisk::open(config, name),
            };
            let change = || Change::AddDisk(name.to_owned()).to_string();
            prepared
                .disks
                .insert(name.to_owned(), opened.with_context(change)?);
        }
        for change in changes {
            match change {
                Change::AddExport(spec) | Change::Export(spec) => {
                    let checked = spec.at.check();
                    checked.with_context(|| change.to_string())?;
                }
                Change::Key(disk) => dry_run::check_key_of(disk, config)?,
                _ => {}
            }
        }
        Ok(prepared)
    }

    /// Takes a disk that is open already, or opens it now.
    ///
    /// # Errors
    /// As for [`OpenedDisk::open`].
    pub(super) fn take(&mut self, config: &Config, name: &str) -> Result<OpenedDisk> {
        match self.disks.remove(name) {
            Some(opened) => Ok(opened),
            None => OpenedDisk::open(config, name),
        }
    }
}
