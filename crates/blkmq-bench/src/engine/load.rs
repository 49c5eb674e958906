//! The load in process: a fixed number of bios, each submitted again as soon as it has ended, with no data
//! per I/O but its offset. Latencies are counted in runs, and the clock is read at most once per batch.
//!
//! A bio's cookie is its time of submission, or zero if its latency is not sampled, so no other
//! record of it is needed.

use anyhow::{Result, ensure};
use blkmq_core::bio::{Bio, Op};
use blkmq_host::attach::Attached;
use blkmq_host::disk::{Disk, QueueId};

use crate::histogram::Histogram;
use crate::offsets::Offsets;
use crate::sys::Buffers;
use crate::window::{Phase, Window};

/// What one submitter does.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Job {
    /// Read or write.
    pub(crate) op: Op,
    /// Bytes of each I/O.
    pub(crate) block_bytes: u32,
    /// I/Os under way.
    pub(crate) depth: u32,
    /// Offsets at random, or onwards.
    pub(crate) random: bool,
    /// One batch of this many is timed.
    pub(crate) sample_every: u32,
}

/// A submitter on its own thread.
pub(crate) struct Load {
    attached: Attached,
    queue: QueueId,
    buffers: Buffers,
    offsets: Offsets,
    /// Bios to submit.
    idle: Vec<Bio>,
    /// Bios that have just ended.
    ended: Vec<Bio>,
    latency: Histogram,
    count: u64,
    /// Batches until the next one that is timed.
    unsampled: u32,
    job: Job,
}

impl Load {
    /// Makes a submitter to `disk`; equal seeds visit the same offsets.
    pub(crate) fn new(attached: Attached, disk: &Disk, job: Job, seed: u64) -> Self {
        let mut buffers = Buffers::new(job.depth, job.block_bytes);
        let bio = |_| Bio {
            op: job.op,
            disk: disk.id,
            len: u64::from(job.block_bytes),
            data: buffers.lend(),
            ..Bio::default()
        };
        let idle = (0..job.depth).map(bio).collect();
        Self {
            attached,
            queue: disk.queue,
            buffers,
            offsets: Offsets::new(disk.size, u64::from(job.block_bytes), job.random, seed),
            idle,
            ended: Vec::with_capacity(job.depth as usize),
            latency: Histogram::new(),
            count: 0,
            unsampled: 0,
            job,
        }
    }

    /// Runs until the window ends and returns the latencies of the I/Os that ended within it.
    ///
    /// # Errors
    /// If an I/O ends with an error.
    pub(crate) fn run(mut self, window: &Window, generator: usize) -> Result<Histogram> {
        let mut phase = Phase::WarmUp;
        loop {
            let before = std::mem::replace(&mut phase, window.phase());
            if phase == Phase::Stop {
                break;
            }
            if phase != before {
                self.latency.clear();
            }
            if let Err(error) = self.batch() {
                window.fail();
                return Err(error);
            }
            window.publish(generator, self.count);
        }
        Ok(std::mem::take(&mut self.latency))
    }

    /// Does `count` I/Os or a few more, and returns their number.
    ///
    /// # Errors
    /// If one ends with an error.
    pub(crate) fn run_count(mut self, count: u64) -> Result<u64> {
        while self.count < count {
            self.batch()?;
        }
        Ok(self.count)
    }

    /// Does `count` I/Os or a few more, and returns their number and latencies.
    ///
    /// # Errors
    /// If one ends with an error.
    pub(crate) fn copy(mut self, count: u64) -> Result<(u64, Histogram)> {
        while self.count < count {
            self.batch()?;
        }
        Ok((self.count, std::mem::take(&mut self.latency)))
    }

    /// Submits idle bios and takes those that have ended; waits if there are none.
    #[inline]
    fn batch(&mut self) -> Result<()> {
        let stamp = self.stamp();
        while let Some(mut bio) = self.idle.pop() {
            bio.offset = self.offsets.next();
            bio.cookie = stamp;
            if let Err(bio) = self.attached.submit(self.queue, bio) {
                self.idle.push(bio);
                break;
            }
        }
        // Issues, polls, and blocks only if nothing has ended: at most one system call. There is no
        // time limit, since arming a timer for each wait would cost more than the wait.
        self.attached.wait(&mut self.ended, None);
        self.account()
    }

    /// The cookie for a batch: the time, or zero if it is not timed.
    #[inline]
    fn stamp(&mut self) -> u64 {
        if self.unsampled > 0 {
            self.unsampled -= 1;
            return 0;
        }
        self.unsampled = self.job.sample_every - 1;
        self.attached.now().0
    }

    /// Counts the bios that have ended and makes them idle.
    #[inline]
    fn account(&mut self) -> Result<()> {
        self.count += self.ended.len() as u64;
        let mut now = None;
        let mut rest = &self.ended[..];
        while let Some(first) = rest.first() {
            let same = rest
                .iter()
                .take_while(|bio| bio.cookie == first.cookie && bio.status.is_ok());
            let same = same.count();
            ensure!(
                same > 0,
                "{:?} at offset {} ended with {:?}",
                first.op,
                first.offset,
                first.status
            );
            if first.cookie != 0 {
                let now = *now.get_or_insert_with(|| self.attached.now().0);
                self.latency
                    .record_many(now.saturating_sub(first.cookie), same as u64);
            }
            rest = &rest[same..];
        }
        if self.idle.is_empty() {
            std::mem::swap(&mut self.idle, &mut self.ended);
        } else {
            self.idle.append(&mut self.ended);
        }
        Ok(())
    }

    /// Waits for everything under way and takes the buffers back.
    fn drain(&mut self) {
        while self.attached.outstanding() > 0 {
            self.attached.wait(&mut self.ended, None);
        }
        let bios = self.idle.drain(..).chain(self.ended.drain(..));
        bios.for_each(|bio| self.buffers.take_back(bio));
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        // Bios may be under way: their buffers come back before `buffers` is dropped.
        self.drain();
    }
}
