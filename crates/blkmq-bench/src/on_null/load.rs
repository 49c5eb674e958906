//! The load on a reactor: a service keeps a fixed number of bios in flight, each submitted again as soon as
//! it has ended. So the dispatcher may issue any submitter's requests, as in the daemon.

use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Instant;

use blkmq_core::bio::{Bio, Op};
use blkmq_host::disk::Disk;
use blkmq_host::ring::Completion;
use blkmq_host::service::{Cx, Service};

use crate::histogram::Histogram;
use crate::offsets::Offsets;
use crate::sys::Buffers;
use crate::window::{Phase, Window};

/// A submitter on a reactor.
pub(super) struct Load {
    disk: Disk,
    depth: u32,
    window: Arc<Window>,
    index: usize,
    /// Receives the latencies when the load is dropped.
    results: Sender<Histogram>,
    buffers: Buffers,
    offsets: Offsets,
    phase: Phase,
    count: u64,
    latency: Histogram,
    origin: Instant,
    is_draining: bool,
}

impl Load {
    pub(super) fn new(
        disk: &Disk,
        depth: u32,
        window: Arc<Window>,
        index: usize,
        results: Sender<Histogram>,
    ) -> Self {
        Self {
            disk: disk.clone(),
            depth,
            window,
            index,
            results,
            buffers: Buffers::new(depth, BLOCK_BYTES),
            offsets: Offsets::new(disk.size, u64::from(BLOCK_BYTES), true, index as u64),
            phase: Phase::WarmUp,
            count: 0,
            latency: Histogram::new(),
            origin: Instant::now(),
            is_draining: false,
        }
    }

    #[inline]
    fn submit(&mut self, cx: &mut Cx<'_>, mut bio: Bio) {
        bio.offset = self.offsets.next();
        // Two clock readings cost as much as the I/O, so few I/Os are timed.
        bio.cookie = if self.count.is_multiple_of(SAMPLE_EVERY) {
            self.now()
        } else {
            0
        };
        if let Err(bio) = cx.submit(self.disk.queue, bio) {
            // There are as many requests as bios, so a refusal would be a defect.
            self.buffers.take_back(bio);
            self.window.fail();
        }
    }

    fn now(&self) -> u64 {
        self.origin.elapsed().as_nanos() as u64 + 1
    }
}

impl Service for Load {
    fn start(&mut self, cx: &mut Cx<'_>) {
        for _ in 0..self.depth {
            let bio = Bio {
                op: Op::Read,
                disk: self.disk.id,
                len: u64::from(BLOCK_BYTES),
                data: self.buffers.lend(),
                ..Bio::default()
            };
            self.submit(cx, bio);
        }
    }

    fn on_ring(&mut self, _cx: &mut Cx<'_>, _completed: &[Completion]) {}

    #[inline]
    fn on_end(&mut self, cx: &mut Cx<'_>, bio: Bio) {
        self.count += 1;
        if !bio.status.is_ok() {
            self.window.fail();
        }
        if bio.cookie != 0 {
            self.latency.record(self.now() - bio.cookie);
        }
        if self.is_draining || self.phase == Phase::Stop {
            self.buffers.take_back(bio);
        } else {
            self.submit(cx, bio);
        }
    }

    fn end_of_batch(&mut self, _cx: &mut Cx<'_>) {
        self.window.publish(self.index, self.count);
        let before = std::mem::replace(&mut self.phase, self.window.phase());
        if before == Phase::WarmUp && self.phase == Phase::Measure {
            self.latency.clear();
        }
    }

    fn busy(&self) -> bool {
        !self.is_draining && self.phase != Phase::Stop
    }

    fn drain(&mut self, _cx: &mut Cx<'_>) {
        self.is_draining = true;
    }

    fn is_finished(&self) -> bool {
        self.is_draining
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        // After an error there is no receiver.
        let _ = self.results.send(std::mem::take(&mut self.latency));
    }
}

const BLOCK_BYTES: u32 = 4096;
const SAMPLE_EVERY: u64 = 64;
