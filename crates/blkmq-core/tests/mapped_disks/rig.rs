//! The set-up of these tests: queues whose drivers the test controls, and mapped disks on them.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use crate::common::{Hand, HandDriver, Seen};
use blkmq_core::bio::{Bio, Op, Status};
use blkmq_core::driver::Done;
use blkmq_core::ids::DiskId;
use blkmq_core::limits::Limits;
use blkmq_core::local::LocalQueue;
use blkmq_core::mapper::Below;
use blkmq_core::mapper::stack::Stack;
use blkmq_core::mapper::table::{Leaf, MapKind, MapSpec, MemberSpec, Table};
use blkmq_core::queue::{Effects, Queue, QueueConfig};
use blkmq_core::time::{Instant, Nanos};

/// Some queues with one disk each, and mapped disks on them.
pub(crate) struct Rig {
    pub(crate) queues: Vec<LocalQueue>,
    pub(crate) hands: Vec<Rc<RefCell<Hand>>>,
    pub(crate) stack: Stack,
    pub(crate) fx: Effects,
    pub(crate) now: Instant,
}

/// The properties of the members.
#[derive(Clone, Copy)]
pub(crate) struct Members {
    pub(crate) count: u16,
    pub(crate) requests: u32,
    pub(crate) cache: bool,
    pub(crate) fua: bool,
}

pub(crate) const FOUR: Members = Members {
    count: 4,
    requests: 64,
    cache: true,
    fua: true,
};

pub(crate) fn rig(members: Members, specs: &[MapSpec]) -> Rig {
    let limits = Limits {
        cache: members.cache,
        fua: members.fua,
        discard_max: 1 << 30,
        zeroes_max: 1 << 20,
        ..Limits::default()
    };
    let leaf = |queue| Leaf {
        queue,
        disk: DiskId(0),
        size: MEMBER,
        read_only: false,
        limits: limits.clone(),
    };
    let mut table = Table::new((0..members.count).map(leaf).collect());
    for spec in specs {
        table.add(spec).unwrap();
    }
    let hands: Vec<Rc<RefCell<Hand>>> = (0..members.count).map(|_| Rc::default()).collect();
    let queue = |hand: &Rc<RefCell<Hand>>| {
        let mut config = QueueConfig::new("q", 1);
        config.limits = limits.clone();
        config.requests_per_reactor = members.requests;
        config.disks = vec![crate::common::disk("m", 0, MEMBER)];
        config.timeout = Nanos::from_secs(3600);
        let (_, mut handles) = Queue::new(config).unwrap();
        handles
            .remove(0)
            .attach(Some(Box::new(HandDriver(Rc::clone(hand)))))
    };
    Rig {
        queues: hands.iter().map(queue).collect(),
        hands,
        stack: Stack::new(Arc::new(table), 1024, 64),
        fx: Effects::default(),
        now: Instant(1),
    }
}

impl Rig {
    pub(crate) fn submit(&mut self, bio: Bio) -> Result<(), Bio> {
        let submitted = self.stack.submit(bio, &mut self.queues, self.now, &mut self.fx);
        self.stack.check_invariants();
        submitted
    }

    pub(crate) fn unplug(&mut self) {
        self.queues
            .iter_mut()
            .for_each(|queue| queue.unplug(self.now, &mut self.fx));
        self.complete_parts();
    }

    pub(crate) fn run(&mut self) {
        self.queues
            .iter_mut()
            .for_each(|queue| queue.run(self.now, &mut self.fx));
        self.complete_parts();
        self.queues.iter().for_each(LocalQueue::check_invariants);
    }

    pub(crate) fn complete_parts(&mut self) {
        while self.stack.is_due(&self.fx)
            && self
                .stack
                .complete_parts(&mut self.queues, self.now, &mut self.fx)
        {}
        self.stack.check_invariants();
    }

    /// The requests at the driver of a member.
    pub(crate) fn issued(&self, member: usize) -> Vec<Seen> {
        self.hands[member].borrow().issued.clone()
    }

    /// The requests at all drivers: member, operation, offset, length.
    pub(crate) fn all_issued(&self) -> Vec<(usize, Op, u64, u64)> {
        let of = |member| {
            let issued = self.issued(member).into_iter();
            issued.map(move |seen| (member, seen.op, seen.offset, seen.len))
        };
        (0..self.hands.len()).flat_map(of).collect()
    }

    /// Ends the requests at the driver of a member.
    pub(crate) fn end(&mut self, member: usize, status: Status) -> usize {
        let mut hand = self.hands[member].borrow_mut();
        let issued = std::mem::take(&mut hand.issued);
        hand.done.extend(issued.iter().map(|seen| Done {
            cookie: seen.cookie,
            status,
        }));
        drop(hand);
        self.run();
        issued.len()
    }

    pub(crate) fn ended(&mut self) -> Vec<(u64, Status)> {
        let ended = self.fx.ended.drain(..);
        ended.map(|bio| (bio.cookie, bio.status)).collect()
    }

    pub(crate) fn assert_at_rest(&self) {
        assert_eq!(self.stack.outstanding(), 0);
        assert!(self.queues.iter().all(|queue| queue.outstanding() == 0));
    }
}

pub(crate) fn spec(kind: MapKind, members: &[Below]) -> MapSpec {
    let member = |below: &Below| MemberSpec {
        name: "m".to_owned(),
        below: *below,
        start: 0,
        len: None,
    };
    MapSpec {
        name: "d".to_owned(),
        kind,
        members: members.iter().map(member).collect(),
        block_size: None,
        read_only: false,
    }
}

pub(crate) fn striped(count: u32) -> MapSpec {
    let leaves: Vec<Below> = (0..count).map(Below::Leaf).collect();
    spec(MapKind::Striped { chunk: CHUNK }, &leaves)
}

pub(crate) fn linear(count: u32) -> MapSpec {
    let leaves: Vec<Below> = (0..count).map(Below::Leaf).collect();
    spec(MapKind::Linear, &leaves)
}

pub(crate) fn bio(op: Op, offset: u64, len: u64, cookie: u64) -> Bio {
    Bio {
        op,
        offset,
        len,
        cookie,
        ..Bio::default()
    }
}

pub(crate) const MEMBER: u64 = 64 << 20;
pub(crate) const CHUNK: u64 = 64 << 10;
