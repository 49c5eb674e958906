//! Decides what the engine needs of a drive: its limits, a driver for each hardware context, and what is
//! allocated, and how much of it may be lost. `blkmq-drivers` has the drives there are; `engine` has their hardware contexts
//! opened on the reactors.

use std::any::Any;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use blkmq_core::driver::HctxDriver;
use blkmq_core::ids::{DiskId, HctxId};
use blkmq_core::limits::Limits;

use crate::runner::Runner;
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
pub trait Device: Allocation + Any {
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

    /// Says how many disks there can be while its queue is in use, if it begins with `disks`. Asked once.
    fn disks_max(&self, disks: usize) -> usize {
        disks
    }

    /// Adds a disk under a number that none of its disks has. Its contexts are told afterwards
    /// ([`HctxDriver::refresh_disks`]), and then it is used. What the disk is, the driver knows.
    ///
    /// # Errors
    /// Why the drive cannot have it.
    fn add_disk(&self, _id: DiskId, _disk: Box<dyn Any + Send>) -> io::Result<()> {
        Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "its driver has the disks that it began with",
        ))
    }

    /// Lets go of a disk that nobody uses any more, as soon as its contexts have been told.
    fn remove_disk(&self, _id: DiskId) {}

    /// Looks how large a disk is now, having made it `wanted` bytes if that is asked for. What it says holds for its contexts from
    /// then on. May block.
    ///
    /// # Errors
    /// If its disks cannot be of another size while they are used, or what the operating system says.
    fn resize(&self, _disk: DiskId, _wanted: Option<u64>) -> io::Result<u64> {
        Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "its driver has disks of one size",
        ))
    }

    /// Says whether a question to the drive has not been answered in time, nor since. Does not block.
    fn is_silent(&self) -> bool {
        false
    }

    /// Says whether its contexts can be closed while the engine goes on.
    fn may_leave(&self) -> bool {
        false
    }

    /// The engine shuts down: what the drive holds back is to end, with an error if it must.
    fn abort_queued(&self) {}

    /// Is told, before its contexts are opened, that it is one of several paths to the same storage, and what these have in common
    /// of their writes' durability: a type that the drivers concerned know. Says whether it keeps that one; drives that lose
    /// nothing by themselves, or alone, do not.
    fn keep_ledger(&self, _ledger: &Arc<dyn Any + Send + Sync>) -> bool {
        false
    }

    /// Says what of a disk is in this process alone, for another one to go on with the disk where this one stops. Nothing is in
    /// flight then.
    ///
    /// # Errors
    /// If a descriptor cannot be had.
    fn remains(&self, _disk: DiskId) -> io::Result<Remains> {
        Ok(Remains {
            must_flush: true,
            ..Remains::default()
        })
    }

    /// Makes the driver's side of one hardware context. Called on the reactor that owns the context; `ring`
    /// is that reactor's.
    ///
    /// # Errors
    /// What the operating system says, with the object named.
    fn open_hctx(&self, ring: &RingHandle, hctx: HctxId) -> io::Result<Box<dyn HctxDriver>>;
}

/// What of a disk is in this process alone.
#[derive(Debug, Default)]
pub struct Remains {
    /// Descriptors that hold locks: whoever has one of them has the lock.
    pub locks: Vec<OwnedFd>,
    /// What has been written has to be flushed, since only this process knows of it.
    pub must_flush: bool,
    /// Why no other process can go on with the disk.
    pub obstacle: Option<String>,
    /// No other process can even open the disk while this one has it.
    pub is_exclusive: bool,
}

/// A run of bytes of a disk of which all are stored in the same way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Bytes, at least 1.
    pub len: u64,
    /// Nothing is allocated for these bytes.
    pub hole: bool,
    /// These bytes are known to read as zeroes.
    pub zero: bool,
}

impl Extent {
    /// Makes an extent of `len` stored bytes.
    pub const fn data(len: u64) -> Self {
        Self {
            len,
            hole: false,
            zero: false,
        }
    }

    /// Makes an extent of `len` bytes that are not stored and read as zeroes.
    pub const fn hole(len: u64) -> Self {
        Self {
            len,
            hole: true,
            zero: true,
        }
    }
}

/// How often writes that had been completed may have been lost before a flush covered them. Each user's flush is to fail once
/// for each of these times, so a user compares with what it was told of last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Losses {
    /// How often.
    pub count: u64,
    /// How many of these times at least one user has been told of. A new user begins here: what nobody has been told of may be
    /// what it, or who it stands for, has written over a former connection.
    pub told: u64,
}

impl Losses {
    /// Both disks' together.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            count: self.count + other.count,
            told: self.told + other.told,
        }
    }
}

/// What a drive knows about its disks beside their I/O: allocation, for a door's block status, and losses.
pub trait Allocation: Send + Sync {
    /// Appends what is stored where, from `offset` on, in order and without gaps: at most `max` extents, which together
    /// cover at least 1 and at most `len` bytes. May be called from any thread; may block for as long as the
    /// filesystem needs to look up its extents.
    ///
    /// # Errors
    /// What the operating system says, or `InvalidInput` for a disk or a range that is not there.
    fn extents(
        &self,
        disk: DiskId,
        offset: u64,
        len: u64,
        max: usize,
        out: &mut Vec<Extent>,
    ) -> io::Result<()>;

    /// Says how often completed writes may have been lost.
    fn losses(&self, _disk: DiskId) -> Losses {
        Losses::default()
    }

    /// Takes note that a user has been told of all losses that there are.
    fn tell_losses(&self, _disk: DiskId) {}
}
