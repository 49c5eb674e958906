//! The device that a front end sets up by messages: features, memory, and rings that are set up and may be
//! served. `connection` receives the messages, stops the rings that a message touches, and starts those that
//! are ready.

mod record;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use blkmq_host::disk::Disk;
use blkmq_host::service::Waker;
use rustix::net::{SendFlags, send};

use super::codec::{Header, InflightSpec, Message, RegionSpec, RingAddresses};
use super::config_space::{
    self, CONFIG_WCE, EVENT_INDEX, FLUSH, INDIRECT, PROTOCOL_FEATURES, QUEUES_MAX, RING_PACKED, WRITEBACK,
};
use super::descriptors::{Descriptors, is_event};
use super::memory::{GuestMemory, GuestMemoryError, REGIONS_MAX};
use super::queue::{Control, Ended, Report, Start};
use super::ring::Broken;
use super::saved::{SavedFrontEnd, SetUp};
use super::signal::signal;
use super::sys::Mapping;
use super::virtqueue::{Layout, Virtqueue};

/// A disk as one front end has set it up.
pub(super) struct Device {
    disk: Disk,
    /// Most data descriptors of a request, as the address has it (`seg_max`).
    segments_max: u32,
    features: u64,
    protocol: u64,
    memory: Arc<GuestMemory>,
    rings: Vec<RingSetup>,
    inflight: Option<(Arc<Mapping>, InflightSpec)>,
    /// The channel that tells the front end of changes.
    channel: Option<Arc<OwnedFd>>,
    is_writeback: bool,
    status: u64,
    /// A rule was broken: nothing is served until a reset.
    is_broken: bool,
    /// A rule that a ring broke before it was served.
    unusable: Option<Broken>,
    /// Rings whose addresses lie outside of the memory, which may still be shared; not logged yet.
    unheard: Vec<(usize, RingAddresses)>,
    /// Most data descriptors of a request, as the front end has read it last.
    told_segments: Option<u32>,
}

#[derive(Default)]
struct RingSetup {
    size: u16,
    addresses: Option<RingAddresses>,
    base: u32,
    kick: Option<Arc<OwnedFd>>,
    call: Option<Arc<OwnedFd>>,
    err: Option<Arc<OwnedFd>>,
    enabled: Option<bool>,
    /// Addresses that were logged as outside of the memory.
    outside: Option<RingAddresses>,
    served: Option<Arc<Control>>,
}

/// The answer to a message.
#[derive(Debug)]
pub(super) enum Answer {
    /// Nothing, unless an acknowledgement is asked for.
    Done,
    Number(u64),
    Bytes(Vec<u8>),
    Inflight(InflightSpec, OwnedFd),
}

/// Why a message is refused.
#[derive(Debug, thiserror::Error)]
pub(super) enum Refusal {
    #[error("ring {0} rejected: there are {QUEUES_MAX}")]
    Ring(u32),
    #[error("{what} {value:#x} rejected: {allowed}")]
    Value {
        what: &'static str,
        value: u64,
        allowed: &'static str,
    },
    #[error("a descriptor that is no event")]
    Event,
    #[error("memory: {0}")]
    Memory(#[from] GuestMemoryError),
    #[error("record of what is in flight: {0}")]
    Inflight(#[from] io::Error),
}

/// The rings that a message touches: they have to end before.
pub(super) enum Touched {
    None,
    One(u32),
    All,
}

impl Device {
    pub(super) fn new(disk: Disk, segments_max: u32) -> Self {
        Self {
            disk,
            segments_max,
            features: 0,
            protocol: 0,
            memory: Arc::default(),
            rings: std::iter::repeat_with(RingSetup::default)
                .take(QUEUES_MAX.into())
                .collect(),
            inflight: None,
            channel: None,
            is_writeback: true,
            status: 0,
            is_broken: false,
            unusable: None,
            unheard: Vec::new(),
            told_segments: None,
        }
    }

    /// Tells the front end that the configuration space or the status has changed, if it wants to
    /// know. A front end that does not receive this is not told any more: it finds the change when
    /// it reads.
    pub(super) fn tell_of_change(&mut self) {
        let Some(channel) = &self.channel else { return };
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let message = Header::config_change();
        if send(channel, &message, flags) != Ok(message.len()) {
            self.channel = None;
        }
    }

    /// Returns whether the front end has a channel on which it is told of changes.
    pub(super) fn hears_of_changes(&self) -> bool {
        self.channel.is_some()
    }

    pub(super) fn disk(&self) -> &Disk {
        &self.disk
    }

    pub(super) fn touched(message: &Message) -> Touched {
        match *message {
            Message::SetVringNum { index, .. }
            | Message::SetVringAddr { index, .. }
            | Message::SetVringBase { index, .. }
            | Message::SetVringKick { index, .. }
            | Message::GetVringBase { index }
            | Message::SetVringEnable { index, on: false } => Touched::One(index),
            Message::SetInflightFd(_)
            | Message::ResetDevice
            | Message::ResetOwner
            | Message::SetFeatures(_)
            | Message::SetStatus(0) => Touched::All,
            _ => Touched::None,
        }
    }

    /// Makes these rings end. Returns whether all have.
    pub(super) fn stop(&self, touched: &Touched) -> bool {
        let is_touched = |index: usize| match touched {
            Touched::None => false,
            Touched::One(one) => *one as usize == index,
            Touched::All => true,
        };
        let rings = self.rings.iter().enumerate();
        let served = rings.filter_map(|(index, ring)| ring.served.as_ref().filter(|_| is_touched(index)));
        served.inspect(|control| control.stop()).count() == 0
    }

    /// Records the rings that have ended. Returns the first rule that was broken.
    pub(super) fn note_ends(&mut self) -> Option<Broken> {
        let mut broken = None;
        for ring in &mut self.rings {
            let Some(ended) = ring.served.as_ref().and_then(|control| control.ended()) else {
                continue;
            };
            ring.served = None;
            let Ended { base, broken: why } = ended;
            ring.base = base.unwrap_or(ring.base);
            broken = broken.or(why);
            if why.is_some()
                && let Some(err) = &ring.err
            {
                signal(err);
            }
        }
        broken = broken.or(self.unusable.take());
        if broken.is_some() {
            self.is_broken = true;
            self.status |= NEEDS_RESET;
            self.stop(&Touched::All);
        }
        broken
    }

    pub(super) fn has_served(&self) -> bool {
        self.rings.iter().any(|ring| ring.served.is_some())
    }

    /// What starts the rings that are ready, by their numbers.
    pub(super) fn start(&mut self, waker: impl Fn() -> Waker) -> Vec<(usize, Start)> {
        let mut ready = Vec::new();
        if self.is_broken {
            return ready;
        }
        for index in 0..self.rings.len() {
            if let Some(start) = self.start_one(index, &waker) {
                ready.push((index, start));
            }
        }
        ready
    }

    /// Returns whether there are rings to be started.
    pub(super) fn has_ready(&self) -> bool {
        !self.is_broken && self.rings.iter().any(|ring| self.is_ready(ring))
    }

    fn is_ready(&self, ring: &RingSetup) -> bool {
        let is_on = ring.enabled.unwrap_or(self.features & PROTOCOL_FEATURES == 0);
        let is_set_up = ring.size > 0 && ring.kick.is_some() && ring.addresses.is_some();
        is_on && is_set_up && ring.served.is_none()
    }

    fn start_one(&mut self, index: usize, waker: impl Fn() -> Waker) -> Option<Start> {
        let setup = &self.rings[index];
        if !self.is_ready(setup) {
            return None;
        }
        let (kick, at) = (setup.kick.clone()?, setup.addresses?);
        let layout = self.layout(setup.size);
        let ring = match Virtqueue::new(&self.memory, layout, &at, setup.base, self.record(index, layout)) {
            Some(Ok(ring)) => ring,
            None => {
                if self.rings[index].outside.replace(at) != Some(at) {
                    self.unheard.push((index, at));
                }
                return None;
            }
            Some(Err(broken)) => {
                self.unusable = Some(broken);
                return None;
            }
        };
        let control = Arc::new(Control::new(&self.memory, setup.call.as_ref(), waker()));
        let start = Start {
            ring,
            disk: self.disk.clone(),
            memory: Arc::clone(&self.memory),
            is_through: self.features & FLUSH == 0 || !self.is_writeback,
            kick,
            control: Report(Arc::clone(&control)),
        };
        self.rings[index].served = Some(control);
        Some(start)
    }

    /// The rings that cannot be served since they do not lie in the shared memory, each time that
    /// this is found out.
    pub(super) fn take_unheard(&mut self) -> Vec<(usize, RingAddresses)> {
        std::mem::take(&mut self.unheard)
    }

    fn layout(&self, size: u16) -> Layout {
        Layout {
            is_packed: self.features & RING_PACKED != 0,
            has_event_index: self.features & EVENT_INDEX != 0,
            size,
        }
    }

    /// Executes a message. The rings that it touches have ended.
    ///
    /// # Errors
    /// Why it is refused; nothing has changed then.
    pub(super) fn handle(&mut self, message: Message, mut fds: Descriptors) -> Result<Answer, Refusal> {
        match message {
            Message::GetFeatures => return Ok(Answer::Number(config_space::features(&self.disk))),
            Message::GetProtocolFeatures => return Ok(Answer::Number(PROTOCOL)),
            Message::GetQueueNum => return Ok(Answer::Number(QUEUES_MAX.into())),
            Message::GetMaxMemSlots => return Ok(Answer::Number(REGIONS_MAX as u64)),
            Message::GetStatus => return Ok(Answer::Number(self.status)),
            Message::GetConfig { offset, bytes } => return self.get_config(offset, bytes),
            Message::GetVringBase { index } => return self.end_ring(index),
            Message::GetInflightFd(spec) => return record::make(spec, self.layout(spec.queue_size)),
            Message::SetInflightFd(spec) => self.set_record(spec, &fds[0])?,
            Message::SetFeatures(features) => {
                self.features = known("features", features, config_space::features(&self.disk))?
            }
            Message::SetProtocolFeatures(features) => {
                self.protocol = known("protocol features", features, PROTOCOL)?
            }
            Message::SetConfig { offset, value } => self.set_config(offset, &value)?,
            Message::SetMemTable(regions) => self.set_memory(&regions, &fds)?,
            Message::AddMemRegion(region) => self.change_memory(self.memory.with(region, &fds[0])?),
            Message::RemoveMemRegion(region) => self.change_memory(self.memory.without(region)?),
            Message::SetVringNum { index, size } => {
                let is_allowed = size.is_power_of_two() && size <= RING_SIZE_MAX;
                let refused = Refusal::Value {
                    what: "ring size",
                    value: size.into(),
                    allowed: "a power of 2 up to 1024 is one",
                };
                self.ring(index)?.size = is_allowed.then_some(size as u16).ok_or(refused)?;
            }
            Message::SetVringAddr { index, addresses } => self.ring(index)?.addresses = Some(addresses),
            Message::SetVringBase { index, base } => self.ring(index)?.base = base,
            Message::SetVringEnable { index, on } => self.ring(index)?.enabled = Some(on),
            Message::SetVringKick { index, .. } => {
                let event = event(&mut fds)?.ok_or(Refusal::Event)?;
                self.ring(index)?.kick = Some(Arc::new(event));
            }
            Message::SetVringCall { index, .. } => {
                let call = event(&mut fds)?.map(Arc::new);
                let ring = self.ring(index)?;
                ring.call = call;
                if let Some(served) = &ring.served {
                    served.set_call(ring.call.as_ref());
                }
            }
            Message::SetVringErr { index, .. } => {
                let err = event(&mut fds)?.map(Arc::new);
                self.ring(index)?.err = err;
            }
            Message::SetStatus(0) | Message::ResetDevice | Message::ResetOwner => self.reset(),
            Message::SetStatus(status) => self.status = status | (self.status & NEEDS_RESET),
            Message::SetBackendReqFd => self.channel = fds.pop().map(Arc::new),
            Message::SetOwner => {}
        }
        Ok(Answer::Done)
    }

    /// The messages that set up another device like this one, apart from [`Self::saved_state`]. No
    /// ring is served.
    pub(super) fn set_up(&self) -> Vec<SetUp> {
        let mut all: Vec<SetUp> = vec![
            (Message::SetProtocolFeatures(self.protocol), Vec::new()),
            (Message::SetFeatures(self.features), Vec::new()),
        ];
        for (region, file) in self.memory.regions() {
            all.push((Message::AddMemRegion(region), vec![Arc::clone(file)]));
        }
        if let Some(channel) = &self.channel {
            all.push((Message::SetBackendReqFd, vec![Arc::clone(channel)]));
        }
        if let Some((mapping, spec)) = &self.inflight
            && let Some(file) = mapping.file()
        {
            all.push((Message::SetInflightFd(*spec), vec![Arc::clone(file)]));
        }
        (0..)
            .zip(&self.rings)
            .for_each(|(index, ring)| ring.set_up(index, &mut all));
        all
    }

    /// The state that no message sets up; the rest has default values.
    pub(super) fn saved_state(&self) -> SavedFrontEnd {
        let rings = (0..).zip(&self.rings);
        SavedFrontEnd {
            is_writeback: self.is_writeback,
            is_broken: self.is_broken,
            status: self.status,
            enabled: rings
                .filter_map(|(index, ring)| Some((index, ring.enabled?)))
                .collect(),
            ..SavedFrontEnd::default()
        }
    }

    /// Restores what [`Self::saved_state`] returned.
    ///
    /// # Errors
    /// There is no such ring.
    pub(super) fn restore_state(&mut self, saved: &SavedFrontEnd) -> Result<(), Refusal> {
        (self.is_writeback, self.is_broken) = (saved.is_writeback, saved.is_broken);
        self.status = saved.status;
        for (index, on) in &saved.enabled {
            self.ring(*index)?.enabled = Some(*on);
        }
        Ok(())
    }

    fn ring(&mut self, index: u32) -> Result<&mut RingSetup, Refusal> {
        self.rings.get_mut(index as usize).ok_or(Refusal::Ring(index))
    }

    /// The ring has ended; it is served again when it has a new event.
    fn end_ring(&mut self, index: u32) -> Result<Answer, Refusal> {
        let ring = self.ring(index)?;
        ring.kick = None;
        let mut state = index.to_ne_bytes().to_vec();
        state.extend(ring.base.to_ne_bytes());
        Ok(Answer::Bytes(state))
    }

    fn reset(&mut self) {
        let is_disabled = self.protocol != 0;
        for ring in &mut self.rings {
            *ring = RingSetup {
                enabled: is_disabled.then_some(false),
                ..RingSetup::default()
            };
        }
        self.is_writeback = true;
        self.status = 0;
        self.is_broken = false;
        self.forget_record();
    }

    fn set_memory(&mut self, regions: &[RegionSpec], fds: &[OwnedFd]) -> Result<(), Refusal> {
        let mut memory = GuestMemory::default();
        for (region, fd) in regions.iter().zip(fds) {
            memory = memory.with(*region, fd)?;
        }
        self.change_memory(memory);
        Ok(())
    }

    fn change_memory(&mut self, memory: GuestMemory) {
        self.memory = Arc::new(memory);
        for served in self.rings.iter().filter_map(|ring| ring.served.as_ref()) {
            served.set_memory(&self.memory);
        }
    }

    /// Most data descriptors of a request. Without tables of descriptors a request lies in its ring, with two more for its head
    /// and its status; the driver of a smaller ring would wait for ever for room.
    fn segments_max(&self) -> u32 {
        let sizes = self.rings.iter().map(|ring| u32::from(ring.size));
        let least = sizes.filter(|size| *size > 0).min();
        match least {
            Some(size) if self.features & INDIRECT == 0 => size.saturating_sub(2).clamp(1, self.segments_max),
            _ => self.segments_max,
        }
    }

    /// The descriptors of the smallest ring, if its driver was told that a request may have more pieces than it has room
    /// for: once.
    pub(super) fn take_too_small(&mut self) -> Option<u32> {
        let size = self.segments_max() + 2;
        let is_told = self.told_segments.is_some_and(|told| told + 2 > size);
        is_told.then(|| self.told_segments = None)?;
        Some(size)
    }

    fn get_config(&mut self, offset: u32, bytes: u32) -> Result<Answer, Refusal> {
        self.told_segments = Some(self.segments_max());
        let space = config_space::space(&self.disk, self.is_writeback, self.segments_max());
        let (from, to) = (offset as usize, offset as usize + bytes as usize);
        let refused = Refusal::Value {
            what: "range of the configuration space at",
            value: offset.into(),
            allowed: "it ends beyond the space",
        };
        let range = space.get(from..to).ok_or(refused)?;
        let mut answer = Vec::with_capacity(12 + range.len());
        for word in [offset, bytes, 0] {
            answer.extend(word.to_ne_bytes());
        }
        answer.extend(range);
        Ok(Answer::Bytes(answer))
    }

    /// Only the mode of the write cache can be changed. Rings that are served keep theirs until they are stopped and started.
    fn set_config(&mut self, offset: u32, value: &[u8]) -> Result<(), Refusal> {
        match value {
            [mode @ 0..=1] if offset as usize == WRITEBACK && self.features & CONFIG_WCE != 0 => {
                self.is_writeback = *mode == 1;
                Ok(())
            }
            _ => Err(Refusal::Value {
                what: "change of the configuration space at",
                value: offset.into(),
                allowed: "only the mode of the write cache can be changed, by a driver that knows CONFIG_WCE",
            }),
        }
    }
}

impl RingSetup {
    /// Appends what sets the ring up.
    fn set_up(&self, index: u32, all: &mut Vec<SetUp>) {
        if self.size > 0 {
            let size = self.size.into();
            all.push((Message::SetVringNum { index, size }, Vec::new()));
        }
        if let Some(addresses) = self.addresses {
            all.push((Message::SetVringAddr { index, addresses }, Vec::new()));
        }
        if self.base > 0 {
            let base = self.base;
            all.push((Message::SetVringBase { index, base }, Vec::new()));
        }
        let has_fd = true;
        if let Some(call) = &self.call {
            all.push((Message::SetVringCall { index, has_fd }, vec![Arc::clone(call)]));
        }
        if let Some(err) = &self.err {
            all.push((Message::SetVringErr { index, has_fd }, vec![Arc::clone(err)]));
        }
        if let Some(kick) = &self.kick {
            all.push((Message::SetVringKick { index, has_fd }, vec![Arc::clone(kick)]));
        }
    }
}

fn known(what: &'static str, value: u64, allowed: u64) -> Result<u64, Refusal> {
    match value & !allowed {
        0 => Ok(value),
        value => Err(Refusal::Value {
            what,
            value,
            allowed: "they were not offered",
        }),
    }
}

/// Takes the descriptor of a message that may have one, which has to be an event.
fn event(fds: &mut Descriptors) -> Result<Option<OwnedFd>, Refusal> {
    match fds.pop_if(|fd| is_event(fd)) {
        None if !fds.is_empty() => Err(Refusal::Event),
        event => Ok(event),
    }
}

/// The protocol features: MQ, REPLY_ACK, BACKEND_REQ, CONFIG, INFLIGHT_SHMFD, RESET_DEVICE, CONFIGURE_MEM_SLOTS, STATUS.
const PROTOCOL: u64 = 1 | 1 << 3 | 1 << 5 | 1 << 9 | 1 << 12 | 1 << 13 | 1 << 15 | 1 << 16;
const NEEDS_RESET: u64 = 0x40;
/// Descriptors of a ring.
const RING_SIZE_MAX: u32 = 1024;
