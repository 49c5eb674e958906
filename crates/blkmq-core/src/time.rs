//! Time in core: a number that is an argument. Core never reads a clock. The host counts from its start,
//! the simulator from zero.

use std::fmt;
use std::ops::{Add, AddAssign, Sub};

/// A length of time in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nanos(pub u64);

/// A point in time: nanoseconds since an origin that the caller chooses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Instant(pub u64);

impl Nanos {
    /// A length of zero.
    pub const ZERO: Self = Self(0);

    /// `us` microseconds.
    pub const fn from_micros(us: u64) -> Self {
        Self(us * 1_000)
    }

    /// `ms` milliseconds.
    pub const fn from_millis(ms: u64) -> Self {
        Self(ms * 1_000_000)
    }

    /// `s` seconds.
    pub const fn from_secs(s: u64) -> Self {
        Self(s * 1_000_000_000)
    }
}

impl Instant {
    /// Returns the time from `earlier` to here, zero if `earlier` is later.
    pub const fn since(self, earlier: Self) -> Nanos {
        Nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Nanos> for Instant {
    type Output = Self;
    fn add(self, by: Nanos) -> Self {
        Self(self.0.saturating_add(by.0))
    }
}

impl Sub<Nanos> for Instant {
    type Output = Self;
    fn sub(self, by: Nanos) -> Self {
        Self(self.0.saturating_sub(by.0))
    }
}

impl Add for Nanos {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl AddAssign for Nanos {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl fmt::Display for Nanos {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            ns if ns < 10_000 => write!(f, "{ns} ns"),
            ns if ns < 10_000_000 => write!(f, "{} µs", ns / 1_000),
            ns if ns < 10_000_000_000 => write!(f, "{} ms", ns / 1_000_000),
            ns => write!(f, "{} s", ns / 1_000_000_000),
        }
    }
}
