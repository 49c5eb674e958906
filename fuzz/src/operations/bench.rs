//! The queue under test with all its reactors, in one thread; it knows which bios are under way.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::Arc;

use blkmq_core::bio::{Bio, Status};
use blkmq_core::driver::{Done, HctxDriver, Issued};
use blkmq_core::group::GroupTree;
use blkmq_core::ids::{ReactorId, ReactorSet};
use blkmq_core::limits::Limits;
use blkmq_core::local::LocalQueue;
use blkmq_core::queue::{DiskConfig, Effects, Queue, QueueConfig, QueueHandle, ReactorConfig, TagMode};
use blkmq_core::sched::{self, ElevatorType};
use blkmq_core::time::{Instant, Nanos};

use super::hand::{Drive, Hand, HandDriver};

pub(super) const BLOCK_BYTES: u64 = 4096;
pub(super) const GROUPS: u32 = 3;
/// Less than the places that a bio can name, so that some lie beyond the end.
const DISK_BLOCKS: u64 = 240;
/// Freezes, or quiesces, on top of each other.
const NESTED_MAX: u32 = 3;
/// Times that reactors run at the end without anything ending before we call it a livelock.
const ROUNDS_MAX: u32 = 10_000;

/// One reactor: its side of the queue and the hand of its driver.
pub(super) struct Side {
    local: Option<LocalQueue>,
    hand: Rc<RefCell<Hand>>,
    fx: Effects,
    under_way: BTreeSet<u64>,
    has_kick: bool,
}

pub(super) struct Bench {
    queue: Arc<Queue>,
    pub(super) sides: Vec<Side>,
    drive: Rc<RefCell<Drive>>,
    depth_max: u32,
    frozen: u32,
    quiesced: u32,
    cookies: u64,
    now: Instant,
}

impl Bench {
    /// Makes a queue as four bytes say: reactors and contexts, tags, room, and what the drive can.
    pub(super) fn new([reactors, tags, room, drive]: [u8; 4]) -> Self {
        let config = config([reactors, tags, room, drive]);
        let drive = Rc::new(RefCell::new(Drive {
            limits: config.limits.clone(),
            disk_bytes: DISK_BLOCKS * BLOCK_BYTES,
            ..Drive::default()
        }));
        let depth_max = config.tags.depth();
        let (queue, handles) = Queue::new(config).expect("a sound configuration");
        let sides = handles
            .into_iter()
            .map(|handle| Side::new(handle, &drive))
            .collect();
        Self {
            queue,
            sides,
            drive,
            depth_max,
            frozen: 0,
            quiesced: 0,
            cookies: 0,
            now: Instant(1_000),
        }
    }

    pub(super) fn submit(&mut self, side: usize, mut bio: Bio) {
        self.cookies += 1;
        bio.cookie = self.cookies;
        let side = &mut self.sides[side];
        side.under_way.insert(bio.cookie);
        let local = side.local.as_mut().expect("attached");
        if let Err(bio) = local.submit(bio, self.now, &mut side.fx) {
            assert!(local.outstanding() > 0, "an idle reactor has no room for a bio");
            assert!(side.under_way.remove(&bio.cookie), "a bio came back twice");
        }
        self.collect();
    }

    pub(super) fn unplug(&mut self, side: usize) {
        let side = &mut self.sides[side];
        side.local
            .as_mut()
            .expect("attached")
            .unplug(self.now, &mut side.fx);
        self.collect();
    }

    pub(super) fn run(&mut self, side: usize) {
        let side = &mut self.sides[side];
        side.has_kick = false;
        side.local.as_mut().expect("attached").run(self.now, &mut side.fx);
        self.collect();
    }

    /// Ends one request of a driver, or one that it had let go of.
    pub(super) fn complete(&mut self, side: usize, which: usize, status: Status) {
        let mut hand = self.sides[side].hand.borrow_mut();
        let count = hand.issued.len() + hand.stale.len();
        if count == 0 {
            return;
        }
        let at = which % count;
        let live = hand.issued.len();
        let cookie = if at < live {
            self.drive.borrow_mut().give(status);
            hand.issued.remove(at)
        } else {
            hand.stale.remove(at - live)
        };
        hand.done.push(Done { cookie, status });
    }

    pub(super) fn answer(&mut self, side: usize, answer: Issued) {
        self.sides[side].hand.borrow_mut().answers.push_back(answer);
    }

    pub(super) fn let_go_of_late_requests(&mut self) {
        let mut drive = self.drive.borrow_mut();
        drive.lets_go = !drive.lets_go;
    }

    pub(super) fn wait(&mut self, time: Nanos) {
        self.now = self.now + time;
    }

    pub(super) fn freeze_begin(&mut self) {
        if self.frozen < NESTED_MAX {
            self.frozen += 1;
            self.queue.freeze_begin();
            self.kick_everybody();
        }
    }

    pub(super) fn freeze_end(&mut self) {
        if self.frozen > 0 {
            self.frozen -= 1;
            self.queue.freeze_end();
            self.kick_everybody();
        }
    }

    pub(super) fn quiesce_begin(&mut self) {
        if self.quiesced < NESTED_MAX {
            self.quiesced += 1;
            self.queue.quiesce_begin();
            assert!(
                self.queue.is_quiesced(),
                "nobody is issuing, so it is quiesced at once"
            );
            self.drive.borrow_mut().is_quiesced = true;
            self.kick_everybody();
        }
    }

    pub(super) fn quiesce_end(&mut self) {
        if self.quiesced > 0 {
            self.quiesced -= 1;
            self.drive.borrow_mut().is_quiesced = self.quiesced > 0;
            self.queue.quiesce_end();
            self.kick_everybody();
        }
    }

    /// Works exactly on a frozen, drained queue.
    pub(super) fn set_elevator(&mut self, kind: &'static ElevatorType) {
        let is_possible = self.queue.is_frozen() && self.queue.is_drained();
        let before = self.queue.elevator();
        let switched = self.queue.set_elevator(kind);
        assert_eq!(switched.is_ok(), is_possible);
        assert_eq!(self.queue.elevator(), if is_possible { kind } else { before });
        self.kick_everybody();
    }

    pub(super) fn set_tunable(&mut self, which: usize, value: u64) {
        let tunables = self.queue.tunables().expect("nobody is inside the gate");
        if let Some((name, _)) = tunables.get(which % tunables.len().max(1)) {
            let set = self.queue.set_tunable(name, value);
            // The value may be out of its range.
            let _ = set.expect("nobody is inside the gate");
        }
    }

    pub(super) fn set_depth(&mut self, depth: u32) {
        let is_possible = (1..=self.depth_max).contains(&depth);
        assert_eq!(self.queue.set_depth(depth).is_ok(), is_possible);
        self.kick_everybody();
    }

    /// Asserts what must hold between operations.
    pub(super) fn check(&self) {
        for side in &self.sides {
            let local = side.local.as_ref().expect("attached");
            local.check_invariants();
            assert_eq!(local.outstanding() as usize, side.under_way.len());
            let hand = side.hand.borrow();
            assert!(
                hand.issued.len() <= self.depth_max as usize,
                "deeper than the tags"
            );
            // A stale end may wait in `done` as well, so this is a bound.
            let at_driver = hand.issued.len() + hand.done.len();
            assert!(
                local.hctx_in_flight() as usize <= at_driver,
                "in flight, but with nobody"
            );
        }
    }

    /// Lets everything end: nothing is held back any more, and reactors run only if something wakes them.
    pub(super) fn finish(mut self) {
        while self.frozen > 0 {
            self.freeze_end();
        }
        while self.quiesced > 0 {
            self.quiesce_end();
        }
        for side in 0..self.sides.len() {
            self.sides[side].hand.borrow_mut().answers.clear();
            // A reactor that goes to sleep has unplugged.
            self.unplug(side);
        }
        while self.run_woken() || self.complete_all() || self.sleep() {
            self.check();
        }
        for side in &self.sides {
            assert!(side.under_way.is_empty(), "never ended: {:?}", side.under_way);
        }
        self.detach();
    }

    /// Everything is at rest: the queue drains at once and every reactor can leave.
    fn detach(self) {
        assert_eq!(self.queue.outstanding(), 0, "requests started and not ended");
        self.queue.freeze_begin();
        assert!(
            self.queue.is_drained(),
            "nothing is under way, but the queue does not drain"
        );
        for mut side in self.sides {
            let local = side.local.take().expect("attached");
            assert_eq!((local.outstanding(), local.hctx_in_flight()), (0, 0));
            assert!(local.detach().is_ok(), "a reactor at rest cannot leave");
        }
    }

    /// Runs those that an event or the time wakes until all sleep; whether there was one.
    fn run_woken(&mut self) -> bool {
        for round in 0..ROUNDS_MAX {
            let woken = self.sides.iter().position(|side| side.is_woken(self.now));
            let Some(side) = woken else {
                return round > 0;
            };
            self.run(side);
            self.unplug(side);
        }
        let why: Vec<_> = self.sides.iter().map(|side| side.why_woken(self.now)).collect();
        panic!("reactors run for ever, for a kick, an end, mail or the time: {why:?}");
    }

    /// Ends everything that drivers have; whether there was something.
    fn complete_all(&mut self) -> bool {
        let mut any = false;
        for side in 0..self.sides.len() {
            while self.has_requests(side) {
                self.complete(side, 0, Status::Ok);
                any = true;
            }
        }
        any
    }

    fn has_requests(&self, side: usize) -> bool {
        let hand = self.sides[side].hand.borrow();
        !hand.issued.is_empty() || !hand.stale.is_empty()
    }

    /// Sleeps until the first timer; whether there is one, and something to wait for.
    fn sleep(&mut self) -> bool {
        let is_waiting = self.sides.iter().any(|side| !side.under_way.is_empty());
        let wakeups = self.sides.iter();
        let first = wakeups
            .filter_map(|side| side.local.as_ref().expect("attached").next_wakeup())
            .min();
        let Some(first) = first.filter(|_| is_waiting) else {
            return false;
        };
        self.now = self.now.max(first);
        true
    }

    fn kick_everybody(&mut self) {
        let kicks = self.queue.everybody();
        self.kick(kicks);
    }

    fn kick(&mut self, mut kicks: ReactorSet) {
        while let Some(ReactorId(id)) = kicks.pop() {
            self.sides[usize::from(id)].has_kick = true;
        }
    }

    /// Takes effects in: every end is of a bio under way, with a status that somebody gave.
    fn collect(&mut self) {
        for index in 0..self.sides.len() {
            let side = &mut self.sides[index];
            for bio in side.fx.ended.drain(..) {
                assert!(
                    side.under_way.remove(&bio.cookie),
                    "bio {} ended twice",
                    bio.cookie
                );
                let is_known =
                    REFUSALS.contains(&bio.status) || self.drive.borrow().given.contains(&bio.status.errno());
                assert!(is_known, "nobody gave the status of {bio:?}");
            }
            let kicks = std::mem::take(&mut side.fx.kicks);
            self.kick(kicks);
        }
    }
}

impl Side {
    fn new(handle: QueueHandle, drive: &Rc<RefCell<Drive>>) -> Self {
        let hand = Rc::new(RefCell::new(Hand::default()));
        let driver = handle.owns_hctx().then(|| {
            let (hand, drive) = (Rc::clone(&hand), Rc::clone(drive));
            Box::new(HandDriver { hand, drive }) as Box<dyn HctxDriver>
        });
        Self {
            local: Some(handle.attach(driver)),
            hand,
            fx: Effects::default(),
            under_way: BTreeSet::new(),
            has_kick: false,
        }
    }

    /// Whether the reactor would not be asleep: a kick, a completion, mail, or its timer. A driver that has nothing is not
    /// asked, so stale ends may stay with it.
    fn is_woken(&self, now: Instant) -> bool {
        self.why_woken(now).contains(&true)
    }

    fn why_woken(&self, now: Instant) -> [bool; 4] {
        let local = self.local.as_ref().expect("attached");
        [
            self.has_kick,
            local.hctx_in_flight() > 0 && !self.hand.borrow().done.is_empty(),
            local.has_mail(),
            local.next_wakeup().is_some_and(|at| at <= now),
        ]
    }
}

fn config([reactors, tags, room, drive]: [u8; 4]) -> QueueConfig {
    let count = 1 + u16::from(reactors & 3);
    let mut config = QueueConfig::new("q", count);
    config.hctxs = 1 + u16::from(reactors >> 2 & 3) % count;
    if config.hctxs == count {
        // Library users' threads, which may stay away; but somebody always comes back.
        for (index, reactor) in config.reactors.iter_mut().enumerate().skip(1) {
            let is_event_loop = reactors >> (4 + index) & 1 == 0;
            *reactor = ReactorConfig { is_event_loop };
        }
    }
    let depth = 1 + u32::from(tags & 7);
    config.tags = if tags & 8 == 0 {
        TagMode::PerHctx(depth)
    } else {
        TagMode::Shared(depth)
    };
    config.elevator = sched::BUILT_IN[usize::from(tags >> 4) % sched::BUILT_IN.len()];
    config.requests_per_reactor = 1 + u32::from(room & 15);
    config.merges = room & 16 == 0;
    config.groups = GroupTree::flat(GROUPS);
    config.limits = limits(drive);
    config.disks = ["a", "b"]
        .into_iter()
        .zip(0..)
        .map(|(name, at)| disk(name, at))
        .collect();
    config
}

fn limits(drive: u8) -> Limits {
    let blocks = |bit: u8, blocks: u64| if drive & bit == 0 { 0 } else { blocks * BLOCK_BYTES };
    Limits {
        cache: drive & 1 != 0,
        fua: drive & 2 != 0,
        boundary: blocks(4, 8),
        discard_max: blocks(8, 10),
        zeroes_max: blocks(16, 6),
        transfer_max: if drive & 32 == 0 {
            1 << 20
        } else {
            5 * BLOCK_BYTES as u32
        },
        ..Limits::default()
    }
}

fn disk(name: &str, at: u64) -> DiskConfig {
    DiskConfig {
        name: name.into(),
        base: at * DISK_BLOCKS * BLOCK_BYTES,
        size: DISK_BLOCKS * BLOCK_BYTES,
        read_only: false,
        logical_block: 512,
    }
}

/// How bios end without a driver.
const REFUSALS: [Status; 4] = [Status::Ok, Status::Invalid, Status::NoSpace, Status::NotSupported];
