//! Decides how FUSE is one of the front doors: its name, its addresses, which are paths, one for each disk, and when a file becomes a
//! disk.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use blkmq_core::ids::ReactorId;
use blkmq_host::disk::Disk;
use blkmq_host::engine::Engine;

use super::channel::{Channel, Home};
use super::filesystem::{FileSystem, start_thread};
use super::mount::Place;
use super::slots::Memory;
use crate::common::log::Log;
use crate::common::{AddressError, AddressLimits, Common, OpenError};
use crate::front_door::{Address, FrontDoor, Offer, Opened, ServeError, Served};
use crate::handover::{Handover, Member};

/// The protocol by which the kernel has a filesystem served by a process: here one of a single file, which is the disk.
#[derive(Debug)]
pub struct Fuse;

impl FrontDoor for Fuse {
    fn name(&self) -> &'static str {
        "fuse"
    }

    fn help(&self) -> &'static str {
        "Serve disks to this host as regular files: at PATH, with {disk} in it for the disk's name; may be given again"
    }

    fn parse(&self, text: &str) -> Result<Box<dyn Address>, AddressError> {
        let is_file = Path::new(text).file_name().is_some() && !text.ends_with('/');
        if !is_file || text.contains('\0') {
            return Err(AddressError(format!(
                "address {text:?} rejected: fuse needs the path of a file, as in /run/blkmq/{DISK}"
            )));
        }
        Ok(Box::new(PerDisk {
            place: text.to_owned(),
        }))
    }
}

/// A path of which each disk has one.
#[derive(Debug)]
struct PerDisk {
    place: String,
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

    fn open(&self, disks: &[&str], _handover: &Handover) -> Result<Vec<Box<dyn Opened>>, OpenError> {
        if disks.len() > 1 && !self.place.contains(DISK) {
            let count = disks.len();
            return Err(OpenError::new(format!(
                "export fuse:{self}: one file for {count} disks: each needs its own; write {DISK} where the name goes"
            )));
        }
        let mut opened: Vec<Box<dyn Opened>> = Vec::new();
        for disk in disks {
            opened.push(Box::new(OfDisk {
                place: Place::find(Path::new(&self.place.replace(DISK, disk)))?,
                disk: (*disk).to_owned(),
            }));
        }
        Ok(opened)
    }
}

/// A file that becomes a disk when the engine is there: it may be the very file in which the disk lies.
struct OfDisk {
    disk: String,
    place: Place,
}

impl Opened for OfDisk {
    fn client_line(&self, disk: &str) -> Option<String> {
        (disk == self.disk).then(|| format!("file: {}", self.place.path().display()))
    }

    fn serve(
        self: Box<Self>,
        engine: &Engine,
        what: Offer<'_>,
        common: &Arc<Common>,
    ) -> Result<Box<dyn Served>, ServeError> {
        start_thread();
        let missing = || ServeError(format!("disk {}: there is no such disk", self.disk).into());
        let disk = engine.disk(&self.disk).ok_or_else(missing)?;
        let admitted = limits(&self.place, &what);
        let owner = self.place.owner();
        let path = self.place.path().display().to_string();
        let memory = Memory::new(disk.block_size).map_err(|error| {
            ServeError(format!("disk {}: no memory for requests: {error}", self.disk).into())
        })?;
        let mounted = self.place.mount();
        let (mount, device) = mounted.map_err(|error| {
            ServeError(format!("disk {}: {path} cannot be mounted: {error}", self.disk).into())
        })?;
        let address = common.connections.add_address(admitted, 1);
        let ticket = common.connections.readmit(address).map_err(|refusal| {
            common.connections.remove_address(address);
            ServeError(refusal.to_string().into())
        })?;
        let home = Home::new(ticket, Member::new(&common.handover));
        let reactor = disk.number as usize % engine.reactors();
        let log = Arc::new(Log::new("fuse"));
        let filesystem = Arc::new(FileSystem::new(disk, mount, owner, common, &log));
        let served = ServedFile {
            disk: self.disk,
            filesystem: Arc::clone(&filesystem),
            address,
        };
        engine.add_service(
            ReactorId(reactor as u16),
            Box::new(move || Box::new(Channel::new(filesystem, device, memory, home))),
        );
        Ok(Box::new(served))
    }
}

/// What it may have, by its path.
fn limits(place: &Place, what: &Offer<'_>) -> AddressLimits {
    AddressLimits {
        name: place.path().display().to_string(),
        ..what.admitted.clone()
    }
}

/// The file of one disk.
struct ServedFile {
    disk: String,
    filesystem: Arc<FileSystem>,
    address: u32,
}

impl Served for ServedFile {
    fn disk(&self) -> Option<&str> {
        Some(&self.disk)
    }

    /// It has the one that it has.
    fn offer(&self, _disks: &[Disk], _what: Offer<'_>) -> Result<(), ServeError> {
        Ok(())
    }

    fn close(&self) {
        self.filesystem.unmount();
        self.filesystem.common.connections.remove_address(self.address);
    }
}

/// What stands for the disk's name in an address.
const DISK: &str = "{disk}";
