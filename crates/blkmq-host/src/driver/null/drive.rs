//! Decides what the hardware contexts of one null drive share, and which limits the drive announces.
//! `config` says what it is to do; each reactor takes its `hctx` from here.

use std::io;
use std::sync::Arc;

use blkmq_core::driver::Driver;
use blkmq_core::ids::{DiskId, HctxId};
use blkmq_core::limits::Limits;

use super::config::NullConfig;
use super::hctx::NullHctx;
use super::service::Capacity;
use crate::driver::{Allocation, ConfigError, Extent};

/// A drive that moves no data.
#[derive(Debug)]
pub struct NullDrive {
    pub(super) config: NullConfig,
    pub(super) capacity: Capacity,
    /// Of each disk.
    sizes: Vec<u64>,
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

impl NullDrive {
    /// Makes a drive with disks of these sizes, in bytes, in the order of their ids.
    ///
    /// # Errors
    /// [`NullError::Config`] if the configuration contradicts itself.
    pub fn new(config: NullConfig, sizes: &[u64]) -> Result<Arc<Self>, NullError> {
        config.check()?;
        Ok(Arc::new(Self {
            capacity: Capacity::new(&config),
            sizes: sizes.to_vec(),
            config,
        }))
    }

    /// Returns what the drive can take; the block sizes are the defaults.
    pub fn limits(&self) -> Limits {
        Limits {
            discard_max: OP_MAX,
            zeroes_max: OP_MAX,
            cache: self.config.cache,
            fua: self.config.cache && self.config.fua,
            ..Limits::default()
        }
    }

    /// Returns how many requests one hardware context takes at a time.
    pub fn depth(&self) -> u32 {
        self.config.depth
    }

    /// Makes a hardware context. To be called, and the result used, on the reactor that owns it.
    ///
    /// # Errors
    /// [`NullError::SetupFailure`] if that was configured for this context.
    pub fn open_hctx(self: &Arc<Self>, hctx: HctxId) -> Result<Box<dyn Driver>, NullError> {
        if self.config.setup_failure == Some(hctx.0) {
            return Err(NullError::SetupFailure(hctx));
        }
        Ok(Box::new(NullHctx::new(Arc::clone(self), hctx)))
    }
}

impl Allocation for NullDrive {
    fn extents(
        &self,
        disk: DiskId,
        offset: u64,
        len: u64,
        max: usize,
        out: &mut Vec<Extent>,
    ) -> io::Result<()> {
        let size = self.sizes.get(disk.index()).copied().unwrap_or(0);
        let len = len.min(size.saturating_sub(offset));
        if len == 0 || max == 0 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        out.push(Extent {
            len,
            hole: true,
            zero: self.config.zero,
        });
        Ok(())
    }
}

/// Largest discard or zeroing in one request, in bytes.
const OP_MAX: u64 = 1 << 30;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_set_up_of_one_context_fails_if_asked_to() {
        let config = NullConfig {
            setup_failure: Some(1),
            ..NullConfig::default()
        };
        let drive = NullDrive::new(config, &[1 << 20]).unwrap();
        assert!(drive.open_hctx(HctxId(0)).is_ok());
        let error = drive.open_hctx(HctxId(1)).err().unwrap();
        assert!(
            error.to_string().contains("hardware context 1 failed as asked"),
            "{error}"
        );
    }

    #[test]
    fn the_limits_are_valid_and_follow_the_cache() {
        let limits = |cache| {
            let config = NullConfig {
                cache,
                ..NullConfig::default()
            };
            NullDrive::new(config, &[4096]).unwrap().limits()
        };
        assert_eq!(limits(true).check(), Ok(()));
        assert!(limits(true).cache && limits(true).fua);
        assert!(!limits(false).cache && !limits(false).fua);
    }

    #[test]
    fn a_disk_is_one_hole() {
        let drive = NullDrive::new(NullConfig::default(), &[8192]).unwrap();
        let mut out = Vec::new();
        drive.extents(DiskId(0), 4096, 65536, 8, &mut out).unwrap();
        assert_eq!(out, [Extent::hole(4096)]);
        assert!(drive.extents(DiskId(0), 8192, 1, 8, &mut out).is_err());
        assert!(drive.extents(DiskId(1), 0, 1, 8, &mut out).is_err());
    }
}
