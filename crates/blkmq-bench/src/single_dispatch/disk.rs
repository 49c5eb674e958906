//! The simulator's modelled disk in real time: it is a thread that sleeps as long as the arm takes and then
//! interrupts the hardware context. Written data is kept in memory.

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant as Clock};

use anyhow::{Context, Result};
use blkmq_core::driver::{Done, HctxDriver, Issued, TimedOut};
use blkmq_core::ids::{Cookie, DiskId, HctxId};
use blkmq_core::limits::Limits;
use blkmq_core::request::Request;
use blkmq_core::time::Instant;
use blkmq_drivers::null::{NullConfig, NullDevice};
use blkmq_host::device::{Allocation, Device, Extent};
use blkmq_host::ring::RingHandle;
use blkmq_host::runner::Runner;
use blkmq_sim::drive::model::Work;
use blkmq_sim::drive::seek_queue::SeekQueue;
use blkmq_sim::rng::Rng;

use crate::histogram::Histogram;

/// A rotating disk with one arm, for up to `hctxs` hardware contexts.
#[derive(Clone)]
pub(super) struct SlowDisk {
    memory: NullDevice,
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<State>,
    /// Signalled when a command has arrived, or the disk must end.
    bell: Condvar,
    runner: OnceLock<Runner>,
    began: Clock,
}

struct State {
    queue: SeekQueue<Command>,
    /// Commands that have ended and were not reaped, by hardware context.
    ended: Vec<Vec<Done>>,
    takes_time: bool,
    is_ending: bool,
    served: u64,
    latency: Histogram,
}

#[derive(Clone, Copy)]
struct Command {
    hctx: HctxId,
    came: Instant,
    done: Done,
}

impl SlowDisk {
    /// Starts a disk of `size` bytes that takes no time yet.
    ///
    /// # Errors
    /// If the memory or the thread is not available.
    pub(super) fn start(size: u64, hctxs: u16, depth: u32) -> Result<Self> {
        let config = NullConfig {
            memory: true,
            ..NullConfig::default()
        };
        let ended = || Vec::with_capacity(depth as usize);
        let disk = Self {
            memory: NullDevice::new(config, &[size])?,
            shared: Arc::new(Shared {
                state: Mutex::new(State {
                    queue: SeekQueue::new(size, depth * u32::from(hctxs), Rng::new(1, 1)),
                    ended: (0..hctxs).map(|_| ended()).collect(),
                    takes_time: false,
                    is_ending: false,
                    served: 0,
                    latency: Histogram::new(),
                }),
                bell: Condvar::new(),
                runner: OnceLock::new(),
                began: Clock::now(),
            }),
        };
        let shared = Arc::clone(&disk.shared);
        let thread = thread::Builder::new().name("slow-disk".into());
        thread.spawn(move || shared.turn()).context("starting the disk")?;
        Ok(disk)
    }

    /// Makes commands take the time of the arm from now on, or no time.
    pub(super) fn take_time(&self, takes_time: bool) {
        self.shared.lock().takes_time = takes_time;
    }

    /// How many commands have taken time, and their latencies at the disk.
    pub(super) fn served(&self) -> (u64, Histogram) {
        let state = self.shared.lock();
        (state.served, state.latency.clone())
    }

    /// Ends its thread; no command may follow.
    pub(super) fn end(&self) {
        self.shared.lock().is_ending = true;
        self.shared.bell.notify_all();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Instant {
        Instant(self.began.elapsed().as_nanos() as u64)
    }

    /// The body of the disk's thread.
    fn turn(&self) {
        // When the arm was, or will be, free. After a late wake-up the next command begins when it
        // should have.
        let mut free_at = Instant(0);
        let mut state = self.lock();
        while !state.is_ending {
            if state.queue.is_empty() {
                state = self.bell.wait(state).unwrap_or_else(PoisonError::into_inner);
                free_at = free_at.max(self.now());
                continue;
            }
            let (takes_time, taken) = (state.takes_time, state.queue.take(free_at));
            let Some((command, time)) = taken else { continue };
            drop(state);
            if takes_time {
                free_at = free_at + time;
                self.sleep_until(free_at);
            } else {
                free_at = self.now();
            }
            state = self.lock();
            if takes_time {
                state.served += 1;
                state.latency.record(free_at.since(command.came).0);
            }
            state.ended[usize::from(command.hctx.0)].push(command.done);
            drop(state);
            if let Some(runner) = self.runner.get() {
                runner.run(command.hctx);
            }
            state = self.lock();
        }
    }

    fn sleep_until(&self, at: Instant) {
        let left = at.0.saturating_sub(self.now().0);
        thread::sleep(Duration::from_nanos(left));
    }
}

impl Device for SlowDisk {
    fn limits(&self) -> Limits {
        Limits {
            rotational: true,
            ..self.memory.limits()
        }
    }

    fn set_runner(&self, runner: Runner) {
        let _ = self.shared.runner.set(runner);
    }

    fn open_hctx(&self, _ring: &RingHandle, hctx: HctxId) -> io::Result<Box<dyn HctxDriver>> {
        Ok(Box::new(Hctx {
            hctx,
            memory: self.memory.hctx(hctx).map_err(io::Error::other)?,
            shared: Arc::clone(&self.shared),
        }))
    }
}

impl Allocation for SlowDisk {
    fn extents(
        &self,
        disk: DiskId,
        offset: u64,
        len: u64,
        max: usize,
        out: &mut Vec<Extent>,
    ) -> io::Result<()> {
        self.memory.extents(disk, offset, len, max, out)
    }
}

/// A hardware context's access to the disk.
struct Hctx {
    hctx: HctxId,
    memory: Box<dyn HctxDriver>,
    shared: Arc<Shared>,
}

impl HctxDriver for Hctx {
    fn issue(&mut self, rq: &Request, cookie: Cookie, last: bool, now: Instant) -> Issued {
        // The data moves at once, and the completion follows later.
        let status = match self.memory.issue(rq, cookie, last, now) {
            Issued::Done(status) => status,
            other => return other,
        };
        let came = self.shared.now();
        let work = Work {
            op: rq.op(),
            position: rq.position(),
            len: rq.len(),
            owed: 0,
        };
        let command = Command {
            hctx: self.hctx,
            came,
            done: Done { cookie, status },
        };
        self.shared.lock().queue.push(came, work, command);
        self.shared.bell.notify_one();
        Issued::Queued
    }

    fn reap(&mut self, _now: Instant, done: &mut Vec<Done>) {
        done.append(&mut self.shared.lock().ended[usize::from(self.hctx.0)]);
    }

    fn timed_out(&mut self, _cookie: Cookie) -> TimedOut {
        // The disk always completes it.
        TimedOut::Wait
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disk_that_was_asked_to_end_ends() {
        let disk = SlowDisk::start(1 << 20, 2, 4).unwrap();
        disk.take_time(true);
        disk.end();
        while Arc::strong_count(&disk.shared) > 1 {
            thread::yield_now();
        }
        assert_eq!(disk.served().0, 0);
    }
}
