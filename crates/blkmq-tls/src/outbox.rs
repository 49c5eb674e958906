//! Decides where records wait until a socket takes them: in one buffer, which is used again and again. `handshake` and `records` add
//! to it, `stream` has it sent.

/// Records that wait to be sent, in order.
#[derive(Default)]
pub(crate) struct Outbox {
    bytes: Vec<u8>,
    /// What waits: `bytes[start..end]`.
    start: usize,
    end: usize,
}

impl Outbox {
    /// What waits.
    pub(crate) fn waiting(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    /// Takes note that the first `count` bytes of what waits were sent.
    pub(crate) fn sent(&mut self, count: usize) {
        self.start += count;
        debug_assert!(self.start <= self.end, "more sent than waited");
    }

    /// Room for `count` bytes behind those that wait, for the caller to fill: it holds anything. They wait once they are `appended`.
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

    /// Takes note that the first `count` bytes of the room hold what is to be sent.
    pub(crate) fn appended(&mut self, count: usize) {
        self.end += count;
        debug_assert!(
            self.end <= self.bytes.len(),
            "more appended than there was room for"
        );
    }
}
