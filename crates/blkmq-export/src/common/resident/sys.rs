//! The one call for `resident` that needs addresses.

use std::ffi::c_void;
use std::ops::Range;
use std::ptr;

use rustix::mm::{Advice, madvise};

/// Makes pages of this process present, as a write to each would, without a change of their content. Pages that are
/// not there any more, or for which there is no memory, are left.
pub(super) fn populate(range: Range<usize>) {
    let start = ptr::without_provenance_mut::<c_void>(range.start);
    // SAFETY: the advice reads and changes no byte, and unmaps nothing. If another thread has unmapped the range or
    // put another mapping there meanwhile, the kernel refuses, or makes that one's pages present.
    let done = unsafe { madvise(start, range.len(), Advice::LinuxPopulateWrite) };
    if let Err(error) = done {
        tracing::debug!("memory at {range:x?} is not present yet: {error}");
    }
}
