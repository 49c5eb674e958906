//! The caps of a group: limits in bytes and I/Os per second, of reads, of writes and of both, and their
//! range. `throttle` enforces them.

use std::fmt;

use super::GroupError;
use crate::bio::Op;
use crate::limits::Limits;

/// What a cap limits. Writes are all operations except reads; a flush is a write of no bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum CapKind {
    /// Bytes read per second.
    ReadBps,
    /// Bytes written per second, written zeroes included ([`Limits::writes_zeroes`]). Discards and other
    /// zeroing count no bytes.
    WriteBps,
    /// Bytes read and written per second.
    Bps,
    /// Reads per second.
    ReadIops,
    /// Writes, discards, zeroings and flushes of the drive per second.
    WriteIops,
    /// All I/Os per second.
    Iops,
}

/// What was taken beyond the caps and is not paid for yet, in bytes or I/Os, in the order of [`CapKind::ALL`].
pub type Debts = [u64; CapKind::COUNT];

impl CapKind {
    /// Number of kinds.
    pub const COUNT: usize = 6;
    /// All kinds, in the order of their numbers.
    pub const ALL: [Self; Self::COUNT] = [
        Self::ReadBps,
        Self::WriteBps,
        Self::Bps,
        Self::ReadIops,
        Self::WriteIops,
        Self::Iops,
    ];

    /// The key under which users set the cap; its burst is `NAME_burst`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::ReadBps => "read_bps",
            Self::WriteBps => "write_bps",
            Self::Bps => "bps",
            Self::ReadIops => "read_iops",
            Self::WriteIops => "write_iops",
            Self::Iops => "iops",
        }
    }

    /// Says whether the cap limits bytes. If not, it limits bios as they were submitted (the parts of a split
    /// one count each).
    pub const fn is_bytes(self) -> bool {
        matches!(self, Self::ReadBps | Self::WriteBps | Self::Bps)
    }

    /// Says whether an operation counts. Its amount is decided elsewhere: a discard, for example, counts no bytes.
    pub const fn counts(self, op: Op) -> bool {
        match (self, op) {
            (Self::ReadBps | Self::ReadIops, op) => matches!(op, Op::Read),
            (Self::WriteBps, op) => !matches!(op, Op::Read | Op::Flush),
            (Self::WriteIops, op) => !matches!(op, Op::Read),
            (Self::Bps, op) => !matches!(op, Op::Flush),
            (Self::Iops, _) => true,
        }
    }
}

impl fmt::Display for CapKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One cap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cap {
    /// Bytes or I/Os per second.
    pub rate: u64,
    /// Bytes or I/Os allowed at once after a pause. They are earned at the rate, so the average holds.
    pub burst: u64,
}

/// The caps of one group; none by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Caps([Option<Cap>; CapKind::COUNT]);

impl Caps {
    /// Returns one cap.
    pub fn get(&self, kind: CapKind) -> Option<Cap> {
        self.0[kind as usize]
    }

    /// Sets or removes one cap.
    pub fn set(&mut self, kind: CapKind, cap: Option<Cap>) {
        self.0[kind as usize] = cap;
    }

    /// Returns the caps with one more cap, without a burst.
    #[must_use]
    pub fn with(mut self, kind: CapKind, rate: u64) -> Self {
        self.set(kind, Some(Cap { rate, burst: 0 }));
        self
    }

    /// Says whether there are no caps.
    pub fn is_none(&self) -> bool {
        self.0.iter().all(Option::is_none)
    }

    /// The caps that are set.
    pub fn iter(&self) -> impl Iterator<Item = (CapKind, Cap)> {
        CapKind::ALL
            .into_iter()
            .filter_map(|kind| Some((kind, self.get(kind)?)))
    }

    /// Checks the caps against a drive.
    ///
    /// # Errors
    /// A rate of 0, or of fewer bytes than one largest request per second: its requests would seem to hang. A burst of
    /// more than an hour.
    pub fn check(&self, limits: &Limits) -> Result<(), GroupError> {
        for (kind, Cap { rate, burst }) in self.iter() {
            let min = if kind.is_bytes() {
                limits.transfer_max.into()
            } else {
                1
            };
            if !(min..=RATE_MAX).contains(&rate) {
                let max = RATE_MAX;
                return Err(GroupError::Cap { kind, rate, min, max });
            }
            let max = rate * BURST_SECONDS_MAX;
            if burst > max {
                return Err(GroupError::Burst { kind, burst, max });
            }
        }
        Ok(())
    }
}

/// The largest rate: 1 PiB/s, so that no product of it overflows.
const RATE_MAX: u64 = 1 << 50;
/// A burst is what a cap allows in at most this time.
const BURST_SECONDS_MAX: u64 = 3600;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cap_below_one_request_per_second_or_a_huge_burst_is_refused() {
        let limits = Limits::default();
        for (caps, text) in [
            (
                Caps::default().with(CapKind::Bps, 0),
                "bps 0 rejected: must be from 1048576",
            ),
            (Caps::default().with(CapKind::ReadBps, 4096), "read_bps 4096"),
            (
                Caps::default().with(CapKind::WriteIops, 0),
                "write_iops 0 rejected: must be from 1 to",
            ),
            (Caps::default().with(CapKind::Iops, u64::MAX), "iops"),
        ] {
            let error = caps.check(&limits).unwrap_err().to_string();
            assert!(error.contains(text), "{error}");
        }
        let mut caps = Caps::default().with(CapKind::Bps, 1 << 20);
        assert_eq!(caps.check(&limits), Ok(()));
        let cap = Cap {
            rate: 10,
            burst: 36_001,
        };
        caps.set(CapKind::Iops, Some(cap));
        let error = caps.check(&limits).unwrap_err().to_string();
        assert!(
            error.contains("iops_burst 36001 rejected: must be at most 36000"),
            "{error}"
        );
    }
}
