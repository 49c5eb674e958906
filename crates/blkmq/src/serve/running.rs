//! A daemon that is changed while it serves: a new configuration is checked whole, differences become steps,
//! and either all steps are done or, if one fails, those before it are undone. One change at a time; no
//! change waits on a reactor. What may block for as long as a drive does not answer is done with no lock
//! held, as far as possible: see `prepared`.

mod bitmaps;
mod durable;
mod encrypted;
mod exports;
mod gate;
mod growth;
mod jobs;
mod prepared;
mod queues;
mod refused;

use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Error, Result};
use blkmq_config::diff::{Change, diff, is_same_place};
use blkmq_config::luks::{Keyring, Known, Opened};
use blkmq_config::{Config, Detail, Document, ExportSpec, live};
use blkmq_core::time::Nanos;
use blkmq_export::common::Common;
use blkmq_export::front_door::Served;
use blkmq_host::control::Control;
use blkmq_host::disk::Disk;
use blkmq_host::engine::Engine;
use blkmq_luks::Secret;

use self::encrypted::{FoundKeys, encrypted};
pub(super) use self::exports::offer_of;
use self::gate::Gate;
pub(crate) use self::gate::Held;
pub(crate) use self::jobs::Kind;
use self::jobs::{Claims, Jobs};
use self::prepared::{OpenedDisk, Planned, Prepared};
pub(crate) use self::refused::{RETRY_PAUSE, Refused};
use super::dry_run;
use super::last_sync::Files;
use crate::log::subjects;
use crate::metrics;
use crate::sandbox::Sandbox;

/// A daemon that serves, with what can be changed.
pub(crate) struct Running {
    engine: Arc<Engine>,
    common: Arc<Common>,
    /// Held by a change from its first step to its last, which may take some seconds.
    state: Mutex<State>,
    /// Whether changes are permitted.
    gate: Gate,
    /// Files to be made durable at the end. Never held for longer than a moment.
    files: Mutex<Files>,
    /// Addresses that are not served for now. Never held for longer than a moment.
    refused: Mutex<Vec<Refused>>,
    /// The document after the last change and its meaning, for queries during a change. Never held for longer than a
    /// moment.
    shown: Mutex<Shown>,
    /// The number of changes.
    changes: AtomicU64,
    sandbox: Sandbox,
    /// The keys of encrypted disks.
    keyring: Keyring,
    jobs: Jobs,
    /// Images that are changed with no lock held.
    claims: Claims,
}

/// What a change has done.
pub(crate) struct Changed {
    /// The steps, for people.
    pub(crate) steps: Vec<String>,
    /// What to know of them.
    pub(crate) notes: Vec<String>,
}

/// The daemon's description as it is written, and as it was understood: names of users are looked up for that, which
/// may take as long as the host's name service does not answer.
#[derive(Clone)]
struct Shown {
    document: Document,
    config: Arc<Config>,
}

/// The daemon's description, and the state that belongs to it.
struct State {
    document: Document,
    config: Config,
    exports: Vec<OpenExport>,
    /// The disks that a change has removed.
    removed: Vec<Removed>,
    /// What was known of the encrypted ones among them, until the change has ended.
    kept: BTreeMap<String, Known>,
    /// The disks on which such a one has lain: they are offered when the change has ended.
    freed: BTreeSet<String>,
}

/// A disk that a change has removed, with its files, which the change makes durable when it has released the lock.
struct Removed {
    disk: String,
    files: Files,
    /// The files are those of a disk that stays.
    stays: bool,
}

/// An address of the configuration, with the sockets at which it is served.
pub(super) struct OpenExport {
    pub(super) spec: ExportSpec,
    pub(super) served: Vec<Arc<dyn Served>>,
}

impl Running {
    pub(super) fn new(
        engine: Arc<Engine>,
        common: Arc<Common>,
        (document, config): (Document, Config),
        files: Files,
        (exports, refused): (Vec<OpenExport>, Vec<Refused>),
        (sandbox, keyring): (Sandbox, Keyring),
    ) -> Self {
        let shown = Mutex::new(Shown {
            document: document.clone(),
            config: Arc::new(config.clone()),
        });
        let state = Mutex::new(State {
            document,
            config,
            exports,
            removed: Vec::new(),
            kept: BTreeMap::new(),
            freed: BTreeSet::new(),
        });
        Self {
            engine,
            common,
            state,
            gate: Gate::default(),
            files: Mutex::new(files),
            refused: Mutex::new(refused),
            shown,
            changes: AtomicU64::new(0),
            sandbox,
            keyring,
            jobs: Jobs::default(),
            claims: Claims::default(),
        }
    }

    /// The document that describes the daemon.
    pub(crate) fn document(&self) -> Document {
        self.shown().document.clone()
    }

    /// What the document means.
    pub(crate) fn config(&self) -> Arc<Config> {
        Arc::clone(&self.shown().config)
    }

    /// The document and what it means.
    pub(crate) fn description(&self) -> (Document, Arc<Config>) {
        let Shown { document, config } = self.shown().clone();
        (document, config)
    }

    /// The number of changes since the start.
    pub(crate) fn changes(&self) -> u64 {
        // Relaxed: a count; readers query the new state afterwards.
        self.changes.load(Ordering::Relaxed)
    }

    pub(crate) fn control(&self) -> Control {
        self.engine.control()
    }

    pub(crate) fn common(&self) -> &Common {
        &self.common
    }

    /// The keys of encrypted disks.
    pub(crate) fn keyring(&self) -> &Keyring {
        &self.keyring
    }

    /// Unlocks an encrypted disk with a passphrase. Blocks for as long as the key slots take.
    ///
    /// # Errors
    /// There is no such disk, it is not locked, or no slot opens.
    pub(crate) fn unlock(&self, disk: &str, passphrase: &Secret) -> Result<()> {
        let config = self.config();
        let spec = config.disks.iter().find(|spec| spec.name == disk);
        let spec = spec.with_context(|| format!("disk {disk}: there is no such disk"))?;
        // Key slots take seconds, in which other changes go on.
        let opened = Opened::find(&self.control(), spec, passphrase)?;
        let _state = self.open_state()?;
        self.keyring.unlock(&self.control(), opened)?;
        // A daemon that takes over and was sent keys before has not this one.
        self.changes.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// The configuration of the control socket.
    pub(crate) fn control_config(&self) -> blkmq_config::Control {
        self.lock().config.control.clone()
    }

    /// Where metrics are read, if anywhere, and which.
    pub(crate) fn metrics(&self) -> Result<(Option<metrics::Place>, Detail)> {
        let config = self.lock().config.metrics.clone();
        let address = config.address.as_ref();
        let place = address.map(|address| metrics::place(address, config.allow_insecure));
        Ok((place.transpose()?, config.detail))
    }

    /// Permits no change any more, since the daemon ends, and waits for the one that is under way and for work on images,
    /// which is given up, for a while: they may wait for a drive that does not answer.
    pub(crate) fn close(&self) {
        self.gate.close();
        if self.wait_for_change().is_none() {
            tracing::error!("a change has not ended after {CHANGE_MAX:?}: the daemon ends beside it");
        }
        // Before the images are closed: nothing is written to them afterwards.
        if !self.end_work(None) {
            tracing::error!("work on an image has not ended after {CHANGE_MAX:?}: the daemon ends beside it");
        }
    }

    /// Gives commits up for a daemon that takes over: it opens the bases, and a commit has its base for itself.
    ///
    /// # Errors
    /// One does not end.
    pub(crate) fn end_commits(&self) -> Result<()> {
        match self.jobs.end_all(Some(Kind::Commit), CHANGE_MAX) {
            true => Ok(()),
            false => anyhow::bail!("a commit has not ended after {CHANGE_MAX:?}: try again"),
        }
    }

    /// Permits no change while another daemon takes over.
    ///
    /// # Errors
    /// A change is under way, and does not end.
    pub(crate) fn hold(&self) -> Result<Held<'_>> {
        let held = self.gate.hold();
        match self.wait_for_change() {
            Some(_) => {}
            None => anyhow::bail!("a change of this daemon has not ended after {CHANGE_MAX:?}: try again"),
        }
        // None begins any more, and what they write must not be written beside the other daemon.
        match self.end_work(None) {
            true => Ok(held),
            false => anyhow::bail!("work on an image has not ended after {CHANGE_MAX:?}: try again"),
        }
    }

    /// Ends the work on the image of a disk, or without a name on all, and waits for that for a while. Returns whether it
    /// has ended.
    fn end_work(&self, disk: Option<&str>) -> bool {
        let have_jobs_ended = match disk {
            Some(disk) => self.jobs.end(disk, CHANGE_MAX),
            None => self.jobs.end_all(None, CHANGE_MAX),
        };
        self.claims.wait(disk, CHANGE_MAX) && have_jobs_ended
    }

    /// Waits until no change is under way. `None` if one has not ended after a while.
    fn wait_for_change(&self) -> Option<MutexGuard<'_, State>> {
        let start = Instant::now();
        loop {
            match self.state.try_lock() {
                Ok(state) => return Some(state),
                Err(TryLockError::Poisoned(state)) => return Some(state.into_inner()),
                Err(TryLockError::WouldBlock) if start.elapsed() > CHANGE_MAX => return None,
                Err(TryLockError::WouldBlock) => thread::sleep(LOOK_AGAIN),
            }
        }
    }

    /// The limit of the shutdown.
    pub(crate) fn shutdown_limit(&self) -> Duration {
        // Not of the state, which a change may have that does not end.
        self.config().shutdown_limit
    }

    /// Changes the daemon to the result of `edit` on its document. Returns the steps that were done
    /// or, with `is_dry_run`, would be, and what the operator should know of them, which is logged.
    ///
    /// # Errors
    /// Why nothing was changed: the fault in the document, what cannot be changed while it runs, or
    /// the step that failed.
    pub(crate) fn change(
        &self,
        edit: impl Fn(&mut Document) -> Result<()>,
        is_dry_run: bool,
    ) -> Result<Changed> {
        self.change_if(edit, |_| Ok(()), is_dry_run)
    }

    /// The same, if `may` permits the steps.
    ///
    /// # Errors
    /// As [`Self::change`], or what `may` says.
    pub(crate) fn change_if(
        &self,
        edit: impl Fn(&mut Document) -> Result<()>,
        may: impl Fn(&[Change]) -> Result<()>,
        is_dry_run: bool,
    ) -> Result<Changed> {
        let mut keys = FoundKeys::default();
        loop {
            let planned = self.planned(&edit)?;
            may(&planned.changes)?;
            self.check_below(&planned)?;
            self.sandbox.check(&planned.old, &planned.new)?;
            if is_dry_run {
                dry_run::check_exports(&planned.new)?;
                dry_run::check_files(&planned.changes, &planned.old, &planned.new)?;
                return Ok(Changed {
                    notes: self.notes(&planned, is_dry_run)?,
                    steps: planned.texts,
                });
            }
            let mut prepared = Prepared::make(&planned)?;
            self.find_keys(&planned, &mut keys)?;
            let mut state = self.open_state()?;
            if self.changes() != planned.seen {
                // Another change has ended meanwhile, and this one may mean other steps now.
                continue;
            }
            prepared.keys = keys.take();
            let made = self.make_all(&mut state, &planned, prepared);
            let made = made.and_then(|()| self.notes(&planned, is_dry_run));
            if made.is_ok() {
                self.describe(&mut state, planned.document, planned.new);
            }
            let removed = mem::take(&mut state.removed);
            state.kept.clear();
            drop(state);
            self.sync_removed(removed);
            let notes = made?;
            return Ok(Changed {
                notes,
                steps: planned.texts,
            });
        }
    }

    /// Records what the daemon is after a change.
    fn describe(&self, state: &mut State, document: Document, config: Config) {
        subjects::know(&document, &config);
        *self.shown() = Shown {
            document: document.clone(),
            config: Arc::new(config.clone()),
        };
        (state.document, state.config) = (document, config);
        self.changes.fetch_add(1, Ordering::Relaxed);
    }

    /// Finds the steps of a change.
    fn planned(&self, edit: impl Fn(&mut Document) -> Result<()>) -> Result<Planned> {
        let (state, document, mut new) = loop {
            // Before the document is read: one that is newer is seen below.
            let seen = self.changes();
            let mut document = self.document();
            edit(&mut document)?;
            // With no lock held: see `Shown`.
            let new = checked(&document)?;
            let state = self.open_state()?;
            if self.changes() == seen {
                break (state, document, new);
            }
        };
        keep_known(&mut new.exports, &state.config.exports);
        let served = self.engine.disks();
        let sizes = served.iter().map(|disk| (disk.name.clone(), disk.size)).collect();
        let changes = diff(&state.config, &new, &sizes)?;
        self.check_queues(&state.config, &new)?;
        let removed = changes.iter().filter_map(|change| match change {
            Change::RemoveDisk(name) => Some(name.as_str()),
            _ => None,
        });
        let removed: Vec<&str> = removed.collect();
        for (at, name) in removed.iter().enumerate() {
            // Before its sockets are closed.
            self.control().check_removal(name, &removed[..at])?;
        }
        let old = (state.config.clone(), &state.document);
        Ok(Planned::new(self.changes(), old, (new, document), changes))
    }

    /// Makes all addresses read their certificates again. Returns which have, and which cannot: those
    /// keep what they have.
    pub(crate) fn refresh(&self) -> (Vec<String>, Vec<String>) {
        let (mut done, mut failed) = self.retry();
        let all = |open: &OpenExport| {
            let address = open.spec.address.clone();
            let served = open.served.iter().cloned();
            served.map(|served| (address.clone(), served)).collect::<Vec<_>>()
        };
        let exports: Vec<_> = self.lock().exports.iter().flat_map(all).collect();
        // Not under the lock: the files may be on a drive that does not answer.
        for (address, served) in exports {
            match served.refresh() {
                Ok(true) => done.push(format!("read the certificates of {address} again")),
                Ok(false) => {}
                Err(error) => failed.push(format!("export {address}: {error}")),
            }
        }
        (done, failed)
    }

    /// Does all steps, or none.
    fn make_all(&self, state: &mut State, planned: &Planned, mut prepared: Prepared) -> Result<()> {
        let Planned {
            old, new, changes, ..
        } = planned;
        for (done, change) in changes.iter().enumerate() {
            if self.gate.is_closed() {
                // It has not waited for this change any longer, and nothing is served.
                anyhow::bail!("{change}: the daemon shuts down");
            }
            let Err(error) = self.make(state, change, (old, new), &mut prepared) else {
                continue;
            };
            let error = error.context(change.to_string());
            return Err(self.take_back(state, planned, &changes[..done], &error));
        }
        let followed = self.follow_groups(new);
        let offered = followed.and_then(|()| self.offer_freed(state, new));
        offered.map_err(|error| self.take_back(state, planned, changes, &error))
    }

    /// Takes the steps that are done back, after an error in the next one. Returns the whole error.
    fn take_back(&self, state: &mut State, planned: &Planned, done: &[Change], error: &Error) -> Error {
        let Planned { old, new, .. } = planned;
        let mut problems = String::new();
        for change in done.iter().rev() {
            let inverse = change.inverse(old);
            if let Err(problem) = self.make(state, &inverse, (new, old), &mut Prepared::default()) {
                tracing::error!("change: {inverse}, to take a change back: {problem:#}");
                problems += &format!("; and {inverse}, to take what was done back: {problem:#}");
            }
        }
        let followed = self.follow_groups(old);
        if let Err(problem) = followed.and_then(|()| self.offer_freed(state, old)) {
            tracing::error!("change: taking it back: {problem:#}");
        }
        anyhow::anyhow!("{error:#}{problems}")
    }

    fn make(
        &self,
        state: &mut State,
        change: &Change,
        (old, new): (&Config, &Config),
        prepared: &mut Prepared,
    ) -> Result<()> {
        match change {
            Change::AddDisk(name) => match encrypted(new, name) {
                Some(disk) => self.add_encrypted(state, new, disk, prepared),
                None => self.add_disk(state, new, name, prepared.take(new, name)?),
            },
            Change::RemoveDisk(name) => match encrypted(old, name) {
                Some(disk) => self.remove_encrypted(state, (old, new), disk),
                None => self.remove_disk(state, (old, new), name),
            },
            Change::Group(path) => Ok(live::change_group(&self.control(), new, path)?),
            Change::Queues => self.set_queues(old, new),
            Change::AddExport(spec) => self.add_export(state, new, spec),
            Change::RemoveExport(spec) => {
                self.forget_refused(spec);
                let gone = |open: &mut OpenExport| is_same_place(&open.spec, spec);
                let closed = state.exports.extract_if(.., gone);
                closed
                    .flat_map(|open| open.served)
                    .for_each(|served| served.close());
                Ok(())
            }
            Change::Export(spec) => self.change_export(state, new, spec),
            // Read when it is needed.
            Change::Key(_) | Change::ShutdownLimit => Ok(()),
        }
    }

    fn add_disk(&self, state: &mut State, new: &Config, name: &str, opened: OpenedDisk) -> Result<()> {
        let OpenedDisk { disk, files } = opened;
        live::add_opened(&self.control(), new, name, disk)?;
        self.files().add(&files);
        let offered = self.offer(state, new, &self.engine.disks());
        if offered.is_err() {
            // The error is what prevents the offer.
            let others = without(&self.engine.disks(), name);
            let _ = self.offer(state, new, &others);
            let _ = live::remove_disk(&self.control(), name, REMOVE_MAX);
            state.removed.push(Removed {
                disk: name.to_owned(),
                files,
                stays: false,
            });
        }
        offered
    }

    fn remove_disk(&self, state: &mut State, (old, new): (&Config, &Config), name: &str) -> Result<()> {
        if !self.end_work(Some(name)) {
            anyhow::bail!("disk {name}: work on its image has not ended after {CHANGE_MAX:?}: try again");
        }
        self.let_go(state, new, name)?;
        let files = self.files().of(old, name);
        state.removed.push(Removed {
            disk: name.to_owned(),
            files,
            stays: false,
        });
        Ok(())
    }

    /// Offers a disk no more, and removes it from the engine.
    fn let_go(&self, state: &mut State, new: &Config, name: &str) -> Result<()> {
        let others = without(&self.engine.disks(), name);
        let limit = state.config.shutdown_limit.as_nanos();
        let limit = Nanos(limit.try_into().unwrap_or(u64::MAX));
        let removed = self
            .offer(state, new, &others)
            .and_then(|()| live::remove_disk(&self.control(), name, limit));
        if removed.is_err() {
            self.offer_again(state, &state.config.clone());
        }
        removed
    }

    fn shown(&self) -> MutexGuard<'_, Shown> {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The state, to change it.
    fn open_state(&self) -> Result<MutexGuard<'_, State>> {
        let state = self.lock();
        self.gate.check()?;
        Ok(state)
    }

    fn refused_list(&self) -> MutexGuard<'_, Vec<Refused>> {
        self.refused.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn files(&self) -> MutexGuard<'_, Files> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A change that panicked has left the state as far as it got.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// All disks but one.
fn without(disks: &[Disk], name: &str) -> Vec<Disk> {
    disks.iter().filter(|disk| disk.name != name).cloned().collect()
}

/// Puts the addresses of before in the place of those that are the same: they know what their files held, and need not read
/// them again while a lock is held.
fn keep_known(exports: &mut [ExportSpec], before: &[ExportSpec]) {
    for export in exports {
        if let Some(known) = before.iter().find(|known| *known == export) {
            *export = known.clone();
        }
    }
}

/// The meaning of a document, checked without opening anything. A daemon that runs may lose its last disk.
fn checked(document: &Document) -> Result<Config> {
    let config = document.config()?;
    config.check_parts()?;
    Ok(config)
}

/// How long clients that found a disk that could not be offered may keep it.
const REMOVE_MAX: Nanos = Nanos::from_secs(10);
/// How long the end of the daemon, or a takeover, waits for a change that is under way.
const CHANGE_MAX: Duration = Duration::from_secs(5);
/// How long the last sync of a file may take at least.
const SYNC_MAX: Duration = Duration::from_secs(30);
const LOOK_AGAIN: Duration = Duration::from_millis(5);
