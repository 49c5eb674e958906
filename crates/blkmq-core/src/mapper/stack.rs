//! Decides the way of a mapped disk's bio on one thread: down to the drives' disks, whole or in parts, and back as one end.
//! Stands above the thread's queues ([`crate::local`]); `table` knows what lies where.
//!
//! ```text
//!                   ┌─ on one member ──► pass: the bio itself goes there, a frame remembers where it was ─┐
//!  bio ─► submit ───┤                                                                                     ├─► queues
//!                   └─ else ─► divide:   FLUSH, PREFLUSH: a flush of each leaf ─► then, for data, parts ──┘
//!  Effects::ended ◄── complete_parts ◄── ends of all parts awaited, the first error kept ◄── Effects::parts ◄───────┘
//! ```
//! A bio is cut as its members accept parts, and has a bounded number of them under way, so that a huge one is neither held in
//! memory nor in everybody's way. A read or write is cut where its bytes stop being neighbours; a discard or zeroing has one
//! part on each range of a drive below, since no map scatters what it has of one member. After an error no further part is
//! sent. Group and priority go along.
//!
//! A bio in parts keeps its group's number. If the group is removed meanwhile, parts that are still to be sent are its ancestor's,
//! or, should another have got the number at once, that one's.

use std::collections::VecDeque;
use std::sync::Arc;

use super::table::{Run, Table};
use crate::bio::{Bio, Data, Flags, Op, Origin, Parent, Passed, Status};
use crate::ids::DiskId;
use crate::local::LocalQueue;
use crate::queue::Effects;
use crate::time::Instant;

/// One thread's bios on mapped disks.
#[derive(Debug)]
pub struct Stack {
    table: Arc<Table>,
    /// Bios that were passed on whole: where they belong.
    frames: Box<[Frame]>,
    free_frames: Vec<u32>,
    /// Bios under way in parts.
    divided: Box<[Option<Divided>]>,
    free_divided: Vec<u32>,
    /// Those of them that have parts to be sent, each once.
    sending: VecDeque<u32>,
    /// Parts being settled: kept for the memory.
    parts: Vec<Bio>,
}

/// Where a bio was submitted.
#[derive(Clone, Copy, Debug, Default)]
struct Frame {
    disk: DiskId,
    offset: u64,
}

/// A bio under way in parts.
#[derive(Debug)]
struct Divided {
    bio: Bio,
    step: Step,
    /// How far this step's parts are sent: leaves flushed, bytes, or ways looked at.
    sent: u64,
    under_way: u32,
    /// On the list of those with parts to be sent.
    is_sending: bool,
    status: Status,
}

/// What a bio's parts are, now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// A flush for each leaf with a cache.
    Flush,
    /// Neighbouring bytes, from the first to the last.
    Bytes,
    /// A range for each way down to a leaf.
    Ranges,
}

/// What goes to a leaf.
struct Part {
    leaf: u32,
    bio: Bio,
    /// What [`Divided::sent`] is once it is sent.
    sent: u64,
}

/// The queues of one thread, in the order in which the table's leaves name them.
pub trait Queues {
    /// The queue with this number, for a bio that goes to it.
    fn queue(&mut self, index: usize) -> &mut LocalQueue;

    /// Unplugs all that something was submitted to.
    fn unplug(&mut self, now: Instant, fx: &mut Effects);
}

impl Queues for Vec<LocalQueue> {
    fn queue(&mut self, index: usize) -> &mut LocalQueue {
        &mut self[index]
    }

    fn unplug(&mut self, now: Instant, fx: &mut Effects) {
        self.iter_mut().for_each(|queue| queue.unplug(now, fx));
    }
}

impl Stack {
    /// A stack for up to `passed_max` bios that are passed on whole and `divided_max` in parts; more are refused for the moment.
    /// Without mapped disks it needs no memory.
    pub fn new(table: Arc<Table>, passed_max: u32, divided_max: u32) -> Self {
        let is_used = !table.disks().is_empty();
        let (passed_max, divided_max) = if is_used {
            (passed_max, divided_max)
        } else {
            (0, 0)
        };
        Self {
            table,
            frames: vec![Frame::default(); passed_max as usize].into(),
            free_frames: (0..passed_max).rev().collect(),
            divided: (0..divided_max).map(|_| None).collect(),
            free_divided: (0..divided_max).rev().collect(),
            sending: VecDeque::with_capacity(divided_max as usize),
            parts: Vec::new(),
        }
    }

    /// Takes a bio of a mapped disk in; `queues` are the thread's, in the order in which the table's leaves name them. As with
    /// [`LocalQueue::submit`], it goes on with the next [`LocalQueue::unplug`], and what the disk refuses ends at once.
    ///
    /// # Errors
    /// Gives the bio back if the members, or this stack, have no room now: submit it after another's end.
    pub fn submit(
        &mut self,
        bio: Bio,
        queues: &mut dyn Queues,
        now: Instant,
        fx: &mut Effects,
    ) -> Result<(), Bio> {
        if let Some((queue, to)) = self.redirect(&bio) {
            let sent = queues.queue(queue).submit_passed(bio, to, now, fx);
            return sent.map_err(|bio| self.take_back(bio));
        }
        let Some(disk) = self.table.disks().get(bio.disk.index()) else {
            fx.end(bio, Status::Invalid);
            return Ok(());
        };
        if let Err(status) = disk.check_bio(&bio) {
            fx.end(bio, status);
            return Ok(());
        }
        if bio.op != Op::Flush && !bio.flags.has(Flags::PREFLUSH) {
            let run = self.table.locate(bio.disk, bio.offset);
            if bio.len <= run.len {
                return self.pass(bio, run, queues, now, fx);
            }
        }
        self.submit_divided(bio, queues, now, fx)
    }

    /// Finds where a bio of the common kind goes that lies on one leaf. Returns the place of the leaf's
    /// queue, and what its [`LocalQueue::submit_passed`] wants to know; none if the bio is for
    /// [`Stack::submit`]. What the queue does not take is for [`Stack::take_back`].
    #[inline]
    pub fn redirect(&mut self, bio: &Bio) -> Option<(usize, Passed)> {
        let disk = self.table.disks().get(bio.disk.index())?;
        if !disk.is_plain(bio) {
            return None;
        }
        let run = self.table.locate(bio.disk, bio.offset);
        if bio.len > run.len {
            return None;
        }
        self.aim(bio, run)
    }

    /// Makes a bio that a queue has not taken what it was.
    pub fn take_back(&mut self, mut bio: Bio) -> Bio {
        if let Parent::Passed(index) = bio.origin.0 {
            self.frames[index as usize].restore(&mut bio);
            self.free_frames.push(index);
        }
        bio
    }

    /// Says whether [`Stack::complete_parts`] has something to do.
    #[inline]
    pub fn is_due(&self, fx: &Effects) -> bool {
        fx.passed > 0 || !fx.parts.is_empty() || !self.sending.is_empty()
    }

    /// Makes bios that were passed on whole, and have ended, what they were. Nobody may take from [`Effects::ended`] before;
    /// [`Stack::complete_parts`] does it, too.
    pub fn restore_passed(&mut self, fx: &mut Effects) {
        // Where they are: a copy would cost more than all else that is done for them here.
        fx.passed = 0;
        for bio in &mut fx.ended {
            if let Parent::Passed(index) = bio.origin.0 {
                self.frames[index as usize].restore(bio);
                self.free_frames.push(index);
            }
        }
    }

    /// Takes what has ended of the members' bios, sends parts that found no room before, and issues them. Call it when it
    /// [is due](Stack::is_due) after running or unplugging queues. Says whether it is to be called again soon, without an event.
    pub fn complete_parts(&mut self, queues: &mut dyn Queues, now: Instant, fx: &mut Effects) -> bool {
        for _ in 0..ROUNDS_MAX {
            self.take_ends(fx);
            if !self.send_all(queues, now, fx) {
                return false;
            }
            queues.unplug(now, fx);
        }
        true
    }

    /// How many bios are under way.
    pub fn outstanding(&self) -> usize {
        self.frames.len() - self.free_frames.len() + self.divided.len() - self.free_divided.len()
    }

    /// Asserts what must always hold between calls.
    ///
    /// # Panics
    /// If it does not hold.
    pub fn check_invariants(&self) {
        let sending = self.divided.iter().flatten().filter(|one| one.is_sending);
        assert_eq!(sending.count(), self.sending.len(), "bios with parts to be sent");
        let used = self.divided.iter().flatten().count();
        assert_eq!(
            used + self.free_divided.len(),
            self.divided.len(),
            "bios in parts"
        );
        for one in self.divided.iter().flatten() {
            assert!(one.under_way <= PARTS_MAX, "{} parts under way", one.under_way);
            assert!(
                one.is_sending || one.under_way > 0,
                "nothing will end {:?}",
                one.bio
            );
        }
    }

    /// Sends a bio as it is to the leaf that has its range.
    fn pass(
        &mut self,
        bio: Bio,
        to: Run,
        queues: &mut dyn Queues,
        now: Instant,
        fx: &mut Effects,
    ) -> Result<(), Bio> {
        let Some((queue, to)) = self.aim(&bio, to) else {
            return Err(bio);
        };
        let sent = queues.queue(queue).submit_passed(bio, to, now, fx);
        sent.map_err(|bio| self.take_back(bio))
    }

    /// Remembers what a bio was that goes to a leaf; none if too many have gone.
    #[inline(always)]
    fn aim(&mut self, bio: &Bio, to: Run) -> Option<(usize, Passed)> {
        let leaf = &self.table.leaves()[to.leaf as usize];
        let frame = self.free_frames.pop()?;
        self.frames[frame as usize] = Frame {
            disk: bio.disk,
            offset: bio.offset,
        };
        let passed = Passed {
            disk: leaf.disk,
            offset: to.offset,
            frame,
        };
        Some((leaf.queue.into(), passed))
    }

    /// Begins a bio that is a flush, waits for one, or has its bytes on several members.
    #[inline(never)]
    fn submit_divided(
        &mut self,
        bio: Bio,
        queues: &mut dyn Queues,
        now: Instant,
        fx: &mut Effects,
    ) -> Result<(), Bio> {
        let flushed = &self.table.disks()[bio.disk.index()].flushed;
        let flushes = bio.op == Op::Flush || bio.flags.has(Flags::PREFLUSH);
        let step = match flushed[..] {
            [] if bio.op == Op::Flush => {
                fx.end(bio, Status::Ok);
                return Ok(());
            }
            // The queue of the only one does it by itself.
            [leaf] if bio.op == Op::Flush => {
                let (offset, len) = (0, 0);
                return self.pass(bio, Run { leaf, offset, len }, queues, now, fx);
            }
            [_, ..] if flushes => Step::Flush,
            _ => data_step(bio.op),
        };
        let Some(index) = self.free_divided.pop() else {
            return Err(bio);
        };
        self.divided[index as usize] = Some(Divided {
            bio,
            step,
            sent: 0,
            under_way: 0,
            is_sending: true,
            status: Status::Ok,
        });
        self.send(index, queues, now, fx);
        let one = self.one(index);
        if one.is_sending && one.under_way == 0 {
            // Nothing is there to wait for: the submitter tries again when there is room.
            let bio = self.remove(index).bio;
            return Err(bio);
        }
        if one.is_sending {
            self.sending.push_back(index);
        }
        Ok(())
    }

    /// Takes what has ended, and ends or continues whom it belongs to.
    fn take_ends(&mut self, fx: &mut Effects) {
        if fx.passed > 0 {
            self.restore_passed(fx);
        }
        std::mem::swap(&mut self.parts, &mut fx.parts);
        let mut parts = std::mem::take(&mut self.parts);
        for part in parts.drain(..) {
            let Parent::Part(index) = part.origin.0 else {
                unreachable!("{:?} is no origin of a part", part.origin)
            };
            let one = self.one(index);
            one.under_way -= 1;
            one.status = one.status.and(part.status);
            self.step_over(index, fx);
        }
        self.parts = parts;
    }

    /// If all parts of a bio have ended, begins its next step, or ends it. Says whether it has more to send now.
    fn step_over(&mut self, index: u32, fx: &mut Effects) -> bool {
        let one = self.one(index);
        if one.is_sending || one.under_way > 0 {
            return false;
        }
        if one.step == Step::Flush && one.bio.op != Op::Flush && one.status.is_ok() {
            (one.step, one.sent, one.is_sending) = (data_step(one.bio.op), 0, true);
            self.sending.push_back(index);
            return true;
        }
        let Divided { bio, status, .. } = self.remove(index);
        fx.end(bio, status);
        false
    }

    /// Sends parts of all bios that have some, the oldest first. Says whether that got any further.
    fn send_all(&mut self, queues: &mut dyn Queues, now: Instant, fx: &mut Effects) -> bool {
        let mut any = false;
        for _ in 0..self.sending.len() {
            let index = self.sending.pop_front().expect("counted above");
            any |= self.send(index, queues, now, fx);
            if self.one(index).is_sending {
                self.sending.push_back(index);
            } else {
                any |= self.step_over(index, fx);
            }
        }
        any
    }

    /// Sends parts of one bio, as many as it may have and its members take. Says whether any was sent.
    fn send(&mut self, index: u32, queues: &mut dyn Queues, now: Instant, fx: &mut Effects) -> bool {
        let Self { table, divided, .. } = self;
        let one = divided[index as usize].as_mut().expect("it is under way");
        let mut any = false;
        while one.status.is_ok() {
            if one.under_way == PARTS_MAX {
                return any;
            }
            let Some(part) = one.next_part(table) else {
                break;
            };
            let leaf = &table.leaves()[part.leaf as usize];
            let bio = Bio {
                disk: leaf.disk,
                origin: Origin(Parent::Part(index)),
                ..part.bio
            };
            if queues.queue(leaf.queue.into()).submit(bio, now, fx).is_err() {
                return any;
            }
            one.sent = part.sent;
            one.under_way += 1;
            any = true;
        }
        one.is_sending = false;
        any
    }

    fn one(&mut self, index: u32) -> &mut Divided {
        self.divided[index as usize].as_mut().expect("it is under way")
    }

    fn remove(&mut self, index: u32) -> Divided {
        self.free_divided.push(index);
        self.divided[index as usize].take().expect("it is under way")
    }
}

impl Frame {
    /// Makes a bio that was passed on what it was.
    #[inline]
    fn restore(self, bio: &mut Bio) {
        bio.disk = self.disk;
        bio.offset = self.offset;
        bio.origin = Origin::default();
    }
}

impl Divided {
    /// Cuts the next part off; none if all is sent.
    fn next_part(&self, table: &Table) -> Option<Part> {
        let disk = self.bio.disk;
        match self.step {
            Step::Flush => {
                let leaf = *table.disks()[disk.index()].flushed.get(self.sent as usize)?;
                let bio = Bio {
                    op: Op::Flush,
                    prio: self.bio.prio,
                    group: self.bio.group,
                    ..Bio::default()
                };
                let sent = self.sent + 1;
                Some(Part { leaf, bio, sent })
            }
            Step::Bytes if self.sent == self.bio.len => None,
            Step::Bytes => {
                let run = table.locate(disk, self.bio.offset + self.sent);
                let len = run.len.min(self.bio.len - self.sent);
                Some(self.part(Run { len, ..run }, self.sent, self.sent + len))
            }
            Step::Ranges => {
                let (start, end) = (self.bio.offset, self.bio.end());
                let ways = self.sent as usize..table.ways(disk);
                let found = ways.into_iter().find_map(|way| {
                    let run = table.share(disk, way, start, end)?;
                    Some((run, way as u64 + 1))
                });
                let (run, sent) = found?;
                Some(self.part(run, 0, sent))
            }
        }
    }

    fn part(&self, run: Run, skip: u64, sent: u64) -> Part {
        let (data, skip) = match &self.bio.data {
            Data::Flat(piece) => (Data::Flat(piece.part(skip as u32, run.len as u32)), 0),
            other => (other.clone(), skip),
        };
        let bio = Bio {
            offset: run.offset,
            len: run.len,
            flags: self.bio.flags.without(Flags::PREFLUSH),
            prio: self.bio.prio,
            op: self.bio.op,
            group: self.bio.group,
            data,
            skip,
            ..Bio::default()
        };
        let leaf = run.leaf;
        Part { leaf, bio, sent }
    }
}

/// How an operation's bytes are cut.
fn data_step(op: Op) -> Step {
    if op.has_data() { Step::Bytes } else { Step::Ranges }
}

/// Parts of one bio under way at a time: enough for a transfer of 8 MiB in chunks of 64 KiB, few enough to leave room.
const PARTS_MAX: u32 = 128;
/// Rounds of ends and further parts in one call, where drivers complete inline: then others of this thread are due.
const ROUNDS_MAX: u32 = 16;
