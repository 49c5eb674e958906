//! Who may have how much: caps (`throttle`), latency targets (`target`), and shares of what is scarce: of a drive
//! between its disks (`share`), of shared tags (`tag_share`, `tag_wait_list`), of a reactor's requests
//! (`holding`) and of the lines in which bios wait for them (`lines`).

pub(crate) mod holding;
pub(crate) mod lines;
pub(crate) mod share;
pub(crate) mod tag_share;
pub(crate) mod tag_wait_list;
pub(crate) mod target;
pub(crate) mod throttle;

/// How much one of `users` may hold while `free` is free: a dynamic threshold. However much earlier users hold
/// without returning it, something is left for newcomers (`holding` has the reasons).
#[inline]
pub fn share_of_free(free: u64, users: u64) -> u64 {
    free / (users + ROOM_FOR)
}

/// There is always room for this many more users with the same share.
const ROOM_FOR: u64 = 4;
/// The least share, of what is counted in pieces; the kernel has the same for shared tags.
pub const SHARE_MIN: u32 = 4;
