//! Decides how much payload all connections together may hold, and who gets memory first when it is short.
//! `slots` takes an allowance for each request from here; a connection that gets none is not read from until its turn.
//!
//! Each connection has [`ALLOWANCE`] of its own, which nobody else can take: small clients go on whatever large ones do,
//! and touch nothing shared. What it holds beyond that comes out of the common memory. While no more than half of that is
//! free, a group, with all its connections, has a share of what is free: free / (groups that hold some + 4), or one request
//! if it holds nothing. What waits for a cap keeps its memory, and so leaves something for others (as with the requests of
//! a reactor, `blkmq_core`'s `holding`).
//!
//! Who gets none stands in line, each connection with one request, and goes to the end of the line with the next: so one
//! that asks for much gets no more turns than one that asks for little, and nobody gets an error. Connections of groups
//! beyond their share are passed over. One of a group that holds nothing, whose request does not fit, is passed by what is
//! within its share alone, so that memory gathers; and by nobody if it needs more than half of all.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blkmq_core::ids::GroupId;
use blkmq_host::service::Waker;

/// The memory that the connections of all addresses share.
#[derive(Debug)]
pub struct Memory {
    bytes_max: u64,
    used: AtomicU64,
    /// Groups that hold some of it.
    holders: AtomicU64,
    /// How long `line` is: spares those who find memory the lock.
    waiting: AtomicUsize,
    line: Mutex<Line>,
    /// Those whose connections have ever been served.
    groups: Mutex<BTreeMap<GroupId, Arc<Holding>>>,
}

/// What the connections of one group hold of the common memory, in bytes.
type Holding = AtomicU64;

#[derive(Debug, Default)]
struct Line {
    next: u64,
    waiters: VecDeque<Waiter>,
}

#[derive(Debug)]
struct Waiter {
    ticket: u64,
    bytes: u64,
    group: Arc<Holding>,
    waker: Waker,
}

/// What one connection holds of it.
#[derive(Debug)]
pub(super) struct Account {
    memory: Arc<Memory>,
    group: Arc<Holding>,
    waker: Waker,
    /// Bytes held, the allowance included.
    held: u64,
    /// Its number in the line.
    ticket: Option<u64>,
}

/// Whether a request can have its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Claim {
    /// Within its group's share, and so there.
    Share,
    /// Because memory is not short, or its group holds none.
    Spare,
    /// It would be its turn, but there is not enough.
    Short,
    /// Its group holds its share, or more.
    Beyond,
}

impl Memory {
    /// Makes a memory of `bytes_max` bytes, [`ALLOWANCE`] per connection not counted.
    pub fn new(bytes_max: u64) -> Self {
        Self {
            bytes_max,
            used: AtomicU64::new(0),
            holders: AtomicU64::new(0),
            waiting: AtomicUsize::new(0),
            line: Mutex::default(),
            groups: Mutex::default(),
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

    /// What `bytes` more for a group would be, at this moment.
    fn claim(&self, group: &Holding, bytes: u64) -> Claim {
        // SeqCst, all three: see `give`.
        let used = self.used.load(Ordering::SeqCst);
        let held = group.load(Ordering::SeqCst);
        let free = self.bytes_max.saturating_sub(used);
        if held + bytes <= free / (self.holders.load(Ordering::SeqCst) + ROOM_FOR) {
            Claim::Share
        } else if used + bytes <= self.bytes_max / 2 || (held == 0 && bytes <= free) {
            Claim::Spare
        } else if held == 0 {
            Claim::Short
        } else {
            Claim::Beyond
        }
    }

    /// Takes bytes that were claimed; another may have been faster. Shares are kept to within what is taken at one moment.
    fn try_take(&self, group: &Holding, bytes: u64) -> bool {
        let take = |used: u64| (used + bytes <= self.bytes_max).then_some(used + bytes);
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

    /// Gives bytes back and tells the next in line.
    ///
    /// No wake-up is lost: who joins the line counts itself in `waiting` and then looks at what is used and held once more;
    /// here that is changed first and `waiting` looked at then. All are SeqCst, so at least one of the two sees the other.
    fn give(&self, group: &Holding, bytes: u64) {
        if group.fetch_sub(bytes, Ordering::SeqCst) == bytes {
            self.holders.fetch_sub(1, Ordering::SeqCst);
        }
        self.used.fetch_sub(bytes, Ordering::SeqCst);
        if self.waiting.load(Ordering::SeqCst) > 0 {
            self.wake_next(&self.lock());
        }
    }

    /// The first in line that can have its memory now.
    fn next<'a>(&self, line: &'a Line) -> Option<&'a Waiter> {
        let mut is_gathering = false;
        for waiter in &line.waiters {
            match self.claim(&waiter.group, waiter.bytes) {
                Claim::Share => return Some(waiter),
                Claim::Spare if !is_gathering => return Some(waiter),
                Claim::Short if waiter.bytes > self.bytes_max / 2 => return None,
                Claim::Short => is_gathering = true,
                Claim::Spare | Claim::Beyond => {}
            }
        }
        None
    }

    fn wake_next(&self, line: &Line) {
        if let Some(next) = self.next(line) {
            next.waker.wake();
        }
    }

    fn leave_line(&self, line: &mut Line, ticket: u64) {
        line.waiters.retain(|waiter| waiter.ticket != ticket);
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        // There may be enough for the next, too.
        self.wake_next(line);
    }

    fn lock(&self) -> MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn holding(&self, group: GroupId) -> Arc<Holding> {
        let mut groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(groups.entry(group).or_default())
    }
}

impl Account {
    pub(super) fn new(memory: Arc<Memory>, group: GroupId, waker: Waker) -> Self {
        Self {
            group: memory.holding(group),
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
        if common == 0 {
            // Its own by now, if it has stood in line for it.
            self.give_up();
        } else if !self.take_common(common) {
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
            self.memory.give(&self.group, common);
        }
    }

    /// Gives its place in the line up: the request that waited there is not wanted any more.
    pub(super) fn give_up(&mut self) {
        if let Some(ticket) = self.ticket.take() {
            let memory = &self.memory;
            memory.leave_line(&mut memory.lock(), ticket);
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
            let ticket = line.next;
            line.next += 1;
            line.waiters.push_back(Waiter {
                ticket,
                bytes,
                group: Arc::clone(&self.group),
                waker: self.waker.clone(),
            });
            memory.waiting.fetch_add(1, Ordering::SeqCst);
            ticket
        });
        // Less, maybe, than when it came: of what it needs, more is its own by now.
        if let Some(waiter) = line.waiters.iter_mut().find(|waiter| waiter.ticket == ticket) {
            waiter.bytes = bytes;
        }
        match memory.next(&line) {
            Some(next) if next.ticket == ticket => {}
            Some(other) => {
                other.waker.wake();
                return false;
            }
            None => return false,
        }
        if !memory.try_take(&self.group, bytes) {
            return false;
        }
        memory.leave_line(&mut line, ticket);
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

/// How much of what a connection holds is common memory.
fn common(held: u64) -> u64 {
    held.saturating_sub(ALLOWANCE)
}

/// For so many more groups there is always room.
const ROOM_FOR: u64 = 4;
/// What each connection may hold without asking, in bytes: 64 reads of 4 KiB.
pub const ALLOWANCE: u64 = 256 << 10;
/// What all connections may hold together by default, in bytes.
pub const BYTES_MAX: u64 = 1 << 30;

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn fill(memory: &Memory, group: &Holding) -> u64 {
        while matches!(memory.claim(group, MIB), Claim::Share | Claim::Spare) {
            assert!(memory.try_take(group, MIB));
        }
        group.load(Ordering::Relaxed) / MIB
    }

    #[test]
    fn groups_that_give_nothing_back_leave_a_share_for_the_next() {
        let memory = Memory::new(1000 * MIB);
        let groups: Vec<_> = (0..20).map(|id| memory.holding(GroupId(id))).collect();
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
    fn a_group_that_holds_nothing_can_have_one_request_of_any_size_as_soon_as_it_fits() {
        let memory = Memory::new(32 * MIB);
        let (one, other) = (memory.holding(GroupId(1)), memory.holding(GroupId(2)));
        assert_eq!(memory.claim(&one, 32 * MIB), Claim::Spare);
        fill(&memory, &one);
        assert_eq!(memory.claim(&other, 12 * MIB), Claim::Spare);
        assert_eq!(memory.claim(&other, 32 * MIB), Claim::Short);
        assert!(memory.try_take(&other, 12 * MIB));
        assert_eq!(memory.claim(&other, MIB), Claim::Beyond);
        assert!(!memory.try_take(&other, 32 * MIB), "never more than there is");
    }
}
