//! The packed virtqueue: what is next in it, and when the driver is notified (virtio 1.2, section 2.8). A
//! chain lies in consecutive slots, which are read once, when it is taken: returned chains overwrite them.
//! `packed_inflight` records what was taken; [`super::ring`] is the split kind.

use std::sync::atomic::{Ordering, fence};

use super::chain::{Chain, Descriptor, INDIRECT, LOOP, NEXT};
use super::codec::RingAddresses;
use super::memory::{GuestMemory, Loans};
use super::packed_inflight::PackedInflight;
use super::ring::{Broken, is_passed};
use super::sys::Window;

/// A packed virtqueue that is being served.
#[derive(Debug)]
pub struct PackedRing {
    size: u16,
    desc: Window,
    /// The event suppression structures of the driver, for calls, and of the device, for
    /// notifications.
    driver: Window,
    device: Window,
    has_event_index: bool,
    /// The slot that is read next, and the one that is written next with a returned chain.
    avail: Place,
    used: Place,
    /// The chain that was taken last.
    chain: Vec<Descriptor>,
    /// By the identifier of a chain: its number of slots, 0 if it is not in flight.
    taken: Vec<u16>,
    /// Slots of all chains in flight.
    places: u16,
    /// Chains to be returned with the next batch: identifiers, and bytes written.
    batch: Vec<(u16, u32)>,
    inflight: Option<PackedInflight>,
    wants_kicks: bool,
}

/// A slot in the ring, and its wrap counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) index: u16,
    pub(super) wrap: bool,
}

impl Place {
    /// Decodes it from a base of a ring, or from an event suppression structure.
    fn from_bits(bits: u16) -> Self {
        Self {
            index: bits & !WRAP,
            wrap: bits & WRAP != 0,
        }
    }

    fn to_bits(self) -> u16 {
        self.index | if self.wrap { WRAP } else { 0 }
    }

    /// The place `places` slots further, at most a whole round.
    pub(super) fn plus(self, places: u16, size: u16) -> Self {
        let index = self.index + places;
        match index >= size {
            true => Self {
                index: index - size,
                wrap: !self.wrap,
            },
            false => Self { index, ..self },
        }
    }

    fn minus(self, places: u16, size: u16) -> Self {
        match self.index.checked_sub(places) {
            Some(index) => Self { index, ..self },
            None => Self {
                index: self.index + size - places,
                wrap: !self.wrap,
            },
        }
    }

    /// Returns whether flags are those of a descriptor that the driver has made available in this round.
    pub(super) fn is_available(self, flags: u16) -> bool {
        (flags & AVAIL != 0) == self.wrap && (flags & USED != 0) != self.wrap
    }
}

impl PackedRing {
    /// Finds the ring in the memory of the front end, if all of it is there and aligned. The ring
    /// begins where the former device ended: at `base`, or where the in-flight record says.
    ///
    /// # Errors
    /// The record is not one of such a ring.
    pub fn new(
        memory: &GuestMemory,
        size: u16,
        at: &RingAddresses,
        has_event_index: bool,
        (base, inflight): (u32, Option<Window>),
    ) -> Option<Result<Self, Broken>> {
        let entries = usize::from(size);
        let (avail, used) = (
            Place::from_bits(base as u16),
            Place::from_bits((base >> 16) as u16),
        );
        let mut ring = Self {
            size,
            desc: memory.window(at.desc, 16 * entries, 16)?,
            driver: memory.window(at.avail, 4, 4)?,
            device: memory.window(at.used, 4, 4)?,
            has_event_index,
            avail,
            used,
            chain: Vec::with_capacity(entries),
            taken: vec![0; entries],
            places: 0,
            batch: Vec::with_capacity(entries),
            inflight: None,
            // A driver notifies until it is told not to.
            wants_kicks: true,
        };
        Some(ring.begin(inflight).map(|()| ring))
    }

    fn begin(&mut self, record: Option<Window>) -> Result<(), Broken> {
        let is_inside = |place: Place| match place.index < self.size {
            true => Ok(place),
            false => Err(Broken("a base beyond the ring")),
        };
        if let Some(record) = record {
            let mut inflight = PackedInflight::new(record, self.size);
            let flags = |place: Place| self.desc.load_index(FLAGS + 16 * usize::from(place.index));
            let (used, places) = inflight.recover(self.used, flags)?;
            self.used = is_inside(used)?;
            self.avail = used.plus(places, self.size);
            self.inflight = Some(inflight);
        }
        is_inside(self.avail).and(is_inside(self.used)).map(drop)
    }

    pub(super) fn size(&self) -> u16 {
        self.size
    }

    /// Takes the next chain, which `follow` then reads. Returns its identifier.
    ///
    /// # Errors
    /// It is no chain, or its identifier is in flight or beyond the ring.
    #[inline]
    pub fn next_head(&mut self) -> Result<Option<u16>, Broken> {
        if let Some(inflight) = &mut self.inflight
            && inflight.next_to_repeat(&mut self.chain)
        {
            return self.note_taken().map(Some);
        }
        let at = 16 * usize::from(self.avail.index);
        // Acquire: the driver writes these flags after everything else of the chain.
        let flags = self.desc.load_index(at + FLAGS);
        if !self.avail.is_available(flags) {
            return Ok(None);
        }
        let first = Descriptor {
            guest: u64::from_le(self.desc.load(at)),
            bytes: u32::from_le(self.desc.load(at + 8)),
            flags,
            next: u16::from_le(self.desc.load(at + 12)),
        };
        let next = self.read_chain(first)?;
        let id = self.note_taken()?;
        self.avail = next;
        if let Some(inflight) = &mut self.inflight {
            inflight.take(id, &self.chain);
        }
        Ok(Some(id))
    }

    /// Reads a chain from its first descriptor on. Returns the place behind it.
    #[inline]
    fn read_chain(&mut self, first: Descriptor) -> Result<Place, Broken> {
        self.chain.clear();
        let (mut descriptor, mut place) = (first, self.avail);
        loop {
            if self.chain.len() >= usize::from(self.size - self.places) {
                return Err(LOOP);
            }
            self.chain.push(descriptor);
            place = place.plus(1, self.size);
            if descriptor.flags & NEXT == 0 {
                return Ok(place);
            }
            descriptor = Descriptor::read_packed(&self.desc, place.index);
            if !place.is_available(descriptor.flags) {
                return Err(Broken("a chain that goes on with what is not available"));
            }
        }
    }

    fn note_taken(&mut self) -> Result<u16, Broken> {
        let places = self.chain.len() as u16;
        let id = self.chain.last().map_or(u16::MAX, |last| last.next);
        let taken = self.taken.get_mut(usize::from(id));
        let taken = taken.ok_or(Broken("an identifier beyond the ring"))?;
        if *taken > 0 {
            return Err(Broken("a chain that is in flight already"));
        }
        *taken = places;
        self.places += places;
        Ok(id)
    }

    /// Finds the memory of the chain that was taken last.
    ///
    /// # Errors
    /// The rule that it breaks.
    #[inline]
    pub fn follow(&self, chain: &mut Chain, loans: &Loans) -> Result<(), Broken> {
        chain.clear();
        for descriptor in &self.chain {
            if descriptor.flags & INDIRECT == 0 {
                chain.push(descriptor, loans)?;
            } else if descriptor.flags & NEXT == 0 {
                chain.push_table(descriptor, loans)?;
            } else {
                return Err(Broken("a table of descriptors that goes on elsewhere"));
            }
        }
        Ok(())
    }

    /// Gives a chain back to the driver, with `written` bytes written; the driver sees it after
    /// [`Self::publish`].
    #[inline]
    pub fn give_back(&mut self, id: u16, written: u32) {
        self.batch.push((id, written));
    }

    /// Publishes the returned chains: the first one last, so that the driver sees all or nothing.
    /// Returns whether it wants a call.
    pub fn publish(&mut self) -> bool {
        if self.batch.is_empty() {
            return false;
        }
        let (start, mut place) = (self.used, self.used);
        let places: u16 = self
            .batch
            .iter()
            .map(|(id, _)| self.taken[usize::from(*id)])
            .sum();
        if let Some(inflight) = &mut self.inflight {
            inflight.end(&self.batch, start.plus(places, self.size));
        }
        for (number, (id, written)) in self.batch.iter().enumerate() {
            let at = 16 * usize::from(place.index);
            self.desc.store(at + 8, written.to_le());
            self.desc.store(at + 12, id.to_le());
            if number > 0 {
                self.desc.store_index(at + FLAGS, flags_of_used(place));
            }
            place = place.plus(std::mem::take(&mut self.taken[usize::from(*id)]), self.size);
        }
        let at = 16 * usize::from(start.index);
        self.desc.store_index(at + FLAGS, flags_of_used(start));
        self.used = place;
        self.places -= places;
        if let Some(inflight) = &mut self.inflight {
            inflight.publish();
        }
        self.batch.clear();
        // SeqCst: the flags are stored before the driver's event suppression is read; the driver
        // does the same the other way round.
        fence(Ordering::SeqCst);
        self.is_called(places)
    }

    /// Returns whether the driver wants a call after `places` slots.
    fn is_called(&self, places: u16) -> bool {
        match self.driver.load_index(EVENT_FLAGS) & EVENT_MASK {
            EVENT_OFF => false,
            EVENT_AT if self.has_event_index => {
                let event = Place::from_bits(self.driver.load_index(EVENT_PLACE));
                let is_this_round = event.wrap == self.used.wrap;
                let before = if is_this_round { 0 } else { self.size };
                let now = self.used.index;
                is_passed(event.index.wrapping_sub(before), now.wrapping_sub(places), now)
            }
            _ => true,
        }
    }

    /// Asks the driver not to notify.
    pub fn refuse_kicks(&mut self) {
        if std::mem::replace(&mut self.wants_kicks, false) {
            self.device.store_index(EVENT_FLAGS, EVENT_OFF);
        }
    }

    /// Asks the driver to notify of the next chain. Returns whether one is there already.
    pub fn ask_for_kicks(&mut self) -> bool {
        self.wants_kicks = true;
        let flags = match self.has_event_index {
            true => EVENT_AT,
            false => EVENT_ON,
        };
        self.device.store_index(EVENT_PLACE, self.avail.to_bits());
        self.device.store_index(EVENT_FLAGS, flags);
        // SeqCst: the request is stored before the check; the driver publishes before it reads the
        // request.
        fence(Ordering::SeqCst);
        self.has_available()
    }

    /// Returns whether the driver was asked to notify.
    pub fn wants_kicks(&self) -> bool {
        self.wants_kicks
    }

    /// Returns whether there is a chain that was not taken.
    #[inline]
    pub fn has_available(&self) -> bool {
        let flags = self.desc.load_index(FLAGS + 16 * usize::from(self.avail.index));
        self.avail.is_available(flags)
    }

    /// Where the next device continues; `given_up` is a chain that this one has taken and gives up.
    pub fn base(&self, given_up: Option<u16>) -> u32 {
        let places = given_up.map_or(0, |id| self.taken[usize::from(id)]);
        let avail = self.avail.minus(places, self.size);
        u32::from(avail.to_bits()) | u32::from(self.used.to_bits()) << 16
    }

    /// The number of chains that are done again.
    pub(super) fn to_repeat(&self) -> usize {
        self.inflight.as_ref().map_or(0, PackedInflight::to_repeat)
    }

    pub(super) fn is_lost(&self) -> bool {
        let record = self.inflight.as_ref().is_some_and(PackedInflight::is_lost);
        let windows = [&self.desc, &self.driver, &self.device];
        record || windows.iter().any(|window| window.is_lost())
    }
}

fn flags_of_used(place: Place) -> u16 {
    if place.wrap { AVAIL | USED } else { 0 }
}

/// The offset of a descriptor's flags.
const FLAGS: usize = 14;
const AVAIL: u16 = 1 << 7;
const USED: u16 = 1 << 15;
const WRAP: u16 = 1 << 15;
/// The offsets of the place and the flags in an event suppression structure, and the values of the
/// flags.
const EVENT_PLACE: usize = 0;
const EVENT_FLAGS: usize = 2;
const EVENT_MASK: u16 = 3;
const EVENT_ON: u16 = 0;
const EVENT_OFF: u16 = 1;
const EVENT_AT: u16 = 2;

#[cfg(test)]
mod tests;
