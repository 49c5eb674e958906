//! Decides how a device has one of its hardware contexts run from outside the reactors: by a thread of its own, or because an
//! operator has changed something. `engine` gives a device its runner; `device` says what else it is told.

use std::fmt;
use std::sync::Arc;

use blkmq_core::ids::HctxId;

use crate::size_news::SizeNews;

/// Has hardware contexts of one queue run, from any thread.
#[derive(Clone)]
pub struct Runner {
    run: Arc<dyn Fn(HctxId) + Send + Sync>,
    size_news: Arc<SizeNews>,
}

impl Runner {
    /// Makes one of what it calls.
    pub(crate) fn new(run: impl Fn(HctxId) + Send + Sync + 'static, size_news: Arc<SizeNews>) -> Self {
        Self {
            run: Arc::new(run),
            size_news,
        }
    }

    /// Has the reactor that owns a context run it: its driver is asked for ends, and what was pushed back is issued. What was
    /// published before this call is seen by that run.
    pub fn run(&self, hctx: HctxId) {
        (self.run)(hctx);
    }

    /// Says that a disk of the device may be of another size now: whoever resizes disks will look
    /// ([`crate::device::Device::resize`]). Does not block.
    pub fn resized(&self) {
        self.size_news.tell();
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
