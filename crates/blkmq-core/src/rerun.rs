//! Decides which hardware contexts are run when a resource that they share has been freed: a tag of a shared set. `hw_ctx` frees,
//! `local` asks here once per batch, and `blkmq_sync::run_work` sees to it that a run is queued once.

use blkmq_sync::Published;
use blkmq_sync::run_work::Kick;

use crate::ids::{HctxId, ReactorId};
use crate::queue::{Effects, Queue};

/// Whom the end of a request runs, where the tags are shared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rerun {
    /// The contexts that wait for a tag, once per batch of ends.
    #[default]
    Waiting,
    /// Every context, for each request that ends, unless its run is queued already: as Linux' SCSI layer does since
    /// "scheduled once" (Long Li, 2019). There to be measured.
    #[cfg(feature = "baselines")]
    EveryMarked,
    /// Every context, for each request that ends, queued anew each time: as Linux did before that. There to be measured.
    #[cfg(feature = "baselines")]
    Every,
}

impl Queue {
    /// Runs the contexts that `freed` tags, given back by `me`'s context, may have been waited for by. At the end of a batch:
    /// the tags' read-modify-writes are the publication.
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
                // Those who are registered as waiting are among them.
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

    /// Queues runs of the contexts that are set as bits; what they are to find was published by a read-modify-write.
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

    /// Queues a run of a hardware context; its owner is added to `fx.kicks` if it has to be told.
    pub(crate) fn run_hctx(&self, hctx: HctxId, me: ReactorId, fx: &mut Effects) {
        let owner = ReactorId(hctx.0);
        if self.reactor(owner).run.run() == Kick::Wake {
            self.announce(owner, me, fx);
        }
    }

    /// Queues a run of a hardware context for somebody who is no reactor. Returns its owner if that has to be kicked.
    pub fn ask_to_run(&self, hctx: HctxId) -> Option<ReactorId> {
        let owner = ReactorId(hctx.0);
        (self.reactor(owner).run.run() == Kick::Wake).then_some(owner)
    }

    /// Queues a run of every context. Kicks for everybody have to follow.
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
