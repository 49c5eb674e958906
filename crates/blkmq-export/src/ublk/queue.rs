//! One queue of a device as a protocol of `Client`: requests come from the kernel, become bios, and are
//! answered when these have ended. All answers of a turn go to the kernel in one system call, together
//! with memory for as many requests. When another daemon takes over, the kernel gives the device to it
//! once this process has ended, with the requests that came meanwhile.

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use blkmq_core::bio::{Bio, Op};
use blkmq_core::ids::ReactorId;
use blkmq_host::disk::Hearing;
use blkmq_host::ring::Completion;
use blkmq_host::service::{Cx, Service};

use super::control_thread::Order;
use super::device::{Attached, Device, End, Reason};
use super::front_door::DOOR;
use super::protocol::{DATA_BYTES_MAX, Request, Shape};
use super::release;
use super::slots::{QueueMemory, Slots};
use super::sys;
use crate::common::admission::Ticket;
use crate::common::client::{Client, Protocol, Shutdown};
use crate::common::command_ring::{CommandRing, Ended, FREE_USER, Watch};
use crate::common::io_flusher::become_io_flusher;
use crate::common::life::{Event, Life, Resume};
use crate::common::log::Log;
use crate::handover::{Registration, Saved};

/// A queue, as a part of the kernel's use of the device.
pub(super) type QueueClient = Client<Queue>;

/// The parts of one queue.
pub(super) struct QueueParts {
    pub(super) number: u16,
    pub(super) memory: QueueMemory,
    pub(super) member: Registration,
}

/// What the first queue does for all queues.
pub(super) struct First {
    /// The size that the kernel was told last.
    pub(super) reported_size: u64,
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
    /// Kept to reuse its memory.
    ended: Vec<Ended>,
    watch: Watch,
}

/// Makes the first queue of a device. The device's ticket is its own.
pub(super) fn first(device: Arc<Device>, parts: QueueParts, first: First, ticket: Ticket) -> QueueClient {
    let (mut queue, member) = Queue::new(device, parts);
    queue.first = Some(first);
    Client::new(ticket.of_address(), member, queue)
}

/// Makes the first queue of a device that another daemon has saved.
pub(super) fn restored(device: Arc<Device>, parts: QueueParts, of: First, ticket: Ticket) -> QueueClient {
    let mut client = first(device, parts, of, ticket);
    client.life = Life::Saved(Resume::Serving);
    client
}

impl QueueClient {
    /// Returns whether what comes from the kernel is taken.
    fn takes(&self) -> bool {
        self.life.is_ending() || self.life == Life::Serving && self.refused.is_empty()
    }

    fn take_one(&mut self, cx: &mut Cx<'_>, ended: Ended) {
        let tag = ended.user as u16;
        let queue = &mut self.protocol;
        queue.slots.take_from_kernel(tag);
        match ended.result {
            // What comes after the end is sent again to the next daemon.
            0 if self.life.is_ending() => {}
            0 => {
                let of_disk = queue.device.disk.queue;
                if let Some(bio) = queue.begin(cx, tag) {
                    self.submit(cx, of_disk, bio);
                }
            }
            GONE => self.note_gone(),
            error => {
                let error = std::io::Error::from_raw_os_error(-error);
                let what = format_args!("{}: a request is lost: {error}", queue.device.name);
                queue.device.log.warn(cx.now(), queue.device.about(), what);
                self.note_gone();
            }
        }
    }

    /// The device is gone if all memory is back: somebody has removed it.
    fn note_gone(&mut self) {
        let Queue { slots, device, .. } = &self.protocol;
        let is_idle = slots.are_idle() && self.refused.is_empty();
        if slots.are_back() && is_idle && !self.life.is_ending() && !device.is_ending() {
            tracing::info!("ublk: {}: removed, and not served any more", device.name);
            device.ask_end(Reason::Removed);
        }
    }

    /// The first queue registers the device among the connections, and gives the other queues their
    /// reactors.
    fn begin_device(&mut self, cx: &mut Cx<'_>) {
        let Queue { device, first, .. } = &mut self.protocol;
        let Some(first) = first else { return };
        self.reported_size = first.reported_size;
        let reactors = cx.reactors();
        for parts in first.others.drain(..) {
            let reactor = ReactorId((usize::from(parts.number) % reactors) as u16);
            let device = Arc::clone(device);
            let client = move || {
                let (queue, member) = Queue::new(device, parts);
                Box::new(Client::part(Some(member), queue)) as Box<dyn Service>
            };
            cx.spawn_on(reactor, Box::new(client));
        }
        let device = Arc::clone(device);
        if let Err(refusal) = self.count_among(&device.disk) {
            let what = format_args!("{}: not served: {refusal}", device.name);
            device.log.warn(cx.now(), device.about(), what);
            device.ask_end(Reason::Removed);
        }
    }
}

impl Queue {
    fn new(device: Arc<Device>, parts: QueueParts) -> (Self, Registration) {
        let (ring, slots) = parts.memory.into_parts();
        let depth = usize::from(slots.len());
        let queue = Self {
            device,
            number: parts.number,
            ring,
            slots,
            attached: None,
            first: None,
            ended: Vec::with_capacity(2 * depth),
            watch: Watch::default(),
        };
        (queue, parts.member)
    }

    /// Begins the request of a tag. Returns the bio that it needs.
    fn begin(&mut self, cx: &Cx<'_>, tag: u16) -> Option<Bio> {
        let attached = self.attached.as_ref()?;
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
            Ok(request) => Some(self.bio(tag, &request)),
            Err(refused) => {
                let what = format_args!("{}: a request is refused: {refused}", self.device.name);
                self.device.log.warn(cx.now(), self.device.about(), what);
                self.commit(tag, -refused.errno());
                None
            }
        }
    }

    fn bio(&mut self, tag: u16, request: &Request) -> Bio {
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
        bio
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
        if self.attached.is_some() {
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

    /// Makes requests come to a device that had to wait.
    fn begin_when_served(&mut self) {
        let Some(first) = &mut self.first else { return };
        // The saver undoes this, so neither overtakes the other.
        self.device.set_saved(false);
        if !std::mem::replace(&mut first.has_begun, true) && !self.device.order(Order::Begin(None)) {
            self.device.ask_end(Reason::Removed);
        }
    }
}

impl Protocol for Queue {
    /// The processor is left to the asking process: the reactor would poll on it.
    const POLLS: bool = false;

    fn log(&self) -> &Log {
        &self.device.log
    }

    fn name(client: &QueueClient) -> String {
        client.protocol.device.name.clone()
    }

    fn hearing(client: &QueueClient) -> Option<Hearing> {
        let Queue { number, device, .. } = &client.protocol;
        (*number == 0).then(|| Hearing {
            who: format!("the kernel, at {}", device.name),
            otherwise: None,
        })
    }

    fn start(client: &mut QueueClient, cx: &mut Cx<'_>) -> Result<(), String> {
        let depth = usize::from(client.protocol.slots.len());
        client.reserve(cx, depth);
        become_io_flusher(cx, DOOR, FREE_USER);
        let device = Arc::clone(&client.protocol.device);
        device.join(cx.waker());
        // If the kernel takes no commands from it, none is lent to it, and the device is removed.
        let enabled = client.protocol.ring.enable();
        enabled.map_err(|error| format!("its ring cannot be used: {error}"))?;
        if client.use_disk(cx, &device.disk).is_err() {
            device.ask_end(Reason::Removed);
        }
        client.disk = Some(device.disk.clone());
        client.begin_device(cx);
        client.rest_if_suspended();
        client.protocol.attach();
        Ok(())
    }

    fn on_ring(client: &mut QueueClient, _cx: &mut Cx<'_>, completion: &Completion) {
        client.protocol.watch.note(completion);
    }

    fn take_requests(client: &mut QueueClient, cx: &mut Cx<'_>) {
        if !client.takes() {
            return;
        }
        let mut ended = std::mem::take(&mut client.protocol.ended);
        client.protocol.ring.take(&mut ended);
        for ended in ended.drain(..) {
            client.take_one(cx, ended);
        }
        client.protocol.ended = ended;
    }

    fn complete(client: &mut QueueClient, _cx: &mut Cx<'_>, bio: Bio) {
        let (tag, op, status) = (bio.cookie as u16, bio.op, bio.status);
        drop(bio);
        let queue = &mut client.protocol;
        let done = queue.slots.end(tag);
        let status = match op {
            Op::Flush => queue.device.end_flush(status),
            _ => status,
        };
        let result = if status.is_ok() { done } else { -status.errno() };
        queue.commit(tag, result);
    }

    fn wake(client: &mut QueueClient, _cx: &mut Cx<'_>) {
        if client.protocol.device.ended().is_some() {
            client.life.apply(Event::Finish);
        }
        if !client.life.is_ending() {
            client.protocol.attach();
        }
    }

    fn tell_size(client: &mut QueueClient) {
        let Queue { device, first, .. } = &client.protocol;
        if first.is_none() {
            return;
        }
        let is_known = device.is_growing.swap(true, Ordering::Relaxed);
        if !is_known && !device.order(Order::Grow) {
            device.is_growing.store(false, Ordering::Relaxed);
            client.reported_size = 0;
        }
    }

    fn end_of_batch(client: &mut QueueClient, cx: &mut Cx<'_>) {
        let is_full = !client.protocol.ring.submit();
        if !client.is_finished() {
            let takes = client.takes();
            let Queue { watch, ring, .. } = &mut client.protocol;
            watch.keep(cx.ring_client(), ring, is_full, takes);
        }
    }

    /// A device that ends is not handed over.
    fn is_idle(&self, life: Life) -> bool {
        life.is_open() && self.slots.are_idle()
    }

    fn save(client: &mut QueueClient) -> Result<Option<Saved>, String> {
        let Queue { device, first, .. } = &client.protocol;
        let Some(address) = &device.address else {
            return Err("cannot be handed over: give it a number, and have root serve it".to_owned());
        };
        if first.is_none() {
            return Ok(None);
        }
        device.set_saved(true);
        Ok(Some(Saved {
            door: DOOR,
            address: address.clone(),
            body: device.save(client.reported_size).bytes(),
            fds: vec![Arc::clone(&device.control)],
        }))
    }

    fn resume(client: &mut QueueClient, _cx: &mut Cx<'_>) {
        client.protocol.begin_when_served();
    }

    fn leave(client: &mut QueueClient) {
        client.protocol.device.let_go();
    }

    /// Requests of the kernel are served until the device is stopped.
    fn shut_down(client: &mut QueueClient, _cx: &mut Cx<'_>, why: Shutdown) {
        client.protocol.device.ask_end(match why {
            Shutdown::Daemon => Reason::Shutdown,
            Shutdown::Disk => Reason::Removed,
        });
    }

    fn wind_up(client: &mut QueueClient, cx: &mut Cx<'_>) {
        if client.life == Life::Gone {
            client.protocol.device.ask_end(Reason::Removed);
        }
        if client.is_finished() {
            client.protocol.watch.end(cx.ring_client());
        }
    }

    fn has_ended(&self, _life: Life) -> bool {
        let is_back = |end| end == End::Left || self.slots.are_back();
        self.slots.are_idle() && self.device.ended().is_some_and(is_back)
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        if self.device.ended() == Some(End::Left) {
            // Not closed: the next daemon finds it free when this process is over, and then nothing
            // here writes to the disk any more.
            let attached = self.attached.take();
            if attached.is_some() {
                release::keep(self.device.named.number, &self.ring);
            }
            std::mem::forget(attached);
        }
        // No other daemon serves it.
        self.device.ask_end(Reason::Removed);
    }
}

/// The result of the commands with which the kernel returns memory when the device is gone.
const GONE: i32 = -libc::ENODEV;
