//! A hardware context of a file drive: it makes each request an entry of the reactor's ring (or of the
//! one of `polled`), and chooses the memory that the entry names. One hardware context belongs to one
//! reactor; `slot` decides what follows an entry's completion.

mod entries;
mod waiting;

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use blkmq_core::bio::{Op, Status};
use blkmq_core::driver::{DisksError, Done, HctxDriver, Issued, TimedOut};
use blkmq_core::ids::{Cookie, DiskId};
use blkmq_core::request::Request;
use blkmq_core::time::Instant;
use blkmq_host::ring::{Completion, RingClient, RingHandle, USER_MAX};

use super::bounce::Bounces;
use super::device::{SEGMENTS_MAX, Shared};
use super::disks::Disks;
use super::part::Part;
use super::polled::Polled;
use super::slot::{Memory, Next, Slot, Step};
use super::sys::{self, Vectors};
use blkmq_host::block_locks::Announced;
pub(super) use entries::Target;
use waiting::BLOCKS;

/// The driver's side of one hardware context.
pub(crate) struct FileHctx {
    ring_client: RingClient,
    device: Arc<Shared>,
    /// The device's disks, as this context knew them at the last change.
    disks: Disks,
    /// The file of each disk, as the ring names it.
    targets: Vec<Target>,
    /// The ring for polled devices, from when polling is switched on until its last request has
    /// ended.
    polled: Option<Polled>,
    /// A request under way for each tag.
    slots: Box<[Slot]>,
    /// Taken by [`Drop`] when the kernel may still use it; otherwise always there.
    ring_memory: Option<RingMemory>,
    in_flight: u32,
    /// The writes under way, for others to see.
    announced: Arc<Announced>,
    /// Requests that wait for blocks of their disk or for an area, in order of arrival.
    waiting: Vec<usize>,
    /// The timer after which they are tried again is set.
    is_timer_set: bool,
    /// Requests that the latest reap found to have failed, and the bytes transferred before the
    /// failure.
    partial: Vec<(Cookie, u64)>,
    /// Entries pushed in this turn that this context has not submitted.
    pushed: u32,
    completions: Vec<Completion>,
    /// The number of this turn, and of the one in which the end of each disk's file was looked at last.
    turn: u64,
    looked_in: Vec<u64>,
}

/// Memory that entries of the ring name beside clients' memory.
struct RingMemory {
    vectors: Vectors,
    bounces: Bounces,
}

impl FileHctx {
    /// Makes a context for tags below `depth` on the reactor of `ring`.
    pub(super) fn new(device: Arc<Shared>, ring: &RingHandle, depth: u32) -> io::Result<Self> {
        let ring_memory = RingMemory {
            vectors: Vectors::new(depth as usize * SEGMENTS_MAX),
            bounces: Bounces::new()?,
        };
        let mut hctx = Self {
            ring_client: ring.open_client(),
            disks: Disks::default(),
            targets: Vec::new(),
            polled: None,
            slots: vec![Slot::IDLE; depth as usize].into(),
            ring_memory: Some(ring_memory),
            partial: Vec::with_capacity(depth as usize),
            in_flight: 0,
            announced: device.writers.add(depth),
            waiting: Vec::with_capacity(depth as usize),
            is_timer_set: false,
            pushed: 0,
            completions: Vec::with_capacity(depth as usize),
            turn: 0,
            looked_in: Vec::new(),
            device,
        };
        hctx.ring_client.reserve(depth as usize);
        hctx.take_disks();
        Ok(hctx)
    }

    /// The disks and files that it knows.
    #[cfg(feature = "qcow2")]
    pub(crate) fn disks(&self) -> &Disks {
        &self.disks
    }

    /// Registers the files of the present disks with the ring, and of no others.
    fn take_disks(&mut self) {
        let disks = self.device.disks();
        self.targets.resize(disks.len(), Target::NONE);
        self.looked_in.resize(disks.len(), 0);
        for (id, target) in (0..).map(DiskId).zip(&mut self.targets) {
            let (old, new) = (self.disks.get(id), disks.get(id));
            if old.map(Arc::as_ptr) == new.map(Arc::as_ptr) {
                continue;
            }
            target.unregister(self.ring_client.ring());
            *target = new.map_or(Target::NONE, |disk| Target::new(disk, self.ring_client.ring()));
            if let Some(polled) = &mut self.polled {
                polled.forget(id);
            }
        }
        self.disks = disks;
    }

    #[inline]
    fn start(&mut self, rq: &Part<'_>, cookie: Cookie, now: Instant) -> Result<(), Issued> {
        let number = cookie.tag().index();
        let disk = self.disks.get(rq.disk).ok_or(Issued::Done(Status::Invalid))?;
        debug_assert_eq!(
            self.slots[number].step,
            Step::Idle,
            "tag {number} is issued twice"
        );
        let mut slot = Slot::new(rq, cookie);
        if slot.op.is_write() {
            disk.look_before_write(now, rq.offset + rq.len);
        }
        if let Some(status) = slot.start(disk) {
            return Err(Issued::Done(status));
        }
        if slot.op.has_data() {
            slot.memory = self.memory_of(rq, &mut slot, number)?;
        }
        let disk = self.disks.of(slot.disk);
        // A scheduler needs a drive that is busy for a while: else there is nothing to hold back.
        if disk.is_in_memory && !rq.is_ordered && slot.is_read_at_once(disk, now) {
            disk.note_success(now);
            return Err(Issued::Done(Status::Ok));
        }
        let polled = self.polled.as_ref();
        slot.is_polled = polled.is_some_and(|polled| polled.takes(&slot, disk));
        self.slots[number] = slot;
        self.in_flight += 1;
        self.lend_zeroes(number);
        match self.may_go(number) {
            true => self.push(number, now),
            false => self.wait(number),
        }
        Ok(())
    }

    /// Gives a part of a zeroing that is written its memory.
    #[inline]
    fn lend_zeroes(&mut self, number: usize) {
        let slot = &mut self.slots[number];
        if slot.op.has_data() || slot.step != Step::Transfer {
            return;
        }
        let disk = self.disks.of(slot.disk);
        let zeroes = self.device.zeroes.lend(0..slot.len as usize);
        if !disk.is_odd(slot.offset, slot.len) {
            slot.memory = Memory::Flat(zeroes);
            return;
        }
        let first = number * SEGMENTS_MAX;
        ring_memory(&mut self.ring_memory).vectors.set(first, zeroes);
        slot.memory = Memory::List(first..first + 1);
        slot.widen(disk.range());
    }

    /// Begins with the next part of a zeroing.
    #[cold]
    fn begin_part(&mut self, number: usize, now: Instant) -> Option<Done> {
        self.release(number);
        let slot = &mut self.slots[number];
        if let Memory::Bounced(area, _) = std::mem::take(&mut slot.memory) {
            ring_memory(&mut self.ring_memory).bounces.put(area);
        }
        if slot.is_cancelled {
            return Some(self.end(number, Status::Timeout, now));
        }
        self.lend_zeroes(number);
        match self.may_go(number) {
            true => self.push(number, now),
            false => self.wait(number),
        }
        None
    }

    /// Pushes the entry for a slot's step to the ring of the slot.
    #[inline]
    fn push(&mut self, number: usize, now: Instant) {
        let slot = &mut self.slots[number];
        slot.pushed(self.disks.of(slot.disk), now);
        let slot = &self.slots[number];
        if let Some(polled) = self.polled.as_ref().filter(|_| slot.is_polled) {
            let entry = self.entry(slot, polled.target(slot));
            sys::push(&polled.ring_client, entry, number as u64);
            self.polled.as_mut().expect("looked at above").pushed();
        } else {
            let entry = self.entry(slot, self.targets[slot.disk as usize]);
            sys::push(&self.ring_client, entry, number as u64);
        }
    }

    /// Decides which memory the kernel is to use for a transfer.
    #[inline]
    fn memory_of(&mut self, rq: &Part<'_>, slot: &mut Slot, number: usize) -> Result<Memory, Issued> {
        let target = self.targets[rq.disk.index()];
        let disk = self.disks.of(slot.disk);
        let (block, is_odd) = (disk.range(), disk.is_odd(rq.offset, rq.len));
        if let Some(piece) = rq.single_piece()
            && u64::from(piece.len()) == rq.len
            && target.can_use(piece)
            && !is_odd
        {
            return Ok(Memory::Flat(piece));
        }
        self.memory_of_pieces(rq, slot, number, block, is_odd)
    }

    fn memory_of_pieces(
        &mut self,
        rq: &Part<'_>,
        slot: &mut Slot,
        number: usize,
        block: u32,
        is_odd: bool,
    ) -> Result<Memory, Issued> {
        let target = self.targets[rq.disk.index()];
        let length_mask = u64::from(block) - 1;
        let vectors = &mut ring_memory(&mut self.ring_memory).vectors;
        let first = number * SEGMENTS_MAX;
        let (mut count, mut len, mut usable) = (0, 0, true);
        rq.for_each_piece(|piece| {
            if count < SEGMENTS_MAX {
                vectors.set(first + count, piece);
            }
            count += 1;
            len += u64::from(piece.len());
            usable &= target.can_use(piece) && u64::from(piece.len()) & length_mask == 0;
        });
        if len != rq.len || count > SEGMENTS_MAX {
            return Err(Issued::Done(Status::Invalid));
        }
        let row = first..first + count;
        if usable && !is_odd {
            return Ok(Memory::List(row));
        }
        if is_odd {
            slot.widen(block);
        }
        let RingMemory { vectors, bounces } = ring_memory(&mut self.ring_memory);
        let Some(area) = bounces.take(slot.len) else {
            // All areas belong to requests in flight here, each of which will return one.
            return Err(Issued::DeviceResource);
        };
        if rq.op == Op::Write && !is_odd {
            vectors.gather(row.clone(), bounces.lend(area, 0..len));
        }
        Ok(Memory::Bounced(area, row))
    }

    /// Looks where the files end whose requests have made a step, once for each: nothing of that is believed before.
    fn look_at_ends(&mut self, completions: &[Completion], now: Instant) {
        self.turn += 1;
        for completion in completions {
            let Some(slot) = self.slots.get(completion.user as usize) else {
                // No slot's.
                continue;
            };
            let looked_in = &mut self.looked_in[slot.disk as usize];
            if std::mem::replace(looked_in, self.turn) < self.turn {
                self.disks.of(slot.disk).look_after(now);
            }
        }
    }

    /// Handles the result of a slot's entry. Returns how the request ended, if it did.
    fn take_result(&mut self, number: usize, result: i32, now: Instant) -> Option<Done> {
        let slot = &mut self.slots[number];
        let disk = self.disks.of(slot.disk);
        let (was_polled, step) = (slot.is_polled, slot.step);
        let next = match slot.take_result(result, disk, now) {
            // Looked at since.
            Next::End(Status::Ok) | Next::Pad(_)
                if slot.op != Op::Flush && disk.has_lost(slot.range().end) =>
            {
                Next::End(disk.refuse_lost())
            }
            next => next,
        };
        if was_polled && let Some(polled) = &mut self.polled {
            polled.completed(matches!(next, Next::End(_)));
        }
        match next {
            Next::Submit(moved) => {
                if let Memory::List(row) = &mut slot.memory {
                    ring_memory(&mut self.ring_memory)
                        .vectors
                        .advance(row, moved as usize);
                }
                if (step, slot.step) == (Step::Fetch, Step::Transfer) {
                    self.change(number);
                }
                self.push(number, now);
                None
            }
            Next::Widen => {
                self.widen(number);
                None
            }
            Next::Part => self.begin_part(number, now),
            Next::Pad(from) => {
                if let Memory::Bounced(area, _) = slot.memory {
                    let bounces = &ring_memory(&mut self.ring_memory).bounces;
                    sys::zero(bounces.lend(area, from..slot.len));
                }
                Some(self.end(number, Status::Ok, now))
            }
            Next::End(status) => Some(self.end(number, status, now)),
        }
    }

    /// Ends a request.
    fn end(&mut self, number: usize, status: Status, now: Instant) -> Done {
        self.release(number);
        let slot = std::mem::replace(&mut self.slots[number], Slot::IDLE);
        if status.is_ok() {
            self.disks.of(slot.disk).note_success(now);
        }
        self.in_flight -= 1;
        let is_lost = || self.disks.of(slot.disk).has_lost(slot.offset + slot.moved);
        if !status.is_ok() && slot.keeps_what_moved() && !is_lost() {
            self.partial.push((slot.cookie, slot.moved));
        }
        self.end_bounce(&slot, status);
        Done {
            cookie: slot.cookie,
            status,
        }
    }

    /// Puts the client's data over what was read of the blocks around it.
    fn change(&mut self, number: usize) {
        let slot = &self.slots[number];
        if let Memory::Bounced(area, row) = &slot.memory {
            let RingMemory { vectors, bounces } = ring_memory(&mut self.ring_memory);
            vectors.gather(row.clone(), bounces.lend(*area, slot.data.clone()));
        }
    }

    /// Copies what was read to the client's memory and returns the area.
    fn end_bounce(&mut self, slot: &Slot, status: Status) {
        let Memory::Bounced(area, row) = &slot.memory else {
            return;
        };
        let RingMemory { vectors, bounces } = ring_memory(&mut self.ring_memory);
        if slot.op == Op::Read && status.is_ok() {
            vectors.scatter(row.clone(), bounces.lend(*area, slot.data.clone()));
        }
        bounces.put(*area);
    }
}

impl FileHctx {
    /// Starts a part of a request; see [`HctxDriver::issue`].
    #[inline]
    pub(crate) fn issue_part(&mut self, part: &Part<'_>, cookie: Cookie, last: bool, now: Instant) -> Issued {
        let issued = match self.start(part, cookie, now) {
            Ok(()) => {
                self.pushed += 1;
                Issued::Queued
            }
            Err(answer) => answer,
        };
        if self.pushed >= SUBMIT_AT {
            // The device starts on these while the rest of the batch is prepared.
            self.pushed = 0;
            self.ring_client.ring().submit();
            self.commit();
        } else if last {
            self.commit();
        }
        issued
    }
}

impl HctxDriver for FileHctx {
    fn issue(&mut self, rq: &Request, cookie: Cookie, last: bool, now: Instant) -> Issued {
        self.issue_part(&Part::whole(rq), cookie, last, now)
    }

    /// The reactor submits its own ring when it waits; it does not know the other ring.
    fn commit(&mut self) {
        if let Some(polled) = &self.polled {
            polled.ring_client.ring().submit();
        }
    }

    fn reap(&mut self, now: Instant, done: &mut Vec<Done>) {
        // A new turn: entries pushed in the last one have been submitted.
        self.pushed = 0;
        self.partial.clear();
        let mut completions = std::mem::take(&mut self.completions);
        self.ring_client.take(&mut completions);
        if let Some(polled) = &self.polled {
            polled.look(&mut completions);
        }
        self.look_at_ends(&completions, now);
        for completion in completions.drain(..) {
            match completion.user {
                CANCEL => {}
                BLOCKS => self.is_timer_set = false,
                user => done.extend(self.take_result(user as usize, completion.result, now)),
            }
        }
        self.completions = completions;
        if !self.waiting.is_empty() {
            self.retry(now, done);
        }
        if let Some(polled) = &mut self.polled {
            let ended = polled.take_ended();
            if ended > 0 {
                // Relaxed: a counter, which orders nothing.
                self.device.ended_polled.fetch_add(ended, Ordering::Relaxed);
            }
            // The rest of short transfers.
            polled.ring_client.ring().submit();
        }
    }

    /// Devices that can be polled get a ring for that. Requests of others complete in the reactor's
    /// ring, where checking costs no system call: for them only the reactor's way of waiting
    /// changes.
    fn set_polled(&mut self, on: bool) -> bool {
        if on && self.polled.is_none() {
            self.polled = Polled::open(&self.disks, self.slots.len() as u32).unwrap_or_else(|error| {
                tracing::warn!(
                    "file driver: devices are not polled, since there is no ring for that: {error}"
                );
                None
            });
        }
        if let Some(polled) = &mut self.polled {
            polled.set_open(on);
        }
        if let Some(polled) = self.polled.take_if(|polled| polled.is_over()) {
            polled.let_go();
        }
        on || self.polled.is_some()
    }

    fn refresh_disks(&mut self) -> Result<(), DisksError> {
        self.take_disks();
        Ok(())
    }

    fn done_before(&mut self, cookie: Cookie) -> u64 {
        let known = self.partial.iter().find(|(partial, _)| *partial == cookie);
        known.map_or(0, |(_, moved)| *moved)
    }

    /// Asks the kernel to cancel; until it has, it may use the buffers.
    fn timed_out(&mut self, cookie: Cookie) -> TimedOut {
        let number = cookie.tag().index();
        let slot = &mut self.slots[number];
        if slot.step == Step::Idle || slot.cookie != cookie {
            return TimedOut::Ended;
        }
        if !slot.is_cancelled {
            slot.is_cancelled = true;
            match self.polled.as_ref().filter(|_| slot.is_polled) {
                Some(polled) => polled.ring_client.push_cancel(number as u64, CANCEL),
                None => self.ring_client.push_cancel(number as u64, CANCEL),
            }
            self.commit();
        }
        TimedOut::Wait
    }
}

impl Drop for FileHctx {
    fn drop(&mut self) {
        self.device.writers.remove(&self.announced);
        if self.in_flight > 0 {
            tracing::error!(
                "file driver: a hardware context ends with {} requests under way; the memory they use is not freed",
                self.in_flight
            );
            std::mem::forget(self.ring_memory.take());
            std::mem::forget(Arc::clone(&self.device));
            return;
        }
        self.targets
            .iter()
            .for_each(|target| target.unregister(self.ring_client.ring()));
        if let Some(polled) = &self.polled {
            polled.let_go();
        }
    }
}

fn ring_memory(ring_memory: &mut Option<RingMemory>) -> &mut RingMemory {
    ring_memory.as_mut().expect("held until the context is dropped")
}

/// User data of a cancellation, distinct from all tags.
const CANCEL: u64 = USER_MAX;
/// Most entries that are submitted together. More save system calls, but leave the device idle:
/// prepared all at once, a batch of 31 reached it about 30 µs late.
const SUBMIT_AT: u32 = 8;

#[cfg(test)]
mod cut_tests;
#[cfg(test)]
mod full_tests;
#[cfg(test)]
mod odd_tests;
#[cfg(test)]
mod polled_tests;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod trim_tests;
