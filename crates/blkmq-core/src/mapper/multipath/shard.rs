//! One hardware context's counts of its paths, as the others see them: a cache line for each path,
//! written by its owner only. Selectors that weigh a path's whole load sum the lines of all contexts.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use blkmq_sync::Counter;

use super::PATHS_MAX;

/// One hardware context's counts of all paths.
#[derive(Debug)]
pub(super) struct Shard {
    pub(super) paths: [PathShard; PATHS_MAX],
}

/// One hardware context's counts of one path: a cache line.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(super) struct PathShard {
    /// Which path of this number is meant.
    pub(super) serial: Counter,
    /// Requests that the path's driver has taken.
    pub(super) ios: Counter,
    /// Bytes of these requests.
    pub(super) bytes: Counter,
    /// Requests that did not end with success, final errors included.
    pub(super) errors: Counter,
    in_flight: AtomicU32,
    in_flight_bytes: AtomicU64,
    /// Moving average of the serialised service time, in nanoseconds.
    pub(super) service_ns: Counter,
}

impl Shard {
    pub(super) fn new() -> Self {
        Self {
            paths: std::array::from_fn(|_| PathShard::default()),
        }
    }
}

impl PathShard {
    /// Starts from zero if another path has this number now; called by the owner.
    pub(super) fn adopt(&self, serial: u64) {
        if self.serial.get() != serial {
            debug_assert_eq!(self.in_flight(), 0, "a path's number was given away while in use");
            for counter in [&self.ios, &self.bytes, &self.errors, &self.service_ns] {
                counter.set(0);
            }
            self.serial.set(serial);
        }
    }

    /// Counts a request that was taken; called by the owner.
    #[inline]
    pub(super) fn count(&self, bytes: u64) {
        self.ios.add(1);
        self.bytes.add(bytes);
    }

    /// Counts a request as in flight; called by the owner.
    #[inline]
    pub(super) fn start(&self, bytes: u64) {
        self.set(self.in_flight() + 1, self.in_flight_bytes() + bytes);
    }

    /// Counts a request as no longer in flight; called by the owner.
    #[inline]
    pub(super) fn end(&self, bytes: u64) {
        let (requests, in_flight) = (self.in_flight(), self.in_flight_bytes());
        debug_assert!(requests > 0 && in_flight >= bytes, "an end without a start");
        self.set(requests - 1, in_flight - bytes);
    }

    /// Requests in flight. Relaxed, as are all accesses here: a hint for others, and exact for the owner.
    #[inline]
    pub(super) fn in_flight(&self) -> u32 {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// Bytes of the requests in flight.
    #[inline]
    pub(super) fn in_flight_bytes(&self) -> u64 {
        self.in_flight_bytes.load(Ordering::Relaxed)
    }

    fn set(&self, requests: u32, bytes: u64) {
        self.in_flight.store(requests, Ordering::Relaxed);
        self.in_flight_bytes.store(bytes, Ordering::Relaxed);
    }
}
