//! FUSE among the front doors: its name, its addresses, which are paths, one for each disk, and when a
//! file becomes a disk.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::{fmt, io};

use blkmq_core::ids::ReactorId;
use blkmq_host::disk::Disk;
use blkmq_host::engine::Engine;
use blkmq_host::service::{Service, ServiceFactory};
use blkmq_host::value::{self, ConfigError};

use super::channel;
use super::filesystem::{FileSystem, start_thread};
use super::mount::{self, Mount, absolute};
use super::mount_table;
use super::rights::Way as MountWay;
use super::ring::RingMemory;
use super::saved::SavedMount;
use super::slots::MountMemory;
use super::visible;
use crate::common::admission::Ticket;
use crate::common::log::Log;
use crate::common::{AddressError, AddressLimits, Common, OpenError, Place};
use crate::front_door::{
    Address, DISK, DaemonLimits, DiskName, FrontDoor, Given, Offer, Opened, Reach, ServeError, Served, names,
};
use crate::handover::{Handover, Registration, Restore};
use crate::keys::{Flag, Key, Keys, Takes};

/// The protocol by which a process serves a filesystem to the kernel: here one of a single file,
/// which is the disk.
#[derive(Debug)]
pub struct Fuse;

/// The keys of `[fuse]`.
const KEYS: &[Key] = &[Key {
    name: "io_uring",
    range: "on, off for /dev/fuse, auto for io_uring if the kernel has it enabled",
    default: "auto",
    help: "Use io_uring for FUSE",
    flag: Some(Flag {
        name: "fuse-io-uring",
        takes: Takes::Value("HOW"),
    }),
}];

impl FrontDoor for Fuse {
    fn name(&self) -> &'static str {
        DOOR
    }

    fn help(&self) -> &'static str {
        "Serve disks to this host as regular files: at PATH, with {disk} in it for the disk's name; may be given again"
    }

    fn reach(&self) -> Reach {
        Reach::Mounts
    }

    fn table_keys(&self) -> &'static [Key] {
        KEYS
    }

    fn parse_table(&self, table: &Keys, _limits: &mut DaemonLimits) -> Result<(), ConfigError> {
        io_uring(table).map(drop)
    }

    fn parse(&self, given: &Given<'_>) -> Result<Box<dyn Address>, AddressError> {
        let text = given.address;
        let io_uring = match (io_uring(given.table)?, given.may_hand_over) {
            (Some(true), true) => {
                return Err(AddressError(
                    "io_uring=on rejected: a mount over io_uring cannot be handed over to another daemon; leave upgrade_socket \
                     out, or set io_uring to off"
                        .to_owned(),
                ));
            }
            (_, true) => Some(false),
            (wanted, false) => wanted,
        };
        let is_file = Path::new(text).file_name().is_some() && !text.ends_with('/');
        if !is_file || text.contains('\0') {
            return Err(AddressError(format!(
                "address {text:?} rejected: fuse needs the path of a file, as in /run/blkmq/{DISK}"
            )));
        }
        Ok(Box::new(PerDisk {
            place: text.to_owned(),
            io_uring,
        }))
    }
}

/// Parses `io_uring` of the table: `None` for what the kernel has enabled.
fn io_uring(table: &Keys) -> Result<Option<bool>, ConfigError> {
    match table.text("io_uring")? {
        None | Some("auto") => Ok(None),
        Some("on") => Ok(Some(true)),
        Some("off") => Ok(Some(false)),
        Some(text) => value::bad("io_uring", text, "auto, on or off"),
    }
}

/// A path pattern that gives each disk a path.
#[derive(Debug)]
struct PerDisk {
    place: String,
    io_uring: Option<bool>,
}

impl fmt::Display for PerDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.place)
    }
}

impl Address for PerDisk {
    fn is_per_disk(&self) -> bool {
        true
    }

    fn check_disks(&self, disks: &[&str]) -> Result<(), OpenError> {
        if disks.len() > 1 && !self.place.contains(DISK) {
            let count = disks.len();
            return Err(OpenError::new(format!(
                "export fuse:{self}: one file for {count} disks: each needs its own; write {DISK} where the name goes"
            )));
        }
        Ok(())
    }

    fn check(&self) -> Result<(), ServeError> {
        let way = MountWay::find();
        way.map(drop).map_err(|what| ServeError(what.into()))
    }

    fn places(&self, disks: &[DiskName<'_>]) -> Vec<Place> {
        let paths = disks.iter().map(|disk| disk.fill(&self.place));
        paths.map(|path| Place::of_path(Path::new(&path))).collect()
    }

    fn check_places(&self, disks: &[DiskName<'_>]) -> Result<(), OpenError> {
        let mut paths = disks.iter().map(|disk| disk.fill(&self.place));
        paths.try_for_each(|path| mount::check(Path::new(&path)))
    }

    fn open(&self, disks: &[DiskName<'_>], handover: &Handover) -> Result<Vec<Box<dyn Opened>>, OpenError> {
        self.check_disks(&names(disks))?;
        let mut opened: Vec<Box<dyn Opened>> = Vec::new();
        for disk in disks {
            let path = absolute(Path::new(&disk.fill(&self.place)))?;
            let name = path.display().to_string();
            let inherited = handover.take_inherited(|address, _| address == name);
            let way = match inherited.into_iter().next() {
                Some((.., device)) => Way::Inherited(device),
                None => Way::New(mount::Place::find(&path)?),
            };
            let disk = disk.disk.to_owned();
            opened.push(Box::new(OfDisk {
                disk,
                path,
                way,
                io_uring: self.io_uring,
            }));
        }
        Ok(opened)
    }
}

/// A file that becomes a disk once the engine runs: it may be the very file in which the disk lies.
struct OfDisk {
    disk: String,
    path: PathBuf,
    way: Way,
    /// Whether it uses io_uring. Default: if the kernel has it enabled.
    io_uring: Option<bool>,
}

/// How the file becomes a disk.
enum Way {
    /// The disk is mounted over it.
    New(mount::Place),
    /// Another daemon mounted it, and hands it over with this descriptor.
    Inherited(OwnedFd),
}

impl Opened for OfDisk {
    fn client_line(&self, disk: &Disk) -> Option<String> {
        (disk.name == self.disk).then(|| format!("file: {}", self.path.display()))
    }

    fn serve(
        self: Box<Self>,
        engine: &Engine,
        what: Offer<'_>,
        common: &Arc<Common>,
    ) -> Result<Box<dyn Served>, ServeError> {
        start_thread();
        let Self {
            disk: name,
            path,
            way,
            io_uring,
        } = *self;
        let failed = |why: String| ServeError(format!("disk {name}: {why}").into());
        let disk = engine.disk(&name);
        let disk = disk.ok_or_else(|| failed("there is no such disk".to_owned()))?;
        let memory = MountMemory::new(disk.block_size);
        let memory = memory.map_err(|error| failed(format!("no memory for requests: {error}")))?;
        // A mount of another daemon is served as that daemon negotiated it with the kernel.
        let is_wanted = match way {
            Way::New(_) => io_uring,
            Way::Inherited(_) => Some(false),
        };
        let rings = RingMemory::get(is_wanted, disk.block_size, engine.reactors()).map_err(failed)?;
        let served = ServedFile::new(disk, path, &what, common);
        let begun = match way {
            Way::New(place) => served.mount(engine, place, memory, rings),
            Way::Inherited(device) => served.wait_for_mount(device, memory),
        };
        match begun {
            Ok(()) => Ok(Box::new(served)),
            Err(why) => {
                common.connections.remove_address(served.address);
                Err(failed(why))
            }
        }
    }
}

/// The file of one disk.
#[derive(Clone)]
struct ServedFile {
    disk: Disk,
    path: PathBuf,
    log: Arc<Log>,
    address: u32,
    /// Weak: the hand-over is part of it, and has a copy of this.
    common: Weak<Common>,
    /// Empty as long as another daemon serves it.
    filesystem: Arc<OnceLock<Arc<FileSystem>>>,
}

impl ServedFile {
    fn new(disk: Disk, path: PathBuf, what: &Offer<'_>, common: &Arc<Common>) -> Self {
        let admitted = AddressLimits {
            name: path.display().to_string(),
            ..what.admitted.clone()
        };
        Self {
            disk,
            path,
            log: Arc::new(Log::new(DOOR)),
            address: common.connections.add_address(admitted, 1),
            common: Arc::downgrade(common),
            filesystem: Arc::default(),
        }
    }

    /// Mounts the disk.
    ///
    /// # Errors
    /// Why it cannot.
    fn mount(
        &self,
        engine: &Engine,
        place: mount::Place,
        memory: MountMemory,
        rings: Option<RingMemory>,
    ) -> Result<(), String> {
        let common = self.common()?;
        let places = self.places(&common)?;
        let path = self.path.display();
        let cannot_be = |error: io::Error| format!("{path} cannot be mounted: {error}");
        let (mount, device) = place.mount().map_err(cannot_be)?;
        let copy = device.try_clone().map_err(cannot_be)?;
        self.note_mounted(&mount, &common);
        if let (_, Some(entry)) = mount.handover_state()
            && let Some(why) = visible::why_hidden(&self.path, &entry)
        {
            tracing::warn!("fuse: {path}: {why}");
        }
        let filesystem = Arc::new(FileSystem::new(self.disk.clone(), mount, &common, &self.log));
        let _ = self.filesystem.set(Arc::clone(&filesystem));
        let elsewhere: Restore = Arc::new(|_, _| Err("this daemon has mounted another disk there".into()));
        common.handover.add_mount(DOOR, path.to_string(), copy, elsewhere);
        let reactor = ReactorId((self.disk.number as usize % engine.reactors()) as u16);
        let client = move || {
            let client = channel::client(filesystem, device, (memory, rings), places);
            Box::new(client) as Box<dyn Service>
        };
        engine.add_service(reactor, Box::new(client));
        Ok(())
    }

    /// Continues the mount when another daemon hands it over.
    ///
    /// # Errors
    /// Why it cannot.
    fn wait_for_mount(&self, device: OwnedFd, memory: MountMemory) -> Result<(), String> {
        let path = self.path.display();
        // Every request for the file would come back as one to it.
        if mount_table::is_used_by_us(&self.path).unwrap_or(true) {
            return Err(format!(
                "{path} is mounted over a file that this daemon needs, so it cannot be handed over: stop the running daemon, and start this one"
            ));
        }
        let (file, waiting) = (self.clone(), Mutex::new(Some(memory)));
        let restore: Restore = Arc::new(move |body, fds| {
            let memory = waiting.lock().unwrap_or_else(PoisonError::into_inner).take();
            file.restore(body, fds, memory.ok_or("it is handed over twice")?)
        });
        let common = self.common()?;
        common.handover.add_mount(DOOR, path.to_string(), device, restore);
        Ok(())
    }

    /// Makes the service that continues a mount saved by another daemon.
    fn restore(
        &self,
        body: &[u8],
        mut fds: Vec<OwnedFd>,
        memory: MountMemory,
    ) -> Result<ServiceFactory, Refused> {
        let common = self.common()?;
        let device = fds.pop().ok_or("a descriptor is needed")?;
        if !fds.is_empty() {
            return Err("it has more descriptors than one".into());
        }
        let saved = SavedMount::parse(body)?;
        self.compare(&saved)?;
        let places = self.places(&common)?;
        let mount = Mount::inherited(self.path.clone(), &saved);
        self.note_mounted(&mount, &common);
        let filesystem = FileSystem::restored(self.disk.clone(), mount, &saved, &common, &self.log);
        let filesystem = Arc::new(filesystem);
        let _ = self.filesystem.set(Arc::clone(&filesystem));
        Ok(Box::new(move || {
            Box::new(channel::restored(filesystem, device, memory, places, &saved))
        }))
    }

    /// Has the address reported as gone once somebody has unmounted it.
    fn note_mounted(&self, mount: &Mount, common: &Common) {
        if let (_, Some(entry)) = mount.handover_state() {
            common.connections.set_mounted(self.address, entry.device);
        }
    }

    /// Checks that the disk matches what its users know.
    fn compare(&self, saved: &SavedMount) -> Result<(), String> {
        let disk = &self.disk;
        let known = (&*saved.disk, saved.size, saved.block_size, saved.read_only);
        // The kernel is told if the disk has grown since.
        let size = disk.current_size();
        let size = if size > saved.size { saved.size } else { size };
        let found = (&*disk.name, size, disk.block_size, disk.read_only);
        match known == found {
            true => Ok(()),
            false => Err(format!(
                "its users know {known:?} (name, size, block size, read-only), here is {found:?}"
            )),
        }
    }

    /// The mount's places in the counts of connections and in a hand-over.
    fn places(&self, common: &Arc<Common>) -> Result<(Ticket, Registration), String> {
        let ticket = common.connections.readmit(self.address);
        let ticket = ticket.map_err(|refusal| refusal.to_string())?;
        Ok((ticket, Registration::new(&common.handover)))
    }

    fn common(&self) -> Result<Arc<Common>, String> {
        let common = self.common.upgrade();
        common.ok_or_else(|| "nobody serves there any more".to_owned())
    }
}

impl Served for ServedFile {
    fn disk(&self) -> Option<&str> {
        Some(&self.disk.name)
    }

    /// An address of a mount has only its one disk.
    fn offer(&self, _disks: &[Disk], _what: Offer<'_>) -> Result<(), ServeError> {
        Ok(())
    }

    fn close(&self) {
        if let Some(filesystem) = self.filesystem.get() {
            filesystem.unmount();
        }
        if let Ok(common) = self.common() {
            common.connections.remove_address(self.address);
        }
    }
}

/// Why a mount cannot continue here.
type Refused = Box<dyn std::error::Error + Send + Sync>;

/// The name of this front door.
pub(super) const DOOR: &str = "fuse";
