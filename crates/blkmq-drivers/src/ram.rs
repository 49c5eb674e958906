//! The ram driver: drives whose disks are in this process's memory, sparse, complete at once, lost with
//! the process. `store` keeps the content; each reactor has a hardware context of its own onto it.

use std::io;
use std::sync::Arc;

use blkmq_core::driver::HctxDriver;
use blkmq_core::ids::{DiskId, HctxId};
use blkmq_core::limits::Limits;
use blkmq_host::device::{Allocation, Device, Extent, HandoverState};
use blkmq_host::ring::RingHandle;
use blkmq_host::value::{self, ConfigError};

use self::hctx::RamHctx;
use super::store::Store;

mod driver;
mod hctx;

pub use driver::{DRIVER, RamDisk};

/// What a ram drive does. `docs/drivers/ram.md` has every key's default, unit and trade-off.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RamConfig {
    /// Take memory in huge pages: quicker, but a single block may take 2 MiB. Default off.
    pub hugepages: bool,
}

/// A drive whose disks are memory.
#[derive(Clone, Debug)]
pub struct RamDevice {
    disks: Arc<[Store]>,
}

impl RamConfig {
    /// Sets one key from its text form.
    ///
    /// # Errors
    /// `UnknownKey`, or `BadValue` with what is allowed.
    pub fn set(&mut self, key: &str, value: &str) -> Result<(), ConfigError> {
        if key != "hugepages" {
            return Err(ConfigError::UnknownKey {
                driver: "ram",
                key: key.to_owned(),
                known: "hugepages",
            });
        }
        self.hugepages = value::switch(key, value)?;
        Ok(())
    }
}

impl RamDevice {
    /// Makes a drive with empty disks of these sizes, in bytes, in the order of their ids.
    pub fn new(config: &RamConfig, sizes: &[u64]) -> Self {
        if config.hugepages && !has_huge_pages() {
            tracing::warn!(
                "ram driver: hugepages=on has no effect: the system has no transparent huge pages"
            );
        }
        let store = |size: &u64| Store::new(*size, config.hugepages);
        Self {
            disks: sizes.iter().map(store).collect(),
        }
    }

    /// Returns how many bytes of a disk are backed by memory, 0 for a disk that does not exist.
    /// Visits the whole table of the disk: for reports.
    pub fn present_bytes(&self, disk: DiskId) -> u64 {
        self.disks.get(disk.index()).map_or(0, Store::present_bytes)
    }
}

impl Device for RamDevice {
    fn limits(&self) -> Limits {
        Limits {
            any_alignment: true,
            discard_max: OP_MAX,
            zeroes_max: OP_MAX,
            ..Limits::default()
        }
    }

    fn is_removable(&self) -> bool {
        true
    }

    fn handover_state(&self, _disk: DiskId) -> io::Result<HandoverState> {
        Ok(HandoverState {
            obstacle: Some("what is on it lies in the memory of this process".to_owned()),
            ..HandoverState::default()
        })
    }

    fn open_hctx(&self, _ring: &RingHandle, _hctx: HctxId) -> io::Result<Box<dyn HctxDriver>> {
        Ok(Box::new(RamHctx::new(Arc::clone(&self.disks))))
    }
}

impl Allocation for RamDevice {
    fn extents(
        &self,
        disk: DiskId,
        offset: u64,
        len: u64,
        max: usize,
        out: &mut Vec<Extent>,
    ) -> io::Result<()> {
        let disk = self.disks.get(disk.index()).ok_or(io::ErrorKind::InvalidInput)?;
        disk.extents(offset, len, max, out)
    }
}

/// Returns whether the system backs memory by huge pages on request.
fn has_huge_pages() -> bool {
    std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled")
        .is_ok_and(|modes| !modes.contains("[never]"))
}

/// Largest discard or zeroing in one request, in bytes: it takes less than a millisecond, since the
/// reactor executes it itself, and is the size of the largest page.
const OP_MAX: u64 = 2 << 20;
