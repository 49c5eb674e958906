//! vhost-user-blk among the front doors: its name, its addresses, of which each disk has one, and the
//! settings for virtual machine monitors.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use blkmq_core::ids::ReactorId;
use blkmq_core::time::Nanos;
use blkmq_host::disk::Disk;
use blkmq_host::engine::Engine;
use blkmq_host::service::ServiceFactory;
use blkmq_host::value::{self, ConfigError};

use super::connection::moving::{restore, restored};
use super::connection::{self, Shared};
use super::saved::SavedFrontEnd;
use super::{signal, unmap};
use crate::client_settings::{Client, xml};
use crate::common::dialer::Dialer;
use crate::common::listener::{Admitted, Connect, Listener, OpenAddress};
use crate::common::log::Log;
use crate::common::{self, Access, AddressError, AddressLimits, Common, OpenError, Socket, access, deadline};
use crate::front_door::{
    Address, DISK, DaemonLimits, DiskName, FrontDoor, GROUP, Given, Offer, Opened, ServeError, Served, names,
};
use crate::handover::{Handover, Registration, Restore};
use crate::keys::{Key, Keys};

/// The protocol by which another process serves the block devices of a virtual machine monitor.
#[derive(Debug)]
pub struct VhostUser;

impl FrontDoor for VhostUser {
    fn name(&self) -> &'static str {
        "vhost-user"
    }

    fn help(&self) -> &'static str {
        "Serve disks to virtual machines at ADDRESS: unix:PATH, with {disk} in it for the disk's name, or connect:unix:PATH; \
         may be given again"
    }

    fn keys(&self) -> &'static [&'static [Key]] {
        &[access::KEYS, &[SEG_MAX]]
    }

    fn table_keys(&self) -> &'static [Key] {
        const { &[deadline::key("Time from connecting to the first ring")] }
    }

    fn parse_table(&self, table: &Keys, _limits: &mut DaemonLimits) -> Result<(), ConfigError> {
        deadline::parse(table).map(drop)
    }

    fn parse(&self, given: &Given<'_>) -> Result<Box<dyn Address>, AddressError> {
        let text = given.address;
        let handshake_deadline = deadline::parse(given.table)?.unwrap_or(HANDSHAKE_DEADLINE);
        let (connects, place) = match text.strip_prefix(CONNECT) {
            Some(place) => (true, place),
            None => (false, text),
        };
        // Parsed once with a name of one byte, so that an error is reported before the disks are
        // known.
        match place.replace(DISK, "d").replace(GROUP, "g").parse()? {
            ref address @ common::Address::Unix(_) => Ok(Box::new(PerDisk {
                access: Access::parse(given.keys, address)?,
                place: place.to_owned(),
                connects,
                handshake_deadline,
                segments_max: segments_max(given.keys)?,
            })),
            _ => Err(AddressError(format!(
                "address {text:?} rejected: vhost-user needs a unix socket, as in unix:/run/blkmq/{DISK}.sock"
            ))),
        }
    }
}

/// An address pattern that gives each disk an address.
#[derive(Debug)]
struct PerDisk {
    place: String,
    access: Access,
    /// The front ends listen there, and this daemon connects.
    connects: bool,
    handshake_deadline: Duration,
    segments_max: u32,
}

impl fmt::Display for PerDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", if self.connects { CONNECT } else { "" }, self.place)
    }
}

impl Address for PerDisk {
    fn is_per_disk(&self) -> bool {
        true
    }

    /// A front end with a ring for each reactor, as monitors are told to start it.
    fn descriptors(&self, reactors: usize) -> usize {
        FOR_A_FRONT_END + reactors * FOR_A_RING
    }

    fn check_disks(&self, disks: &[&str]) -> Result<(), OpenError> {
        if disks.len() > 1 && !self.place.contains(DISK) {
            let count = disks.len();
            return Err(OpenError::new(format!(
                "export {self}: one socket for {count} disks: each needs its own; write {DISK} where the name goes"
            )));
        }
        Ok(())
    }

    fn places(&self, disks: &[DiskName<'_>]) -> Vec<common::Place> {
        let addresses = disks.iter().filter_map(|disk| self.address(*disk).ok());
        addresses
            .flat_map(|address| common::Place::of_socket(&address))
            .collect()
    }

    fn access(&self) -> Option<&Access> {
        Some(&self.access)
    }

    fn connects(&self) -> bool {
        self.connects
    }

    fn client_settings(&self, client: Client, disk: &Disk, group: &str) -> Option<String> {
        let named = DiskName {
            disk: &disk.name,
            group,
        };
        match self.address(named).ok()? {
            common::Address::Unix(path) => {
                settings(client, &disk.name, &path.display().to_string(), self.connects)
            }
            _ => None,
        }
    }

    fn check_places(&self, disks: &[DiskName<'_>]) -> Result<(), OpenError> {
        for disk in disks {
            let address = self.address(*disk)?;
            if !self.connects {
                common::check_socket(&address).map_err(|error| error.of(&format!("export {address}")))?;
            }
        }
        Ok(())
    }

    fn open(&self, disks: &[DiskName<'_>], handover: &Handover) -> Result<Vec<Box<dyn Opened>>, OpenError> {
        self.check_disks(&names(disks))?;
        let mut opened: Vec<Box<dyn Opened>> = Vec::new();
        let (handshake_deadline, segments_max) = (self.handshake_deadline, self.segments_max);
        for disk in disks {
            let address = self.address(*disk)?;
            let disk = disk.disk.to_owned();
            match address {
                common::Address::Unix(path) if self.connects => opened.push(Box::new(OfDisk {
                    disk,
                    place: Place::There(path),
                    handshake_deadline,
                    segments_max,
                })),
                _ => opened.extend(self.open_one(&address, handover)?.into_iter().map(|socket| {
                    let disk = disk.clone();
                    let place = Place::Here(socket);
                    let of_disk = OfDisk {
                        disk,
                        place,
                        handshake_deadline,
                        segments_max,
                    };
                    Box::new(of_disk) as Box<dyn Opened>
                })),
            }
        }
        Ok(opened)
    }
}

impl PerDisk {
    fn open_one(&self, address: &common::Address, handover: &Handover) -> Result<Vec<Socket>, OpenError> {
        let sockets = common::open(address, handover)?;
        self.access.apply(address)?;
        Ok(sockets)
    }

    /// The address of one disk.
    ///
    /// # Errors
    /// With the disk's name it is too long.
    fn address(&self, disk: DiskName<'_>) -> Result<common::Address, OpenError> {
        let address = disk.fill(&self.place).parse();
        address.map_err(|error: AddressError| OpenError::new(format!("disk {}: {error}", disk.disk)))
    }
}

/// How the front end of one disk is connected.
struct OfDisk {
    disk: String,
    place: Place,
    handshake_deadline: Duration,
    segments_max: u32,
}

/// Which side connects.
enum Place {
    /// The front end.
    Here(Socket),
    /// This daemon.
    There(PathBuf),
}

impl Place {
    /// The address, as it is written.
    fn name(&self) -> String {
        match self {
            Self::Here(socket) => socket.address(),
            Self::There(path) => format!("{CONNECT}unix:{}", path.display()),
        }
    }
}

impl Opened for OfDisk {
    fn client_line(&self, disk: &Disk) -> Option<String> {
        let name = &disk.name;
        (*name == self.disk).then(|| format!("vhost-user: disk {name} at {}", self.place.name()))
    }

    fn serve(
        self: Box<Self>,
        engine: &Engine,
        what: Offer<'_>,
        common: &Arc<Common>,
    ) -> Result<Box<dyn Served>, ServeError> {
        unmap::start();
        signal::start();
        let missing = || ServeError(format!("disk {}: there is no such disk", self.disk).into());
        let disk = engine.disk(&self.disk).ok_or_else(missing)?;
        let name = self.place.name();
        let admitted = AddressLimits {
            name: name.clone(),
            ..what.admitted
        };
        let number = common.connections.add_address(admitted, 1);
        let log = Arc::new(Log::new("vhost-user"));
        let dialed = matches!(self.place, Place::There(_)).then(Arc::default);
        let shared = Shared {
            sessions: common.of_door(),
            log: Arc::clone(&log),
            address: name.clone().into(),
            handshake_deadline: Nanos(self.handshake_deadline.as_nanos().try_into().unwrap_or(u64::MAX)),
            segments_max: self.segments_max,
            dialed: dialed.clone(),
        };
        let restore = restorer(&disk, &shared, common, number);
        let connect: Connect = Box::new(move |client| -> ServiceFactory {
            let (disk, shared) = (disk.clone(), shared.clone());
            Box::new(move || Box::new(connection::client(client, disk, shared)))
        });
        let address = match (self.place, dialed) {
            (Place::There(path), Some(dialed)) => {
                common.handover.add_dialed_door(log.door(), name, restore);
                let dialer = Dialer::new(path, common, number, &log, (connect, &dialed));
                let address = dialer.address();
                engine.add_service(ReactorId(0), Box::new(move || Box::new(dialer)));
                address
            }
            (Place::Here(socket), _) => {
                let added = common.handover.add_door(log.door(), &socket, restore);
                added.map_err(|error| ServeError(error.into()))?;
                let listener = Listener::new(socket, common, number, &log, connect);
                let listener = listener.map_err(|error| ServeError(error.into()))?;
                let address = listener.address();
                engine.add_service(ReactorId(0), Box::new(move || Box::new(listener)));
                address
            }
            (Place::There(_), None) => unreachable!("made above"),
        };
        Ok(Box::new(ServedDisk {
            disk: self.disk,
            address,
        }))
    }
}

/// The address of one disk.
struct ServedDisk {
    disk: String,
    address: OpenAddress,
}

impl Served for ServedDisk {
    fn disk(&self) -> Option<&str> {
        Some(&self.disk)
    }

    /// Such an address has only its one disk.
    fn offer(&self, _disks: &[Disk], what: Offer<'_>) -> Result<(), ServeError> {
        let admitted = AddressLimits {
            name: self.address.name().to_owned(),
            ..what.admitted
        };
        self.address.set_limits(admitted, 1);
        Ok(())
    }

    fn close(&self) {
        self.address.close();
    }
}

/// Parses `seg_max`, if the address has it.
fn segments_max(keys: &Keys) -> Result<u32, ConfigError> {
    let given = keys.text(SEG_MAX.name)?;
    given.map_or(Ok(SEGMENTS_MAX), |text| {
        value::whole(
            SEG_MAX.name,
            text,
            1..=1022,
            "a number from 1 to 1022, the descriptors of a ring less two",
        )
    })
}

/// What makes a connection of the state that another daemon saved.
fn restorer(disk: &Disk, shared: &Shared, common: &Arc<Common>, address: u32) -> Restore {
    let (disk, shared) = (disk.clone(), shared.clone());
    // Weak: the hand-over is part of this, and would keep it for ever.
    let common = Arc::downgrade(common);
    Arc::new(move |body, mut fds| {
        let common = common.upgrade().ok_or("nobody listens there any more")?;
        if fds.is_empty() {
            return Err("a descriptor is needed".into());
        }
        let client = Admitted {
            socket: fds.remove(0),
            is_tcp: false,
            ticket: common
                .connections
                .readmit(address)
                .map_err(|refusal| refusal.to_string())?,
            member: Registration::new(&common.handover),
        };
        let (disk, shared) = (disk.clone(), shared.clone());
        if body.is_empty() {
            return Ok(Box::new(move || {
                Box::new(connection::client(client, disk, shared))
            }));
        }
        let saved = SavedFrontEnd::parse(body)?;
        let (device, fds) = restore(&disk, shared.segments_max, &saved, fds)?;
        Ok(Box::new(move || {
            Box::new(restored(client, device, shared, saved, fds))
        }))
    })
}

/// The settings of a virtual machine's monitor for the disk at a socket.
fn settings(client: Client, disk: &str, path: &str, connects: bool) -> Option<String> {
    // A comma would end the value.
    let word = path.replace(',', ",,");
    // A machine that listens waits for this daemon at its start; another one reconnects when this
    // daemon was restarted.
    let how = if connects {
        "server=on"
    } else {
        "reconnect-ms=1000"
    };
    // The others always connect.
    let may_listen = client == Client::Qemu;
    let settings = match client {
        _ if connects && !may_listen => return None,
        Client::Qemu => format!(
            "-object memory-backend-memfd,id=mem,size=1G,share=on -machine memory-backend=mem \
             -chardev socket,id=disk-{disk},path={word},{how} \
             -device vhost-user-blk-pci,chardev=disk-{disk},num-queues=2"
        ),
        Client::Libvirt => format!(
            "<!-- its domain: <memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking> -->\n\
             <disk type='vhostuser' device='disk'>\n  <driver name='qemu' type='raw' queues='2'/>\n  \
             <source type='unix' path='{}'>\n    <reconnect enabled='yes' timeout='1'/>\n  </source>\n  \
             <target dev='vda' bus='virtio'/>\n</disk>",
            xml(path)
        ),
        Client::CloudHypervisor => format!(
            "--memory size=1G,shared=on --disk vhost_user=true,socket={path},num_queues=2,queue_size=256"
        ),
        Client::Firecracker => format!(
            "PUT /drives/{disk} {{\"drive_id\": \"{disk}\", \"socket\": {path:?}, \
             \"is_root_device\": false, \"cache_type\": \"Writeback\"}}"
        ),
        Client::Crosvm => format!("--vhost-user block,socket={path}"),
        Client::NbdClient | Client::Uri => return None,
    };
    Some(settings)
}

/// The key of an address for the smallest ring of its monitors. A monitor reads the limit before it tells the sizes of
/// rings, so the device cannot find it.
const SEG_MAX: Key = Key {
    name: "seg_max",
    range: "1 to 1022",
    default: "62",
    help: "Most pieces of a request; two less than the ring of a driver without indirect descriptors",
    flag: None,
};
/// The default: what a ring of 64 descriptors has room for. A driver without indirect descriptors that was told more than
/// its ring can hold waits for ever, in the middle of its work; one that was told less makes more requests of scattered pages.
/// Others report 126, for QEMU's rings of 128.
const SEGMENTS_MAX: u32 = 62;
/// Descriptors that are kept for a front end: a socket that listens and its own, a channel, a record of requests in flight,
/// and 8 regions of memory. Monitors have 2 regions up to 3 GiB, and one more for each module of memory.
const FOR_A_FRONT_END: usize = 4 + 8;
/// The events of a ring.
const FOR_A_RING: usize = 3;
/// The prefix of an address where front ends listen.
const CONNECT: &str = "connect:";
/// Time for a front end until a ring is served, unless configured otherwise.
const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(10);
