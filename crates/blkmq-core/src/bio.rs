//! A bio: what a caller asks of a disk, one operation on one byte range, with its buffers, priority and
//! group. A bio is staged by `sw_ctx`, becomes part of a `request`, and comes back to its submitter with
//! a [`Status`].

use std::sync::Arc;

pub use blkmq_sync::lent::Lent;

use crate::ids::{DiskId, GroupId};

/// The operation of a bio.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[repr(u8)]
pub enum Op {
    /// Fill the buffers from the range.
    #[default]
    Read,
    /// Store the buffers into the range.
    Write,
    /// Make everything that has completed durable. Has no range.
    Flush,
    /// The range's content is no longer needed; it may read as zeroes or as before.
    Discard,
    /// The range shall read as zeroes.
    WriteZeroes,
}

impl Op {
    /// All of them, in the order of their numbers.
    pub(crate) const ALL: [Self; 5] = [
        Self::Read,
        Self::Write,
        Self::Flush,
        Self::Discard,
        Self::WriteZeroes,
    ];

    /// Says whether the operation changes the disk's content.
    pub const fn is_write(self) -> bool {
        matches!(self, Self::Write | Self::Discard | Self::WriteZeroes)
    }

    /// Says whether the operation moves data through buffers.
    pub const fn has_data(self) -> bool {
        matches!(self, Self::Read | Self::Write)
    }

    /// Says whether it is synchronous with these modifiers: it is no write, or does not have
    /// [`Flags::ASYNC`].
    #[inline]
    pub(crate) const fn is_sync(self, flags: Flags) -> bool {
        !flags.has(Flags::ASYNC) || !self.is_write()
    }

    /// Returns the direction under which the operation is counted.
    pub const fn direction(self) -> Direction {
        match self {
            Self::Read => Direction::Read,
            Self::Write | Self::WriteZeroes => Direction::Write,
            Self::Discard => Direction::Discard,
            Self::Flush => Direction::Flush,
        }
    }
}

/// The kinds under which I/O is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Direction {
    /// Reads.
    Read,
    /// Writes and zeroing.
    Write,
    /// Discards.
    Discard,
    /// Flushes.
    Flush,
}

impl Direction {
    /// How many there are.
    pub const COUNT: usize = 4;
    /// All of them, in the order of their numbers.
    pub const ALL: [Self; Self::COUNT] = [Self::Read, Self::Write, Self::Discard, Self::Flush];
}

/// Modifiers of an operation, a set of bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Flags(pub u8);

impl Flags {
    /// No modifier.
    pub const NONE: Self = Self(0);
    /// Durable on completion (force unit access).
    pub const FUA: Self = Self(1);
    /// Everything that completed before must be durable before this write's data is stored.
    pub const PREFLUSH: Self = Self(2);
    /// Zeroing must keep the range allocated.
    pub const NO_UNMAP: Self = Self(4);
    /// Zeroing must fail with [`Status::NotSupported`] if it is no faster than writing.
    pub const FAST_ONLY: Self = Self(8);
    /// Never merge this bio with another.
    pub const NO_MERGE: Self = Self(16);
    /// No caller waits for this write: write-back, a copy in the background. Schedulers prefer others to it.
    pub const ASYNC: Self = Self(32);
    /// All modifiers that traces record.
    pub(crate) const PUBLIC: Self = Self(63);
    /// A read that the driver does as work of its own on the range, without data: of an image, a copy of what is below.
    pub const TASK: Self = Self(64);
    /// The engine's own: the remainder of a bio that is being split.
    pub(crate) const REST: Self = Self(128);

    /// Says whether all bits of `other` are set.
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Says whether any bit of `other` is set.
    pub const fn has_any(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// Returns the set with the bits of `other` too.
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Returns the set without the bits of `other`.
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }
}

/// The priority classes, as `ioprio` has them. A smaller one goes first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Class {
    /// Real time: before all others.
    Rt,
    /// Best effort, the default.
    #[default]
    Be,
    /// Idle: when no other class has requests (up to ageing).
    Idle,
}

/// An I/O priority: a class, and within it a level from 0 (first) to 7.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Prio {
    /// The class.
    pub class: Class,
    /// The level in the class, 0 to 7.
    pub level: u8,
}

impl Default for Prio {
    fn default() -> Self {
        Self {
            class: Class::Be,
            level: 4,
        }
    }
}

/// How a bio, a request or a driver's part of one ended.
///
/// Four bytes, so that the small fields of a [`Bio`] fill a word and are copied as one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Status {
    /// Done as asked.
    #[default]
    Ok,
    /// An I/O error of no more specific kind (EIO).
    Io,
    /// The medium could not be read or written (EIO). Never retried on another path.
    Medium,
    /// The connection to the drive failed (EIO). Another path may work.
    Transport,
    /// No space left (ENOSPC).
    NoSpace,
    /// The operation, or a modifier of it, is not supported (EOPNOTSUPP).
    NotSupported,
    /// The range or the flags are not valid for the disk (EINVAL).
    Invalid,
    /// The disk is read-only (EPERM).
    ReadOnly,
    /// No answer within the queue's time limit (ETIMEDOUT).
    Timeout,
    /// Out of memory or of kernel resources (ENOMEM).
    NoMemory,
    /// The disk or the daemon is shutting down (ESHUTDOWN).
    Shutdown,
    /// From a driver only: not done, insert it again.
    Requeue,
}

impl Status {
    /// All of them, in the order of their numbers.
    pub(crate) const ALL: [Self; 12] = [
        Self::Ok,
        Self::Io,
        Self::Medium,
        Self::Transport,
        Self::NoSpace,
        Self::NotSupported,
        Self::Invalid,
        Self::ReadOnly,
        Self::Timeout,
        Self::NoMemory,
        Self::Shutdown,
        Self::Requeue,
    ];

    /// Says whether there was no error.
    pub const fn is_ok(self) -> bool {
        matches!(self, Self::Ok)
    }

    /// Keeps the first error of two statuses.
    pub const fn and(self, later: Self) -> Self {
        if self.is_ok() { later } else { self }
    }

    /// Returns the corresponding errno of Linux, 0 for success.
    pub const fn errno(self) -> i32 {
        match self {
            Self::Ok => 0,
            Self::Io | Self::Medium | Self::Transport => 5,
            Self::NoSpace => 28,
            Self::NotSupported => 95,
            Self::Invalid => 22,
            Self::ReadOnly => 1,
            Self::Timeout => 110,
            Self::NoMemory => 12,
            Self::Shutdown => 108,
            Self::Requeue => 11,
        }
    }

    /// Returns the status for an errno of Linux (0 is success); an unknown one is [`Status::Io`].
    pub const fn from_errno(errno: i32) -> Self {
        match errno {
            0 => Self::Ok,
            28 | 122 => Self::NoSpace,
            95 => Self::NotSupported,
            22 => Self::Invalid,
            1 | 13 | 30 => Self::ReadOnly,
            110 => Self::Timeout,
            12 => Self::NoMemory,
            108 => Self::Shutdown,
            61 | 84 => Self::Medium,
            104 | 107 | 111 | 113 | 32 => Self::Transport,
            _ => Self::Io,
        }
    }
}

/// Where a bio's data is.
#[derive(Clone, Debug, Default)]
pub enum Data {
    /// There is none: the operation moves no data, or the device ignores it.
    #[default]
    None,
    /// One contiguous piece of memory, as long as the bio (or the unsplit bio it is part of).
    Flat(Lent),
    /// Several pieces, in order; together as long as the bio (or the unsplit bio it is part of).
    List(Arc<[Lent]>),
    /// No memory but a number that stands for the content: the simulator's data.
    Token(u64),
}

/// One caller's I/O.
///
/// The submitter gets the same value back when it has ended, with `status` set; `client` and `cookie` are its own.
#[derive(Clone, Debug, Default)]
#[repr(C)]
pub struct Bio {
    /// The operation.
    pub op: Op,
    /// Modifiers of the operation.
    pub flags: Flags,
    /// Priority.
    pub prio: Prio,
    /// How it ended; meaningful when the bio comes back.
    pub status: Status,
    /// The disk, of the queue it is submitted to.
    pub disk: DiskId,
    /// The group it is accounted to.
    pub group: GroupId,
    /// First byte on the disk. 0 for a flush.
    pub offset: u64,
    /// Bytes. 0 for a flush only.
    pub len: u64,
    /// Where the data is.
    pub data: Data,
    /// Bytes of `data` that belong to an earlier part of the same, split bio. 0 from a submitter.
    pub skip: u64,
    /// The submitter's own: the number of its client.
    pub client: u32,
    /// The submitter's own: the number of that client's I/O.
    pub cookie: u64,
    /// The engine's own; leave it at its default.
    pub origin: Origin,
}

/// What a submitter sets of a bio, with data in at most one piece: for submissions that write it where the engine keeps
/// it, instead of a bio that is written field by field and copied at once by wider loads, for which a processor waits
/// (store forwarding). The fields are a [`Bio`]'s.
#[derive(Clone, Copy, Debug)]
pub struct Submission {
    /// The operation.
    pub op: Op,
    /// Modifiers of the operation.
    pub flags: Flags,
    /// Priority.
    pub prio: Prio,
    /// The disk, of the queue it is submitted to.
    pub disk: DiskId,
    /// The group it is accounted to.
    pub group: GroupId,
    /// First byte on the disk.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// The data, if there is any.
    pub data: Option<Lent>,
    /// The submitter's own.
    pub client: u32,
    /// The submitter's own.
    pub cookie: u64,
}

impl Submission {
    /// The bio.
    #[inline]
    pub fn bio(&self) -> Bio {
        let mut bio = Bio::default();
        self.put_into(&mut bio);
        bio
    }

    /// Writes each field of the bio, once.
    #[inline(always)]
    pub(crate) fn put_into(&self, bio: &mut Bio) {
        (bio.op, bio.flags, bio.prio, bio.status) = (self.op, self.flags, self.prio, Status::Ok);
        (bio.disk, bio.group) = (self.disk, self.group);
        (bio.offset, bio.len, bio.skip) = (self.offset, self.len, 0);
        bio.data = self.data.map_or(Data::None, Data::Flat);
        (bio.client, bio.cookie) = (self.client, self.cookie);
        bio.origin = Origin(Parent::Submitter);
    }
}

/// There is no room for one more bio: submit it again when another one has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

/// Whether a bio is a submitter's or a part that the engine made of one. Only the engine makes the latter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Origin(pub(crate) Parent);

/// The receiver of a bio's end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Parent {
    /// The submitter.
    #[default]
    Submitter,
    /// A bio that was split into parts: its number in `split`.
    Split(u32),
    /// A write that is ordered with flushes: its number in `flush`.
    Sequence(u32),
    /// A mapped disk's bio that went unsplit to the one member that has its range: its number in `mapper::stack`.
    Passed(u32),
    /// A bio of a mapped disk that is done in parts: its number in `mapper::stack`.
    Part(u32),
}

/// The place to which a mapped disk's bio goes unsplit.
#[derive(Clone, Copy, Debug)]
pub struct Passed {
    pub(crate) disk: DiskId,
    pub(crate) offset: u64,
    /// The number of its original values in `mapper::stack`.
    pub(crate) frame: u32,
}

impl Passed {
    /// Redirects the bio to that place.
    #[inline(always)]
    pub(crate) fn put_into(self, bio: &mut Bio) {
        (bio.disk, bio.offset) = (self.disk, self.offset);
        bio.origin = Origin(Parent::Passed(self.frame));
    }
}

impl Origin {
    /// Says whether the bio is not a part: its end is the end of the bio that was submitted or passed on.
    #[inline]
    pub(crate) const fn is_whole(self) -> bool {
        matches!(self.0, Parent::Submitter | Parent::Passed(_))
    }
}

impl Bio {
    /// Says whether it is synchronous: it is no write, or does not have [`Flags::ASYNC`].
    #[inline]
    pub const fn is_sync(&self) -> bool {
        self.op.is_sync(self.flags)
    }

    /// Says whether `mapper::stack` passed it on unsplit.
    #[inline]
    pub(crate) const fn is_passed(&self) -> bool {
        matches!(self.origin.0, Parent::Passed(_))
    }

    /// Says whether `mapper::stack` waits for its end.
    #[inline]
    pub(crate) const fn is_mapped(&self) -> bool {
        matches!(self.origin.0, Parent::Passed(_) | Parent::Part(_))
    }

    /// Moves the bio out. The bio that stays has no data; its other fields keep their values, since writing
    /// them would only cost time.
    #[inline(always)]
    pub(crate) fn take(&mut self) -> Self {
        Self {
            data: std::mem::take(&mut self.data),
            ..*self
        }
    }

    /// Returns the byte after the last one.
    pub const fn end(&self) -> u64 {
        self.offset + self.len
    }

    /// Returns the pieces of memory that hold this bio's data, in order, without those of other parts.
    pub fn pieces(&self) -> Pieces<'_> {
        let list = match &self.data {
            Data::Flat(piece) => std::slice::from_ref(piece),
            Data::List(list) => list,
            Data::None | Data::Token(_) => &[],
        };
        let left = if self.op.has_data() { self.len } else { 0 };
        Pieces {
            list,
            skip: self.skip,
            left,
        }
    }

    /// Says whether the data is as long as the bio, for operations that move data. True for no data and for a token.
    #[inline]
    pub fn has_whole_data(&self) -> bool {
        match &self.data {
            Data::None | Data::Token(_) => true,
            Data::Flat(piece) => !self.op.has_data() || u64::from(piece.len()) == self.len,
            Data::List(list) => {
                !self.op.has_data()
                    || list.iter().map(|piece| u64::from(piece.len())).sum::<u64>() == self.len
            }
        }
    }

    /// Returns how many pieces of memory hold this bio's data, at least 1.
    #[inline]
    pub fn segments(&self) -> u32 {
        match &self.data {
            Data::List(_) => (self.pieces().count() as u32).max(1),
            _ => 1,
        }
    }
}

/// Iterates over the pieces of memory of a bio.
#[derive(Clone, Debug)]
pub struct Pieces<'a> {
    list: &'a [Lent],
    skip: u64,
    left: u64,
}

impl Iterator for Pieces<'_> {
    type Item = Lent;

    fn next(&mut self) -> Option<Lent> {
        while self.left > 0 {
            let (first, rest) = self.list.split_first()?;
            self.list = rest;
            if self.skip >= u64::from(first.len()) {
                self.skip -= u64::from(first.len());
                continue;
            }
            let part = first.part(self.skip as u32, self.left.min(u64::from(u32::MAX)) as u32);
            self.skip = 0;
            self.left -= u64::from(part.len());
            return Some(part);
        }
        None
    }
}
