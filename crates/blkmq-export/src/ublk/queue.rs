//! How one queue of a device is served on its reactor: requests come from the kernel,
//! become bios, and are answered when these have ended. All answers of a turn go to the kernel in
//! one system call, together with memory for as many requests.

mod moving;

use std::collections::VecDeque;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use blkmq_core::bio::{Bio, Op};
use blkmq_core::ids::ReactorId;
use blkmq_host::disk::Use;
use blkmq_host::ring::Completion;
use blkmq_host::service::{Cx, Service};

use self::moving::Moving;
use super::device::{Attached, Device, End, Reason};
use super::front_door::DOOR;
use super::left;
use super::protocol::{DATA_BYTES_MAX, Request, Shape};
use super::slots::{Memory, Slots};
use super::sys;
use crate::common::admission::Ticket;
use crate::common::command_ring::{CommandRing, Ended, FREE_USER, Watch};
use crate::common::io_flusher::become_io_flusher;
use crate::handover::{Member, Phase};

/// The parts of one queue.
pub(super) struct QueueParts {
    pub(super) number: u16,
    pub(super) memory: Memory,
    pub(super) member: Member,
}

/// What the first queue does for all queues.
pub(super) struct First {
    /// The device's entry in the counts of connections.
    pub(super) ticket: Ticket,
    /// Another daemon has handed it over.
    pub(super) is_restored: bool,
    /// The size that the kernel was told last.
    pub(super) told_size: u64,
    /// The other queues, each of which gets its own reactor.
    pub(super) others: Vec<QueueParts>,
    /// A thread waits for the device to begin; else it begins when clients are served.
    pub(super) has_begun: bool,
}

/// One queue.
pub(super) struct Queue {
    device: Arc<Device>,
    number: u16,
    ring: CommandRing,
    slots: Slots,
    attached: Option<Attached>,
    first: Option<First>,
    member: Member,
    disk_use: Option<Use>,
    /// Bios for which the disk's queue had no room.
    refused: VecDeque<Bio>,
    /// Kept to reuse its memory.
    ended: Vec<Ended>,
    watch: Watch,
    is_stopping: bool,
    moving: Moving,
}

impl Queue {
    pub(super) fn new(device: Arc<Device>, parts: QueueParts, first: Option<First>) -> Self {
        let (ring, slots) = parts.memory.into_parts();
        let depth = usize::from(slots.len());
        Self {
            device,
            number: parts.number,
            ring,
            slots,
            attached: None,
            first,
            member: parts.member,
            disk_use: None,
            refused: VecDeque::with_capacity(depth),
            ended: Vec::with_capacity(2 * depth),
            watch: Watch::default(),
            is_stopping: false,
            moving: Moving::No,
        }
    }

    /// Returns whether new requests are taken.
    fn takes(&self) -> bool {
        self.is_stopping || self.moving == Moving::No && self.refused.is_empty()
    }

    /// Takes the requests that have come.
    fn take(&mut self, cx: &mut Cx<'_>) {
        if !self.takes() {
            return;
        }
        let mut ended = std::mem::take(&mut self.ended);
        self.ring.take(&mut ended);
        for ended in ended.drain(..) {
            self.take_one(cx, ended);
        }
        self.ended = ended;
    }

    fn take_one(&mut self, cx: &mut Cx<'_>, ended: Ended) {
        let tag = ended.user as u16;
        self.slots.take_from_kernel(tag);
        match ended.result {
            // What comes after the end is sent again to the next daemon.
            0 if self.is_stopping => {}
            0 => self.begin(cx, tag),
            GONE => self.note_gone(),
            error => {
                let error = std::io::Error::from_raw_os_error(-error);
                let what = format_args!("{}: a request is lost: {error}", self.device.name);
                self.device.log.warn(cx.now(), what);
                self.note_gone();
            }
        }
    }

    /// The device is gone if all memory is back: somebody has removed it.
    fn note_gone(&mut self) {
        if self.slots.are_back() && self.slots.are_idle() && !self.is_stopping && !self.device.is_ending() {
            tracing::info!("ublk: {}: removed, and not served any more", self.device.name);
            self.device.ask_end(Reason::Removed);
        }
    }

    fn begin(&mut self, cx: &mut Cx<'_>, tag: u16) {
        let Some(attached) = &self.attached else { return };
        let descriptor = attached.descriptors.read(tag);
        let disk = &self.device.disk;
        let shape = Shape {
            size: disk.current_size(),
            block_size: disk.block_size,
            read_only: disk.read_only,
            data_bytes_max: DATA_BYTES_MAX,
            memory: self.slots.address(tag),
        };
        match Request::parse(&descriptor, &shape) {
            Ok(request) => self.submit(cx, tag, &request),
            Err(refused) => {
                let what = format_args!("{}: a request is refused: {refused}", self.device.name);
                self.device.log.warn(cx.now(), what);
                self.commit(tag, -refused.errno());
            }
        }
    }

    fn submit(&mut self, cx: &mut Cx<'_>, tag: u16, request: &Request) {
        let disk = &self.device.disk;
        let mut bio = Bio {
            op: request.op,
            flags: request.flags,
            disk: disk.id,
            group: disk.group,
            offset: request.offset,
            len: request.len,
            cookie: tag.into(),
            ..Bio::default()
        };
        let has_data = request.op.has_data();
        self.slots
            .begin(tag, if has_data { request.len as i32 } else { 0 });
        if has_data {
            bio.data = self.slots.lend(tag, request.len);
        }
        if let Err(bio) = cx.submit(disk.queue, bio) {
            self.refused.push_back(bio);
        }
    }

    /// Submits the bios that were refused before. Returns whether there was room for all.
    fn submit_refused(&mut self, cx: &mut Cx<'_>) -> bool {
        while let Some(bio) = self.refused.pop_front() {
            if let Err(bio) = cx.submit(self.device.disk.queue, bio) {
                self.refused.push_front(bio);
                return false;
            }
        }
        true
    }

    /// Answers a request, and makes the kernel put another one into its memory.
    fn commit(&mut self, tag: u16, result: i32) {
        if let Some(attached) = &self.attached {
            let memory = self.slots.lend_to_kernel(tag);
            let device = attached.device.as_raw_fd();
            sys::commit(&self.ring, device, (self.number, tag), result, memory);
        }
    }

    /// Lends all memory to the kernel for requests, once it is known how they come.
    fn attach(&mut self) {
        if self.attached.is_some() || self.is_stopping {
            return;
        }
        let Some(attached) = self.device.take_attached(self.number) else {
            return;
        };
        let device = attached.device.as_raw_fd();
        for tag in 0..self.slots.len() {
            let memory = self.slots.lend_to_kernel(tag);
            sys::fetch(&self.ring, device, (self.number, tag), memory);
        }
        self.attached = Some(attached);
    }

    /// Records changes around it: the end, the disk's removal or growth, a hand-over.
    fn look_around(&mut self) {
        self.attach();
        if self.disk_use.as_ref().is_none_or(Use::is_to_end) {
            self.device.ask_end(Reason::Removed);
        }
        self.follow();
        self.is_stopping |= self.device.ended().is_some();
        if let Some(first) = &mut self.first {
            let size = self.device.disk.current_size();
            // A device that is handed over has saved the size that the kernel knows, so that size
            // does not change any more.
            if self.moving == Moving::No && std::mem::replace(&mut first.told_size, size) != size {
                let is_known = self.device.is_growing.swap(true, Ordering::Relaxed);
                if !is_known && !self.device.order(super::keeper::Order::Grow) {
                    self.device.is_growing.store(false, Ordering::Relaxed);
                    first.told_size = 0;
                }
            }
        }
    }

    /// The first queue registers the device among the connections, and gives the other queues their
    /// reactors.
    fn begin_device(&mut self, cx: &mut Cx<'_>) {
        let Some(first) = &mut self.first else { return };
        let reactors = cx.reactors();
        for parts in first.others.drain(..) {
            let reactor = ReactorId((usize::from(parts.number) % reactors) as u16);
            let device = Arc::clone(&self.device);
            let queue = move || Box::new(Self::new(device, parts, None)) as Box<dyn Service>;
            cx.spawn_on(reactor, Box::new(queue));
        }
        let tenant = self.device.disk.tenant;
        first.ticket.arrive(cx.waker());
        match first.is_restored {
            true => first.ticket.reselect(tenant),
            false => {
                if let Err(refusal) = first.ticket.select(tenant) {
                    let what = format_args!("{}: not served: {refusal}", self.device.name);
                    self.device.log.warn(cx.now(), what);
                    self.device.ask_end(Reason::Removed);
                }
            }
        }
    }

    fn is_idle(&self) -> bool {
        self.slots.are_idle() && self.refused.is_empty()
    }
}

impl Service for Queue {
    fn start(&mut self, cx: &mut Cx<'_>) {
        become_io_flusher(cx, DOOR, FREE_USER);
        self.device.join(cx.waker());
        if let Err(error) = self.ring.enable() {
            // The kernel takes no commands from it: none is lent to it, and the device is removed.
            tracing::error!(
                "ublk: {} is not served: its ring cannot be used: {error}",
                self.device.name
            );
            self.is_stopping = true;
            return self.device.ask_end(Reason::Removed);
        }
        let users = &self.device.disk.users;
        self.disk_use = match self.number {
            0 => users.enter(cx.waker()),
            _ => users.enter_as_part(cx.waker()),
        };
        self.member.select(&self.device.disk.name);
        if self.member.arrive(cx.waker()) != Phase::Serving {
            self.moving = Moving::AtRest;
            self.member.settle(None);
        }
        self.begin_device(cx);
        self.look_around();
    }

    fn on_ring(&mut self, cx: &mut Cx<'_>, completed: &[Completion]) {
        for completion in completed {
            self.watch.note(completion);
        }
        self.take(cx);
    }

    fn on_end(&mut self, _cx: &mut Cx<'_>, bio: Bio) {
        let (tag, op, status) = (bio.cookie as u16, bio.op, bio.status);
        drop(bio);
        let done = self.slots.end(tag);
        let status = match op {
            Op::Flush => self.device.end_flush(status),
            _ => status,
        };
        let result = if status.is_ok() { done } else { -status.errno() };
        self.commit(tag, result);
    }

    fn on_wake(&mut self, cx: &mut Cx<'_>) {
        self.look_around();
        self.take(cx);
    }

    fn on_room(&mut self, cx: &mut Cx<'_>) {
        if self.submit_refused(cx) {
            self.take(cx);
        }
    }

    fn end_of_batch(&mut self, cx: &mut Cx<'_>) {
        if self.moving == Moving::Stopping {
            self.save_if_at_rest(cx);
        }
        let is_full = !self.ring.submit();
        if self.is_finished() {
            return self.watch.end(cx.ring_client());
        }
        let takes = self.takes();
        self.watch.keep(cx.ring_client(), &self.ring, is_full, takes);
    }

    /// The processor is left to the asking process: the reactor would poll on it.
    fn busy(&self) -> bool {
        false
    }

    /// Requests of the kernel are served until the device is stopped.
    fn drain(&mut self, _cx: &mut Cx<'_>) {
        match self.member.phase() {
            Phase::Gone => self.device.let_go(),
            _ => self.device.ask_end(Reason::Shutdown),
        }
    }

    fn is_finished(&self) -> bool {
        let is_back = || self.device.ended() == Some(End::Left) || self.slots.are_back();
        self.is_stopping && self.is_idle() && is_back()
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        if self.device.ended() == Some(End::Left) {
            // Not closed: the next daemon finds it free when this process is over, and then nothing
            // here writes to the disk any more.
            let attached = self.attached.take();
            if attached.is_some() {
                left::keep(self.device.named.number, &self.ring);
            }
            std::mem::forget(attached);
        }
        // No other daemon serves it.
        self.device.ask_end(Reason::Removed);
    }
}

/// The result of the commands with which the kernel returns memory when the device is gone.
const GONE: i32 = -libc::ENODEV;
