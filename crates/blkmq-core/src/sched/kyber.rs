//! The kyber elevator: it bounds how many requests of each kind may be at the drive at once. The gate's
//! holder calls it (see `sched`); `scaling` computes the bounds, `tunables` has the tunables.
//!
//! After the commit messages and the document of kyber in Linux; `docs/schedulers/kyber.md` lists the differences.
//!
//! ```text
//!  insert --> reads            tokens 1..256   batches of 16 --\
//!             writes (a)sync   tokens 1..128   batches of  8 ---+--> dispatch: in turns, who has tokens
//!             discards         tokens 1..64    batches of  1 ---+
//!             others           tokens 16       batches of  1 --/          |
//!                                    ^                                    v
//!                                 scaling <-- waits and device times -- completed: the token comes back
//! ```

mod scaling;
#[cfg(test)]
mod tests;
mod tunables;

use self::scaling::{Latency, Scaling};
use self::tunables::Tunables;
use super::request_list::{RequestList, RequestMemory};
use super::slots::Fifo;
use crate::bio::Op;
use crate::limits::Limits;
use crate::request::Request;
use crate::sched::elevator::{Elevator, InsertAt, Inserted, Note, TunableError};
use crate::sched::registry::ElevatorType;
use crate::time::Instant;

/// Tokens for reads, writes and discards, as many as latency targets allow.
pub const KYBER: &ElevatorType = &ElevatorType {
    name: "kyber",
    help: "bounds how many reads and writes the drive has at once, by latency targets",
    knows_groups: false,
    build: Some(|setup| Box::new(Kyber::new(setup.limits.clone(), setup.requests_max))),
};

/// The kyber elevator.
///
/// It allocates at set-up: about 80 bytes per request, without the request itself.
#[derive(Debug)]
pub struct Kyber {
    held: RequestMemory,
    /// Requests that were requeued, in the order in which they came back. They keep their tokens.
    requeued: Fifo,
    /// By [`line_of`].
    lines: [RequestList; LINES],
    /// By line: requests that were dispatched and have not ended.
    out: [u32; LINES],
    /// By domain: the number of tokens.
    depths: [u32; DOMAINS],
    /// The domain of the current batch, and the batch's progress.
    turn: usize,
    dispatched: u32,
    scaling: Scaling,
    tunables: Tunables,
}

impl Kyber {
    /// Makes an elevator that holds up to `requests_max` requests and merges within `limits`.
    pub fn new(limits: Limits, requests_max: usize) -> Self {
        let mut held = RequestMemory::new(limits, requests_max, LINES);
        Self {
            lines: std::array::from_fn(|_| RequestList::new(&mut held)),
            held,
            requeued: Fifo::new(),
            out: [0; LINES],
            depths: DEPTHS_MAX,
            turn: 0,
            dispatched: 0,
            scaling: Scaling::default(),
            tunables: Tunables::default(),
        }
    }

    /// The line whose oldest request goes next: of the current batch's domain, else of the next domain in turn
    /// that has a request and a token for it.
    #[inline]
    fn choose(&mut self) -> Option<usize> {
        if self.dispatched < BATCHES[self.turn]
            && let Some(line) = self.ready(self.turn)
        {
            return Some(line);
        }
        let others = (1..=DOMAINS).map(|step| (self.turn + step) % DOMAINS);
        let (domain, line) = others
            .into_iter()
            .find_map(|domain| Some((domain, self.ready(domain)?)))?;
        self.turn = domain;
        self.dispatched = 0;
        Some(line)
    }

    /// The line of a domain that may dispatch, if one has a request and the domain has a token.
    #[inline]
    fn ready(&self, domain: usize) -> Option<usize> {
        if domain == WRITES {
            return self.ready_write();
        }
        let line = LINE_OF_DOMAIN[domain];
        (!self.lines[line].is_empty() && self.out[line] < self.depths[domain]).then_some(line)
    }

    /// The line of the oldest write, synchronous or asynchronous; asynchronous ones leave some tokens to the others.
    fn ready_write(&self) -> Option<usize> {
        if self.out[SYNC_WRITES] + self.out[ASYNC_WRITES] >= self.depths[WRITES] {
            return None;
        }
        let oldest = |line: usize| Some(self.held.slots.arrived(self.lines[line].oldest()?).number);
        let sync = oldest(SYNC_WRITES);
        let asynchronous = oldest(ASYNC_WRITES).filter(|_| self.out[ASYNC_WRITES] < self.async_depth());
        match (sync, asynchronous) {
            (Some(sync), Some(asynchronous)) if asynchronous < sync => Some(ASYNC_WRITES),
            (Some(_), _) => Some(SYNC_WRITES),
            (None, Some(_)) => Some(ASYNC_WRITES),
            (None, None) => None,
        }
    }

    /// How many of the writes' tokens asynchronous writes may hold.
    fn async_depth(&self) -> u32 {
        (self.depths[WRITES] * ASYNC_PERCENT / 100).max(1)
    }
}

impl Elevator for Kyber {
    fn name(&self) -> &'static str {
        KYBER.name
    }

    fn insert(&mut self, mut rq: Box<Request>, at: InsertAt, now: Instant) -> Inserted {
        let line = line_of(&rq);
        match at {
            InsertAt::Ordered => {
                rq.sched_data = 0;
                self.lines[line].insert(&mut self.held, rq, true, now)
            }
            InsertAt::Head => {
                debug_assert_eq!(rq.sched_data, token(line), "it came back without its token");
                let id = self.held.slots.put(rq, now);
                self.requeued.push(&mut self.held.slots, id);
                Inserted::Queued
            }
        }
    }

    fn dispatch(&mut self, _now: Instant) -> Option<Box<Request>> {
        if let Some(id) = self.requeued.first() {
            self.requeued.remove(&mut self.held.slots, id);
            return Some(self.held.slots.take(id));
        }
        let line = self.choose()?;
        let mut rq = self.lines[line].take_oldest(&mut self.held)?;
        self.dispatched += 1;
        self.out[line] += 1;
        rq.sched_data = token(line);
        rq.seal();
        Some(rq)
    }

    fn completed(&mut self, note: &Note) {
        let line = note.sched_data as usize - 1;
        self.out[line] -= 1;
        let latency = Latency {
            total: note.completed_at.since(note.inserted_at),
            device: note.completed_at.since(note.issued_at),
        };
        self.scaling.record(DOMAIN_OF_LINE[line], latency, &self.tunables);
        if self.scaling.is_due(note.completed_at) {
            self.scaling.scale(&mut self.depths, note.completed_at);
        }
    }

    fn queued(&self) -> usize {
        self.held.count()
    }

    fn keeps_back(&self) -> bool {
        let lacks_tokens = |domain| self.ready(domain).is_none();
        self.queued() > 0 && self.requeued.first().is_none() && (0..DOMAINS).all(lacks_tokens)
    }

    fn tunables(&self) -> Vec<(&'static str, u64)> {
        self.tunables.list()
    }

    fn set_tunable(&mut self, name: &str, value: u64) -> Result<(), TunableError> {
        self.tunables.set(self.name(), name, value)
    }

    fn check_invariants(&self) {
        self.requeued.check(&self.held.slots);
        let mut count = self.requeued.len();
        let mut chunks = 0;
        for (number, line) in self.lines.iter().enumerate() {
            chunks += line.check(&self.held, |rq| line_of(rq) == number);
            count += line.len();
        }
        self.held.check(count, chunks);
        for (domain, (&depth, &max)) in self.depths.iter().zip(&DEPTHS_MAX).enumerate() {
            assert!((1..=max).contains(&depth), "depth {depth} of domain {domain}");
            let lines = (0..LINES).filter(|&line| DOMAIN_OF_LINE[line] == domain);
            let out: u32 = lines.map(|line| self.out[line]).sum();
            assert!(out <= max, "{out} requests of domain {domain} are out");
        }
    }
}

/// The line in which a request waits. Zeroing is not a write here: it has no data and takes a different time.
#[inline]
fn line_of(rq: &Request) -> usize {
    match rq.op() {
        Op::Read => 0,
        Op::Write if rq.is_sync() => SYNC_WRITES,
        Op::Write => ASYNC_WRITES,
        Op::Discard => 3,
        Op::WriteZeroes | Op::Flush => 4,
    }
}

/// The code of a request's token in `sched_data`: 0 is none.
#[inline]
const fn token(line: usize) -> u32 {
    line as u32 + 1
}

/// Reads, writes, discards, others.
const DOMAINS: usize = 4;
const WRITES: usize = 1;
const LINES: usize = 5;
const SYNC_WRITES: usize = 1;
const ASYNC_WRITES: usize = 2;
const DOMAIN_OF_LINE: [usize; LINES] = [0, WRITES, WRITES, 2, 3];
/// The line of each domain; for writes, which have two, the synchronous one.
const LINE_OF_DOMAIN: [usize; DOMAINS] = [0, SYNC_WRITES, 3, 4];
/// The largest, and initial, number of tokens.
const DEPTHS_MAX: [u32; DOMAINS] = [256, 128, 64, 16];
/// Requests of one batch: how many go in a row while other domains wait.
const BATCHES: [u32; DOMAINS] = [16, 8, 1, 1];
/// The part of the writes' tokens that asynchronous writes may hold.
const ASYNC_PERCENT: u32 = 75;
