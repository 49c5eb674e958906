//! The world around the elevator: closed loops of clients, and a drive that serves several requests at
//! once, each for a time that depends on its size and, if the drive seeks, on the distance.

use std::collections::BTreeMap;

use blkmq_core::bio::{Bio, Flags, Op, Prio};
use blkmq_core::group::{GroupTree, Node};
use blkmq_core::ids::{GroupId, ReactorId};
use blkmq_core::limits::Limits;
use blkmq_core::request::Request;
use blkmq_core::sched::bfq::Bfq;
use blkmq_core::sched::{Elevator, GroupAware, InsertAt, Note};
use blkmq_core::time::{Instant, Nanos};

/// The times and the capacity of the drive.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Drive {
    /// Requests that it serves at once; more wait in the order of their arrival.
    pub(crate) servers: usize,
    /// Time for each request.
    pub(crate) base: Nanos,
    /// Time for each 4 KiB.
    pub(crate) per_block: Nanos,
    /// Time for a request that does not begin where the previous one ended; not 0 on a drive that
    /// seeks.
    pub(crate) seek: Nanos,
    /// Requests that it accepts.
    pub(crate) depth: usize,
}

/// A client that keeps some requests under way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    pub(crate) group: GroupId,
    pub(crate) client: u32,
    pub(crate) op: Op,
    pub(crate) flags: Flags,
    pub(crate) prio: Prio,
    pub(crate) len: u64,
    pub(crate) depth: u32,
    /// Time from the end of a request to the next request.
    pub(crate) think: Nanos,
    /// Whether each request follows the previous one; otherwise positions are random.
    pub(crate) sequential: bool,
    /// Reads every n-th piece of an area that others read as well, from this piece on.
    pub(crate) interleaved: Option<(u64, u64)>,
}

/// The elevator, the drive and the loads, with measurements of each load.
pub(crate) struct World {
    pub(crate) bfq: Bfq,
    pub(crate) now: Instant,
    drive: Drive,
    pace: u64,
    loads: Vec<(Load, bool, u64)>,
    /// Ends of requests and of clients' pauses, by time and number.
    events: BTreeMap<(Instant, u64), Event>,
    events_made: u64,
    inside: usize,
    waiting: Vec<Box<Request>>,
    working: usize,
    head: u64,
    chance: u64,
    inserted: BTreeMap<u64, Instant>,
    /// When each request was issued to the drive, by its position.
    issued: BTreeMap<u64, Instant>,
    /// Bytes of each load that have ended.
    pub(crate) served: Vec<u64>,
    /// By load, the time of each request in the elevator.
    pub(crate) waits: Vec<Vec<Nanos>>,
    /// The loads in the order in which their requests were dispatched.
    pub(crate) order: Vec<usize>,
}

enum Event {
    End(Box<Request>),
    Submit(usize),
    Wake,
}

impl Drive {
    /// 16 requests at once, of 80 µs or more.
    pub(crate) fn flash() -> Self {
        Self {
            servers: 16,
            base: Nanos::from_micros(78),
            per_block: Nanos::from_micros(2),
            seek: Nanos::ZERO,
            depth: 64,
        }
    }

    /// One request at a time, 128 MiB/s, 8 ms for a seek.
    pub(crate) fn disk() -> Self {
        Self {
            servers: 1,
            base: Nanos::ZERO,
            per_block: Nanos::from_micros(30),
            seek: Nanos::from_millis(8),
            depth: 8,
        }
    }

    /// The time that a request takes without a seek.
    pub(crate) fn time(self, len: u64) -> Nanos {
        Nanos(self.base.0 + self.per_block.0 * len.div_ceil(4096))
    }

    /// The bytes that it serves in a time, fully loaded with requests of one length, without seeks.
    pub(crate) fn bytes_per(self, time: Nanos, len: u64) -> u64 {
        time.0 * self.servers as u64 / self.time(len).0 * len
    }
}

impl Default for Load {
    fn default() -> Self {
        Self {
            group: GroupId(0),
            client: 0,
            op: Op::Read,
            flags: Flags::NONE,
            prio: Prio::default(),
            len: 4096,
            depth: 32,
            think: Nanos::ZERO,
            sequential: false,
            interleaved: None,
        }
    }
}

impl World {
    /// A drive with groups of equal weight below the root, and no load.
    pub(crate) fn new(drive: Drive, groups: usize) -> Self {
        let limits = Limits {
            rotational: drive.seek > Nanos::ZERO,
            ..Limits::default()
        };
        Self {
            bfq: Bfq::new(limits, 8192, &GroupTree::flat(groups as u32)),
            now: Instant(0),
            drive,
            pace: 1,
            loads: Vec::new(),
            events: BTreeMap::new(),
            events_made: 0,
            inside: 0,
            waiting: Vec::new(),
            working: 0,
            head: 0,
            chance: 1,
            inserted: BTreeMap::new(),
            issued: BTreeMap::new(),
            served: Vec::new(),
            waits: Vec::new(),
            order: Vec::new(),
        }
    }

    pub(crate) fn set_group(&mut self, group: u32, node: Node) {
        self.bfq.group_set(GroupId(group), &node);
        self.bfq.check_invariants();
    }

    /// From now on the drive takes `factor` times as long.
    pub(crate) fn set_pace(&mut self, factor: u64) {
        self.pace = factor;
    }

    /// Starts a load and returns its number.
    pub(crate) fn start(&mut self, load: Load) -> usize {
        let id = self.loads.len();
        self.loads.push((load, true, 0));
        self.served.push(0);
        self.waits.push(Vec::new());
        (0..load.depth).for_each(|_| self.event(self.now, Event::Submit(id)));
        id
    }

    /// Makes a load submit nothing any more.
    pub(crate) fn stop(&mut self, load: usize) {
        self.loads[load].1 = false;
    }

    /// Lets time pass.
    pub(crate) fn run(&mut self, time: Nanos) {
        let until = self.now + time;
        let mut steps = 0u64;
        while let Some(entry) = self.events.first_entry().filter(|entry| entry.key().0 <= until) {
            self.now = entry.key().0;
            match entry.remove() {
                Event::End(rq) => self.end(rq),
                Event::Submit(load) => self.submit(load),
                Event::Wake => {}
            }
            // All events of one moment, and then the elevator.
            if self
                .events
                .first_key_value()
                .is_none_or(|(key, _)| key.0 > self.now)
            {
                self.dispatch();
            }
            steps += 1;
            if steps.is_multiple_of(4096) {
                self.bfq.check_invariants();
            }
        }
        self.now = until;
        self.bfq.check_invariants();
    }

    fn event(&mut self, at: Instant, event: Event) {
        self.events_made += 1;
        self.events.insert((at, self.events_made), event);
    }

    fn submit(&mut self, id: usize) {
        let (load, runs, count) = &mut self.loads[id];
        if !*runs {
            return;
        }
        *count += 1;
        let (load, count) = (*load, *count);
        self.chance = self
            .chance
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let place = if load.sequential {
            count
        } else {
            (self.chance >> 33) * 2
        };
        let position = match load.interleaved {
            Some((nth, first)) => (1 << 60) + (count * nth + first) * load.len,
            None => ((id as u64) << 40) + place * load.len,
        };
        let bio = Bio {
            op: load.op,
            flags: load.flags,
            prio: load.prio,
            group: load.group,
            client: load.client,
            offset: position,
            len: load.len,
            cookie: (id as u64) << 40 | count,
            ..Bio::default()
        };
        self.inserted.insert(bio.cookie, self.now);
        self.bfq.insert(
            Request::for_test(ReactorId(0), bio, 0),
            InsertAt::Ordered,
            self.now,
        );
    }

    fn dispatch(&mut self) {
        while self.inside < self.drive.depth {
            let Some(rq) = self.bfq.dispatch(self.now) else {
                break;
            };
            self.inside += 1;
            self.issued.insert(rq.position(), self.now);
            self.each(&rq, |world, id, cookie, _| {
                let at = world.inserted.remove(&cookie).expect("it was inserted");
                world.waits[id].push(world.now.since(at));
            });
            let mut first = None;
            rq.for_each_bio(|bio| first = first.or(Some((bio.cookie >> 40) as usize)));
            self.order.push(first.expect("a request has a bio"));
            self.waiting.push(rq);
        }
        self.work();
        // A full drive is waited for, as by the gate.
        let may_dispatch = self.inside < self.drive.depth;
        if let Some(at) = self.bfq.next_wakeup().filter(|_| may_dispatch) {
            self.event(at.max(self.now + Nanos(1)), Event::Wake);
        }
    }

    fn work(&mut self) {
        while self.working < self.drive.servers && !self.waiting.is_empty() {
            let rq = self.waiting.remove(0);
            let seek = if rq.position() == self.head {
                Nanos::ZERO
            } else {
                self.drive.seek
            };
            self.head = rq.position_end();
            self.working += 1;
            let time = Nanos(self.drive.time(rq.len()).0 * self.pace) + seek;
            self.event(self.now + time, Event::End(rq));
        }
    }

    fn end(&mut self, rq: Box<Request>) {
        self.inside -= 1;
        self.working -= 1;
        let note = Note {
            issued_at: self.issued.remove(&rq.position()).unwrap_or(self.now),
            ..Note::of(&rq, self.now)
        };
        self.bfq.completed(&note);
        self.each(&rq, |world, id, _, len| {
            world.served[id] += len;
            let think = world.loads[id].0.think;
            world.event(world.now + think, Event::Submit(id));
        });
        self.work();
    }

    fn each(&mut self, rq: &Request, mut visit: impl FnMut(&mut Self, usize, u64, u64)) {
        rq.for_each_bio(|bio| visit(self, (bio.cookie >> 40) as usize, bio.cookie, bio.len));
    }
}
