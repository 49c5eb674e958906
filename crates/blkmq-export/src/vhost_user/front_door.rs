//! Decides how vhost-user-blk is one of the front doors: its name, its addresses, of which each disk has one, and what
//! virtual machine monitors are given.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use blkmq_core::ids::ReactorId;
use blkmq_core::time::Nanos;
use blkmq_host::engine::Engine;
use blkmq_host::service::ServiceFactory;

use super::connection::{Connection, Shared};
use crate::common::listener::Listener;
use crate::common::log::Log;
use crate::common::{self, AddressError, Common, OpenError, Socket};
use crate::front_door::{Address, FrontDoor, Offer, Opened, ServeError};

/// The protocol by which a virtual machine monitor has its block devices served by another process.
#[derive(Debug)]
pub struct VhostUser;

impl FrontDoor for VhostUser {
    fn name(&self) -> &'static str {
        "vhost-user"
    }

    fn help(&self) -> &'static str {
        "Serve disks to virtual machines at ADDRESS: unix:PATH, with {disk} in it for the disk's name; may be given again"
    }

    fn parse(&self, text: &str) -> Result<Box<dyn Address>, AddressError> {
        // Read once with a name of one byte, so that what is wrong is said before the disks are known.
        match text.replace(DISK, "d").parse()? {
            common::Address::Unix(_) => Ok(Box::new(PerDisk(text.to_owned()))),
            _ => Err(AddressError(format!(
                "address {text:?} rejected: vhost-user needs a unix socket, as in unix:/run/blkmq/{DISK}.sock"
            ))),
        }
    }
}

/// An address of which each disk has one.
#[derive(Debug)]
struct PerDisk(String);

impl fmt::Display for PerDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Address for PerDisk {
    fn open(&self, disks: &[&str]) -> Result<Vec<Box<dyn Opened>>, OpenError> {
        if disks.len() > 1 && !self.0.contains(DISK) {
            let count = disks.len();
            return Err(OpenError::new(format!(
                "export {self}: one socket for {count} disks: each needs its own; write {DISK} where the name goes"
            )));
        }
        let mut opened: Vec<Box<dyn Opened>> = Vec::new();
        for disk in disks {
            let address = self.0.replace(DISK, disk).parse::<common::Address>();
            let address = address.map_err(|error| OpenError::new(error.to_string()))?;
            for socket in common::open(&address)? {
                opened.push(Box::new(OfDisk {
                    disk: (*disk).to_owned(),
                    socket,
                }));
            }
        }
        Ok(opened)
    }
}

/// Where the front ends of one disk come to.
struct OfDisk {
    disk: String,
    socket: Socket,
}

impl Opened for OfDisk {
    fn client_line(&self, disk: &str) -> Option<String> {
        (disk == self.disk).then(|| client_lines(disk, &self.socket.path()))
    }

    fn serve(
        self: Box<Self>,
        engine: &Engine,
        what: Offer<'_>,
        common: &Arc<Common>,
    ) -> Result<(), ServeError> {
        let missing = || ServeError(format!("disk {}: there is no such disk", self.disk).into());
        let disk = engine.disk(&self.disk).ok_or_else(missing)?.clone();
        let address = common.connections.add_address(what.admitted, 1);
        let log = Arc::new(Log::new("vhost-user"));
        let deadline = what.handshake_deadline.unwrap_or(HANDSHAKE_DEADLINE);
        let shared = Shared {
            disks: common.of_door(),
            log: Arc::clone(&log),
            handshake_deadline: Nanos(deadline.as_nanos().try_into().unwrap_or(u64::MAX)),
        };
        let connect = move |client| -> ServiceFactory {
            let (disk, shared) = (disk.clone(), shared.clone());
            Box::new(move || Box::new(Connection::new(client, disk, shared)))
        };
        let listener = Listener::new(self.socket, common, address, &log, Box::new(connect));
        let listener = listener.map_err(|error| ServeError(error.into()))?;
        engine.add_service(ReactorId(0), Box::new(move || Box::new(listener)));
        Ok(())
    }
}

/// What each virtual machine monitor is given: its words, or for Firecracker the body of a request.
fn client_lines(disk: &str, path: &str) -> String {
    // A comma would end the value.
    let word = path.replace(',', ",,");
    [
        format!(
            "qemu: -object memory-backend-memfd,id=mem,size=1G,share=on -machine memory-backend=mem \
             -chardev socket,id={disk},path={word},reconnect-ms=1000 \
             -device vhost-user-blk-pci,chardev={disk},num-queues=2"
        ),
        format!(
            "cloud-hypervisor: --memory size=1G,shared=on \
             --disk vhost_user=true,socket={path},num_queues=2,queue_size=256"
        ),
        format!(
            "firecracker: PUT /drives/{disk} {{\"drive_id\": \"{disk}\", \"socket\": {path:?}, \
             \"is_root_device\": false, \"cache_type\": \"Writeback\"}}"
        ),
        format!("crosvm: --vhost-user block,socket={path}"),
    ]
    .join("\n")
}

/// What stands for the disk's name in an address.
const DISK: &str = "{disk}";
/// How long a front end may take until a ring is served, unless told otherwise.
const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(10);
