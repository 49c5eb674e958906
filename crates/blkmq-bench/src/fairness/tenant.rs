//! A tenant on its reactor: it keeps its I/Os in flight until it is told to be silent or to stop, and counts
//! them. `stage` reads the counters while it runs.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use blkmq_core::bio::{Bio, Data};
use blkmq_core::time::Nanos;
use blkmq_host::disk::QueueId;
use blkmq_host::ring::Completion;
use blkmq_host::service::{Cx, Service};

use super::scene::Tenant;
use crate::histogram::Histogram;
use crate::offsets::Offsets;
use crate::sys::Buffers;

/// What a tenant shares with the stage. It has two cache lines of its own, since the neighbouring
/// line is fetched along.
#[repr(align(128))]
#[derive(Default)]
pub(super) struct Meter {
    pub(super) ios: AtomicU64,
    pub(super) bytes: AtomicU64,
    pub(super) failures: AtomicU64,
    pub(super) silent: AtomicBool,
}

/// What all tenants of a visit share.
pub(super) struct Stage {
    pub(super) meters: Vec<Meter>,
    /// The index of the tenant whose latencies are recorded while `phase` is `MEASURE`.
    pub(super) timed: Option<usize>,
    pub(super) latency: Mutex<Histogram>,
    pub(super) phase: AtomicU8,
    /// How long the thread of the tenant with index 1 pauses, every `AWAY_EVERY` checks.
    pub(super) away: Duration,
}

pub(super) const WARM_UP: u8 = 0;
pub(super) const MEASURE: u8 = 1;
pub(super) const STOP: u8 = 2;

/// A running tenant.
pub(super) struct Source {
    stage: Arc<Stage>,
    place: usize,
    queue: QueueId,
    offsets: Offsets,
    buffers: Option<Buffers>,
    idle: Vec<Bio>,
    ios: u64,
    bytes: u64,
    latency: Histogram,
    is_measured: bool,
    is_over: bool,
    looks: u32,
}

impl Source {
    /// Makes the tenant with index `place` of the stage. Without buffers its bios have no memory,
    /// which a null drive does not need.
    pub(super) fn new(
        stage: Arc<Stage>,
        place: usize,
        tenant: &Tenant,
        disk: &blkmq_host::disk::Disk,
        with_buffers: bool,
    ) -> Self {
        let load = tenant.load;
        let mut buffers = with_buffers.then(|| Buffers::new(load.depth, load.block_bytes));
        let bio = |_| Bio {
            op: load.op,
            disk: disk.id,
            group: tenant.group,
            len: u64::from(load.block_bytes),
            data: buffers.as_mut().map_or(Data::None, Buffers::lend),
            ..Bio::default()
        };
        let idle = (0..load.depth).map(bio).collect();
        Self {
            stage,
            place,
            queue: disk.queue,
            offsets: Offsets::new(
                disk.size,
                u64::from(load.block_bytes),
                load.is_random,
                place as u64 + 1,
            ),
            buffers,
            idle,
            ios: 0,
            bytes: 0,
            latency: Histogram::new(),
            is_measured: false,
            is_over: false,
            looks: 0,
        }
    }

    fn submit(&mut self, cx: &mut Cx<'_>) {
        let meter = &self.stage.meters[self.place];
        // Relaxed, here and below: nothing is published with these values.
        if meter.silent.load(Ordering::Relaxed) {
            return;
        }
        while let Some(mut bio) = self.idle.pop() {
            bio.offset = self.offsets.next();
            bio.cookie = cx.now().0;
            if let Err(bio) = cx.submit(self.queue, bio) {
                self.idle.push(bio);
                return;
            }
        }
    }

    fn stop(&mut self, cx: &Cx<'_>) {
        if self.is_over || cx.outstanding() > 0 {
            return;
        }
        self.is_over = true;
        if self.stage.timed == Some(self.place) {
            let mut latency = self.stage.latency.lock().unwrap_or_else(PoisonError::into_inner);
            latency.merge(&self.latency);
        }
        if let Some(buffers) = &mut self.buffers {
            self.idle.drain(..).for_each(|bio| buffers.take_back(bio));
        }
    }
}

impl Service for Source {
    fn start(&mut self, cx: &mut Cx<'_>) {
        self.submit(cx);
        cx.set_timer(cx.now() + LOOK_EVERY);
    }

    fn on_ring(&mut self, _cx: &mut Cx<'_>, _completed: &[Completion]) {}

    fn on_end(&mut self, cx: &mut Cx<'_>, bio: Bio) {
        let meter = &self.stage.meters[self.place];
        if bio.status.is_ok() {
            self.ios += 1;
            self.bytes += bio.len;
        } else {
            meter.failures.fetch_add(1, Ordering::Relaxed);
        }
        if self.is_measured {
            self.latency.record(cx.now().0.saturating_sub(bio.cookie));
        }
        self.idle.push(bio);
    }

    /// Checks whether it must be silent or stop: a tenant without I/O in flight is not woken
    /// otherwise.
    fn on_timer(&mut self, cx: &mut Cx<'_>) {
        self.is_measured =
            self.stage.timed == Some(self.place) && self.stage.phase.load(Ordering::Relaxed) == MEASURE;
        self.looks += 1;
        if self.place == 1 && self.looks.is_multiple_of(AWAY_EVERY) && !self.stage.away.is_zero() {
            std::thread::sleep(self.stage.away);
        }
        if !self.is_over {
            cx.set_timer(cx.now() + LOOK_EVERY);
        }
    }

    fn on_room(&mut self, cx: &mut Cx<'_>) {
        if self.stage.phase.load(Ordering::Relaxed) != STOP {
            self.submit(cx);
        }
    }

    fn end_of_batch(&mut self, cx: &mut Cx<'_>) {
        let meter = &self.stage.meters[self.place];
        meter.ios.store(self.ios, Ordering::Relaxed);
        meter.bytes.store(self.bytes, Ordering::Relaxed);
        if self.stage.phase.load(Ordering::Relaxed) == STOP {
            self.stop(cx);
        } else {
            self.submit(cx);
        }
    }

    fn busy(&self) -> bool {
        !self.is_over
    }

    fn drain(&mut self, cx: &mut Cx<'_>) {
        self.stop(cx);
    }

    fn is_finished(&self) -> bool {
        self.is_over
    }
}

/// Checks between two pauses.
const AWAY_EVERY: u32 = 250;
const LOOK_EVERY: Nanos = Nanos::from_millis(1);
