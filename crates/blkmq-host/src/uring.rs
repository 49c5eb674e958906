//! A thread's use of io_uring: one ring for each thread, shared by its drivers and doors.

pub mod ring;
