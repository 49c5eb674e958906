//! A thread that takes part in an engine: it submits, issues and reaps by itself, so that an I/O is handed to
//! no other thread. `engine` admits it.

mod sys;

use std::fmt;
use std::os::fd::OwnedFd;
use std::time::Duration;

use blkmq_core::bio::Status;

pub use self::sys::RawBio;
use self::sys::{Ended, Lending, Owner};
use crate::bio::Bio;
use crate::buffer::Buffer;
use crate::disk::Disk;
use crate::engine::{Engine, nanos};
use crate::error::{Error, IoError, result_of};

/// The calling thread's own access to all disks of an engine; it stays on that thread.
///
/// One I/O at a time: [`read`](Self::read), [`write`](Self::write) and their like block until it has ended. Many
/// at once: [`submit`](Self::submit), then [`poll`](Self::poll) or [`wait`](Self::wait). The two can be mixed.
///
/// A drop blocks until all I/O has ended. The thread of an `Attached` should come back to it while it has I/O
/// under way: nobody else issues what is staged or finds what has ended.
///
/// In a fork of the engine's process, I/O that is submitted ends with [`Status::Shutdown`], I/O of the parent never
/// ends, and a drop leaks.
pub struct Attached {
    lending: Lending,
    /// Behind the engine's part in `lending`, which must be dropped first.
    engine: Engine,
}

/// An I/O that has ended.
#[derive(Debug)]
#[must_use = "it says whether the I/O failed"]
pub struct Completion {
    /// The number that it was submitted with.
    pub cookie: u64,
    /// How it ended.
    pub status: Status,
    /// The bio's buffer; without bytes for operations without data.
    pub buffer: Buffer,
}

impl From<Ended> for Completion {
    #[inline]
    fn from(ended: Ended) -> Self {
        debug_assert_eq!(ended.owner, Owner::User, "a call of `run` waits for its own bio");
        Self {
            cookie: ended.cookie,
            status: ended.status,
            buffer: ended.buffer,
        }
    }
}

impl Completion {
    /// The buffer, or the error of the I/O.
    ///
    /// # Errors
    /// If the status is not [`Status::Ok`].
    #[inline]
    pub fn into_result(self) -> Result<Buffer, IoError> {
        result_of(self.status, self.buffer)
    }
}

/// Reads and writes: one at a time.
impl Attached {
    /// Fills the buffer from `offset` and returns it. Blocks until the read has ended.
    ///
    /// # Errors
    /// The disk's.
    pub fn read(&mut self, disk: &Disk, offset: u64, buffer: Buffer) -> Result<Buffer, IoError> {
        self.run(disk, Bio::read(offset, buffer))
    }

    /// Stores the buffer at `offset` and returns it. Blocks until the write has ended.
    ///
    /// # Errors
    /// The disk's.
    pub fn write(&mut self, disk: &Disk, offset: u64, buffer: Buffer) -> Result<Buffer, IoError> {
        self.run(disk, Bio::write(offset, buffer))
    }

    /// Makes all writes durable that have ended. Blocks until then.
    ///
    /// # Errors
    /// The disk's.
    pub fn flush(&mut self, disk: &Disk) -> Result<(), IoError> {
        self.run(disk, Bio::flush()).map(drop)
    }

    /// Tells the disk that the content is no longer needed. Blocks until the discard has ended.
    ///
    /// # Errors
    /// The disk's.
    pub fn discard(&mut self, disk: &Disk, offset: u64, len: u64) -> Result<(), IoError> {
        self.run(disk, Bio::discard(offset, len)).map(drop)
    }

    /// Does one I/O and returns its buffer. Blocks until it has ended.
    ///
    /// # Errors
    /// The disk's.
    pub fn run(&mut self, disk: &Disk, mut bio: Bio) -> Result<Buffer, IoError> {
        while let Err(refused) = self.lending.submit(disk, bio, Owner::Run, 0) {
            bio = refused;
            self.lending.wait(None);
        }
        loop {
            if let Some(ended) = self.lending.take_run() {
                return result_of(ended.status, ended.buffer);
            }
            self.lending.wait(None);
        }
    }
}

/// Many at once.
impl Attached {
    /// Submits a bio; a [`Completion`] with the same `cookie` comes from a later call of [`Self::poll`] or
    /// [`Self::wait`]. It may be staged until then. Never blocks.
    ///
    /// # Errors
    /// Returns the bio if there is no room: submit it again after a completion.
    #[inline]
    pub fn submit(&mut self, disk: &Disk, bio: Bio, cookie: u64) -> Result<(), Bio> {
        self.lending.submit(disk, bio, Owner::User, cookie)
    }

    /// Issues staged bios, appends what has ended to `completions`, and returns how many have. Never blocks.
    #[inline]
    pub fn poll(&mut self, completions: &mut Vec<Completion>) -> usize {
        self.lending.poll();
        self.give_all(completions)
    }

    /// Issues staged bios, hands at most `max` completions to `each`, and returns how many. Never blocks.
    #[inline]
    pub fn poll_each(&mut self, max: usize, each: impl FnMut(Completion)) -> usize {
        self.lending.poll();
        self.give(max, each)
    }

    /// Like [`Self::poll`], but blocks until a bio has ended or `timeout` is over (none: no limit). With no bio
    /// under way it returns at once.
    pub fn wait(&mut self, completions: &mut Vec<Completion>, timeout: Option<Duration>) -> usize {
        if self.lending.has_none_ended() {
            self.lending.wait(timeout.map(nanos));
        }
        self.give_all(completions)
    }

    /// Like [`Self::poll_each`], but blocks as [`Self::wait`] does.
    pub fn wait_each(
        &mut self,
        timeout: Option<Duration>,
        max: usize,
        each: impl FnMut(Completion),
    ) -> usize {
        if self.lending.has_none_ended() {
            self.lending.wait(timeout.map(nanos));
        }
        self.give(max, each)
    }

    /// A descriptor that becomes readable when [`Self::poll`] has work: for an event loop of this thread's own. It
    /// is a duplicate of the same one at each call. Before each wait for it, call [`Self::prepare_to_wait`].
    ///
    /// It may miss ends on disks in Ceph, and on NBD disks while they connect again: there, poll now and then.
    ///
    /// # Errors
    /// If the system has no descriptor left.
    pub fn event(&mut self) -> Result<OwnedFd, Error> {
        self.engine.check_fork()?;
        let event = self.lending.event();
        event.map_err(|error| Error::Engine(format!("the event of a thread's own loop: {error}")))
    }

    /// Issues staged bios, clears [the event](Self::event), and returns how long the thread may wait for it before
    /// the next [`Self::poll`]: not at all (zero) or at most some time, which both must be kept; none for no
    /// limit. Never blocks.
    pub fn prepare_to_wait(&mut self) -> Option<Duration> {
        let wait = self.lending.prepare_to_wait();
        wait.map(|wait| Duration::from_nanos(wait.0))
    }

    /// Bios that were submitted and not returned. In a fork, those that were submitted there.
    pub fn outstanding(&self) -> usize {
        self.lending.outstanding()
    }

    #[inline]
    fn give_all(&mut self, completions: &mut Vec<Completion>) -> usize {
        self.give(usize::MAX, |completion| completions.push(completion))
    }

    #[inline]
    fn give(&mut self, max: usize, mut each: impl FnMut(Completion)) -> usize {
        self.lending
            .take_ended(max, |ended| each(Completion::from(ended)))
    }
}

impl Attached {
    pub(crate) fn new(host: blkmq_host::Attached, engine: Engine) -> Self {
        Self {
            lending: Lending::new(host, engine.number()),
            engine,
        }
    }

    /// Does this thread's part of others' changes, and waits for its I/O; what ends is kept.
    pub(crate) fn take_part(&mut self, at_most: Duration) {
        if self.lending.outstanding() == 0 {
            std::thread::sleep(at_most);
        }
        self.lending.wait(Some(nanos(at_most)));
    }

    /// Says whether this process is a fork of the engine's. Cheaper than [`Engine::check_fork`].
    #[inline]
    pub fn is_forked(&self) -> bool {
        self.lending.is_forked()
    }

    /// The engine.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        if self.engine.is_forked() {
            // The kernel knows the parent's thread alone.
            return self.lending.leak();
        }
        let mut completions = Vec::new();
        while self.outstanding() > 0 {
            self.wait(&mut completions, Some(DROP_REPORT));
            if completions.is_empty() {
                let outstanding = self.outstanding();
                tracing::warn!(
                    outstanding,
                    "an attached thread leaves and waits for its I/O to end"
                );
            }
            completions.clear();
        }
    }
}

impl fmt::Debug for Attached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Attached with {} bios under way", self.outstanding())
    }
}

/// A drop that waits longer for its I/O logs this.
const DROP_REPORT: Duration = Duration::from_secs(5);
