//! Decides the life of a mount's channel to the kernel on its reactor: requests are read while there are some, become bios, and are answered
//! when these have ended.
//!
//! The descriptor never blocks, and is read and written directly: a request of the kernel's is a call of its own either way, and
//! a poll that is armed only while there is nothing to do keeps whoever asks from waking a reactor that is at it.

mod moving;

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use blkmq_core::bio::{Bio, Data};
use blkmq_host::disk::{Disk, Use};
use blkmq_host::ring::Completion;
use blkmq_host::service::{Cx, Service};
use rustix::io::Errno;

use self::moving::Moving;
use super::filesystem::FileSystem;
use super::front_door::DOOR;
use super::protocol::{FIXED_BYTES_MAX, FRONT_BYTES, Malformed, Request, answer, attributes_changed};
use super::requests::{Requests, Transport};
use super::ring::{self, RingMemory};
use super::slots::{Memory, Slots, Work};
use crate::common::admission::{Refusal, Ticket};
use crate::common::io_flusher::become_io_flusher;
use crate::handover::{Member, Phase};

/// A way to the mount.
pub(super) struct Channel {
    filesystem: Arc<FileSystem>,
    requests: Requests<Device>,
    /// What rings are made of, if the kernel agrees to them.
    rings: Option<RingMemory>,
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

/// The descriptor on which the kernel asks.
pub(super) struct Device {
    filesystem: Arc<FileSystem>,
    device: Arc<OwnedFd>,
    slots: Slots,
    /// The beginning of a request, then all of its fixed part.
    front: Box<[u8; FIXED_BYTES_MAX]>,
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
            true => self.ticket.reselect(disk.tenant),
            false => self.ticket.select(disk.tenant)?,
        }
        Ok(phase)
    }
}

impl Channel {
    /// Makes it, with memory that was got before.
    pub(super) fn new(filesystem: Arc<FileSystem>, device: OwnedFd, memory: Memory, mut home: Home) -> Self {
        home.told_size = filesystem.disk.current_size();
        let device = Device {
            filesystem: Arc::clone(&filesystem),
            device: Arc::new(device),
            slots: Slots::new(memory),
            front: Box::new([0; FIXED_BYTES_MAX]),
        };
        Self {
            requests: Requests::new(Arc::clone(&filesystem), device),
            filesystem,
            rings: None,
            home,
            is_polling: false,
            comes_again: false,
            is_short: false,
            is_stopping: false,
            moving: Moving::No,
            is_saved: false,
        }
    }

    /// Has the kernel ask through rings, if it agrees.
    pub(super) fn with_rings(mut self, rings: Option<RingMemory>) -> Self {
        self.requests.wants_ring = rings.is_some();
        self.rings = rings;
        self
    }

    /// Takes requests, some at a time.
    fn take(&mut self, cx: &mut Cx<'_>) {
        for _ in 0..REQUESTS_MAX {
            if self.is_stopping || self.moving != Moving::No || self.requests.has_refused() {
                return;
            }
            match self.requests.transport.read() {
                Ok(Some((slot, request))) => self.begin(cx, slot, request),
                Ok(None) => {
                    self.is_short = true;
                    return;
                }
                Err(Errno::AGAIN) => return self.rest(cx),
                // A request that was taken back while it was read.
                Err(Errno::INTR | Errno::NOENT) => {}
                // The second one where a request was taken in the moment of the unmount.
                Err(Errno::NODEV | Errno::CONNABORTED) => return self.lose(),
                Err(errno) => return self.break_off(cx, &errno),
            }
        }
        self.come_again(cx);
    }

    fn begin(&mut self, cx: &mut Cx<'_>, slot: u16, request: Result<Request, Malformed>) {
        if let Err(broken) = self.requests.begin(cx, slot, request) {
            return self.break_off(cx, &broken);
        }
        if self.requests.agreed.is_some_and(|agreed| agreed.is_ring)
            && let Some(rings) = self.rings.take()
        {
            ring::spawn(cx, &self.filesystem, &self.requests.transport.device, rings);
        }
    }

    /// There is nothing to take: the kernel is to tell when there is.
    fn rest(&mut self, cx: &Cx<'_>) {
        if !std::mem::replace(&mut self.is_polling, true) {
            cx.ring_client()
                .push_poll(self.device().as_raw_fd(), libc::POLLIN, false, POLL);
        }
    }

    fn device(&self) -> &Arc<OwnedFd> {
        &self.requests.transport.device
    }

    /// The filesystem is gone: somebody has unmounted it.
    #[cold]
    fn lose(&mut self) {
        self.is_stopping = true;
        self.filesystem.lose();
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
            let _ = rustix::io::write(self.device(), &attributes_changed());
        }
    }

    fn is_idle(&self) -> bool {
        self.requests.are_idle()
    }
}

impl Device {
    /// Reads a request, with its data, if it has any, into the next slot. None if there is no slot.
    fn read(&mut self) -> Result<Option<Received>, Errno> {
        let Some((slot, [first, rest])) = self.slots.next() else {
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

    /// A request that is not waited for any more does not want its answer.
    fn note_sent(&self, sent: Result<usize, Errno>) {
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
}

impl Transport for Device {
    fn take(&mut self, slot: u16, unique: u64, work: Work) {
        self.slots.take(slot, unique, work);
    }

    fn request(&self, slot: u16) -> (u64, Work) {
        let slot = self.slots.get(slot);
        (slot.unique, slot.work)
    }

    fn set_work(&mut self, slot: u16, work: Work) {
        self.slots.get_mut(slot).work = work;
    }

    fn lend_for_read(&mut self, slot: u16, bytes: usize) -> Data {
        self.slots.lend_for_read(slot, bytes)
    }

    fn lend_write(&mut self, slot: u16, bytes: usize) -> Data {
        self.slots.lend_write(slot, bytes)
    }

    fn take_back(&mut self, slot: u16) {
        self.slots.get_mut(slot).take_back();
    }

    fn answer(&mut self, _slot: u16, unique: u64, errno: i32, data: &[u8]) {
        let header = answer(unique, errno, data.len());
        let sent = rustix::io::writev(&self.device, &[IoSlice::new(&header), IoSlice::new(data)]);
        self.note_sent(sent);
    }

    fn answer_read(&mut self, slot: u16, unique: u64, before: usize, len: usize) {
        let header = answer(unique, 0, len);
        let data = &self.slots.get(slot).read_data()[before..before + len];
        let sent = rustix::io::writev(&self.device, &[IoSlice::new(&header), IoSlice::new(data)]);
        self.note_sent(sent);
    }

    fn put(&mut self, slot: u16) {
        self.slots.put(slot);
    }

    fn is_idle(&self) -> bool {
        self.slots.are_free()
    }
}

impl Service for Channel {
    fn start(&mut self, cx: &mut Cx<'_>) {
        self.requests.start(cx);
        become_io_flusher(cx, DOOR, FLUSHER);
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
        self.requests.finish(bio);
        if self.is_short {
            self.come_again(cx);
            self.is_short = false;
        }
    }

    fn on_wake(&mut self, cx: &mut Cx<'_>) {
        self.look_around();
        self.requests.take_answers();
        if std::mem::take(&mut self.is_short) {
            self.come_again(cx);
        }
        self.take(cx);
    }

    fn on_room(&mut self, cx: &mut Cx<'_>) {
        if self.requests.submit_refused(cx) {
            self.take(cx);
        }
    }

    fn end_of_batch(&mut self, cx: &mut Cx<'_>) {
        if self.is_stopping && std::mem::take(&mut self.is_polling) {
            cx.ring_client().push_cancel(POLL, CANCEL);
        }
        if self.moving == Moving::Stopping {
            self.save_if_at_rest(cx);
        }
    }

    /// Where who asks has a processor of its own, looking for the next request saves waking this one. Where both share one, looking
    /// finds nothing, and becomes rare.
    fn busy(&self) -> bool {
        !self.is_stopping && self.moving == Moving::No
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
        self.requests.give_up();
        // Nobody else serves it.
        self.filesystem.end();
        self.home.ticket.end_address();
    }
}

const POLL: u64 = 0;
const CANCEL: u64 = 1;
const AGAIN: u64 = 2;
const FLUSHER: u64 = 3;
/// Requests that one turn takes before others have theirs.
const REQUESTS_MAX: usize = 64;
