//! Decides how a thread talks to io_uring: one ring for each, shared by its drivers and doors.

pub mod ring;
