//! Decides what a hostile client may cost others, and shows that it costs them no more: a daemon under attack ([`attack`]), a
//! tenant beside it who checks every byte ([`tenant`]), and what the daemon takes and leaves ([`vitals`]).

pub mod attack;
pub mod latency;
pub mod scene;
pub mod siege;
pub mod tenant;
pub mod vitals;
mod wire;
