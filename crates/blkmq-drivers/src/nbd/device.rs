//! The drive that an export becomes: the number of hardware contexts, and the connections of each. `disk`
//! has the export; `hctx` decides what a request becomes.

use std::io;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use blkmq_core::driver::HctxDriver;
use blkmq_core::ids::{DiskId, HctxId};
use blkmq_core::limits::Limits;
use blkmq_host::device::{Allocation, Device, Extent, Losses, Polling, State};
use blkmq_host::ring::RingHandle;

use super::disk::NbdDisk;
use super::hctx::NbdHctx;
use super::ledger::Ledger;
use super::reconnect::Reconnector;
use crate::health::Health;

/// A disk on an NBD server, as a drive of its own.
#[derive(Debug)]
pub struct NbdDevice {
    shared: Arc<Shared>,
    depth: u32,
    /// Hardware contexts among which the connections are divided.
    hctxs: AtomicU16,
}

/// What the hardware contexts of a drive share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) disk: NbdDisk,
    pub(super) reconnector: Arc<Reconnector>,
    /// The number of this drive among all: the place of its server.
    pub(super) place: u64,
    /// Set when the first context is opened, or earlier by the code that joins paths.
    ledger: OnceLock<Arc<Ledger>>,
    pub(super) health: Health,
}

impl Shared {
    /// The ledger of writes that may be lost with the server.
    pub(super) fn ledger(&self) -> &Arc<Ledger> {
        self.ledger.get_or_init(Arc::default)
    }
}

impl NbdDevice {
    /// Makes a drive of a disk, for tags below `depth` and one more, for a probe.
    pub fn new(disk: NbdDisk, depth: u32) -> Self {
        static PLACES: AtomicU64 = AtomicU64::new(0);
        let reconnector = Reconnector::new(disk.config.clone(), disk.shape.clone());
        Self {
            shared: Arc::new(Shared {
                disk,
                reconnector,
                // Relaxed: only a unique number.
                place: PLACES.fetch_add(1, Ordering::Relaxed),
                ledger: OnceLock::new(),
                health: Health::default(),
            }),
            depth,
            hctxs: AtomicU16::new(u16::MAX),
        }
    }

    /// Returns the disk.
    pub fn disk(&self) -> &NbdDisk {
        &self.shared.disk
    }

    /// Makes a hardware context.
    pub(super) fn hctx(&self, ring: &RingHandle, hctx: HctxId) -> io::Result<NbdHctx> {
        // Relaxed: set once, before the threads that read it are started.
        let hctxs = self.hctxs.load(Ordering::Relaxed);
        let wanted = self.shared.disk.config.connections;
        let connections = wanted.map_or(1, |count| {
            let (count, hctxs) = (u32::from(count), u32::from(hctxs));
            (count + hctxs - 1 - u32::from(hctx.0)) / hctxs
        });
        if connections == 0 || wanted == Some(1) && hctx.0 > 0 {
            return Err(io::Error::other(format!(
                "nbd {}: hardware context {hctx} would be without a connection: there are {}; raise connections=, \
                 or use fewer hardware contexts (hctxs)",
                self.shared.disk.config.text,
                wanted.unwrap_or(1)
            )));
        }
        NbdHctx::new(
            Arc::clone(&self.shared),
            ring,
            hctx,
            self.depth as usize + 1,
            connections as u16,
        )
    }

    /// Passes, before its contexts are opened, the durability record that it shares with other paths to the same
    /// storage. Says whether the drive keeps this record: a flush to a server without CAN_MULTI_CONN covers only
    /// what was written over the same connection.
    #[cfg(any(feature = "multipath", test))]
    pub(crate) fn keep_ledger(&self, ledger: &Arc<Ledger>) -> bool {
        if !self
            .shared
            .disk
            .shape
            .can(blkmq_nbd::codec::TransmissionFlags::CAN_MULTI_CONN)
        {
            return false;
        }
        let kept = self.shared.ledger.get_or_init(|| Arc::clone(ledger));
        Arc::ptr_eq(kept, ledger)
    }
}

impl Device for NbdDevice {
    fn polling(&self) -> Polling {
        Polling::Possible
    }

    fn limits(&self) -> Limits {
        self.shared.disk.limits()
    }

    /// At most as many as there are connections. Further connections are divided among them.
    fn hctxs(&self, wanted: u16, reactors: u16) -> u16 {
        let hctxs = match self.shared.disk.config.connections {
            Some(count) if count < wanted => count.min(reactors),
            _ => wanted,
        };
        self.hctxs.store(hctxs, Ordering::Relaxed);
        hctxs
    }

    fn open_hctx(&self, ring: &RingHandle, hctx: HctxId) -> io::Result<Box<dyn HctxDriver>> {
        Ok(Box::new(self.hctx(ring, hctx)?))
    }
}

/// Everything counts as data: front doors ask on a reactor, which must not wait for a server's
/// reply.
impl Allocation for NbdDevice {
    fn extents(
        &self,
        _disk: DiskId,
        offset: u64,
        len: u64,
        max: usize,
        out: &mut Vec<Extent>,
    ) -> io::Result<()> {
        let size = self.shared.disk.size();
        if offset >= size || len == 0 || max == 0 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        out.push(Extent::data(len.min(size - offset)));
        Ok(())
    }

    fn losses(&self, _disk: DiskId) -> Losses {
        self.shared.ledger().losses()
    }

    fn mark_losses_seen(&self, _disk: DiskId) {
        let ledger = self.shared.ledger();
        ledger.mark_seen(ledger.losses().count);
    }

    fn state(&self, _disk: DiskId) -> State {
        self.shared.health.state()
    }
}
