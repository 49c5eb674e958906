//! How rings serve a mount where the kernel has FUSE over io_uring enabled: one ring on
//! each reactor, with the queues of some processors. A processor's requests come to that
//! processor's queue, so a reactor runs on the processors whose queues it has: then no request has
//! to wake another processor. `channel` negotiates this with the kernel, and reads what still comes
//! by `/dev/fuse`: interrupts, and forgets.
//!
//! An entry is memory for one request. It belongs to the kernel until a request comes, and again
//! once that is answered.

mod memory;
mod processors;
mod sys;

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use blkmq_core::bio::{Bio, Data};
use blkmq_core::ids::ReactorId;
use blkmq_host::ring::Completion;
use blkmq_host::service::{Cx, Service};

use self::processors::Bound;
use self::sys::{commit, register};
use super::filesystem::FileSystem;
use super::front_door::DOOR;
use super::protocol::{RING_HEADER_BYTES, Request, commit_id, put_ring_answer};
use super::requests::{Requests, Transport};
use super::slots::Work;
use crate::common::client::{Client, Protocol, Shutdown};
use crate::common::command_ring::{CommandRing, Ended, FREE_USER, Watch};
use crate::common::io_flusher::become_io_flusher;
use crate::common::life::{Event, Life};
use crate::common::log::Log;
use crate::common::sys::Buffer;
use crate::handover::Saved;

pub(super) use self::memory::RingMemory;
use self::memory::{HEADER_BYTES, OfReactor};

/// Makes the reactors serve the queues of all processors.
pub(super) fn spawn(
    cx: &mut Cx<'_>,
    filesystem: &Arc<FileSystem>,
    device: &Arc<OwnedFd>,
    memory: RingMemory,
) {
    for (number, part) in (0..).zip(memory.into_parts()) {
        let (filesystem, device) = (Arc::clone(filesystem), Arc::clone(device));
        let client = move || {
            let ring = RingChannel::new(filesystem, device, part);
            Box::new(Client::part(None, ring)) as Box<dyn Service>
        };
        cx.spawn_on(ReactorId(number), Box::new(client));
    }
}

/// One reactor's ring.
struct RingChannel {
    filesystem: Arc<FileSystem>,
    requests: Requests<Entries>,
    processors: Vec<usize>,
    bound: Option<Bound>,
    /// Kept to reuse its memory.
    ended: Vec<Ended>,
    watch: Watch,
}

/// The entries of a ring.
struct Entries {
    device: Arc<OwnedFd>,
    ring: CommandRing,
    all: Vec<Entry>,
    /// Requests under way.
    under_way: usize,
}

/// Memory for one request.
struct Entry {
    queue: u16,
    /// Lent to the kernel, or to a bio, or ours.
    buffer: Buffer,
    commit_id: u64,
    unique: u64,
    work: Work,
    /// The entry has a request that is not answered yet.
    is_under_way: bool,
}

impl RingChannel {
    fn new(filesystem: Arc<FileSystem>, device: Arc<OwnedFd>, memory: OfReactor) -> Self {
        let (ring, processors, buffers) = memory.into_buffers();
        let entry = |(queue, buffer)| Entry {
            queue,
            buffer,
            commit_id: 0,
            unique: 0,
            work: Work::None,
            is_under_way: false,
        };
        let all: Vec<Entry> = buffers.map(entry).collect();
        let entries = Entries {
            device,
            ring,
            all,
            under_way: 0,
        };
        Self {
            ended: Vec::with_capacity(entries.all.len()),
            requests: Requests::new(Arc::clone(&filesystem), entries),
            filesystem,
            processors,
            bound: None,
            watch: Watch::default(),
        }
    }
}

/// One of the parts of a mount's client: the channel that has the descriptor is the one that is
/// counted, and handed over.
type RingClient = Client<RingChannel>;

impl RingClient {
    fn take_one(&mut self, cx: &mut Cx<'_>, ended: Ended) {
        let slot = ended.user as u16;
        let ring = &mut self.protocol;
        let entries = &mut ring.requests.transport;
        match ended.result {
            // After the end, the kernel is to abort new requests.
            0 if self.life != Life::Serving => entries.lose(slot),
            0 => {
                let request = entries.receive(slot);
                let queue = ring.filesystem.disk.queue;
                match ring.requests.begin(slot, request) {
                    Ok(Some(bio)) => self.submit(cx, queue, bio),
                    Ok(None) => {}
                    Err(broken) => {
                        ring.requests.transport.settle(slot);
                        ring.filesystem.unmount_and_end();
                        self.warn(cx.now(), format_args!("not served any more: {broken}"));
                    }
                }
            }
            // The filesystem is gone; the channel that has its descriptor reports that.
            GONE => entries.lose(slot),
            error => {
                entries.lose(slot);
                let error = std::io::Error::from_raw_os_error(-error);
                self.warn(cx.now(), format_args!("lost an entry of its ring: {error}"));
            }
        }
    }
}

impl Protocol for RingChannel {
    /// The processor is left to the asking process: the reactor would poll on it.
    const POLLS: bool = false;

    fn log(&self) -> &Log {
        &self.filesystem.log
    }

    fn name(client: &RingClient) -> String {
        client.protocol.filesystem.name.clone()
    }

    fn start(client: &mut RingClient, cx: &mut Cx<'_>) -> Result<(), String> {
        let ring = &mut client.protocol;
        ring.bound = Bound::to(&ring.processors);
        ring.requests.start(cx);
        let (disk, entries) = (ring.filesystem.disk.clone(), ring.requests.transport.all.len());
        client.reserve(cx, entries);
        become_io_flusher(cx, DOOR, FREE_USER);
        if client.select(cx, &disk).is_err() {
            client.protocol.filesystem.unmount_and_end();
        }
        client.disk = Some(disk);
        client.protocol.requests.transport.register();
        if client.protocol.filesystem.is_over() {
            client.life.apply(Event::Finish);
        }
        Ok(())
    }

    fn on_ring(client: &mut RingClient, _cx: &mut Cx<'_>, completion: &Completion) {
        client.protocol.watch.note(completion);
    }

    fn take_requests(client: &mut RingClient, cx: &mut Cx<'_>) {
        if !client.refused.is_empty() {
            return;
        }
        let mut ended = std::mem::take(&mut client.protocol.ended);
        client.protocol.requests.transport.ring.take(&mut ended);
        for ended in ended.drain(..) {
            client.take_one(cx, ended);
        }
        client.protocol.ended = ended;
    }

    fn complete(client: &mut RingClient, _cx: &mut Cx<'_>, bio: Bio) {
        client.protocol.requests.finish(bio);
    }

    fn wake(client: &mut RingClient, _cx: &mut Cx<'_>) {
        if client.protocol.filesystem.is_over() {
            client.life.apply(Event::Finish);
        }
        client.protocol.requests.take_answers();
    }

    fn end_of_batch(client: &mut RingClient, cx: &mut Cx<'_>) {
        let (takes, is_ending) = (client.refused.is_empty(), client.life.is_ending());
        let RingChannel { requests, watch, .. } = &mut client.protocol;
        let ring = &requests.transport.ring;
        let is_full = !ring.submit();
        if !is_ending {
            watch.keep(cx.ring_client(), ring, is_full, takes);
        }
    }

    fn is_idle(&self, _life: Life) -> bool {
        self.requests.transport.is_idle()
    }

    /// The channel that has the descriptor handles hand-overs.
    fn save(_client: &mut RingClient) -> Result<Option<Saved>, String> {
        Ok(None)
    }

    fn resume(_client: &mut RingClient, _cx: &mut Cx<'_>) {}

    /// The channel that has the descriptor handles the end of the daemon.
    fn shut_down(client: &mut RingClient, _cx: &mut Cx<'_>, why: Shutdown) {
        if why == Shutdown::Disk {
            client.protocol.filesystem.unmount_and_end();
        }
    }

    fn wind_up(client: &mut RingClient, cx: &mut Cx<'_>) {
        client.protocol.watch.end(cx.ring_client());
    }

    fn has_ended(&self, _life: Life) -> bool {
        self.requests.transport.is_idle()
    }
}

impl Drop for RingChannel {
    fn drop(&mut self) {
        self.requests.give_up();
        // Where it was unmounted, the kernel has returned all entries, and their memory is free. If
        // somebody still has it open, the kernel keeps entries until the ring is closed, and some
        // time after: that memory is leaked rather than reused.
        let mut ended = std::mem::take(&mut self.ended);
        self.requests.transport.ring.take(&mut ended);
        for ended in ended {
            self.requests.transport.lose(ended.user as u16);
        }
    }
}

impl Entries {
    /// Gives all entries to the kernel.
    fn register(&mut self) {
        let device = self.device.as_raw_fd();
        for (user, entry) in (0..).zip(&mut self.all) {
            let memory = entry.lend_to_kernel();
            register(&self.ring, device, entry.queue, memory, user);
        }
    }

    /// Decodes the request that has come into an entry.
    fn receive(&mut self, slot: u16) -> Result<Request, super::protocol::Malformed> {
        let entry = &mut self.all[usize::from(slot)];
        entry.buffer.take_back();
        let area = entry.header();
        let request = Request::parse_in_ring(area);
        entry.commit_id = commit_id(area);
        entry.is_under_way = true;
        self.under_way += 1;
        request
    }

    /// Nothing more comes into an entry.
    fn lose(&mut self, slot: u16) {
        self.all[usize::from(slot)].buffer.take_back();
    }

    /// The request of an entry is not under way any more.
    fn settle(&mut self, slot: u16) {
        let entry = &mut self.all[usize::from(slot)];
        self.under_way -= usize::from(std::mem::take(&mut entry.is_under_way));
    }

    /// Gives an entry back to the kernel, with an answer.
    fn commit(&mut self, slot: u16, unique: u64, errno: i32, data_bytes: usize) {
        let entry = &mut self.all[usize::from(slot)];
        put_ring_answer(entry.header_mut(), unique, errno, data_bytes);
        let commit_id = entry.commit_id;
        let _ = entry.lend_to_kernel();
        let queue = entry.queue;
        self.settle(slot);
        let device = self.device.as_raw_fd();
        commit(&self.ring, device, queue, commit_id, slot.into());
    }
}

impl Entry {
    fn lend_to_kernel(&mut self) -> blkmq_core::bio::Lent {
        let bytes = self.buffer.capacity() as u32;
        self.buffer.lend(0, bytes)
    }

    fn header(&self) -> &[u8; RING_HEADER_BYTES] {
        let area = self.buffer.bytes().first_chunk();
        area.expect("a page at least")
    }

    fn header_mut(&mut self) -> &mut [u8; RING_HEADER_BYTES] {
        let area = self.buffer.bytes_mut().first_chunk_mut();
        area.expect("a page at least")
    }

    fn data(&mut self) -> &mut [u8] {
        &mut self.buffer.bytes_mut()[HEADER_BYTES..]
    }
}

impl Transport for Entries {
    fn take(&mut self, slot: u16, unique: u64, work: Work) {
        let entry = &mut self.all[usize::from(slot)];
        (entry.unique, entry.work) = (unique, work);
    }

    fn request(&self, slot: u16) -> (u64, Work) {
        let entry = &self.all[usize::from(slot)];
        (entry.unique, entry.work)
    }

    fn set_work(&mut self, slot: u16, work: Work) {
        self.all[usize::from(slot)].work = work;
    }

    fn lend_for_read(&mut self, slot: u16, bytes: usize) -> Data {
        let buffer = &mut self.all[usize::from(slot)].buffer;
        Data::Flat(buffer.lend(HEADER_BYTES, bytes as u32))
    }

    fn lend_write(&mut self, slot: u16, bytes: usize) -> Data {
        self.lend_for_read(slot, bytes)
    }

    fn take_back(&mut self, slot: u16) {
        let buffer = &mut self.all[usize::from(slot)].buffer;
        if buffer.is_lent() {
            buffer.take_back();
        }
    }

    fn answer(&mut self, slot: u16, unique: u64, errno: i32, data: &[u8]) {
        self.all[usize::from(slot)].data()[..data.len()].copy_from_slice(data);
        self.commit(slot, unique, errno, data.len());
    }

    fn answer_read(&mut self, slot: u16, unique: u64, before: usize, len: usize) {
        if before > 0 {
            let data = self.all[usize::from(slot)].data();
            data.copy_within(before..before + len, 0);
        }
        self.commit(slot, unique, 0, len);
    }

    fn put(&mut self, slot: u16) {
        self.all[usize::from(slot)].work = Work::None;
    }

    fn is_idle(&self) -> bool {
        self.under_way == 0
    }
}

/// The result of an entry's command when the filesystem ends.
const GONE: i32 = -libc::ENOTCONN;
