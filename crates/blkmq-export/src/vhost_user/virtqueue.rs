//! A virtqueue of either kind: `queue` serves both alike. `ring` and `packed` know the layouts.

use super::chain::Chain;
use super::codec::RingAddresses;
use super::memory::{GuestMemory, Loans};
use super::packed::PackedRing;
use super::ring::{Broken, Ring};
use super::sys::Window;
use super::{inflight, packed_inflight};

/// A virtqueue that is being served.
#[derive(Debug)]
pub enum Virtqueue {
    /// Descriptors in a table, and two rings of them.
    Split(Ring),
    /// One ring.
    Packed(PackedRing),
}

/// The layout of a virtqueue.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// It is of the packed kind.
    pub is_packed: bool,
    /// Event index: both sides name the place at which they want to be notified.
    pub has_event_index: bool,
    /// Descriptors.
    pub size: u16,
}

impl Layout {
    /// Bytes of the in-flight record.
    pub fn record_bytes(&self) -> u64 {
        match self.is_packed {
            true => packed_inflight::record_bytes(self.size),
            false => inflight::record_bytes(self.size),
        }
    }
}

impl Virtqueue {
    /// Finds it in the memory of the front end, if all of it is there and aligned. It begins where
    /// the former device ended: at `base`, which is that device's [`Self::base`], or where the
    /// in-flight record says.
    ///
    /// # Errors
    /// The record or the base cannot be one of such a virtqueue.
    pub fn new(
        memory: &GuestMemory,
        layout: Layout,
        at: &RingAddresses,
        base: u32,
        record: Option<Window>,
    ) -> Option<Result<Self, Broken>> {
        let Layout {
            is_packed,
            has_event_index,
            size,
        } = layout;
        if is_packed {
            let ring = PackedRing::new(memory, size, at, has_event_index, (base, record))?;
            return Some(ring.map(Self::Packed));
        }
        let mut ring = Ring::new(memory, size, at, has_event_index)?;
        ring.begin(
            base as u16,
            record.map(|record| inflight::Inflight::new(record, size)),
        );
        Some(Ok(Self::Split(ring)))
    }

    /// The most chains that it can have.
    pub fn size(&self) -> u16 {
        match self {
            Self::Split(ring) => ring.size(),
            Self::Packed(ring) => ring.size(),
        }
    }

    /// Takes the next chain. Returns its identifier: below the size, and in flight once.
    ///
    /// # Errors
    /// The rule that was broken.
    #[inline]
    pub fn next_head(&mut self) -> Result<Option<u16>, Broken> {
        match self {
            Self::Split(ring) => ring.next_head(),
            Self::Packed(ring) => ring.next_head(),
        }
    }

    /// Finds the memory of the chain that was taken last.
    ///
    /// # Errors
    /// The rule that the chain breaks.
    #[inline]
    pub fn follow(&self, chain: &mut Chain, loans: &Loans, head: u16) -> Result<(), Broken> {
        match self {
            Self::Split(ring) => chain.follow(ring, loans, head),
            Self::Packed(ring) => ring.follow(chain, loans),
        }
    }

    /// Gives a chain back to the driver, with `written` bytes written; the driver sees it after
    /// [`Self::publish`].
    #[inline]
    pub fn give_back(&mut self, head: u16, written: u32) {
        match self {
            Self::Split(ring) => ring.give_back(head, written),
            Self::Packed(ring) => ring.give_back(head, written),
        }
    }

    /// Publishes the returned chains. Returns whether the driver wants a call.
    pub fn publish(&mut self) -> bool {
        match self {
            Self::Split(ring) => ring.publish(),
            Self::Packed(ring) => ring.publish(),
        }
    }

    /// Asks the driver not to notify.
    pub fn refuse_kicks(&mut self) {
        match self {
            Self::Split(ring) => ring.refuse_kicks(),
            Self::Packed(ring) => ring.refuse_kicks(),
        }
    }

    /// Returns whether the driver was asked to notify.
    pub fn wants_kicks(&self) -> bool {
        match self {
            Self::Split(ring) => ring.wants_kicks(),
            Self::Packed(ring) => ring.wants_kicks(),
        }
    }

    /// Returns whether there is a chain that was not taken or is to be done again, or a rule that was broken.
    #[inline]
    pub fn has_available(&self) -> bool {
        if self.to_repeat() > 0 {
            return true;
        }
        match self {
            Self::Split(ring) => ring.has_available(),
            Self::Packed(ring) => ring.has_available(),
        }
    }

    /// Asks the driver to notify of the next chain. Returns whether one is there already, or a rule was broken.
    pub fn ask_for_kicks(&mut self) -> bool {
        match self {
            Self::Split(ring) => ring.ask_for_kicks(),
            Self::Packed(ring) => ring.ask_for_kicks(),
        }
    }

    /// Where the next device continues; `given_up` is a chain that this one has taken and gives up.
    pub fn base(&self, given_up: Option<u16>) -> u32 {
        match self {
            Self::Split(ring) => ring.next_avail().wrapping_sub(given_up.is_some().into()).into(),
            Self::Packed(ring) => ring.base(given_up),
        }
    }

    /// The number of chains that are done again: they were in flight when the former device was
    /// killed.
    pub fn to_repeat(&self) -> usize {
        match self {
            Self::Split(ring) => ring.to_repeat(),
            Self::Packed(ring) => ring.to_repeat(),
        }
    }

    /// Returns whether some of its memory was taken away.
    pub(super) fn is_lost(&self) -> bool {
        match self {
            Self::Split(ring) => ring.is_lost(),
            Self::Packed(ring) => ring.is_lost(),
        }
    }
}
