//! The protocol's eight error values, one of which reports a failure to a client.

use std::fmt;

/// The errors a reply may carry; a client treats any other value as `EINVAL`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum ErrorCode {
    /// Not permitted (a write to a read-only export).
    Perm = 1,
    /// The medium or the path to it failed.
    Io = 5,
    /// No memory for the request.
    NoMemory = 12,
    /// The request itself is wrong.
    Invalid = 22,
    /// Beyond the end, or no room left.
    NoSpace = 28,
    /// Too long to be done in one request.
    Overflow = 75,
    /// Cannot be done fast (only for `FAST_ZERO`).
    NotSupported = 95,
    /// The server is shutting down.
    Shutdown = 108,
}

impl ErrorCode {
    /// Every code, in the order of its value.
    pub const ALL: [ErrorCode; 8] = [
        ErrorCode::Perm,
        ErrorCode::Io,
        ErrorCode::NoMemory,
        ErrorCode::Invalid,
        ErrorCode::NoSpace,
        ErrorCode::Overflow,
        ErrorCode::NotSupported,
        ErrorCode::Shutdown,
    ];

    /// The code for a Linux `errno` value; a value that the protocol does not have becomes `EIO`.
    pub fn from_errno(errno: i32) -> ErrorCode {
        match errno {
            libc::EPERM | libc::EACCES | libc::EROFS => ErrorCode::Perm,
            libc::ENOMEM => ErrorCode::NoMemory,
            libc::EINVAL => ErrorCode::Invalid,
            libc::ENOSPC | libc::EDQUOT | libc::EFBIG => ErrorCode::NoSpace,
            libc::EOVERFLOW => ErrorCode::Overflow,
            libc::EOPNOTSUPP => ErrorCode::NotSupported,
            libc::ESHUTDOWN => ErrorCode::Shutdown,
            _ => ErrorCode::Io,
        }
    }

    /// The code for a value on the wire; an unknown value counts as `EINVAL`.
    pub fn from_wire(value: u32) -> ErrorCode {
        Self::ALL
            .into_iter()
            .find(|code| code.to_wire() == value)
            .unwrap_or(ErrorCode::Invalid)
    }

    /// The value on the wire.
    #[inline]
    pub const fn to_wire(self) -> u32 {
        self as u32
    }

    /// The protocol's name for it.
    pub const fn name(self) -> &'static str {
        match self {
            ErrorCode::Perm => "EPERM",
            ErrorCode::Io => "EIO",
            ErrorCode::NoMemory => "ENOMEM",
            ErrorCode::Invalid => "EINVAL",
            ErrorCode::NoSpace => "ENOSPC",
            ErrorCode::Overflow => "EOVERFLOW",
            ErrorCode::NotSupported => "ENOTSUP",
            ErrorCode::Shutdown => "ESHUTDOWN",
        }
    }
}

impl fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_survives_the_wire_and_unknown_values_become_einval() {
        for code in ErrorCode::ALL {
            assert_eq!(ErrorCode::from_wire(code.to_wire()), code);
        }
        assert_eq!(ErrorCode::from_wire(9999), ErrorCode::Invalid);
    }

    #[test]
    fn errno_the_protocol_lacks_becomes_eio_and_quota_becomes_enospc() {
        assert_eq!(ErrorCode::from_errno(libc::ENODEV), ErrorCode::Io);
        assert_eq!(ErrorCode::from_errno(libc::EDQUOT), ErrorCode::NoSpace);
        assert_eq!(ErrorCode::from_errno(libc::EROFS), ErrorCode::Perm);
        assert_eq!(ErrorCode::from_errno(libc::ENOTSUP), ErrorCode::NotSupported);
    }
}
