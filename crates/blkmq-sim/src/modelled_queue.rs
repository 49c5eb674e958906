//! A queue in virtual time for a caller's own bios: the real queue on one reactor, with one modelled
//! drive, without faults. Calls cost nothing, so only the scheduler's decisions and the drive's time are
//! shown. `blkmq-lab replay --simulate` plays recordings on it; `drive::model` decides how long each
//! command takes.

use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::rc::Rc;

use blkmq_core::bio::{Bio, Op, Status};
use blkmq_core::driver::{Done, HctxDriver, Issued};
use blkmq_core::group::{GroupTree, ROOT, WEIGHT_DEFAULT};
use blkmq_core::ids::{Cookie, DiskId, GroupId};
use blkmq_core::limits::Limits;
use blkmq_core::local::LocalQueue;
use blkmq_core::queue::{ConfigError, DiskConfig, Effects, Queue, QueueConfig, TagMode};
use blkmq_core::request::Request;
use blkmq_core::sched::ElevatorType;
use blkmq_core::time::Instant;

use crate::drive::model::{Arm, Model, Work};
use crate::rng::Rng;

/// The drive, as its queue must know it.
#[derive(Clone, Debug)]
pub struct Spec {
    /// How long its commands take. It starts them in the order in which they arrive.
    pub model: Model,
    /// How many commands it takes, 1 to 65536; commands that it does not serve yet wait inside it.
    pub tags: u32,
}

/// A queue with its disks, its drive and its clock.
pub struct ModelledQueue {
    queue: LocalQueue,
    drive: Rc<RefCell<Drive>>,
    fx: Effects,
    now: Instant,
}

impl ModelledQueue {
    /// Makes disks of these sizes in bytes, one after the other, on one drive, each with its own
    /// group.
    ///
    /// # Errors
    /// If there can be no such queue: too many disks, or their sum is too large.
    pub fn new(
        spec: &Spec,
        sched: &'static ElevatorType,
        sizes: &[u64],
        seed: u64,
    ) -> Result<Self, ConfigError> {
        let mut config = QueueConfig::new("modelled", 1);
        config.tags = TagMode::PerHctx(spec.tags);
        config.requests_per_reactor = REQUESTS;
        config.elevator = sched;
        config.limits = limits(&spec.model);
        config.groups = GroupTree::new(1 + sizes.len() as u32);
        let mut base = 0_u64;
        for (number, &size) in sizes.iter().enumerate() {
            let group = config.groups.create(ROOT, WEIGHT_DEFAULT).expect("room was made");
            debug_assert_eq!(group, Self::place(number).1, "groups are numbered as disks are");
            config.disks.push(DiskConfig {
                name: number.to_string(),
                base,
                size,
                read_only: false,
                logical_block: config.limits.logical_block,
            });
            base = base.saturating_add(size);
        }
        let (_, handles) = Queue::new(config)?;
        let drive = Rc::new(RefCell::new(Drive::new(spec.model.clone(), base, seed)));
        let driver = Box::new(Modelled(Rc::clone(&drive)));
        let handle = handles.into_iter().next().expect("one reactor has one handle");
        Ok(Self {
            queue: handle.attach(Some(driver)),
            drive,
            fx: Effects::default(),
            now: Instant(0),
        })
    }

    /// The disk with this number, and its group.
    pub fn place(number: usize) -> (DiskId, GroupId) {
        (DiskId(number as u32), GroupId(number as u32 + 1))
    }

    /// The present time, which begins at 0.
    pub fn now(&self) -> Instant {
        self.now
    }

    /// Submits a bio. Bios submitted before the next wait form a batch, and are merged.
    ///
    /// # Errors
    /// Returns the bio if too many wait: submit it again after another bio has ended.
    pub fn submit(&mut self, bio: Bio) -> Result<(), Bio> {
        self.queue.submit(bio, self.now, &mut self.fx)
    }

    /// Advances the time to `until`, or until a bio has ended; appends ended bios to `ended`.
    ///
    /// # Panics
    /// If no bio is under way and no time is given, since it would never return.
    pub fn wait(&mut self, until: Option<Instant>, ended: &mut Vec<Bio>) {
        loop {
            self.turn(ended);
            if !ended.is_empty() || until.is_some_and(|until| until <= self.now) {
                return;
            }
            let next = [self.drive.borrow().next_end(), self.queue.next_wakeup(), until];
            let next = next.into_iter().flatten().min();
            self.now = next.expect("something is under way").max(self.now);
        }
    }

    /// Does everything that is due now.
    fn turn(&mut self, ended: &mut Vec<Bio>) {
        loop {
            self.queue.unplug(self.now, &mut self.fx);
            self.fx.kicks = Default::default();
            self.queue.run(self.now, &mut self.fx);
            let is_quiet = self.fx.ended.is_empty() && self.fx.kicks.is_empty();
            ended.append(&mut self.fx.ended);
            if is_quiet {
                return;
            }
        }
    }
}

impl std::fmt::Debug for ModelledQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ModelledQueue")
            .field("now", &self.now)
            .finish_non_exhaustive()
    }
}

/// The limits of a drive with a write-back cache that accepts discards and zeroing without
/// transferring data.
fn limits(model: &Model) -> Limits {
    Limits {
        discard_max: DISCARD_MAX,
        zeroes_max: DISCARD_MAX,
        cache: true,
        fua: true,
        rotational: matches!(model, Model::Rotating { .. }),
        ..Limits::default()
    }
}

/// When the commands of a drive end.
struct Drive {
    model: Model,
    rng: Rng,
    arm: Arm,
    /// When each of its units is free; empty if it has as many as it needs.
    free: BinaryHeap<Reverse<Instant>>,
    ends: BinaryHeap<Reverse<(Instant, u64)>>,
    /// Blocks in its cache.
    owed: u64,
}

impl Drive {
    fn new(model: Model, size: u64, seed: u64) -> Self {
        let units = match model {
            Model::Null { .. } => 0,
            _ => model.units(),
        };
        Self {
            model,
            rng: Rng::new(seed, STREAM),
            arm: Arm::new(size),
            free: (0..units).map(|_| Reverse(Instant(0))).collect(),
            ends: BinaryHeap::new(),
            owed: 0,
        }
    }

    fn take(&mut self, rq: &Request, cookie: Cookie, now: Instant) {
        let work = Work {
            op: rq.op(),
            position: rq.position(),
            // A discard or zeroing takes the same time for any length.
            len: if moves_data(rq.op()) { rq.len() } else { 0 },
            owed: self.owed,
        };
        match work.op {
            Op::Write => self.owed = (self.owed + work.len.div_ceil(BLOCK)).min(OWED_MAX),
            Op::Flush => self.owed = 0,
            _ => {}
        }
        let free = self.free.pop();
        let start = free.map_or(now, |Reverse(free)| free.max(now));
        let end = start + self.model.service(&work, start, &mut self.arm, &mut self.rng);
        self.free.extend(free.map(|_| Reverse(end)));
        self.ends.push(Reverse((end, cookie.raw())));
    }

    fn next_end(&self) -> Option<Instant> {
        self.ends.peek().map(|Reverse((end, _))| *end)
    }
}

/// The driver between the queue and the drive.
struct Modelled(Rc<RefCell<Drive>>);

impl HctxDriver for Modelled {
    fn issue(&mut self, rq: &Request, cookie: Cookie, _last: bool, now: Instant) -> Issued {
        self.0.borrow_mut().take(rq, cookie, now);
        Issued::Queued
    }

    fn reap(&mut self, now: Instant, done: &mut Vec<Done>) {
        let mut drive = self.0.borrow_mut();
        while drive.next_end().is_some_and(|end| end <= now) {
            let ended = drive.ends.pop();
            done.extend(ended.map(|Reverse((_, cookie))| Done {
                cookie: Cookie::from_raw(cookie),
                status: Status::Ok,
            }));
        }
    }

    fn next_event(&self) -> Option<Instant> {
        self.0.borrow().next_end()
    }
}

fn moves_data(op: Op) -> bool {
    matches!(op, Op::Read | Op::Write)
}

/// The most requests, parts of bios, under way, and the most bios that may wait in addition.
const REQUESTS: u32 = 4096;
/// Bytes of one discard, or of one command that zeroes.
const DISCARD_MAX: u64 = 1 << 30;
/// The unit in which a flush writes.
const BLOCK: u64 = 4096;
/// The most blocks that a flush waits for, 1 MiB: beyond that the drive writes its cache back in
/// the background.
const OWED_MAX: u64 = 256;
const STREAM: u64 = 1;

#[cfg(test)]
mod tests {
    use blkmq_core::sched;
    use blkmq_core::time::Nanos;

    use super::*;

    const FLASH: Model = Model::Flash {
        units: 2,
        read: Nanos::from_micros(80),
        write: Nanos::from_micros(20),
        spread: 0,
    };

    fn stage(model: Model, tags: u32) -> ModelledQueue {
        let spec = Spec { model, tags };
        ModelledQueue::new(&spec, sched::NONE, &[1 << 30, 1 << 20], 1).expect("a possible queue")
    }

    fn bio(op: Op, disk: usize, offset: u64) -> Bio {
        let (disk, group) = ModelledQueue::place(disk);
        let len = if op == Op::Flush { 0 } else { 4096 };
        Bio {
            op,
            disk,
            group,
            offset,
            len,
            ..Bio::default()
        }
    }

    /// When each of these bios, submitted together, ends, in the order of the ends.
    fn ends(queue: &mut ModelledQueue, bios: Vec<Bio>) -> Vec<u64> {
        let mut left = bios.len();
        bios.into_iter()
            .for_each(|bio| queue.submit(bio).expect("there is room"));
        let (mut ended, mut times) = (Vec::new(), Vec::new());
        while left > 0 {
            queue.wait(None, &mut ended);
            left -= ended.len();
            let at = queue.now().0;
            times.extend(ended.drain(..).map(|bio| {
                assert!(bio.status.is_ok(), "{bio:?}");
                at
            }));
        }
        times
    }

    #[test]
    fn request_waits_until_a_unit_is_free() {
        let reads = || (0..4).map(|number| bio(Op::Read, 0, number << 20)).collect();
        let times = ends(&mut stage(FLASH, 8), reads());
        assert_eq!(times, [80_000, 80_000, 160_000, 160_000]);
        assert_eq!(
            ends(&mut stage(FLASH, 1), reads()),
            [80_000, 160_000, 240_000, 320_000]
        );
    }

    #[test]
    fn flush_pays_for_what_was_written_and_a_second_one_does_not() {
        let mut queue = stage(FLASH, 8);
        let writes = (0..3).map(|number| bio(Op::Write, 1, number << 16)).collect();
        assert_eq!(ends(&mut queue, writes).last(), Some(&40_000));
        assert_eq!(ends(&mut queue, vec![bio(Op::Flush, 1, 0)]), [120_000]);
        assert_eq!(ends(&mut queue, vec![bio(Op::Flush, 1, 0)]), [140_000]);
    }

    #[test]
    fn time_passes_to_where_it_is_asked_for_and_no_farther() {
        let mut queue = stage(FLASH, 8);
        let mut ended = Vec::new();
        queue.wait(Some(Instant(5_000)), &mut ended);
        queue.submit(bio(Op::Read, 0, 0)).expect("there is room");
        queue.wait(Some(Instant(50_000)), &mut ended);
        assert_eq!((queue.now(), ended.len()), (Instant(50_000), 0));
        queue.wait(Some(Instant(500_000)), &mut ended);
        assert_eq!((queue.now(), ended.len()), (Instant(85_000), 1));
    }
}
