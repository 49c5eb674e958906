//! A device's means to make one of its hardware contexts run from outside the reactors: from a thread of
//! its own, or because an operator has changed a setting. `engine` gives a device its runner; `device`
//! has the other calls of a device.

use std::fmt;
use std::sync::Arc;

use blkmq_core::ids::HctxId;

use crate::size_news::SizeNews;

/// Makes hardware contexts of one queue run, from any thread.
#[derive(Clone)]
pub struct Runner {
    run: Arc<dyn Fn(HctxId) + Send + Sync>,
    size_news: Arc<SizeNews>,
}

impl Runner {
    /// Makes a runner that calls `run`.
    pub(crate) fn new(run: impl Fn(HctxId) + Send + Sync + 'static, size_news: Arc<SizeNews>) -> Self {
        Self {
            run: Arc::new(run),
            size_news,
        }
    }

    /// Makes the reactor that owns a context run it: the driver is polled for ends, and requests that were
    /// pushed back are issued. The run sees everything that was published before this call.
    pub fn run(&self, hctx: HctxId) {
        (self.run)(hctx);
    }

    /// Reports that a disk of the device may have a new size: the thread that resizes disks will check
    /// ([`crate::device::Device::resize`]). Does not block.
    pub fn resized(&self) {
        self.size_news.notify();
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
