//! The multipath driver: a drive that is reached over several others. Each path is a drive of any kind,
//! opened on every reactor beside the others. `blkmq_core::mapper::multipath` chooses paths and judges
//! their errors; this module adds the drives, the memory of probes and the clock.

mod config;
mod device;
mod lowers;
mod opener;
mod worker;

pub use blkmq_core::mapper::multipath::{
    Detours, Failback, GroupStats, NoPath, PathId, PathState, PathStats, Selector,
};
pub use config::MultipathConfig;
pub use device::{MultipathDevice, MultipathError, PathDevice};
