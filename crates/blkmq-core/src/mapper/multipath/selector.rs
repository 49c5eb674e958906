//! The selectors: five ways in which one of the current group's usable paths is chosen for a request;
//! `choice` does it.
//!
//! | selector | takes the path | reads |
//! |---|---|---|
//! | `round-robin` | after the one taken last | nothing |
//! | `io-affinity` | that belongs to the hardware context | nothing |
//! | `queue-length` | with the fewest requests in flight | the counts of all contexts |
//! | `service-time` | with the least (bytes in flight + these) / throughput | the counts of all contexts |
//! | `historical-service-time` | with the least (average service time × requests in flight here) | its own history |

use std::fmt;
use std::str::FromStr;

use crate::ids::HctxId;

use super::shared::{List, View};

/// How a path is chosen. The names are those of the device mapper.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Selector {
    /// One after the other.
    RoundRobin,
    /// The one with the fewest requests in flight; ties rotate.
    QueueLength,
    /// The one that would finish first, by its bytes in flight and its relative throughput; ties rotate.
    #[default]
    ServiceTime,
    /// The one that would finish first, by the times of its earlier requests. A path that was not used for
    /// 0.25 s is tried with one request.
    HistoricalServiceTime,
    /// By hardware context: context `i` keeps to path `i` modulo the paths of the group, as long as that is usable.
    IoAffinity,
}

impl Selector {
    /// All selectors.
    pub const ALL: [Self; 5] = [
        Self::RoundRobin,
        Self::QueueLength,
        Self::ServiceTime,
        Self::HistoricalServiceTime,
        Self::IoAffinity,
    ];

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::RoundRobin => "round-robin",
            Self::QueueLength => "queue-length",
            Self::ServiceTime => "service-time",
            Self::HistoricalServiceTime => "historical-service-time",
            Self::IoAffinity => "io-affinity",
        }
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// There is no selector of this name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnknownSelector;

impl FromStr for Selector {
    type Err = UnknownSelector;

    fn from_str(name: &str) -> Result<Self, UnknownSelector> {
        let mut all = Self::ALL.into_iter();
        all.find(|selector| selector.name() == name)
            .ok_or(UnknownSelector)
    }
}

/// How a context chooses, computed when it reads the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// One after the other.
    RoundRobin,
    /// Always this path.
    Pinned(u8),
    /// By the number of requests in flight.
    QueueLength,
    /// By the bytes in flight.
    ServiceTime,
    /// By the context's own history.
    History,
    /// There is no path.
    None,
}

impl View {
    /// How a context that can use `usable` chooses.
    pub(super) fn way(&self, usable: &List, hctx: HctxId) -> Way {
        match (usable.len(), self.selector) {
            (0, _) => Way::None,
            (1, _) => Way::Pinned(usable.get(0) as u8),
            (_, Selector::RoundRobin) => Way::RoundRobin,
            (_, Selector::QueueLength) => Way::QueueLength,
            (_, Selector::ServiceTime) => Way::ServiceTime,
            (_, Selector::HistoricalServiceTime) => Way::History,
            (_, Selector::IoAffinity) => Way::Pinned(self.own_path(usable, hctx)),
        }
    }

    /// The context's path, or the next one of the group that is usable.
    fn own_path(&self, usable: &List, hctx: HctxId) -> u8 {
        let count = self.members.len();
        let from = hctx.index() % count;
        let mut turn = (from..from + count).map(|at| self.members.get(at % count));
        let path = turn.find(|path| usable.iter().any(|other| other == *path));
        path.unwrap_or(usable.get(0)) as u8
    }
}
