//! Decides what every driver of the host has in common: how its keys are written and what it tells about allocation.
//! A driver here is a configuration (`Send`), a drive (the state that its hardware contexts share) and, made on the
//! reactor that owns it, a hardware context: the `blkmq_core::driver::Driver`.

use std::io;

use blkmq_core::ids::DiskId;

mod chance;
pub mod file;
pub mod multipath;
pub mod nbd;
pub mod null;
pub mod ram;
mod store;
mod sys;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod through_core;
pub mod value;

pub use chance::Rate;
pub use value::ConfigError;

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
