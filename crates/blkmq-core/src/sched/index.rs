//! An index of requests by position: a sorted array of (position, slot), cut into chunks. It names
//! requests by their slots in `slots`; elevators use it to find neighbours and the next request.
//!
//! ```text
//!  directory  [ from 0 | from 81920 | from 90112 ]    one per index: where each chunk begins
//!                 |          |            |
//!  chunks     [0 4096 ..] [81920 ..]  [90112 ..]       up to 64 entries each, from a pool that indexes share
//! ```
//! A search bisects the directory, then searches one chunk; an insertion moves at most 63 entries. A full
//! chunk is split in two, and neighbours with few entries are joined, so that the pool's size is known at
//! set-up: two neighbours together always hold more than [`JOINED_MAX`] entries.

use super::slots::SlotId;

/// The chunks that some indexes share.
#[derive(Debug)]
pub(super) struct Chunks {
    all: Vec<Chunk>,
    free: Vec<u32>,
}

#[derive(Clone, Debug)]
struct Chunk {
    len: usize,
    /// In order; those behind `len` are `PADDING`.
    keys: [u64; CHUNK_MAX],
    slots: [u32; CHUNK_MAX],
}

impl Chunks {
    /// Makes the chunks for `entries_max` entries, however they are spread over `indexes` indexes.
    pub(super) fn new(entries_max: usize, indexes: usize) -> Self {
        let empty = Chunk {
            len: 0,
            keys: [PADDING; CHUNK_MAX],
            slots: [0; CHUNK_MAX],
        };
        let count = Self::needed(entries_max, indexes);
        Self {
            all: vec![empty; count],
            free: (0..count as u32).rev().collect(),
        }
    }

    /// Each index has at least one chunk, and any two neighbours of one index hold more than `JOINED_MAX`
    /// entries; one more chunk is needed while a chunk is being split.
    const fn needed(entries_max: usize, indexes: usize) -> usize {
        entries_max / (JOINED_MAX + 1) * 2 + indexes + 1
    }

    fn take(&mut self) -> u32 {
        let id = self
            .free
            .pop()
            .expect("the pool has the chunks that thin neighbours need");
        self.all[id as usize].truncate(0);
        id
    }

    #[inline]
    fn at(&self, id: u32) -> &Chunk {
        &self.all[id as usize]
    }

    fn at_mut(&mut self, id: u32) -> &mut Chunk {
        &mut self.all[id as usize]
    }

    /// Asserts that `in_use` chunks, counted over all indexes, and the free ones are all there are.
    pub(super) fn check(&self, in_use: usize) {
        assert_eq!(in_use + self.free.len(), self.all.len(), "chunks in use and free");
    }
}

impl Chunk {
    #[inline]
    fn keys(&self) -> &[u64] {
        &self.keys[..self.len]
    }

    /// The number of keys for which `less` is true; they must be the first ones. It compares without branches,
    /// since the order of two random positions cannot be predicted: first the last key of each row, then the
    /// keys of one row.
    #[inline]
    fn count(&self, less: impl Fn(u64) -> bool) -> usize {
        let (rows, _) = self.keys.as_chunks::<ROW>();
        let full: usize = rows[..ROW - 1]
            .iter()
            .map(|row| usize::from(less(row[ROW - 1])))
            .sum();
        let rest: usize = rows[full].iter().map(|&key| usize::from(less(key))).sum();
        (full * ROW + rest).min(self.len)
    }

    fn insert(&mut self, at: usize, key: u64, slot: SlotId) {
        self.keys.copy_within(at..self.len, at + 1);
        self.slots.copy_within(at..self.len, at + 1);
        self.keys[at] = key;
        self.slots[at] = slot.0;
        self.len += 1;
    }

    fn remove(&mut self, at: usize) -> SlotId {
        let slot = self.slots[at];
        self.keys.copy_within(at + 1..self.len, at);
        self.slots.copy_within(at + 1..self.len, at);
        self.len -= 1;
        self.keys[self.len] = PADDING;
        SlotId(slot)
    }

    fn truncate(&mut self, len: usize) {
        self.keys[len..].fill(PADDING);
        self.len = len;
    }

    fn append(&mut self, keys: &[u64], slots: &[u32]) {
        let end = self.len + keys.len();
        self.keys[self.len..end].copy_from_slice(keys);
        self.slots[self.len..end].copy_from_slice(slots);
        self.len = end;
    }
}

/// The slots of one kind, sorted by position; those of the same position in the order of their insertion.
#[derive(Debug)]
pub(super) struct Index {
    directory: Vec<Part>,
}

/// One chunk of an index. Its keys are at least `from`, and at most the next one's `from`.
#[derive(Clone, Copy, Debug)]
struct Part {
    from: u64,
    chunk: u32,
}

/// A place before an entry of an index; valid until the index changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cursor {
    part: usize,
    /// Place in the chunk; the chunk's length means behind its last entry.
    at: usize,
}

impl Index {
    /// Makes an empty index, for at most as many entries as `chunks` was made for.
    pub(super) fn new(chunks: &mut Chunks) -> Self {
        let mut directory = Vec::with_capacity(chunks.all.len());
        directory.push(Part {
            from: 0,
            chunk: chunks.take(),
        });
        Self { directory }
    }

    /// Where to insert an entry with `key`: behind the last one that is not greater.
    #[inline]
    pub(super) fn cursor_for(&self, chunks: &Chunks, key: u64) -> Cursor {
        let part = self.directory.partition_point(|part| part.from <= key) - 1;
        let at = self.chunk(chunks, part).count(|k| k <= key);
        Cursor { part, at }
    }

    /// Where the first entry stands whose key is `key` or more.
    #[inline]
    pub(super) fn first_from(&self, chunks: &Chunks, key: u64) -> Option<Cursor> {
        let part = self
            .directory
            .partition_point(|part| part.from < key)
            .saturating_sub(1);
        let at = self.chunk(chunks, part).count(|k| k < key);
        self.entry_at(chunks, Cursor { part, at })
    }

    /// Where the entry with this key and slot stands.
    ///
    /// # Panics
    /// If there is none.
    pub(super) fn find(&self, chunks: &Chunks, key: u64, slot: SlotId) -> Cursor {
        let mut cursor = self.first_from(chunks, key);
        while let Some(at) = cursor {
            let (found, id) = self.entry(chunks, at);
            if id == slot {
                return at;
            }
            cursor = (found == key).then(|| self.after(chunks, at)).flatten();
        }
        panic!("slot {} is not at position {key} of its index", slot.0)
    }

    /// The key and slot of the entry at `cursor`.
    #[inline]
    pub(super) fn entry(&self, chunks: &Chunks, cursor: Cursor) -> (u64, SlotId) {
        let chunk = self.chunk(chunks, cursor.part);
        (chunk.keys()[cursor.at], SlotId(chunk.slots[cursor.at]))
    }

    /// Where the entry before `cursor` stands.
    #[inline]
    pub(super) fn before(&self, chunks: &Chunks, cursor: Cursor) -> Option<Cursor> {
        if cursor.at > 0 {
            let at = cursor.at - 1;
            return Some(Cursor { at, ..cursor });
        }
        let part = cursor.part.checked_sub(1)?;
        let at = self.chunk(chunks, part).len - 1;
        Some(Cursor { part, at })
    }

    /// The same place; the end of a chunk becomes the begin of the next one. None at the end of the index.
    #[inline]
    pub(super) fn entry_at(&self, chunks: &Chunks, cursor: Cursor) -> Option<Cursor> {
        if cursor.at < self.chunk(chunks, cursor.part).len {
            return Some(cursor);
        }
        let part = cursor.part + 1;
        (part < self.directory.len()).then_some(Cursor { part, at: 0 })
    }

    /// Inserts an entry at the place that [`Index::cursor_for`] gave for its key.
    #[inline]
    pub(super) fn insert(&mut self, chunks: &mut Chunks, mut cursor: Cursor, key: u64, slot: SlotId) {
        if self.chunk(chunks, cursor.part).len == CHUNK_MAX {
            self.cut(chunks, cursor.part);
            cursor = self.cursor_for(chunks, key);
        }
        let id = self.directory[cursor.part].chunk;
        chunks.at_mut(id).insert(cursor.at, key, slot);
    }

    /// Removes the entry at `cursor`.
    #[inline]
    pub(super) fn remove(&mut self, chunks: &mut Chunks, cursor: Cursor) -> SlotId {
        let id = self.directory[cursor.part].chunk;
        let slot = chunks.at_mut(id).remove(cursor.at);
        if chunks.at(id).len <= JOINED_MAX && self.directory.len() > 1 {
            self.join_thin(chunks, cursor.part);
        }
        slot
    }

    /// Lowers the key of the entry at `cursor`. The caller makes sure that the order stays the same.
    pub(super) fn lower_key(&mut self, chunks: &mut Chunks, cursor: Cursor, key: u64) {
        let Part { from, chunk } = &mut self.directory[cursor.part];
        *from = (*from).min(key);
        chunks.at_mut(*chunk).keys[cursor.at] = key;
    }

    /// The entries in order.
    pub(super) fn iter<'a>(&'a self, chunks: &'a Chunks) -> impl Iterator<Item = (u64, SlotId)> + 'a {
        self.directory.iter().flat_map(|part| {
            let chunk = chunks.at(part.chunk);
            let slots = chunk.slots.iter().map(|&slot| SlotId(slot));
            chunk.keys().iter().copied().zip(slots)
        })
    }

    /// Asserts the order of entries, a correct directory and the least fill of neighbours; returns the number
    /// of chunks in use.
    pub(super) fn check(&self, chunks: &Chunks) -> usize {
        assert_eq!(self.directory[0].from, 0, "the first chunk begins at 0");
        let mut last = 0;
        for (key, slot) in self.iter(chunks) {
            assert!(last <= key, "slot {} at {key} stands behind {last}", slot.0);
            last = key;
        }
        for (part, next) in self.directory.iter().zip(&self.directory[1..]) {
            let (keys, next_keys) = (chunks.at(part.chunk).keys(), chunks.at(next.chunk).keys());
            assert!(
                !keys.is_empty() && !next_keys.is_empty(),
                "an empty chunk among others"
            );
            assert!(keys[keys.len() - 1] <= next.from && next.from <= next_keys[0]);
            let both = keys.len() + next_keys.len();
            assert!(both > JOINED_MAX, "neighbours of {both} entries");
        }
        for part in &self.directory {
            let chunk = chunks.at(part.chunk);
            assert!(
                chunk.keys[chunk.len..].iter().all(|&key| key == PADDING),
                "padding of a chunk"
            );
        }
        self.directory.len()
    }

    fn after(&self, chunks: &Chunks, cursor: Cursor) -> Option<Cursor> {
        self.entry_at(
            chunks,
            Cursor {
                at: cursor.at + 1,
                ..cursor
            },
        )
    }

    #[inline]
    fn chunk<'a>(&self, chunks: &'a Chunks, part: usize) -> &'a Chunk {
        chunks.at(self.directory[part].chunk)
    }

    /// Splits a full chunk in two, then joins each half with its neighbour if possible.
    #[cold]
    fn cut(&mut self, chunks: &mut Chunks, part: usize) {
        let id = self.directory[part].chunk;
        let new = chunks.take();
        let full = chunks.at_mut(id);
        let middle = CHUNK_MAX / 2;
        let (keys, slots) = (full.keys, full.slots);
        full.truncate(middle);
        chunks.at_mut(new).append(&keys[middle..], &slots[middle..]);
        let upper = Part {
            from: keys[middle],
            chunk: new,
        };
        self.directory.insert(part + 1, upper);
        self.join_thin(chunks, part + 1);
        self.join_thin(chunks, part);
    }

    /// Joins a chunk with a neighbour if both together have few entries or one is empty.
    #[cold]
    fn join_thin(&mut self, chunks: &mut Chunks, part: usize) {
        if part + 1 < self.directory.len() {
            self.join(chunks, part);
        }
        if part > 0 {
            self.join(chunks, part - 1);
        }
    }

    /// Joins a chunk with the next one, if both together have few entries.
    fn join(&mut self, chunks: &mut Chunks, part: usize) {
        let (left, right) = (self.directory[part].chunk, self.directory[part + 1].chunk);
        let (kept, gone) = (chunks.at(left).len, chunks.at(right).len);
        if kept + gone > JOINED_MAX && kept > 0 && gone > 0 {
            return;
        }
        let Chunk { keys, slots, len } = *chunks.at(right);
        chunks.at_mut(left).append(&keys[..len], &slots[..len]);
        chunks.free.push(right);
        self.directory.remove(part + 1);
    }
}

/// Entries that a search in a chunk compares at once, and rows of a chunk.
const ROW: usize = 8;

/// Most entries of a chunk.
const CHUNK_MAX: usize = ROW * ROW;

/// The key of no entry: greater than any position, since no disk reaches the end of the address space.
const PADDING: u64 = u64::MAX;

/// Two neighbours with at most this many entries together are joined: well below [`CHUNK_MAX`], so that no
/// chunk is joined and split in alternation.
const JOINED_MAX: usize = 48;

#[cfg(test)]
mod tests;
