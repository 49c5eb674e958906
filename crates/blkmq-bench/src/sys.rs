//! The buffers of a load generator, which only [`Buffers`] may lend to the engine: it frees no lent memory.
//! All other `unsafe` of this crate is in `doors/fuse/sys`.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::time::Duration;

use blkio::{Blkioq, Completion, Errno};
use blkmq_core::bio::{Bio, Data, Lent};

/// Waits until `count_min` requests of a queue have ended, and returns as many of them as fit in
/// `room`.
pub(crate) fn completions<'a>(
    queue: &mut Blkioq,
    room: &'a mut [MaybeUninit<Completion>],
    count_min: usize,
) -> blkio::Result<&'a [Completion]> {
    let count = queue.do_io(room, count_min, None, None)?;
    Ok(filled(room, count))
}

/// The same for at most `time`; then none has ended.
pub(crate) fn completions_within<'a>(
    queue: &mut Blkioq,
    room: &'a mut [MaybeUninit<Completion>],
    count_min: usize,
    mut time: Duration,
) -> blkio::Result<&'a [Completion]> {
    match queue.do_io(room, count_min, Some(&mut time), None) {
        Ok(count) => Ok(filled(room, count)),
        // What has ended meanwhile, if less than wanted, comes with the next call.
        Err(error) if error.errno() == Errno::TIME => Ok(&[]),
        Err(error) => Err(error),
    }
}

/// The first `count` of `room`, which `do_io` has filled.
fn filled(room: &[MaybeUninit<Completion>], count: usize) -> &[Completion] {
    // SAFETY: `do_io` has written as many as it says, and the two types have the same layout.
    unsafe { &*(&raw const room[..count] as *const [Completion]) }
}

/// Buffers of one size, aligned for direct I/O, each lent to at most one bio at a time.
pub(crate) struct Buffers {
    start: NonNull<u8>,
    layout: Layout,
    each: u32,
    /// Buffers that are not lent.
    free: Vec<u32>,
}

impl Buffers {
    /// Makes `count` buffers of `each` bytes, zeroed.
    ///
    /// # Panics
    /// If either is zero, or their product is not a possible size.
    pub(crate) fn new(count: u32, each: u32) -> Self {
        let bytes = (count as usize).checked_mul(each as usize);
        let bytes = bytes
            .filter(|bytes| *bytes > 0)
            .expect("a possible number of bytes");
        let layout = Layout::from_size_align(bytes, ALIGNMENT).expect("a possible layout");
        // SAFETY: the layout's size is not zero.
        let start = unsafe { alloc_zeroed(layout) };
        let start = NonNull::new(start).unwrap_or_else(|| handle_alloc_error(layout));
        Self {
            start,
            layout,
            each,
            free: (0..count).collect(),
        }
    }

    /// Lends a buffer to a bio, which the caller submits or passes to [`Self::take_back`].
    ///
    /// # Panics
    /// If all are lent.
    pub(crate) fn lend(&mut self) -> Data {
        self.lend_part(self.each)
    }

    /// The same with only the first bytes of a buffer.
    ///
    /// # Panics
    /// If all are lent, or are shorter.
    pub(crate) fn lend_part(&mut self, bytes: u32) -> Data {
        assert!(bytes <= self.each, "{bytes} of a buffer of {} bytes", self.each);
        let index = self.free.pop().expect("a buffer for every bio under way");
        // SAFETY: the index is below the number of buffers, so the result lies in the allocation.
        let start = unsafe { self.start.add(index as usize * self.each as usize) };
        // SAFETY: the buffer is in no other bio, only the engine reads or writes it, and it is not
        // freed before `take_back` receives it: `drop` leaks what is still lent.
        Data::Flat(unsafe { Lent::new(start, bytes) })
    }

    /// Takes back the buffer of a bio that has ended (or was never submitted).
    pub(crate) fn take_back(&mut self, bio: Bio) {
        if let Data::Flat(lent) = bio.data {
            let distance = lent.start().as_ptr() as usize - self.start.as_ptr() as usize;
            self.free.push((distance / self.each as usize) as u32);
        }
    }
}

impl Drop for Buffers {
    fn drop(&mut self) {
        let is_all_back = self.free.len() * self.each as usize == self.layout.size();
        if is_all_back {
            // SAFETY: allocated in `new` with this layout; no bio holds any of it.
            unsafe { dealloc(self.start.as_ptr(), self.layout) };
        }
    }
}

/// An alignment that every block device's direct I/O accepts.
const ALIGNMENT: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_bios_hold_the_same_buffer_and_each_comes_back() {
        let mut buffers = Buffers::new(4, 4096);
        let lend = |buffers: &mut Buffers| Bio {
            data: buffers.lend(),
            ..Bio::default()
        };
        let bios: Vec<Bio> = (0..4).map(|_| lend(&mut buffers)).collect();
        let mut starts: Vec<usize> = bios
            .iter()
            .map(|bio| match &bio.data {
                Data::Flat(lent) => lent.start().as_ptr() as usize,
                _ => unreachable!("buffers are flat"),
            })
            .collect();
        starts.sort_unstable();
        assert!(starts.iter().all(|start| start % ALIGNMENT == 0));
        assert!(starts.windows(2).all(|pair| pair[1] - pair[0] == 4096));
        bios.into_iter().for_each(|bio| buffers.take_back(bio));
        assert_eq!(buffers.free.len(), 4);
    }

    #[test]
    #[should_panic(expected = "a buffer for every bio")]
    fn lending_more_than_there_are_is_refused() {
        let mut buffers = Buffers::new(1, 512);
        let _first = buffers.lend();
        let _second = buffers.lend();
    }
}
