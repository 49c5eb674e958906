//! Decides what must be there after a crash, and shows that it is: a filesystem that forgets what was not made durable
//! ([`mount`]), verified load on a daemon that serves an image on it ([`load`]), and crashes of that daemon ([`crashes`]).
//! [`guest`] does the same with the kernel's own filesystems and devices.

pub mod chance;
pub mod connection;
pub mod crashes;
pub mod daemon;
pub mod guest;
pub mod history;
pub mod load;
pub mod medium;
pub mod mount;
pub mod scratch;
pub mod write_log;
