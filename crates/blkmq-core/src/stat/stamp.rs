//! The stamp of a request: what the gate's holder stores in it for the statistics of its completion.

/// What the gate's holder stores in a request besides times. One word, since a value that is written in
/// pieces and read as a whole waits until all of the holder's earlier stores have reached the cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stamp(u64);

impl Stamp {
    /// `queued` bios of its group were queued when it was dispatched, its own among them; `column` is its
    /// group's column in the table of delays, and `ahead` is the column of the group whose request was
    /// dispatched before it.
    #[inline]
    pub(crate) fn new(queued: u32, column: u8, ahead: u8) -> Self {
        Self(u64::from(queued) << 16 | u64::from(column) << 8 | u64::from(ahead))
    }

    /// Says whether the request went through the gate.
    #[inline]
    pub(crate) fn is_set(self) -> bool {
        self.column() != 0
    }

    pub(super) fn queued(self) -> u64 {
        self.0 >> 16
    }

    /// The same without what is counted once per request: for each bio of a request of several.
    #[inline]
    pub(crate) fn of_a_part(self) -> Self {
        Self(self.0 & 0xffff)
    }

    pub(super) fn column(self) -> u8 {
        (self.0 >> 8) as u8
    }

    pub(super) fn ahead(self) -> u8 {
        self.0 as u8
    }
}
