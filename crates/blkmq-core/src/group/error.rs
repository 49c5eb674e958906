//! Decides how a change of the tenant tree that cannot be is answered: the object, the value, the limit, the next step.

use std::fmt;

use super::{CapKind, LEVELS_MAX, WEIGHT_MAX, WEIGHT_MIN};
use crate::ids::GroupId;

/// Why the tenant tree was not changed. Nothing is changed then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupError {
    /// No such group, or it has been removed.
    Unknown {
        /// The number asked for.
        id: GroupId,
    },
    /// The root is what it is.
    Root {
        /// What it was to be.
        to_be: &'static str,
    },
    /// A weight out of range.
    Weight {
        /// Its value.
        weight: u16,
    },
    /// No place is free.
    Full {
        /// How many places there are.
        capacity: usize,
        /// How many of them belong to removed groups whose I/O has not ended.
        leaving: usize,
    },
    /// A parent is to be removed.
    HasChildren {
        /// The parent.
        id: GroupId,
        /// One of its children.
        child: GroupId,
    },
    /// A group is to be moved below itself.
    Loop {
        /// The group.
        id: GroupId,
        /// Where it was to go.
        parent: GroupId,
    },
    /// Groups would be nested too deeply.
    Level {
        /// Where one was to go.
        parent: GroupId,
    },
    /// A cap out of range.
    Cap {
        /// Which one.
        kind: CapKind,
        /// Its value, per second.
        rate: u64,
        /// The smallest allowed.
        min: u64,
        /// The largest allowed.
        max: u64,
    },
    /// A cap's burst out of range.
    Burst {
        /// Which cap.
        kind: CapKind,
        /// The burst.
        burst: u64,
        /// The largest allowed.
        max: u64,
    },
}

impl fmt::Display for GroupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown { id } => write!(f, "group {id} does not exist: create it first"),
            Self::Root { to_be } => {
                write!(f, "the root group cannot be {to_be}: name a group below it")
            }
            Self::Weight { weight } => {
                write!(
                    f,
                    "weight {weight} rejected: must be from {WEIGHT_MIN} to {WEIGHT_MAX}"
                )
            }
            Self::Full { capacity, leaving } => write!(
                f,
                "all {capacity} groups are in use, {leaving} of them removed with I/O that has not ended: remove \
                 one and try again, or start with room for more"
            ),
            Self::HasChildren { id, child } => write!(
                f,
                "group {id} cannot be removed: group {child} is part of it; remove or move what is below it first"
            ),
            Self::Loop { id, parent } => {
                write!(
                    f,
                    "group {id} cannot be moved into group {parent}, which is part of it"
                )
            }
            Self::Level { parent } => write!(
                f,
                "group {parent} cannot take it: groups are nested at most {LEVELS_MAX} deep; choose a parent further up"
            ),
            Self::Cap { kind, rate, min, max } => {
                let unit = if kind.is_bytes() {
                    "; the least is one largest request of the drive per second"
                } else {
                    ""
                };
                write!(
                    f,
                    "{kind} {rate} rejected: must be from {min} to {max}{unit}; leave it out for no cap"
                )
            }
            Self::Burst { kind, burst, max } => write!(
                f,
                "{kind}_burst {burst} rejected: must be at most {max}, what the cap allows in an hour"
            ),
        }
    }
}

impl std::error::Error for GroupError {}
