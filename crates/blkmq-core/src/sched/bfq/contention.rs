//! Competition for the drive: work of two groups, or of two clients of one group,
//! now or a moment ago. `mod` reports which queues are busy, and passes the result to `depth`.

use crate::ids::GroupId;
use crate::time::{Instant, Nanos};

/// Counts of the queues with requests, queued or in flight.
#[derive(Debug)]
pub(super) struct Contention {
    /// Busy queues of each group.
    queues: Vec<u32>,
    /// Groups that have a busy queue.
    groups: u32,
    /// Of the busy queues: their number, and the sums of their clients' numbers and of the squares of these.
    count: u128,
    sum: u128,
    squares: u128,
    /// Until when past competition still counts.
    lingers_until: Instant,
}

impl Contention {
    /// Makes the counts for ids of groups below `groups`.
    pub(super) fn new(groups: usize) -> Self {
        Self {
            queues: vec![0; groups],
            groups: 0,
            count: 0,
            sum: 0,
            squares: 0,
            lingers_until: Instant(0),
        }
    }

    /// Counts a queue of this group and client that has become busy.
    #[inline]
    pub(super) fn begin(&mut self, group: GroupId, client: u32) {
        let client = u128::from(client);
        self.count += 1;
        self.sum += client;
        self.squares += client * client;
        let queues = &mut self.queues[group.index()];
        self.groups += u32::from(*queues == 0);
        *queues += 1;
    }

    /// Removes a queue of this group and client that is no longer busy.
    #[inline]
    pub(super) fn end(&mut self, group: GroupId, client: u32, now: Instant) {
        if self.compete() {
            self.lingers_until = now + LINGER;
        }
        let client = u128::from(client);
        self.count -= 1;
        self.sum -= client;
        self.squares -= client * client;
        let queues = &mut self.queues[group.index()];
        *queues -= 1;
        self.groups -= u32::from(*queues == 0);
    }

    /// Says whether there is competition, or was a moment ago: a client that sends one request after the other
    /// has none between two requests, and would find the drive full each time it returns.
    #[inline]
    pub(super) fn compete_at(&self, now: Instant) -> bool {
        self.compete() || now < self.lingers_until
    }

    /// All numbers are equal exactly if the square of their sum is their count times the sum of their squares
    /// (Cauchy and Schwarz), so no search is needed.
    #[inline]
    fn compete(&self) -> bool {
        self.groups > 1 || self.count > 1 && self.sum * self.sum != self.count * self.squares
    }

    /// Asserts that these are the busy queues, by group and client.
    pub(super) fn check(&self, busy: impl Iterator<Item = (GroupId, u32)>) {
        let mut found = Self::new(self.queues.len());
        busy.for_each(|(group, client)| found.begin(group, client));
        found.lingers_until = self.lingers_until;
        assert_eq!(format!("{found:?}"), format!("{self:?}"), "busy queues");
    }
}

/// How long past competition counts. A client that returns now and then should not find the drive full each
/// time, and the drive's throughput is the same at the depth for competition.
const LINGER: Nanos = Nanos::from_secs(10);
