//! A modelled device in real time, which ends a read like the null driver's timer, with the times of the
//! simulator's devices, which can change from read to read.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io;

use blkmq_core::bio::Status;
use blkmq_core::driver::{Done, HctxDriver, Issued, TimedOut};
use blkmq_core::ids::{Cookie, DiskId, HctxId};
use blkmq_core::limits::Limits;
use blkmq_core::request::Request;
use blkmq_core::time::Instant;
use blkmq_host::device::{Allocation, Extent};
use blkmq_host::device::{Device, Polling};
use blkmq_host::ring::RingHandle;
use blkmq_sim::rng::Rng;
use blkmq_sim::scenario::poll::ModelledDevice;

/// A drive that stores nothing and serves any number of reads at once.
pub(super) struct Modelled(pub(super) ModelledDevice);

struct Hctx {
    device: ModelledDevice,
    rng: Rng,
    issued: u64,
    ends: BinaryHeap<Reverse<(Instant, u64)>>,
    /// The device does not announce completions.
    is_polled: bool,
}

impl Device for Modelled {
    fn limits(&self) -> Limits {
        Limits::default()
    }

    fn polling(&self) -> Polling {
        Polling::Possible
    }

    fn open_hctx(&self, _ring: &RingHandle, hctx: HctxId) -> io::Result<Box<dyn HctxDriver>> {
        Ok(Box::new(Hctx {
            device: self.0,
            rng: Rng::new(1, hctx.0.into()),
            issued: 0,
            ends: BinaryHeap::with_capacity(super::DEPTH_MAX as usize),
            is_polled: false,
        }))
    }
}

impl Allocation for Modelled {
    fn extents(
        &self,
        _disk: DiskId,
        _offset: u64,
        len: u64,
        _max: usize,
        out: &mut Vec<Extent>,
    ) -> io::Result<()> {
        out.push(Extent::hole(len));
        Ok(())
    }
}

impl HctxDriver for Hctx {
    fn issue(&mut self, rq: &Request, cookie: Cookie, _last: bool, now: Instant) -> Issued {
        let time = self.device.time(self.issued, rq.len(), &mut self.rng);
        self.issued += 1;
        self.ends.push(Reverse((now + time, cookie.raw())));
        Issued::Queued
    }

    fn reap(&mut self, now: Instant, done: &mut Vec<Done>) {
        while let Some(&Reverse((end, cookie))) = self.ends.peek()
            && end <= now
        {
            self.ends.pop();
            done.push(Done {
                cookie: Cookie::from_raw(cookie),
                status: Status::Ok,
            });
        }
    }

    fn next_event(&self) -> Option<Instant> {
        let first = self.ends.peek().filter(|_| !self.is_polled);
        first.map(|Reverse((end, _))| *end)
    }

    fn set_polled(&mut self, on: bool) -> bool {
        self.is_polled = on;
        on
    }

    fn timed_out(&mut self, cookie: Cookie) -> TimedOut {
        self.ends.retain(|Reverse((_, held))| *held != cookie.raw());
        TimedOut::Ended
    }
}
