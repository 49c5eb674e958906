//! How many requests of each group are at the driver, and for how long the oldest of them has been there: read
//! from the tags in use when somebody asks, so no request pays for it.

use std::collections::BTreeMap;

use super::LocalQueue;
use crate::hw_ctx::HwCtx;
use crate::ids::GroupId;
use crate::time::{Instant, Nanos};

/// What a group has at a drive at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InFlight {
    /// Its requests that the driver has.
    pub requests: u64,
    /// How long the oldest of them has been there; 0 if there is none.
    pub oldest: Nanos,
}

impl InFlight {
    /// Adds what another reactor, or another group, has at the same moment.
    pub fn add(&mut self, other: Self) {
        self.requests += other.requests;
        self.oldest = self.oldest.max(other.oldest);
    }
}

impl LocalQueue {
    /// Counts the requests at this reactor's driver by their groups; a flush of several groups' bios is its first
    /// one's. Requests in front of the driver are not in it.
    pub fn in_flight_of_groups(&self, now: Instant) -> BTreeMap<GroupId, InFlight> {
        let mut groups: BTreeMap<GroupId, InFlight> = BTreeMap::new();
        for rq in self.hw.iter().flat_map(HwCtx::requests) {
            groups.entry(rq.group()).or_default().add(InFlight {
                requests: 1,
                oldest: now.since(rq.issued_at()),
            });
        }
        groups
    }
}
