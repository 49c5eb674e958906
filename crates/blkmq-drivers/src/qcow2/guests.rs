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
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use blkmq_core::ids::DiskId;

use crate::file::locks::Announced;

/// The requests of all hardware contexts of a drive.
#[derive(Debug, Default)]
pub(crate) struct Guests(Mutex<Vec<Arc<Announced>>>);

impl Guests {
    /// Adds the table of a new hardware context.
    pub(super) fn add(&self, depth: u32) -> Arc<Announced> {
        let announced = Arc::new(Announced::new(depth));
        self.tables(|tables| tables.push(Arc::clone(&announced)));
        announced
    }

    /// Removes it.
    pub(super) fn remove(&self, announced: &Arc<Announced>) {
        self.tables(|tables| tables.retain(|other| !Arc::ptr_eq(other, announced)));
    }

    /// Waits until no request of a ring has a part of the range. The range was forgotten in the map before.
    pub(super) fn wait_for(&self, disk: DiskId, range: &Range<u64>) {
        while self.tables(|tables| tables.iter().any(|table| table.overlaps(disk, range))) {
            std::thread::sleep(LOOK);
        }
    }

    fn tables<T>(&self, with: impl FnOnce(&mut Vec<Arc<Announced>>) -> T) -> T {
        with(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// How often a thread looks. The requests are those of a drive at work, so they end within milliseconds.
const LOOK: Duration = Duration::from_micros(50);
