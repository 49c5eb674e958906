//! A chain of descriptors: whether it obeys the rules, and where its bytes are. Each descriptor is read once;
//! a chain that loops, points outside of memory or nests tables breaks the device. `ring` provides the heads,
//! `request` decodes a chain.

use blkmq_core::bio::Lent;

use super::memory::Loans;
use super::ring::{Broken, Ring};
use super::sys::{Window, copy_from};

/// The memory pieces of a chain. The structure is reused for each chain.
#[derive(Debug)]
pub struct Chain {
    /// What the driver wrote.
    pub readable: Vec<Lent>,
    /// What the device is to write.
    pub writable: Vec<Lent>,
}

impl Default for Chain {
    fn default() -> Self {
        Self {
            readable: Vec::with_capacity(PIECES_MAX),
            writable: Vec::with_capacity(PIECES_MAX),
        }
    }
}

/// A descriptor as it was read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Descriptor {
    pub(super) guest: u64,
    pub(super) bytes: u32,
    pub(super) flags: u16,
    /// The next descriptor; in a packed ring the identifier of the chain.
    pub(super) next: u16,
}

impl Descriptor {
    fn read(table: &Window, index: u16) -> Self {
        let raw = u128::from_le(table.load(16 * usize::from(index)));
        Self {
            guest: raw as u64,
            bytes: (raw >> 64) as u32,
            flags: (raw >> 96) as u16,
            next: (raw >> 112) as u16,
        }
    }

    /// Reads one of a packed ring, or of an indirect table of it.
    pub(super) fn read_packed(table: &Window, index: u16) -> Self {
        let read = Self::read(table, index);
        Self {
            flags: read.next,
            next: read.flags,
            ..read
        }
    }
}

impl Chain {
    /// Follows the chain from its head. `loans` must have begun one.
    ///
    /// # Errors
    /// The rule that the chain breaks.
    pub fn follow(&mut self, ring: &Ring, loans: &Loans, head: u16) -> Result<(), Broken> {
        self.clear();
        let (mut index, mut left) = (head, ring.size());
        loop {
            left = left.checked_sub(1).ok_or(LOOP)?;
            let descriptor = Descriptor::read(ring.table(), index);
            if descriptor.flags & INDIRECT != 0 {
                if descriptor.flags & NEXT != 0 {
                    return Err(Broken("a table of descriptors that goes on elsewhere"));
                }
                return self.follow_table(&descriptor, loans);
            }
            self.push(&descriptor, loans)?;
            if descriptor.flags & NEXT == 0 {
                return Ok(());
            }
            index = descriptor.next;
            if index >= ring.size() {
                return Err(Broken("a descriptor beyond the table"));
            }
        }
    }

    pub(super) fn clear(&mut self) {
        self.readable.clear();
        self.writable.clear();
    }

    /// Takes all of an indirect table of a packed ring, from beginning to end: of the flags there
    /// only the direction of a piece is valid (virtio 1.2, 2.8.7).
    pub(super) fn push_table(&mut self, at: &Descriptor, loans: &Loans) -> Result<(), Broken> {
        let (table, entries) = find_table(at, loans)?;
        (0..entries).try_for_each(|index| self.push(&Descriptor::read_packed(&table, index as u16), loans))
    }

    fn follow_table(&mut self, at: &Descriptor, loans: &Loans) -> Result<(), Broken> {
        let (table, entries) = find_table(at, loans)?;
        let mut index = 0;
        for _ in 0..entries {
            let descriptor = Descriptor::read(&table, index);
            if descriptor.flags & INDIRECT != 0 {
                return Err(Broken("a table of descriptors in another"));
            }
            self.push(&descriptor, loans)?;
            if descriptor.flags & NEXT == 0 {
                return Ok(());
            }
            index = descriptor.next;
            if u32::from(index) >= entries {
                return Err(Broken("a descriptor beyond its table"));
            }
        }
        Err(LOOP)
    }

    #[inline]
    pub(super) fn push(&mut self, descriptor: &Descriptor, loans: &Loans) -> Result<(), Broken> {
        let pieces = if descriptor.flags & WRITE != 0 {
            &mut self.writable
        } else if self.writable.is_empty() {
            &mut self.readable
        } else {
            return Err(Broken("a readable descriptor behind a writable one"));
        };
        if descriptor.bytes == 0 {
            return Err(Broken("a descriptor of no bytes"));
        }
        let mut has_room = true;
        let is_memory = loans.lend(descriptor.guest, descriptor.bytes, |piece| {
            has_room &= pieces.len() < PIECES_MAX;
            if has_room {
                pieces.push(piece);
            }
        });
        match (is_memory, has_room) {
            (true, true) => Ok(()),
            (false, _) => Err(Broken("a descriptor outside of memory")),
            (true, false) => Err(Broken("a chain of too many pieces")),
        }
    }
}

/// Finds an indirect table of descriptors. Returns their number.
fn find_table(at: &Descriptor, loans: &Loans) -> Result<(Window, u32), Broken> {
    let entries = at.bytes / 16;
    if !at.bytes.is_multiple_of(16) || !(1..=TABLE_MAX).contains(&entries) {
        return Err(Broken("a table of descriptors of a length that is not allowed"));
    }
    let table = loans.memory().guest_window(at.guest, at.bytes as usize);
    let table = table.ok_or(Broken("a table of descriptors outside of memory"))?;
    Ok((table, entries))
}

/// Moves bytes from the front into `out`, until it is full. Returns whether there were enough.
pub(super) fn take_front(pieces: &mut Vec<Lent>, mut out: &mut [u8]) -> bool {
    if let Some(first) = pieces.first()
        && first.len() as usize == out.len()
    {
        copy_from(*first, out);
        pieces.remove(0);
        return true;
    }
    let mut whole = 0;
    for piece in pieces.iter_mut() {
        if out.is_empty() {
            break;
        }
        let bytes = out.len().min(piece.len() as usize);
        let (now, later) = out.split_at_mut(bytes);
        copy_from(*piece, now);
        out = later;
        *piece = piece.part(bytes as u32, u32::MAX);
        whole += usize::from(piece.is_empty());
    }
    let is_enough = out.is_empty();
    pieces.drain(..whole);
    is_enough
}

/// Takes the last byte.
pub(super) fn take_last(pieces: &mut Vec<Lent>) -> Option<Lent> {
    let last = pieces.pop()?;
    let before = last.len() - 1;
    if before > 0 {
        pieces.push(last.part(0, before));
    }
    Some(last.part(before, 1))
}

/// Bytes of all pieces.
pub(super) fn length(pieces: &[Lent]) -> u64 {
    pieces.iter().map(|piece| u64::from(piece.len())).sum()
}

pub(super) const LOOP: Broken = Broken("a chain of descriptors without an end");
/// Most entries of an indirect table, as drivers have them.
const TABLE_MAX: u32 = 1024;
/// Most memory pieces in one direction of a chain.
const PIECES_MAX: usize = 1280;
pub(super) const NEXT: u16 = 1;
const WRITE: u16 = 2;
pub(super) const INDIRECT: u16 = 4;

#[cfg(test)]
mod tests;
