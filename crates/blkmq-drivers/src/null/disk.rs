//! A disk of a null drive: it stores nothing, or what was written, with or without a volatile cache.
//! `hctx` moves each request's data through it while the request is issued.

use std::io;

use blkmq_core::bio::{Flags, Op, Status};
use blkmq_core::request::Request;
use blkmq_host::device::Extent;

use super::cache::Cache;
use super::config::NullConfig;
use crate::store::{self, Store};
use crate::sys;

/// One disk of a null drive.
#[derive(Debug)]
pub(super) enum Disk {
    /// No memory behind it.
    Blank {
        size: u64,
        /// Reads are filled with zeroes.
        zero: bool,
    },
    /// Memory.
    Kept(Store),
    /// Memory behind a cache that loses what was not flushed when the power fails.
    Cached(Cache),
}

impl Disk {
    pub(super) fn new(config: &NullConfig, size: u64) -> Self {
        match (config.memory, config.cache) {
            (false, _) => Self::Blank {
                size,
                zero: config.zero,
            },
            (true, false) => Self::Kept(Store::new(size, false)),
            (true, true) => Self::Cached(Cache::new(size, config.cache_size)),
        }
    }

    /// Carries out a request's data movement.
    pub(super) fn run(&self, rq: &Request) -> Status {
        match self {
            Self::Blank { zero, .. } => {
                if *zero && rq.op() == Op::Read {
                    sys::for_each_sink(rq, |mut sink| sink.put_zeroes(sink.left()));
                }
                Status::Ok
            }
            Self::Kept(store) => run_on_store(store, rq),
            Self::Cached(cache) => cache.run(rq),
        }
    }

    pub(super) fn lose_power(&self) {
        if let Self::Cached(cache) = self {
            cache.lose_power();
        }
    }

    pub(super) fn extents(&self, offset: u64, len: u64, max: usize, out: &mut Vec<Extent>) -> io::Result<()> {
        match self {
            Self::Kept(store) => store.extents(offset, len, max, out),
            Self::Blank { size, zero } => one_extent(*size, offset, len, max, *zero, out),
            // The cache's content is not in the store yet: no extent is promised to be zero.
            Self::Cached(cache) => one_extent(cache.store().size(), offset, len, max, false, out),
        }
    }
}

fn one_extent(
    size: u64,
    offset: u64,
    len: u64,
    max: usize,
    is_hole: bool,
    out: &mut Vec<Extent>,
) -> io::Result<()> {
    let len = len.min(size.saturating_sub(offset));
    if len == 0 || max == 0 {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    out.push(if is_hole {
        Extent::hole(len)
    } else {
        Extent::data(len)
    });
    Ok(())
}

/// Carries out a request on memory without a cache.
pub(super) fn run_on_store(store: &Store, rq: &Request) -> Status {
    match rq.op() {
        Op::Read => store::read_request(store, rq),
        Op::Write => store::write_request(store, rq),
        Op::Flush => Status::Ok,
        Op::WriteZeroes if rq.flags().has(Flags::NO_UNMAP) => {
            store::status(store.write_zeroes(rq.offset(), rq.len()))
        }
        Op::Discard | Op::WriteZeroes => {
            store.discard(rq.offset(), rq.len());
            Status::Ok
        }
    }
}
