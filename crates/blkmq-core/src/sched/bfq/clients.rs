//! The queues of the clients: one for each client, priority and kind (synchronous or not)
//! within a group.
//! All queues are made at set-up, one for each possible request, so that each client with a request has a
//! queue. An idle queue keeps the history of its client until another client needs it, the longest idle
//! queue first.

use std::ops::{Index, IndexMut};

use super::history::History;
use super::requests::Requests;
use crate::bio::Class;
use crate::ids::{GroupId, ReactorId};
use crate::request::Request;
use crate::sched::overdue::Late;

/// All queues, by number, and how a request finds its own.
#[derive(Debug)]
pub(super) struct Clients {
    queues: Vec<Queue>,
    /// Numbers of queues by their keys' hashes: open addressing with linear probing.
    table: Vec<u32>,
    /// The ends of the list of idle queues: the longest idle one and the latest.
    idle: [u32; 2],
}

/// The queue of one client.
#[derive(Debug)]
pub(super) struct Queue {
    key: Option<Key>,
    group: u32,
    pub(super) requests: Requests,
    pub(super) history: History,
    /// Requests that were dispatched and have not ended.
    pub(super) in_flight: u32,
    /// How many of them nobody waits for: they move no data, or their queue is slow.
    pub(super) in_flight_exempt: u32,
    /// How many of them are overdue, and how many the depth does not count since the queue is slow.
    pub(super) late: Late,
    pub(super) out_apart: u32,
    /// Whether it has a request, waiting or in flight; otherwise it is on the list of idle queues.
    is_busy: bool,
    /// The queue into which this client's requests go, and that queue's key at the time.
    cooperator: Option<(u32, Key)>,
    /// The next one of its group's parked queues, if it is one.
    pub(super) next_parked: Option<u32>,
    /// Neighbours on the list of idle queues.
    earlier: u32,
    later: u32,
}

/// The client of a queue, and the priority and kind of its requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key {
    /// Group and client.
    who: u64,
    /// Submitting reactor, class, level and whether synchronous.
    how: u32,
}

impl Key {
    /// The key of a request's queue.
    #[inline]
    pub(super) fn of(rq: &Request) -> Self {
        let prio = rq.prio();
        let how = u32::from(rq.owner().0) << 16
            | (prio.class as u32) << 8
            | u32::from(prio.level.min(LEVELS - 1)) << 1
            | u32::from(rq.bio.is_sync());
        Self {
            who: u64::from(rq.group().0) << 32 | u64::from(rq.bio.client),
            how,
        }
    }

    /// The group.
    #[inline]
    pub(super) fn group(self) -> GroupId {
        GroupId((self.who >> 32) as u32)
    }

    /// The reactor of the client.
    #[inline]
    pub(super) fn reactor(self) -> ReactorId {
        ReactorId((self.how >> 16) as u16)
    }

    /// The class, as the number of [`Class`].
    #[inline]
    pub(super) fn class(self) -> usize {
        (self.how >> 8 & 0xff) as usize
    }

    /// The level within the class.
    #[inline]
    pub(super) fn level(self) -> u8 {
        (self.how >> 1 & 0x7f) as u8
    }

    /// Whether the requests are synchronous: the submitter waits for each.
    #[inline]
    pub(super) fn is_sync(self) -> bool {
        self.how & 1 == 1
    }

    /// Whether requests of the other key may be in a queue of this one: same group, priority and kind.
    pub(super) fn may_join(self, other: Self) -> bool {
        self.group() == other.group() && self.how & 0xffff == other.how & 0xffff
    }

    /// A number that all queues of a client have, and almost no queue of another client.
    #[inline]
    pub(super) fn client(self) -> u32 {
        (hash(self.who, self.how >> 16) >> 32) as u32
    }

    /// The weight of the queue within its class and group.
    pub(super) fn weight(self) -> u32 {
        u32::from(LEVELS - self.level()) * WEIGHT_PER_LEVEL
    }

    /// Whether it is of the idle class, which is served last.
    pub(super) fn is_idle_class(self) -> bool {
        self.class() == Class::Idle as usize
    }
}

impl Clients {
    /// Makes `count` queues, at least 1.
    pub(super) fn new(count: usize) -> Self {
        let last = count as u32 - 1;
        let queue = |number: u32| Queue {
            key: None,
            requests: Requests::new(),
            history: History::NEW,
            group: 0,
            in_flight: 0,
            in_flight_exempt: 0,
            late: Late::default(),
            out_apart: 0,
            is_busy: false,
            cooperator: None,
            next_parked: None,
            earlier: number.checked_sub(1).unwrap_or(NONE),
            later: if number < last { number + 1 } else { NONE },
        };
        Self {
            queues: (0..=last).map(queue).collect(),
            table: vec![NONE; (2 * count).next_power_of_two()],
            idle: [0, last],
        }
    }

    /// Finds the queue for a key; says whether the queue had another key, or none, until now.
    ///
    /// # Panics
    /// If all queues are busy with other keys: the caller must not have more requests under way than the table
    /// was made for.
    #[inline]
    pub(super) fn claim(&mut self, key: Key) -> (usize, bool) {
        let place = self.place(key);
        match self.table[place] {
            NONE => (self.claim_idle(key), true),
            id => (id as usize, false),
        }
    }

    /// The queue with which this one works together, if that queue still has the same key.
    pub(super) fn cooperator(&self, id: usize) -> Option<usize> {
        let (cooperator, key) = self.queues[id].cooperator?;
        (self.queues[cooperator as usize].key == Some(key)).then_some(cooperator as usize)
    }

    /// Sends the requests of a queue into another one from now on; the other queue's own requests stay there.
    pub(super) fn join(&mut self, id: usize, cooperator: usize) {
        let key = self.queues[cooperator].key();
        self.queues[id].cooperator = Some((cooperator as u32, key));
        self.queues[cooperator].cooperator = None;
    }

    /// Sends the requests of a queue into itself again.
    pub(super) fn part(&mut self, id: usize) {
        self.queues[id].cooperator = None;
    }

    /// Marks a queue as busy at its first request. Says whether it was idle.
    #[inline]
    pub(super) fn begin(&mut self, id: usize) -> bool {
        let queue = &mut self.queues[id];
        if std::mem::replace(&mut queue.is_busy, true) {
            return false;
        }
        let (earlier, later) = (queue.earlier, queue.later);
        self.link(earlier, later);
        true
    }

    /// Marks a queue as idle: it has no request, waiting or in flight.
    #[inline]
    pub(super) fn end(&mut self, id: usize) {
        let queue = &mut self.queues[id];
        debug_assert!(queue.is_busy && queue.requests.is_empty() && queue.in_flight == 0);
        queue.is_busy = false;
        self.link(self.idle[1], id as u32);
        self.link(id as u32, NONE);
    }

    /// Forgets the queues of a group, all of them idle, and calls `forgotten` for each.
    pub(super) fn forget(&mut self, group: GroupId, mut forgotten: impl FnMut(usize)) {
        for id in 0..self.queues.len() {
            let queue = &self.queues[id];
            if queue.key.is_some_and(|key| key.group() == group) {
                assert!(
                    !queue.is_busy,
                    "group {group} goes and queue {id} of it has requests"
                );
                self.unkey(id);
                forgotten(id);
            }
        }
    }

    /// The queues that have a key, by number.
    pub(super) fn iter(&self) -> impl Iterator<Item = (usize, Key, &Queue)> {
        let numbered = self.queues.iter().enumerate();
        numbered.filter_map(|(id, queue)| Some((id, queue.key?, queue)))
    }

    /// Says whether nobody waits for any request in flight of a group's own clients, of which it has some.
    #[cold]
    pub(super) fn has_only_exempt_out(&self, group: GroupId) -> bool {
        let own = self.iter().filter(|(_, key, _)| key.group() == group);
        let mut out = own.filter(|(.., queue)| queue.in_flight > 0).peekable();
        out.peek().is_some() && out.all(|(.., queue)| queue.in_flight == queue.in_flight_exempt)
    }

    /// Asserts that each key finds its queue, and that exactly the idle queues are listed as such.
    pub(super) fn check(&self) {
        for (id, key, _) in self.iter() {
            assert_eq!(
                self.table[self.place(key)],
                id as u32,
                "place of queue {id} in the table"
            );
        }
        let listed = self.table.iter().filter(|&&id| id != NONE).count();
        assert_eq!(listed, self.iter().count(), "entries of the table");
        let (mut at, mut before, mut idle) = (self.idle[0], NONE, 0);
        while let Some(queue) = self.queues.get(at as usize) {
            assert!(
                !queue.is_busy && queue.earlier == before,
                "queue {at} is listed as idle"
            );
            assert!(
                queue.requests.is_empty() && queue.in_flight == 0,
                "idle queue {at}"
            );
            idle += 1;
            assert!(idle <= self.queues.len(), "the list of idle queues has a loop");
            (before, at) = (at, queue.later);
        }
        assert_eq!(before, self.idle[1], "the latest idle queue");
        let busy = self.queues.iter().filter(|queue| queue.is_busy);
        let busy = busy.inspect(|queue| {
            assert!(queue.key.is_some(), "a busy queue is nobody's");
            assert!(
                !queue.requests.is_empty() || queue.in_flight > 0,
                "a busy queue has nothing"
            );
        });
        assert_eq!(idle + busy.count(), self.queues.len(), "idle and busy queues");
    }

    #[cold]
    fn claim_idle(&mut self, key: Key) -> usize {
        let id = self.idle[0];
        assert!(
            id != NONE,
            "all {} queues are busy: more requests than agreed",
            self.queues.len()
        );
        let id = id as usize;
        self.unkey(id);
        self.queues[id].key = Some(key);
        self.queues[id].group = key.group().index() as u32;
        self.queues[id].requests = Requests::new();
        self.queues[id].history = History::NEW;
        self.queues[id].cooperator = None;
        let place = self.place(key);
        self.table[place] = id as u32;
        id
    }

    fn unkey(&mut self, id: usize) {
        if let Some(key) = self.queues[id].key.take() {
            self.remove(self.place_of(key, id as u32));
        }
    }

    /// Where a key is in the table, or where it would be.
    #[inline]
    fn place(&self, key: Key) -> usize {
        let mut place = self.home(key);
        loop {
            let id = self.table[place];
            if id == NONE || self.queues[id as usize].key == Some(key) {
                return place;
            }
            place = (place + 1) & (self.table.len() - 1);
        }
    }

    /// The place in the table of the queue `id`, which has lost this key.
    fn place_of(&self, key: Key, id: u32) -> usize {
        let mut place = self.home(key);
        while self.table[place] != id {
            place = (place + 1) & (self.table.len() - 1);
        }
        place
    }

    /// Empties a place, and moves up the entries that were displaced by it.
    fn remove(&mut self, mut hole: usize) {
        let mask = self.table.len() - 1;
        let mut at = hole;
        loop {
            at = (at + 1) & mask;
            let id = self.table[at];
            if id == NONE {
                self.table[hole] = NONE;
                return;
            }
            let key = self.queues[id as usize]
                .key
                .expect("a queue of the table has a key");
            let from_home = at.wrapping_sub(self.home(key)) & mask;
            if from_home >= (at.wrapping_sub(hole) & mask) {
                self.table[hole] = id;
                hole = at;
            }
        }
    }

    #[inline]
    fn home(&self, key: Key) -> usize {
        (hash(key.who, key.how) >> 32) as usize & (self.table.len() - 1)
    }

    /// Makes `b` follow `a` on the list of idle queues; `NONE` stands for the list itself.
    #[inline]
    fn link(&mut self, a: u32, b: u32) {
        match self.queues.get_mut(a as usize) {
            Some(queue) => queue.later = b,
            None => self.idle[0] = b,
        }
        match self.queues.get_mut(b as usize) {
            Some(queue) => queue.earlier = a,
            None => self.idle[1] = a,
        }
    }
}

impl Index<usize> for Clients {
    type Output = Queue;
    #[inline]
    fn index(&self, id: usize) -> &Queue {
        &self.queues[id]
    }
}

impl IndexMut<usize> for Clients {
    #[inline]
    fn index_mut(&mut self, id: usize) -> &mut Queue {
        &mut self.queues[id]
    }
}

impl Queue {
    /// The group of its client.
    #[inline]
    pub(super) fn group(&self) -> usize {
        self.group as usize
    }

    /// Its key.
    ///
    /// # Panics
    /// If it has none.
    #[inline]
    pub(super) fn key(&self) -> Key {
        self.key.expect("a queue in use has a key")
    }

    /// Whether it has a key.
    pub(super) fn has_key(&self) -> bool {
        self.key.is_some()
    }

    /// Whether it has a request, waiting or in flight.
    pub(super) fn is_busy(&self) -> bool {
        self.is_busy
    }
}

#[inline]
fn hash(a: u64, b: u32) -> u64 {
    // Multiplicative (Knuth): the upper half is well mixed.
    (a ^ u64::from(b).rotate_left(40)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Levels of priority in a class.
const LEVELS: u8 = 8;
/// The weight of a queue of level 7; level 0 has eight times as much.
const WEIGHT_PER_LEVEL: u32 = 10;
/// No queue.
const NONE: u32 = u32::MAX;
