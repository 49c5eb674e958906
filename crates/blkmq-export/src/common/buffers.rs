//! A connection's buffers: where they lie, and which memory is accounted. A connection has one region of its
//! own, [`PIECE_BYTES`] long, which is not accounted. What it needs beyond that lies in further regions of
//! the same size: a long request has as many as it needs, small requests share them. Further regions come
//! from the pool (`pool`), or else from the arena. Every page of them is accounted from its first use until
//! its region is given back: so the memory in use is the memory accounted, rounding included.

use std::io;

use super::arena::PIECE_BYTES;
use super::memory::Account;
use super::payload::Payload;
use super::sys::{Buffer, Chunk, Region};

/// The memory of one connection.
#[derive(Debug)]
pub(crate) struct Buffers {
    account: Account,
    /// Only memory that nobody has used: reads from the connection's drive may leave old content in
    /// the buffers.
    is_for_itself: bool,
    own: Option<Region>,
    /// Regions that small requests share.
    shared: Vec<Region>,
}

/// Why there is no memory for a request.
#[derive(Debug)]
pub(crate) enum NoMemory {
    /// Others have it; the connection is woken when it may try again.
    Now,
    /// The system refuses memory.
    OfTheSystem(io::Error),
}

impl Buffers {
    /// Makes it without any memory. `is_for_itself`: it must not get memory that other connections
    /// have used.
    pub(crate) fn new(account: Account, is_for_itself: bool) -> Self {
        Self {
            account,
            is_for_itself,
            own: None,
            shared: Vec::new(),
        }
    }

    /// Takes memory for a payload of `bytes` bytes.
    ///
    /// # Errors
    /// There is no memory now.
    pub(crate) fn take(&mut self, bytes: usize) -> Result<Payload, NoMemory> {
        if bytes <= PIECE_BYTES {
            return self
                .take_small(bytes)
                .map(|buffer| Payload::new(buffer, Vec::new()));
        }
        let needed = bytes.next_multiple_of(PAGE);
        if !self.account.take(needed as u64) {
            return Err(NoMemory::Now);
        }
        let mut buffers = Vec::with_capacity(needed.div_ceil(PIECE_BYTES));
        let most = if self.is_for_itself {
            0
        } else {
            needed / PIECE_BYTES
        };
        let mut kept = self.account.take_kept(most).into_iter();
        let mut paid = needed;
        while paid > 0 {
            let piece = paid.min(PIECE_BYTES);
            match self.region(kept.next()) {
                Ok(region) => buffers.push(region.take(piece).expect("a region that is large enough")),
                Err(error) => {
                    let fresh: usize = buffers.iter().map(Buffer::fresh_bytes).sum();
                    self.account.give((paid + fresh) as u64);
                    self.untake_all(buffers);
                    return Err(NoMemory::OfTheSystem(error));
                }
            }
            paid -= piece;
        }
        self.account.make_fit();
        let rest = buffers.split_off(1);
        let first = buffers.pop().expect("a payload of some bytes");
        Ok(Payload::new(first, rest))
    }

    /// Takes memory back.
    pub(crate) fn put(&mut self, payload: Payload) {
        self.put_all(payload.into_buffers());
    }

    /// Gives up the place in the line for memory.
    pub(crate) fn give_up(&mut self) {
        self.account.give_up();
    }

    /// Takes a buffer from one of the connection's regions, or from a new one that other requests
    /// may share.
    fn take_small(&mut self, bytes: usize) -> Result<Buffer, NoMemory> {
        if let Some(buffer) = self.own()?.take(bytes) {
            // The connection may have waited in line for more, which it does not need any more.
            self.account.give_up();
            return Ok(buffer);
        }
        let found = self.shared.iter().find_map(|region| region.take(bytes));
        let buffer = match found {
            Some(buffer) => buffer,
            None => self.first_of_a_region(bytes)?,
        };
        let fresh = buffer.fresh_bytes() as u64;
        if fresh == 0 {
            self.account.give_up();
        } else if !self.account.take(fresh) {
            self.untake_all(vec![buffer]);
            return Err(NoMemory::Now);
        } else {
            self.account.make_fit();
        }
        Ok(buffer)
    }

    /// A buffer of a region that nobody has used.
    fn first_of_a_region(&mut self, bytes: usize) -> Result<Buffer, NoMemory> {
        let kept = if self.is_for_itself {
            None
        } else {
            self.account.take_kept_whole()
        };
        let region = self.region(kept).map_err(NoMemory::OfTheSystem)?;
        let buffer = region.take(bytes).expect("a new region that is large enough");
        if bytes <= SMALL_BYTES {
            self.shared.push(region);
        }
        Ok(buffer)
    }

    fn put_all(&mut self, buffers: impl IntoIterator<Item = Buffer>) {
        let regions = buffers.into_iter().filter_map(|buffer| {
            let region = buffer.region().clone();
            drop(buffer);
            self.unused(region)
        });
        let unused = regions.collect();
        self.account.keep(unused);
    }

    /// Gives back buffers that nobody has touched.
    fn untake_all(&mut self, buffers: Vec<Buffer>) {
        let regions = buffers.into_iter().filter_map(|buffer| {
            let region = buffer.region().clone();
            buffer.untake();
            self.unused(region)
        });
        let unused = regions.collect();
        self.account.keep(unused);
    }

    /// Removes a region whose last buffer was given back.
    fn unused(&mut self, region: Region) -> Option<Chunk> {
        if !region.is_unused() || self.own.as_ref().is_some_and(|own| own.is(&region)) {
            return None;
        }
        self.shared.retain(|shared| !shared.is(&region));
        let chunk = region.into_chunk();
        debug_assert!(chunk.is_some(), "a region that nobody uses has one owner");
        // An untouched region is not worth keeping.
        chunk.filter(|chunk| chunk.touched_bytes() > 0)
    }

    fn own(&mut self) -> Result<&Region, NoMemory> {
        if self.own.is_none() {
            // Not accounted, whatever memory it takes: it may be a piece that others have used.
            let own = match self.is_for_itself {
                true => Region::new_blank(PIECE_BYTES),
                false => Region::new(PIECE_BYTES),
            };
            self.own = Some(own.map_err(NoMemory::OfTheSystem)?);
        }
        Ok(self.own.as_ref().expect("it was just made"))
    }

    /// The region that was kept, or a new one, which takes only memory that will be accounted.
    fn region(&self, kept: Option<Chunk>) -> io::Result<Region> {
        match kept {
            Some(chunk) => Ok(chunk.into_region()),
            None => Region::new_blank(PIECE_BYTES),
        }
    }
}

const PAGE: usize = 4096;
/// The largest request for which a shared region is taken: larger ones would leave too much of it
/// unused.
const SMALL_BYTES: usize = 64 << 10;
