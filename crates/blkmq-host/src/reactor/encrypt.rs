//! The bios of encrypted disks on one thread: it encrypts and decrypts, and submits to the disk below. It is
//! above the thread's queues and mapped disks, as the submitter of what they get; `engine::encrypted` has
//! the disks, `reactor::core` calls it.
//!
//! ```text
//!  write ─► area ─► encrypt into it ─► the disk below ─► next piece, or the end     zeroing is a write of zeroes
//!  read ──────────► the disk below, into the submitter's memory ─► decrypt there ─► the end
//!  flush, discard ► the disk below ───────────────────────────────────────────────► the end
//! ```
//! What begins or ends inside a sector is read in whole ones; a write of it is a change of what was read, kept apart
//! from others' writes by `odd`.
//!
//! Small bios are encrypted at once. What is beyond this turn's share of time waits in `turns`, where groups share the
//! processor by their weights, and one group's large bios delay no other's small ones; a large bio is done slice by slice. A write without
//! an area, or without a slot, is returned to its submitter, as by a queue that has no room.
//!
//! Memory of a submitter may be a guest's, which changes it at any time: the cipher gets it as cells, each of which it
//! reads once, so a guest that changes a buffer under way spoils its own data. Sectors that lie on several pieces are
//! copied through memory of this thread.

mod areas;
mod odd;
mod sys;
mod table;
mod turns;

pub(crate) use sys::BounceMemory;

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use blkmq_core::bio::{Bio, Data, Flags, Op, Status};
use blkmq_core::ids::{DiskId, GroupId};
use blkmq_core::mapper::stack::Stack;
use blkmq_core::queue::Effects;
use blkmq_core::time::Instant;

use self::areas::{Area, Areas, LARGE_BYTES};
use self::odd::{Hold, Waiting};
use self::table::DiskTable;
use self::turns::Turns;
use crate::block_locks::{Announced, Announcements};
use crate::disk::{MAPPED, QueueId};
use crate::engine::encrypted::{Encrypted, FIRST};
use crate::reactor::queues::Queues;

/// One thread's bios on encrypted disks.
#[derive(Default)]
pub(crate) struct Encrypter {
    disks: DiskTable,
    slots: Vec<CryptBio>,
    free: Vec<u32>,
    /// Made with the first disk.
    areas: Option<Areas>,
    turns: Turns,
    /// Pieces for which the disk below had no room, the oldest first.
    unsent: VecDeque<u32>,
    /// Writes that wait for sectors that others change.
    waiting: Waiting,
    /// The writes under way, for other threads to see. Made with the first disk.
    announced: Option<Arc<Announced>>,
    /// Where they are, until this thread ends. The disks may go before.
    writers: Option<Arc<Announcements>>,
    /// Bytes that may be encrypted and decrypted in the rest of this turn.
    left: u64,
    /// A slice of data while it is decrypted.
    scratch: Vec<u8>,
    /// How many of its bytes may have data.
    used: usize,
    /// Bios that have ended; kept for its memory.
    ended: Vec<Bio>,
    /// The disk whose cipher was used since the stack was wiped.
    dirty: Option<u32>,
}

/// A bio under way.
#[derive(Default)]
struct CryptBio {
    /// As it was submitted.
    bio: Bio,
    disk: u32,
    stage: Stage,
    area: Option<Area>,
    /// Which sectors it keeps from others.
    hold: Hold,
    /// It is a write, and what is sent first are reads of the sectors in which its piece begins and ends.
    is_fetch: bool,
    /// Bytes of the bio, from its start, that are done.
    done: u64,
    /// Bytes behind these that are under way together.
    piece: u64,
    /// How many of the piece's sectors' bytes are encrypted or decrypted.
    converted: u64,
}

impl CryptBio {
    fn is_write(&self) -> bool {
        matches!(self.bio.op, Op::Write | Op::WriteZeroes)
    }

    /// The bytes of its piece, on the disk.
    fn range(&self) -> Range<u64> {
        let start = self.bio.offset + self.done;
        start..start + self.piece
    }

    /// The whole sectors of its piece, on the disk.
    fn sectors(&self, disk: &Encrypted) -> Range<u64> {
        disk.sectors(&self.range())
    }

    /// Makes the piece what is left, as far as its sectors have room in an area.
    fn cut_piece(&mut self, disk: &Encrypted) {
        let start = self.bio.offset + self.done;
        let head = start - disk.sectors(&(start..start)).start;
        self.piece = (self.bio.len - self.done).min(LARGE_BYTES - head);
        self.converted = 0;
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stage {
    #[default]
    Free,
    /// Others have its sectors.
    Wait,
    Encrypt,
    /// Encrypted, or with nothing to encrypt; not taken by the disk below yet.
    Unsent,
    Below,
    Decrypt,
}

/// A part of a piece that is encrypted or decrypted without a look at others.
struct Slice {
    /// What it counts as, in bytes.
    cost: u64,
    /// The piece is done.
    is_last: bool,
}

/// Where the bios of encrypted disks go.
pub(crate) struct Below<'a> {
    pub(crate) queues: &'a mut Queues,
    pub(crate) stack: &'a mut Stack,
    pub(crate) now: Instant,
    pub(crate) fx: &'a mut Effects,
}

impl Encrypter {
    /// Takes one more disk, in the place `index`. With the first one, it takes memory.
    pub(crate) fn add_disk(&mut self, index: usize, disk: Arc<Encrypted>) {
        if self.areas.is_none() {
            self.areas = Some(Areas::new());
            self.slots.resize_with(SLOTS as usize, CryptBio::default);
            self.free.extend((0..SLOTS).rev());
            self.unsent.reserve(SLOTS as usize);
            self.waiting.reserve(SLOTS as usize);
            self.announced = Some(disk.writers.add(SLOTS));
            self.writers = Some(Arc::clone(&disk.writers));
            self.scratch.resize(SLICE_BYTES as usize, 0);
            self.turns.reserve(SLOTS as usize);
            self.ended.reserve(SLOTS as usize);
        }
        self.disks.put(index, disk);
    }

    /// Begins a turn: more bytes may be encrypted.
    #[inline]
    pub(crate) fn begin_turn(&mut self) {
        self.left = TURN_BYTES;
    }

    /// Says whether a bio for [`MAPPED`] is for an encrypted disk.
    #[inline]
    pub(crate) fn has(&self, disk: DiskId) -> bool {
        disk.0 >= FIRST
    }

    /// Says whether something can be done in a further turn: bytes wait to be encrypted or decrypted, or writes for sectors
    /// that were returned.
    #[inline]
    pub(crate) fn has_work(&self) -> bool {
        !self.turns.is_empty() || self.has_due()
    }

    /// Says whether bios are under way.
    #[inline]
    pub(crate) fn is_used(&self) -> bool {
        self.free.len() < self.slots.len()
    }

    /// Wipes what ciphers have left on this thread's stack, and the last slice of data. Call it before the thread
    /// sleeps, from a frame above those that encrypt.
    #[inline]
    pub(crate) fn wipe(&mut self) {
        if let Some(disk) = self.dirty.take()
            && let Some(cipher) = self.disks[disk as usize].cipher()
        {
            self.scratch[..std::mem::take(&mut self.used)].fill(0);
            cipher.wipe_stack();
        }
    }

    /// Submits a bio of an encrypted disk, with the same promises as a queue.
    ///
    /// # Errors
    /// Returns the bio if there is no room now: submit it again after another one's end.
    pub(crate) fn submit(&mut self, bio: Bio, below: &mut Below<'_>) -> Result<(), Bio> {
        let index = bio.disk.0 - FIRST;
        let Some(disk) = self.disks.get(index as usize) else {
            below.end(bio, Status::Invalid);
            return Ok(());
        };
        if let Err(status) = disk.check(&bio) {
            below.end(bio, status);
            return Ok(());
        }
        let Some(number) = self.free.pop() else {
            return Err(bio);
        };
        let mut slot = CryptBio {
            piece: bio.len,
            stage: Stage::Unsent,
            disk: index,
            bio,
            ..CryptBio::default()
        };
        if slot.bio.op == Op::Discard && !slot.keep_whole_sectors(disk) {
            self.free.push(number);
            below.end(slot.bio, Status::Ok);
            return Ok(());
        }
        if slot.is_write() || slot.bio.op == Op::Read && !disk.has_whole_sectors(&slot.bio) {
            slot.cut_piece(disk);
            let sectors = slot.sectors(disk);
            let areas = self.areas.as_mut().expect("made with the first disk");
            slot.area = areas.take(sectors.end - sectors.start, slot.bio.group);
            if slot.area.is_none() {
                self.free.push(number);
                return Err(slot.bio);
            }
        }
        let is_write = slot.is_write();
        self.slots[number as usize] = slot;
        if is_write {
            self.begin_or_wait(number, below);
        } else if !self.send(number, below) {
            // Nothing of it is under way: its submitter waits, and not this thread's memory.
            return Err(self.release(number));
        }
        Ok(())
    }

    /// Encrypts and decrypts what waits, as much as this turn may, and sends what found no room before.
    /// Call it before queues are unplugged.
    pub(crate) fn work(&mut self, below: &mut Below<'_>) {
        self.retry_waiting(below);
        for _ in 0..self.unsent.len() {
            let number = self.unsent.pop_front().expect("counted above");
            if !self.send(number, below) {
                self.unsent.push_back(number);
            }
        }
        while self.left > 0
            && let Some((number, line)) = self.turns.next()
        {
            let slice = self.convert(number);
            self.turns.charge(line, slice.cost, below.tree());
            if slice.is_last {
                self.converted(number, below);
            } else if self.slots[number as usize].converted.is_multiple_of(STINT_BYTES) {
                self.wait_for_turn(number, below);
            } else {
                self.turns.put_back(number, line, below.tree());
            }
        }
    }

    /// Takes the ends of what was submitted below out of `ended`, and adds those of the bios that have ended.
    pub(crate) fn take_ends(&mut self, below: &mut Below<'_>) {
        if !below.fx.ended.iter().any(|bio| bio.client == CLIENT) {
            return;
        }
        let mut ended = std::mem::take(&mut self.ended);
        std::mem::swap(&mut ended, &mut below.fx.ended);
        for bio in ended.drain(..) {
            match bio.client {
                CLIENT => self.piece_ended(bio.cookie as u32, bio.status, below),
                _ => below.fx.ended.push(bio),
            }
        }
        self.ended = ended;
    }

    /// Goes on with a bio when the disk below has ended its piece.
    fn piece_ended(&mut self, number: u32, status: Status, below: &mut Below<'_>) {
        let slot = &mut self.slots[number as usize];
        debug_assert_eq!(slot.stage, Stage::Below, "the end of a piece that is not below");
        let is_last = slot.done + slot.piece == slot.bio.len;
        match slot.bio.op {
            _ if !status.is_ok() => self.end(number, status, below),
            Op::Read => {
                slot.stage = Stage::Decrypt;
                slot.converted = 0;
                self.convert_or_wait(number, below);
            }
            Op::Write | Op::WriteZeroes if slot.is_fetch => {
                self.decrypt_edges(number);
                self.convert_or_wait(number, below);
            }
            Op::Write | Op::WriteZeroes if !is_last => {
                slot.done += slot.piece;
                slot.cut_piece(&self.disks[slot.disk as usize]);
                self.begin(number, below);
            }
            _ => self.end(number, status, below),
        }
    }

    /// Begins with a piece of a write: by encrypting it, or by reading the sectors that it changes in part.
    fn begin(&mut self, number: u32, below: &mut Below<'_>) {
        let slot = &mut self.slots[number as usize];
        slot.is_fetch = slot.sectors(&self.disks[slot.disk as usize]) != slot.range();
        if slot.is_fetch {
            slot.stage = Stage::Unsent;
            return self.send_or_wait(number, below);
        }
        slot.stage = Stage::Encrypt;
        match slot.done {
            0 => self.convert_or_wait(number, below),
            _ => self.wait_for_turn(number, below),
        }
    }

    /// Ends a bio.
    fn end(&mut self, number: u32, status: Status, below: &mut Below<'_>) {
        let bio = self.release(number);
        below.end(bio, status);
    }

    /// Encrypts or decrypts a piece at once if it is small and nobody waits; else it waits for its turn.
    fn convert_or_wait(&mut self, number: u32, below: &mut Below<'_>) {
        let slot = &self.slots[number as usize];
        if slot.piece > self.left.min(SMALL_BYTES) || !self.turns.is_empty() {
            return self.wait_for_turn(number, below);
        }
        while !self.convert(number).is_last {}
        self.converted(number, below);
    }

    /// Puts a bio that is to be encrypted or decrypted into its group's line.
    fn wait_for_turn(&mut self, number: u32, below: &Below<'_>) {
        let slot = &self.slots[number as usize];
        let queue = self.disks[slot.disk as usize].groups_of;
        self.turns.push(number, (queue, slot.bio.group), below.tree());
    }

    /// Goes on with a piece that is encrypted or decrypted.
    fn converted(&mut self, number: u32, below: &mut Below<'_>) {
        let slot = &mut self.slots[number as usize];
        if slot.stage == Stage::Decrypt {
            if slot.done + slot.piece == slot.bio.len {
                return self.end(number, Status::Ok, below);
            }
            slot.done += slot.piece;
            slot.cut_piece(&self.disks[slot.disk as usize]);
        }
        slot.stage = Stage::Unsent;
        self.send_or_wait(number, below);
    }

    fn send_or_wait(&mut self, number: u32, below: &mut Below<'_>) {
        if !self.send(number, below) {
            self.unsent.push_back(number);
        }
    }

    /// Encrypts or decrypts one slice of a piece.
    fn convert(&mut self, number: u32) -> Slice {
        let slot = &mut self.slots[number as usize];
        let disk = &self.disks[slot.disk as usize];
        let cipher = disk.cipher().expect("bios are taken with a key");
        let (sectors, range) = (slot.sectors(disk), slot.range());
        let at = sectors.start + slot.converted;
        let len = (sectors.end - at).min(SLICE_BYTES);
        // Of the slice, what the bio has: all of it but in the first and last sectors.
        let own = range.start.clamp(at, at + len)..range.end.clamp(at, at + len);
        let inner = (own.start - at) as usize..(own.end - at) as usize;
        let in_bio = own.start - slot.bio.offset;
        let in_area = slot.converted..slot.converted + len;
        let areas = self.areas.as_mut().expect("made with the first disk");
        let is_whole = inner.len() as u64 == len;
        if slot.stage == Stage::Encrypt {
            let bytes = areas.bytes_mut(slot.area.expect("a write has one"), in_area);
            let is_write = slot.bio.op == Op::Write;
            let from_there = |bytes: &mut [u8]| {
                sys::with_flat(&slot.bio, in_bio, len as usize, |from| {
                    cipher.encrypt_from(at, from, bytes)
                })
            };
            if !(is_write && is_whole && from_there(bytes)) {
                match is_write {
                    true => sys::gather(&slot.bio, in_bio, &mut bytes[inner]),
                    false => bytes[inner].fill(0),
                }
                cipher.encrypt(at, bytes);
            }
        } else if slot.area.is_some()
            || !sys::with_flat(&slot.bio, in_bio, len as usize, |bytes| {
                cipher.decrypt_shared(at, bytes)
            })
        {
            // Not in the area: what is decrypted stays nowhere.
            let slice = &mut self.scratch[..len as usize];
            self.used = self.used.max(slice.len());
            match slot.area {
                None => sys::gather(&slot.bio, in_bio, slice),
                Some(area) => slice.copy_from_slice(areas.bytes_mut(area, in_area)),
            }
            cipher.decrypt(at, slice);
            sys::scatter(&slot.bio, in_bio, &slice[inner]);
        }
        self.dirty = Some(slot.disk);
        slot.converted += len;
        let cost = len.max(LEAST_BYTES);
        self.left = self.left.saturating_sub(cost);
        Slice {
            cost,
            is_last: at + len == sectors.end,
        }
    }

    /// Submits a piece to the disk below. Says whether that has taken it.
    fn send(&mut self, number: u32, below: &mut Below<'_>) -> bool {
        let slot = &self.slots[number as usize];
        debug_assert_eq!(slot.stage, Stage::Unsent);
        let disk = &self.disks[slot.disk as usize];
        let Bio { op, flags, .. } = slot.bio;
        let sectors = match slot.area {
            Some(_) => slot.sectors(disk),
            None => slot.range(),
        };
        let (op, data, skip) = match slot.area {
            None => (op, slot.bio.data.clone(), slot.bio.skip),
            Some(area) => {
                let areas = self.areas.as_ref().expect("made with the first disk");
                let op = match op == Op::Read || slot.is_fetch {
                    true => Op::Read,
                    false => Op::Write,
                };
                (op, Data::Flat(areas.lend(area, sectors.end - sectors.start)), 0)
            }
        };
        let mut flags = flags.without(Flags::NO_UNMAP.with(Flags::FAST_ONLY));
        if slot.done > 0 {
            flags = flags.without(Flags::PREFLUSH);
        }
        if slot.is_fetch {
            flags = Flags::NONE;
        }
        let offset = match op {
            Op::Flush => 0,
            _ => disk.start + sectors.start,
        };
        let bio = Bio {
            op,
            flags,
            prio: slot.bio.prio,
            disk: disk.below.1,
            group: slot.bio.group,
            offset,
            len: sectors.end - sectors.start,
            data,
            skip,
            client: CLIENT,
            cookie: number.into(),
            ..Bio::default()
        };
        let queue = disk.below.0;
        // Before it is submitted: it may end at once.
        self.slots[number as usize].stage = Stage::Below;
        let is_sent = below.submit(queue, bio).is_ok();
        if !is_sent {
            self.slots[number as usize].stage = Stage::Unsent;
        }
        is_sent
    }

    /// Frees the slot and the area of a bio, and returns the bio.
    fn release(&mut self, number: u32) -> Bio {
        self.return_sectors(number);
        let slot = std::mem::take(&mut self.slots[number as usize]);
        if let (Some(areas), Some(area)) = (&mut self.areas, slot.area) {
            areas.put(area, slot.bio.group);
        }
        self.free.push(number);
        slot.bio
    }
}

impl Drop for Encrypter {
    fn drop(&mut self) {
        if let (Some(announced), Some(writers)) = (&self.announced, &self.writers) {
            writers.remove(announced);
        }
        if self.is_used() {
            // The kernel may still read them.
            std::mem::forget(self.areas.take());
        }
    }
}

impl Below<'_> {
    fn submit(&mut self, queue: QueueId, bio: Bio) -> Result<(), Bio> {
        match self.queues.get_mut(queue.index()) {
            Some(queue) => queue.submit(bio, self.now, self.fx),
            None => {
                debug_assert_eq!(queue, MAPPED);
                self.stack.submit(bio, self.queues, self.now, self.fx)
            }
        }
    }

    /// The trees of groups: which group one is part of, and its weight.
    fn tree(&self) -> impl Fn((QueueId, GroupId)) -> (GroupId, u16) {
        |(queue, group)| self.queues.parent_and_weight(queue.index(), group)
    }

    fn end(&mut self, mut bio: Bio, status: Status) {
        bio.status = status;
        self.fx.ended.push(bio);
    }
}

/// The client of what is submitted below: no service has this number.
const CLIENT: u32 = u32::MAX;
/// Bios under way. A queue bounds them for each group; this is more than one thread usually has.
const SLOTS: u32 = 2048;
/// What is encrypted or decrypted between two looks at others, and what is copied at once.
const SLICE_BYTES: u64 = 16 << 10;
/// Larger pieces wait for their turn even if nobody else does.
const SMALL_BYTES: u64 = 128 << 10;
/// What one turn encrypts and decrypts: about a tenth of a millisecond on a slow processor with AES
/// instructions.
const TURN_BYTES: u64 = 256 << 10;
/// What a bio has done of it when others of its group go on.
const STINT_BYTES: u64 = 64 << 10;
/// What the smallest slice counts as.
const LEAST_BYTES: u64 = 1 << 10;
