//! A thread that takes part in an engine: it submits, issues and reaps by itself, so that an I/O is handed to
//! no other thread. `engine` admits it.

use std::fmt;
use std::os::fd::OwnedFd;
use std::time::Duration;

use blkmq_core::bio::{self, Status};

use crate::bio::Bio;
use crate::buffer::Buffer;
use crate::disk::Disk;
use crate::engine::{Engine, nanos};
use crate::error::{Error, IoError};
use crate::loans::{Loans, result_of};

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
    /// Always present, except while it is being dropped.
    host: Option<blkmq_host::Attached>,
    /// The buffers of bios under way, by their cookies.
    loans: Loans<Owner>,
    /// Ended and not returned.
    ended: Vec<bio::Bio>,
    /// Behind `host`, which must be dropped first.
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
        while let Err(refused) = self.submit_as(disk, bio, Owner::Run) {
            bio = refused;
            self.look(None);
        }
        loop {
            let is_run = |ended: &bio::Bio| matches!(self.loans.owner(ended), Some(Owner::Run));
            if let Some(at) = self.ended.iter().position(is_run) {
                let (_, status, buffer) = self.loans.end(self.ended.swap_remove(at));
                return result_of(status, buffer);
            }
            self.look(None);
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
        self.submit_as(disk, bio, Owner::User(cookie))
    }

    /// Issues staged bios, appends what has ended to `completions`, and returns how many have. Never blocks.
    #[inline]
    pub fn poll(&mut self, completions: &mut Vec<Completion>) -> usize {
        self.poll_each(usize::MAX, |completion| completions.push(completion))
    }

    /// Issues staged bios, hands at most `max` completions to `each`, and returns how many. Never blocks.
    #[inline]
    pub fn poll_each(&mut self, max: usize, each: impl FnMut(Completion)) -> usize {
        if !self.engine.is_forked() {
            self.host.as_mut().expect(THERE).poll(&mut self.ended);
        }
        self.give(max, each)
    }

    /// Like [`Self::poll`], but blocks until a bio has ended or `timeout` is over (none: no limit). With no bio
    /// under way it returns at once.
    pub fn wait(&mut self, completions: &mut Vec<Completion>, timeout: Option<Duration>) -> usize {
        self.wait_each(timeout, usize::MAX, |completion| completions.push(completion))
    }

    /// Like [`Self::poll_each`], but blocks as [`Self::wait`] does.
    pub fn wait_each(
        &mut self,
        timeout: Option<Duration>,
        max: usize,
        each: impl FnMut(Completion),
    ) -> usize {
        if self.ended.is_empty() {
            self.look(timeout);
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
        self.engine.host()?;
        let host = self.host.as_mut().expect(THERE);
        let event = host.event().and_then(|event| event.try_clone_to_owned());
        event.map_err(|error| Error::Engine(format!("the event of a thread's own loop: {error}")))
    }

    /// Issues staged bios, clears [the event](Self::event), and returns how long the thread may wait for it before
    /// the next [`Self::poll`]: not at all (zero) or at most some time, which both must be kept; none for no
    /// limit. Never blocks.
    pub fn prepare_to_wait(&mut self) -> Option<Duration> {
        if self.engine.is_forked() {
            return (!self.ended.is_empty()).then_some(Duration::ZERO);
        }
        let wait = self.host.as_mut().expect(THERE).prepare_to_wait();
        if self.ended.is_empty() {
            wait.map(|wait| Duration::from_nanos(wait.0))
        } else {
            Some(Duration::ZERO)
        }
    }

    /// Bios that were submitted and not returned. In a fork, those that were submitted there.
    pub fn outstanding(&self) -> usize {
        let host = self.host.as_ref().filter(|_| !self.engine.is_forked());
        host.map_or(0, |host| host.outstanding() as usize) + self.ended.len()
    }

    /// Waits until more bios have ended, or `timeout` is over.
    fn look(&mut self, timeout: Option<Duration>) {
        if self.engine.is_forked() {
            return;
        }
        let host = self.host.as_mut().expect(THERE);
        host.wait(&mut self.ended, timeout.map(nanos));
    }

    #[inline]
    fn submit_as(&mut self, disk: &Disk, bio: Bio, owner: Owner) -> Result<(), Bio> {
        let (loan, mut bio) = bio.lend(disk.host(), self.loans.next());
        if self.engine.is_forked() {
            bio.status = Status::Shutdown;
            self.loans.add(loan, owner);
            self.ended.push(bio);
            return Ok(());
        }
        let host = self.host.as_mut().expect(THERE);
        match host.submit(disk.host().queue, bio) {
            Ok(()) => {
                self.loans.add(loan, owner);
                Ok(())
            }
            Err(refused) => Err(Bio::take_back(loan, refused)),
        }
    }

    #[inline]
    fn give(&mut self, max: usize, mut each: impl FnMut(Completion)) -> usize {
        let count = self.ended.len().min(max);
        for ended in self.ended.drain(..count) {
            let (owner, status, buffer) = self.loans.end(ended);
            let Owner::User(cookie) = owner else {
                unreachable!("a call of `run` waits for its own bio")
            };
            each(Completion {
                cookie,
                status,
                buffer,
            });
        }
        count
    }
}

impl Attached {
    pub(crate) fn new(host: blkmq_host::Attached, engine: Engine) -> Self {
        Self {
            host: Some(host),
            loans: Loans::new(),
            ended: Vec::new(),
            engine,
        }
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
            return std::mem::forget(self.host.take());
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

/// Who gets the end of a bio.
enum Owner {
    /// The call of `run` under way.
    Run,
    /// The caller, with this cookie.
    User(u64),
}

const THERE: &str = "there until dropped";
/// A drop that waits longer for its I/O logs this.
const DROP_REPORT: Duration = Duration::from_secs(5);
