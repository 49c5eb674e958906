//! The outbox: records wait in one buffer, which is reused, until a socket takes them. `handshake` and
//! `records` append to it, and `stream` sends it.

/// Records that wait to be sent, in order.
#[derive(Default)]
pub(crate) struct Outbox {
    bytes: Vec<u8>,
    /// The records that wait are in `bytes[start..end]`.
    start: usize,
    end: usize,
}

impl Outbox {
    /// The records that wait.
    pub(crate) fn waiting(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    /// Removes the first `count` bytes that wait: they were sent.
    pub(crate) fn sent(&mut self, count: usize) {
        self.start += count;
        debug_assert!(self.start <= self.end, "more sent than waited");
    }

    /// Room for `count` bytes behind those that wait. Its content is unspecified: the caller fills
    /// it, and then calls `appended`.
    pub(crate) fn room(&mut self, count: usize) -> &mut [u8] {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
        if self.end + count > self.bytes.len() {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        if self.end + count > self.bytes.len() {
            self.bytes.resize(self.end + count, 0);
        }
        &mut self.bytes[self.end..self.end + count]
    }

    /// Adds the first `count` bytes of the room to those that wait.
    pub(crate) fn appended(&mut self, count: usize) {
        self.end += count;
        debug_assert!(
            self.end <= self.bytes.len(),
            "more appended than there was room for"
        );
    }
}
