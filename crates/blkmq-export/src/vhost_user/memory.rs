//! The memory of the guest as it lies in this process: the table of regions that the front end shares.
//! `device` keeps the table, `queue` lends from it.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use blkmq_core::bio::Lent;

use super::codec::RegionSpec;
use super::sys::{Mapping, Window};

/// A mapped region.
#[derive(Clone, Debug)]
struct Region {
    spec: RegionSpec,
    mapping: Arc<Mapping>,
}

/// The regions, in order of their addresses in the guest. A change makes a new table.
#[derive(Clone, Debug, Default)]
pub struct GuestMemory {
    regions: Vec<Region>,
}

/// Why a region cannot be added or removed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the texts say it")]
pub enum GuestMemoryError {
    #[error("region at {0:#x} overlaps another, or its addresses have no end")]
    Overlap(u64),
    #[error("more than {REGIONS_MAX} regions")]
    TooMany,
    #[error("more than 4 TiB of memory")]
    TooMuch,
    #[error("region at {0:#x} is not there")]
    Missing(u64),
    #[error("region cannot be mapped: {0}")]
    Map(#[from] io::Error),
}

impl GuestMemory {
    /// The table with one more region.
    ///
    /// # Errors
    /// The region overlaps another one or cannot be mapped.
    pub fn with(&self, spec: RegionSpec, file: &OwnedFd) -> Result<Self, GuestMemoryError> {
        self.check(&spec)?;
        let mapping = Mapping::of_file(file, spec.offset, spec.bytes)?;
        Ok(self.with_mapping(spec, mapping))
    }

    /// The regions, with their files for another daemon to map.
    pub(super) fn regions(&self) -> impl Iterator<Item = (RegionSpec, &Arc<OwnedFd>)> {
        self.regions
            .iter()
            .filter_map(|region| Some((region.spec, region.mapping.file()?)))
    }

    /// The table with an anonymous region, for tests.
    ///
    /// # Errors
    /// The region overlaps another one or cannot be mapped.
    pub fn with_anonymous(&self, spec: RegionSpec) -> Result<Self, GuestMemoryError> {
        self.check(&spec)?;
        let bytes = usize::try_from(spec.bytes).map_err(|_| GuestMemoryError::Overlap(spec.guest))?;
        Ok(self.with_mapping(spec, Mapping::anonymous(bytes)?))
    }

    fn check(&self, spec: &RegionSpec) -> Result<(), GuestMemoryError> {
        if self.regions.len() == REGIONS_MAX {
            return Err(GuestMemoryError::TooMany);
        }
        let others = self.regions.iter().map(|region| region.spec.bytes);
        if others.fold(spec.bytes, u64::saturating_add) > MEMORY_BYTES_MAX {
            return Err(GuestMemoryError::TooMuch);
        }
        let has_ends =
            spec.guest.checked_add(spec.bytes).is_some() && spec.user.checked_add(spec.bytes).is_some();
        let overlaps = |other: &Region| {
            spec.guest < other.spec.guest + other.spec.bytes && other.spec.guest < spec.guest + spec.bytes
        };
        if !has_ends || spec.bytes == 0 || self.regions.iter().any(overlaps) {
            return Err(GuestMemoryError::Overlap(spec.guest));
        }
        Ok(())
    }

    fn with_mapping(&self, spec: RegionSpec, mapping: Mapping) -> Self {
        let mut regions = self.regions.clone();
        let at = regions.partition_point(|other| other.spec.guest < spec.guest);
        let mapping = Arc::new(mapping);
        regions.insert(at, Region { spec, mapping });
        Self { regions }
    }

    /// The table without a region. The offset in its file is ignored.
    ///
    /// # Errors
    /// There is no such region.
    pub fn without(&self, spec: RegionSpec) -> Result<Self, GuestMemoryError> {
        let mut regions = self.regions.clone();
        let is_it = |region: &Region| {
            let (has, wanted) = (&region.spec, &spec);
            (has.guest, has.user, has.bytes) == (wanted.guest, wanted.user, wanted.bytes)
        };
        let at = regions.iter().position(is_it);
        regions.remove(at.ok_or(GuestMemoryError::Missing(spec.guest))?);
        Ok(Self { regions })
    }

    /// A range by its address in the front end, all in one region.
    pub fn window(&self, user: u64, bytes: usize, align: usize) -> Option<Window> {
        let holds =
            |region: &&Region| user >= region.spec.user && user - region.spec.user < region.spec.bytes;
        let region = self.regions.iter().find(holds)?;
        Window::new(&region.mapping, (user - region.spec.user) as usize, bytes, align)
    }

    /// A range by its address in the guest, all in one region.
    pub fn guest_window(&self, guest: u64, bytes: usize) -> Option<Window> {
        let region = self.region(guest)?;
        Window::new(&region.mapping, (guest - region.spec.guest) as usize, bytes, 1)
    }

    /// Returns whether some of it was taken away.
    pub(super) fn is_lost(&self) -> bool {
        self.regions.iter().any(|region| region.mapping.is_lost())
    }

    #[inline]
    fn region(&self, guest: u64) -> Option<&Region> {
        let behind = self.regions.partition_point(|region| region.spec.guest <= guest);
        let region = &self.regions[behind.checked_sub(1)?];
        (guest - region.spec.guest < region.spec.bytes).then_some(region)
    }
}

/// A table of which ranges may be lent: it is kept until all bios that were lent some have ended.
#[derive(Debug)]
pub struct Loans {
    memory: Arc<GuestMemory>,
    /// Chains that have ranges of it.
    chains: u32,
}

impl Loans {
    /// Nothing is lent yet.
    pub fn new(memory: Arc<GuestMemory>) -> Self {
        Self { memory, chains: 0 }
    }

    /// The table.
    pub fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    /// Returns whether this is that table.
    pub fn is_of(&self, memory: &Arc<GuestMemory>) -> bool {
        Arc::ptr_eq(&self.memory, memory)
    }

    /// Returns whether nothing is lent.
    pub fn is_empty(&self) -> bool {
        self.chains == 0
    }

    /// A chain is taken: ranges are lent for it until [`Self::end`].
    pub fn begin(&mut self) {
        self.chains += 1;
    }

    /// A chain has ended, and with it every bio that was lent a range for it.
    pub fn end(&mut self) {
        self.chains -= 1;
    }

    /// Lends a range of the guest's addresses, in as many pieces as it lies in regions. Returns whether all of it is memory.
    #[inline]
    pub fn lend(&self, mut guest: u64, mut bytes: u32, mut into: impl FnMut(Lent)) -> bool {
        assert!(self.chains > 0, "memory is lent for a chain");
        while bytes > 0 {
            let Some(region) = self.memory.region(guest) else {
                return false;
            };
            let at = guest - region.spec.guest;
            let part = u64::from(bytes).min(region.spec.bytes - at) as u32;
            let Some(piece) = region.mapping.lend(at as usize, part) else {
                return false;
            };
            into(piece);
            bytes -= part;
            guest += u64::from(part);
        }
        true
    }
}

impl Drop for Loans {
    fn drop(&mut self) {
        if self.chains > 0 {
            // A driver may still write there: the memory is leaked.
            std::mem::forget(Arc::clone(&self.memory));
        }
    }
}

/// Regions that a front end may share at a time: as many as the kernel lets a virtual machine have, beside those of the
/// processor.
pub const REGIONS_MAX: usize = 509;
/// Memory of one front end: all of them must fit into this process's addresses.
const MEMORY_BYTES_MAX: u64 = 4 << 40;

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(guest: u64, bytes: u64) -> RegionSpec {
        RegionSpec {
            guest,
            bytes,
            user: guest.wrapping_add(1 << 40),
            offset: 0,
        }
    }

    fn lengths(loans: &Loans, guest: u64, bytes: u32) -> Option<Vec<u32>> {
        let mut found = Vec::new();
        let is_whole = loans.lend(guest, bytes, |piece| found.push(piece.len()));
        is_whole.then_some(found)
    }

    #[test]
    fn range_is_lent_across_regions_that_meet_and_nowhere_else() {
        let memory = GuestMemory::default()
            .with_anonymous(spec(0x2000, 0x1000))
            .unwrap();
        let memory = memory.with_anonymous(spec(0x1000, 0x1000)).unwrap();
        let mut loans = Loans::new(Arc::new(memory));
        loans.begin();
        assert_eq!(lengths(&loans, 0x1800, 0x1000), Some(vec![0x800, 0x800]));
        for (guest, bytes) in [(0xfff, 2), (0x2fff, 2), (0x3000, 1), (u64::MAX, 1), (0, 1)] {
            assert_eq!(lengths(&loans, guest, bytes), None, "{guest:#x}");
        }
        loans.end();
    }

    #[test]
    fn regions_may_be_509_and_each_is_found() {
        // In an order that is neither theirs nor its reverse.
        let at = |number: u64| spec((number * 7 % 509 + 1) * 0x2000, 0x1000);
        let add = |memory: GuestMemory, number| memory.with_anonymous(at(number)).unwrap();
        let memory = (0..509).fold(GuestMemory::default(), add);
        assert!(matches!(
            memory.with_anonymous(spec(0x2000_0000, 0x1000)),
            Err(GuestMemoryError::TooMany)
        ));
        let mut loans = Loans::new(Arc::new(memory));
        loans.begin();
        for number in 0..509 {
            let guest = at(number).guest;
            assert_eq!(lengths(&loans, guest, 0x1000), Some(vec![0x1000]), "{guest:#x}");
            assert_eq!(lengths(&loans, guest + 0x1000, 1), None, "{guest:#x}");
        }
        loans.end();
    }

    #[test]
    fn regions_that_overlap_or_exceed_their_file_are_refused() {
        let memory = GuestMemory::default()
            .with_anonymous(spec(0x1000, 0x1000))
            .unwrap();
        for (guest, bytes) in [(0x1fff, 2), (0xfff, 2), (0, 0x3000), (u64::MAX, 2), (0x5000, 0)] {
            assert!(memory.with_anonymous(spec(guest, bytes)).is_err(), "{guest:#x}");
        }
        let file = rustix::fs::memfd_create("short", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 0x1000).unwrap();
        assert!(memory.with(spec(0x8000, 0x1000), &file).is_ok());
        assert!(
            memory.with(spec(0x8000, 0x1001), &file).is_err(),
            "it would be SIGBUS"
        );
    }

    #[test]
    fn region_that_is_removed_is_no_memory_any_more() {
        let memory = GuestMemory::default()
            .with_anonymous(spec(0x1000, 0x1000))
            .unwrap();
        assert!(memory.guest_window(0x1000, 16).is_some());
        assert!(memory.without(spec(0x1000, 0x2000)).is_err());
        let memory = memory.without(spec(0x1000, 0x1000)).unwrap();
        assert!(memory.guest_window(0x1000, 16).is_none());
    }
}
