//! Who uses which range of an image through the cached map: the requests that a ring has. Clusters of a range are
//! given up only when nobody uses them.
//!
//! ```text
//!  request:  announce its range ─► look it up in the map ─► known: to the ring;  else: withdraw, to the threads
//!  thread:   forget the range in the map ─► wait until nobody has announced a part of it ─► free its clusters
//! ```
//!
//! One of the two sees the other, since each makes itself visible before it looks (SeqCst).

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use blkmq_core::ids::DiskId;
use blkmq_host::block_locks::{Announced, Announcements};

/// The requests of all hardware contexts of a drive.
#[derive(Debug, Default)]
pub(crate) struct Guests(Announcements);

impl Guests {
    /// Adds the table of a new hardware context.
    pub(super) fn add(&self, depth: u32) -> Arc<Announced> {
        self.0.add(depth)
    }

    /// Removes it.
    pub(super) fn remove(&self, announced: &Arc<Announced>) {
        self.0.remove(announced);
    }

    /// Waits until no request of a ring has a part of the range. The range was forgotten in the map before.
    pub(super) fn wait_for(&self, disk: DiskId, range: &Range<u64>) {
        while self.0.overlap(disk, range) {
            std::thread::sleep(LOOK);
        }
    }
}

/// How often a thread looks. The requests are those of a drive at work, so they end within milliseconds.
const LOOK: Duration = Duration::from_micros(50);
