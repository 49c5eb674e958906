//! Decides what a connection remembers of each request that was begun and not yet replied to in full: the request and its
//! buffer, under a number that the bio carries as its cookie. Buffers are kept for the next request of their size.

use blkmq_core::bio::{Bio, Data};

use super::memory::Account;
use super::sys::Buffer;
use crate::nbd::session::Request;

/// The requests under way on one connection.
#[derive(Debug, Default)]
pub(super) struct Slots {
    slots: Vec<Option<Slot>>,
    free: Vec<u32>,
    spare: Spare,
    /// Pays for the buffers; there is one from the selection of an export on.
    account: Option<Account>,
}

/// One request under way.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) request: Request,
    pub(super) buffer: Option<Buffer>,
    /// What the buffer counts for.
    bytes: u64,
}

impl Slots {
    /// Says who pays for the buffers.
    pub(super) fn set_account(&mut self, account: Account) {
        self.account = Some(account);
    }

    /// Forgets that a request could not begin for want of memory: it is not wanted any more.
    pub(super) fn give_up(&mut self) {
        if let Some(account) = &mut self.account {
            account.give_up();
        }
    }

    /// Begins a request, with a buffer of so many bytes. None if there is no memory for that now.
    pub(super) fn begin(&mut self, request: Request, bytes: usize) -> Option<u32> {
        if bytes > 0 && !self.account().take(bytes as u64) {
            return None;
        }
        let buffer = (bytes > 0).then(|| self.spare.take(bytes));
        let slot = Some(Slot {
            request,
            buffer,
            bytes: bytes as u64,
        });
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() as u32 - 1
        });
        self.slots[index as usize] = slot;
        Some(index)
    }

    /// Returns a request under way.
    ///
    /// # Panics
    /// If there is none of that number.
    pub(super) fn get(&mut self, index: u32) -> &mut Slot {
        self.slots[index as usize]
            .as_mut()
            .expect("a request that is under way")
    }

    /// Returns the bytes of the buffer of a read that has ended.
    ///
    /// # Panics
    /// If there is no such request, or its buffer is still lent.
    pub(super) fn data(&self, index: u32) -> &[u8] {
        let slot = self.slots[index as usize]
            .as_ref()
            .expect("a request that is under way");
        slot.buffer.as_ref().expect("a read has a buffer").bytes()
    }

    /// Says whether a read that has ended brought nothing but zeroes. Other data mostly shows in the first bytes, so that
    /// looking costs little; and what is zero costs a tenth of sending it.
    ///
    /// # Panics
    /// As [`Slots::data`].
    pub(super) fn reads_as_zeroes(&self, index: u32) -> bool {
        let length = self.slots[index as usize]
            .as_ref()
            .map_or(0, |slot| slot.request.length as usize);
        is_zero(&self.data(index)[..length])
    }

    /// Ends a request: its number and its buffer are free for the next.
    pub(super) fn end(&mut self, index: u32) -> Request {
        let slot = self.slots[index as usize]
            .take()
            .expect("a request that is under way");
        self.free.push(index);
        if let Some(buffer) = slot.buffer {
            self.spare.put(buffer);
            self.account().give(slot.bytes);
        }
        slot.request
    }

    fn account(&mut self) -> &mut Account {
        self.account.as_mut().expect("an account of the export's group")
    }

    /// How many requests are under way.
    pub(super) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }
}

impl Slot {
    /// Lends the buffer to `bio`.
    pub(super) fn lend_to(&mut self, bio: &mut Bio) {
        if let Some(buffer) = &mut self.buffer {
            bio.data = Data::Flat(buffer.lend(bio.len as u32));
        }
    }

    /// Takes the buffer back from a bio that has ended.
    pub(super) fn take_back(&mut self, ended: &Bio) {
        if let (Some(buffer), Data::Flat(_)) = (&mut self.buffer, &ended.data) {
            buffer.take_back();
        }
    }
}

/// Buffers that nobody uses now, by size: powers of two from 4 KiB on. A class keeps at most [`SPARE_BYTES_MAX`] bytes, and
/// nothing larger is kept, so that an idle connection costs little.
#[derive(Debug, Default)]
struct Spare {
    classes: [Vec<Buffer>; CLASSES],
}

impl Spare {
    fn take(&mut self, bytes: usize) -> Buffer {
        let size = bytes.max(CLASS_MIN).next_power_of_two();
        let kept = self.classes.get_mut(class(size)).and_then(Vec::pop);
        kept.unwrap_or_else(|| Buffer::new(size))
    }

    fn put(&mut self, buffer: Buffer) {
        let size = buffer.capacity();
        if let Some(kept) = self.classes.get_mut(class(size))
            && (kept.len() + 1) * size <= SPARE_BYTES_MAX
        {
            kept.push(buffer);
        }
    }
}

fn is_zero(bytes: &[u8]) -> bool {
    let zero = |piece: &[u8]| piece.iter().fold(0, |all, byte| all | byte) == 0;
    bytes.chunks(LOOKED_AT_ONCE).all(zero)
}

/// Which class a size belongs to: 0 for 4 KiB.
fn class(size: usize) -> usize {
    (size.trailing_zeros() - CLASS_MIN.trailing_zeros()) as usize
}

/// Bytes that are looked at together: a loop without a branch, which the compiler makes wide.
const LOOKED_AT_ONCE: usize = 256;
const CLASS_MIN: usize = 4096;
/// 4 KiB to 1 MiB.
const CLASSES: usize = 9;
const SPARE_BYTES_MAX: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

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

    #[test]
    fn a_buffer_is_used_again_for_the_next_request_of_its_size() {
        let mut spare = Spare::default();
        let buffer = spare.take(5000);
        assert_eq!(buffer.capacity(), 8192);
        let address = buffer.bytes().as_ptr();
        spare.put(buffer);
        assert_eq!(spare.take(8192).bytes().as_ptr(), address);
        spare.put(Buffer::new(32 << 20));
        assert!(
            spare.classes.iter().all(Vec::is_empty),
            "huge ones are given back"
        );
    }
}
