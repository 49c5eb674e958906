//! The check of a configuration (`--check`): whether it could be served on this host, also beside a daemon that serves it
//! now. Nothing is listened at, and no lock is kept; files that had to be made are removed.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};

use anyhow::{Context, Result, bail};
use blkmq_config::{Config, DiskSpec, plan_for_check};
use blkmq_export::common::{Address, check_socket};
use blkmq_host::counted::counted;
use blkmq_host::device::FileId;
use blkmq_host::engine::Engine;

use super::last_sync::Files;
use super::placeholder::Placeholders;
use super::{check_exports, descriptors, dry_run, engine, reactors};

/// Opens the disks, makes the queues and reports whether they can be served.
///
/// # Errors
/// What cannot be served, and what to do.
pub(super) fn check(config: &Config) -> Result<()> {
    let made = Placeholders::make(config);
    let queues = plan_for_check(config).and_then(|plan| {
        let queues = plan.queues.len();
        check_files(config)?;
        let _files = Files::open(config)?;
        descriptors::connections(config, reactors(config))?;
        check_exports(config)?;
        check_places(config)?;
        Engine::check(engine(config, plan))?;
        Ok(queues)
    });
    drop(made);
    let (disks, queues) = (config.disks.len(), queues?);
    writeln!(
        io::stdout(),
        "{} on {}: all can be served",
        counted(disks, "disk", "disks"),
        counted(queues, "queue", "queues")
    )?;
    Ok(())
}

/// Checks that no two disks need the lock of one file, which nobody sees while another process has it.
fn check_files(config: &Config) -> Result<()> {
    let mut seen: BTreeMap<FileId, &DiskSpec> = BTreeMap::new();
    for disk in &config.disks {
        let file = disk.source.driver().and_then(|driver| driver.file());
        let Some(file) = file.filter(|file| file.is_locked) else {
            continue;
        };
        let Ok(found) = fs::metadata(file.path) else {
            continue;
        };
        match seen.insert(FileId::of(&found), disk) {
            Some(other) if !(other.read_only && disk.read_only) => bail!(
                "disk {}: file {:?} is also that of disk {}: each disk needs its own, unless both have ro=on",
                disk.name,
                file.path,
                other.name
            ),
            _ => {}
        }
    }
    Ok(())
}

/// Checks that all sockets, files and directories of addresses could be made.
fn check_places(config: &Config) -> Result<()> {
    for export in &config.exports {
        export.at.check_places(&config.named(export))?;
    }
    for (name, address) in dry_run::own_addresses(config) {
        let address_of: Address = address.parse()?;
        check_socket(&address_of).with_context(|| format!("{name} {address}"))?;
    }
    Ok(())
}
