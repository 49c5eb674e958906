//! What a change needs of files and of other hosts, asked for before the change begins and with no
//! lock held: a drive that does not answer then holds up this change alone.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use blkmq_config::diff::Change;
use blkmq_config::live::{self, Opened};
use blkmq_config::{Config, Document, describe};

use crate::serve::dry_run;
use crate::serve::last_sync::Files;

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
    pub(super) fn open(config: &Config, name: &str) -> Result<Self> {
        Ok(Self {
            disk: live::open_disk(config, name)?,
            files: Files::open_of(config, name)?,
        })
    }
}

/// New disks that are open, by name.
#[derive(Default)]
pub(super) struct Prepared(BTreeMap<String, OpenedDisk>);

impl Prepared {
    /// Opens the new disks, and reads the files of new and changed addresses to see that they can be
    /// read. A disk that takes the place of one that goes is opened by its step, when that one is
    /// gone.
    ///
    /// # Errors
    /// The step that cannot be made, and why.
    pub(super) fn make(planned: &Planned) -> Result<Self> {
        dry_run::check_exports(&planned.new)?;
        let mut prepared = Self::default();
        let mut has_removed = false;
        for change in &planned.changes {
            match change {
                Change::AddDisk(name) if !has_removed => {
                    let opened = OpenedDisk::open(&planned.new, name);
                    let opened = opened.with_context(|| change.to_string())?;
                    prepared.0.insert(name.clone(), opened);
                }
                Change::RemoveDisk(_) => has_removed = true,
                Change::AddExport(spec) | Change::Export(spec) => {
                    let checked = spec.at.check();
                    checked.with_context(|| change.to_string())?;
                }
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
        match self.0.remove(name) {
            Some(opened) => Ok(opened),
            None => OpenedDisk::open(config, name),
        }
    }
}
