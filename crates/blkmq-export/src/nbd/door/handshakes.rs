//! The threads that do the arithmetic of TLS handshakes: two that give way to those that serve, first come,
//! first served. A signature takes up to some milliseconds, in which a reactor would serve nobody. A
//! connection has one step under way at a time, and is woken when it is done; however many clients begin a
//! handshake, two of them cost time at once.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use blkmq_host::service::Waker;
use blkmq_tls::Stream;

use crate::common::lookup::give_way;

/// The threads, and what waits for them: a step for each connection at most.
#[derive(Debug, Default)]
pub(super) struct Handshakes(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    /// There is a step to do, or there will be none any more.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    steps: VecDeque<Step>,
    threads: usize,
    idle: usize,
    is_over: bool,
}

#[derive(Debug)]
struct Step {
    stream: Box<Stream>,
    desk: Arc<Desk>,
}

/// Where a connection finds its handshake again.
#[derive(Debug)]
pub(super) struct Desk {
    done: Mutex<Option<Done>>,
    waker: Waker,
}

/// A handshake after a step.
#[derive(Debug)]
pub(super) struct Done {
    pub(super) stream: Box<Stream>,
    /// The peer's names if the handshake has ended, or why it came to nothing.
    pub(super) outcome: Result<Option<Vec<String>>, String>,
}

impl Handshakes {
    /// Has a handshake taken on by what was received; the desk's connection is woken then.
    pub(super) fn take_on(&self, stream: Box<Stream>, desk: &Arc<Desk>) {
        let mut state = self.0.lock();
        state.steps.push_back(Step {
            stream,
            desk: Arc::clone(desk),
        });
        if state.idle > 0 {
            self.0.changed.notify_one();
        } else if state.threads < THREADS {
            self.add_thread(&mut state);
        }
    }

    fn add_thread(&self, state: &mut State) {
        let shared = Arc::clone(&self.0);
        let thread = thread::Builder::new().name("tls".to_owned());
        match thread.spawn(move || shared.serve()) {
            Ok(_) => state.threads += 1,
            // Those that there are will do; the next step tries again.
            Err(_) if state.threads > 0 => {}
            Err(error) => {
                for Step { stream, desk } in state.steps.drain(..) {
                    desk.put(stream, Err(format!("there can be no thread for it: {error}")));
                }
            }
        }
    }
}

impl Drop for Handshakes {
    fn drop(&mut self) {
        self.0.lock().is_over = true;
        self.0.changed.notify_all();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing that can panic is done under the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does steps until there will be none.
    fn serve(&self) {
        let _counted = Counted(self);
        give_way();
        while let Some(Step { mut stream, desk }) = self.wait_for_step() {
            // Nobody else has it: the client has left.
            if Arc::strong_count(&desk) > 1 {
                let outcome = match stream.shake_hands() {
                    Ok(()) if stream.is_shaking_hands() => Ok(None),
                    Ok(()) => Ok(Some(stream.peer_names())),
                    Err(error) => Err(blkmq_tls::explain(&error)),
                };
                desk.put(stream, outcome);
            }
            // Niceness is not enough: who runs keeps the processor for a slice of some milliseconds, whoever wakes.
            thread::yield_now();
        }
    }

    fn wait_for_step(&self) -> Option<Step> {
        let mut state = self.lock();
        loop {
            if state.is_over {
                return None;
            }
            if let Some(step) = state.steps.pop_front() {
                return Some(step);
            }
            state.idle += 1;
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.idle -= 1;
        }
    }
}

/// A thread in the count, until it ends: also by a panic, so that another can take its place. The
/// handshake that panicked is dropped, and its client is disconnected at the deadline.
struct Counted<'a>(&'a Shared);

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.lock().threads -= 1;
    }
}

impl Desk {
    pub(super) fn new(waker: Waker) -> Self {
        Self {
            done: Mutex::default(),
            waker,
        }
    }

    /// Takes the handshake back, if its step is done.
    pub(super) fn take(&self) -> Option<Done> {
        self.lock().take()
    }

    fn put(&self, stream: Box<Stream>, outcome: Result<Option<Vec<String>>, String>) {
        *self.lock() = Some(Done { stream, outcome });
        self.waker.wake();
    }

    fn lock(&self) -> MutexGuard<'_, Option<Done>> {
        self.done.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Threads at most.
const THREADS: usize = 2;
