//! The memory of the test's bios, which is never accessed.

use std::ptr::NonNull;

use blkmq_core::bio::Lent;

/// Lends separate memory for each of the lengths, in bytes. It is never freed.
pub(crate) fn lend(lengths: &[u32]) -> Vec<Lent> {
    let lend = |&len: &u32| {
        let bytes: &'static mut [u8] = Box::leak(vec![0; len as usize].into_boxed_slice());
        // SAFETY: the memory is leaked, so it stays valid for reads and writes. There is no other
        // reference to it, and neither the core nor the driver of this test accesses it.
        unsafe { Lent::new(NonNull::from(bytes).cast(), len) }
    };
    lengths.iter().map(lend).collect()
}
