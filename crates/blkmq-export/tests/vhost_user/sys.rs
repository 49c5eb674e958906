//! The unsafe parts of `blkio` for the tests: completions are written into memory of the caller.

use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;

use blkio::{Blkioq, Completion, MemoryRegion};

/// Waits for `count` completions. Returns the numbers of the requests and their results.
pub(crate) fn completions(queue: &mut Blkioq, count: usize) -> Vec<(usize, i32)> {
    let mut room: Vec<MaybeUninit<Completion>> = (0..count).map(|_| MaybeUninit::uninit()).collect();
    let done = queue.do_io(&mut room, count, None, None).expect("completions");
    let read = |one: &MaybeUninit<Completion>| {
        // SAFETY: `do_io` has written as many as it says.
        let completion = unsafe { one.assume_init_ref() };
        (completion.user_data, completion.ret)
    };
    room[..done].iter().map(read).collect()
}

/// The file of a region.
pub(crate) fn borrow(region: &MemoryRegion) -> BorrowedFd<'_> {
    // SAFETY: the client that allocated the region keeps its file open, and outlives the returned
    // descriptor.
    unsafe { BorrowedFd::borrow_raw(region.fd) }
}
