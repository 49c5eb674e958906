//! Decides how a device has one of its hardware contexts run from outside the reactors: by a thread of its own, or because an
//! operator has changed something. `engine` gives a device its runner; `device` says what else it is told.

use std::fmt;
use std::sync::Arc;

use blkmq_core::ids::HctxId;

/// Has hardware contexts of one queue run, from any thread.
#[derive(Clone)]
pub struct Runner(Arc<dyn Fn(HctxId) + Send + Sync>);

impl Runner {
    /// Makes one of what it calls.
    pub(crate) fn new(run: impl Fn(HctxId) + Send + Sync + 'static) -> Self {
        Self(Arc::new(run))
    }

    /// Has the reactor that owns a context run it: its driver is asked for ends, and what was pushed back is issued. What was
    /// published before this call is seen by that run.
    pub fn run(&self, hctx: HctxId) {
        (self.0)(hctx);
    }
}

impl fmt::Debug for Runner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Runner")
    }
}

impl blkmq_core::mapper::multipath::Kick for Runner {
    fn kick(&self, hctx: HctxId) {
        self.run(hctx);
    }
}
