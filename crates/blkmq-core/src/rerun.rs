//! Reruns of hardware contexts that wait for a tag, when a tag of a shared set was freed. `hw_ctx` frees
//! tags, `local` calls this once per batch, and `blkmq_sync::run_work` makes sure that a run is queued
//! once.

use blkmq_sync::Published;
use blkmq_sync::run_work::Kick;

use crate::ids::{HctxId, ReactorId};
use crate::queue::{Effects, Queue};

/// Which contexts the end of a request runs, if the tags are shared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rerun {
    /// The contexts that wait for a tag, once per batch of ends.
    #[default]
    Waiting,
    /// Every context, for each request that ends, unless its run is queued already: as Linux' SCSI layer does since
    /// "scheduled once" (Long Li, 2019). For measurement.
    #[cfg(feature = "baselines")]
    EveryMarked,
    /// Every context, for each request that ends, queued again each time: as Linux did before that. For measurement.
    #[cfg(feature = "baselines")]
    Every,
}

impl Queue {
    /// Runs the contexts that may wait for the `freed` tags of `me`'s context. Called at the end of a batch: the
    /// tags' read-modify-writes are the publication.
    pub(crate) fn rerun(&self, freed: u32, me: ReactorId, fx: &mut Effects) {
        let Some(tags) = self.shared_tags.as_ref().filter(|_| freed > 0) else {
            return;
        };
        match self.rerun {
            Rerun::Waiting => self.run_hctxs(tags.set.take_waiters(), me, fx),
            #[cfg(feature = "baselines")]
            Rerun::EveryMarked => (0..freed).for_each(|_| self.run_hctxs(self.every_hctx(), me, fx)),
            #[cfg(feature = "baselines")]
            Rerun::Every => {
                // The contexts that are registered as waiting are among them.
                let _ = tags.set.take_waiters();
                for _ in 0..freed {
                    for owner in (0..self.hctxs()).map(ReactorId) {
                        self.reactor(owner).run.run_unmarked();
                        self.reactor(me).shard.events.runs_scheduled.add(1);
                        fx.kicks.insert(owner);
                    }
                }
            }
        }
    }

    /// Queues runs of the contexts whose bits are set; their work was published by a read-modify-write.
    fn run_hctxs(&self, mut set: u128, me: ReactorId, fx: &mut Effects) {
        let published = Published::by_rmw();
        while set != 0 {
            let owner = ReactorId(set.trailing_zeros() as u16);
            set &= set - 1;
            if self.reactor(owner).run.run_published(&published) == Kick::Wake {
                self.announce(owner, me, fx);
            }
        }
    }

    /// Queues a run of a hardware context; adds its owner to `fx.kicks` if the owner must be woken.
    pub(crate) fn run_hctx(&self, hctx: HctxId, me: ReactorId, fx: &mut Effects) {
        let owner = ReactorId(hctx.0);
        if self.reactor(owner).run.run() == Kick::Wake {
            self.announce(owner, me, fx);
        }
    }

    /// Queues a run of a hardware context for a thread that is no reactor. Returns the owner if it must be kicked.
    pub fn ask_to_run(&self, hctx: HctxId) -> Option<ReactorId> {
        let owner = ReactorId(hctx.0);
        (self.reactor(owner).run.run() == Kick::Wake).then_some(owner)
    }

    /// Queues a run of every context. The caller must kick everybody.
    pub(crate) fn run_all(&self) {
        for owner in (0..self.hctxs()).map(ReactorId) {
            let _ = self.reactor(owner).run.run();
        }
    }

    fn announce(&self, owner: ReactorId, me: ReactorId, fx: &mut Effects) {
        self.reactor(me).shard.events.runs_scheduled.add(1);
        fx.kicks.insert(owner);
    }

    #[cfg(feature = "baselines")]
    fn every_hctx(&self) -> u128 {
        u128::MAX >> (128 - u32::from(self.hctxs()))
    }
}
