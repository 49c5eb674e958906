//! Decides how a drive has one of its hardware contexts run from outside the reactors: by a thread of its own, or because an
//! operator has changed something. `engine` gives a drive its runner; `device` says what else it is told.

use std::sync::{Arc, Weak};

use blkmq_core::ids::{HctxId, ReactorSet};

use crate::engine::disk::QueueId;
use crate::engine::shared::Shared;

/// Has hardware contexts of one queue run, from any thread.
#[derive(Clone)]
pub struct Runner {
    /// The drive belongs to what this leads to.
    shared: Weak<Shared>,
    queue: QueueId,
}

impl Runner {
    pub(crate) fn new(shared: &Arc<Shared>, queue: QueueId) -> Self {
        Self {
            shared: Arc::downgrade(shared),
            queue,
        }
    }

    /// Has the reactor that owns a context run it: its driver is asked for ends, and what was pushed back is issued. What was
    /// published before this call is seen by that run.
    pub fn run(&self, hctx: HctxId) {
        let Some(shared) = self.shared.upgrade() else {
            return;
        };
        if let Some(reactor) = shared.queues[self.queue.index()].queue.ask_to_run(hctx) {
            let mut kicks = ReactorSet::default();
            kicks.insert(reactor);
            shared.kick(kicks);
        }
    }
}

impl blkmq_core::mapper::multipath::Kick for Runner {
    fn kick(&self, hctx: HctxId) {
        self.run(hctx);
    }
}
