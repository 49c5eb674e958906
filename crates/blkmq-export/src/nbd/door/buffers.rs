//! Decides where a connection's buffers lie and what they count for. It has one region of its own, [`ALLOWANCE`] bytes, which
//! counts for nothing; small requests beyond that share further regions of the same size, and a large one has a region of its
//! length. What counts is every page from its first use on, until its region is given back: so the memory that is taken is the
//! memory that is counted, rounding and what is kept for later included.
//!
//! To unmap 32 MiB takes milliseconds. What is not needed any more goes back to the system in pieces, a few each turn, and counts
//! until it has gone.

use std::io;

use super::memory::{ALLOWANCE, Account};
use super::sys::{Buffer, Region, Rest};

/// The memory of one connection.
#[derive(Debug)]
pub(super) struct Buffers {
    account: Account,
    own: Option<Region>,
    /// Regions that small requests share.
    shared: Vec<Region>,
    /// Regions that nobody uses now, kept for the next requests.
    spare: Vec<Region>,
    spare_bytes: usize,
    /// On their way back to the system.
    leaving: Vec<Rest>,
}

/// Why there is no memory for a request.
#[derive(Debug)]
pub(super) enum Lack {
    /// Others have it; the connection is woken when it may try again.
    OfMemory,
    /// The system refuses.
    OfTheSystems(io::Error),
}

impl Buffers {
    pub(super) fn new(account: Account) -> Self {
        Self {
            account,
            own: None,
            shared: Vec::new(),
            spare: Vec::new(),
            spare_bytes: 0,
            leaving: Vec::new(),
        }
    }

    /// Takes a buffer of at least so many bytes.
    ///
    /// # Errors
    /// If there is no memory for it now.
    pub(super) fn take(&mut self, bytes: usize) -> Result<Buffer, Lack> {
        if let Some(buffer) = self.own()?.take(bytes) {
            // If it has stood in line for more, that is not needed any more.
            self.account.give_up();
            return Ok(buffer);
        }
        let found = self.shared.iter().find_map(|region| region.take(bytes));
        if let Some(buffer) = found.or_else(|| self.take_spare(bytes)) {
            return self.pay_for(buffer);
        }
        let region = Region::new(region_bytes(bytes)).map_err(Lack::OfTheSystems)?;
        let buffer = region.take(bytes).expect("a new region that is large enough");
        // The buffer alone keeps it from here on.
        drop(region);
        let buffer = self.pay_for(buffer)?;
        self.share(&buffer, bytes);
        Ok(buffer)
    }

    /// Takes a buffer back.
    pub(super) fn put(&mut self, buffer: Buffer) {
        let region = buffer.region().clone();
        drop(buffer);
        self.note_end(region);
    }

    /// A buffer of a region has gone back: if it was the last one, the region is kept or given back.
    fn note_end(&mut self, region: Region) {
        if !region.is_unused() || self.own.as_ref().is_some_and(|own| own.is(&region)) {
            return;
        }
        self.shared.retain(|shared| !shared.is(&region));
        if self.spare_bytes + region.touched_bytes() <= SPARE_BYTES_MAX && !self.account.is_short() {
            self.spare_bytes += region.touched_bytes();
            self.spare.push(region);
        } else {
            self.release(region);
        }
        if self.account.is_short() {
            self.release_spare();
        }
    }

    /// Says whether memory is kept for requests to come.
    pub(super) fn has_spare(&self) -> bool {
        !self.spare.is_empty()
    }

    /// Gives the memory back that is kept for requests to come.
    pub(super) fn release_spare(&mut self) {
        while let Some(region) = self.spare.pop() {
            self.spare_bytes -= region.touched_bytes();
            self.release(region);
        }
    }

    /// Says whether memory is on its way back to the system.
    pub(super) fn has_leaving(&self) -> bool {
        !self.leaving.is_empty()
    }

    /// Gives memory back to the system that is not needed any more, for as long as so many bytes more `may` go.
    pub(super) fn unmap(&mut self, mut may: impl FnMut(u64) -> bool) {
        while let Some(rest) = self.leaving.pop() {
            let bytes = rest.bytes().min(UNMAPPED_AT_ONCE);
            if !may(bytes as u64) {
                self.leaving.push(rest);
                return;
            }
            let (touched, left) = rest.give_back(bytes);
            self.leaving.extend(left);
            self.account.give(touched as u64);
        }
    }

    /// Gives the place in the line for memory up.
    pub(super) fn give_up(&mut self) {
        self.account.give_up();
    }

    fn own(&mut self) -> Result<&Region, Lack> {
        if self.own.is_none() {
            self.own = Some(Region::new(REGION_BYTES).map_err(Lack::OfTheSystems)?);
        }
        Ok(self.own.as_ref().expect("it was just made"))
    }

    /// Takes a region that is kept, if one fits well.
    fn take_spare(&mut self, bytes: usize) -> Option<Buffer> {
        let wanted = region_bytes(bytes);
        let fits = |region: &Region| region.bytes() >= wanted && region.bytes() <= wanted + wanted / 4;
        let place = self.spare.iter().rposition(fits)?;
        let region = self.spare.swap_remove(place);
        self.spare_bytes -= region.touched_bytes();
        let buffer = region.take(bytes).expect("an unused region that is large enough");
        self.share(&buffer, bytes);
        Some(buffer)
    }

    /// Pays for the pages of a buffer that were not counted before.
    fn pay_for(&mut self, buffer: Buffer) -> Result<Buffer, Lack> {
        let bytes = buffer.fresh_bytes() as u64;
        if bytes == 0 {
            self.account.give_up();
            return Ok(buffer);
        }
        // What is kept and does not fit is not to stand in its own way.
        if self.account.take(bytes) || (self.has_spare() && self.take_after_release(bytes)) {
            return Ok(buffer);
        }
        let region = buffer.region().clone();
        buffer.untake();
        self.note_end(region);
        Err(Lack::OfMemory)
    }

    fn take_after_release(&mut self, bytes: u64) -> bool {
        self.release_spare();
        self.account.take(bytes)
    }

    /// Lets other small requests have what is left of the region of a new buffer.
    fn share(&mut self, buffer: &Buffer, bytes: usize) {
        if bytes <= SMALL_BYTES {
            self.shared.push(buffer.region().clone());
        }
    }

    fn release(&mut self, region: Region) {
        if region.touched_bytes() == 0 {
            // Nobody has used it, so there is nothing to take time.
            return;
        }
        let rest = region.into_rest();
        debug_assert!(rest.is_some(), "a region that nobody uses has one owner");
        self.leaving.extend(rest);
    }
}

/// Bytes of the region that a request needs which fits in no other.
fn region_bytes(bytes: usize) -> usize {
    if bytes <= SMALL_BYTES {
        REGION_BYTES
    } else {
        bytes.next_multiple_of(4096)
    }
}

const REGION_BYTES: usize = ALLOWANCE as usize;
/// The largest request for which a region to share is taken: of larger ones too much of it would be left over.
const SMALL_BYTES: usize = 64 << 10;
/// Bytes that are unmapped with one system call.
const UNMAPPED_AT_ONCE: usize = 1 << 20;
/// What a connection keeps for requests to come, in bytes, as long as memory is not short.
const SPARE_BYTES_MAX: usize = 4 << 20;
