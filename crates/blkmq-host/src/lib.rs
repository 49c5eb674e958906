//! The engine in the real world: reactors on io_uring, the clock, and the drivers that meet the operating system.
//!
//! A reactor is one thread with one place to wait ([`ring`], [`wait`]); [`drive`] is what it needs of a drive.

pub mod clock;
pub mod drive;
pub mod driver;
pub mod ring;
pub mod wait;
