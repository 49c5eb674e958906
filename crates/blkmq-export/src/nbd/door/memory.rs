//! Decides how much payload all connections together may hold, and who gets memory first when it is short.
//! `slots` takes an allowance for each request from here; a connection that gets none is not read from until its turn.
//!
//! Each connection has [`ALLOWANCE`] of its own, which nobody else can take: small clients go on whatever large ones do,
//! and touch nothing shared. What it holds beyond that comes out of the common memory. When that is short, connections
//! stand in line, each with one request, and go to the end of it with the next: so one that asks for much gets no more
//! turns than one that asks for little, and nobody gets an error.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blkmq_host::service::Waker;

/// The memory that the connections of all addresses share.
#[derive(Debug)]
pub struct Memory {
    bytes_max: u64,
    used: AtomicU64,
    /// How long `line` is: spares those who find memory the lock.
    waiting: AtomicUsize,
    line: Mutex<Line>,
}

#[derive(Debug, Default)]
struct Line {
    next: u64,
    waiters: VecDeque<(u64, Waker)>,
}

/// What one connection holds of it.
#[derive(Debug)]
pub(super) struct Account {
    memory: Arc<Memory>,
    waker: Waker,
    /// Bytes held, the allowance included.
    held: u64,
    /// Its number in the line.
    ticket: Option<u64>,
}

impl Memory {
    /// Makes a memory of `bytes_max` bytes, [`ALLOWANCE`] per connection not counted.
    pub fn new(bytes_max: u64) -> Self {
        Self {
            bytes_max,
            used: AtomicU64::new(0),
            waiting: AtomicUsize::new(0),
            line: Mutex::default(),
        }
    }

    /// How many bytes there are.
    pub fn bytes_max(&self) -> u64 {
        self.bytes_max
    }

    /// How many bytes are taken.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    fn try_take(&self, bytes: u64) -> bool {
        let take = |used: u64| (used + bytes <= self.bytes_max).then_some(used + bytes);
        // SeqCst: see `give`.
        self.used
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, take)
            .is_ok()
    }

    /// Gives bytes back and tells the first in line.
    ///
    /// No wake-up is lost: who joins the line counts itself in `waiting` and then looks at `used` once more; here `used` is
    /// changed first and `waiting` looked at then. All four are SeqCst, so at least one of the two sees the other.
    fn give(&self, bytes: u64) {
        self.used.fetch_sub(bytes, Ordering::SeqCst);
        if self.waiting.load(Ordering::SeqCst) > 0 {
            self.lock().wake_first();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Line {
    fn wake_first(&self) {
        if let Some((_, waker)) = self.waiters.front() {
            waker.wake();
        }
    }
}

impl Account {
    pub(super) fn new(memory: Arc<Memory>, waker: Waker) -> Self {
        Self {
            memory,
            waker,
            held: 0,
            ticket: None,
        }
    }

    /// Takes bytes for a request. If there are none now, the connection stands in line: it is woken when it may try again.
    #[inline]
    pub(super) fn take(&mut self, bytes: u64) -> bool {
        let common = common(self.held + bytes) - common(self.held);
        if common > 0 && !self.take_common(common) {
            return false;
        }
        self.held += bytes;
        true
    }

    /// Gives the bytes of a request back.
    #[inline]
    pub(super) fn give(&mut self, bytes: u64) {
        let before = common(self.held);
        self.held -= bytes;
        let common = before - common(self.held);
        if common > 0 {
            self.memory.give(common);
        }
    }

    fn take_common(&mut self, bytes: u64) -> bool {
        if self.ticket.is_none()
            && self.memory.waiting.load(Ordering::SeqCst) == 0
            && self.memory.try_take(bytes)
        {
            return true;
        }
        self.take_in_turn(bytes)
    }

    #[cold]
    fn take_in_turn(&mut self, bytes: u64) -> bool {
        let memory = &self.memory;
        let mut line = memory.lock();
        let ticket = *self.ticket.get_or_insert_with(|| {
            let ticket = line.next;
            line.next += 1;
            line.waiters.push_back((ticket, self.waker.clone()));
            memory.waiting.fetch_add(1, Ordering::SeqCst);
            ticket
        });
        let is_first = line.waiters.front().is_some_and(|(first, _)| *first == ticket);
        if !is_first || !memory.try_take(bytes) {
            return false;
        }
        line.waiters.pop_front();
        memory.waiting.fetch_sub(1, Ordering::SeqCst);
        self.ticket = None;
        // There may be enough for the next, too.
        line.wake_first();
        true
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket {
            let mut line = self.memory.lock();
            line.waiters.retain(|(waiting, _)| *waiting != ticket);
            self.memory.waiting.fetch_sub(1, Ordering::SeqCst);
            line.wake_first();
        }
        self.give(self.held);
    }
}

/// How much of what a connection holds is common memory.
fn common(held: u64) -> u64 {
    held.saturating_sub(ALLOWANCE)
}

/// What each connection may hold without asking, in bytes: 64 reads of 4 KiB.
pub const ALLOWANCE: u64 = 256 << 10;
/// What all connections may hold together by default, in bytes.
pub const BYTES_MAX: u64 = 1 << 30;
