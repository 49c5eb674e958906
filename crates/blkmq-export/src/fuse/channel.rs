//! Decides the life of a mount's channel to the kernel on its reactor: requests are read while there are some, become bios, and are answered
//! when these have ended.
//!
//! The descriptor never blocks, and is read and written directly: a request of the kernel's is a call of its own either way, and
//! a poll that is armed only while there is nothing to do keeps whoever asks from waking a reactor that is at it.

mod moving;
mod requests;

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use blkmq_core::bio::Bio;
use blkmq_host::disk::{Disk, Use};
use blkmq_host::ring::Completion;
use blkmq_host::service::{Cx, Service};
use rustix::io::Errno;

use self::moving::Moving;
use super::filesystem::FileSystem;
use super::protocol::{Agreed, FIXED_BYTES_MAX, FRONT_BYTES, Malformed, Request, answer, attributes_changed};
use super::slots::{Memory, SLOTS, Slots};
use super::sys::become_io_flusher;
use crate::common::admission::{Refusal, Ticket};
use crate::common::lookup::Asker;
use crate::handover::{Member, Phase};

/// A way to the mount.
pub(super) struct Channel {
    filesystem: Arc<FileSystem>,
    device: Arc<OwnedFd>,
    /// None before the kernel's first request.
    agreed: Option<Agreed>,
    slots: Slots,
    /// The beginning of a request, then all of its fixed part.
    front: Box<[u8; FIXED_BYTES_MAX]>,
    /// Bios that the queue had no room for.
    refused: VecDeque<Bio>,
    asker: Option<Arc<Asker>>,
    home: Home,
    is_polling: bool,
    comes_again: bool,
    /// Every slot is in use, and there may be requests.
    is_short: bool,
    is_stopping: bool,
    moving: Moving,
    /// What another daemon has to know of it is there to be taken.
    is_saved: bool,
}

/// Its places among others.
pub(super) struct Home {
    pub(super) ticket: Ticket,
    pub(super) member: Member,
    /// Its place among the users of the disk.
    disk_use: Option<Use>,
    /// The size that the kernel was told of last.
    told_size: u64,
    /// Another daemon has handed it over.
    is_restored: bool,
}

/// A request, with the slot whose buffer has its data.
type Received = (u16, Result<Request, Malformed>);

impl Home {
    pub(super) fn new(ticket: Ticket, member: Member) -> Self {
        Self {
            ticket,
            member,
            disk_use: None,
            told_size: 0,
            is_restored: false,
        }
    }

    /// Takes its places. Returns how it is to begin.
    ///
    /// # Errors
    /// If its group may have no more.
    fn begin(&mut self, cx: &Cx<'_>, disk: &Disk) -> Result<Phase, Refusal> {
        self.disk_use = disk.users.enter(cx.waker());
        self.ticket.arrive(cx.waker());
        self.member.select(&disk.name);
        let phase = self.member.arrive(cx.waker());
        match self.is_restored {
            true => self.ticket.reselect(disk.group),
            false => self.ticket.select(disk.group)?,
        }
        Ok(phase)
    }
}

impl Channel {
    /// Makes it, with memory that was got before.
    pub(super) fn new(filesystem: Arc<FileSystem>, device: OwnedFd, memory: Memory, mut home: Home) -> Self {
        home.told_size = filesystem.disk.current_size();
        Self {
            slots: Slots::new(memory),
            filesystem,
            device: Arc::new(device),
            agreed: None,
            front: Box::new([0; FIXED_BYTES_MAX]),
            refused: VecDeque::with_capacity(SLOTS.into()),
            asker: None,
            home,
            is_polling: false,
            comes_again: false,
            is_short: false,
            is_stopping: false,
            moving: Moving::No,
            is_saved: false,
        }
    }

    /// Takes requests, some at a time.
    fn take(&mut self, cx: &mut Cx<'_>) {
        for _ in 0..REQUESTS_MAX {
            if self.is_stopping || self.moving != Moving::No || !self.refused.is_empty() {
                return;
            }
            match self.read() {
                Ok(Some((slot, request))) => self.begin(cx, slot, &request),
                Ok(None) => return,
                Err(Errno::AGAIN) => return self.rest(cx),
                // A request that was taken back while it was read.
                Err(Errno::INTR | Errno::NOENT) => {}
                Err(Errno::NODEV) => return self.lose(),
                Err(errno) => return self.break_off(cx, &errno),
            }
        }
        self.come_again(cx);
    }

    /// Reads a request, with its data, if it has any, into the next slot. None if there is no slot.
    fn read(&mut self) -> Result<Option<Received>, Errno> {
        let Some((slot, [first, rest])) = self.slots.next() else {
            self.is_short = true;
            return Ok(None);
        };
        let (front, behind) = self.front.split_at_mut(FRONT_BYTES);
        let mut into = [front, first, rest].map(IoSliceMut::new);
        let bytes = rustix::io::readv(&self.device, &mut into)?;
        // What is longer than a write's fixed part and no write goes on with what would be its data.
        let more = bytes.saturating_sub(FRONT_BYTES).min(behind.len());
        behind[..more].copy_from_slice(&into[1][..more]);
        let fixed = &self.front[..bytes.min(FIXED_BYTES_MAX)];
        Ok(Some((slot, Request::parse(fixed, bytes))))
    }

    /// There is nothing to take: the kernel is to tell when there is.
    fn rest(&mut self, cx: &Cx<'_>) {
        if !std::mem::replace(&mut self.is_polling, true) {
            cx.ring_client()
                .push_poll(self.device.as_raw_fd(), libc::POLLIN, false, POLL);
        }
    }

    /// Sends an answer: an errno of Linux, or data. A request that is not waited for any more does not want it.
    fn answer(&mut self, unique: u64, errno: i32, data: &[u8]) {
        let header = answer(unique, errno, data.len());
        let sent = rustix::io::writev(&self.device, &[IoSlice::new(&header), IoSlice::new(data)]);
        self.note_sent(sent);
    }

    fn note_sent(&mut self, sent: Result<usize, Errno>) {
        match sent {
            Ok(_) | Err(Errno::NOENT | Errno::NODEV) => {}
            Err(errno) => {
                tracing::error!(
                    "fuse: {}: the kernel refuses an answer: {errno}",
                    self.filesystem.name
                );
            }
        }
    }

    /// The filesystem is gone: somebody has unmounted it.
    #[cold]
    fn lose(&mut self) {
        self.is_stopping = true;
        if !self.filesystem.is_unmounting() {
            tracing::info!(
                "fuse: {}: unmounted, and not served any more",
                self.filesystem.name
            );
        }
        self.filesystem.unmount_and_end();
    }

    /// What comes from the kernel cannot be understood.
    #[cold]
    fn break_off(&mut self, cx: &mut Cx<'_>, why: &dyn std::fmt::Display) {
        let what = format_args!("{}: not served any more: {why}", self.filesystem.name);
        self.filesystem.log.warn(cx.now(), what);
        self.is_stopping = true;
        self.filesystem.unmount_and_end();
    }

    fn come_again(&mut self, cx: &Cx<'_>) {
        if !std::mem::replace(&mut self.comes_again, true) {
            cx.ring_client().push_nop(AGAIN);
        }
    }

    /// Takes note of what has changed around it: the end of the mount, the disk's removal or growth, another daemon.
    fn look_around(&mut self) {
        self.is_stopping |= self.filesystem.is_over();
        if self.home.disk_use.as_ref().is_none_or(Use::is_to_end) {
            self.is_stopping = true;
            self.filesystem.unmount_and_end();
        }
        self.follow();
        let size = self.filesystem.disk.current_size();
        // Who is handed over says what it has told, and no more.
        if self.moving == Moving::No && std::mem::replace(&mut self.home.told_size, size) != size {
            // The kernel finds out by itself, a second later.
            let _ = rustix::io::write(&self.device, &attributes_changed());
        }
    }

    fn is_idle(&self) -> bool {
        self.slots.are_free() && self.refused.is_empty()
    }
}

impl Service for Channel {
    fn start(&mut self, cx: &mut Cx<'_>) {
        // Only root may; what else there is against waiting for oneself is in the manual.
        let _ = become_io_flusher();
        self.filesystem.join(cx.waker());
        self.asker = Some(Arc::new(Asker::new(cx.waker())));
        match self.home.begin(cx, &self.filesystem.disk) {
            Ok(Phase::Serving) => {}
            Ok(_) => {
                self.moving = Moving::AtRest;
                self.home.member.settle(None);
            }
            Err(refusal) => return self.break_off(cx, &refusal),
        }
        self.look_around();
        self.take(cx);
    }

    fn on_ring(&mut self, cx: &mut Cx<'_>, completed: &[Completion]) {
        for completion in completed {
            match completion.user {
                POLL => self.is_polling = false,
                AGAIN => self.comes_again = false,
                _ => {}
            }
        }
        self.take(cx);
    }

    fn on_end(&mut self, cx: &mut Cx<'_>, bio: Bio) {
        self.finish(bio);
        if self.is_short {
            self.come_again(cx);
            self.is_short = false;
        }
    }

    fn on_wake(&mut self, cx: &mut Cx<'_>) {
        self.look_around();
        self.take_answers(cx);
        self.take(cx);
    }

    fn on_room(&mut self, cx: &mut Cx<'_>) {
        while let Some(bio) = self.refused.pop_front() {
            if let Err(bio) = cx.submit(self.filesystem.disk.queue, bio) {
                self.refused.push_front(bio);
                return;
            }
        }
        self.take(cx);
    }

    fn end_of_batch(&mut self, cx: &mut Cx<'_>) {
        if self.is_stopping && std::mem::take(&mut self.is_polling) {
            cx.ring_client().push_cancel(POLL, CANCEL);
        }
        if self.moving == Moving::Stopping {
            self.save_if_at_rest(cx);
        }
    }

    fn busy(&self) -> bool {
        !self.is_stopping && self.filesystem.is_open()
    }

    /// Who comes while it is being unmounted is served. What was begun is finished.
    fn drain(&mut self, _cx: &mut Cx<'_>) {
        match self.home.member.phase() {
            Phase::Gone => self.let_go(),
            _ => self.filesystem.unmount_and_end(),
        }
    }

    fn is_finished(&self) -> bool {
        self.is_stopping && self.filesystem.is_over() && self.is_idle()
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        if let Some(asker) = &self.asker {
            asker.give_up();
        }
        // Nobody else serves it.
        self.filesystem.end();
    }
}

const POLL: u64 = 0;
const CANCEL: u64 = 1;
const AGAIN: u64 = 2;
/// Requests that one turn takes before others have theirs.
const REQUESTS_MAX: usize = 64;
