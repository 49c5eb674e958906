//! Proofs by ill-treatment of a daemon, each with a program of its own. Data that must be there after a crash: a
//! filesystem that forgets what was not made durable ([`mount`]), verified load on a daemon that serves an image
//! on it ([`load`]), and crashes of that daemon ([`crashes`]); [`filesystems`] does it with ext4 and XFS on the
//! disk, [`guest`] with the kernel's own filesystems and devices. And what a hostile client may cost others:
//! [`siege`].

pub mod connection;
pub mod crashes;
pub mod daemon;
mod encryption;
pub mod filesystems;
pub mod guest;
pub mod history;
mod images;
pub mod load;
pub mod medium;
pub mod mount;
pub mod siege;
pub mod write_log;
