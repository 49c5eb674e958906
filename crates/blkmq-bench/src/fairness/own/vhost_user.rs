//! A client's disk over vhost-user-blk: one virtqueue of `blkio`, whose eventfd wakes the client.

use std::mem::MaybeUninit;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use blkio::{Blkio, Blkioq, Completion, ReqFlags};

use super::super::scene::Load;
use super::Disk;
use crate::sys;

/// The queue, and the memory for what is under way.
pub(super) struct Queue {
    queue: Blkioq,
    /// Where the first buffer begins.
    buffers: usize,
    size_bytes: u64,
    block_bytes: usize,
    is_write: bool,
    under_way: usize,
    room: Vec<MaybeUninit<Completion>>,
    /// Keeps the memory.
    _client: Blkio,
}

impl Queue {
    /// Connects to the device at `socket`, which the server may still have to make.
    ///
    /// # Errors
    /// If the server refuses, or is not there after some seconds.
    pub(super) fn open(socket: &Path, load: &Load) -> Result<Self> {
        let start = Instant::now();
        let mut client = loop {
            match connect(socket) {
                Ok(client) => break client,
                Err(_) if start.elapsed() < SERVED_WITHIN => std::thread::sleep(LOOK_EVERY),
                Err(error) => {
                    return Err(error).with_context(|| format!("connecting to {}", socket.display()));
                }
            }
        };
        client.set_i32("num-queues", 1)?;
        client.set_i32("queue-size", QUEUE_SIZE)?;
        let mut started = client.start().context("starting the queue")?;
        let (depth, block_bytes) = (load.depth as usize, load.block_bytes as usize);
        let region = client.alloc_mem_region(depth * block_bytes)?;
        client.map_mem_region(&region)?;
        Ok(Self {
            queue: started.queues.pop().context("the device has no queue")?,
            buffers: region.addr,
            size_bytes: client.get_u64("capacity")?,
            block_bytes,
            is_write: load.op.is_write(),
            under_way: 0,
            room: (0..depth).map(|_| MaybeUninit::uninit()).collect(),
            _client: client,
        })
    }
}

fn connect(socket: &Path) -> Result<Blkio> {
    let mut client = Blkio::new("virtio-blk-vhost-user").context("making a client")?;
    client.set_str("path", &socket.to_string_lossy())?;
    client.connect()?;
    Ok(client)
}

impl Disk for Queue {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn begin(&mut self, number: usize, offset: u64) {
        let buffer = (self.buffers + number * self.block_bytes) as *mut u8;
        let (bytes, none) = (self.block_bytes, ReqFlags::empty());
        if self.is_write {
            self.queue.write(offset, buffer, bytes, number, none);
        } else {
            self.queue.read(offset, buffer, bytes, number, none);
        }
        self.under_way += 1;
    }

    fn wait(&mut self, until: Instant, ended: &mut Vec<usize>) -> Result<()> {
        let left = until.saturating_duration_since(Instant::now());
        if self.under_way == 0 {
            std::thread::sleep(left);
            return Ok(());
        }
        let done = sys::completions_within(&mut self.queue, &mut self.room, 1, left);
        for completion in done.context("waiting for I/Os to end")? {
            ensure!(completion.ret == 0, "an I/O ended with error {}", -completion.ret);
            ended.push(completion.user_data);
        }
        self.under_way -= ended.len();
        Ok(())
    }
}

/// Descriptors; an I/O takes three.
const QUEUE_SIZE: i32 = 1024;
const SERVED_WITHIN: Duration = Duration::from_secs(10);
const LOOK_EVERY: Duration = Duration::from_millis(10);
