//! The slots of a connection, one for each request that was begun and not yet replied to in full: the request
//! and its payload, under a number that the bio carries as its cookie. `buffers` provides the memory.

use std::ops::Range;

use blkmq_core::bio::{Bio, Data};

use crate::common::buffers::{Buffers, NoMemory};
use crate::common::memory::Account;
use crate::common::payload::Payload;
use crate::nbd::session::{Op, Request};

/// The requests under way on one connection.
#[derive(Debug, Default)]
pub(super) struct Slots {
    slots: Vec<Option<Slot>>,
    free: Vec<u32>,
    /// Set once an export is selected.
    buffers: Option<Buffers>,
}

/// One request under way.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) request: Request,
    pub(super) payload: Option<Payload>,
    /// Bytes of the request that were read or written already: a large one goes to the disk in
    /// pieces.
    pub(super) done: u64,
    /// All that was read so far is zeroes.
    pub(super) is_zero: bool,
}

impl Slots {
    /// Sets the account that pays for the buffers, and whether buffers that others have used are
    /// excluded.
    pub(super) fn set_account(&mut self, account: Account, is_for_itself: bool) {
        self.buffers = Some(Buffers::new(account, is_for_itself));
    }

    /// Withdraws the claim of a request that waits for memory: the request is not wanted any more.
    pub(super) fn give_up(&mut self) {
        if let Some(buffers) = &mut self.buffers {
            buffers.give_up();
        }
    }

    /// Begins a request, with `bytes` of memory.
    ///
    /// # Errors
    /// There is no memory now.
    pub(super) fn begin(&mut self, request: Request, bytes: usize) -> Result<u32, NoMemory> {
        let payload = match bytes {
            0 => None,
            _ => Some(self.buffers().take(bytes)?),
        };
        let slot = Some(Slot {
            request,
            payload,
            done: 0,
            is_zero: true,
        });
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() as u32 - 1
        });
        self.slots[index as usize] = slot;
        Ok(index)
    }

    /// Returns a request under way.
    ///
    /// # Panics
    /// There is no request of that number.
    pub(super) fn get(&mut self, index: u32) -> &mut Slot {
        self.slots[index as usize]
            .as_mut()
            .expect("a request that is under way")
    }

    /// Returns a range of the data of a read that has ended, piece by piece.
    ///
    /// # Panics
    /// There is no such request, or its memory is still lent.
    pub(super) fn data(&self, index: u32, range: Range<usize>) -> impl Iterator<Item = &[u8]> {
        let slot = self.slots[index as usize]
            .as_ref()
            .expect("a request that is under way");
        slot.payload.as_ref().expect("a read has memory").slices(range)
    }

    /// Ends a request: its number and its buffer are free for the next one.
    pub(super) fn end(&mut self, index: u32) -> Request {
        let slot = self.slots[index as usize]
            .take()
            .expect("a request that is under way");
        self.free.push(index);
        if let Some(payload) = slot.payload {
            self.buffers().put(payload);
        }
        slot.request
    }

    fn buffers(&mut self) -> &mut Buffers {
        self.buffers
            .as_mut()
            .expect("buffers on the account of the export's group")
    }

    /// The number of requests under way.
    pub(super) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }
}

impl Slot {
    /// Turns `bio`, which covers the whole request, into one for the next piece, and lends it the
    /// memory of that piece.
    pub(super) fn lend_to(&mut self, bio: &mut Bio) {
        let end = self.piece_end(bio.len);
        if let Some(payload) = &mut self.payload {
            bio.offset += self.done;
            bio.len = end - self.done;
            bio.data = payload.lend(self.done as usize..end as usize);
        }
    }

    /// The end of the piece that is under way, or of the next one: a part of `bytes` that one bio
    /// covers. A read into untouched memory takes ten times as long to copy, so its pieces are
    /// smaller.
    fn piece_end(&self, bytes: u64) -> u64 {
        let end = bytes.min(self.done + PIECE_BYTES_MAX);
        match &self.payload {
            Some(payload) if self.request.op == Op::Read => {
                end.min(payload.end_of_fresh(self.done as usize) as u64)
            }
            _ => end,
        }
    }

    /// Records that a bio has ended well. Returns whether more of the request remains to be read or
    /// written.
    pub(super) fn is_unfinished(&mut self) -> bool {
        let has_pieces = matches!(self.request.op, Op::Read | Op::Write);
        self.done = self.piece_end(self.request.length);
        has_pieces && self.done < self.request.length
    }

    /// Checks whether the piece of a read that has ended well is all zeroes. Other data mostly
    /// shows in its first bytes, so the check costs little; a check of zeroes costs a tenth of
    /// sending them.
    pub(super) fn look_for_zeroes(&mut self) {
        let end = self.piece_end(self.request.length);
        if let (Op::Read, true, Some(payload)) = (self.request.op, self.is_zero, &self.payload) {
            self.is_zero = payload.slices(self.done as usize..end as usize).all(is_zero);
        }
    }

    /// Takes the memory back from a bio that has ended.
    pub(super) fn take_back(&mut self, ended: &Bio) {
        if let (Some(payload), Data::Flat(_) | Data::List(_)) = (&mut self.payload, &ended.data) {
            payload.take_back();
        }
    }
}

fn is_zero(bytes: &[u8]) -> bool {
    let zero = |piece: &[u8]| piece.iter().fold(0, |all, byte| all | byte) == 0;
    bytes.chunks(LOOKED_AT_ONCE).all(zero)
}

/// Longest bio for a part of a request. Larger requests go to the disk piece by piece: a drive that
/// moves data while a bio is issued would otherwise delay everybody on this thread for as long as
/// 32 MiB take.
const PIECE_BYTES_MAX: u64 = 1 << 20;
/// Bytes checked together: a loop without a branch, which the compiler vectorizes.
const LOOKED_AT_ONCE: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::arena::PIECE_BYTES;
    use crate::common::sys::Region;
    use blkmq_nbd::codec::CommandFlags;

    /// Where a request of `length` bytes at 4096 is cut.
    fn pieces(op: Op, length: u64, region: impl Fn() -> Region) -> Vec<(u64, u64)> {
        let request = Request {
            cookie: 1,
            offset: 4096,
            length,
            op,
            flags: CommandFlags::NONE,
        };
        let buffer = |_| region().take(PIECE_BYTES).unwrap();
        let count = length.div_ceil(PIECE_BYTES as u64);
        let mut slot = Slot {
            request,
            payload: Some(Payload::new(buffer(0), (1..count).map(buffer).collect())),
            done: 0,
            is_zero: true,
        };
        let mut covered = Vec::new();
        loop {
            let mut bio = Bio {
                offset: request.offset,
                len: length,
                ..Bio::default()
            };
            slot.lend_to(&mut bio);
            let lent = match &bio.data {
                Data::Flat(piece) => u64::from(piece.len()),
                Data::List(pieces) => pieces.iter().map(|piece| u64::from(piece.len())).sum(),
                other => panic!("{other:?}"),
            };
            assert_eq!(lent, bio.len);
            covered.push((bio.offset, bio.len));
            slot.take_back(&bio);
            if !slot.is_unfinished() {
                return covered;
            }
        }
    }

    fn cut(length: u64, piece_bytes: u64) -> Vec<(u64, u64)> {
        let starts = (0..length).step_by(piece_bytes as usize);
        starts
            .map(|at| (4096 + at, piece_bytes.min(length - at)))
            .collect()
    }

    #[test]
    fn large_request_goes_to_the_disk_in_pieces_that_cover_it() {
        let length = 3 * PIECE_BYTES_MAX + 512;
        let fresh = || Region::new(PIECE_BYTES).unwrap();
        let used = || {
            let region = fresh();
            drop(region.take(PIECE_BYTES).unwrap());
            region
        };
        assert_eq!(pieces(Op::Read, length, used), cut(length, PIECE_BYTES_MAX));
        assert_eq!(pieces(Op::Write, length, fresh), cut(length, PIECE_BYTES_MAX));
        let pieces = pieces(Op::Read, length, fresh);
        assert_eq!(
            pieces,
            cut(length, PIECE_BYTES as u64),
            "into memory nobody touched"
        );
    }

    #[test]
    fn one_byte_anywhere_is_no_zeroes() {
        let mut bytes = vec![0; 3 * LOOKED_AT_ONCE + 17];
        assert!(is_zero(&bytes));
        for at in 0..bytes.len() {
            bytes[at] = 0x80;
            assert!(!is_zero(&bytes), "byte {at}");
            bytes[at] = 0;
        }
    }
}
