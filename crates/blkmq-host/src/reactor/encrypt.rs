//! The bios of encrypted disks on one thread: it encrypts and decrypts, and submits to the disk below. It is
//! above the thread's queues and mapped disks, as the submitter of what they get; `engine::encrypted` has
//! the disks, `reactor::core` calls it.
//!
//! ```text
//!  write ─► area ─► encrypt into it ─► the disk below ─► next piece, or the end     zeroing is a write of zeroes
//!  read ──────────► the disk below, into the submitter's memory ─► decrypt there ─► the end
//!  flush, discard ► the disk below ───────────────────────────────────────────────► the end
//! ```
//! Small bios are encrypted at once. What is beyond this turn's share of time waits in `turns`, by groups, so
//! one group's large bios delay no other's small ones; a large bio is done slice by slice. A write without
//! an area, or without a slot, is returned to its submitter, as by a queue that has no room.
//!
//! Memory of a submitter is never borrowed: it may be a guest's, which changes it at any time. Slices are
//! copied through memory of this thread, and a guest that changes a buffer under way spoils its own data.

mod areas;
mod sys;
mod turns;

pub(crate) use sys::BounceMemory;

use std::collections::VecDeque;
use std::sync::Arc;

use blkmq_core::bio::{Bio, Data, Flags, Op, Status};
use blkmq_core::ids::DiskId;
use blkmq_core::mapper::stack::Stack;
use blkmq_core::queue::Effects;
use blkmq_core::time::Instant;

use self::areas::{Area, Areas, LARGE_BYTES};
use self::turns::Turns;
use crate::disk::{MAPPED, QueueId};
use crate::engine::encrypted::{Encrypted, FIRST, SectorCipher};
use crate::reactor::queues::Queues;

/// One thread's bios on encrypted disks.
#[derive(Default)]
pub(crate) struct Encrypter {
    disks: Vec<Arc<Encrypted>>,
    slots: Vec<CryptBio>,
    free: Vec<u32>,
    /// Made with the first disk.
    areas: Option<Areas>,
    turns: Turns,
    /// Pieces for which the disk below had no room, the oldest first.
    unsent: VecDeque<u32>,
    /// Bytes that may be encrypted and decrypted in the rest of this turn.
    left: u64,
    /// A slice of data while it is decrypted.
    scratch: Vec<u8>,
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
    /// Bytes of the bio, from its start, that are done.
    done: u64,
    /// Bytes behind these that are under way together.
    piece: u64,
    /// How many of the piece's are encrypted or decrypted.
    converted: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stage {
    #[default]
    Free,
    Encrypt,
    /// Encrypted, or with nothing to encrypt; not taken by the disk below yet.
    Unsent,
    Below,
    Decrypt,
}

/// Where the bios of encrypted disks go.
pub(crate) struct Below<'a> {
    pub(crate) queues: &'a mut Queues,
    pub(crate) stack: &'a mut Stack,
    pub(crate) now: Instant,
    pub(crate) fx: &'a mut Effects,
}

impl Encrypter {
    /// Takes one more disk. With the first one, it takes memory.
    pub(crate) fn add_disk(&mut self, disk: Arc<Encrypted>) {
        if self.areas.is_none() {
            self.areas = Some(Areas::new());
            self.slots.resize_with(SLOTS as usize, CryptBio::default);
            self.free.extend((0..SLOTS).rev());
            self.unsent.reserve(SLOTS as usize);
            self.scratch.resize(SLICE_BYTES as usize, 0);
            self.turns.reserve(SLOTS as usize);
            self.ended.reserve(SLOTS as usize);
        }
        self.disks.push(disk);
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

    /// Says whether bytes wait to be encrypted or decrypted.
    #[inline]
    pub(crate) fn has_work(&self) -> bool {
        !self.turns.is_empty()
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
            self.scratch.fill(0);
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
        let is_written = matches!(bio.op, Op::Write | Op::WriteZeroes);
        let piece = if is_written {
            bio.len.min(LARGE_BYTES)
        } else {
            bio.len
        };
        let area = match is_written {
            true => self.areas.as_mut().and_then(|areas| areas.take(piece, bio.group)),
            false => None,
        };
        if is_written && area.is_none() {
            self.free.push(number);
            return Err(bio);
        }
        let stage = if is_written { Stage::Encrypt } else { Stage::Unsent };
        self.slots[number as usize] = CryptBio {
            bio,
            disk: index,
            stage,
            area,
            done: 0,
            piece,
            converted: 0,
        };
        if is_written {
            self.convert_or_wait(number, below);
        } else if !self.send(number, below) {
            // Nothing of it is under way: its submitter waits, and not this thread's memory.
            return Err(self.release(number));
        }
        Ok(())
    }

    /// Encrypts and decrypts what waits, as much as this turn may, and sends what found no room before.
    /// Call it before queues are unplugged.
    pub(crate) fn work(&mut self, below: &mut Below<'_>) {
        for _ in 0..self.unsent.len() {
            let number = self.unsent.pop_front().expect("counted above");
            if !self.send(number, below) {
                self.unsent.push_back(number);
            }
        }
        while self.left > 0
            && let Some(number) = self.turns.next()
        {
            if self.convert(number) {
                self.converted(number, below);
            } else {
                self.turns.push(number, self.slots[number as usize].bio.group);
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
            Op::Read if status.is_ok() => {
                slot.stage = Stage::Decrypt;
                slot.converted = 0;
                self.convert_or_wait(number, below);
            }
            Op::Write | Op::WriteZeroes if status.is_ok() && !is_last => {
                slot.done += slot.piece;
                slot.piece = (slot.bio.len - slot.done).min(LARGE_BYTES);
                slot.converted = 0;
                slot.stage = Stage::Encrypt;
                self.turns.push(number, slot.bio.group);
            }
            _ => {
                let bio = self.release(number);
                below.end(bio, status);
            }
        }
    }

    /// Encrypts or decrypts a piece at once if it is small and nobody waits; else it waits for its turn.
    fn convert_or_wait(&mut self, number: u32, below: &mut Below<'_>) {
        let slot = &self.slots[number as usize];
        if slot.piece > self.left.min(SMALL_BYTES) || self.has_work() {
            let group = slot.bio.group;
            return self.turns.push(number, group);
        }
        while !self.convert(number) {}
        self.converted(number, below);
    }

    /// Goes on with a piece that is encrypted or decrypted.
    fn converted(&mut self, number: u32, below: &mut Below<'_>) {
        let slot = &mut self.slots[number as usize];
        if slot.stage == Stage::Decrypt {
            let bio = self.release(number);
            return below.end(bio, Status::Ok);
        }
        slot.stage = Stage::Unsent;
        if !self.send(number, below) {
            self.unsent.push_back(number);
        }
    }

    /// Encrypts or decrypts one slice of a piece. Says whether the piece is done.
    fn convert(&mut self, number: u32) -> bool {
        let slot = &mut self.slots[number as usize];
        let disk = &self.disks[slot.disk as usize];
        let len = (slot.piece - slot.converted).min(SLICE_BYTES);
        let at = slot.done + slot.converted;
        let cipher = disk.cipher().expect("bios are taken with a key");
        match (slot.stage, slot.bio.op) {
            (Stage::Encrypt, op) => {
                let areas = self.areas.as_mut().expect("made with the first disk");
                let area = slot.area.expect("a write has one");
                let bytes = areas.bytes_mut(area, slot.converted..slot.converted + len);
                match op {
                    Op::Write => sys::gather(&slot.bio, at, bytes),
                    _ => bytes.fill(0),
                }
                cipher.encrypt(slot.bio.offset + at, bytes);
            }
            _ => decrypt(cipher, &slot.bio, at, &mut self.scratch[..len as usize]),
        }
        self.dirty = Some(slot.disk);
        slot.converted += len;
        self.left = self.left.saturating_sub(len.max(LEAST_BYTES));
        slot.converted == slot.piece
    }

    /// Submits a piece to the disk below. Says whether that has taken it.
    fn send(&mut self, number: u32, below: &mut Below<'_>) -> bool {
        let slot = &self.slots[number as usize];
        debug_assert_eq!(slot.stage, Stage::Unsent);
        let disk = &self.disks[slot.disk as usize];
        let Bio { op, flags, .. } = slot.bio;
        let (op, data, skip) = match slot.area {
            None => (op, slot.bio.data.clone(), slot.bio.skip),
            Some(area) => {
                let areas = self.areas.as_ref().expect("made with the first disk");
                (Op::Write, Data::Flat(areas.lend(area, slot.piece)), 0)
            }
        };
        let mut flags = flags.without(Flags::NO_UNMAP.with(Flags::FAST_ONLY));
        if slot.done > 0 {
            flags = flags.without(Flags::PREFLUSH);
        }
        let offset = match op {
            Op::Flush => 0,
            _ => disk.start + slot.bio.offset + slot.done,
        };
        let bio = Bio {
            op,
            flags,
            prio: slot.bio.prio,
            disk: disk.below.1,
            group: slot.bio.group,
            offset,
            len: slot.piece,
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
        let slot = std::mem::take(&mut self.slots[number as usize]);
        if let (Some(areas), Some(area)) = (&mut self.areas, slot.area) {
            areas.put(area, slot.bio.group);
        }
        self.free.push(number);
        slot.bio
    }
}

/// Decrypts a slice in the memory into which it was read.
fn decrypt(cipher: &dyn SectorCipher, bio: &Bio, at: u64, slice: &mut [u8]) {
    sys::gather(bio, at, slice);
    cipher.decrypt(bio.offset + at, slice);
    sys::scatter(bio, at, slice);
}

impl Drop for Encrypter {
    fn drop(&mut self) {
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
/// What the smallest slice counts as.
const LEAST_BYTES: u64 = 1 << 10;
