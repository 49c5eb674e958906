//! Mapped disks: disks that lie on other disks, their members, instead of on a drive.
//!
//! There are two kinds. Bios of a mapped disk become bios of its members before they enter a queue; a request
//! of a multipath queue is passed unchanged to the driver of one of its paths ([`multipath`]). [`table`]
//! knows where bytes lie (`linear`, `striped`), [`stack`] passes bios down and their ends up.

mod linear;
mod map;
mod member;
pub mod multipath;
pub mod stack;
mod striped;
pub mod table;

pub use member::Below;
