//! A disk of an engine, as its users see it. `engine` finds it, `attached` does I/O on it.

use std::fmt;

/// A disk whose I/O is accounted to a group. Cheap to clone; for any thread.
#[derive(Clone)]
pub struct Disk(blkmq_host::Disk);

impl Disk {
    pub(crate) fn new(host: blkmq_host::Disk) -> Self {
        Self(host)
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Its present size in bytes; it may grow.
    pub fn size(&self) -> u64 {
        self.0.current_size()
    }

    /// The smallest unit of offsets and lengths, in bytes: a power of two from 512 to 65536.
    pub fn block_size(&self) -> u32 {
        self.0.block_size
    }

    /// Whether writes, discards and zeroing end with [`Status::ReadOnly`](crate::Status).
    pub fn is_read_only(&self) -> bool {
        self.0.read_only
    }

    pub(crate) fn host(&self) -> &blkmq_host::Disk {
        &self.0
    }
}

impl fmt::Debug for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Disk {} of {} bytes", self.name(), self.size())
    }
}
