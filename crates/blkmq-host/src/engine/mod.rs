//! Decides how an engine comes up and goes down: queues and handles, reactor threads, and the order of a
//! shutdown. `plan` says which disks share a queue; `reactor` is what the threads run; `control` changes a
//! running engine.

pub mod attach;
pub mod control;
pub mod disk;
pub mod group_paths;
pub mod mapped;
pub(crate) mod shared;

use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use blkmq_core::group::GroupTree;
use blkmq_core::ids::{DiskId, GroupId, REACTORS_MAX, ReactorId};
use blkmq_core::poll::{Policy, Wait};
use blkmq_core::queue::{
    DiskConfig, Dispatch, Queue, QueueConfig, QueueHandle, ReactorConfig, Rerun, TagMode,
};
use blkmq_core::sched::Kind;
use blkmq_core::stat::StatsMode;
use blkmq_core::time::Nanos;

use self::attach::Attached;
use self::control::Control;
use self::disk::{Disk, QueueId};
use self::group_paths::Paths;
use self::mapped::MappedSpec;
use self::shared::{Inbox, Order, QueueEntry, ReactorQueues, Shared};
use crate::clock::Clock;
use crate::drive::{Allocation, Drive, Polling};
use crate::error::Error;
use crate::reactor::Reactor;
use crate::reactor::core::ReactorCore;
use crate::reactor::runner::Runner;
use crate::reactor::service::ServiceFactory;
use crate::reactor::wait;
use crate::reactor::wakeup::Wakeup;
use crate::uring::ring::RingConfig;

/// What an engine is to be.
pub struct EngineConfig {
    /// Threads that serve, 1 to 128 together with `attached_max`. With 0 there is still one, which sleeps
    /// unless an elevator's timers need somebody who always comes back. Default 1.
    pub reactors: usize,
    /// Threads of a library user that may be attached at the same time. Each costs its share of every queue's
    /// requests and tags. Default 0.
    pub attached_max: usize,
    /// The size of each thread's ring.
    pub ring: RingConfig,
    /// How long a reactor looks for events before it blocks, where that pays; see [`wait::WaitPolicy`].
    /// Default 40 µs.
    pub spin_max: Nanos,
    /// How threads wait. Default auto: by cost, at each moment.
    pub wait: Wait,
    /// The queues, with their disks.
    pub queues: Vec<QueueSpec>,
    /// Disks that lie on other disks, in any order.
    pub mapped: Vec<MappedSpec>,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            reactors: 1,
            attached_max: 0,
            ring: RingConfig::default(),
            spin_max: wait::SPIN_MAX,
            wait: Wait::default(),
            queues: Vec::new(),
            mapped: Vec::new(),
        }
    }
}

/// One drive's queue and the disks on it.
pub struct QueueSpec {
    /// Its name, unique in the engine.
    pub name: String,
    /// The drive.
    pub drive: Arc<dyn Drive>,
    /// The disks, in the order in which the drive knows them.
    pub disks: Vec<DiskEntry>,
    /// The elevator to begin with. Default none.
    pub elevator: Kind,
    /// Tunables of the elevator that are not to be as by default: names and values.
    pub tunables: Vec<(String, u64)>,
    /// Who takes requests out of the elevator. Default one dispatcher; the other way is there to be compared.
    pub dispatch: Dispatch,
    /// Whom the end of a request runs, where the tags are shared. Default: who waits for one; the others are there to be
    /// compared.
    pub rerun: Rerun,
    /// How many requests may be in flight. Default 128 per hardware context.
    pub tags: TagMode,
    /// Hardware contexts; none for one per thread. Fewer must not be more than there are reactors: the
    /// threads without one go through a reactor then. Default none.
    pub hctxs: Option<u16>,
    /// Requests of each thread under way, and as many bios may wait beside them. Default 256.
    pub requests_per_reactor: u32,
    /// How long a request may be with the driver. Default 30 s.
    pub timeout: Nanos,
    /// Whether neighbouring bios are merged. Default true.
    pub merges: bool,
    /// The groups to begin with, and room for more. Default: the root alone.
    pub groups: GroupTree,
    /// The paths of the groups, by their ids: the names under which [`Control`] knows them.
    pub group_paths: Vec<String>,
    /// Who keeps the statistics of groups. Default: each thread, outside the gate.
    pub stats: StatsMode,
    /// Whether the ends of requests are looked for instead of waited for (`io_poll`). Default: where the drive has queues for that.
    pub io_poll: Option<bool>,
    /// How requests of a polled drive are slept for (`io_poll_delay`).
    pub poll_policy: Policy,
}

impl QueueSpec {
    /// A queue without disks, everything else by default.
    pub fn new(name: impl Into<String>, drive: Arc<dyn Drive>) -> Self {
        Self {
            name: name.into(),
            drive,
            disks: Vec::new(),
            elevator: Kind::None,
            tunables: Vec::new(),
            dispatch: Dispatch::Single,
            rerun: Rerun::default(),
            tags: TagMode::PerHctx(128),
            hctxs: None,
            requests_per_reactor: 256,
            timeout: Nanos::from_secs(30),
            merges: true,
            groups: GroupTree::flat(1),
            group_paths: Vec::new(),
            stats: StatsMode::default(),
            io_poll: None,
            poll_policy: Policy::default(),
        }
    }
}

impl QueueSpec {
    /// Says whether the ends of its requests will be looked for: as asked for, or as is usual for the drive.
    ///
    /// # Errors
    /// If polling, or a way of it, is asked for and the drive cannot be polled.
    pub fn is_polled(&self) -> Result<bool, Error> {
        let refused = |name, value: &str| Err(Error::not_polled(&self.name, name, value));
        match self.drive.polling() {
            Polling::Impossible if self.io_poll == Some(true) => refused("io_poll", "on"),
            Polling::Impossible if self.poll_policy != Policy::default() => {
                refused("io_poll_delay", &self.poll_policy.to_string())
            }
            polling => Ok(self.io_poll.unwrap_or(polling == Polling::Usual)),
        }
    }
}

/// A disk of a queue.
#[derive(Clone, Debug)]
pub struct DiskEntry {
    /// Its name, unique in the engine.
    pub name: String,
    /// What it is, for people. May be empty.
    pub description: String,
    /// Bytes, a multiple of the block size.
    pub size: u64,
    /// Whether changes are refused.
    pub read_only: bool,
    /// Smallest unit of its addresses and lengths, in bytes: a power of two, at least the drive's.
    pub block_size: u32,
    /// The group that doors account its I/O to.
    pub group: GroupId,
}

/// A running engine. Dropping it shuts it down.
pub struct Engine {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Engine {
    /// Makes the queues and starts the reactors; returns when all of them serve.
    ///
    /// # Errors
    /// What cannot be had, or cannot be as configured. Nothing is left running then.
    pub fn start(config: EngineConfig) -> Result<Self, Error> {
        let reactors = config.reactors.max(1);
        let (shared, mut free_queues) = build(config)?;
        // The handles of attached threads stay with the shared state; those of the reactors come first.
        let spare = free_queues.split_off(reactors);
        spare
            .into_iter()
            .for_each(|reactor_queues| shared.put_queues(reactor_queues));
        let mut engine = Self {
            shared,
            threads: Vec::with_capacity(reactors),
        };
        engine.start_reactors(free_queues)?;
        Ok(engine)
    }

    /// Says whether there can be such an engine, as far as that can be known without starting its threads: makes the queues, as
    /// [`Engine::start`] does, and drops them. Returns the disks as they would be.
    ///
    /// # Errors
    /// What cannot be as configured.
    pub fn check(config: EngineConfig) -> Result<Vec<Disk>, Error> {
        build(config).map(|(shared, _)| shared.disks.to_vec())
    }

    /// Has a service made on a reactor.
    ///
    /// # Panics
    /// If there is no such reactor.
    pub fn add_service(&self, reactor: ReactorId, factory: ServiceFactory) {
        self.shared.order(reactor, Order::Add(factory));
    }

    /// How many reactors serve.
    pub fn reactors(&self) -> usize {
        self.shared.inboxes.len()
    }

    /// Attaches the calling thread, to do I/O by itself.
    ///
    /// # Errors
    /// If `attached_max` threads are attached already, or there is no ring or driver for one more.
    pub fn attach(&self) -> Result<Attached, Error> {
        Attached::new(&self.shared)
    }

    /// A handle to change and watch the engine with.
    pub fn control(&self) -> Control {
        Control::new(Arc::clone(&self.shared))
    }

    /// All disks.
    pub fn disks(&self) -> &[Disk] {
        &self.shared.disks
    }

    /// Finds a disk by its name.
    pub fn disk(&self, name: &str) -> Option<&Disk> {
        self.disks().iter().find(|disk| disk.name == name)
    }

    /// Shuts down: services finish what is under way and take no more, attached threads are waited for,
    /// queues drain, reactors end. Blocks for at most about `limit`, or until [`Control::hurry`].
    ///
    /// # Errors
    /// What was not finished in time. Its threads and their buffers are left as they are, since the kernel
    /// may still use them: the caller should end the process.
    pub fn shutdown(mut self, limit: Nanos) -> Result<(), Error> {
        self.stop(limit)
    }

    fn start_reactors(&mut self, free_queues: Vec<ReactorQueues>) -> Result<(), Error> {
        let (ready, opened) = mpsc::channel();
        let count = free_queues.len();
        for reactor_queues in free_queues {
            let (shared, ready) = (Arc::clone(&self.shared), ready.clone());
            let name = format!("blkmq-r{}", reactor_queues.id);
            let thread = thread::Builder::new().name(name.clone());
            let started = thread.spawn(move || serve(&shared, reactor_queues, &ready));
            self.threads.push(started.map_err(|source| Error::Os {
                what: format!("starting the thread {name}"),
                source,
            })?);
        }
        drop(ready);
        // Every thread says how its set-up went, or is gone without a word, which the count would show.
        let results: Vec<_> = opened.iter().take(count).collect();
        results.into_iter().collect()
    }

    fn stop(&mut self, limit: Nanos) -> Result<(), Error> {
        let threads = std::mem::take(&mut self.threads);
        if threads.is_empty() {
            return Ok(());
        }
        let until = self.shared.clock.now() + limit;
        self.order_all(|| Order::Drain);
        let shared = &self.shared;
        for entry in &shared.queues {
            entry.queue.end_caps();
            entry.drive.abort_queued();
            shared.kick(entry.queue.everybody());
        }
        let services = || shared.services.load(Ordering::Acquire);
        self.wait_for(
            limit,
            || services() == 0,
            || format!("{} services are not finished", services()),
        )?;
        let attached = || shared.close_free_queues();
        self.wait_for(
            limit,
            || attached() == 0,
            || format!("{} threads are still attached", attached()),
        )?;
        for index in 0..self.shared.queues.len() {
            let queue = &self.shared.queues[index].queue;
            queue.freeze_begin();
            let left = until.since(self.shared.clock.now());
            control::wait_until(&self.shared, QueueId(index as u16), left, || queue.is_drained())?;
        }
        self.order_all(|| Order::Stop);
        for thread in threads {
            // A reactor that panicked has ended the process.
            let _ = thread.join();
        }
        Ok(())
    }

    fn wait_for(
        &self,
        limit: Nanos,
        is_so: impl Fn() -> bool,
        problem: impl Fn() -> String,
    ) -> Result<(), Error> {
        let start = self.shared.clock.now();
        while !is_so() {
            if self.shared.is_hurried.load(Ordering::Relaxed) || self.shared.clock.now().since(start) > limit
            {
                return Err(Error::Shutdown(problem()));
            }
            thread::sleep(PAUSE);
        }
        Ok(())
    }

    fn order_all(&self, order: impl Fn() -> Order) {
        for reactor in 0..self.shared.inboxes.len() {
            self.shared.order(ReactorId(reactor as u16), order());
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if let Err(error) = self.stop(DROP_LIMIT) {
            tracing::error!("the engine was dropped and is not at rest: {error}");
        }
    }
}

/// Makes the queues, and for each thread its handles of all of them.
fn build(config: EngineConfig) -> Result<(Arc<Shared>, Vec<ReactorQueues>), Error> {
    let reactors = config.reactors.max(1);
    let handles = reactors + config.attached_max;
    if handles > REACTORS_MAX {
        return Err(Error::Range {
            name: "number of reactors and attached threads",
            value: handles as u64,
            min: 1,
            max: REACTORS_MAX as u64,
        });
    }
    let mut free_queues: Vec<ReactorQueues> = (0..handles)
        .map(|id| ReactorQueues {
            id: ReactorId(id as u16),
            handles: Vec::with_capacity(config.queues.len()),
        })
        .collect();
    let mut disks = Vec::new();
    let mut queues = Vec::with_capacity(config.queues.len());
    for (index, spec) in config.queues.into_iter().enumerate() {
        let drive = Arc::clone(&spec.drive);
        let entries = spec.disks.clone();
        let paths = Mutex::new(Paths::new(&spec.group_paths));
        let (queue, handles) = make_queue(spec, reactors, handles)?;
        list_disks(&mut disks, QueueId(index as u16), &queue, &drive, entries)?;
        free_queues
            .iter_mut()
            .zip(handles)
            .for_each(|(reactor_queues, handle)| reactor_queues.handles.push(handle));
        queues.push(QueueEntry { queue, drive, paths });
    }
    let mapped = mapped::add(&mut disks, config.mapped, QueueId(queues.len() as u16))?;
    let wakeups: Result<Box<[Wakeup]>, _> = (0..handles).map(|_| Wakeup::new()).collect();
    let wakeups = wakeups.map_err(|source| Error::Os {
        what: "making an event to wake a reactor with".to_owned(),
        source,
    })?;
    let shared = Shared {
        clock: Clock::get(),
        ring: config.ring,
        spin_max: config.spin_max,
        wait: config.wait,
        wakeups,
        inboxes: (0..reactors).map(|_| Inbox::default()).collect(),
        queues: queues.into(),
        disks: disks.into(),
        mapped,
        free_queues: Mutex::default(),
        attached_max: handles - reactors,
        services: AtomicU32::new(0),
        is_hurried: AtomicBool::new(false),
    };
    let shared = Arc::new(shared);
    for (index, entry) in shared.queues.iter().enumerate() {
        entry.drive.meet(Runner::new(&shared, QueueId(index as u16)));
    }
    Ok((shared, free_queues))
}

fn make_queue(
    spec: QueueSpec,
    reactors: usize,
    handles: usize,
) -> Result<(Arc<Queue>, Vec<QueueHandle>), Error> {
    let io_poll = spec.is_polled()?;
    if io_poll {
        log_polling(&spec.name, &*spec.drive);
    }
    let mut base = 0;
    let mut disks = Vec::with_capacity(spec.disks.len());
    for entry in spec.disks {
        let (name, size) = (entry.name.clone(), entry.size);
        disks.push(DiskConfig {
            name: entry.name,
            base,
            size: entry.size,
            read_only: entry.read_only,
            logical_block: entry.block_size,
        });
        // Disks are apart on the queue, so that the end of one is no neighbour of the next one's beginning.
        let end = base.checked_add(entry.size);
        let next = end.and_then(|end| {
            end.checked_next_multiple_of(DISK_SPACING)?
                .checked_add(DISK_SPACING)
        });
        base = next.ok_or_else(|| {
            Error::Disk(format!(
                "queue {}: disk {name}: size {size} rejected: all disks of a queue together must be smaller than 16777216T; \
                 make it smaller, or give it a queue= of its own",
                spec.name,
            ))
        })?;
    }
    let config = QueueConfig {
        name: spec.name,
        reactors: (0..handles)
            .map(|id| ReactorConfig {
                is_event_loop: id < reactors,
            })
            .collect(),
        hctxs: spec
            .drive
            .hctxs(spec.hctxs.unwrap_or(handles as u16), reactors as u16),
        tags: spec.tags,
        requests_per_reactor: spec.requests_per_reactor,
        limits: spec.drive.limits(),
        elevator: spec.elevator,
        dispatch: spec.dispatch,
        rerun: spec.rerun,
        timeout: spec.timeout,
        merges: spec.merges,
        groups: spec.groups,
        stats: spec.stats,
        clock: || Clock::get().now(),
        io_poll,
        poll_policy: spec.poll_policy,
        disks,
    };
    let (queue, handles) = Queue::new(config)?;
    for (name, value) in spec.tunables {
        let set = queue
            .set_tunable(&name, value)
            .expect("nobody else is inside yet");
        set.map_err(|cause| Error::Tunable {
            queue: queue.name().to_owned(),
            cause,
        })?;
    }
    Ok((queue, handles))
}

/// Says how a queue will be polled, where that is a question; and has its drive find out.
pub(crate) fn log_polling(queue: &str, drive: &dyn Drive) {
    if let Some(how) = drive.describe_polling() {
        tracing::info!("queue {queue}: polled: {how}");
    }
}

fn list_disks(
    disks: &mut Vec<Disk>,
    queue: QueueId,
    core: &Queue,
    drive: &Arc<dyn Drive>,
    entries: Vec<DiskEntry>,
) -> Result<(), Error> {
    let allocation: Arc<dyn Allocation> = Arc::<dyn Drive>::clone(drive);
    for (id, entry) in entries.into_iter().enumerate() {
        if disks.iter().any(|disk| disk.name == entry.name) {
            let name = entry.name;
            return Err(Error::Disk(format!(
                "disk {name}: there are two of this name; rename one"
            )));
        }
        disks.push(Disk {
            name: entry.name,
            description: entry.description,
            queue,
            id: DiskId(id as u32),
            size: entry.size,
            read_only: entry.read_only,
            block_size: entry.block_size,
            group: entry.group,
            limits: core.limits().clone(),
            allocation: Arc::clone(&allocation),
            used_by: None,
        });
    }
    Ok(())
}

/// What a reactor's thread does.
fn serve(shared: &Arc<Shared>, reactor_queues: ReactorQueues, ready: &Sender<Result<(), Error>>) {
    let _guard = AbortOnPanic;
    control::mark_reactor();
    let core = match ReactorCore::open(shared, reactor_queues) {
        Ok(core) => core,
        Err((error, _chair)) => {
            // Whoever started us waits for this, and gives up if it is gone.
            let _ = ready.send(Err(error));
            return;
        }
    };
    let reactor = Reactor::new(core);
    let _ = ready.send(Ok(()));
    reactor.run();
}

/// Ends the process when a reactor panics: the I/O it holds could never end, and its clients would wait for
/// ever.
struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if thread::panicking() {
            let name = thread::current().name().unwrap_or("a reactor").to_owned();
            say_last_words(format!(
                "blkmq: {name} has panicked (see above): its I/O can never end, so the process is aborted"
            ));
            std::process::abort();
        }
    }
}

/// Says why the process is about to end; but ends it, too, where standard error fails or nobody reads it.
fn say_last_words(words: String) {
    let (done, is_done) = mpsc::channel();
    let spoken = thread::Builder::new().spawn(move || {
        let _ = writeln!(std::io::stderr(), "{words}");
        let _ = done.send(());
    });
    if spoken.is_ok() {
        let _ = is_done.recv_timeout(LAST_WORDS_MAX);
    }
}

const PAUSE: Duration = Duration::from_millis(1);
const LAST_WORDS_MAX: Duration = Duration::from_secs(1);
const DROP_LIMIT: Nanos = Nanos::from_secs(30);
const DISK_SPACING: u64 = 1 << 20;
