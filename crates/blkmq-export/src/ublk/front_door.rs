//! How ublk appears among the front doors: its name, its addresses, which are numbers of
//! devices, and how a device comes to be served: as a new one, as one that a killed daemon left, or
//! as one that another daemon hands over.

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::Duration;

use blkmq_core::ids::ReactorId;
use blkmq_host::disk::Disk;
use blkmq_host::engine::Engine;
use blkmq_host::service::{Service, ServiceFactory};

use super::added::Added;
use super::control::{Control, Named, open_queues, until};
use super::control_thread::{self, Beginning, Order};
use super::create::{add, check};
use super::device::{Device, Reason};
use super::protocol::{DeviceInfo, NUMBERS, RECOVERY};
use super::queue::{self, First, QueueParts};
use super::recover::{Found, compare, find, remove_stopped};
use super::release;
use super::saved::SavedDevice;
use super::slots::QueueMemory;
use crate::common::admission::Ticket;
use crate::common::log::Log;
use crate::common::{AddressError, AddressLimits, Common, OpenError, Place};
use crate::front_door::{
    Address, DiskName, FrontDoor, Given, Offer, Opened, Reach, ServeError, Served, names,
};
use crate::handover::{Handover, Phase, Registration, Restore};

/// The protocol by which a process serves a block device to the kernel.
#[derive(Debug)]
pub struct Ublk;

impl FrontDoor for Ublk {
    fn name(&self) -> &'static str {
        DOOR
    }

    fn help(&self) -> &'static str {
        "Serve a disk to this host as the block device /dev/ublkbN, with the number N or, for several disks, 'auto'; may be given again"
    }

    fn reach(&self) -> Reach {
        Reach::Devices
    }

    fn parse(&self, given: &Given<'_>) -> Result<Box<dyn Address>, AddressError> {
        let text = given.address;
        let number = match text {
            AUTO => None,
            _ => Some(text.parse().ok().filter(|number| *number < NUMBERS).ok_or_else(|| {
                AddressError(format!(
                    "address {text:?} rejected: ublk needs the number of a device, 0 to {}, or {AUTO}",
                    NUMBERS - 1
                ))
            })?),
        };
        Ok(Box::new(Numbered(number)))
    }

    fn leave(&self) {
        release::close();
    }
}

/// The number of a device; `None` for any free number.
#[derive(Debug)]
struct Numbered(Option<u32>);

impl fmt::Display for Numbered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(number) => number.fmt(f),
            None => f.write_str(AUTO),
        }
    }
}

impl Address for Numbered {
    fn is_per_disk(&self) -> bool {
        true
    }

    fn check_disks(&self, disks: &[&str]) -> Result<(), OpenError> {
        if self.0.is_some() && disks.len() > 1 {
            let count = disks.len();
            return Err(OpenError::new(format!(
                "export ublk:{self}: one device for {count} disks: name the disk (disks = [..] in an [[export]] of its own), or write {AUTO}"
            )));
        }
        Ok(())
    }

    fn places(&self, _disks: &[DiskName<'_>]) -> Vec<Place> {
        self.0.map(Place::Device).into_iter().collect()
    }

    fn open(&self, disks: &[DiskName<'_>], handover: &Handover) -> Result<Vec<Box<dyn Opened>>, OpenError> {
        self.check_disks(&names(disks))?;
        let failed = |what: String| OpenError::new(format!("export ublk:{self}: {what}"));
        let mut opened: Vec<Box<dyn Opened>> = Vec::new();
        for disk in disks {
            let control = Control::open().map_err(failed)?;
            let way = self.way(&control, disk.disk, handover).map_err(failed)?;
            opened.push(Box::new(OfDisk {
                disk: disk.disk.to_owned(),
                number: self.0,
                control,
                way,
            }));
        }
        Ok(opened)
    }
}

impl Numbered {
    fn way(&self, control: &Control, disk: &str, handover: &Handover) -> Result<Way, String> {
        let Some(number) = self.0 else {
            remove_stopped(control, disk);
            return Ok(Way::New);
        };
        let name = name_of(number);
        let mut inherited = handover.take_inherited(|address, _| address == name).into_iter();
        if let Some((.., descriptor)) = inherited.next() {
            return Ok(Way::Inherited(descriptor));
        }
        Ok(match find(control, number, disk)? {
            Found::Nothing => Way::New,
            Found::Waiting(info) => Way::Waiting(info),
        })
    }
}

/// A disk that becomes a device once the engine runs.
struct OfDisk {
    disk: String,
    number: Option<u32>,
    control: Control,
    way: Way,
}

/// How it becomes one.
enum Way {
    /// It is made.
    New,
    /// Another daemon has left it, and requests wait.
    Waiting(DeviceInfo),
    /// Another daemon hands it over, represented by this descriptor.
    Inherited(OwnedFd),
}

impl Opened for OfDisk {
    /// The number may not be known yet.
    fn client_line(&self, _disk: &Disk) -> Option<String> {
        None
    }

    fn serve(
        self: Box<Self>,
        engine: &Engine,
        what: Offer<'_>,
        common: &Arc<Common>,
    ) -> Result<Box<dyn Served>, ServeError> {
        let name = self.disk.clone();
        let failed = |why: String| ServeError(format!("disk {name}: {why}").into());
        let disk = engine.disk(&name);
        let disk = disk.ok_or_else(|| failed("there is no such disk".to_owned()))?;
        check(&disk).map_err(failed)?;
        let address = common.connections.add_address(
            AddressLimits {
                name: self.number.map_or_else(|| format!("ublk:{AUTO}"), name_of),
                ..what.admitted
            },
            1,
        );
        let served = ServedDevice {
            disk,
            address,
            common: Arc::downgrade(common),
            log: Arc::new(Log::new(DOOR)),
            device: Arc::default(),
        };
        match served.begin(engine, *self, common) {
            Ok(()) => Ok(Box::new(served)),
            Err(why) => {
                served.close();
                Err(failed(why))
            }
        }
    }
}

/// The device of one disk.
#[derive(Clone)]
struct ServedDevice {
    disk: Disk,
    address: u32,
    /// Weak: the hand-over is part of it, and has a copy of this.
    common: Weak<Common>,
    log: Arc<Log>,
    /// Empty as long as another daemon serves it.
    device: Arc<OnceLock<Arc<Device>>>,
}

/// A device, with the parts of its queues.
struct Ready {
    device: Arc<Device>,
    queues: Vec<QueueParts>,
}

impl ServedDevice {
    /// Makes it served.
    ///
    /// # Errors
    /// Why it cannot.
    fn begin(&self, engine: &Engine, of: OfDisk, common: &Arc<Common>) -> Result<(), String> {
        let OfDisk {
            number, control, way, ..
        } = of;
        let is_served = common.handover.phase() == Phase::Serving;
        // A device that was left stays, whatever fails; a new one goes.
        let (info, beginning, reported_size, added) = match way {
            Way::New => {
                // Looked up before: if the disk grows meanwhile, the kernel is told once more.
                let size = self.disk.current_size();
                let added = add(&self.disk, number, engine.reactors())?;
                (added.info(), Beginning::Start, size, Some(added))
            }
            Way::Waiting(info) => {
                let reported_size = compare(&control, &info, &self.disk)?;
                (info, Beginning::Recovery, reported_size, None)
            }
            Way::Inherited(descriptor) => {
                let info = control.info(number.unwrap_or_default());
                let info = info.ok().flatten().filter(DeviceInfo::is_served);
                let info = info.ok_or("the device to be taken over is not there")?;
                let parts = parts(&info, common)?;
                let ready = self.ready(control, info, Beginning::Succession, (common, parts))?;
                self.wait_for(descriptor, ready, common);
                return Ok(());
            }
        };
        let (queues, ready) = self.attached(control, info, beginning, common)?;
        let device = Arc::clone(&ready.device);
        let _ = self.device.set(Arc::clone(&device));
        device.set_ours(true);
        // Its thread removes it from here on, when it is closed.
        added.into_iter().for_each(Added::keep);
        device.attach(queues.0, queues.1);
        if let Some(address) = &device.address {
            let elsewhere: Restore = Arc::new(|_, _| Err("this daemon has made the device anew".into()));
            let copy = device.control.try_clone().map_err(|error| error.to_string())?;
            common.handover.add_mount(DOOR, address.clone(), copy, elsewhere);
        }
        let ticket = self.ticket(common)?;
        let (parts, first) = first_of(ready.queues, reported_size, is_served);
        let client = move || {
            let client = queue::first(ready.device, parts, first, ticket);
            Box::new(client) as Box<dyn Service>
        };
        engine.add_service(ReactorId(0), Box::new(client));
        match is_served {
            true => wait_until_begun(&device),
            // Nobody is served yet.
            false => Ok(()),
        }
    }

    /// Opens the queues of a device that is new, or that a daemon has left. Everything slow is done
    /// before the takeover: a daemon killed between the takeover and the first requests of all
    /// queues leaves the device unrecoverable.
    fn attached(
        &self,
        control: Control,
        info: DeviceInfo,
        beginning: Beginning,
        common: &Arc<Common>,
    ) -> Result<(Opening, Ready), String> {
        let parts = parts(&info, common)?;
        if beginning == Beginning::Recovery {
            self.recover(&control, &info)?;
        }
        let path = Named::of(&info).path();
        let queues = open_queues(&info).map_err(|error| format!("{path} cannot be served: {error}"))?;
        Ok((queues, self.ready(control, info, beginning, (common, parts))?))
    }

    /// Takes over a device that a daemon has left.
    fn recover(&self, control: &Control, info: &DeviceInfo) -> Result<(), String> {
        let named = Named::of(info);
        let is_busy = |error: &io::Error| error.raw_os_error() == Some(libc::EBUSY);
        until(ENDING_MAX, is_busy, || control.start_recovery(named))
            .map_err(|error| cannot_recover(info, &error))?;
        tracing::info!(
            "ublk: {} at {}: found as it was left",
            self.disk.name,
            named.path()
        );
        Ok(())
    }

    /// Starts its thread.
    fn ready(
        &self,
        control: Control,
        info: DeviceInfo,
        beginning: Beginning,
        (common, queues): (&Arc<Common>, Vec<QueueParts>),
    ) -> Result<Ready, String> {
        let failed = |error: io::Error| format!("no memory for requests: {error}");
        let (orders, receiver) = sync_channel(ORDERS_MAX);
        let address = info.has(RECOVERY).then(|| name_of(info.number));
        let device = control.descriptor().map_err(failed)?;
        let device = Device::new(
            self.disk.clone(),
            &info,
            (address, device),
            (common, &self.log),
            orders,
        );
        let device = Arc::new(device);
        control_thread::spawn(control, &device, info, beginning, receiver).map_err(failed)?;
        Ok(Ready { device, queues })
    }

    /// Continues the device when another daemon hands it over.
    fn wait_for(&self, descriptor: OwnedFd, ready: Ready, common: &Arc<Common>) {
        let Some(address) = ready.device.address.clone() else {
            return;
        };
        let (served, waiting) = (self.clone(), Mutex::new(Some(ready)));
        let restore: Restore = Arc::new(move |body, fds| {
            let ready = waiting.lock().unwrap_or_else(PoisonError::into_inner).take();
            served.restore(body, &fds, ready.ok_or("it is handed over twice")?)
        });
        common.handover.add_mount(DOOR, address, descriptor, restore);
    }

    /// Makes the service that continues a device saved by another daemon.
    fn restore(&self, body: &[u8], fds: &[OwnedFd], ready: Ready) -> Result<ServiceFactory, Refusal> {
        if fds.len() != 1 {
            return Err("it has more descriptors than one".into());
        }
        let saved = SavedDevice::parse(body)?;
        self.compare(&saved)?;
        let common = self.common.upgrade().ok_or("nobody serves there any more")?;
        let ticket = self.ticket(&common)?;
        if saved.has_losses {
            ready.device.note_losses();
        }
        let _ = self.device.set(Arc::clone(&ready.device));
        let (parts, first) = first_of(ready.queues, saved.size, false);
        Ok(Box::new(move || {
            Box::new(queue::restored(ready.device, parts, first, ticket))
        }))
    }

    /// Checks that the disk matches what its users know.
    fn compare(&self, saved: &SavedDevice) -> Result<(), String> {
        let disk = &self.disk;
        let is_same = (&*saved.disk, saved.block_size, saved.read_only)
            == (&*disk.name, disk.block_size, disk.read_only);
        // The kernel is told if the disk has grown since.
        match is_same && saved.size <= disk.current_size() {
            true => Ok(()),
            false => Err(format!(
                "disk {} is not as {} bytes in blocks of {} that its users know",
                saved.disk, saved.size, saved.block_size
            )),
        }
    }

    /// The device's place in the counts of connections.
    fn ticket(&self, common: &Arc<Common>) -> Result<Ticket, String> {
        let ticket = common.connections.readmit(self.address);
        ticket.map_err(|refusal| refusal.to_string())
    }
}

impl Served for ServedDevice {
    fn disk(&self) -> Option<&str> {
        Some(&self.disk.name)
    }

    fn client_line(&self) -> Option<String> {
        let device = self.device.get()?;
        Some(format!("device: {}", device.named.path()))
    }

    /// An address of a device has only its one disk.
    fn offer(&self, _disks: &[Disk], _what: Offer<'_>) -> Result<(), ServeError> {
        Ok(())
    }

    fn close(&self) {
        if let Some(device) = self.device.get() {
            let (done, ended) = sync_channel(1);
            if device.ask_end_and_tell(Reason::Removed, done) && ended.recv_timeout(END_MAX).is_err() {
                tracing::warn!("ublk: {} is being stopped for {END_MAX:?}", device.name);
            }
        }
        if let Some(common) = self.common.upgrade() {
            common.connections.remove_address(self.address);
        }
    }
}

/// Allocates the parts of a device's queues. May block.
///
/// # Errors
/// The system has no memory.
fn parts(info: &DeviceInfo, common: &Common) -> Result<Vec<QueueParts>, String> {
    let part = |number| {
        Ok(QueueParts {
            number,
            memory: QueueMemory::new(info.depth)?,
            member: Registration::new(&common.handover),
        })
    };
    let parts = (0..info.queues).map(part).collect::<io::Result<_>>();
    parts.map_err(|error| format!("no memory for requests: {error}"))
}

/// The parts of the first queue, and what it does for all others.
fn first_of(queues: Vec<QueueParts>, reported_size: u64, has_begun: bool) -> (QueueParts, First) {
    let mut others = queues;
    let parts = others.remove(0);
    let first = First {
        reported_size,
        others,
        has_begun,
    };
    (parts, first)
}

/// Why a device that was left cannot be taken over, and what to do.
fn cannot_recover(info: &DeviceInfo, error: &io::Error) -> String {
    let (path, number) = (Named::of(info).path(), info.number);
    match error.raw_os_error() {
        // None of its queues has had a request since it was taken over last.
        Some(libc::EINVAL) => format!(
            "{path} cannot be taken over: a daemon was killed while it took it over, and the kernel gives it to no other. \
             Unmount what is on it and remove it (ublk del -n {number}, of ublksrv), or choose another number: what waits in it is lost"
        ),
        _ => format!("{path} cannot be taken over: {error}"),
    }
}

/// Makes the thread start it, and waits: its partitions are read before it appears.
fn wait_until_begun(device: &Device) -> Result<(), String> {
    let path = device.named.path();
    let (begun, waiting) = sync_channel(1);
    if !device.order(Order::Begin(Some(begun))) {
        return Err(format!("{path} does not start"));
    }
    match waiting.recv_timeout(BEGIN_MAX) {
        Ok(begun) => begun.map_err(|error| format!("{path} does not start: {error}")),
        Err(_) => Err(format!(
            "{path} does not start within {BEGIN_MAX:?}: its drive does not answer"
        )),
    }
}

/// The name of a device among other addresses.
fn name_of(number: u32) -> String {
    format!("ublk:{number}")
}

/// The character device, and the descriptors of its queues.
type Opening = (OwnedFd, Vec<super::sys::Descriptors>);
/// Why a device cannot continue here.
type Refusal = Box<dyn std::error::Error + Send + Sync>;

/// The name of this front door.
pub(super) const DOOR: &str = "ublk";
/// The placeholder for any free number.
pub(super) const AUTO: &str = "auto";
/// Most orders that wait for a thread.
const ORDERS_MAX: usize = 16;
/// Time for a killed daemon to end.
const ENDING_MAX: Duration = Duration::from_secs(10);
/// Time for partitions to be read.
const BEGIN_MAX: Duration = Duration::from_secs(60);
/// Time for requests under way to end, and file systems to be written back.
const END_MAX: Duration = Duration::from_secs(60);
