//! The lack of an elevator, as it is listed beside those that there are.

use super::registry::ElevatorType;

/// No elevator: requests go directly to the submitter's hardware context.
pub const NONE: &ElevatorType = &ElevatorType {
    name: "none",
    help: "nothing: a request goes from its submitter straight to the drive",
    knows_groups: false,
    build: None,
};
