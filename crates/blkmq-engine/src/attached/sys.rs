//! The way of an attached thread's bios into the engine and back, with the buffers in them. `attached` decides when
//! to look.
//!
//! No table is kept: a bio has all that makes its buffer again. That is sound since all bios that go into this
//! thread's part of the engine are made here, and the engine returns each once, as it was submitted.

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::OwnedFd;

use blkmq_core::bio::{self, Data, Lent, Status, Submission};
use blkmq_core::time::Nanos;
use blkmq_host::attach::Refused;

use crate::bio::Bio;
use crate::buffer::Buffer;
use crate::disk::Disk;
use crate::sys::{RawBuffer, forks};

/// The engine's part on this thread, and the bios that have ended.
pub(super) struct Lending {
    /// Always present, except while it is being dropped.
    host: Option<blkmq_host::Attached>,
    /// Ended and not returned. Only what the engine returns comes here, or what never went there.
    ended: Vec<bio::Bio>,
    /// Forks that were counted when it was made.
    forks: u32,
}

/// Who gets the end of a bio.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Owner {
    /// A call that waits for it.
    Run,
    /// The caller.
    User,
}

/// A bio that has ended.
pub(super) struct Ended {
    pub(super) owner: Owner,
    pub(super) cookie: u64,
    pub(super) status: Status,
    pub(super) buffer: Buffer,
}

impl Lending {
    pub(super) fn new(host: blkmq_host::Attached) -> Self {
        Self {
            host: Some(host),
            ended: Vec::new(),
            forks: forks(),
        }
    }

    /// Whether this process is a fork of the one that made it.
    #[inline]
    pub(super) fn is_forked(&self) -> bool {
        forks() != self.forks
    }

    /// Submits a bio, which ends at once in a fork.
    ///
    /// # Errors
    /// Returns the bio if there is no room.
    #[inline]
    pub(super) fn submit(&mut self, disk: &Disk, bio: Bio, owner: Owner, cookie: u64) -> Result<(), Bio> {
        let is_forked = self.is_forked();
        let host = self.host.as_mut().expect(THERE);
        let disk = disk.host();
        let bio = ManuallyDrop::new(bio);
        let (start, len, lead) = bio.buffer.parts();
        // SAFETY: the bytes belong to the buffer and do not move with it. From here on nothing reads, changes or frees
        // them, unless the bio is refused: it is never dropped, and only `Ended::new` makes the buffer again, from the
        // bio as it ended.
        let data = (len > 0).then(|| unsafe { Lent::new(start, len) });
        let new = Submission {
            op: bio.op,
            flags: bio.flags,
            prio: bio.prio,
            disk: disk.id,
            group: disk.group,
            offset: bio.offset,
            len: bio.len,
            data,
            client: u32::from(lead) | if owner == Owner::Run { RUN } else { 0 },
            cookie,
        };
        let submitted = match is_forked {
            true => Err(Refused::IsGone),
            false => host.submit_new(disk, &new),
        };
        match submitted {
            Ok(()) => Ok(()),
            Err(Refused::IsFull) => Err(ManuallyDrop::into_inner(bio)),
            Err(Refused::IsGone) => {
                self.end_at_once(&new);
                Ok(())
            }
        }
    }

    #[cold]
    fn end_at_once(&mut self, new: &Submission) {
        self.ended.push(bio::Bio {
            status: Status::Shutdown,
            ..new.bio()
        });
    }

    /// Issues what is staged and takes what has ended.
    #[inline]
    pub(super) fn poll(&mut self) {
        if !self.is_forked() {
            self.host.as_mut().expect(THERE).poll(&mut self.ended);
        }
    }

    /// The same, but blocks until something has ended, or `timeout` is over.
    pub(super) fn wait(&mut self, timeout: Option<Nanos>) {
        if !self.is_forked() {
            self.host.as_mut().expect(THERE).wait(&mut self.ended, timeout);
        }
    }

    /// Says whether nothing has ended that was not taken.
    #[inline]
    pub(super) fn has_none_ended(&self) -> bool {
        self.ended.is_empty()
    }

    /// Takes the first ones that have ended, at most `max`.
    #[inline]
    pub(super) fn take_ended(&mut self, max: usize) -> impl Iterator<Item = Ended> {
        let count = self.ended.len().min(max);
        self.ended.drain(..count).map(Ended::new)
    }

    /// Takes the one that a call waits for, if it has ended.
    pub(super) fn take_run(&mut self) -> Option<Ended> {
        let is_run = |ended: &bio::Bio| ended.client & RUN != 0;
        let at = self.ended.iter().position(is_run)?;
        Some(Ended::new(self.ended.swap_remove(at)))
    }

    /// How many were submitted and not taken.
    pub(super) fn outstanding(&self) -> usize {
        let host = self.host.as_ref().filter(|_| !self.is_forked());
        host.map_or(0, |host| host.outstanding() as usize) + self.ended.len()
    }

    /// The event of the engine's part, see there.
    pub(super) fn event(&mut self) -> io::Result<OwnedFd> {
        let host = self.host.as_mut().expect(THERE);
        host.event()?.try_clone_to_owned()
    }

    /// For how long the thread may wait; none for no limit.
    pub(super) fn prepare_to_wait(&mut self) -> Option<Nanos> {
        let none = self.ended.is_empty();
        if self.is_forked() {
            return (!none).then_some(Nanos(0));
        }
        let wait = self.host.as_mut().expect(THERE).prepare_to_wait();
        if none { wait } else { Some(Nanos(0)) }
    }

    /// Leaks the engine's part.
    pub(super) fn leak(&mut self) {
        std::mem::forget(self.host.take());
    }
}

impl Ended {
    /// Takes the buffer back from a bio that `Lending` has submitted, and that has ended.
    #[inline]
    fn new(bio: bio::Bio) -> Self {
        let lead = bio.client as u16;
        let buffer = match bio.data {
            // SAFETY: `Lending::submit` took these parts of a buffer, which was not dropped; the engine has returned its
            // bio, and does so once.
            Data::Flat(lent) => unsafe { RawBuffer::from_parts(lent.start(), lent.len(), lead) },
            _ => RawBuffer::default(),
        };
        Self {
            owner: if bio.client & RUN == 0 {
                Owner::User
            } else {
                Owner::Run
            },
            cookie: bio.cookie,
            status: bio.status,
            buffer: Buffer::from_raw_buffer(buffer),
        }
    }
}

const THERE: &str = "there until dropped";
/// A bit of a bio's `client`, above the buffer's lead: a call waits for it.
const RUN: u32 = 1 << 16;
