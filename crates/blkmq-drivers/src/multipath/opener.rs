//! Opens the drivers of the paths of one hardware context, and the memory for its probes.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blkmq_core::bio::{Bio, Data, Op};
use blkmq_core::driver::HctxDriver;
use blkmq_core::ids::HctxId;
use blkmq_core::mapper::multipath::{Detour, Opener, PATHS_MAX, PathId};
use blkmq_host::device::Device;
use blkmq_host::ring::RingHandle;

use super::worker::Workshop;
use crate::mapping::Mapping;

/// The drives of all paths, by the paths' numbers. Locked while a path is added, removed or opened.
#[derive(Default)]
pub(super) struct Links(Mutex<[Option<Arc<dyn Device>>; PATHS_MAX]>);

impl Links {
    pub(super) fn lock(&self) -> MutexGuard<'_, [Option<Arc<dyn Device>>; PATHS_MAX]> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a hardware context needs from outside.
pub(super) struct PathOpener {
    pub(super) links: Arc<Links>,
    pub(super) ring: RingHandle,
    pub(super) hctx: HctxId,
    pub(super) workshop: Arc<Workshop>,
    /// Hardware contexts, and tags of each.
    pub(super) hctxs: u16,
    pub(super) depth: u32,
    /// One block for each path; always there, except in a context that ended with a probe under
    /// way.
    pub(super) memory: Option<Mapping>,
    /// Bytes of a probe.
    pub(super) block: u32,
    /// Why the latest path could not be opened.
    pub(super) problem: Arc<Mutex<String>>,
}

impl Opener for PathOpener {
    fn open(&mut self, path: PathId) -> Option<Box<dyn HctxDriver>> {
        let device = self.links.lock()[path.index()].clone()?;
        match device.open_hctx(&self.ring, self.hctx) {
            Ok(driver) => Some(driver),
            Err(error) => {
                tracing::warn!(
                    "multipath: path {} cannot be opened on {}: {error}",
                    path.0,
                    self.hctx
                );
                *self.problem.lock().unwrap_or_else(PoisonError::into_inner) = error.to_string();
                None
            }
        }
    }

    fn probe(&mut self, path: PathId) -> Bio {
        let memory = self.memory.as_ref().expect("kept until the context ends");
        let block = self.block as usize;
        let start = path.index() * block;
        Bio {
            op: Op::Read,
            len: self.block.into(),
            data: Data::Flat(memory.lend(start..start + block)),
            ..Bio::default()
        }
    }

    fn detour(&mut self) -> Option<Box<dyn Detour>> {
        self.workshop.open(&self.links, self.hctx, self.hctxs, self.depth)
    }

    fn keep_memory(&mut self) {
        std::mem::forget(self.memory.take());
    }
}
