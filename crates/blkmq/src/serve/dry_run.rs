//! The check of a change before anything is done: the disks of each address and, for a dry run, the files of
//! new disks and of TLS. No address is opened, and no other host is asked. `running` makes the change.

use anyhow::{Context, Result, bail};
use blkmq_config::diff::Change;
use blkmq_config::{Config, DiskSpec, Source, live};
use blkmq_export::common::{Address, Place};

use super::placeholder::Placeholders;

/// Checks that each address can serve its disks at the same time, and that no two are in each other's way.
///
/// # Errors
/// The address, and what to do.
pub(super) fn check_exports(new: &Config) -> Result<()> {
    let mut taken: Vec<(Place, String)> = Vec::new();
    for (name, address) in own_addresses(new) {
        let address = address.parse::<Address>().ok();
        let places = address.map(|address| Place::of_socket(&address));
        take(&mut taken, places.unwrap_or_default(), &format!("the {name}"))?;
    }
    for export in &new.exports {
        let (address, disks) = (&export.at, new.named(export));
        address.check_disks(&new.disks_of(export))?;
        let name = format!("export {}", export.address);
        take(&mut taken, address.places(&disks), &name)?;
    }
    Ok(())
}

fn take(taken: &mut Vec<(Place, String)>, places: Vec<Place>, name: &str) -> Result<()> {
    for place in places {
        if let Some((_, other)) = taken.iter().find(|(other, _)| other.is_in_the_way_of(&place)) {
            bail!("{name}: {place} is taken twice, also by {other}: each needs its own");
        }
        taken.push((place, name.to_owned()));
    }
    Ok(())
}

/// The addresses at which the daemon itself is reached, with what they are.
pub(super) fn own_addresses(config: &Config) -> impl Iterator<Item = (&'static str, &str)> {
    let control = config
        .control
        .socket
        .as_deref()
        .filter(|address| *address != "none");
    let all = [
        ("control socket", control),
        ("metrics address", config.metrics.address.as_deref()),
        ("upgrade socket", config.upgrade_socket.as_deref()),
    ];
    all.into_iter()
        .filter_map(|(name, address)| Some((name, address?)))
}

/// Checks the files that a change would open: new disks are opened and closed again, files that are
/// missing are made and removed again, the TLS files of new and changed addresses are read, and their places are
/// looked at.
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
        match change {
            Change::AddExport(spec) | Change::Export(spec) => {
                let checked = spec.at.check();
                checked.with_context(|| format!("export {}", spec.address))?;
                spec.at.check_places(&new.named(spec))?;
            }
            Change::AddDisk(name) => {
                check_places_of(name, new)?;
                check_key_of(name, new)?;
            }
            Change::Key(disk) => check_key_of(disk, new)?,
            _ => {}
        }
    }
    Ok(())
}

/// Checks the places that a new disk gets at addresses where each disk has one of its own.
fn check_places_of(disk: &str, new: &Config) -> Result<()> {
    for export in &new.exports {
        let address = &export.at;
        if address.is_per_disk() && new.disks_of(export).contains(&disk) {
            address.check_places(&new.named_of(&[disk]))?;
        }
    }
    Ok(())
}

/// Checks the files of an encrypted disk that is new, or has its key elsewhere. Whether the key fits is found when the
/// disk is opened.
pub(super) fn check_key_of(disk: &str, new: &Config) -> Result<()> {
    let found = new.disks.iter().find(|spec| spec.name == disk);
    match found.map(|spec| &spec.source) {
        Some(Source::Luks(source)) => source.check_files().with_context(|| format!("disk {disk}")),
        _ => Ok(()),
    }
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
