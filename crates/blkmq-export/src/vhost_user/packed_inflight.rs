//! The record of what is done again on a packed virtqueue after this process was killed. Returned chains
//! overwrite descriptors of chains in flight, so the record holds the chains themselves, in linked entries: a
//! list of free ones, and one of each chain. The layout, and the order of changes, are those of the
//! vhost-user specification ("Inflight I/O tracking", packed virtqueue). [`super::inflight`] is that of the
//! split kind.

use std::sync::atomic::{Ordering, compiler_fence};

use super::chain::Descriptor;
use super::packed::Place;
use super::ring::Broken;
use super::sys::Window;

/// The record of one ring.
#[derive(Debug)]
pub(super) struct PackedInflight {
    record: Window,
    size: u16,
    counter: u64,
    free: u16,
    /// The first entry of each chain in flight, by its identifier.
    entries: Vec<u16>,
    /// First entries of chains to be submitted again, the last one first.
    again: Vec<u16>,
    /// First entries of the batch that is being returned.
    batch: Vec<u16>,
}

impl PackedInflight {
    /// The record of a ring of `size` descriptors, in memory of [`record_bytes`].
    pub(super) fn new(record: Window, size: u16) -> Self {
        assert!(
            record.bytes() >= record_bytes(size) as usize,
            "a record that is too small"
        );
        Self {
            record,
            size,
            counter: 0,
            free: 0,
            entries: vec![NONE; size.into()],
            again: Vec::with_capacity(size.into()),
            batch: Vec::with_capacity(size.into()),
        }
    }

    /// Finds out what was in flight. `used` is where a ring begins whose record is new; `flags`
    /// reads those of a descriptor. Returns the place where the next chain is returned, and the
    /// number of slots in flight.
    ///
    /// # Errors
    /// The entries are not linked as they must be.
    pub(super) fn recover(
        &mut self,
        used: Place,
        flags: impl Fn(Place) -> u16,
    ) -> Result<(Place, u16), Broken> {
        if self.record.load::<u16>(VERSION) != 1 || self.record.load::<u16>(DESC_NUM) != self.size {
            self.make(used);
        }
        let (mut old, new) = (self.used(OLD_USED), self.used(USED));
        if old != new && old.index < self.size && !old.is_available(flags(old)) {
            // The batch was published before the end of its record.
            self.set_used(OLD_USED, new);
            self.record.store(OLD_FREE, self.record.load::<u16>(FREE));
            old = new;
        }
        self.order();
        self.set_used(USED, old);
        self.free = self.record.load(OLD_FREE);
        self.record.store(FREE, self.free);
        self.clear_free()?;
        Ok((old, self.find()?))
    }

    fn make(&mut self, used: Place) {
        self.record.store(VERSION, 0_u16);
        self.order();
        for entry in 0..self.size {
            self.record.store(self.place(entry), 0_u8);
            self.record.store(self.place(entry) + NEXT, entry + 1);
        }
        for (place, free) in [(USED, FREE), (OLD_USED, OLD_FREE)] {
            self.set_used(place, used);
            self.record.store(free, 0_u16);
        }
        self.record.store(DESC_NUM, self.size);
        self.order();
        self.record.store(VERSION, 1_u16);
    }

    /// Marks as free what was being taken, or had been returned: its mark may have been left.
    fn clear_free(&mut self) -> Result<(), Broken> {
        let mut entry = self.free;
        for _ in 0..self.size {
            if entry >= self.size {
                break;
            }
            self.record.store(self.place(entry), 0_u8);
            entry = self.record.load(self.place(entry) + NEXT);
        }
        // The last entry has no successor.
        (entry == self.size).then_some(()).ok_or(UNLINKED)
    }

    fn find(&mut self) -> Result<u16, Broken> {
        let mut found: Vec<(u64, u16)> = (0..self.size)
            .filter(|entry| self.record.load::<u8>(self.place(*entry)) == 1)
            .map(|entry| (self.record.load(self.place(entry) + COUNTER), entry))
            .collect();
        found.sort_unstable();
        self.counter = found.last().map_or(0, |(counter, _)| counter.wrapping_add(1));
        self.again.extend(found.iter().rev().map(|(_, entry)| entry));
        let lengths = self.again.iter();
        let lengths = lengths.map(|entry| u32::from(self.record.load::<u16>(self.place(*entry) + NUM)));
        let places = lengths.fold(0_u32, u32::saturating_add);
        match u16::try_from(places) {
            Ok(places) if places <= self.size => Ok(places),
            _ => Err(UNLINKED),
        }
    }

    /// Reads the next chain that is submitted again, if there is one.
    pub(super) fn next_to_repeat(&mut self, chain: &mut Vec<Descriptor>) -> bool {
        let Some(first) = self.again.pop() else {
            return false;
        };
        chain.clear();
        let mut entry = first;
        for _ in 0..self.record.load::<u16>(self.place(first) + NUM).min(self.size) {
            if entry >= self.size {
                break;
            }
            let place = self.place(entry);
            chain.push(Descriptor {
                guest: self.record.load(place + ADDR),
                bytes: self.record.load(place + LEN),
                flags: self.record.load(place + FLAGS),
                next: self.record.load(place + ID),
            });
            entry = self.record.load(place + NEXT);
        }
        let id = chain.last().map_or(NONE, |last| last.next);
        if let Some(of_id) = self.entries.get_mut(usize::from(id)) {
            *of_id = first;
        }
        true
    }

    /// Records that a chain is taken.
    #[inline]
    pub(super) fn take(&mut self, id: u16, chain: &[Descriptor]) {
        let first = self.free;
        let head = self.place(first);
        self.record.store(head + NUM, 0_u16);
        self.record.store(head + COUNTER, self.counter);
        self.counter = self.counter.wrapping_add(1);
        self.order();
        self.record.store(head, 1_u8);
        let (mut entry, mut last) = (first, first);
        for descriptor in chain {
            let place = self.place(entry);
            self.record.store(place + ADDR, descriptor.guest);
            self.record.store(place + LEN, descriptor.bytes);
            self.record.store(place + FLAGS, descriptor.flags);
            self.record.store(place + ID, descriptor.next);
            last = entry;
            entry = self.record.load(place + NEXT);
            // The front end may have changed it: then the record is nonsense, but writes stay in
            // the record's memory.
            entry = if entry > self.size { self.size } else { entry };
        }
        self.record.store(head + LAST, last);
        self.record.store(head + NUM, chain.len() as u16);
        self.free = entry;
        self.record.store(FREE, entry);
        self.order();
        self.record.store(OLD_FREE, entry);
        self.entries[usize::from(id)] = first;
    }

    /// A batch is about to be published; the driver then continues at `used`.
    pub(super) fn end(&mut self, batch: &[(u16, u32)], used: Place) {
        for (id, _) in batch {
            let first = std::mem::replace(&mut self.entries[usize::from(*id)], NONE);
            if first >= self.size {
                continue;
            }
            let last = self.record.load::<u16>(self.place(first) + LAST);
            if last < self.size {
                self.record.store(self.place(last) + NEXT, self.free);
                self.free = first;
            }
            self.batch.push(first);
        }
        self.record.store(FREE, self.free);
        self.set_used(USED, used);
        self.order();
    }

    /// The driver sees the batch now.
    pub(super) fn publish(&mut self) {
        self.order();
        while let Some(first) = self.batch.pop() {
            self.record.store(self.place(first), 0_u8);
        }
        self.record.store(OLD_FREE, self.free);
        self.set_used(OLD_USED, self.used(USED));
        self.order();
    }

    pub(super) fn to_repeat(&self) -> usize {
        self.again.len()
    }

    pub(super) fn is_lost(&self) -> bool {
        self.record.is_lost()
    }

    /// The place where the next chain is returned: the newest or the old one.
    fn used(&self, (index, wrap): (usize, usize)) -> Place {
        Place {
            index: self.record.load(index),
            wrap: self.record.load::<u8>(wrap) != 0,
        }
    }

    fn set_used(&self, (index, wrap): (usize, usize), place: Place) {
        self.record.store(index, place.index);
        self.record.store(wrap, u8::from(place.wrap));
    }

    /// The process may be killed between two stores, and a killed process leaves its stores in program
    /// order: a compiler fence is enough.
    #[inline]
    fn order(&self) {
        compiler_fence(Ordering::SeqCst);
    }

    /// The offset of an entry. The one behind the last is the free one of a full ring, from which
    /// nothing is taken.
    #[inline]
    fn place(&self, entry: u16) -> usize {
        HEAD_BYTES + ENTRY_BYTES * usize::from(entry.min(self.size - 1))
    }
}

/// Bytes of the record of a ring of `size` descriptors.
pub(super) fn record_bytes(size: u16) -> u64 {
    ((HEAD_BYTES + ENTRY_BYTES * usize::from(size)) as u64).next_multiple_of(64)
}

const NONE: u16 = u16::MAX;
const UNLINKED: Broken = Broken("a record of what is in flight that is not linked");
/// The head of a record: features (8 bytes), version, descriptors, the first free entry and the old
/// one, the place where the next chain is returned and the old one, with their wrap counters.
const VERSION: usize = 8;
const DESC_NUM: usize = 10;
const FREE: usize = 12;
const OLD_FREE: usize = 14;
const USED: (usize, usize) = (16, 20);
const OLD_USED: (usize, usize) = (18, 21);
const HEAD_BYTES: usize = 32;
/// An entry: whether it begins a chain in flight, the next entry; of a chain the last entry, the
/// count, its number; its descriptor.
const NEXT: usize = 2;
const LAST: usize = 4;
const NUM: usize = 6;
const COUNTER: usize = 8;
const ID: usize = 16;
const FLAGS: usize = 18;
const LEN: usize = 20;
const ADDR: usize = 24;
const ENTRY_BYTES: usize = 32;
