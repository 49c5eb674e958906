//! The state that the hardware contexts of one multipath drive share: the table, the epoch that tells
//! when to read it, and the shards. `message` changes the table from outside, `hctx` and `check` from
//! inside.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use blkmq_sync::CachePadded;

use crate::bio::Status;
use crate::ids::{HctxId, REACTORS_MAX};
use crate::time::{Instant, Nanos};

use super::detour::Detours;
use super::message::MessageError;
use super::shard::Shard;
use super::table::{Failback, NoPath, Path, PathState, Table};
use super::{GroupStats, PATHS_MAX, PathId, PathSpec, PathStats, Selector};

/// The configuration of a multipath drive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Its name, for messages.
    pub name: String,
    /// Its paths, 1 to 32.
    pub paths: Vec<PathSpec>,
    /// How one of the current group's usable paths is chosen. Default `service-time`.
    pub selector: Selector,
    /// When a higher group is returned to. Default at once.
    pub failback: Failback,
    /// What happens to requests without a usable path. Default: they fail.
    pub no_path: NoPath,
    /// Interval between probes of a failed path; the first ones come sooner. Default 1 s.
    pub check_interval: Nanos,
    /// When a probe that has not ended counts as failed. Default 5 s.
    pub check_timeout: Nanos,
    /// The parts of a request's way that go over a worker. Default none.
    pub detours: Detours,
}

impl Config {
    /// A drive with these paths, and defaults for the rest.
    pub fn new(name: impl Into<String>, paths: Vec<PathSpec>) -> Self {
        Self {
            name: name.into(),
            paths,
            selector: Selector::default(),
            failback: Failback::default(),
            no_path: NoPath::default(),
            check_interval: Nanos::from_secs(1),
            check_timeout: Nanos::from_secs(5),
            detours: Detours::default(),
        }
    }
}

/// Makes a hardware context's reactor run it, from any thread: the table has changed, or a worker has a job for it.
pub trait Kick: Send + Sync {
    /// Makes the reactor run the context soon.
    fn kick(&self, hctx: HctxId);
}

/// The state that the hardware contexts of one multipath drive share; it is observed and changed here.
pub struct Multipath {
    name: String,
    /// Grows with every change of the table. On its own cache line: every request reads it.
    epoch: CachePadded<AtomicU64>,
    table: Mutex<Table>,
    shards: [OnceLock<Arc<Shard>>; REACTORS_MAX],
    kick: OnceLock<Arc<dyn Kick>>,
}

/// One context's copy of the table.
#[derive(Clone, Debug)]
pub(super) struct View {
    pub(super) epoch: u64,
    /// The current group's present paths, and the usable ones among them, by their numbers.
    pub(super) members: List,
    pub(super) usable: List,
    /// All present paths, a bit each; by number, the path's serial and its throughput.
    pub(super) present: u32,
    pub(super) serials: [u64; PATHS_MAX],
    pub(super) throughputs: [u32; PATHS_MAX],
    pub(super) selector: Selector,
    pub(super) holds: bool,
    pub(super) detours: Detours,
    pub(super) check_timeout: Nanos,
}

/// A short list of paths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct List {
    paths: [u8; PATHS_MAX],
    len: usize,
}

impl List {
    pub(super) fn push(&mut self, path: usize) {
        self.paths[self.len] = path as u8;
        self.len += 1;
    }

    #[inline]
    pub(super) fn len(&self) -> usize {
        self.len
    }

    #[inline]
    pub(super) fn get(&self, at: usize) -> usize {
        self.paths[at % PATHS_MAX].into()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        self.paths[..self.len].iter().map(|path| usize::from(*path))
    }
}

impl View {
    pub(super) fn new() -> Self {
        Self {
            epoch: 0,
            members: List::default(),
            usable: List::default(),
            present: 0,
            serials: [0; PATHS_MAX],
            throughputs: [0; PATHS_MAX],
            selector: Selector::default(),
            holds: false,
            detours: Detours::default(),
            check_timeout: Nanos::ZERO,
        }
    }
}

impl Multipath {
    /// Makes the shared side of a drive.
    ///
    /// # Errors
    /// If there are no paths or too many, two have the same name, or a number is out of range.
    pub fn new(config: Config) -> Result<Arc<Self>, MessageError> {
        let this = Self {
            name: config.name.clone(),
            epoch: CachePadded::new(AtomicU64::new(1)),
            table: Mutex::new(Table::new(&config)),
            shards: [const { OnceLock::new() }; REACTORS_MAX],
            kick: OnceLock::new(),
        };
        if config.paths.is_empty() {
            let name = &config.name;
            return Err(MessageError(format!(
                "multipath {name}: there must be at least one path"
            )));
        }
        for spec in config.paths {
            this.add_path(spec, Instant(0))?;
        }
        this.lock().start();
        Ok(Arc::new(this))
    }

    /// The drive's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Sets how the reactors are woken; only the first call has an effect.
    pub fn set_kick(&self, kick: Arc<dyn Kick>) {
        let _ = self.kick.set(kick);
    }

    /// Makes a context run, see [`Kick`].
    pub fn kick(&self, hctx: HctxId) {
        if let Some(kick) = self.kick.get() {
            kick.kick(hctx);
        }
    }

    /// The paths, in the order of their numbers.
    pub fn path_stats(&self) -> Vec<PathStats> {
        let table = self.lock();
        table.all().map(|(id, path)| self.stats_of(id, path)).collect()
    }

    /// The current group, and the settings for all paths.
    pub fn group_stats(&self) -> GroupStats {
        let table = self.lock();
        GroupStats {
            current: table.current,
            switches: table.switches,
            selector: table.selector,
            no_path: table.no_path,
            has_no_path: table.no_path_since.is_some(),
            gave_up: table.gave_up,
            failback: table.failback,
            detours: table.detours,
        }
    }

    /// The number of the latest change of the table.
    #[inline]
    pub(super) fn epoch(&self) -> u64 {
        // Acquire: pairs with the Release in `publish`; a thread that sees the number and then takes the lock
        // sees that change.
        self.epoch.load(Ordering::Acquire)
    }

    /// Changes the table, and makes every open context read it.
    pub(super) fn change<T>(&self, now: Instant, change: impl FnOnce(&mut Table) -> T) -> T {
        let mut table = self.lock();
        let result = change(&mut table);
        self.publish(table, now);
        result
    }

    /// Notes that a request or a probe has failed on a path.
    pub(super) fn failed(&self, path: PathId, error: Status, now: Instant) {
        let mut table = self.lock();
        if table.failed(path, error, now) {
            self.publish(table, now);
        }
    }

    /// Notes that a probe has succeeded.
    pub(super) fn probed(&self, path: PathId, now: Instant) {
        let mut table = self.lock();
        let is_failed = |path: &mut Path| path.state == PathState::Failed;
        if table.path(path).is_some_and(is_failed) && table.came_back(path, now) {
            self.publish(table, now);
        }
    }

    /// Makes the failed ones of these paths, a bit each, be probed at once.
    pub(super) fn check_now(&self, paths: u32, now: Instant) {
        self.lock().check_now(paths, now);
    }

    /// Does what is due. Returns the paths to probe, a bit each, and when to call it again.
    pub(super) fn tend(&self, now: Instant) -> (u32, Option<Instant>) {
        let mut table = self.lock();
        let has_changed = table.tick(now);
        let checks = table.take_due_checks(now);
        let next = table.next_due();
        if has_changed {
            self.publish(table, now);
        }
        (checks, next)
    }

    /// Opens a context. Returns its shard.
    pub(super) fn open(&self, hctx: HctxId) -> Arc<Shard> {
        let shard = self.shards[hctx.index()].get_or_init(|| Arc::new(Shard::new()));
        // The others must count what this context has in flight.
        self.change(Instant(0), |table| table.open |= 1 << hctx.0);
        Arc::clone(shard)
    }

    /// Closes a context.
    pub(super) fn close(&self, hctx: HctxId) {
        self.lock().open &= !(1 << hctx.0);
    }

    /// Gives the table to a context that has drivers of the paths in `mine`. The context may open all other
    /// present paths.
    pub(super) fn look(&self, mine: u32, view: &mut View) {
        let mut table = self.lock();
        view.epoch = self.epoch.load(Ordering::Relaxed);
        (view.members, view.usable, view.present) = (List::default(), List::default(), 0);
        for place in 0..PATHS_MAX {
            let Some(path) = &table.paths[place] else { continue };
            if path.state == PathState::Leaving {
                continue;
            }
            view.present |= 1 << place;
            view.serials[place] = path.serial;
            view.throughputs[place] = path.spec.throughput;
            if path.spec.group == table.current {
                view.members.push(place);
            }
            if mine & 1 << place == 0 {
                table.hold(PathId(place as u8));
            }
        }
        for (id, path) in table.usable() {
            if path.spec.group == table.current {
                view.usable.push(id.index());
            }
        }
        view.selector = table.selector;
        view.holds = table.holds();
        view.detours = table.detours;
        view.check_timeout = table.check_timeout;
    }

    /// Notes that a context has no driver of a path, or no longer.
    pub(super) fn release(&self, path: PathId) {
        self.lock().release(path);
    }

    /// The shards of all contexts that ever opened.
    pub(super) fn shards(&self) -> impl Iterator<Item = &Arc<Shard>> {
        self.shards.iter().filter_map(OnceLock::get)
    }

    /// Counts the change, unlocks the table and wakes the contexts that must read it.
    fn publish(&self, mut table: MutexGuard<'_, Table>, now: Instant) {
        table.update_state(now);
        let open = table.open;
        // Release: pairs with the Acquire in `epoch`. Only changed under the lock.
        let next = self.epoch.load(Ordering::Relaxed) + 1;
        self.epoch.store(next, Ordering::Release);
        drop(table);
        let contexts = (0..REACTORS_MAX as u16).filter(|hctx| open >> hctx & 1 == 1);
        contexts.for_each(|hctx| self.kick(HctxId(hctx)));
    }

    fn stats_of(&self, id: PathId, path: &Path) -> PathStats {
        let mut stats = PathStats {
            id,
            name: path.spec.name.clone(),
            group: path.spec.group,
            throughput: path.spec.throughput,
            state: path.state,
            fails: path.fails,
            last_error: path.last_error,
            in_flight: 0,
            in_flight_bytes: 0,
            ios: 0,
            bytes: 0,
            errors: 0,
            service: Nanos::ZERO,
        };
        let (mut sum, mut users) = (0, 0);
        for shard in self.shards() {
            let line = &shard.paths[id.index()];
            if line.serial.get() != path.serial {
                continue;
            }
            stats.in_flight += u64::from(line.in_flight());
            stats.in_flight_bytes += line.in_flight_bytes();
            stats.ios += line.ios.get();
            stats.bytes += line.bytes.get();
            stats.errors += line.errors.get();
            let service = line.service_ns.get();
            sum += service;
            users += u64::from(service > 0);
        }
        stats.service = Nanos(sum / users.max(1));
        stats
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Multipath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Multipath")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}
