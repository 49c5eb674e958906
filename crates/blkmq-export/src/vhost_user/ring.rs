//! The split virtqueue: what is next in it, and when the driver is notified (virtio 1.2, section 2.7). Every
//! index and every descriptor is read once. `chain` follows descriptors, `inflight` records what was taken.

use std::sync::atomic::{Ordering, fence};

use super::codec::RingAddresses;
use super::inflight::Inflight;
use super::memory::GuestMemory;
use super::sys::Window;

/// A split virtqueue that is being served.
#[derive(Debug)]
pub struct Ring {
    size: u16,
    desc: Window,
    avail: Window,
    used: Window,
    has_event_index: bool,
    /// The slot of the available ring that is read next, and the driver's index as it was read
    /// last.
    next_avail: u16,
    seen_avail: u16,
    /// The slot of the used ring that is written next, and the last one that was published.
    next_used: u16,
    published: u16,
    inflight: Option<Inflight>,
    /// The driver is asked to notify.
    wants_kicks: bool,
}

/// The driver or its front end has broken a rule: the device needs a reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Broken(pub &'static str);

impl Ring {
    /// Finds the ring in the memory of the front end, if all of it is there and aligned.
    pub fn new(memory: &GuestMemory, size: u16, at: &RingAddresses, has_event_index: bool) -> Option<Self> {
        let entries = usize::from(size);
        let used = memory.window(at.used, 6 + 8 * entries, 4)?;
        let next_used = used.load_index(INDEX);
        Some(Self {
            size,
            desc: memory.window(at.desc, 16 * entries, 16)?,
            avail: memory.window(at.avail, 6 + 2 * entries, 2)?,
            used,
            has_event_index,
            next_avail: 0,
            seen_avail: 0,
            next_used,
            published: next_used,
            inflight: None,
            wants_kicks: false,
        })
    }

    /// Begins where the former device ended: at `base`, or where the in-flight record says. Nothing
    /// of that record is trusted but the heads, which are below the ring's size.
    pub fn begin(&mut self, base: u16, inflight: Option<Inflight>) {
        self.next_avail = base;
        self.inflight = inflight;
        if let Some(inflight) = &mut self.inflight {
            let left = inflight.recover(self.next_used);
            self.next_avail = self.next_used.wrapping_add(left);
        }
        self.seen_avail = self.next_avail;
    }

    /// The number of descriptors in its table.
    pub fn size(&self) -> u16 {
        self.size
    }

    /// The slot of the available ring that is read next.
    pub fn next_avail(&self) -> u16 {
        self.next_avail
    }

    /// The descriptor table.
    pub(super) fn table(&self) -> &Window {
        &self.desc
    }

    /// Takes the head of the next chain: first those that are submitted again, then what is
    /// available.
    ///
    /// # Errors
    /// The index has jumped, or the head is no descriptor.
    #[inline]
    pub fn next_head(&mut self) -> Result<Option<u16>, Broken> {
        if let Some(inflight) = &mut self.inflight
            && let Some(head) = inflight.next_to_repeat()
        {
            return Ok(Some(head));
        }
        if self.seen_avail == self.next_avail {
            let seen = self.avail.load_index(INDEX);
            match seen.wrapping_sub(self.next_avail) {
                0 => return Ok(None),
                waiting if waiting > self.size => return Err(Broken("the available index has jumped")),
                _ => self.seen_avail = seen,
            }
        }
        let place = usize::from(self.next_avail % self.size);
        let head: u16 = self.avail.load(ENTRIES + 2 * place);
        if head >= self.size {
            return Err(Broken("a head that is no descriptor"));
        }
        self.next_avail = self.next_avail.wrapping_add(1);
        if let Some(inflight) = &mut self.inflight {
            inflight.take(head);
        }
        Ok(Some(head))
    }

    /// The number of chains that are done again.
    pub(super) fn to_repeat(&self) -> usize {
        self.inflight.as_ref().map_or(0, Inflight::to_repeat)
    }

    /// Returns whether some of its memory was taken away.
    pub(super) fn is_lost(&self) -> bool {
        let record = self.inflight.as_ref().is_some_and(Inflight::is_lost);
        record
            || [&self.desc, &self.avail, &self.used]
                .iter()
                .any(|window| window.is_lost())
    }

    /// Gives a chain back to the driver, with `written` bytes written; the driver sees it after
    /// [`Self::publish`].
    #[inline]
    pub fn give_back(&mut self, head: u16, written: u32) {
        let place = usize::from(self.next_used % self.size);
        let entry = u64::from(head) | u64::from(written) << 32;
        self.used.store(ENTRIES + 8 * place, entry.to_le());
        self.next_used = self.next_used.wrapping_add(1);
        if let Some(inflight) = &mut self.inflight {
            inflight.end(head);
        }
    }

    /// Publishes the returned chains. Returns whether the driver wants a call.
    pub fn publish(&mut self) -> bool {
        if self.next_used == self.published {
            return false;
        }
        let before = std::mem::replace(&mut self.published, self.next_used);
        self.used.store_index(INDEX, self.next_used);
        if let Some(inflight) = &mut self.inflight {
            inflight.publish(self.next_used);
        }
        // SeqCst: the index is stored before the driver's wish for calls is read; the driver does
        // the same the other way round.
        fence(Ordering::SeqCst);
        if !self.has_event_index {
            return self.avail.load_index(0) & NO_INTERRUPT == 0;
        }
        let event = self.avail.load_index(ENTRIES + 2 * usize::from(self.size));
        is_passed(event, before, self.next_used)
    }

    /// Asks the driver not to notify.
    pub fn refuse_kicks(&mut self) {
        if std::mem::replace(&mut self.wants_kicks, false) && !self.has_event_index {
            self.used.store_index(0, NO_NOTIFY);
        }
    }

    /// Returns whether the driver was asked to notify.
    pub fn wants_kicks(&self) -> bool {
        self.wants_kicks
    }

    /// Returns whether there is a chain that was not taken, or an index that has jumped.
    #[inline]
    pub fn has_available(&self) -> bool {
        self.seen_avail != self.next_avail || self.avail.load_index(INDEX) != self.next_avail
    }

    /// Asks the driver to notify of the next chain. Returns whether one is there already, or an index that has jumped.
    pub fn ask_for_kicks(&mut self) -> bool {
        self.wants_kicks = true;
        if self.has_event_index {
            let event = ENTRIES + 8 * usize::from(self.size);
            self.used.store_index(event, self.next_avail);
        } else {
            self.used.store_index(0, 0);
        }
        // SeqCst: the request is stored before the check; the driver publishes before it reads the
        // request.
        fence(Ordering::SeqCst);
        self.has_available()
    }
}

/// Returns whether an index on the way from `before` to `now` has passed `event` (virtio 1.2, 2.7.7.2).
pub(super) fn is_passed(event: u16, before: u16, now: u16) -> bool {
    now.wrapping_sub(event).wrapping_sub(1) < now.wrapping_sub(before)
}

/// The offset of the index in the available and in the used ring, and where the entries begin.
const INDEX: usize = 2;
const ENTRIES: usize = 4;
const NO_INTERRUPT: u16 = 1;
const NO_NOTIFY: u16 = 1;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn event_is_passed_when_the_index_goes_beyond_it() {
        assert!(is_passed(0, 0, 1));
        assert!(!is_passed(1, 0, 1));
        assert!(is_passed(2, 0, 5));
        assert!(!is_passed(5, 0, 5));
        assert!(is_passed(u16::MAX, u16::MAX, 0));
        assert!(!is_passed(0, u16::MAX, 0));
    }
}
