//! Decides what is found out about a change before anything is done: the disks of each address and,
//! for a dry run, the files of new disks and of TLS. No address is opened, and no other host is
//! asked. `running` makes the change.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail};
use blkmq_config::diff::Change;
use blkmq_config::{Config, DiskSpec, live};

use super::placeholder::Placeholders;
use super::read;

/// Checks that each address can serve its disks at the same time, and that no two have the same file.
///
/// # Errors
/// The address, and what to do.
pub(super) fn check_exports(new: &Config) -> Result<()> {
    let mut taken = BTreeMap::new();
    for export in &new.exports {
        let (address, disks) = (read(export)?, new.disks_of(export));
        address.check_disks(&disks)?;
        for file in address.files(&disks) {
            if let Some(other) = taken.insert(file.clone(), &export.address) {
                bail!(
                    "export {}: {} is also the file of a disk of export {other}: each disk needs its own",
                    export.address,
                    file.display()
                );
            }
        }
    }
    Ok(())
}

/// Checks the files that a change would open: new disks are opened and closed again, files that are
/// missing are made and removed again, and the TLS files of new and changed addresses are read.
///
/// # Errors
/// The disk or the address, and why it cannot be served.
pub(super) fn check_files(changes: &[Change], old: &Config, new: &Config) -> Result<()> {
    let disks: Vec<DiskSpec> = changes.iter().filter_map(|change| added(change, new)).collect();
    // A disk that goes still has its file. One that stays is found by opening it once more.
    let goes = |disk: &&DiskSpec| !new.disks.iter().any(|other| other.name == disk.name);
    let is_free = |disk: &DiskSpec| {
        !old.disks
            .iter()
            .filter(goes)
            .any(|other| has_same_file(other, disk))
    };
    let free = Config {
        disks: disks.into_iter().filter(is_free).collect(),
        ..Config::default()
    };
    let made = Placeholders::make(&free);
    // All at the same time: two disks may name one file.
    let opened = free.disks.iter().map(live::open_file).collect::<Result<Vec<_>>>();
    drop((opened?, made));
    for change in changes {
        if let Change::AddExport(spec) | Change::Export(spec) = change {
            let checked = read(spec)?.check(&spec.tls);
            checked.with_context(|| format!("export {}", spec.address))?;
        }
    }
    Ok(())
}

fn added(change: &Change, new: &Config) -> Option<DiskSpec> {
    let Change::AddDisk(name) = change else {
        return None;
    };
    new.disks.iter().find(|disk| disk.name == *name).cloned()
}

fn has_same_file(one: &DiskSpec, other: &DiskSpec) -> bool {
    let path = |disk: &DiskSpec| Some(disk.source.driver()?.file()?.path.to_owned());
    path(one).is_some() && path(one) == path(other)
}
