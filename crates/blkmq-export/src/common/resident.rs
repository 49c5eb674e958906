//! Memory of this process that a reactor may touch for the first time while it serves, found and touched before: lists
//! that were made with room and have not been full yet, and the thread's stack. `io_flusher` calls it where a reactor
//! that waits for memory would wait for itself; `touched` has the memory of doors.
//!
//! The kernel lists a process's mappings in order of their addresses. A heap of glibc lies at the beginning of 64 MiB
//! whose rest is reserved without access, and a thread's stack behind a page without access:
//!
//! ```text
//!  | heap rw | reserved --- ... | heap rw | reserved --- ... | list rw | guard --- | stack rw ... |
//!  ^ a multiple of 64 MiB       ^
//! ```
//!
//! Heaps are taken whole, and so are other mappings of a few MiB, which are long lists. Larger ones are memory for
//! payload and content of disks, and are left alone, as are other threads' stacks.

mod sys;

use std::fs;
use std::hint::black_box;
use std::ops::Range;

/// Touches what the calling thread may use. May block: call it before the first request.
pub(super) fn touch() {
    touch_stack();
    // Where it cannot be read, nothing is lost but this.
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    parts(&maps).into_iter().for_each(sys::populate);
}

/// Touches the thread's stack, deeper than requests get.
#[inline(never)]
fn touch_stack() {
    let mut deep = [0_u8; STACK_BYTES];
    black_box(&mut deep);
}

/// A mapping, as the kernel lists it.
struct Mapping {
    at: Range<usize>,
    /// Private, writable, and of no file.
    is_memory: bool,
    /// Without access.
    is_reserved: bool,
    is_heap: bool,
}

/// The parts of the mappings to be touched.
fn parts(maps: &str) -> Vec<Range<usize>> {
    let all: Vec<Mapping> = maps.lines().filter_map(mapping).collect();
    let mut parts = Vec::new();
    for (index, one) in all.iter().enumerate().filter(|(_, one)| one.is_memory) {
        let neighbour = |at: Option<usize>| at.and_then(|at| all.get(at)).filter(|other| other.is_reserved);
        let before = neighbour(index.checked_sub(1)).filter(|other| other.at.end == one.at.start);
        let behind = neighbour(Some(index + 1)).filter(|other| other.at.start == one.at.end);
        let heap = one.at.end - one.at.end % HEAP_BYTES;
        let is_stack = before.is_some_and(|guard| guard.at.end % HEAP_BYTES != 0);
        match behind {
            _ if one.is_heap => parts.push(one.at.clone()),
            // The kernel may list a heap and what happens to lie before it as one.
            Some(rest) if rest.at.end == heap + HEAP_BYTES => parts.push(heap.max(one.at.start)..one.at.end),
            _ if !is_stack && one.at.len() <= LIST_BYTES => parts.push(one.at.clone()),
            _ => {}
        }
    }
    parts
}

/// Parses a line: addresses, rights, offset, device, inode, path.
fn mapping(line: &str) -> Option<Mapping> {
    let mut words = line.split_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let address = |text| usize::from_str_radix(text, 16).ok();
    let rights = words.next()?;
    let path = words.nth(3).unwrap_or_default();
    Some(Mapping {
        at: address(start)?..address(end)?,
        is_memory: rights == "rw-p" && ["", "[heap]"].contains(&path),
        is_reserved: rights == "---p" && path.is_empty(),
        is_heap: path == "[heap]",
    })
}

/// More than requests were seen to need, which is 52 KiB, and less than the 2 MiB that a thread has.
const STACK_BYTES: usize = 256 << 10;
/// What glibc reserves for a heap of a thread.
const HEAP_BYTES: usize = 64 << 20;
/// The longest list that is touched.
const LIST_BYTES: usize = 8 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
560743128000-56074316f000 rw-p 00000000 00:00 0 [heap]
7f9dc8000000-7f9dc8021000 rw-p 00000000 00:00 0
7f9dc8021000-7f9dcc000000 ---p 00000000 00:00 0
7f9dcc000000-7f9dcd000000 rw-p 00000000 00:00 0
7f9dd9000000-7f9ddc0c9000 rw-p 00000000 00:00 0
7f9ddc0c9000-7f9de0000000 ---p 00000000 00:00 0
7f9de8000000-7f9de8021000 rw-p 00000000 00:00 0
7f9de81af000-7f9de81b0000 ---p 00000000 00:00 0
7f9de81b0000-7f9de83b0000 rw-p 00000000 00:00 0
7f9de83b6000-7f9de88bb000 rw-p 00000000 00:00 0
7f9de88bb000-7f9de88bc000 r--p 00000000 00:00 0
7f9de928d000-7f9de929e000 rw-s 00000000 00:0f 2069 anon_inode:[io_uring]
7f9dea9fb000-7f9dea9fd000 rw-p 001d5000 fe:01 5 /usr/lib/libc.so.6
";

    #[test]
    fn heaps_and_lists_are_found_without_stacks_and_payload() {
        let expected = [
            0x5607_4312_8000..0x5607_4316_f000,
            0x7f9d_c800_0000..0x7f9d_c802_1000,
            0x7f9d_dc00_0000..0x7f9d_dc0c_9000,
            0x7f9d_e800_0000..0x7f9d_e802_1000,
            0x7f9d_e83b_6000..0x7f9d_e88b_b000,
        ];
        assert_eq!(parts(MAPS), expected);
    }

    #[test]
    fn memory_that_was_made_with_room_is_there_afterwards() {
        // A list may lie beside the stack or the payload of another test's thread, as one mapping: then it is left alone.
        let is_there = |size: usize| {
            let list: Vec<u8> = Vec::with_capacity(size);
            touch();
            is_present(list.as_ptr() as usize + size / 2)
        };
        assert!((1..=16).any(|n| is_there(n * 300_000)));
        let untouched: Vec<u8> = Vec::with_capacity(32 << 20);
        assert!(!is_present(untouched.as_ptr() as usize + (16 << 20)));
    }

    /// Says whether the page at this address is in memory.
    fn is_present(address: usize) -> bool {
        use std::os::unix::fs::FileExt;
        let mut entry = [0; 8];
        let pages = fs::File::open("/proc/self/pagemap").unwrap();
        let at = (address / 4096 * 8) as u64;
        pages.read_exact_at(&mut entry, at).unwrap();
        u64::from_ne_bytes(entry) >> 63 == 1
    }
}
