//! A null drive: what its hardware contexts share, and the limits that it announces. `config` has its
//! settings; each reactor gets its `hctx` here.

use std::io;
use std::sync::Arc;

use blkmq_core::driver::HctxDriver;
use blkmq_core::ids::{DiskId, HctxId};
use blkmq_core::limits::Limits;
use blkmq_host::device::{Allocation, Device, Extent, HandoverState, Polling};
use blkmq_host::ring::RingHandle;
use blkmq_host::value::ConfigError;

use super::config::{Completion, NullConfig};
use super::disk::Disk;
use super::hctx::NullHctx;
use super::service::Capacity;

/// A drive without a medium.
#[derive(Clone, Debug)]
pub struct NullDevice(Arc<Shared>);

/// What the hardware contexts of a null drive share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) config: NullConfig,
    pub(super) capacity: Capacity,
    pub(super) disks: Vec<Disk>,
}

/// Why a null drive could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum NullError {
    /// Its configuration contradicts itself.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The set-up of a hardware context was to fail, and did.
    #[error("null drive: set-up of hardware context {0} failed as asked for by setup_failure={0}")]
    SetupFailure(HctxId),
}

impl NullDevice {
    /// Makes a drive with disks of these sizes, in bytes, in the order of their ids.
    ///
    /// # Errors
    /// [`NullError::Config`] if the configuration contradicts itself.
    pub fn new(config: NullConfig, sizes: &[u64]) -> Result<Self, NullError> {
        config.check()?;
        let disks = sizes.iter().map(|size| Disk::new(&config, *size)).collect();
        Ok(Self(Arc::new(Shared {
            capacity: Capacity::new(&config),
            disks,
            config,
        })))
    }

    /// Returns how many requests one hardware context takes at a time.
    pub fn depth(&self) -> u32 {
        self.0.config.depth
    }

    /// Makes a hardware context, which needs no ring. To be called, and the result used, on the reactor that owns it.
    ///
    /// # Errors
    /// [`NullError::SetupFailure`] if that was configured for this context.
    pub fn hctx(&self, hctx: HctxId) -> Result<Box<dyn HctxDriver>, NullError> {
        if self.0.config.setup_failure == Some(hctx.0) {
            return Err(NullError::SetupFailure(hctx));
        }
        Ok(Box::new(NullHctx::new(Arc::clone(&self.0), hctx)))
    }

    #[cfg(test)]
    pub(super) fn into_shared(self) -> Arc<Shared> {
        self.0
    }

    /// Drops what was written and not flushed, like a drive whose power fails. Does nothing without
    /// `memory` and `cache`.
    pub fn lose_power(&self) {
        self.0.disks.iter().for_each(Disk::lose_power);
    }
}

impl Device for NullDevice {
    fn limits(&self) -> Limits {
        let config = &self.0.config;
        // Only operations whose time grows with their size have to be cut.
        let is_free = !config.memory && config.effective_completion() == Completion::Inline;
        let op_max = if is_free { FREE_MAX } else { OP_MAX };
        Limits {
            any_alignment: true,
            discard_max: op_max,
            zeroes_max: op_max,
            cache: self.0.config.cache,
            fua: self.0.config.cache && self.0.config.fua,
            leaves_buffers: !config.memory && !config.zero,
            ..Limits::default()
        }
    }

    fn polling(&self) -> Polling {
        if self.0.config.poll_queues > 0 {
            Polling::Usual
        } else {
            Polling::Impossible
        }
    }

    fn is_removable(&self) -> bool {
        true
    }

    /// Without memory nothing can be lost.
    fn handover_state(&self, _disk: DiskId) -> io::Result<HandoverState> {
        let has_contents = self.0.config.memory || self.0.config.cache;
        let obstacle = has_contents.then(|| "what is on it lies in the memory of this process".to_owned());
        Ok(HandoverState {
            obstacle,
            ..HandoverState::default()
        })
    }

    fn open_hctx(&self, _ring: &RingHandle, hctx: HctxId) -> io::Result<Box<dyn HctxDriver>> {
        self.hctx(hctx).map_err(io::Error::other)
    }
}

impl Allocation for NullDevice {
    fn extents(
        &self,
        disk: DiskId,
        offset: u64,
        len: u64,
        max: usize,
        out: &mut Vec<Extent>,
    ) -> io::Result<()> {
        let disk = self
            .0
            .disks
            .get(disk.index())
            .ok_or(io::ErrorKind::InvalidInput)?;
        disk.extents(offset, len, max, out)
    }
}

/// Largest discard or zeroing in one request, in bytes: takes a few milliseconds if memory has to
/// be freed.
const OP_MAX: u64 = 2 << 20;
/// The same where it takes no time: larger than any disk, and its end on a queue does not overflow.
const FREE_MAX: u64 = 1 << 60;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn set_up_of_one_context_fails_if_asked_to() {
        let config = NullConfig {
            setup_failure: Some(1),
            ..NullConfig::default()
        };
        let device = NullDevice::new(config, &[1 << 20]).unwrap();
        assert!(device.hctx(HctxId(0)).is_ok());
        let error = device.hctx(HctxId(1)).err().unwrap();
        assert!(
            error.to_string().contains("hardware context 1 failed as asked"),
            "{error}"
        );
    }

    #[test]
    fn limits_are_valid_and_follow_the_cache() {
        let limits = |cache| {
            let config = NullConfig {
                cache,
                ..NullConfig::default()
            };
            NullDevice::new(config, &[4096]).unwrap().limits()
        };
        assert_eq!(limits(true).check(), Ok(()));
        assert!(limits(true).cache && limits(true).fua);
        assert!(!limits(false).cache && !limits(false).fua);
    }

    #[test]
    fn disk_is_one_hole() {
        let device = NullDevice::new(NullConfig::default(), &[8192]).unwrap();
        let mut out = Vec::new();
        device.extents(DiskId(0), 4096, 65536, 8, &mut out).unwrap();
        assert_eq!(out, [Extent::hole(4096)]);
        assert!(device.extents(DiskId(0), 8192, 1, 8, &mut out).is_err());
        assert!(device.extents(DiskId(1), 0, 1, 8, &mut out).is_err());
    }
}
