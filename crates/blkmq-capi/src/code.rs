//! The codes that calls return and I/Os end with, and a text for each. `failure` adds what a call knows.

use blkmq_engine::{Error, Status};

/// How a call or an I/O ended: 0, or a negative number.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// No error.
    Ok = 0,
    /// An I/O error.
    Io = -1,
    /// The medium could not be read or written.
    Medium = -2,
    /// The connection to the drive failed.
    Transport = -3,
    /// No space is left, or the range is behind the end of the disk.
    NoSpace = -4,
    /// The disk does not support the operation.
    NotSupported = -5,
    /// The disk has no such range, or it is not made of whole blocks.
    Invalid = -6,
    /// The disk is read-only.
    ReadOnly = -7,
    /// The drive did not answer in time.
    Timeout = -8,
    /// Out of memory.
    NoMemory = -9,
    /// The disk is removed, or the engine is shut down, or belongs to the parent of this process.
    Shutdown = -10,
    /// There is no room: submit it again after a completion.
    Again = -11,
    /// An argument is null, not UTF-8, or out of range.
    Argument = -20,
    /// The configuration is wrong.
    Configuration = -21,
    /// There is no disk of that name.
    NoDisk = -22,
    /// There is no group of that path.
    NoGroup = -23,
    /// The engine cannot start, admit a thread or shut down.
    Engine = -24,
    /// The engine belongs to the parent of this process.
    Forked = -25,
    /// This thread may not make this call.
    Thread = -26,
    /// Something that was opened must be closed first.
    Busy = -27,
    /// A defect of the library.
    Panic = -28,
}

impl Code {
    /// All codes.
    pub(crate) const ALL: [Self; 21] = [
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
        Self::Again,
        Self::Argument,
        Self::Configuration,
        Self::NoDisk,
        Self::NoGroup,
        Self::Engine,
        Self::Forked,
        Self::Thread,
        Self::Busy,
        Self::Panic,
    ];

    /// What it means.
    pub(crate) const fn text(self) -> &'static std::ffi::CStr {
        match self {
            Self::Ok => c"no error",
            Self::Io => c"an I/O error",
            Self::Medium => c"the medium could not be read or written",
            Self::Transport => c"the connection to the drive failed",
            Self::NoSpace => c"no space is left, or the range is behind the end of the disk",
            Self::NotSupported => c"the disk does not support the operation",
            Self::Invalid => c"the disk has no such range, or it is not made of whole blocks",
            Self::ReadOnly => c"the disk is read-only",
            Self::Timeout => c"the drive did not answer in time",
            Self::NoMemory => c"out of memory",
            Self::Shutdown => {
                c"the disk is removed, or the engine is shut down, or belongs to the parent of this process"
            }
            Self::Again => c"there is no room: submit it again after a completion",
            Self::Argument => c"an argument is null, not UTF-8, or out of range",
            Self::Configuration => c"the configuration is wrong",
            Self::NoDisk => c"there is no disk of that name",
            Self::NoGroup => c"there is no group of that path",
            Self::Engine => c"the engine cannot start, admit a thread or shut down",
            Self::Forked => c"the engine belongs to the parent of this process",
            Self::Thread => c"this thread may not make this call",
            Self::Busy => c"something that was opened must be closed first",
            Self::Panic => c"a defect of the library",
        }
    }
}

impl From<Status> for Code {
    fn from(status: Status) -> Self {
        match status {
            Status::Ok => Self::Ok,
            Status::Io => Self::Io,
            Status::Medium => Self::Medium,
            Status::Transport => Self::Transport,
            Status::NoSpace => Self::NoSpace,
            Status::NotSupported => Self::NotSupported,
            Status::Invalid => Self::Invalid,
            Status::ReadOnly => Self::ReadOnly,
            Status::Timeout => Self::Timeout,
            Status::NoMemory => Self::NoMemory,
            Status::Shutdown => Self::Shutdown,
            Status::Requeue => Self::Again,
        }
    }
}

impl From<&Error> for Code {
    fn from(error: &Error) -> Self {
        match error {
            Error::Configuration(_) => Self::Configuration,
            Error::NoDisk { .. } => Self::NoDisk,
            Error::NoGroup { .. } => Self::NoGroup,
            Error::Forked { .. } => Self::Forked,
            Error::Io(error) => error.status.into(),
            _ => Self::Engine,
        }
    }
}
