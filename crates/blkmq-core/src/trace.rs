//! Tracing of requests: an [`Event`] for each step, in a ring of the reactor that took the step. Another
//! process may read the ring. `local`, `hw_ctx` and `gate` record events while a [`Tracer`] is set;
//! without a tracer each of them tests for one once per batch.

pub mod blktrace;

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use blkmq_sync::shared_ring::{Consumer, Memory, Producer, Record};

use crate::bio::{Bio, Flags, Op, Status};
use crate::ids::{DiskId, GroupId};
use crate::request::{NOT_INSERTED, Request};
use crate::time::Instant;

/// What happened to a request, or to a bio.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Step {
    /// A bio, or a part of one that was split, is in a request.
    Queued,
    /// A bio has joined another one's request: in the plug, or in the elevator. A merge in the elevator is recorded when that request is issued.
    Merged,
    /// Its submitter has published a request for the elevator, or for the caps of its group.
    Inserted,
    /// A request waits for a cap of its group.
    HeldBack,
    /// The driver has it.
    Issued,
    /// The driver has given it back, to be issued again.
    Requeued,
    /// It has ended.
    Completed,
    /// No step of a request: from here on, numbers of disks and groups of the event's queue may have other meanings.
    Renumbered,
}

impl Step {
    const ALL: [Self; 8] = [
        Self::Queued,
        Self::Merged,
        Self::Inserted,
        Self::HeldBack,
        Self::Issued,
        Self::Requeued,
        Self::Completed,
        Self::Renumbered,
    ];
}

/// One step of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// The time of the batch in which it happened.
    pub at: Instant,
    /// First byte on the disk.
    pub offset: u64,
    /// Bytes; 4 GiB - 1 also stands for longer ones.
    pub len: u32,
    /// What the tracer's maker calls the queue.
    pub queue: u16,
    /// The disk on that queue.
    pub disk: DiskId,
    /// The group.
    pub group: GroupId,
    /// The operation.
    pub op: Op,
    /// Its modifiers, as its submitter set them.
    pub flags: Flags,
    /// What happened.
    pub step: Step,
    /// How it ended, of [`Step::Completed`].
    pub status: Status,
}

/// ```text
/// word 0  at, nanoseconds
/// word 1  offset
/// word 2  len (32 bits), group (32)
/// word 3  disk (32), queue (16), step (3), op (3), status (4), flags (6)
/// ```
impl Event {
    #[inline(always)]
    fn to_record(self) -> Record {
        let small = (self.step as u64) << STEP | (self.op as u64) << OP | (self.status as u64) << STATUS;
        let flags = u64::from(self.flags.0 & Flags::PUBLIC.0) << FLAGS;
        [
            self.at.0,
            self.offset,
            u64::from(self.len) | u64::from(self.group.0) << 32,
            u64::from(self.disk.0) | u64::from(self.queue) << QUEUE | small | flags,
        ]
    }

    /// Returns `None` for words that no event has.
    fn from_record([at, offset, len_and_group, rest]: Record) -> Option<Self> {
        let small = |shift: u32, bits: u32| (rest >> shift) as usize & ((1 << bits) - 1);
        Some(Self {
            at: Instant(at),
            offset,
            len: len_and_group as u32,
            group: GroupId((len_and_group >> 32) as u32),
            disk: DiskId(rest as u32),
            queue: (rest >> QUEUE) as u16,
            step: Step::ALL[small(STEP, 3)],
            op: *Op::ALL.get(small(OP, 3))?,
            status: *Status::ALL.get(small(STATUS, 4))?,
            flags: Flags(small(FLAGS, 6) as u8),
        })
    }
}

const QUEUE: u32 = 32;
const STEP: u32 = 48;
const OP: u32 = 51;
const STATUS: u32 = 54;
const FLAGS: u32 = 58;

/// The writing end of a reactor's ring.
#[derive(Debug)]
pub struct Sender(Producer);

impl Sender {
    /// Makes the writing end of the ring in `memory`. A [`Receiver`] of the same memory, in this process or another one, is the
    /// other end.
    ///
    /// # Panics
    /// If `memory` does not have the size of a ring ([`blkmq_sync::shared_ring::words_of`]).
    pub fn new(memory: Arc<dyn Memory>) -> Self {
        Self(Producer::new(memory))
    }
}

/// The reading end of a reactor's ring, on any thread of any process that has mapped the memory.
#[derive(Debug)]
pub struct Receiver(Consumer);

impl Receiver {
    /// Makes the reading end of the ring in `memory`.
    ///
    /// # Panics
    /// If `memory` does not have the size of a ring.
    pub fn new(memory: Arc<dyn Memory>) -> Self {
        Self(Consumer::new(memory))
    }

    /// Passes the events in the ring to `take`, oldest first, and returns their number.
    ///
    /// # Errors
    /// The error of `take`, or [`NoEvent`]; the remaining events are lost.
    #[inline]
    pub fn drain<E: From<NoEvent>>(
        &mut self,
        mut take: impl FnMut(Event) -> Result<(), E>,
    ) -> Result<u64, E> {
        self.0
            .drain(|record| take(Event::from_record(record).ok_or(NoEvent)?))
    }

    /// The number of events dropped since the last call, because the ring was full.
    pub fn take_dropped(&mut self) -> u64 {
        self.0.take_dropped()
    }

    /// The number of events that the ring holds.
    pub fn capacity(&self) -> u64 {
        self.0.capacity()
    }
}

/// A ring contains words that are no event of this version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoEvent;

impl std::fmt::Display for NoEvent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the trace contains something that is no event: its writer is of another version")
    }
}

impl std::error::Error for NoEvent {}

/// What one reactor tells of one queue. All of a reactor's have the same ring.
#[derive(Clone, Debug)]
pub struct Tracer {
    ring: Rc<RefCell<Sender>>,
    queue: u16,
}

impl Tracer {
    /// Records the events of a queue in a ring, under the number `queue`.
    pub fn new(ring: Rc<RefCell<Sender>>, queue: u16) -> Self {
        Self { ring, queue }
    }

    /// The queue's disks may have changed.
    #[cold]
    pub(crate) fn renumbered(&self) {
        self.push(self.event(Step::Renumbered, &Bio::default(), Instant(0)));
    }

    /// Requests leave the plug, and go to the elevator or the caps if they are `inserted`.
    #[cold]
    #[inline(never)]
    pub(crate) fn queued(&self, list: &[Box<Request>], inserted: impl Fn(&Request) -> bool, now: Instant) {
        for rq in list {
            let mut is_first = true;
            rq.for_each_part(|part| {
                self.record(Step::Queued, &part.bio, now);
                if !std::mem::take(&mut is_first) {
                    self.record(Step::Merged, &part.bio, now);
                }
            });
            if inserted(rq) {
                self.step(Step::Inserted, rq, now);
            }
        }
    }

    /// The driver has a request.
    #[cold]
    #[inline(never)]
    pub(crate) fn issued(&self, rq: &Request, now: Instant) {
        if rq.from_elevator && rq.bio_count() > 1 {
            let mut is_first = true;
            rq.for_each_part(|part| {
                // Those that the plug has merged were never inserted themselves.
                let was_inserted = part.inserted_at() != NOT_INSERTED;
                if was_inserted && !std::mem::take(&mut is_first) {
                    self.record(Step::Merged, &part.bio, now);
                }
            });
        }
        self.step(Step::Issued, rq, now);
    }

    /// Something happened to each of a list.
    #[cold]
    #[inline(never)]
    pub(crate) fn each(&self, step: Step, list: &[Box<Request>], now: Instant) {
        list.iter().for_each(|rq| self.step(step, rq, now));
    }

    /// Something happened to a request.
    #[cold]
    #[inline(never)]
    pub(crate) fn step(&self, step: Step, rq: &Request, now: Instant) {
        self.push(Event {
            offset: rq.offset(),
            len: event_len(rq.len()),
            ..self.event(step, &rq.bio, now)
        });
    }

    /// A request has ended.
    #[cold]
    #[inline(never)]
    pub(crate) fn completed(&self, rq: &Request, status: Status, now: Instant) {
        self.push(Event {
            offset: rq.offset(),
            len: event_len(rq.len()),
            status,
            ..self.event(Step::Completed, &rq.bio, now)
        });
    }

    fn record(&self, step: Step, bio: &Bio, now: Instant) {
        self.push(self.event(step, bio, now));
    }

    fn event(&self, step: Step, bio: &Bio, now: Instant) -> Event {
        Event {
            at: now,
            offset: bio.offset,
            len: event_len(bio.len),
            queue: self.queue,
            disk: bio.disk,
            group: bio.group,
            op: bio.op,
            flags: bio.flags,
            step,
            status: Status::Ok,
        }
    }

    fn push(&self, event: Event) {
        self.ring.borrow_mut().0.push(event.to_record());
    }
}

fn event_len(len: u64) -> u32 {
    u32::try_from(len).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn every_step_operation_status_and_flag_survives_the_ring() {
        for step in Step::ALL {
            for op in Op::ALL {
                for status in Status::ALL {
                    let event = Event {
                        at: Instant(u64::MAX),
                        offset: 1 << 60,
                        len: u32::MAX,
                        queue: u16::MAX,
                        disk: DiskId(u32::MAX),
                        group: GroupId(u32::MAX),
                        op,
                        flags: Flags::PUBLIC,
                        step,
                        status,
                    };
                    assert_eq!(Event::from_record(event.to_record()), Some(event));
                }
            }
        }
    }

    proptest! {
        #[test]
        fn any_words_are_an_event_that_says_the_same_or_none(words in any::<[u64; 4]>()) {
            if let Some(event) = Event::from_record(words) {
                prop_assert_eq!(event.to_record(), words);
            }
        }
    }
}
