//! The way of an attached thread's bios into the engine and back, with the buffers in them. `attached` decides when
//! to look.
//!
//! No table is kept: a bio has all that makes its buffer again. That is sound since all bios that go into this
//! thread's part of the engine are made here, and the engine returns each once, as it was submitted.

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;

use blkmq_core::bio::{self, Data, Flags, Full, Lent, Op, Prio, Status, Submission};
use blkmq_core::time::Nanos;
use blkmq_host::attach::Refused;

use super::Attached;
use crate::bio::Bio;
use crate::buffer::Buffer;
use crate::disk::Disk;
use crate::engine::Running;
use crate::sys::{NOT_OWN, RawBuffer, forks};

/// The engine's part on this thread, and the bios that have ended.
pub(super) struct Lending {
    /// Always present, except while it is being dropped.
    host: Option<blkmq_host::Attached>,
    /// Ended and not returned. Only what the engine returns comes here, or what never went there.
    ended: Vec<bio::Bio>,
    /// Which engine that is; only compared.
    engine: *const Running,
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
    pub(super) fn new(host: blkmq_host::Attached, engine: *const Running) -> Self {
        Self {
            host: Some(host),
            engine,
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
        let bio = ManuallyDrop::new(bio);
        let (start, buffer_len, lead) = bio.buffer.parts();
        let what = (bio.op, bio.flags, bio.prio);
        let client = u32::from(lead) | if owner == Owner::Run { RUN } else { 0 };
        // SAFETY: the bytes belong to the buffer and do not move with it. From here on nothing reads, changes or frees
        // them, unless the bio is refused: it is never dropped, and only `Ended::new` makes the buffer again, from the
        // bio as it ended.
        let data = (buffer_len > 0).then(|| unsafe { Lent::new(start, buffer_len) });
        match self.submit_parts(disk, what, (bio.offset, bio.len), data, (client, cookie)) {
            Ok(()) => Ok(()),
            Err(Full) => Err(ManuallyDrop::into_inner(bio)),
        }
    }

    #[inline(always)]
    fn submit_parts(
        &mut self,
        disk: &Disk,
        (op, flags, prio): (Op, Flags, Prio),
        (offset, len): (u64, u64),
        data: Option<Lent>,
        (client, cookie): (u32, u64),
    ) -> Result<(), Full> {
        let is_forked = self.is_forked();
        let is_of_another = !disk.is_of(self.engine);
        let host = self.host.as_mut().expect(THERE);
        let disk = disk.host();
        let new = Submission {
            op,
            flags,
            prio,
            disk: disk.id,
            group: disk.group,
            offset,
            len,
            data,
            client,
            cookie,
        };
        if is_of_another {
            // Its number would mean another disk here.
            self.end_at_once(&new, Status::Invalid);
            return Ok(());
        }
        let submitted = match is_forked {
            true => Err(Refused::IsGone),
            false => host.submit_new(disk, &new),
        };
        match submitted {
            Ok(()) => Ok(()),
            Err(Refused::IsFull) => Err(Full),
            Err(Refused::IsGone) => {
                self.end_at_once(&new, Status::Shutdown);
                Ok(())
            }
        }
    }

    #[cold]
    fn end_at_once(&mut self, new: &Submission, status: Status) {
        self.ended.push(bio::Bio { status, ..new.bio() });
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

    /// Takes the first ones that have ended, at most `max`, and returns how many. If `each` panics, the buffers behind are
    /// leaked.
    #[inline]
    pub(super) fn take_ended(&mut self, max: usize, mut each: impl FnMut(Ended)) -> usize {
        if max < self.ended.len() {
            let first = self.ended.drain(..max);
            // SAFETY: what is in the list has ended and was submitted here, and it is taken out of the list.
            first.for_each(|bio| each(unsafe { Ended::new(&bio) }));
            return max;
        }
        // Read in their place: a bio that was just written would be copied by wider loads, for which a processor waits.
        let mut ended = std::mem::take(&mut self.ended);
        let count = ended.len();
        // SAFETY: as above; the list is emptied, or dropped by a panic.
        ended.iter().for_each(|bio| each(unsafe { Ended::new(bio) }));
        ended.clear();
        self.ended = ended;
        count
    }

    /// Takes the one that a call waits for, if it has ended.
    pub(super) fn take_run(&mut self) -> Option<Ended> {
        let is_run = |ended: &bio::Bio| ended.client & RUN != 0;
        let at = self.ended.iter().position(is_run)?;
        let ended = self.ended.swap_remove(at);
        // SAFETY: as in `take_ended`.
        Some(unsafe { Ended::new(&ended) })
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

/// One I/O on memory of the caller's own, for bindings of other languages.
#[derive(Clone, Copy, Debug)]
pub struct RawBio {
    /// What it does.
    pub op: Op,
    /// It is durable when it has ended.
    pub is_fua: bool,
    /// Nobody waits for this write.
    pub is_in_background: bool,
    /// Bytes, a multiple of the disk's block size.
    pub offset: u64,
    /// Bytes, a multiple of the disk's block size; at most [`Buffer::LEN_MAX`] with data.
    pub len: u64,
    /// `len` bytes, for reads and writes.
    pub data: Option<NonNull<u8>>,
}

impl Attached {
    /// Like [`Attached::submit`] with a buffer from [`Buffer::from_raw_parts`], at less cost. False if there is no room:
    /// submit it again after a completion.
    ///
    /// # Safety
    /// `data`, if there is any, is `len` bytes of initialised memory, at most [`Buffer::LEN_MAX`]. If this returns true,
    /// nobody else accesses or frees them until the I/O has ended and the buffer of its completion is dropped; that holds,
    /// too, when this value has been leaked.
    #[inline(always)]
    pub unsafe fn submit_raw(&mut self, disk: &Disk, bio: &RawBio, cookie: u64) -> bool {
        let fua = if bio.is_fua { Flags::FUA } else { Flags::NONE };
        let background = if bio.is_in_background {
            Flags::ASYNC
        } else {
            Flags::NONE
        };
        let what = (bio.op, fua.with(background), Prio::default());
        let data = bio.data.filter(|_| bio.len > 0);
        // SAFETY: by the caller's promise.
        let data = data.map(|start| unsafe { Lent::new(start, bio.len as u32) });
        let client = u32::from(NOT_OWN);
        let submitted = self
            .lending
            .submit_parts(disk, what, (bio.offset, bio.len), data, (client, cookie));
        submitted.is_ok()
    }
}

impl Ended {
    /// Takes the buffer back from a bio.
    ///
    /// # Safety
    /// `Lending` has submitted the bio, it has ended, and this is the only time that its buffer is taken back.
    #[inline]
    unsafe fn new(bio: &bio::Bio) -> Self {
        let lead = bio.client as u16;
        let buffer = match &bio.data {
            // SAFETY: `Lending::submit` took these parts of a buffer, which was not dropped, or `submit_raw` made them of
            // memory that no buffer frees; by the caller's promise the bio has ended, and this is the only time.
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
