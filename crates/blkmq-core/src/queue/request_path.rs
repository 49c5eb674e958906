//! The path of a queue's requests: direct to the driver, or through the gate, for an elevator or for caps. Each
//! submission reads it; it is one byte.

use std::sync::atomic::{AtomicU8, Ordering};

use crate::group::GroupTree;
use crate::sched::ElevatorType;

/// The path of requests. Whether there is an elevator changes only while the queue is drained, so a relaxed load by a
/// thread that has entered the queue's usage sees the right path (the entry orders it).
#[derive(Debug)]
pub(super) struct RequestPath(AtomicU8);

impl RequestPath {
    pub(super) fn new(elevator: &ElevatorType, groups: &GroupTree) -> Self {
        Self(AtomicU8::new(bits(elevator, groups)))
    }

    /// Chooses the path anew. The queue is drained, so caps that were removed are forgotten.
    pub(super) fn set(&self, elevator: &ElevatorType, groups: &GroupTree) {
        self.0.store(bits(elevator, groups), Ordering::Relaxed);
    }

    /// Sends requests of groups with caps through the gate until the next [`RequestPath::set`].
    pub(super) fn throttle(&self) {
        self.0.fetch_or(THROTTLED, Ordering::Relaxed);
    }

    /// Returns whether all requests go through an elevator.
    #[inline]
    pub(super) fn is_scheduled(&self) -> bool {
        self.0.load(Ordering::Relaxed) & SCHEDULED != 0
    }

    /// Returns whether groups have, or had, caps.
    pub(super) fn is_throttled(&self) -> bool {
        self.0.load(Ordering::Relaxed) & THROTTLED != 0
    }

    /// Returns whether requests may have to go through the gate: all for an elevator, or some for caps.
    #[inline]
    pub(super) fn is_gated(&self) -> bool {
        self.0.load(Ordering::Relaxed) != 0
    }
}

fn bits(elevator: &ElevatorType, groups: &GroupTree) -> u8 {
    let is_capped = groups.iter().any(|(_, node)| !node.caps.is_none());
    let scheduled = if elevator.is_some() { SCHEDULED } else { 0 };
    scheduled | if is_capped { THROTTLED } else { 0 }
}

/// There is an elevator.
const SCHEDULED: u8 = 1;
/// There are, or were, caps.
const THROTTLED: u8 = 2;
