//! The siege: it checks what a hostile client may cost others, with a daemon under attack ([`attack`]), a
//! tenant on the same daemon that checks every byte ([`tenant`]), and the resources that the daemon uses
//! and gives back ([`vitals`]).

pub mod attack;
pub mod latency;
pub mod scene;
pub mod siege;
pub mod tenant;
pub mod vitals;
mod wire;
