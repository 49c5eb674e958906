//! The freeze count of a queue: it tells whether a frozen queue has drained, so that no user is inside
//! and all requests that were started have finished.
//!
//! Freezing comes before a switch of elevator, depth or target. Users never write a shared line for it: each
//! reactor has a shard, and the freezer reads all shards.
//!
//! A user enters its shard, submits, counts the requests that it started, and exits. A request may outlive
//! the stay in which it was started; `finished` counts its end, on the shard of the reactor that ends it.
//!
//! Pairings: `enter` writes `inside`, passes a fence, then reads the depth; the freezer writes the depth,
//! passes a fence, then reads `inside`. The thread that passes its fence second sees the other's store:
//! either the user sees the freeze and leaves, or the freezer sees the user inside. The two fences are a pair
//! of `barrier`, in which the freezer pays for both. `exit` clears `inside` with Release, seen by the Acquire
//! in `is_vacant`, so `started` is complete once no user is inside. `finished` is stored with Release, seen
//! by the Acquire in `is_drained`, so the effects of the requests happened before the drain ended.

use crate::CachePadded;
use crate::atomic::{AtomicU32, AtomicU64, Ordering};
use crate::barrier::Barrier;

/// One reactor's part of the count. Only its reactor writes it; it has a cache line of its own.
#[derive(Debug, Default)]
pub struct UsageShard(CachePadded<Usage>);

/// Whether a queue is frozen, and which users are inside.
#[derive(Debug)]
pub struct FreezeState {
    /// How many freezes are nested; users may enter only at 0.
    depth: CachePadded<AtomicU32>,
    shards: Box<[UsageShard]>,
    /// Between `inside` and `depth`: users pass the light side, freezers the heavy one.
    barrier: Barrier,
}

#[derive(Debug, Default)]
struct Usage {
    started: AtomicU64,
    finished: AtomicU64,
    /// 1 between `enter` and `exit`.
    inside: AtomicU32,
}

impl FreezeState {
    /// The state of a queue with `shards` reactors, not frozen and unused.
    #[must_use]
    pub fn new(shards: usize) -> Self {
        let shards = (0..shards).map(|_| UsageShard::default()).collect();
        Self {
            depth: CachePadded::new(AtomicU32::new(0)),
            shards,
            barrier: Barrier::new(),
        }
    }

    /// Enters unless the queue is frozen. On true the caller may start requests until it calls
    /// [`FreezeState::exit`]. Called by the shard's reactor; stays do not nest. Cost: one store to the
    /// reactor's own line and one load.
    ///
    /// # Panics
    /// If there is no such shard.
    #[inline]
    #[must_use = "a frozen queue must not be used"]
    pub fn enter(&self, shard: usize) -> bool {
        let usage = self.usage(shard);
        debug_assert_eq!(
            usage.inside.load(Ordering::Relaxed),
            0,
            "shard {shard} is inside already"
        );
        // Relaxed: ordered by the fence.
        usage.inside.store(1, Ordering::Relaxed);
        // Pairs with the heavy fences in `start_freeze` and `is_vacant`.
        self.barrier.light();
        // Acquire: pairs with the Release in `end_freeze`: changes made while frozen are visible.
        if self.depth.load(Ordering::Acquire) == 0 {
            return true;
        }
        usage.inside.store(0, Ordering::Release);
        false
    }

    /// Ends a stay. Called by the shard's reactor.
    ///
    /// # Panics
    /// If there is no such shard.
    #[inline]
    pub fn exit(&self, shard: usize) {
        let usage = self.usage(shard);
        debug_assert_eq!(
            usage.inside.load(Ordering::Relaxed),
            1,
            "shard {shard} is not inside"
        );
        // Release: pairs with the Acquire in `is_vacant`; the started requests are counted.
        usage.inside.store(0, Ordering::Release);
    }

    /// Counts `n` requests that the shard's reactor started. Called by that reactor, while it is inside.
    ///
    /// # Panics
    /// If there is no such shard.
    #[inline]
    pub fn add_started(&self, shard: usize, n: u64) {
        let started = &self.usage(shard).started;
        // One writer: a plain load and store. Published by the Release in `exit`.
        started.store(started.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
    }

    /// Counts `n` requests that the shard's reactor finished, whichever reactor started them. Called by that
    /// reactor, inside or not.
    ///
    /// # Panics
    /// If there is no such shard.
    #[inline]
    pub fn add_finished(&self, shard: usize, n: u64) {
        let finished = &self.usage(shard).finished;
        // Release: pairs with the Acquire in `is_drained`.
        finished.store(
            finished.load(Ordering::Relaxed).wrapping_add(n),
            Ordering::Release,
        );
    }

    /// Whether the queue is frozen at this moment. A hint: only `enter` decides.
    #[inline]
    #[must_use]
    pub fn is_frozen(&self) -> bool {
        self.depth.load(Ordering::Relaxed) != 0
    }

    /// Keeps users out from now on; users inside may stay until they exit. Freezes nest. Any thread.
    ///
    /// # Panics
    /// If 2^32 freezes are nested.
    pub fn start_freeze(&self) {
        let before = self.depth.fetch_add(1, Ordering::AcqRel);
        assert!(before < u32::MAX, "too many nested freezes");
        // Pairs with the light fence in `enter`.
        self.barrier.heavy();
    }

    /// Ends one freeze; true if it was the last one and users may enter again. Any thread.
    ///
    /// # Panics
    /// If the queue is not frozen.
    pub fn end_freeze(&self) -> bool {
        // Release: pairs with the Acquire in `enter`. Acquire: the last freezer sees what the others changed.
        let before = self.depth.fetch_sub(1, Ordering::AcqRel);
        assert!(before > 0, "end_freeze without start_freeze");
        before == 1
    }

    /// Whether no user is inside and everything that was started has finished. Once true on a queue that the
    /// caller has frozen, it stays true until the last freeze ends. Any thread that knows of the freeze.
    ///
    /// The order of reading: *inside* first. When all users are seen outside, each last stay under the old
    /// depth has ended and is visible with its count (Acquire), and later users leave without counting:
    /// `started` does not change any more. Then *finished*, then *started*. Both only grow and nothing
    /// finishes before it starts, so reading `finished` first can only make the answer "not yet" (this
    /// matters on a queue that is not frozen, where `started` still grows: true then means that nothing was
    /// outstanding at some moment between the two sums).
    #[must_use]
    pub fn is_drained(&self) -> bool {
        // The first look is for those who poll: without the fence it can only be too old, which means "not yet".
        self.outstanding() == 0 && self.is_vacant() && self.outstanding() == 0
    }

    /// Whether no user is inside at this moment. Once true on a queue that the caller has frozen, any user
    /// that enters later leaves again (on a queue that is not frozen, it says little). Any thread that knows
    /// of the freeze. Contains the heavy fence, about a microsecond: poll it, but not in a tight loop.
    #[must_use]
    pub fn is_vacant(&self) -> bool {
        // Pairs with the light fence in `enter`. The thread that called `start_freeze` has passed one;
        // another thread that only learned of the freeze needs its own between that and the loads below.
        self.barrier.heavy();
        self.shards
            .iter()
            .all(|shard| shard.0.inside.load(Ordering::Acquire) == 0)
    }

    /// Requests started and not finished: exact when drained or at rest, otherwise approximate and never negative.
    #[must_use]
    pub fn outstanding(&self) -> u64 {
        let finished = self.sum(|usage| &usage.finished);
        let started = self.sum(|usage| &usage.started);
        started.saturating_sub(finished)
    }

    /// Requests finished, from the start.
    #[must_use]
    pub fn finished(&self) -> u64 {
        self.sum(|usage| &usage.finished)
    }

    fn sum(&self, field: impl Fn(&Usage) -> &AtomicU64) -> u64 {
        // Acquire: pairs with the Release in `add_finished`.
        self.shards
            .iter()
            .map(|shard| field(&shard.0).load(Ordering::Acquire))
            .sum()
    }

    #[inline(always)]
    fn usage(&self, shard: usize) -> &Usage {
        &self.shards[shard].0
    }
}

#[cfg(all(test, loom))]
mod loom_models;
#[cfg(all(test, not(loom)))]
mod tests;
