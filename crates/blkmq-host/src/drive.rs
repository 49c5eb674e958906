//! Decides what the engine needs of a drive: its limits, a driver for each hardware context, and what is
//! allocated. `plan` makes drives from the specifications of disks, `engine` has their hardware contexts
//! opened on the reactors.

use std::io;
use std::sync::Arc;

use blkmq_core::driver::Driver;
use blkmq_core::ids::HctxId;
use blkmq_core::limits::Limits;

use crate::driver::Allocation;
use crate::driver::multipath::MultipathDrive;
use crate::driver::nbd::Ledger;
use crate::reactor::runner::Runner;
use crate::uring::ring::RingHandle;

/// Whether the ends of a drive's requests can be found by looking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Polling {
    /// No.
    Impossible,
    /// If asked for.
    Possible,
    /// Yes, unless it is switched off.
    Usual,
}

/// A drive: what all hardware contexts of one queue share.
pub trait Drive: Allocation {
    /// What one request may be.
    fn limits(&self) -> Limits;

    /// Says whether its hardware contexts can be polled (`io_poll`).
    fn polling(&self) -> Polling {
        Polling::Impossible
    }

    /// Says, for people, how ends are found when its contexts are polled, if there is more than one way. Called before they are for
    /// the first time, it finds out: may block for a small read of each disk.
    fn describe_polling(&self) -> Option<String> {
        None
    }

    /// Says how many hardware contexts there should be: `wanted`, or, if the drive has fewer ways in, at most `reactors`. Asked
    /// once, before any is opened.
    fn hctxs(&self, wanted: u16, _reactors: u16) -> u16 {
        wanted
    }

    /// Is told, before its contexts are opened, how to have one of them run from outside.
    fn meet(&self, _runner: Runner) {}

    /// The engine shuts down: what the drive holds back is to end, with an error if it must.
    fn abort_queued(&self) {}

    /// Is told, before its contexts are opened, that it is one of several paths to the same storage, and which ledger these have
    /// in common. Says whether it keeps that one; drives that lose nothing by themselves, or alone, do not.
    fn keep_ledger(&self, _ledger: &Arc<Ledger>) -> bool {
        false
    }

    /// The drive, if it is one of several paths.
    fn as_multipath(&self) -> Option<&MultipathDrive> {
        None
    }

    /// Makes the driver's side of one hardware context. Called on the reactor that owns the context; `ring`
    /// is that reactor's.
    ///
    /// # Errors
    /// What the operating system says, with the object named.
    fn open_hctx(&self, ring: &RingHandle, hctx: HctxId) -> io::Result<Box<dyn Driver>>;
}
