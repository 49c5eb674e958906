//! Encrypted disks that come and go while others are served. Their keys are found before the change begins and with no lock
//! held, since that takes seconds; only where the disk below comes with the same change, it is one of its steps, which the
//! end of the daemon and a takeover do not wait for. `blkmq_config::luks` has what is known of such a disk.

use std::collections::BTreeMap;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use blkmq_config::diff::Change;
use blkmq_config::luks::{Known, LuksSource};
use blkmq_config::{Config, DiskSpec, Source, live};
use blkmq_host::disk::Disk;

use super::prepared::{Planned, Prepared};
use super::{LOOK_AGAIN, REMOVE_MAX, Removed, Running, State, without};
use crate::serve::keys;

/// What was found of the encrypted disks of a change, which is kept if the change must be planned again.
#[derive(Default)]
pub(super) struct FoundKeys(BTreeMap<String, FoundKey>);

struct FoundKey {
    source: LuksSource,
    /// The number of the disk below: it had no other user since.
    below: u32,
    known: Known,
}

impl FoundKeys {
    /// Gives away what was found.
    pub(super) fn take(&mut self) -> BTreeMap<String, Known> {
        let all = std::mem::take(&mut self.0).into_iter();
        all.map(|(name, found)| (name, found.known)).collect()
    }
}

/// A disk of a configuration, and on what it lies, if it is encrypted.
pub(super) fn encrypted<'a>(config: &'a Config, name: &str) -> Option<(&'a DiskSpec, &'a LuksSource)> {
    let spec = config.disks.iter().find(|disk| disk.name == name)?;
    match &spec.source {
        Source::Luks(source) => Some((spec, source)),
        _ => None,
    }
}

impl Running {
    /// Checks that nobody uses the disks on which new encrypted ones are to lie. Clients that are leaving are waited for, a
    /// moment long.
    ///
    /// # Errors
    /// Such a disk has clients.
    pub(super) fn check_below(&self, planned: &Planned) -> Result<()> {
        let control = self.control();
        let until = Instant::now() + LEAVING_MAX;
        for (spec, source) in added(&planned.new, &planned.changes) {
            while let Err(error) = control.check_below(&spec.name, &source.below) {
                if Instant::now() > until {
                    return Err(error.into());
                }
                thread::sleep(LOOK_AGAIN);
            }
        }
        Ok(())
    }

    /// Reads the headers of new encrypted disks and finds their keys, as far as the disks below are there. Blocks for as
    /// long as these and the key slots take.
    ///
    /// # Errors
    /// A disk cannot be opened.
    pub(super) fn find_keys(&self, planned: &Planned, all: &mut FoundKeys) -> Result<()> {
        let control = self.control();
        for (spec, source) in added(&planned.new, &planned.changes) {
            let name = &spec.name;
            let below = control.check_below(name, &source.below)?.number;
            let is_known = |found: &FoundKey| found.source == *source && found.below == below;
            if all.0.get(name).is_some_and(is_known) {
                continue;
            }
            keys::leave_no_core()?;
            let known = Known::find_for(&control, spec, source);
            let known = known.with_context(|| format!("{}: disk {name}", Change::AddDisk(name.clone())))?;
            let source = source.clone();
            let found = FoundKey { source, below, known };
            all.0.insert(name.clone(), found);
        }
        Ok(())
    }

    pub(super) fn add_encrypted(
        &self,
        state: &mut State,
        new: &Config,
        (spec, source): (&DiskSpec, &LuksSource),
        prepared: &mut Prepared,
    ) -> Result<()> {
        let name = &spec.name;
        keys::leave_no_core()?;
        // It was there before, if this takes its removal back.
        let known = state.kept.remove(name).or_else(|| prepared.keys.remove(name));
        let known = match known {
            Some(known) => known,
            None => self
                .find_unless_held(spec, source)
                .with_context(|| format!("disk {name}"))?,
        };
        live::add_encrypted((&self.control(), &self.keyring), new, name, known)?;
        let offered = self.offer(state, new, &self.engine.disks());
        if offered.is_err() {
            // The error is what prevents the offer. The disk below is offered again when the change has ended.
            state.freed.insert(source.below.clone());
            let others = without(&self.engine.disks(), name);
            let _ = self.offer(state, new, &others);
            let _ = live::remove_disk(&self.control(), name, REMOVE_MAX);
            self.keyring.remove(name);
        }
        offered
    }

    /// Finds what is to be known of a disk, unless the daemon ends or is taken over meanwhile.
    fn find_unless_held(&self, spec: &DiskSpec, source: &LuksSource) -> Result<Known> {
        let (answer, found) = mpsc::sync_channel(1);
        let (control, spec, source) = (self.control(), spec.clone(), source.clone());
        let find = move || {
            // Nobody may wait any more: what was found is wiped then.
            let _ = answer.send(Known::find_for(&control, &spec, &source));
        };
        let thread = thread::Builder::new().name("key".to_owned());
        thread
            .spawn(find)
            .context("no thread that finds its key can be made")?;
        loop {
            match found.recv_timeout(LOOK_AGAIN) {
                Ok(known) => return known,
                Err(RecvTimeoutError::Timeout) => self.gate.check()?,
                Err(RecvTimeoutError::Disconnected) => anyhow::bail!("its key was not found"),
            }
        }
    }

    pub(super) fn remove_encrypted(
        &self,
        state: &mut State,
        (old, new): (&Config, &Config),
        (spec, source): (&DiskSpec, &LuksSource),
    ) -> Result<()> {
        self.let_go(state, new, &spec.name)?;
        // Should the change be taken back.
        let known = self.keyring.remove(&spec.name);
        state.kept.extend(known.map(|known| (spec.name.clone(), known)));
        state.freed.insert(source.below.clone());
        state.removed.push(Removed {
            disk: spec.name.clone(),
            files: self.files().of(old, &source.below),
            stays: true,
        });
        Ok(())
    }

    /// Offers the disks on which encrypted ones have lain.
    pub(super) fn offer_freed(&self, state: &mut State, config: &Config) -> Result<()> {
        let freed = std::mem::take(&mut state.freed);
        if freed.is_empty() {
            return Ok(());
        }
        let offered = self.offer(state, config, &self.engine.disks());
        if offered.is_err() {
            state.freed = freed;
        }
        offered
    }
}

/// The new encrypted disks of a change whose disk below is there already.
fn added<'a>(new: &'a Config, changes: &'a [Change]) -> impl Iterator<Item = (&'a DiskSpec, &'a LuksSource)> {
    let is_new = |disk: &str| {
        let mut changes = changes.iter();
        changes.any(|change| matches!(change, Change::AddDisk(name) if name == disk))
    };
    let added = changes.iter().filter_map(|change| match change {
        Change::AddDisk(name) => encrypted(new, name),
        _ => None,
    });
    added.filter(move |(_, source)| !is_new(&source.below))
}

/// Disks as addresses are to see them during a change: nobody is offered one on which an encrypted one of the configuration
/// is to lie, or has lain until the change.
pub(super) fn as_offered(state: &State, config: &Config, disks: &[Disk]) -> Vec<Disk> {
    let user = |disk: &Disk| {
        let mut encrypted = config
            .disks
            .iter()
            .filter(|spec| matches!(&spec.source, Source::Luks(source) if source.below == disk.name));
        let user = encrypted.next().map(|spec| spec.name.clone());
        user.or_else(|| state.freed.get(&disk.name).cloned())
    };
    let seen = |mut disk: Disk| {
        disk.used_by = disk.used_by.take().or_else(|| user(&disk));
        disk
    };
    disks.iter().cloned().map(seen).collect()
}

/// How long a client that has left may take to let its disk go.
const LEAVING_MAX: Duration = Duration::from_millis(500);
