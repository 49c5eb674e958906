//! Decides what stands on other disks instead of on a drive: mapped disks, whose bytes lie on members.
//!
//! Two kinds: bios of a mapped disk become bios of its members before they meet a queue; a request of a multipath queue
//! goes on, as it is, to the driver of one of its paths ([`multipath`]). [`table`] knows what lies where (`linear`, `striped`), [`stack`] takes bios
//! down and their ends up.

mod linear;
mod map;
mod member;
pub mod multipath;
pub mod stack;
mod striped;
pub mod table;

pub use member::Below;
