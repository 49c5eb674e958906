//! The errors of a rejected change to the tenant tree: they name the object, the value, the limit and the
//! next step.

use std::fmt;

use super::{CapKind, LEVELS_MAX, WEIGHT_MAX, WEIGHT_MIN};
use crate::ids::GroupId;

/// Why the tenant tree was not changed. After an error, nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupError {
    /// There is no such group, or it has been removed.
    Unknown {
        /// The number that was given.
        id: GroupId,
    },
    /// The root cannot be changed so.
    Root {
        /// The change that was asked for.
        to_be: &'static str,
    },
    /// The weight is out of range.
    Weight {
        /// Its value.
        weight: u16,
    },
    /// No entry is free.
    Full {
        /// Number of entries.
        capacity: usize,
        /// How many of the entries belong to removed groups whose I/O has not ended.
        leaving: usize,
    },
    /// A group with children cannot be removed.
    HasChildren {
        /// The parent.
        id: GroupId,
        /// One of its children.
        child: GroupId,
    },
    /// A group cannot be moved below itself.
    Loop {
        /// The group.
        id: GroupId,
        /// The new parent that was given.
        parent: GroupId,
    },
    /// Groups would be nested too deeply.
    Level {
        /// The parent that was given.
        parent: GroupId,
    },
    /// The cap is out of range.
    Cap {
        /// The kind of cap.
        kind: CapKind,
        /// Its value, per second.
        rate: u64,
        /// Smallest value allowed.
        min: u64,
        /// Largest value allowed.
        max: u64,
    },
    /// The cap's burst is out of range.
    Burst {
        /// The kind of cap.
        kind: CapKind,
        /// The burst.
        burst: u64,
        /// Largest value allowed.
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
