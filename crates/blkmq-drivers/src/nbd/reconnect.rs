//! Reconnects: at once, then after growing pauses, on one thread for the whole drive that exists only
//! while a connection is missing. `hctx` asks for connections and is notified when one is made.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use blkmq_host::threads;
use rustix::event::{EventfdFlags, eventfd};

use super::config::NbdConfig;
use super::dial::{Dialed, dial};
use super::disk::Shape;

/// What makes the connections of one drive.
#[derive(Debug)]
pub(super) struct Reconnector {
    config: NbdConfig,
    shape: Shape,
    state: Mutex<State>,
    /// A connection is not wanted any more, or one more is missing.
    changed: Condvar,
    /// Threads are short.
    #[cfg(test)]
    pub(super) has_no_threads: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    missing: VecDeque<Missing>,
    is_working: bool,
    /// The latest attempt to make the thread has failed, and was logged.
    has_no_thread: bool,
}

/// A connection that is missing.
#[derive(Debug)]
struct Missing {
    connection: u16,
    /// How many connections in a row were short-lived.
    short_lived: u32,
    of: Arc<Mailbox>,
}

/// Where a hardware context finds the results for its missing connections.
#[derive(Debug)]
pub(super) struct Mailbox {
    event: OwnedFd,
    news: Mutex<Vec<News>>,
    is_closed: AtomicBool,
}

/// The result for a missing connection.
#[derive(Debug)]
pub(super) enum News {
    /// The connection of this number is made.
    Connected(u16, Dialed),
    /// An attempt has failed; another follows.
    Failed,
    /// A session is to be fenced, or has been.
    Fences,
}

impl Mailbox {
    pub(super) fn new() -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            news: Mutex::default(),
            is_closed: AtomicBool::new(false),
        }))
    }

    /// Becomes readable when there is news.
    pub(super) fn fd(&self) -> RawFd {
        self.event.as_raw_fd()
    }

    /// Takes all news.
    pub(super) fn take(&self) -> Vec<News> {
        // Empty already, if it is read once more often than written.
        let _ = rustix::io::read(&self.event, &mut [0; 8]);
        std::mem::take(&mut *lock(&self.news))
    }

    /// Makes its context check the fences.
    pub(super) fn look_at_fences(&self) {
        // One entry is enough, however often something changes.
        if !lock(&self.news).iter().any(|news| matches!(news, News::Fences)) {
            self.put(News::Fences);
        }
    }

    fn put(&self, news: News) {
        lock(&self.news).push(news);
        // Fails only when the counter is full, and then it is readable anyway.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }

    fn is_closed(&self) -> bool {
        // Relaxed: it publishes nothing else; a connection that is made a little later is dropped
        // with the mailbox.
        self.is_closed.load(Ordering::Relaxed)
    }
}

impl Reconnector {
    pub(super) fn new(config: NbdConfig, shape: Shape) -> Arc<Self> {
        Arc::new(Self {
            config,
            shape,
            state: Mutex::default(),
            changed: Condvar::new(),
            #[cfg(test)]
            has_no_threads: AtomicBool::new(false),
        })
    }

    /// Requests the connection of a number: at once or, if the last `short_lived` ones were
    /// short-lived, after a pause. Otherwise a server that accepts and closes every connection
    /// would keep both sides busy. Returns false if there can be no thread now: the caller has to
    /// [`start`](Self::start) it later.
    pub(super) fn missing_one(
        self: &Arc<Self>,
        connection: u16,
        short_lived: u32,
        of: &Arc<Mailbox>,
    ) -> bool {
        lock(&self.state).missing.push_back(Missing {
            connection,
            short_lived,
            of: Arc::clone(of),
        });
        let is_working = self.start();
        if !is_working {
            of.put(News::Failed);
        }
        is_working
    }

    /// Starts the thread, if connections are missing and there is none. Returns false if it cannot
    /// be made now.
    pub(super) fn start(self: &Arc<Self>) -> bool {
        let mut state = lock(&self.state);
        if state.is_working || state.missing.is_empty() {
            return true;
        }
        let spawned = self.spawn();
        state.is_working = spawned.is_ok();
        let had_no_thread = std::mem::replace(&mut state.has_no_thread, spawned.is_err());
        if let Err(error) = spawned
            && !had_no_thread
        {
            tracing::error!(
                source = self.config.text,
                "nbd {}: no thread to connect with: {error}; trying again every second",
                self.config.text
            );
        }
        state.is_working
    }

    fn spawn(self: &Arc<Self>) -> io::Result<()> {
        #[cfg(test)]
        if self.has_no_threads.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let reconnector = Arc::clone(self);
        threads::spawn("blkmq-nbd", move || reconnector.work()).map(drop)
    }

    /// Drops the requests of a mailbox.
    pub(super) fn forget(&self, of: &Mailbox) {
        of.is_closed.store(true, Ordering::Relaxed);
        let mut state = lock(&self.state);
        state.missing.retain(|missing_one| !missing_one.of.is_closed());
        self.changed.notify_all();
    }

    /// Makes connections until none is missing.
    fn work(&self) {
        let mut pause = PAUSE_MIN;
        let mut complaint = None;
        let mut state = lock(&self.state);
        while let Some(missing_one) = state.missing.pop_front() {
            if missing_one.short_lived > 0 {
                let doublings = (missing_one.short_lived - 1).min(16);
                state = self.pause(state, (PAUSE_MIN * (1 << doublings)).min(PAUSE_MAX), &missing_one);
            }
            if missing_one.of.is_closed() {
                continue;
            }
            drop(state);
            // A panic would leave this connection missing, and nobody to make others. Nothing of ours
            // is half-changed then: what an attempt makes goes with it.
            let attempt = catch_unwind(AssertUnwindSafe(|| self.connect()));
            match attempt.unwrap_or_else(|_| Err("the attempt to connect panicked".to_owned())) {
                Ok(dialed) => {
                    pause = PAUSE_MIN;
                    complaint = None;
                    missing_one
                        .of
                        .put(News::Connected(missing_one.connection, dialed));
                    state = lock(&self.state);
                }
                Err(problem) => {
                    if complaint.as_ref() != Some(&problem) {
                        tracing::warn!(
                            source = self.config.text,
                            "nbd {}: {problem}; trying again",
                            self.config.text
                        );
                        complaint = Some(problem);
                    }
                    missing_one.of.put(News::Failed);
                    state = self.pause(lock(&self.state), pause, &missing_one);
                    state.missing.push_back(Missing {
                        short_lived: 0,
                        ..missing_one
                    });
                    pause = (pause * 2).min(PAUSE_MAX);
                }
            }
        }
        state.is_working = false;
    }

    fn connect(&self) -> Result<Dialed, String> {
        let dialed = dial(&self.config, false).map_err(|error| error.to_string())?;
        self.shape.check_still(&dialed.agreed)?;
        Ok(dialed)
    }

    /// Waits, unless this request and all others are dropped meanwhile.
    fn pause<'a>(
        &self,
        state: MutexGuard<'a, State>,
        pause: Duration,
        missing_one: &Missing,
    ) -> MutexGuard<'a, State> {
        let is_wanted = |state: &mut State| !missing_one.of.is_closed() || !state.missing.is_empty();
        let waited = self.changed.wait_timeout_while(state, pause, is_wanted);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Pauses between attempts: the first, and the longest.
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(1);
