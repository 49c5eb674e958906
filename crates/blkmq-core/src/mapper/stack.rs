//! The path of a mapped disk's bio on one thread: down to the drives' disks, whole or in parts, and back
//! as one completion. It is above the thread's queues ([`crate::local`]); `table` knows where bytes lie.
//!
//! ```text
//!                   ┌─ on one member ──► pass: the bio itself goes there, a frame remembers where it was ─┐
//!  bio ─► submit ───┤                                                                                     ├─► queues
//!                   └─ else ─► divide:   FLUSH, PREFLUSH: a flush of each leaf ─► then, for data, parts ──┘
//!  Effects::ended ◄── complete_parts ◄── ends of all parts awaited, the first error kept ◄── Effects::parts ◄───────┘
//! ```
//! A bio is split as its members accept parts, and has a bounded number of parts under way, so that a huge
//! bio neither fills memory nor delays others. A read or write is split where its bytes are no longer
//! contiguous; a discard or zeroing has one part for each range of a drive below, since no map scatters a
//! member's share. After an error no further parts are sent. Parts have the bio's group and priority.
//!
//! A bio in parts keeps its group's number. If the group is removed meanwhile, parts that are not sent yet
//! belong to its ancestor, or to another group that has got the number at once.

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
    /// The original places of bios that were passed on whole.
    frames: Box<[Frame]>,
    free_frames: Vec<u32>,
    /// Bios under way in parts.
    divided: Box<[Option<Divided>]>,
    free_divided: Vec<u32>,
    /// Those of them that have parts to be sent, each once.
    sending: VecDeque<u32>,
    /// Parts being handled; kept for its memory.
    parts: Vec<Bio>,
}

/// The place to which a bio was submitted.
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
    /// How far this step's parts are sent: leaves flushed, bytes, or ways examined.
    sent: u64,
    under_way: u32,
    /// It is in the list of bios with parts to be sent.
    is_sending: bool,
    status: Status,
}

/// What the parts of a bio are in its present step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// A flush for each leaf with a cache.
    Flush,
    /// Contiguous bytes, from the first to the last.
    Bytes,
    /// A range for each way down to a leaf.
    Ranges,
}

/// A part for a leaf.
struct Part {
    leaf: u32,
    bio: Bio,
    /// The value of [`Divided::sent`] once it is sent.
    sent: u64,
}

/// The queues of one thread, in the order in which the table's leaves name them.
pub trait Queues {
    /// The queue with this number, to submit a bio to.
    fn queue(&mut self, index: usize) -> &mut LocalQueue;

    /// Unplugs all queues that bios were submitted to.
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
    /// A stack for up to `passed_max` bios that are passed on whole and `divided_max` in parts; more are
    /// refused until others end. Without mapped disks it needs no memory.
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

    /// Submits a bio of a mapped disk; `queues` are the thread's, in the order in which the table's leaves
    /// name them. As with [`LocalQueue::submit`], the bio continues with the next [`LocalQueue::unplug`], and
    /// a bio that the disk refuses ends at once.
    ///
    /// # Errors
    /// Returns the bio if the members, or this stack, have no room now: submit it again after another one's end.
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

    /// Finds where a common bio goes that lies on one leaf. Returns the index of the leaf's queue, and the
    /// place for its [`LocalQueue::submit_passed`]; none if the bio must go to [`Stack::submit`]. If the
    /// queue does not take the bio, call [`Stack::take_back`].
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

    /// Restores a bio that a queue has not taken.
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

    /// Restores bios that were passed on whole and have ended. No bio may be taken from [`Effects::ended`]
    /// before; [`Stack::complete_parts`] does it, too.
    pub fn restore_passed(&mut self, fx: &mut Effects) {
        // In place: a copy would cost more than all other work for them here.
        fx.passed = 0;
        for bio in &mut fx.ended {
            if let Parent::Passed(index) = bio.origin.0 {
                self.frames[index as usize].restore(bio);
                self.free_frames.push(index);
            }
        }
    }

    /// Takes the ended bios of the members, sends parts that found no room before, and issues them. Call it
    /// when it [is due](Stack::is_due) after running or unplugging queues. Says whether it must be called
    /// again soon, without an event.
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

    /// Number of bios under way.
    pub fn outstanding(&self) -> usize {
        self.frames.len() - self.free_frames.len() + self.divided.len() - self.free_divided.len()
    }

    /// Asserts the invariants that hold between calls.
    ///
    /// # Panics
    /// If an invariant does not hold.
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

    /// Sends a bio whole to the leaf that has its range.
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

    /// Saves the original place of a bio that goes to a leaf; none if too many are under way.
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

    /// Starts a bio that is a flush, waits for a flush, or has its bytes on several members.
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
            // The queue of the only leaf does it by itself.
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
            // There is no part to wait for: the submitter tries again when there is room.
            let bio = self.remove(index).bio;
            return Err(bio);
        }
        if one.is_sending {
            self.sending.push_back(index);
        }
        Ok(())
    }

    /// Takes the ended bios, and ends or continues the bios that they belong to.
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

    /// If all parts of a bio have ended, starts its next step, or ends it. Says whether it has more to send now.
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

    /// Sends parts of all bios that have some, the oldest first. Says whether any was sent.
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

    /// Sends parts of one bio, as many as it may have under way and its members take. Says whether any was sent.
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
    /// Restores a bio that was passed on.
    #[inline]
    fn restore(self, bio: &mut Bio) {
        bio.disk = self.disk;
        bio.offset = self.offset;
        bio.origin = Origin::default();
    }
}

impl Divided {
    /// Splits the next part off; none if all parts are sent.
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

/// How an operation's bytes are split.
fn data_step(op: Op) -> Step {
    if op.has_data() { Step::Bytes } else { Step::Ranges }
}

/// Parts of one bio under way at a time: enough for a transfer of 8 MiB in chunks of 64 KiB, few enough to
/// leave room.
const PARTS_MAX: u32 = 128;
/// Rounds of ends and further parts in one call, if drivers complete inline: then others on this thread get
/// their turn.
const ROUNDS_MAX: u32 = 16;
