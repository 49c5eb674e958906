//! The memory that the tests lend to bios: pages that are aligned for direct I/O.

use std::ptr::NonNull;

use blkmq_core::bio::{Data, Lent};

/// 4096 bytes.
pub(crate) struct Page(Box<Aligned>);

#[repr(align(4096))]
struct Aligned([u8; 4096]);

impl Page {
    pub(crate) fn filled(with: u8) -> Self {
        Self(Box::new(Aligned([with; 4096])))
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0.0
    }

    /// Lends the page; the test keeps it until the bio has ended and does not touch it meanwhile.
    pub(crate) fn data(&mut self) -> Data {
        let start = NonNull::from(&mut self.0.0).cast();
        // SAFETY: the tests wait for the end of every bio before they read its page or drop it.
        Data::Flat(unsafe { Lent::new(start, 4096) })
    }
}
