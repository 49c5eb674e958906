//! System calls for the scheduling of threads, which no library offers.

use std::mem::size_of;

use libc::{SYS_sched_getattr, SYS_sched_setattr, sched_attr};

/// The scheduling attributes of the calling thread, if they may be read.
pub(super) fn scheduling() -> Option<sched_attr> {
    let size = size_of::<sched_attr>();
    // SAFETY: all zeroes are valid in a structure of numbers.
    let mut attr: sched_attr = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes at most `size` bytes, which the structure has.
    let result = unsafe { libc::syscall(SYS_sched_getattr, 0, &raw mut attr, size, 0) };
    (result == 0).then_some(attr)
}

/// Changes them, if that is allowed.
pub(super) fn set_scheduling(attr: &sched_attr) {
    // SAFETY: the kernel reads as many bytes as the structure says that it has, and `scheduling` got no more than it has.
    unsafe { libc::syscall(SYS_sched_setattr, 0, std::ptr::from_ref(attr), 0) };
}
