//! A multipath drive: its parts, and the messages with the paths' names that change it while it runs.
//! `blkmq-config` makes it from configured disks, a library user from drives;
//! [`MultipathDevice::of_queue`] finds it again.

use std::any::Any;
use std::io;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use blkmq_core::driver::HctxDriver;
use blkmq_core::ids::{DiskId, HctxId};
use blkmq_core::limits::Limits;
use blkmq_core::mapper::multipath::{
    Config, Detours, Failback, GroupStats, MessageError, Multipath, MultipathHctx, NoPath, PATHS_MAX,
    PathSpec, PathState, PathStats, Selector,
};
use blkmq_host::clock::Clock;
use blkmq_host::device::{Allocation, Device, Extent, FileId, HandoverState, Losses, Polling, State};
use blkmq_host::ring::RingHandle;
use blkmq_host::runner::Runner;
use blkmq_host::{Control, Error, QueueId};

use super::MultipathConfig;
use super::opener::{Links, PathOpener};
use super::worker::Workshop;
use crate::mapping::Mapping;
use crate::nbd::{Ledger, NbdDevice};

/// A drive that is one path to another drive: its disk 0 is the multipath drive's.
#[derive(Clone)]
pub struct PathDevice {
    /// Its name, unique among the paths.
    pub name: String,
    /// The drive. Its contexts must take tags up to and including the queue's depth (the last one
    /// is for probes).
    pub device: Arc<dyn Device>,
    /// Bytes of its disk 0.
    pub size: u64,
    /// Its priority group, 0 first.
    pub group: u8,
    /// How much it carries relative to the others, 0 to 100.
    pub throughput: u32,
}

/// Why a multipath drive, or a change of one, is refused.
#[derive(Debug, thiserror::Error)]
pub enum MultipathError {
    /// The rules of paths refuse it.
    #[error(transparent)]
    Message(#[from] MessageError),
    /// A path does not lead to the same disk.
    #[error(
        "multipath {device}: path {path} has {size} bytes, the others have {others}: they cannot lead to the same disk"
    )]
    Size {
        /// The drive.
        device: String,
        /// The path.
        path: String,
        /// Its bytes.
        size: u64,
        /// Those of the others.
        others: u64,
    },
    /// The limits of a path that is to be added are below those that the drive has promised.
    #[error(
        "multipath {device}: path {path} rejected: its limits are narrower than those of the paths that the device began with; \
         have it there from the start"
    )]
    Limits {
        /// The drive.
        device: String,
        /// The path.
        path: String,
    },
    /// Memory for probes.
    #[error("multipath {device}: no memory for probes: {error}")]
    Memory {
        /// The drive.
        device: String,
        /// The kernel's error.
        error: io::Error,
    },
}

/// A drive that is reached over several others.
pub struct MultipathDevice {
    shared: Arc<Multipath>,
    links: Arc<Links>,
    /// The paths' common record of their writes' durability.
    ledger: Arc<Ledger>,
    workshop: Arc<Workshop>,
    limits: Limits,
    size: u64,
    depth: u32,
    /// The number of its hardware contexts, which a path that is added needs.
    hctxs: AtomicU16,
    clock: Clock,
}

impl MultipathDevice {
    /// Joins paths to a drive whose tags number at most `depth`.
    ///
    /// # Errors
    /// There is no path, their sizes differ, or names or numbers are invalid.
    pub fn new(
        name: &str,
        config: &MultipathConfig,
        paths: Vec<PathDevice>,
        depth: u32,
    ) -> Result<Self, MultipathError> {
        let specs = paths.iter().map(PathDevice::spec).collect();
        let shared = Multipath::new(Config {
            selector: config.selector,
            failback: config.failback,
            no_path: config.no_path,
            check_interval: config.check_interval,
            check_timeout: config.check_timeout,
            detours: config.detours,
            ..Config::new(name, specs)
        })?;
        let size = paths[0].size;
        paths.iter().try_for_each(|path| path.check_size(name, size))?;
        let limits = paths.iter().map(|path| path.device.limits());
        let limits = limits
            .reduce(|all, one| all.stack(&one))
            .expect("at least one path");
        let ledger: Arc<Ledger> = Arc::default();
        for path in &paths {
            keep_ledger(&*path.device, &ledger);
        }
        let links = Arc::new(Links::default());
        for (slot, path) in links.lock().iter_mut().zip(paths) {
            *slot = Some(path.device);
        }
        Ok(Self {
            shared,
            links,
            ledger,
            workshop: Arc::default(),
            limits,
            size,
            depth,
            hctxs: AtomicU16::new(u16::MAX),
            clock: Clock::get(),
        })
    }

    /// Downcasts a drive, if it is a multipath drive.
    pub fn of(device: &dyn Device) -> Option<&Self> {
        let device: &dyn Any = device;
        device.downcast_ref()
    }

    /// The drive of a queue of a running engine: the state of its paths, and messages to change
    /// them.
    ///
    /// # Errors
    /// There is no such queue, or its drive is of another kind.
    pub fn of_queue(control: &Control, queue: QueueId) -> Result<Arc<Self>, Error> {
        let device: Arc<dyn Any + Send + Sync> = control.device(queue)?;
        device.downcast().map_err(|_| {
            let queues = control.queues();
            let named = queues.iter().find(|(id, _)| *id == queue);
            let name = named.map_or("?", |(_, queue)| queue.name());
            Error::Disk(format!(
                "queue {name}: its drive has no paths; only a multipath disk has"
            ))
        })
    }

    /// The paths with their states and counts.
    pub fn paths(&self) -> Vec<PathStats> {
        self.shared.path_stats()
    }

    /// The current group, and settings for all paths.
    pub fn groups(&self) -> GroupStats {
        self.shared.group_stats()
    }

    /// Bytes of its disk.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Stops using a path until it is reinstated by message. Requests in flight there continue.
    ///
    /// # Errors
    /// There is no such path.
    pub fn fail_path(&self, name: &str) -> Result<(), MultipathError> {
        let path = self.shared.path_of(name)?;
        Ok(self.shared.fail_path(path, self.clock.now())?)
    }

    /// Uses a path again, whatever made it fail.
    ///
    /// # Errors
    /// There is no such path.
    pub fn reinstate_path(&self, name: &str) -> Result<(), MultipathError> {
        let path = self.shared.path_of(name)?;
        Ok(self.shared.reinstate_path(path, self.clock.now())?)
    }

    /// Makes a group the current one.
    ///
    /// # Errors
    /// It has no usable path.
    pub fn switch_group(&self, group: u8) -> Result<(), MultipathError> {
        Ok(self.shared.switch_group(group, self.clock.now())?)
    }

    /// Adds a path; reactors are woken, and open it at their next turn.
    ///
    /// # Errors
    /// It does not lead to a disk of the same size, its limits are below the promised ones, or its
    /// name is taken.
    pub fn add_path(&self, path: PathDevice) -> Result<(), MultipathError> {
        path.check_size(self.shared.name(), self.size)?;
        if self.limits.stack(&path.device.limits()) != self.limits {
            let (device, path) = (self.shared.name().to_owned(), path.name);
            return Err(MultipathError::Limits { device, path });
        }
        let hctxs = self.hctxs.load(Ordering::Relaxed);
        path.device.hctxs(hctxs, hctxs);
        keep_ledger(&*path.device, &self.ledger);
        // Held until the drive is in its place: a reactor that opens the path waits for that.
        let mut links = self.links.lock();
        let id = self.shared.add_path(path.spec(), self.clock.now())?;
        links[id.index()] = Some(path.device);
        Ok(())
    }

    /// Removes a path: nothing more is issued there, requests in flight end, then the reactors
    /// close it.
    ///
    /// # Errors
    /// There is no such path, or it is the last.
    pub fn remove_path(&self, name: &str) -> Result<(), MultipathError> {
        let path = self.shared.path_of(name)?;
        let mut links = self.links.lock();
        self.shared.remove_path(path, self.clock.now())?;
        links[path.index()] = None;
        Ok(())
    }

    /// Sets how much a path carries relative to the others.
    ///
    /// # Errors
    /// There is no such path, or the number is above 100.
    pub fn set_throughput(&self, name: &str, throughput: u32) -> Result<(), MultipathError> {
        let path = self.shared.path_of(name)?;
        Ok(self.shared.set_throughput(path, throughput, self.clock.now())?)
    }

    /// Sets what becomes of requests while no path is usable, including those that are held now.
    pub fn set_no_path(&self, no_path: NoPath) {
        self.shared.set_no_path(no_path, self.clock.now());
    }

    /// Sets how a path is chosen.
    pub fn set_selector(&self, selector: Selector) {
        self.shared.set_selector(selector, self.clock.now());
    }

    /// Sets when the drive returns to a higher group.
    pub fn set_failback(&self, failback: Failback) {
        self.shared.set_failback(failback, self.clock.now());
    }

    /// Sets which steps of a request use a worker thread. For measurements.
    pub fn set_detours(&self, detours: Detours) {
        self.shared.set_detours(detours, self.clock.now());
    }

    fn first_drive(&self) -> Option<Arc<dyn Device>> {
        self.links.lock().iter().flatten().next().cloned()
    }
}

impl PathDevice {
    /// A path of the first group.
    pub fn new(name: impl Into<String>, device: Arc<dyn Device>, size: u64) -> Self {
        Self {
            name: name.into(),
            device,
            size,
            group: 0,
            throughput: 1,
        }
    }

    fn spec(&self) -> PathSpec {
        PathSpec {
            name: self.name.clone(),
            group: self.group,
            throughput: self.throughput,
        }
    }

    fn check_size(&self, device: &str, others: u64) -> Result<(), MultipathError> {
        if self.size == others {
            return Ok(());
        }
        Err(MultipathError::Size {
            device: device.to_owned(),
            path: self.name.clone(),
            size: self.size,
            others,
        })
    }
}

impl Device for MultipathDevice {
    fn limits(&self) -> Limits {
        self.limits.clone()
    }

    /// As many as the path with the fewest hardware contexts has.
    fn hctxs(&self, wanted: u16, reactors: u16) -> u16 {
        let links = self.links.lock();
        let fewest = links
            .iter()
            .flatten()
            .fold(wanted, |fewest, device| device.hctxs(fewest, reactors));
        for device in links.iter().flatten() {
            device.hctxs(fewest, fewest);
        }
        self.hctxs.store(fewest, Ordering::Relaxed);
        fewest
    }

    /// The capability that all paths have in common.
    fn polling(&self) -> Polling {
        let links = self.links.lock();
        let mut all = links.iter().flatten().map(|device| device.polling());
        if all.clone().any(|one| one == Polling::Impossible) {
            Polling::Impossible
        } else if all.all(|one| one == Polling::Usual) {
            Polling::Usual
        } else {
            Polling::Possible
        }
    }

    fn set_runner(&self, runner: Runner) {
        for device in self.links.lock().iter().flatten() {
            device.set_runner(runner.clone());
        }
        let _ = self.workshop.runner.set(runner.clone());
        self.shared.set_kick(Arc::new(runner));
    }

    fn abort_queued(&self) {
        self.set_no_path(NoPath::Fail);
        self.links
            .lock()
            .iter()
            .flatten()
            .for_each(|device| device.abort_queued());
    }

    /// Everything that remains of its paths, and their common ledger of unflushed writes.
    fn handover_state(&self, disk: DiskId) -> io::Result<HandoverState> {
        let mut all = HandoverState {
            must_flush: true,
            ..HandoverState::default()
        };
        for device in self.links.lock().iter().flatten() {
            let one = device.handover_state(disk)?;
            all.locks.extend(one.locks);
            all.obstacle = all.obstacle.or(one.obstacle);
        }
        Ok(all)
    }

    fn files(&self, disk: DiskId) -> Vec<FileId> {
        let links = self.links.lock();
        let files = links.iter().flatten().flat_map(|device| device.files(disk));
        files.collect()
    }

    fn open_hctx(&self, ring: &RingHandle, hctx: HctxId) -> io::Result<Box<dyn HctxDriver>> {
        let problem = Arc::new(Mutex::new(String::new()));
        let opener = PathOpener {
            links: Arc::clone(&self.links),
            ring: ring.clone(),
            hctx,
            workshop: Arc::clone(&self.workshop),
            hctxs: self.hctxs.load(Ordering::Relaxed),
            depth: self.depth,
            memory: Some(Mapping::new(PATHS_MAX * self.limits.logical_block as usize)?),
            block: self.limits.logical_block,
            problem: Arc::clone(&problem),
        };
        let opened = MultipathHctx::open(&self.shared, hctx, self.depth, Box::new(opener));
        match opened {
            Ok(hctx) => Ok(Box::new(hctx)),
            Err(path) => {
                let stats = self.paths();
                let name = stats
                    .iter()
                    .find(|stats| stats.id == path)
                    .map_or("?", |stats| &stats.name);
                let problem = problem.lock().unwrap_or_else(PoisonError::into_inner);
                Err(io::Error::other(format!("path {name}: {problem}")))
            }
        }
    }
}

impl Allocation for MultipathDevice {
    fn extents(
        &self,
        disk: DiskId,
        offset: u64,
        len: u64,
        max: usize,
        out: &mut Vec<Extent>,
    ) -> io::Result<()> {
        let device = self.first_drive().ok_or(io::ErrorKind::NotConnected)?;
        device.extents(disk, offset, len, max, out)
    }

    fn losses(&self, disk: DiskId) -> Losses {
        let links = self.links.lock();
        let alone = links
            .iter()
            .flatten()
            .filter(|device| !keep_ledger(&***device, &self.ledger));
        alone.fold(self.ledger.losses(), |all, device| all.and(device.losses(disk)))
    }

    fn mark_losses_seen(&self, disk: DiskId) {
        self.ledger.mark_seen(self.ledger.losses().count);
        let links = self.links.lock();
        links
            .iter()
            .flatten()
            .for_each(|device| device.mark_losses_seen(disk));
    }

    /// That of the best path which may be used: what a path lacks, another one has.
    fn state(&self, disk: DiskId) -> State {
        let links = self.links.lock();
        let paths = self.paths();
        let usable = paths.iter().filter(|path| path.state == PathState::Active);
        let states = usable.filter_map(|path| Some(links[path.id.index()].as_ref()?.state(disk)));
        states.min().unwrap_or(State::Gone)
    }
}

/// The ledger in the form that drives get.
/// Passes the paths' common durability record to a path's drive. Says whether the drive keeps it; drives that lose
/// nothing by themselves, or alone, do not.
fn keep_ledger(device: &dyn Device, ledger: &Arc<Ledger>) -> bool {
    let device: &dyn Any = device;
    let device = device.downcast_ref::<NbdDevice>();
    device.is_some_and(|device| device.keep_ledger(ledger))
}
