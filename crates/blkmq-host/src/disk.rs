//! A disk as doors and library users know it, and the table in which they find it. `engine` makes the
//! table, and a new one when disks are added or removed.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blkmq_core::ids::{DiskId, GroupId};
use blkmq_core::limits::Limits;

use crate::device::{Allocation, Extent, Losses, State};
use crate::reactor::service::Waker;
pub use crate::register::Tenant;

/// Names a queue of the engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct QueueId(pub u16);

impl QueueId {
    /// Returns the number as an index into a table.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// Replaces the queue's id for mapped disks, which lie on several queues: only submissions accept it.
pub const MAPPED: QueueId = QueueId(u16::MAX);

/// A disk, as its users see it.
#[derive(Clone)]
pub struct Disk {
    /// Its name, unique in the engine.
    pub name: String,
    /// A description for people. May be empty.
    pub description: String,
    /// What guests find as its serial number: 1 to [`SERIAL_BYTES_MAX`] bytes.
    pub serial: String,
    /// What NBD clients call it.
    pub export: String,
    /// The queue it lies on; [`MAPPED`] for a mapped disk.
    pub queue: QueueId,
    /// Its number on that queue, for [`blkmq_core::bio::Bio::disk`].
    pub id: DiskId,
    /// Its size in bytes when it was found; [`Disk::current_size`] has the present size.
    pub size: u64,
    /// Whether writes and other changes are refused.
    pub read_only: bool,
    /// Smallest unit of its addresses and lengths, in bytes.
    pub block_size: u32,
    /// The group that its I/O is accounted to, unless the submitter chooses another: a number of its queue.
    pub group: GroupId,
    /// Its tenant: that group by its path, over all queues.
    pub tenant: Tenant,
    /// The limits of one request at its drive; the engine splits larger bios.
    pub limits: Limits,
    /// Queries of its drive about allocation.
    pub allocation: Arc<dyn Allocation>,
    /// The mapped disk that lies on it, or the first of several: a client that writes to both damages one of them,
    /// so doors that serve all disks leave this disk out.
    pub used_by: Option<String>,
    /// A number that no other disk of the engine has or had, whatever its name and place.
    pub number: u32,
    /// Its users.
    pub users: Users,
}

/// The users of a disk; all must let it go before it can be removed. A clone is the same list.
#[derive(Clone, Debug, Default)]
pub struct Users(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    list: Mutex<UserList>,
    /// As in the list, for attached threads, which look at each bio. Relaxed: whoever withdraws the disk then has each
    /// attached thread take an order, which makes it visible there.
    is_withdrawn: AtomicBool,
    /// The size to which the disk has grown; 0 if it has not.
    grown: AtomicU64,
}

#[derive(Debug, Default)]
struct UserList {
    is_withdrawn: bool,
    next: u64,
    wakers: BTreeMap<u64, Waker>,
    /// How many of them are parts of other users.
    parts: usize,
    hearings: BTreeMap<u64, Hearing>,
}

/// How a user of a disk learns that it has grown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hearing {
    /// The user, for people.
    pub who: String,
    /// Why it cannot be told, and what to do, for people. `None` if it is told.
    pub otherwise: Option<&'static str>,
}

/// A place among the users of a disk, until it is dropped.
#[derive(Debug)]
pub struct Use {
    users: Users,
    number: u64,
    is_part: bool,
}

impl Users {
    /// Begins to use the disk. `waker` is used when the disk is withdrawn: the user must then finish its work
    /// under way and drop the [`Use`]. None if the disk is withdrawn already.
    pub fn enter(&self, waker: Waker) -> Option<Use> {
        self.add(waker, false)
    }

    /// The same for another thread of a user that has entered: it is not counted.
    pub fn enter_as_part(&self, waker: Waker) -> Option<Use> {
        self.add(waker, true)
    }

    fn add(&self, waker: Waker, is_part: bool) -> Option<Use> {
        let mut list = self.lock();
        if list.is_withdrawn {
            return None;
        }
        let number = list.next;
        list.next += 1;
        list.wakers.insert(number, waker);
        list.parts += usize::from(is_part);
        Some(Use {
            users: self.clone(),
            number,
            is_part,
        })
    }

    /// Says whether the disk is about to be removed.
    pub fn are_to_leave(&self) -> bool {
        self.lock().is_withdrawn
    }

    /// The same for an attached thread, at each bio: it is true from when the thread has been told.
    #[inline]
    pub fn are_told_to_leave(&self) -> bool {
        self.0.is_withdrawn.load(Ordering::Relaxed)
    }

    /// The number of users.
    pub fn count(&self) -> usize {
        let list = self.lock();
        list.wakers.len() - list.parts
    }

    /// Says whether nobody uses the disk, and no part of anybody does.
    pub(crate) fn have_left(&self) -> bool {
        self.lock().wakers.is_empty()
    }

    /// Admits no new user any more and wakes the present ones; or admits users again.
    pub(crate) fn withdraw(&self, is_withdrawn: bool) {
        let mut list = self.lock();
        list.is_withdrawn = is_withdrawn;
        self.0.is_withdrawn.store(is_withdrawn, Ordering::Relaxed);
        let woken: Vec<Waker> = match is_withdrawn {
            true => list.wakers.values().cloned().collect(),
            false => Vec::new(),
        };
        drop(list);
        woken.iter().for_each(Waker::wake);
    }

    /// Admits nobody any more if there are no users but parts and readers of a moment. Says whether there are none.
    pub(crate) fn withdraw_if_unused(&self) -> bool {
        let mut list = self.lock();
        let is_unused = list.wakers.len() == list.parts;
        list.is_withdrawn |= is_unused;
        self.0.is_withdrawn.store(list.is_withdrawn, Ordering::Relaxed);
        is_unused
    }

    /// Notes that the disk has grown, and wakes its users.
    pub(crate) fn grow(&self, bytes: u64) {
        // Release: pairs with the Acquire in `Disk::current_size`: a thread that sees the size finds a queue with it.
        self.0.grown.store(bytes, Ordering::Release);
        let woken: Vec<Waker> = self.lock().wakers.values().cloned().collect();
        woken.iter().for_each(Waker::wake);
    }

    /// How the present users learn that the disk has grown, as far as they have said.
    pub fn hearings(&self) -> Vec<Hearing> {
        self.lock().hearings.values().cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, UserList> {
        // No code that can panic runs under the lock.
        self.0.list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Use {
    /// Says whether the user must let the disk go soon.
    pub fn is_to_end(&self) -> bool {
        self.users.are_to_leave()
    }

    /// Says how the user learns that the disk has grown.
    pub fn hears(&self, hearing: Hearing) {
        self.users.lock().hearings.insert(self.number, hearing);
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        let mut list = self.users.lock();
        list.wakers.remove(&self.number);
        list.hearings.remove(&self.number);
        list.parts -= usize::from(self.is_part);
    }
}

impl Disk {
    /// Its present size in bytes: it may have grown since it was found.
    #[inline]
    pub fn current_size(&self) -> u64 {
        self.users.0.grown.load(Ordering::Acquire).max(self.size)
    }

    /// Appends extents of this disk; see [`Allocation::extents`]. May block.
    ///
    /// # Errors
    /// The drive's error.
    pub fn extents(&self, offset: u64, len: u64, max: usize, out: &mut Vec<Extent>) -> io::Result<()> {
        self.allocation.extents(self.id, offset, len, max, out)
    }

    /// Appends what work in the background has still to do, as data; see [`Allocation::left`].
    ///
    /// # Errors
    /// The drive's error.
    pub fn left(&self, offset: u64, len: u64, max: usize, out: &mut Vec<Extent>) -> io::Result<()> {
        self.allocation.left(self.id, offset, len, max, out)
    }

    /// Says how often completed writes may have been lost; see [`Losses`].
    pub fn losses(&self) -> Losses {
        self.allocation.losses(self.id)
    }

    /// Looks at what no request shows; see [`Allocation::look`]. May block: for threads that have no requests.
    pub fn look(&self) {
        self.allocation.look(self.id);
    }

    /// How it is; see [`Allocation::state`].
    pub fn state(&self) -> State {
        self.allocation.state(self.id)
    }

    /// Notes that all present losses were reported to a user.
    pub fn mark_losses_seen(&self) {
        self.allocation.mark_losses_seen(self.id);
    }
}

/// The serial number of a disk, from the configured one.
pub(crate) fn serial_of(name: &str, configured: Option<&str>) -> String {
    configured.map_or_else(|| default_serial(name), str::to_owned)
}

/// The serial number of a disk for which none is set: its name, or 80 bits of a digest of it (FNV-1a of 128 bits) where
/// the name is too long. The digest is the same in every version, since guests find their disks by it.
pub fn default_serial(name: &str) -> String {
    if name.len() <= SERIAL_BYTES_MAX {
        return name.to_owned();
    }
    let step = |digest: u128, byte: &u8| (digest ^ u128::from(*byte)).wrapping_mul(FNV_PRIME);
    let digest = name.as_bytes().iter().fold(FNV_OFFSET, step);
    let folded = (digest ^ digest >> 80) & ((1 << 80) - 1);
    format!("{folded:020x}")
}

/// The longest serial number, in bytes, as virtio has it.
pub const SERIAL_BYTES_MAX: usize = 20;
/// The numbers of FNV-1a for 128 bits.
const FNV_PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
const FNV_OFFSET: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;

/// Says that a disk of `size` bytes cannot be served: offsets in files are signed, in the kernel and in the protocols.
pub fn too_large(size: u64) -> String {
    format!("size {size} rejected: must be less than 8388608T, the end of what clients can address")
}

impl fmt::Debug for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Disk")
            .field("name", &self.name)
            .field("queue", &self.queue)
            .field("id", &self.id)
            .field("size", &self.size)
            .field("read_only", &self.read_only)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn serial_is_the_name_or_its_digest_where_the_name_is_too_long() {
        assert_eq!(default_serial("vm1"), "vm1");
        assert_eq!(default_serial("12345678901234567890"), "12345678901234567890");
        // Fixed for ever: guests find their disks by it.
        let one = default_serial("pvc-0f2a77f1-b61c-4d6e-a");
        assert_eq!(one, "40e2c3abc43c445bd4ef");
        let other = default_serial("pvc-0f2a77f1-b61c-4d6e-b");
        assert_ne!(one, other);
        assert_eq!((one.len(), other.len()), (SERIAL_BYTES_MAX, SERIAL_BYTES_MAX));
    }
}
