//! The engine: how it starts its reactor threads, and the order of its shutdown. `config` describes it,
//! `build` makes its queues, its threads run `reactor`, `control` changes it while it runs.

pub mod attach;
mod build;
mod config;
pub mod control;
pub mod encrypted;
pub mod mapped;

use std::collections::BTreeMap;
use std::io::Write;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use blkmq_core::ids::ReactorId;
use blkmq_core::time::Nanos;

use self::attach::Attached;
use self::build::build;
use self::control::Control;
use crate::counted::counted;
use crate::disk::Disk;
use crate::error::Error;
use crate::reactor::core::ReactorCore;
use crate::reactor::service::ServiceFactory;
use crate::reactor::shared::{Order, ReactorQueues, Shared};
use crate::reactor::{Reactor, time_slice};
use crate::uring::ring::RingHandle;

pub use config::{DiskEntry, EngineConfig, OnReactor, QueueSpec};

/// A running engine. A drop shuts it down, unless [`Engine::shutdown`] was called.
pub struct Engine {
    shared: Arc<Shared>,
    /// Taken by the shutdown.
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Engine {
    /// Makes the queues and starts the reactors; returns when all of them serve.
    ///
    /// # Errors
    /// If a resource is missing, or the configuration is not possible. Nothing is left running then.
    pub fn start(config: EngineConfig) -> Result<Self, Error> {
        let (reactors, on_reactor) = (config.reactors.max(1), config.on_reactor.clone());
        let (shared, mut free_queues) = build(config)?;
        // The handles of attached threads stay with the shared state; those of the reactors come first.
        let spare = free_queues.split_off(reactors);
        spare
            .into_iter()
            .for_each(|reactor_queues| shared.put_queues(reactor_queues));
        let engine = Self {
            shared,
            threads: Mutex::new(Vec::with_capacity(reactors)),
        };
        engine.start_reactors(free_queues, on_reactor.as_ref())?;
        Ok(engine)
    }

    /// Checks whether such an engine is possible, as far as that is known without starting its threads: makes the
    /// queues and the rings, as [`Engine::start`] does, and drops them. Returns the disks that it would have.
    ///
    /// # Errors
    /// If a resource is missing, or the configuration is not possible.
    pub fn check(config: EngineConfig) -> Result<Vec<Disk>, Error> {
        let (reactors, ring) = (config.reactors.max(1), config.ring);
        let (shared, _queues) = build(config)?;
        // All at the same time, since descriptors are limited.
        let open = |reactor| {
            let reactor = ReactorId(reactor as u16);
            RingHandle::new(ring).map_err(|cause| Error::Ring { reactor, cause })
        };
        let _rings = (0..reactors).map(open).collect::<Result<Vec<_>, Error>>()?;
        Ok(shared.disks().to_vec())
    }

    /// Orders a service to be made on a reactor.
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
    pub fn disks(&self) -> Arc<[Disk]> {
        self.shared.disks()
    }

    /// Finds a disk by its name.
    pub fn disk(&self, name: &str) -> Option<Disk> {
        self.disks().iter().find(|disk| disk.name == name).cloned()
    }

    /// Shuts down: services finish their work under way and take no more, attached threads are waited for,
    /// queues drain, reactors end. Blocks for at most about `limit`, or until [`Control::hurry`]; drives
    /// that have to write what is only in this process get 30 s.
    ///
    /// # Errors
    /// If work was not finished in time; the text says which. The threads and their buffers are left as they
    /// are, since the kernel may still use them: the caller should end the process.
    pub fn shutdown(&self, limit: Nanos) -> Result<(), Error> {
        self.stop(limit)
    }

    fn start_reactors(
        &self,
        free_queues: Vec<ReactorQueues>,
        on_reactor: Option<&OnReactor>,
    ) -> Result<(), Error> {
        let (ready, opened) = mpsc::channel();
        let count = free_queues.len();
        for reactor_queues in free_queues {
            let (shared, ready) = (Arc::clone(&self.shared), ready.clone());
            let on_reactor = on_reactor.cloned();
            let name = format!("blkmq-r{}", reactor_queues.id);
            let thread = thread::Builder::new().name(name.clone());
            let started = thread.spawn(move || serve(&shared, reactor_queues, on_reactor.as_ref(), &ready));
            self.lock_threads().push(started.map_err(|cause| Error::Os {
                what: format!("starting the thread {name}"),
                cause,
            })?);
        }
        drop(ready);
        // Every thread reports the result of its set-up, or ends without a report, which the count shows.
        let results: Vec<_> = opened.iter().take(count).collect();
        results.into_iter().collect()
    }

    fn lock_threads(&self) -> MutexGuard<'_, Vec<JoinHandle<()>>> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stop(&self, limit: Nanos) -> Result<(), Error> {
        let threads = std::mem::take(&mut *self.lock_threads());
        if threads.is_empty() {
            return Ok(());
        }
        let until = self.shared.clock.now() + limit;
        self.order_all(|| Order::Drain);
        let shared = &self.shared;
        for (_, entry) in shared.entries() {
            entry.queue.end_caps();
            entry.device.abort_queued();
            shared.kick(entry.queue.everybody());
        }
        let services = || shared.services.load(Ordering::Acquire);
        self.wait_for(
            limit,
            || services() == 0,
            || format!("{} services are not finished{}", services(), self.under_way()),
        )?;
        let attached = || shared.close_free_queues();
        self.wait_for(
            limit,
            || attached() == 0,
            || {
                format!(
                    "{} still attached",
                    counted(attached(), "thread is", "threads are")
                )
            },
        )?;
        for (_, entry) in shared.entries() {
            let queue = &entry.queue;
            queue.freeze_begin();
            let left = until.since(shared.clock.now());
            control::wait_until(shared, queue, left, || queue.is_drained())?;
        }
        self.order_all(|| Order::Stop);
        for thread in threads {
            // A reactor that panicked has ended the process.
            let _ = thread.join();
        }
        self.close_drives(limit.max(CLOSE_LIMIT))
    }

    /// Has drives write what is only in this process, each on a thread of its own: one that does not answer keeps neither the
    /// others nor the end waiting for longer.
    fn close_drives(&self, limit: Nanos) -> Result<(), Error> {
        let (closed, closings) = mpsc::channel();
        let mut open: BTreeMap<_, _> = self.shared.entries().into_iter().collect();
        let mut alone = Vec::new();
        for (id, entry) in open.clone() {
            let (closed, device) = (closed.clone(), Arc::clone(&entry.device));
            let close = move || {
                device.close();
                // Nobody may wait any more.
                let _ = closed.send(id);
            };
            let started = thread::Builder::new().name("close".to_owned()).spawn(close);
            if let Err(error) = started {
                let queue = entry.queue.name();
                tracing::warn!(
                    "queue {queue}: there is no thread that closes its drive, so it is closed by this one: {error}"
                );
                open.remove(&id);
                alone.push(entry);
            }
        }
        drop(closed);
        // Behind the start of the others, since one that does not answer is waited for.
        alone.iter().for_each(|entry| entry.device.close());
        let until = self.shared.clock.now() + limit;
        while !open.is_empty() {
            let left = until.since(self.shared.clock.now());
            match closings.recv_timeout(Duration::from_nanos(left.0)) {
                Ok(id) => drop(open.remove(&id)),
                Err(_) => {
                    let names: Vec<&str> = open.values().map(|entry| entry.queue.name()).collect();
                    return Err(Error::Shutdown(format!(
                        "the drives of queue {} do not answer: what was not flushed may be lost",
                        names.join(", ")
                    )));
                }
            }
        }
        Ok(())
    }

    /// The requests that have not ended, for people.
    fn under_way(&self) -> String {
        let mut text = String::new();
        for (_, entry) in self.shared.entries() {
            let (name, count) = (entry.queue.name(), entry.queue.outstanding());
            if count > 0 {
                let comma = if text.is_empty() {
                    "; requests under way:"
                } else {
                    ","
                };
                text += &format!("{comma} {count} on queue {name}");
            }
        }
        text
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

/// The main function of a reactor's thread.
fn serve(
    shared: &Arc<Shared>,
    reactor_queues: ReactorQueues,
    on_reactor: Option<&OnReactor>,
    ready: &Sender<Result<(), Error>>,
) {
    let _guard = AbortOnPanic;
    control::mark_reactor();
    time_slice::shorten();
    let core = match ReactorCore::open(shared, reactor_queues) {
        Ok(core) => core,
        Err((error, _queues)) => {
            // The starting thread waits for this; if that thread is gone, the error does not matter.
            let _ = ready.send(Err(error));
            return;
        }
    };
    let reactor = Reactor::new(core);
    if let Some(Err(cause)) = on_reactor.map(|call| call()) {
        let what = "setting up a reactor".to_owned();
        let _ = ready.send(Err(Error::Os { what, cause }));
        return;
    }
    let _ = ready.send(Ok(()));
    reactor.run();
}

/// Ends the process when a reactor panics: its I/O could never end, and its clients would wait for ever.
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

/// Prints why the process is about to end; a standard error that fails or that nobody reads does not prevent
/// the end.
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
/// How long drives may take at least to write what is only in this process.
const CLOSE_LIMIT: Nanos = Nanos::from_secs(30);
