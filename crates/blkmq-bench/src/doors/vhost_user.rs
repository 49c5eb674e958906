//! The load on a vhost-user-blk server: `blkio` as a virtual machine's driver, a thread and a part of the
//! memory for each queue.

use std::mem::MaybeUninit;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use blkio::{Blkio, Blkioq, Completion, ReqFlags};

use super::BLOCK_BYTES;
use crate::histogram::Histogram;
use crate::offsets::Offsets;
use crate::sys;
use crate::window::{Phase, Window};

/// A client whose queues are about to be loaded.
pub(super) struct Attached {
    /// Keeps the memory of what is under way.
    _client: Blkio,
    pub(super) loads: Vec<Load>,
}

/// One queue's load.
pub(super) struct Load {
    queue: Blkioq,
    /// Where the buffers of this queue begin.
    buffers: usize,
    offsets: Offsets,
    depth: usize,
    /// It sleeps until it is notified of ends.
    sleeps: bool,
}

impl Attached {
    /// Connects with `queues` queues.
    ///
    /// # Errors
    /// If the server refuses, or has fewer queues.
    pub(super) fn new(socket: &Path, queues: u16, depth: usize, sleeps: bool) -> Result<Self> {
        let mut client = Blkio::new("virtio-blk-vhost-user").context("making a client")?;
        client.set_str("path", &socket.to_string_lossy())?;
        client.connect().context("connecting to the server")?;
        client.set_i32("num-queues", i32::from(queues))?;
        let started = client.start().context("starting the queues")?;
        let each = depth * BLOCK_BYTES as usize;
        let region = client.alloc_mem_region(each * usize::from(queues))?;
        client.map_mem_region(&region)?;
        let size = client.get_u64("capacity")?;
        let loads = (0..).zip(started.queues).map(|(index, queue)| Load {
            queue,
            buffers: region.addr + index * each,
            offsets: Offsets::new(size, u64::from(BLOCK_BYTES), true, index as u64),
            depth,
            sleeps,
        });
        Ok(Self {
            loads: loads.collect(),
            _client: client,
        })
    }
}

impl Load {
    /// Runs until the window says stop, takes what is under way to its end, and returns the latencies of what ended within it.
    ///
    /// # Errors
    /// If a read ends with an error.
    pub(super) fn run(mut self, index: usize, window: &Window) -> Result<Histogram> {
        let latency = self.run_phases(index, window);
        if latency.is_err() {
            window.fail();
        }
        latency
    }

    fn run_phases(&mut self, index: usize, window: &Window) -> Result<Histogram> {
        let mut latency = Histogram::new();
        let mut room: Vec<MaybeUninit<Completion>> = (0..self.depth).map(|_| MaybeUninit::uninit()).collect();
        let mut started = vec![Instant::now(); self.depth];
        (0..self.depth).for_each(|number| self.read(number));
        let (mut phase, mut ended, mut under_way) = (Phase::WarmUp, 0, self.depth);
        while under_way > 0 {
            let done = sys::completions(&mut self.queue, &mut room, usize::from(self.sleeps))
                .context("waiting for reads to end")?;
            let now = Instant::now();
            let before = std::mem::replace(&mut phase, window.phase());
            if phase == Phase::Measure && phase != before {
                latency.clear();
            }
            for completion in done {
                ensure!(completion.ret == 0, "a read ended with error {}", -completion.ret);
                let number = completion.user_data;
                if phase == Phase::Stop {
                    under_way -= 1;
                    continue;
                }
                latency.record((now - started[number]).as_nanos() as u64);
                started[number] = now;
                self.read(number);
            }
            if phase != Phase::Stop {
                ended += done.len() as u64;
                window.publish(index, ended);
            }
        }
        Ok(latency)
    }

    fn read(&mut self, number: usize) {
        let buffer = (self.buffers + number * BLOCK_BYTES as usize) as *mut u8;
        let start = self.offsets.next();
        self.queue
            .read(start, buffer, BLOCK_BYTES as usize, number, ReqFlags::empty());
    }
}
