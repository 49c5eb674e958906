//! Decides what is left of a file after a power cut: a filesystem, mounted through FUSE, that forgets what was not made durable.

pub mod chance;
pub mod medium;
pub mod mount;
