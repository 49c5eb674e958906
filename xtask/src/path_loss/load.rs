//! A verified load: each thread writes a part of the disk repeatedly, knows what must be in each block,
//! and reads it back. A write that failed may have taken effect or not; all other content is known.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, anyhow, bail};
use blkmq_testkit::Random;
use blkmq_testkit::nbd::Client;

/// The threads that load one disk.
pub(crate) struct Load {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<Result<()>>>,
}

/// A request that failed.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(crate) thread: usize,
    pub(crate) begun: SystemTime,
    pub(crate) ended: SystemTime,
    pub(crate) error: String,
}

#[derive(Default)]
struct Shared {
    is_over: AtomicBool,
    /// Requests that succeeded.
    done: AtomicU64,
    /// The longest request, in nanoseconds.
    longest: AtomicU64,
    failures: Mutex<Vec<Failure>>,
    /// Flushes that failed. They may report writes that a server lost, once all sessions with it
    /// were lost.
    flushes_failed: AtomicU64,
}

impl Load {
    /// Starts [`THREADS`] threads on `export`, which must have [`DISK_BYTES`].
    pub(crate) fn start(socket: &Path, export: &'static str, seed: u64) -> Self {
        let shared = Arc::new(Shared::default());
        let start = |thread| {
            let mut part = Part {
                export,
                socket: socket.to_owned(),
                thread,
                random: Random::new(seed + thread as u64),
                versions: vec![vec![UNWRITTEN]; PART_BLOCKS],
                latest: UNWRITTEN,
                shared: Arc::clone(&shared),
            };
            thread::spawn(move || part.run().with_context(|| format!("{export}, thread {thread}")))
        };
        let threads = (0..THREADS).map(start).collect();
        Self { shared, threads }
    }

    /// Returns how many flushes have failed.
    pub(crate) fn flushes_failed(&self) -> u64 {
        // Relaxed: nothing is published with the number.
        self.shared.flushes_failed.load(Ordering::Relaxed)
    }

    /// Returns how many requests have succeeded.
    pub(crate) fn done(&self) -> u64 {
        // Relaxed: nothing is published with the number.
        self.shared.done.load(Ordering::Relaxed)
    }

    pub(crate) fn failures(&self) -> Vec<Failure> {
        let failures = self.shared.failures.lock();
        failures.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the longest time of a successful request since the last call.
    pub(crate) fn take_longest(&self) -> Duration {
        Duration::from_nanos(self.shared.longest.swap(0, Ordering::Relaxed))
    }

    /// # Errors
    /// The fault that a thread has found. A thread ends early only with one.
    pub(crate) fn check(&mut self) -> Result<()> {
        match self.threads.iter().position(JoinHandle::is_finished) {
            Some(at) => join(self.threads.swap_remove(at)),
            None => Ok(()),
        }
    }

    /// Makes the threads read everything once more, and waits for their end.
    ///
    /// # Errors
    /// The first fault.
    pub(crate) fn finish(self) -> Result<()> {
        self.shared.is_over.store(true, Ordering::Relaxed);
        self.threads.into_iter().try_for_each(join)
    }
}

fn join(thread: JoinHandle<Result<()>>) -> Result<()> {
    thread
        .join()
        .map_err(|_| anyhow!("a thread of the load panicked"))?
}

/// A thread's part of a disk.
struct Part {
    export: &'static str,
    socket: PathBuf,
    thread: usize,
    random: Random,
    /// By block, the versions that it may have: one, or several if writes have failed since the
    /// last that succeeded.
    versions: Vec<Vec<u64>>,
    latest: u64,
    shared: Arc<Shared>,
}

impl Part {
    fn run(&mut self) -> Result<()> {
        let mut client = Client::connect(&self.socket, self.export).context("connecting")?;
        client.set_answer_time(ANSWER_TIME)?;
        let mut data = vec![0; BLOCKS_MAX * BLOCK_BYTES];
        while !self.shared.is_over.load(Ordering::Relaxed) {
            let count = self.random.below(BLOCKS_MAX as u64) as usize + 1;
            let first = self.random.below((PART_BLOCKS - count + 1) as u64) as usize;
            let data = &mut data[..count * BLOCK_BYTES];
            match self.random.below(100) {
                0..50 => self.write(&mut client, first, data)?,
                50..98 => self.read(&mut client, first, data)?,
                _ => self.flush(&mut client)?,
            }
            thread::sleep(PAUSE);
        }
        for first in (0..PART_BLOCKS).step_by(BLOCKS_MAX) {
            self.read(&mut client, first, &mut data)?;
        }
        Ok(())
    }

    fn flush(&mut self, client: &mut Client) -> Result<()> {
        match client.flush() {
            Err(error) if error.raw_os_error() == Some(EIO) => {
                self.shared.flushes_failed.fetch_add(1, Ordering::Relaxed);
                thread::sleep(PAUSE_AFTER_FAILURE);
                Ok(())
            }
            result => result.context("a flush"),
        }
    }

    fn write(&mut self, client: &mut Client, first: usize, data: &mut [u8]) -> Result<()> {
        self.latest += 1;
        let (version, offset) = (self.latest, self.offset(first));
        for (block, data) in (first..).zip(data.chunks_mut(BLOCK_BYTES)) {
            fill(data, self.thread, block, version);
        }
        let is_done = self.timed(|| client.write(offset, data))?;
        for versions in &mut self.versions[first..first + data.len() / BLOCK_BYTES] {
            if is_done {
                versions.clear();
            }
            versions.push(version);
        }
        Ok(())
    }

    fn read(&mut self, client: &mut Client, first: usize, data: &mut [u8]) -> Result<()> {
        let offset = self.offset(first);
        let read = || {
            data.copy_from_slice(&client.read(offset, data.len())?);
            Ok(())
        };
        if !self.timed(read)? {
            return Ok(());
        }
        let mut wanted = vec![0; BLOCK_BYTES];
        for (block, data) in (first..).zip(data.chunks(BLOCK_BYTES)) {
            let mut allowed = self.versions[block].iter();
            let is_right = allowed.any(|version| {
                fill(&mut wanted, self.thread, block, *version);
                wanted == data
            });
            if !is_right {
                bail!(
                    "WRONG DATA in block {block}: it begins with thread, block and version {:?}, wanted version {:?}",
                    words(data),
                    self.versions[block]
                );
            }
        }
        Ok(())
    }

    /// Carries out a request. Returns false if it failed, which is recorded; an error if the
    /// connection failed.
    fn timed(&self, request: impl FnOnce() -> io::Result<()>) -> Result<bool> {
        let begun = SystemTime::now();
        let result = request();
        let ended = SystemTime::now();
        let took = ended.duration_since(begun).unwrap_or_default();
        match result {
            Ok(()) => {
                self.shared.done.fetch_add(1, Ordering::Relaxed);
                let took = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
                self.shared.longest.fetch_max(took, Ordering::Relaxed);
                Ok(true)
            }
            Err(error) if error.raw_os_error() == Some(EIO) => {
                let mut failures = self
                    .shared
                    .failures
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner);
                failures.push(Failure {
                    thread: self.thread,
                    begun,
                    ended,
                    error: error.to_string(),
                });
                drop(failures);
                thread::sleep(PAUSE_AFTER_FAILURE);
                Ok(false)
            }
            Err(error) => Err(error).with_context(|| format!("after {took:?}")),
        }
    }

    fn offset(&self, block: usize) -> u64 {
        ((self.thread * PART_BLOCKS + block) * BLOCK_BYTES) as u64
    }
}

/// Fills a block with the content of a version: its writer, place and version, repeated. Version 0
/// is all zeroes.
fn fill(data: &mut [u8], thread: usize, block: usize, version: u64) {
    let header = match version {
        UNWRITTEN => [0; 3],
        _ => [thread as u64 + 1, block as u64, version],
    };
    for (word, bytes) in header.into_iter().cycle().zip(data.chunks_mut(8)) {
        bytes.copy_from_slice(&word.to_le_bytes());
    }
}

fn words(data: &[u8]) -> Vec<u64> {
    let words = data.chunks_exact(8).take(3);
    words
        .map(|word| word.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte)))
        .collect()
}

pub(crate) const THREADS: usize = 4;
pub(crate) const DISK_BYTES: usize = THREADS * PART_BLOCKS * BLOCK_BYTES;
const PART_BLOCKS: usize = 512;
const BLOCK_BYTES: usize = 4096;
/// Blocks of a request.
const BLOCKS_MAX: usize = 16;
const UNWRITTEN: u64 = 0;
/// Between requests, so that other programs can run.
const PAUSE: Duration = Duration::from_millis(1);
const PAUSE_AFTER_FAILURE: Duration = Duration::from_millis(20);
const EIO: i32 = 5;
/// Requests are held while there is no path; no test is without one for this long.
const ANSWER_TIME: Duration = Duration::from_secs(60);
