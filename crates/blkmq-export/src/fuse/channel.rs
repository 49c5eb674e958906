//! A mount's channel to the kernel, as a protocol of `Client`: requests are read while there are some,
//! become bios, and are answered when these have ended.
//!
//! The descriptor never blocks, and is read and written directly: a request of the kernel's is a call of its own either way, and
//! a poll that is armed only while there is nothing to do keeps whoever asks from waking a reactor that is at it.

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use blkmq_core::bio::{Bio, Data};
use blkmq_host::disk::Hearing;
use blkmq_host::ring::Completion;
use blkmq_host::service::Cx;
use rustix::io::Errno;

use super::filesystem::FileSystem;
use super::front_door::DOOR;
use super::protocol::{FIXED_BYTES_MAX, FRONT_BYTES, Malformed, Request, answer, attributes_changed};
use super::requests::{Requests, Transport};
use super::ring::{self, RingMemory};
use super::saved::SavedMount;
use super::slots::{MountMemory, SLOTS, Slots, Work};
use crate::common::admission::Ticket;
use crate::common::client::{Client, Protocol, Shutdown};
use crate::common::io_flusher::become_io_flusher;
use crate::common::life::{Event, Life, Resume};
use crate::common::log::Log;
use crate::handover::{Registration, Saved};

/// The kernel, as the client of a mount.
pub(super) type MountClient = Client<Channel>;

/// A way to the mount.
pub(super) struct Channel {
    filesystem: Arc<FileSystem>,
    requests: Requests<Device>,
    /// What rings are made of, if the kernel agrees to them.
    rings: Option<RingMemory>,
    is_polling: bool,
    /// Every slot is in use, and there may be requests.
    is_short: bool,
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

/// A request, with the slot whose buffer has its data.
type Received = (u16, Result<Request, Malformed>);

/// Makes the client of a mount, with memory that was got before. The kernel asks through rings, if
/// there are some and it agrees.
pub(super) fn client(
    filesystem: Arc<FileSystem>,
    device: OwnedFd,
    (memory, rings): (MountMemory, Option<RingMemory>),
    (ticket, member): (Ticket, Registration),
) -> MountClient {
    let device = Device {
        filesystem: Arc::clone(&filesystem),
        device: Arc::new(device),
        slots: Slots::new(memory),
        front: Box::new([0; FIXED_BYTES_MAX]),
    };
    let mut requests = Requests::new(Arc::clone(&filesystem), device);
    requests.wants_ring = rings.is_some();
    let channel = Channel {
        requests,
        filesystem,
        rings,
        is_polling: false,
        is_short: false,
        is_saved: false,
    };
    Client::new(ticket.of_address(), member, channel)
}

/// Makes the client that continues a mount saved by another daemon.
pub(super) fn restored(
    filesystem: Arc<FileSystem>,
    device: OwnedFd,
    memory: MountMemory,
    places: (Ticket, Registration),
    saved: &SavedMount,
) -> MountClient {
    let mut client = client(filesystem, device, (memory, None), places);
    client.life = Life::Saved(Resume::Serving);
    client.reported_size = saved.size;
    client.protocol.requests.agreed = saved.agreed;
    client
}

impl MountClient {
    /// Takes requests, some at a time.
    fn read_requests(&mut self, cx: &mut Cx<'_>) {
        for _ in 0..REQUESTS_MAX {
            if self.life != Life::Serving || !self.refused.is_empty() {
                return;
            }
            match self.protocol.requests.transport.read() {
                Ok(Some((slot, request))) => self.begin(cx, slot, request),
                Ok(None) => {
                    self.protocol.is_short = true;
                    return;
                }
                Err(Errno::AGAIN) => return self.protocol.rest(cx),
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
        let channel = &mut self.protocol;
        let queue = channel.filesystem.disk.queue;
        match channel.requests.begin(slot, request) {
            Ok(Some(bio)) => self.submit(cx, queue, bio),
            Ok(None) => channel.make_rings(cx),
            Err(broken) => self.break_off(cx, &broken),
        }
    }

    /// The filesystem is gone: somebody has unmounted it.
    #[cold]
    fn lose(&mut self) {
        self.life.apply(Event::Finish);
        self.protocol.filesystem.lose();
    }

    /// What comes from the kernel cannot be understood.
    #[cold]
    fn break_off(&mut self, cx: &mut Cx<'_>, why: &dyn std::fmt::Display) {
        self.warn(cx.now(), format_args!("not served any more: {why}"));
        self.life.apply(Event::Finish);
        self.protocol.filesystem.unmount_and_end();
    }
}

impl Channel {
    /// Has the reactors serve rings, once the kernel has agreed to them.
    fn make_rings(&mut self, cx: &mut Cx<'_>) {
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

impl Protocol for Channel {
    fn log(&self) -> &Log {
        &self.filesystem.log
    }

    fn name(client: &MountClient) -> String {
        client.protocol.filesystem.name.clone()
    }

    fn hearing(_client: &MountClient) -> Option<Hearing> {
        Some(Hearing {
            who: "the kernel, at its FUSE file".to_owned(),
            otherwise: None,
        })
    }

    fn start(client: &mut MountClient, cx: &mut Cx<'_>) -> Result<(), String> {
        client.protocol.requests.start(cx);
        client.reserve(cx, usize::from(SLOTS));
        become_io_flusher(cx, DOOR, FLUSHER);
        let disk = client.protocol.filesystem.disk.clone();
        client.select(cx, &disk)?;
        client.disk = Some(disk);
        client.rest_if_suspended();
        if client.protocol.filesystem.is_over() {
            client.life.apply(Event::Finish);
        }
        Ok(())
    }

    fn on_ring(client: &mut MountClient, _cx: &mut Cx<'_>, completion: &Completion) {
        client.protocol.is_polling &= completion.user != POLL;
    }

    fn take_requests(client: &mut MountClient, cx: &mut Cx<'_>) {
        client.read_requests(cx);
    }

    fn complete(client: &mut MountClient, cx: &mut Cx<'_>, bio: Bio) {
        client.protocol.requests.finish(bio);
        if std::mem::take(&mut client.protocol.is_short) {
            client.come_again(cx);
        }
    }

    fn wake(client: &mut MountClient, cx: &mut Cx<'_>) {
        if client.protocol.filesystem.is_over() {
            client.life.apply(Event::Finish);
        }
        client.protocol.requests.take_answers();
        if std::mem::take(&mut client.protocol.is_short) {
            client.come_again(cx);
        }
    }

    fn tell_size(client: &mut MountClient) {
        // The kernel finds out by itself, a second later.
        let _ = rustix::io::write(client.protocol.device(), &attributes_changed());
    }

    /// A mount that ends is not handed over.
    fn is_idle(&self, life: Life) -> bool {
        life.is_open() && self.requests.transport.is_idle()
    }

    fn save(client: &mut MountClient) -> Result<Option<Saved>, String> {
        let channel = &mut client.protocol;
        channel.is_saved = true;
        let saved = channel
            .filesystem
            .save(client.reported_size, channel.requests.agreed);
        Ok(Some(Saved {
            door: DOOR,
            address: channel.filesystem.address().to_owned(),
            body: saved.bytes(),
            fds: vec![Arc::clone(channel.device())],
        }))
    }

    fn resume(client: &mut MountClient, _cx: &mut Cx<'_>) {
        client.protocol.is_saved = false;
        client.protocol.filesystem.ownership().set(true);
    }

    /// Releases the mount to another daemon. A mount made for a daemon that could not take over
    /// belongs to nobody.
    fn leave(client: &mut MountClient) {
        let channel = &mut client.protocol;
        if std::mem::take(&mut channel.is_saved) {
            channel.filesystem.ownership().set(false);
        }
        channel.filesystem.unmount_and_end();
    }

    /// Who comes while it is being unmounted is served; a removed disk is not.
    fn shut_down(client: &mut MountClient, _cx: &mut Cx<'_>, why: Shutdown) {
        if why == Shutdown::Disk {
            client.life.apply(Event::Finish);
        }
        client.protocol.filesystem.unmount_and_end();
    }

    fn wind_up(client: &mut MountClient, cx: &mut Cx<'_>) {
        if client.life == Life::Gone {
            client.protocol.filesystem.unmount_and_end();
        }
        if std::mem::take(&mut client.protocol.is_polling) {
            cx.ring_client().push_cancel(POLL, CANCEL);
        }
    }

    fn has_ended(&self, _life: Life) -> bool {
        self.filesystem.is_over() && self.requests.transport.is_idle()
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        self.requests.give_up();
        // Nobody else serves it.
        self.filesystem.end();
    }
}

const POLL: u64 = 0;
const CANCEL: u64 = 1;
const FLUSHER: u64 = 3;
/// Requests that one turn takes before others have theirs.
const REQUESTS_MAX: usize = 64;
