//! The memory for the payload of all connections together: how much they may hold, and who gets some first
//! when it is short. `buffers` takes the memory of requests from here; a connection that gets none is not
//! read until its turn.
//!
//! Each connection has [`ALLOWANCE`] of its own, which nobody else can take: small clients continue
//! whatever large ones do, and touch nothing shared. What a connection holds beyond that (`buffers`
//! says when) comes out of the common memory. While no more than half of the common memory is free,
//! a group, with all its connections, has a share of what is free: free / (groups that hold some +
//! 4), or one request if it holds nothing. A request that waits for a cap keeps its memory, so the
//! rule leaves something for others (as with the requests of a reactor, `blkmq_core`'s `holding`).
//!
//! A connection that gets no memory waits in its group's line with one request, and goes to the end
//! of the line with the next: so a connection that asks for much gets no more turns than one that
//! asks for little, and nobody gets an error. Among the first of all lines, the one that has waited
//! longest goes first; groups beyond their share are passed over. If its group holds nothing and
//! its request does not fit, only requests within their group's share pass it, so that free memory
//! accumulates; and none passes it if it needs more than half of all memory. The cost of a step
//! grows with the number of waiting groups, not of connections.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blkmq_core::qos::share_of_free;
use blkmq_host::disk::Tenant;
use blkmq_host::service::Waker;

use super::pool::Pool;
use super::sys::Chunk;

/// The memory that the connections of all addresses share.
#[derive(Debug)]
pub struct MemoryBudget {
    bytes_max: u64,
    used: AtomicU64,
    /// Groups that hold some of the common memory.
    holders: AtomicU64,
    /// Length of `line`: saves the lock when memory is free.
    waiting: AtomicUsize,
    line: Mutex<WaitList>,
    /// The groups whose connections have ever been served.
    groups: Mutex<BTreeMap<Tenant, Arc<Holding>>>,
    /// Memory that is free but not given back to the system. Used and pooled memory together stay
    /// within `bytes_max`.
    pool: Pool,
}

/// What the connections of one group hold of the common memory, in bytes.
type Holding = AtomicU64;

/// The lines of all groups.
#[derive(Debug, Default)]
struct WaitList {
    next: u64,
    /// The line of each group that waits, by ticket.
    of_groups: BTreeMap<Tenant, BTreeMap<u64, Waiter>>,
    /// The group of each ticket that is the first of its group.
    first: BTreeMap<u64, Tenant>,
}

#[derive(Debug)]
struct Waiter {
    bytes: u64,
    group: Arc<Holding>,
    waker: Waker,
    /// The connection was woken and has not tried yet: waking it again would be useless.
    is_woken: bool,
}

/// What one connection holds of the common memory.
#[derive(Debug)]
pub(crate) struct Account {
    memory: Arc<MemoryBudget>,
    id: Tenant,
    group: Arc<Holding>,
    waker: Waker,
    /// Bytes held.
    held: u64,
    /// The connection's number in the line.
    ticket: Option<u64>,
}

/// Whether a request can have its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Claim {
    /// Within its group's share, so granted.
    Share,
    /// Granted because memory is not short, or its group holds none.
    Spare,
    /// It would be its turn, but too little is free.
    Short,
    /// Its group holds its share, or more.
    Beyond,
}

impl MemoryBudget {
    /// Makes a memory of `bytes_max` bytes, [`ALLOWANCE`] per connection not counted.
    pub fn new(bytes_max: u64) -> Self {
        Self {
            bytes_max,
            used: AtomicU64::new(0),
            holders: AtomicU64::new(0),
            waiting: AtomicUsize::new(0),
            line: Mutex::default(),
            groups: Mutex::default(),
            pool: Pool::default(),
        }
    }

    /// The limit, in bytes.
    pub fn bytes_max(&self) -> u64 {
        self.bytes_max
    }

    /// Bytes in use.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Regions that are kept for later requests.
    pub(crate) fn pool(&self) -> &Pool {
        &self.pool
    }

    /// The outcome of a claim of `bytes` more for a group, at this moment.
    fn claim(&self, group: &Holding, bytes: u64) -> Claim {
        // SeqCst, all three: see `give`.
        let used = self.used.load(Ordering::SeqCst);
        let held = group.load(Ordering::SeqCst);
        let free = self.bytes_max.saturating_sub(used);
        let is_within = held + bytes <= share_of_free(free, self.holders.load(Ordering::SeqCst));
        if is_within {
            Claim::Share
        } else if used + bytes <= self.bytes_max / 2 || (held == 0 && bytes <= free) {
            Claim::Spare
        } else if held == 0 {
            Claim::Short
        } else {
            Claim::Beyond
        }
    }

    /// Takes bytes that were claimed; another connection may have been faster. Concurrent takers
    /// may exceed a share by what they take.
    fn try_take(&self, group: &Holding, bytes: u64) -> bool {
        let is_there = |used: u64| used + bytes <= self.bytes_max;
        let take = |used: u64| is_there(used).then_some(used + bytes);
        // SeqCst: see `give`.
        let taken = self
            .used
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, take)
            .is_ok();
        if taken && group.fetch_add(bytes, Ordering::SeqCst) == 0 {
            self.holders.fetch_add(1, Ordering::SeqCst);
        }
        taken
    }

    /// Gives bytes back and wakes the next in line.
    ///
    /// No wake-up is lost: a connection that joins the line counts itself in `waiting` and then
    /// reads again what is used and held; this function changes those first and reads `waiting`
    /// then. All are SeqCst, so at least one sees the other.
    fn give(&self, group: &Holding, bytes: u64) {
        if group.fetch_sub(bytes, Ordering::SeqCst) == bytes {
            self.holders.fetch_sub(1, Ordering::SeqCst);
        }
        self.used.fetch_sub(bytes, Ordering::SeqCst);
        if self.waiting.load(Ordering::SeqCst) > 0 {
            let next = self.next_to_wake(&mut self.lock());
            wake(next);
        }
    }

    /// The ticket of the next request that can have its memory now, with its group.
    fn next(&self, line: &WaitList) -> Option<(u64, Tenant)> {
        let mut is_gathering = false;
        for (&ticket, &id) in &line.first {
            let waiter = &line.of_groups[&id][&ticket];
            match self.claim(&waiter.group, waiter.bytes) {
                Claim::Share => return Some((ticket, id)),
                Claim::Spare if !is_gathering => return Some((ticket, id)),
                Claim::Short if waiter.bytes > self.bytes_max / 2 => return None,
                Claim::Short => is_gathering = true,
                Claim::Spare | Claim::Beyond => {}
            }
        }
        None
    }

    /// Returns the waker to use, if a request can have its memory now and was not woken yet.
    fn next_to_wake(&self, line: &mut WaitList) -> Option<Waker> {
        let (ticket, id) = self.next(line)?;
        line.waiter(ticket, id).take_waker()
    }

    /// Leaves the line. Returns the waker to use: there may be enough for the next request, too.
    fn leave_line(&self, line: &mut WaitList, ticket: u64, id: Tenant) -> Option<Waker> {
        line.remove(ticket, id);
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        self.next_to_wake(line)
    }

    fn lock(&self) -> MutexGuard<'_, WaitList> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn holding(&self, group: Tenant) -> Arc<Holding> {
        let mut groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(groups.entry(group).or_default())
    }
}

impl WaitList {
    /// Adds a waiter behind all others of its group. Returns its ticket.
    fn add(&mut self, id: Tenant, waiter: Waiter) -> u64 {
        let ticket = self.next;
        self.next += 1;
        let of_group = self.of_groups.entry(id).or_default();
        if of_group.is_empty() {
            self.first.insert(ticket, id);
        }
        of_group.insert(ticket, waiter);
        ticket
    }

    fn waiter(&mut self, ticket: u64, id: Tenant) -> &mut Waiter {
        let of_group = self.of_groups.get_mut(&id);
        of_group
            .and_then(|waiters| waiters.get_mut(&ticket))
            .expect("a ticket that stands in line")
    }

    fn remove(&mut self, ticket: u64, id: Tenant) {
        let Some(of_group) = self.of_groups.get_mut(&id) else {
            return;
        };
        of_group.remove(&ticket);
        if self.first.remove(&ticket).is_some()
            && let Some((&next, _)) = of_group.first_key_value()
        {
            self.first.insert(next, id);
        }
        if of_group.is_empty() {
            self.of_groups.remove(&id);
        }
    }
}

impl Waiter {
    /// Returns its waker, once.
    fn take_waker(&mut self) -> Option<Waker> {
        let was_woken = std::mem::replace(&mut self.is_woken, true);
        (!was_woken).then(|| self.waker.clone())
    }
}

/// Uses a waker with no lock held: the woken reactor may run at once and want the lock.
fn wake(waker: Option<Waker>) {
    if let Some(waker) = waker {
        waker.wake();
    }
}

impl Account {
    pub(crate) fn new(memory: Arc<MemoryBudget>, group: Tenant, waker: Waker) -> Self {
        Self {
            id: group,
            group: memory.holding(group),
            memory,
            waker,
            held: 0,
            ticket: None,
        }
    }

    /// Takes bytes. If there are none now, the connection joins the line and is woken when it may
    /// try again.
    #[inline]
    pub(crate) fn take(&mut self, bytes: u64) -> bool {
        let is_taken = self.take_common(bytes);
        self.held += if is_taken { bytes } else { 0 };
        is_taken
    }

    /// Gives bytes back.
    #[inline]
    pub(crate) fn give(&mut self, bytes: u64) {
        self.held -= bytes;
        if bytes > 0 {
            self.memory.give(&self.group, bytes);
        }
    }

    /// Takes kept regions, as many as there are and at most `most`, for bytes that were taken.
    pub(crate) fn take_kept(&self, most: usize) -> Vec<Chunk> {
        self.memory.pool.take(most)
    }

    /// Takes one kept region that accounts for its bytes already, if that many are available.
    pub(crate) fn take_kept_whole(&mut self) -> Option<Chunk> {
        let chunk = self.memory.pool.take(1).pop()?;
        let bytes = chunk.touched_bytes() as u64;
        if !self.memory.try_take(&self.group, bytes) {
            self.memory.pool.put(vec![chunk]);
            return None;
        }
        self.held += bytes;
        Some(chunk)
    }

    /// Gives back regions and the bytes that were taken for them.
    pub(crate) fn keep(&mut self, chunks: Vec<Chunk>) {
        let bytes = chunks.iter().map(|chunk| chunk.touched_bytes() as u64).sum();
        if bytes > 0 {
            self.memory.pool.put(chunks);
            self.give(bytes);
        }
    }

    /// Memory was touched for the first time: gives back as much of the kept regions, if the total
    /// exceeds the limit.
    pub(crate) fn make_fit(&self) {
        let memory = &self.memory;
        while memory.used() + memory.pool.bytes() > memory.bytes_max && !memory.pool.take(1).is_empty() {}
    }

    /// Gives up the place in the line: the waiting request is not wanted any more.
    pub(crate) fn give_up(&mut self) {
        if let Some(ticket) = self.ticket.take() {
            let memory = &self.memory;
            let next = memory.leave_line(&mut memory.lock(), ticket, self.id);
            wake(next);
        }
    }

    fn take_common(&mut self, bytes: u64) -> bool {
        let memory = &self.memory;
        if self.ticket.is_none()
            && memory.waiting.load(Ordering::SeqCst) == 0
            && matches!(memory.claim(&self.group, bytes), Claim::Share | Claim::Spare)
            && memory.try_take(&self.group, bytes)
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
            memory.waiting.fetch_add(1, Ordering::SeqCst);
            let waiter = Waiter {
                bytes,
                group: Arc::clone(&self.group),
                waker: self.waker.clone(),
                is_woken: false,
            };
            line.add(self.id, waiter)
        });
        let waiter = line.waiter(ticket, self.id);
        // The request may need less than before: more of what it needs is its own by now.
        waiter.bytes = bytes;
        waiter.is_woken = false;
        match memory.next(&line) {
            Some((next, _)) if next == ticket => {}
            Some((other, id)) => {
                let other = line.waiter(other, id).take_waker();
                drop(line);
                wake(other);
                return false;
            }
            None => return false,
        }
        if !memory.try_take(&self.group, bytes) {
            return false;
        }
        let next = memory.leave_line(&mut line, ticket, self.id);
        drop(line);
        wake(next);
        self.ticket = None;
        true
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        self.give_up();
        self.give(self.held);
    }
}

/// Bytes that each connection may hold without asking: 64 buffers of 4 KiB.
pub const ALLOWANCE: u64 = 256 << 10;
/// Bytes that all connections may hold together by default.
pub const BYTES_MAX: u64 = 1 << 30;

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn fill(memory: &MemoryBudget, group: &Holding) -> u64 {
        while matches!(memory.claim(group, MIB), Claim::Share | Claim::Spare) {
            assert!(memory.try_take(group, MIB));
        }
        group.load(Ordering::Relaxed) / MIB
    }

    #[test]
    fn groups_that_give_nothing_back_leave_a_share_for_the_next() {
        let memory = MemoryBudget::new(1000 * MIB);
        let groups: Vec<_> = (0..20).map(|id| memory.holding(Tenant(id))).collect();
        let held: Vec<u64> = groups.iter().map(|group| fill(&memory, group)).collect();
        assert_eq!(held[..3], [1000 / 2, 500 / 7, 429 / 8]);
        assert!(held[19] >= 3, "{held:?}");
        assert_eq!(memory.claim(&groups[0], MIB), Claim::Beyond);
        for (group, held) in groups.iter().zip(held) {
            memory.give(group, held * MIB);
        }
        assert_eq!((memory.used(), memory.holders.load(Ordering::Relaxed)), (0, 0));
    }

    #[test]
    fn group_that_holds_nothing_can_have_one_request_of_any_size_as_soon_as_it_fits() {
        let memory = MemoryBudget::new(32 * MIB);
        let (one, other) = (memory.holding(Tenant(1)), memory.holding(Tenant(2)));
        assert_eq!(memory.claim(&one, 32 * MIB), Claim::Spare);
        fill(&memory, &one);
        assert_eq!(memory.claim(&other, 12 * MIB), Claim::Spare);
        assert_eq!(memory.claim(&other, 32 * MIB), Claim::Short);
        assert!(memory.try_take(&other, 12 * MIB));
        assert_eq!(memory.claim(&other, MIB), Claim::Beyond);
        assert!(!memory.try_take(&other, 32 * MIB), "never more than there is");
    }
}
