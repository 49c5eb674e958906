//! Decides how a daemon is changed while it serves: a new configuration is checked whole, what differs becomes steps, and either all
//! of them are done or, if one fails, those before it are taken back. One change at a time; reactors are never waited with.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result};
use blkmq_config::diff::{Change, diff, is_same_place};
use blkmq_config::plan::settings::{self, Wish};
use blkmq_config::{Config, Document, ExportSpec, Kind, live, tell};
use blkmq_core::time::Nanos;
use blkmq_export::common::{AddressLimits, Common};
use blkmq_export::front_door::{Offer, Served};
use blkmq_host::control::Control;
use blkmq_host::disk::{Disk, QueueId};
use blkmq_host::engine::Engine;

use super::last_sync::Files;
use super::{read, served};

/// A daemon that serves, as what can be changed of it.
pub(crate) struct Running {
    engine: Arc<Engine>,
    common: Arc<Common>,
    /// Held by a change from its beginning to its end, which may be some seconds later.
    state: Mutex<State>,
    /// The document as it was after the last change, for who asks meanwhile.
    shown: Mutex<Document>,
    /// How often something was changed.
    changes: AtomicU64,
}

/// What describes it, and what belongs to that.
pub(super) struct State {
    document: Document,
    config: Config,
    /// What is to be durable at the end.
    pub(super) files: Files,
    exports: Vec<OpenExport>,
    /// Why nothing can be changed now.
    closed: Option<&'static str>,
}

/// An address of the configuration, with the sockets at which it is served.
pub(super) struct OpenExport {
    pub(super) spec: ExportSpec,
    pub(super) served: Vec<Box<dyn Served>>,
}

impl Running {
    pub(super) fn new(
        engine: Arc<Engine>,
        common: Arc<Common>,
        (document, config): (Document, Config),
        files: Files,
        exports: Vec<OpenExport>,
    ) -> Self {
        let shown = Mutex::new(document.clone());
        let state = Mutex::new(State {
            document,
            config,
            files,
            exports,
            closed: None,
        });
        Self {
            engine,
            common,
            state,
            shown,
            changes: AtomicU64::new(0),
        }
    }

    /// What describes the daemon as it is.
    pub(crate) fn document(&self) -> Document {
        self.shown().clone()
    }

    /// How often something was changed since the start.
    pub(crate) fn changes(&self) -> u64 {
        // Relaxed: a count; who reads it asks afterwards what there is now.
        self.changes.load(Ordering::Relaxed)
    }

    pub(crate) fn control(&self) -> Control {
        self.engine.control()
    }

    pub(crate) fn common(&self) -> &Common {
        &self.common
    }

    /// Where it is asked and changed.
    pub(crate) fn control_config(&self) -> blkmq_config::Control {
        self.lock().config.control.clone()
    }

    /// Where its metrics are read, if anywhere.
    pub(crate) fn metrics_address(&self) -> Option<String> {
        self.lock().config.metrics.clone()
    }

    /// Waits for the change that is under way, and allows no other: the daemon ends.
    pub(crate) fn close(&self) {
        self.lock().closed = Some("the daemon shuts down");
    }

    /// Allows no change while another daemon takes over; or again, if it does not.
    pub(crate) fn hold(&self, is_held: bool) {
        self.lock().closed = is_held.then_some("another daemon takes over: try again");
    }

    /// How long the end may take.
    pub(crate) fn shutdown_limit(&self) -> std::time::Duration {
        self.lock().config.shutdown_limit
    }

    /// Makes the daemon what `edit` makes of its document. Returns the steps that were done, or, with `dry_run`, would be.
    ///
    /// # Errors
    /// Why nothing was changed: what is wrong with the document, what cannot be changed while it runs, or the step that failed.
    pub(crate) fn change(
        &self,
        edit: impl FnOnce(&mut Document) -> Result<()>,
        dry_run: bool,
    ) -> Result<Vec<String>> {
        let mut state = self.lock();
        if let Some(why) = state.closed {
            anyhow::bail!("{why}");
        }
        let mut document = state.document.clone();
        edit(&mut document)?;
        let new = checked(&document)?;
        let changes = diff(&state.config, &new)?;
        self.check_queues(&new)?;
        let told = |change: &Change| tell(change, &state.document, &document);
        let texts = changes.iter().map(told).collect();
        if dry_run {
            return Ok(texts);
        }
        self.make_all(&mut state, &changes, &new)?;
        state.config = new;
        self.shown().clone_from(&document);
        state.document = document;
        self.changes.fetch_add(1, Ordering::Relaxed);
        Ok(texts)
    }

    /// Has a disk be as large as its file or device is now, having made it `size` bytes, if that is asked for and it is a file.
    /// Returns its size before and now.
    ///
    /// # Errors
    /// As for [`Control::resize_disk`].
    pub(crate) fn resize(&self, name: &str, size: Option<u64>) -> Result<(u64, u64)> {
        let mut state = self.lock();
        if let Some(why) = state.closed {
            anyhow::bail!("{why}");
        }
        let (old, new) = self.control().resize_disk(name, size)?;
        if new > old {
            // Where the configuration says how large it is, it says so from now on.
            let said = state.document.get(Kind::Disk, name);
            if said.is_some_and(|keys| keys.contains_key("size")) {
                let keys = [("size".to_owned(), Some(toml::Value::Integer(new.try_into()?)))];
                state.document.set(Kind::Disk, name, keys)?;
                state.config = state.document.config()?;
                self.shown().clone_from(&state.document);
            }
            let config = state.config.clone();
            self.offer(&mut state, &config, &self.engine.disks())?;
            self.changes.fetch_add(1, Ordering::Relaxed);
            tracing::info!("disk {name}: has grown from {old} to {new} bytes");
        }
        Ok((old, new))
    }

    /// Looks at all disks whether their files or devices have grown. Says which have.
    pub(crate) fn resize_all(&self) -> Vec<String> {
        let disks = self.engine.disks();
        let grown = disks.iter().filter(|disk| match self.resize(&disk.name, None) {
            Ok((old, new)) => new > old,
            Err(error) => {
                // Most have the size that they have; one that has shrunk is said aloud.
                if error.to_string().contains("shrunk") {
                    tracing::error!("{error:#}");
                }
                false
            }
        });
        grown
            .map(|disk| format!("disk {} has grown", disk.name))
            .collect()
    }

    /// Has addresses read their certificates again. Says which have.
    ///
    /// # Errors
    /// The file that cannot be used; addresses before it have read theirs.
    pub(crate) fn refresh(&self) -> Result<Vec<String>> {
        let mut done = Vec::new();
        for open in &self.lock().exports {
            for served in &open.served {
                let address = &open.spec.address;
                if served.refresh().with_context(|| format!("export {address}"))? {
                    done.push(format!("read the certificates of {address} again"));
                }
            }
        }
        Ok(done)
    }

    /// Makes durable what clients wrote without a flush.
    ///
    /// # Errors
    /// All files of which something may be lost, by name.
    pub(super) fn sync(&self) -> Result<()> {
        self.lock().files.sync()
    }

    /// Does all steps, or none.
    fn make_all(&self, state: &mut State, changes: &[Change], new: &Config) -> Result<()> {
        let old = state.config.clone();
        for (done, change) in changes.iter().enumerate() {
            let Err(error) = self.make(state, change, &old, new) else {
                continue;
            };
            let error = error.context(change.to_string());
            let mut problems = String::new();
            for change in changes[..done].iter().rev() {
                let inverse = change.inverse(&old);
                if let Err(problem) = self.make(state, &inverse, new, &old) {
                    tracing::error!("change: {inverse}, to take a change back: {problem:#}");
                    problems += &format!("; and {inverse}, to take what was done back: {problem:#}");
                }
            }
            return Err(anyhow::anyhow!("{error:#}{problems}"));
        }
        Ok(())
    }

    fn make(&self, state: &mut State, change: &Change, old: &Config, new: &Config) -> Result<()> {
        match change {
            Change::AddDisk(name) => self.add_disk(state, new, name),
            Change::RemoveDisk(name) => self.remove_disk(state, new, name),
            Change::Group(path) => Ok(live::change_group(&self.control(), new, path)?),
            Change::Queues => self.set_queues(old, new),
            Change::AddExport(spec) => self.add_export(state, new, spec),
            Change::RemoveExport(spec) => {
                let gone = |open: &mut OpenExport| is_same_place(&open.spec, spec);
                let closed = state.exports.extract_if(.., gone);
                closed
                    .flat_map(|open| open.served)
                    .for_each(|served| served.close());
                Ok(())
            }
            Change::Export(spec) => {
                read(spec)?.check(&spec.tls)?;
                let open = state
                    .exports
                    .iter_mut()
                    .find(|open| is_same_place(&open.spec, spec));
                open.context("it is not open")?.spec = spec.clone();
                self.offer(state, new, &self.engine.disks())
            }
            // Read when it is needed.
            Change::ShutdownLimit => Ok(()),
        }
    }

    fn add_disk(&self, state: &mut State, new: &Config, name: &str) -> Result<()> {
        live::add_disk(&self.control(), new, name)?;
        let offered = state
            .files
            .add(new, name)
            .and_then(|()| self.offer(state, new, &self.engine.disks()));
        if offered.is_err() {
            // What keeps it from being offered is the answer.
            let others = without(&self.engine.disks(), name);
            let _ = self.offer(state, new, &others);
            let _ = live::remove_disk(&self.control(), name, REMOVE_MAX);
            let _ = state.files.remove(name);
        }
        offered
    }

    fn remove_disk(&self, state: &mut State, new: &Config, name: &str) -> Result<()> {
        let others = without(&self.engine.disks(), name);
        self.offer(state, new, &others)?;
        let limit = Nanos(
            state
                .config
                .shutdown_limit
                .as_nanos()
                .try_into()
                .unwrap_or(u64::MAX),
        );
        if let Err(error) = live::remove_disk(&self.control(), name, limit) {
            let _ = self.offer(state, &state.config.clone(), &self.engine.disks());
            return Err(error);
        }
        // The drive is closed: what is said here is the last chance to hear of lost writes.
        if let Err(error) = state.files.remove(name) {
            tracing::error!("disk {name}: removed; {error:#}");
        }
        Ok(())
    }

    /// Has all addresses serve these disks: opens the sockets of those that have come and closes those of others.
    fn offer(&self, state: &mut State, config: &Config, disks: &[Disk]) -> Result<()> {
        for open in &mut state.exports {
            let wanted = served(config, disks, open.spec.disks.as_deref());
            let is_wanted = |served: &dyn Served| {
                served
                    .disk()
                    .is_none_or(|name| wanted.iter().any(|disk| disk.name == name))
            };
            let gone = open.served.extract_if(.., |served| !is_wanted(&**served));
            gone.for_each(|served| served.close());
            for served in &open.served {
                served.offer(disks, offer_of(&open.spec, config))?;
            }
            let is_open = |name: &str| {
                open.served
                    .iter()
                    .any(|served| served.disk().is_none_or(|disk| disk == name))
            };
            let missing: Vec<&str> = wanted
                .iter()
                .map(|disk| disk.name.as_str())
                .filter(|name| !is_open(name))
                .collect();
            if !missing.is_empty() {
                let opened = self.open(&open.spec, config, &missing)?;
                open.served.extend(opened);
            }
        }
        Ok(())
    }

    fn add_export(&self, state: &mut State, config: &Config, spec: &ExportSpec) -> Result<()> {
        let disks = self.engine.disks();
        let names = served(config, &disks, spec.disks.as_deref());
        let names: Vec<&str> = names.iter().map(|disk| disk.name.as_str()).collect();
        let served = self.open(spec, config, &names)?;
        state.exports.push(OpenExport {
            spec: spec.clone(),
            served,
        });
        Ok(())
    }

    /// Opens an address for some disks, and serves them there.
    fn open(&self, spec: &ExportSpec, config: &Config, disks: &[&str]) -> Result<Vec<Box<dyn Served>>> {
        let address = read(spec)?;
        address.check(&spec.tls)?;
        if disks.is_empty() && address.is_per_disk() {
            return Ok(Vec::new());
        }
        let mut all: Vec<Box<dyn Served>> = Vec::new();
        for opened in address.open(disks, &self.common.handover)? {
            match opened.serve(&self.engine, offer_of(spec, config), &self.common) {
                Ok(served) => all.push(served),
                Err(error) => {
                    all.iter().for_each(|served| served.close());
                    return Err(error.into());
                }
            }
        }
        Ok(all)
    }

    /// Has every queue be as asked for.
    fn set_queues(&self, old: &Config, new: &Config) -> Result<()> {
        let control = self.control();
        let mut done: Vec<(QueueId, Wish, Wish)> = Vec::new();
        for (queue, was, is) in self.wishes(old, new)? {
            if let Err(error) = live::set_queue(&control, queue, &was, &is) {
                done.push((queue, was, is));
                for (queue, was, is) in done.iter().rev() {
                    let undone = live::set_queue(&control, *queue, is, was);
                    undone
                        .err()
                        .iter()
                        .for_each(|error| tracing::error!("change: taking it back: {error}"));
                }
                return Err(error.into());
            }
            done.push((queue, was, is));
        }
        Ok(())
    }

    /// Checks that disks and settings agree about each queue that there is.
    fn check_queues(&self, new: &Config) -> Result<()> {
        self.wishes(new, new).map(drop)
    }

    /// What was asked of each queue that there is, and what is asked now, where that differs.
    fn wishes(&self, old: &Config, new: &Config) -> Result<Vec<(QueueId, Wish, Wish)>> {
        let disks = self.engine.disks();
        let mut all = Vec::new();
        for (id, queue) in self.control().queues() {
            let on_it = || {
                disks
                    .iter()
                    .filter(|disk| disk.queue == id)
                    .map(|disk| disk.name.as_str())
            };
            let was = settings::wish(old, queue.name(), on_it())?;
            let is = settings::wish(new, queue.name(), on_it())?;
            if was != is {
                all.push((id, was, is));
            }
        }
        Ok(all)
    }

    fn shown(&self) -> MutexGuard<'_, Document> {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        // A change that panicked has left what it was at.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// All disks but one.
fn without(disks: &[Disk], name: &str) -> Vec<Disk> {
    disks.iter().filter(|disk| disk.name != name).cloned().collect()
}

/// What a document means, checked as far as can be without opening anything.
fn checked(document: &Document) -> Result<Config> {
    let config = document.config()?;
    config.check()?;
    for export in &config.exports {
        read(export).with_context(|| format!("[[export]] {}", export.door))?;
    }
    Ok(config)
}

/// What an address offers.
pub(super) fn offer_of<'a>(spec: &'a ExportSpec, config: &Config) -> Offer<'a> {
    let default = AddressLimits::default();
    Offer {
        disks: spec.disks.as_deref(),
        admitted: AddressLimits {
            name: spec.address.clone(),
            connections_max: spec.connections.unwrap_or(default.connections_max),
            group_connections_max: spec.group_connections.unwrap_or(default.group_connections_max),
        },
        tls: &spec.tls,
        handshake_deadline: config.nbd_handshake_deadline,
        // Its mounts cannot be handed over.
        fuse_io_uring: match config.upgrade_socket {
            Some(_) => Some(false),
            None => config.fuse_io_uring,
        },
    }
}

/// How long a disk that could not be offered may be held by those who have found it nevertheless.
const REMOVE_MAX: Nanos = Nanos::from_secs(10);
