//! The elevators: their names, and a constructor that makes one with room for all requests of its queue.

pub mod bfq;
mod depth;
mod elevator;
mod index;
pub mod kyber;
pub mod mq_deadline;
pub(crate) mod overdue;
mod request_list;
mod slots;

pub use elevator::{Elevator, InsertAt, Inserted, Note, TunableError};

use std::fmt;

use crate::group::GroupTree;
use crate::limits::Limits;

/// The elevators a queue can have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Kind {
    /// No elevator: requests go directly to the submitter's hardware context.
    #[default]
    None,
    /// Deadlines and batches, by direction and priority class.
    MqDeadline,
    /// Tokens for reads, writes and discards, as many as latency targets allow.
    Kyber,
    /// Shares by weight, of groups and of their clients.
    Bfq,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::None, Self::MqDeadline, Self::Kyber, Self::Bfq];

    /// The name under which users choose it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::MqDeadline => "mq-deadline",
            Self::Kyber => "kyber",
            Self::Bfq => "bfq",
        }
    }

    /// Finds an elevator by its name.
    pub fn by_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// Makes the elevator, with room for `requests_max` requests of the groups of a tree, which can grow to its
    /// capacity. `None` has none.
    pub fn build(
        self,
        limits: &Limits,
        requests_max: usize,
        groups: &GroupTree,
    ) -> Option<Box<dyn Elevator>> {
        match self {
            Self::None => None,
            Self::MqDeadline => Some(Box::new(mq_deadline::MqDeadline::new(
                limits.clone(),
                requests_max,
            ))),
            Self::Kyber => Some(Box::new(kyber::Kyber::new(limits.clone(), requests_max))),
            Self::Bfq => Some(Box::new(bfq::Bfq::new(limits.clone(), requests_max, groups))),
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
