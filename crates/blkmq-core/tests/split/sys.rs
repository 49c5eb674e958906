//! Decides which memory the bios of the test carry: some that nobody ever touches.

use std::ptr::NonNull;

use blkmq_core::bio::Lent;

/// Lends memory of its own for each of the lengths, in bytes. It is never given back: a test's memory ends with it.
pub(crate) fn lend(lengths: &[u32]) -> Vec<Lent> {
    let lend = |&len: &u32| {
        let bytes: &'static mut [u8] = Box::leak(vec![0; len as usize].into_boxed_slice());
        // SAFETY: the memory is leaked, so it stays valid for reads and writes; this is the only way to it, and neither
        // the core nor the driver of this test looks into it.
        unsafe { Lent::new(NonNull::from(bytes).cast(), len) }
    };
    lengths.iter().map(lend).collect()
}
