//! Polled requests: those that go through a ring of their own whose completions are found by polling the
//! device (IOPOLL), and the test whether a device can be polled at all. `hctx` makes such a ring when
//! polling is switched on; the reactor's ring takes the rest.

use std::io;
use std::sync::atomic::Ordering;

use blkmq_core::bio::{Flags, Op};
use blkmq_core::ids::DiskId;
use blkmq_host::ring::{Completion, RingClient, RingConfig, RingHandle};
use io_uring::{opcode, types::Fd};

use super::disk::{Backing, FileDisk};
use super::disks::Disks;
use super::hctx::Target;
use super::slot::{Slot, Step};
use super::sys;
use crate::mapping::Mapping;

/// A hardware context's ring onto devices that are polled.
pub(super) struct Polled {
    pub(super) ring_client: RingClient,
    /// For each disk whose device is polled: its file in the ring.
    targets: Vec<Option<Target>>,
    /// Requests that are in the ring.
    in_flight: u32,
    /// Requests that ended here and have not been counted.
    ended: u64,
    /// Polling was switched off: requests in flight here end, none is added.
    is_closing: bool,
}

impl Polled {
    /// Makes the ring for at most `depth` requests, if one of the devices can be polled.
    pub(super) fn open(disks: &Disks, depth: u32) -> io::Result<Option<Self>> {
        if disks.iter().all(|disk| disk.polling().is_err()) {
            return Ok(None);
        }
        let ring = RingHandle::new_polled(RingConfig {
            entries: depth.clamp(1, ENTRIES_MAX),
            // One for each request, and one for its cancellation.
            completions: 2 * depth,
            files: (disks.len() as u32).min(RingConfig::default().files),
            ..RingConfig::default()
        })?;
        let target = |id| {
            let disk = disks.get(id).filter(|disk| disk.polling().is_ok())?;
            Some(Target::new(disk, &ring))
        };
        Ok(Some(Self {
            targets: (0..disks.len() as u32).map(DiskId).map(target).collect(),
            ring_client: ring.open_client(),
            in_flight: 0,
            ended: 0,
            is_closing: false,
        }))
    }

    /// Returns whether a new request goes here: only reads and writes, and none that a device flush
    /// may follow.
    pub(super) fn takes(&self, slot: &Slot, disk: &FileDisk) -> bool {
        let is_durable = slot.op == Op::Write && slot.flags.has(Flags::FUA);
        slot.step == Step::Transfer
            && slot.op.has_data()
            && !is_durable
            && !self.is_closing
            && self.targets.get(slot.disk as usize).is_some_and(Option::is_some)
            && !disk.lacks.polling.load(Ordering::Relaxed)
    }

    /// The file of a request that it has taken, as the ring names it.
    pub(super) fn target(&self, slot: &Slot) -> Target {
        self.targets[slot.disk as usize].expect("only requests onto polled devices are taken")
    }

    /// Unregisters a disk's file from the ring. Its replacement is not polled, until polling is
    /// switched off and on.
    pub(super) fn forget(&mut self, disk: DiskId) {
        let target = self.targets.get_mut(disk.index()).and_then(Option::take);
        target
            .iter()
            .for_each(|target| target.unregister(self.ring_client.ring()));
    }

    /// A request's entry was pushed.
    pub(super) fn pushed(&mut self) {
        self.in_flight += 1;
    }

    /// A request's entry has completed, and with it the request or not.
    pub(super) fn completed(&mut self, has_ended: bool) {
        self.in_flight -= 1;
        self.ended += u64::from(has_ended);
    }

    /// Polls the devices once, and appends the completions.
    pub(super) fn look(&self, into: &mut Vec<Completion>) {
        if self.in_flight > 0 {
            self.ring_client.ring().reap();
            self.ring_client.take(into);
        }
    }

    /// The number of requests that ended here since the last call.
    pub(super) fn take_ended(&mut self) -> u64 {
        std::mem::take(&mut self.ended)
    }

    /// Begins or stops taking requests.
    pub(super) fn set_open(&mut self, is_open: bool) {
        self.is_closing = !is_open;
    }

    /// Returns whether it takes no more requests and has none: it can be dropped.
    pub(super) fn is_over(&self) -> bool {
        self.is_closing && self.in_flight == 0
    }

    /// Unregisters the files. The kernel dismantles rings some time after they are closed, and
    /// would hold the files' locks until then.
    pub(super) fn let_go(&self) {
        let registered = self.targets.iter().flatten();
        registered.for_each(|target| target.unregister(self.ring_client.ring()));
    }
}

impl FileDisk {
    /// Checks whether the device can be polled (IOPOLL). The first call finds out, and blocks for
    /// one small read.
    ///
    /// # Errors
    /// The reason why not, for people.
    pub fn polling(&self) -> Result<(), &str> {
        let tried = self.polling.get_or_init(|| self.try_polling());
        tried.as_ref().map_err(String::as_str).copied()
    }

    fn try_polling(&self) -> Result<(), String> {
        if !self.is_direct() {
            return Err("it goes through the page cache".to_owned());
        }
        let read = self.read_polled(self.range() as usize);
        match read.map_err(|error| error.raw_os_error()) {
            Err(Some(libc::EOPNOTSUPP)) => return Err("its device has no poll queues".to_owned()),
            Err(errno) => {
                let error = errno.map_or(io::ErrorKind::UnexpectedEof.into(), io::Error::from_raw_os_error);
                return Err(format!("a polled read was tried and failed ({error})"));
            }
            Ok(()) => {}
        }
        // Some kernels take the read and let the device interrupt: then the reactor's ring costs
        // less.
        if has_poll_queues(self.device) == Some(false) {
            return Err("its device has no poll queues".to_owned());
        }
        Ok(())
    }

    /// Reads the first `len` bytes through a polled ring.
    fn read_polled(&self, len: usize) -> io::Result<()> {
        let ring = RingHandle::new_polled(RingConfig {
            entries: 1,
            completions: 2,
            files: 0,
            ..RingConfig::default()
        })?;
        let memory = Mapping::new(len)?;
        let (ring_client, piece) = (ring.open_client(), memory.lend(0..len));
        let entry = opcode::Read::new(Fd(self.fd()), piece.start().as_ptr(), piece.len());
        sys::push(&ring_client, entry.build(), 0);
        let mut completed = Vec::new();
        while completed.is_empty() {
            ring.wait(None);
            ring.reap();
            ring_client.take(&mut completed);
        }
        match completed[0].result {
            errno @ ..0 => Err(io::Error::from_raw_os_error(-errno)),
            read if read as usize == len.min(self.size() as usize) => Ok(()),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

/// What the system reports of the queues of a device, or of the one below a filesystem; `None`
/// where there is no single one.
fn has_poll_queues(device: Backing) -> Option<bool> {
    let (Backing::Filesystem(number) | Backing::Block(number)) = device;
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    // A partition's queue is that of the whole device, one level up.
    let said = ["queue", "../queue"].into_iter().find_map(|place| {
        std::fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/{place}/io_poll")).ok()
    })?;
    Some(said.trim() != "0")
}

/// Submission queue entries; for more requests the queue is submitted in between.
const ENTRIES_MAX: u32 = 1024;
