//! Decides what is told of a request's way to whoever traces it: an [`Event`] for each step, into a buffer of the reactor that took the
//! step. Filled by `local`, `hw_ctx` and `gate` where a [`Tracer`] is set; without one each of them looks for it once, for a batch where
//! there are batches.

pub mod blktrace;

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use blkmq_sync::spsc::{self, Consumer, Producer};

use crate::bio::{Bio, Flags, Op, Status};
use crate::ids::{DiskId, GroupId};
use crate::request::{NOT_INSERTED, Request};
use crate::time::Instant;

/// What happened to a request, or to a bio.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// A bio, or a part of one that was split, is in a request.
    Queued,
    /// A bio has joined another one's request: in the plug, or in the elevator; the latter is told when that request is issued.
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
}

/// One step of one request.
#[derive(Clone, Copy, Debug)]
pub struct Event {
    /// The time of the batch in which it happened.
    pub at: Instant,
    /// First byte on the disk.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// What the tracer's maker calls the queue.
    pub queue: u16,
    /// The disk on that queue.
    pub disk: DiskId,
    /// The group.
    pub group: GroupId,
    /// The operation.
    pub op: Op,
    /// Its modifiers.
    pub flags: Flags,
    /// What happened.
    pub step: Step,
    /// How it ended, of [`Step::Completed`].
    pub status: Status,
}

/// Makes a buffer for the events of one reactor: at least so many.
pub fn buffer(events_min: usize) -> (Sender, Receiver) {
    let (producer, consumer) = spsc::ring(events_min);
    let dropped = Arc::<AtomicU64>::default();
    let sender = Sender {
        events: producer,
        dropped: Arc::clone(&dropped),
    };
    let receiver = Receiver {
        events: consumer,
        dropped,
        seen: 0,
    };
    (sender, receiver)
}

/// The end of a buffer at which a reactor puts events in.
#[derive(Debug)]
pub struct Sender {
    events: Producer<Event>,
    dropped: Arc<AtomicU64>,
}

/// The end at which they are taken out, on any thread.
#[derive(Debug)]
pub struct Receiver {
    events: Consumer<Event>,
    dropped: Arc<AtomicU64>,
    seen: u64,
}

impl Receiver {
    /// Hands over what has come, in the order of the events. Returns how many.
    pub fn drain(&mut self, take: impl FnMut(Event)) -> usize {
        self.events.drain(take)
    }

    /// How many events found no room since this was asked last.
    pub fn take_dropped(&mut self) -> u64 {
        // Relaxed: a count by itself.
        let dropped = self.dropped.load(Ordering::Relaxed);
        dropped - std::mem::replace(&mut self.seen, dropped)
    }
}

/// What one reactor tells of one queue. All of a reactor's have the same buffer.
#[derive(Clone, Debug)]
pub struct Tracer {
    buffer: Rc<RefCell<Sender>>,
    queue: u16,
}

impl Tracer {
    /// Tells the events of a queue, which they call `queue`, to a buffer.
    pub fn new(buffer: Rc<RefCell<Sender>>, queue: u16) -> Self {
        Self { buffer, queue }
    }

    /// Requests leave the plug, and go to the elevator or the caps if they are `inserted`.
    #[cold]
    #[inline(never)]
    pub(crate) fn queued(&self, list: &[Box<Request>], inserted: impl Fn(&Request) -> bool, now: Instant) {
        for rq in list {
            let mut is_first = true;
            rq.for_each_part(|part| {
                self.tell(Step::Queued, &part.bio, now);
                if !std::mem::take(&mut is_first) {
                    self.tell(Step::Merged, &part.bio, now);
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
                    self.tell(Step::Merged, &part.bio, now);
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
            len: rq.len(),
            ..self.event(step, &rq.bio, now)
        });
    }

    /// A request has ended.
    #[cold]
    #[inline(never)]
    pub(crate) fn completed(&self, rq: &Request, status: Status, now: Instant) {
        self.push(Event {
            offset: rq.offset(),
            len: rq.len(),
            status,
            ..self.event(Step::Completed, &rq.bio, now)
        });
    }

    fn tell(&self, step: Step, bio: &Bio, now: Instant) {
        self.push(self.event(step, bio, now));
    }

    fn event(&self, step: Step, bio: &Bio, now: Instant) -> Event {
        Event {
            at: now,
            offset: bio.offset,
            len: bio.len,
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
        let mut buffer = self.buffer.borrow_mut();
        if buffer.events.push(event).is_err() {
            // Relaxed: a count by itself, which this thread alone changes.
            let dropped = buffer.dropped.load(Ordering::Relaxed);
            buffer.dropped.store(dropped + 1, Ordering::Relaxed);
        }
    }
}
