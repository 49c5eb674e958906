//! A volatile write cache in front of a store: what it holds, and what is lost when the power fails. A
//! testing instrument: it is exact and holds one lock for a whole request, so it is not fast.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use blkmq_core::bio::{Flags, Op, Status};
use blkmq_core::request::Request;

use super::disk::run_on_store;
use crate::store::{self, Store};
use crate::sys::{Sink, Source, for_each_sink, for_each_source};

/// A store and the blocks that were written since they were last made durable.
#[derive(Debug)]
pub(super) struct Cache {
    durable: Store,
    /// By number. A block here overrides the store's.
    dirty: Mutex<BTreeMap<u64, Box<[u8]>>>,
    blocks_max: usize,
}

impl Cache {
    /// Makes an empty disk of `size` bytes with a cache of `capacity` bytes.
    pub(super) fn new(size: u64, capacity: u64) -> Self {
        Self {
            durable: Store::new(size, false),
            dirty: Mutex::default(),
            blocks_max: usize::try_from(capacity / BLOCK).unwrap_or(usize::MAX),
        }
    }

    pub(super) fn store(&self) -> &Store {
        &self.durable
    }

    /// Executes a request. A write goes to the cache, with FUA to the store; zeroing and discards
    /// go to the store, since a cache may write back its content at any time.
    pub(super) fn run(&self, rq: &Request) -> Status {
        let mut dirty = self.dirty();
        match rq.op() {
            Op::Read => {
                let mut at = rq.offset();
                for_each_sink(rq, |mut sink| self.read(&dirty, &mut at, &mut sink));
                Status::Ok
            }
            Op::Write if !rq.flags().has(Flags::FUA) => self.write(&mut dirty, rq),
            Op::Flush => self.write_back(&mut dirty),
            Op::Write | Op::Discard | Op::WriteZeroes => {
                dirty.retain(|block, _| !(rq.offset()..rq.offset() + rq.len()).contains(&(block * BLOCK)));
                run_on_store(&self.durable, rq)
            }
        }
    }

    /// Drops what is not durable.
    pub(super) fn lose_power(&self) {
        self.dirty().clear();
    }

    fn read(&self, dirty: &BTreeMap<u64, Box<[u8]>>, at: &mut u64, sink: &mut Sink<'_>) {
        while sink.left() > 0 {
            let (block, skip) = (*at / BLOCK, *at % BLOCK);
            let len = (BLOCK - skip).min(sink.left() as u64);
            match dirty.get(&block) {
                Some(bytes) => sink.put(&bytes[skip as usize..(skip + len) as usize]),
                None => self.durable.read(*at, len, sink),
            }
            *at += len;
        }
    }

    fn write(&self, dirty: &mut BTreeMap<u64, Box<[u8]>>, rq: &Request) -> Status {
        let blocks = (rq.len() / BLOCK) as usize;
        let mut status = Status::Ok;
        if dirty.len() + blocks > self.blocks_max {
            status = self.write_back(dirty);
        }
        let mut at = rq.offset();
        for_each_source(rq, |mut source| put(dirty, &mut at, &mut source));
        status
    }

    fn write_back(&self, dirty: &mut BTreeMap<u64, Box<[u8]>>) -> Status {
        while let Some((block, bytes)) = dirty.pop_first() {
            if let Err(error) = self.durable.write_bytes(block * BLOCK, &bytes) {
                dirty.insert(block, bytes);
                return store::status(Err(error));
            }
        }
        Status::Ok
    }

    /// A panic in the middle of a request leaves whole blocks, old or new: nothing needs repair.
    fn dirty(&self) -> MutexGuard<'_, BTreeMap<u64, Box<[u8]>>> {
        self.dirty.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Copies a piece into blocks of the cache. Pieces may end in the middle of a block, requests do not.
fn put(dirty: &mut BTreeMap<u64, Box<[u8]>>, at: &mut u64, source: &mut Source<'_>) {
    while source.left() > 0 {
        let (block, skip) = (*at / BLOCK, (*at % BLOCK) as usize);
        let len = (BLOCK as usize - skip).min(source.left());
        let bytes = dirty
            .entry(block)
            .or_insert_with(|| vec![0; BLOCK as usize].into());
        source.take(&mut bytes[skip..skip + len]);
        *at += len as u64;
    }
}

/// The smallest logical block there is, in bytes: requests are multiples of it.
const BLOCK: u64 = 512;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{lend, request, request_with};

    fn write(cache: &Cache, flags: Flags, offset: u64, fill: u8) {
        let mut bytes = vec![fill; 1024];
        let (head, tail) = bytes.split_at_mut(300);
        let rq = request_with(Op::Write, flags, 0, offset, &[lend(head), lend(tail)]);
        assert_eq!(cache.run(&rq), Status::Ok);
    }

    fn read(cache: &Cache, offset: u64) -> [u8; 2] {
        let mut bytes = vec![0xee; 1024];
        let (head, tail) = bytes.split_at_mut(700);
        let rq = request_with(Op::Read, Flags::NONE, 0, offset, &[lend(head), lend(tail)]);
        assert_eq!(cache.run(&rq), Status::Ok);
        [bytes[0], bytes[1023]]
    }

    #[test]
    fn power_loss_takes_what_was_not_flushed_and_nothing_else() {
        let cache = Cache::new(1 << 20, 1 << 20);
        write(&cache, Flags::NONE, 0, 1);
        assert_eq!(cache.run(&request(Op::Flush, 0, 0)), Status::Ok);
        write(&cache, Flags::NONE, 512, 2);
        write(&cache, Flags::FUA, 4096, 3);
        write(&cache, Flags::NONE, 8192, 4);
        assert_eq!(
            [read(&cache, 0), read(&cache, 4096), read(&cache, 8192)],
            [[1, 2], [3, 3], [4, 4]]
        );
        cache.lose_power();
        assert_eq!(
            [read(&cache, 0), read(&cache, 4096), read(&cache, 8192)],
            [[1, 1], [3, 3], [0, 0]]
        );
    }

    #[test]
    fn discard_hides_what_the_cache_holds() {
        let cache = Cache::new(1 << 20, 1 << 20);
        write(&cache, Flags::NONE, 0, 1);
        cache.run(&request(Op::Discard, 0, 512));
        assert_eq!(read(&cache, 0), [0, 1]);
    }

    #[test]
    fn full_cache_writes_back_and_stays_within_its_size() {
        let cache = Cache::new(1 << 20, 2048);
        for i in 0..8 {
            write(&cache, Flags::NONE, i * 1024, 7);
            assert!(cache.dirty().len() <= 4);
        }
        cache.lose_power();
        assert_eq!((read(&cache, 0), read(&cache, 7 * 1024)), ([7, 7], [0, 0]));
    }
}
