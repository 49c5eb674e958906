//! The sides on the thread that measures: the engine's own interface, the library's face, and libblkio. `c` has the
//! one through C.

use std::mem::MaybeUninit;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use blkio::{Blkio as Library, Blkioq, Completion, ReqFlags};
use blkmq_core::bio::{Bio, Op};
use blkmq_drivers::null::{NullConfig, NullDevice};
use blkmq_engine::{Attached, Buffer, Disk};
use blkmq_host::engine::{DiskEntry, EngineConfig, QueueSpec};

use super::{BLOCK, NULL_BYTES, Side};
use crate::offsets::Offsets;
use crate::sys::{self, Buffers};

/// The engine without the library, on the null drive.
pub(super) struct Engine {
    attached: blkmq_host::Attached,
    disk: blkmq_host::Disk,
    offsets: Offsets,
    idle: Vec<Bio>,
    ended: Vec<Bio>,
    buffers: Buffers,
    _engine: blkmq_host::Engine,
}

impl Engine {
    pub(super) fn open(depth: usize) -> Result<Box<dyn Side>> {
        let device = NullDevice::new(NullConfig::bare(), &[NULL_BYTES])?;
        let mut queue = QueueSpec::new("bench", Arc::new(device));
        queue.disks.push(DiskEntry {
            name: "d".into(),
            description: String::new(),
            serial: None,
            export: None,
            size: NULL_BYTES,
            read_only: false,
            group: Default::default(),
            block_size: 512,
        });
        let engine = blkmq_host::Engine::start(EngineConfig {
            attached_max: 1,
            queues: vec![queue],
            ..EngineConfig::default()
        })?;
        let disk = engine.disk("d").context("the disk")?;
        let mut buffers = Buffers::new(depth as u32, BLOCK as u32);
        let bio = |_| Bio {
            op: Op::Read,
            disk: disk.id,
            len: BLOCK as u64,
            data: buffers.lend(),
            ..Bio::default()
        };
        Ok(Box::new(Self {
            attached: engine.attach()?,
            offsets: Offsets::new(disk.size, BLOCK as u64, true, 1),
            idle: (0..depth).map(bio).collect(),
            ended: Vec::new(),
            disk,
            buffers,
            _engine: engine,
        }))
    }
}

impl Side for Engine {
    fn batch(&mut self) -> Result<u64> {
        while let Some(mut bio) = self.idle.pop() {
            bio.offset = self.offsets.next();
            if let Err(bio) = self.attached.submit(self.disk.queue, bio) {
                self.idle.push(bio);
                break;
            }
        }
        self.attached.wait(&mut self.ended, None);
        let count = self.ended.len() as u64;
        let failed = self.ended.iter().find(|bio| !bio.status.is_ok());
        ensure!(failed.is_none(), "{failed:?}");
        self.idle.append(&mut self.ended);
        Ok(count)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        while self.attached.outstanding() > 0 {
            self.attached.wait(&mut self.ended, None);
        }
        let bios = self.idle.drain(..).chain(self.ended.drain(..));
        bios.for_each(|bio| self.buffers.take_back(bio));
    }
}

/// The library's face: an attached thread.
pub(super) struct Face {
    attached: Attached,
    disk: Disk,
    offsets: Offsets,
    idle: Vec<Buffer>,
    ended: Vec<blkmq_engine::Completion>,
}

impl Face {
    pub(super) fn open(disk: &str, depth: usize) -> Result<Box<dyn Side>> {
        let engine = blkmq_engine::Engine::builder().disk(disk).start()?;
        let disk = engine.disk("d")?;
        Ok(Box::new(Self {
            attached: engine.attach()?,
            offsets: Offsets::new(disk.size(), BLOCK as u64, true, 1),
            disk,
            idle: (0..depth).map(|_| Buffer::new(BLOCK)).collect(),
            ended: Vec::new(),
        }))
    }
}

impl Side for Face {
    fn batch(&mut self) -> Result<u64> {
        while let Some(buffer) = self.idle.pop() {
            let read = blkmq_engine::Bio::read(self.offsets.next(), buffer);
            if let Err(refused) = self.attached.submit(&self.disk, read, 0) {
                self.idle.push(refused.into_buffer());
                break;
            }
        }
        let count = self.attached.wait(&mut self.ended, None) as u64;
        for ended in self.ended.drain(..) {
            self.idle.push(ended.into_result()?);
        }
        Ok(count)
    }
}

/// libblkio's io_uring driver.
pub(super) struct Blkio {
    queue: Blkioq,
    offsets: Offsets,
    /// Where the buffers are that are not under way.
    idle: Vec<usize>,
    room: Vec<MaybeUninit<Completion>>,
    under_way: usize,
    /// Keeps the memory, which begins at a page.
    _library: Library,
}

impl Blkio {
    pub(super) fn open(file: &Path, depth: usize) -> Result<Box<dyn Side>> {
        let mut library = Library::new("io_uring").context("libblkio")?;
        library.set_str("path", &file.to_string_lossy())?;
        library.set_bool("direct", true)?;
        library.set_bool("read-only", true)?;
        library.connect().context("opening the file")?;
        let queue = library.start().context("starting")?.queues.remove(0);
        let region = library.alloc_mem_region(depth * BLOCK)?;
        library.map_mem_region(&region)?;
        Ok(Box::new(Self {
            queue,
            offsets: Offsets::new(library.get_u64("capacity")?, BLOCK as u64, true, 1),
            idle: (0..depth).map(|at| region.addr + at * BLOCK).collect(),
            room: (0..depth).map(|_| MaybeUninit::uninit()).collect(),
            under_way: 0,
            _library: library,
        }))
    }
}

impl Side for Blkio {
    fn batch(&mut self) -> Result<u64> {
        while let Some(at) = self.idle.pop() {
            let place = at as *mut u8;
            self.queue
                .read(self.offsets.next(), place, BLOCK, at, ReqFlags::empty());
            self.under_way += 1;
        }
        let ended = sys::completions(&mut self.queue, &mut self.room, 1)?;
        for completion in ended {
            ensure!(
                completion.ret == 0,
                "libblkio: a read ended with {}",
                completion.ret
            );
            self.idle.push(completion.user_data);
        }
        self.under_way -= ended.len();
        Ok(ended.len() as u64)
    }
}

impl Drop for Blkio {
    fn drop(&mut self) {
        while self.under_way > 0 {
            match sys::completions(&mut self.queue, &mut self.room, 1) {
                Ok(ended) => self.under_way -= ended.len(),
                Err(_) => break,
            }
        }
    }
}
