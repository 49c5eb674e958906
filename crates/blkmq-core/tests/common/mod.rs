//! What the core's tests share: a queue with a driver that the test controls. Issued requests are listed,
//! and end when the test says so.

#![allow(dead_code, unreachable_pub)]

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use blkmq_core::bio::{Bio, Flags, Op, Status};
use blkmq_core::driver::{Done, HctxDriver, Issued, TimedOut};
use blkmq_core::ids::{Cookie, DiskId, ReactorId};
use blkmq_core::local::LocalQueue;
use blkmq_core::queue::{DiskConfig, Effects, Queue, QueueConfig};
use blkmq_core::request::Request;
use blkmq_core::time::Instant;

/// A request as the driver saw it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    pub op: Op,
    pub flags: Flags,
    pub disk: DiskId,
    pub offset: u64,
    pub len: u64,
    pub bios: u32,
    pub is_ordered: bool,
    pub cookie: Cookie,
}

/// The state that the test and the driver share.
#[derive(Debug, Default)]
pub struct Hand {
    /// Requests that are issued and have not ended, in order.
    pub issued: Vec<Seen>,
    /// Answers to give instead of `Queued`, in this order.
    pub answers: VecDeque<Issued>,
    /// Ends to be reaped.
    pub done: Vec<Done>,
    pub commits: u32,
    /// Whether the driver gives up a request that has timed out.
    pub lets_go: bool,
    /// Whether every request completes while it is issued.
    pub inline: bool,
    /// The polling states that the core set.
    pub polled: Vec<bool>,
    /// Bytes that are done of each request that fails.
    pub done_before: u64,
    /// Ends of requests in flight are found only by polling, even after polling was switched off.
    pub must_be_polled: bool,
}

pub struct HandDriver(pub Rc<RefCell<Hand>>);

impl HctxDriver for HandDriver {
    fn issue(&mut self, rq: &Request, cookie: Cookie, _last: bool, _now: Instant) -> Issued {
        let mut hand = self.0.borrow_mut();
        let answer = match hand.answers.pop_front() {
            Some(answer) => answer,
            None if hand.inline => Issued::Done(Status::Ok),
            None => Issued::Queued,
        };
        if answer == Issued::Queued {
            let (op, flags, disk, offset) = (rq.op(), rq.flags(), rq.disk(), rq.offset());
            let seen = Seen {
                op,
                flags,
                disk,
                offset,
                len: rq.len(),
                bios: rq.bio_count(),
                is_ordered: rq.is_ordered(),
                cookie,
            };
            hand.issued.push(seen);
        }
        answer
    }

    fn done_before(&mut self, _cookie: Cookie) -> u64 {
        self.0.borrow().done_before
    }

    fn commit(&mut self) {
        self.0.borrow_mut().commits += 1;
    }

    fn reap(&mut self, _now: Instant, done: &mut Vec<Done>) {
        done.append(&mut self.0.borrow_mut().done);
    }

    fn set_polled(&mut self, on: bool) -> bool {
        let mut hand = self.0.borrow_mut();
        hand.polled.push(on);
        on || hand.must_be_polled
    }

    fn timed_out(&mut self, _cookie: Cookie) -> TimedOut {
        if self.0.borrow().lets_go {
            TimedOut::Ended
        } else {
            TimedOut::Wait
        }
    }
}

/// One reactor of the bench: its local queue, the state of its driver, its effects.
pub struct Side {
    pub local: LocalQueue,
    pub hand: Rc<RefCell<Hand>>,
    pub fx: Effects,
}

/// A queue with all its reactors, in one thread.
pub struct Bench {
    pub queue: std::sync::Arc<Queue>,
    pub sides: Vec<Side>,
    pub now: Instant,
}

pub fn disk(name: &str, base: u64, size: u64) -> DiskConfig {
    DiskConfig {
        name: name.into(),
        base,
        size,
        read_only: false,
        logical_block: 512,
    }
}

pub fn config(reactors: u16) -> QueueConfig {
    let mut config = QueueConfig::new("q", reactors);
    config.disks = vec![disk("a", 0, 1 << 30), disk("b", 1 << 30, 1 << 30)];
    config
}

impl Bench {
    pub fn new(config: QueueConfig) -> Self {
        let (queue, handles) = Queue::new(config).expect("a sound configuration");
        let side = |handle: blkmq_core::queue::QueueHandle| {
            let hand = Rc::new(RefCell::new(Hand::default()));
            let driver = handle
                .owns_hctx()
                .then(|| Box::new(HandDriver(Rc::clone(&hand))) as Box<dyn HctxDriver>);
            Side {
                local: handle.attach(driver),
                hand,
                fx: Effects::default(),
            }
        };
        Self {
            queue,
            sides: handles.into_iter().map(side).collect(),
            now: Instant(1_000),
        }
    }

    pub fn submit(&mut self, side: usize, bio: Bio) {
        let side = &mut self.sides[side];
        side.local
            .submit(bio, self.now, &mut side.fx)
            .expect("room for a bio");
    }

    pub fn unplug(&mut self, side: usize) {
        let side = &mut self.sides[side];
        side.local.unplug(self.now, &mut side.fx);
    }

    /// Runs all reactors until none has been woken.
    pub fn run_until_idle(&mut self) {
        for _ in 0..1000 {
            let mut kicks = blkmq_core::ids::ReactorSet::default();
            for side in &mut self.sides {
                side.local.run(self.now, &mut side.fx);
                side.local.unplug(self.now, &mut side.fx);
                let mut set = std::mem::take(&mut side.fx.kicks);
                while let Some(id) = set.pop() {
                    kicks.insert(id);
                }
            }
            self.sides.iter().for_each(|side| side.local.check_invariants());
            if kicks.is_empty() {
                return;
            }
        }
        panic!("reactors kick each other for ever");
    }

    /// The requests at the driver of `side`.
    pub fn issued(&self, side: usize) -> Vec<Seen> {
        self.sides[side].hand.borrow().issued.clone()
    }

    /// Ends all requests at the driver of `side`.
    pub fn end_all(&mut self, side: usize, status: Status) -> usize {
        let mut hand = self.sides[side].hand.borrow_mut();
        let seen = std::mem::take(&mut hand.issued);
        let count = seen.len();
        hand.done.extend(seen.iter().map(|seen| Done {
            cookie: seen.cookie,
            status,
        }));
        count
    }

    /// Ends all requests everywhere until there are none.
    pub fn run_dry(&mut self) {
        loop {
            self.run_until_idle();
            let ended: usize = (0..self.sides.len())
                .map(|side| self.end_all(side, Status::Ok))
                .sum();
            self.run_until_idle();
            if ended == 0 {
                return;
            }
        }
    }

    /// The ended bios of `side`, as (cookie, status).
    pub fn ended(&mut self, side: usize) -> Vec<(u64, Status)> {
        self.sides[side]
            .fx
            .ended
            .drain(..)
            .map(|bio| (bio.cookie, bio.status))
            .collect()
    }

    /// The reactor's id, for kicks.
    pub fn id(side: usize) -> ReactorId {
        ReactorId(side as u16)
    }
}

pub fn bio(op: Op, block: u64, blocks: u64, cookie: u64) -> Bio {
    Bio {
        op,
        offset: block * 4096,
        len: blocks * 4096,
        cookie,
        ..Bio::default()
    }
}

/// How many requests of a disk are at the drivers.
pub fn in_flight_of(bench: &Bench, disk: DiskId) -> usize {
    let seen = (0..bench.sides.len()).flat_map(|side| bench.issued(side));
    seen.filter(|seen| seen.disk == disk).count()
}

/// Ends `count` requests of a disk, at any drivers.
pub fn end(bench: &mut Bench, disk: DiskId, count: usize) {
    let mut left = count;
    for side in &bench.sides {
        let mut hand = side.hand.borrow_mut();
        while let Some(place) = hand.issued.iter().position(|seen| seen.disk == disk) {
            if left == 0 {
                break;
            }
            left -= 1;
            let cookie = hand.issued.remove(place).cookie;
            let status = Status::Ok;
            hand.done.push(Done { cookie, status });
        }
    }
    assert_eq!(left, 0, "requests to end");
    bench.run_until_idle();
}
