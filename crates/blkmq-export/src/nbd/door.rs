//! Decides how the NBD session meets sockets: a listener that spreads connections over the reactors, and the making of the
//! table of exports from the engine's disks. A connection's own life is in `connection`.
//!
//! ```text
//!  listener ─► connection (on a reactor):  socket ─► receive ─► Session ─► slots ─► bio ─► queue
//!                                          socket ◄─ transmit ◄── reply ◄─ slots ◄─ end of bio
//! ```

mod connection;
mod losses;
mod receive;
mod request;
mod slots;
mod transmit;

use std::collections::BTreeSet;
use std::sync::Arc;

use blkmq_core::ids::{GroupId, ReactorId};
use blkmq_host::disk::Disk;
use blkmq_host::engine::Engine;
use blkmq_host::service::ServiceFactory;
use blkmq_nbd::identity;

use self::connection::Connection;
use super::export::{Export, ExportId, ExportTable, Features};
use super::limits::Limits;
use crate::common::listener::Listener;
use crate::common::log::Log;
use crate::common::predecessors;
use crate::common::{AddressLimits, Common, Socket};

/// What the connections of all NBD addresses have in common.
#[derive(Debug)]
struct Shared {
    /// Who has selected which disk.
    disks: Arc<predecessors::Disks>,
    /// Which instance of a server this is.
    instance: Option<u64>,
}

impl Default for Shared {
    fn default() -> Self {
        Self {
            disks: Arc::default(),
            instance: identity::new_instance(),
        }
    }
}

/// What is served at a socket.
#[derive(Debug)]
pub struct Served<'a> {
    /// The socket that listens.
    pub socket: Socket,
    /// The disks, by name; none for all that no mapped disk lies on.
    pub disks: Option<&'a [String]>,
    /// What one connection may take.
    pub limits: Limits,
    /// How many there may be.
    pub admitted: AddressLimits,
}

/// What all connections of one address have in common.
#[derive(Debug)]
pub(crate) struct Door {
    /// What clients may select; an export's id is the disk's place in the engine's table.
    exports: Arc<ExportTable>,
    limits: Limits,
    common: Arc<Common>,
    shared: Arc<Shared>,
    log: Arc<Log>,
}

/// Serves disks at a socket that listens.
///
/// # Errors
/// The limit that is out of its range, or the disk that cannot be offered, with the reason.
pub fn serve(engine: &Engine, served: Served<'_>, common: &Arc<Common>) -> Result<(), ServeError> {
    let Served {
        socket,
        disks,
        limits,
        admitted,
    } = served;
    limits.check()?;
    if common.memory.bytes_max() < u64::from(limits.payload_bytes_max) {
        return Err(ServeError::Memory {
            bytes: common.memory.bytes_max(),
            payload: limits.payload_bytes_max,
        });
    }
    let mut exports = exports(engine.disks(), disks)?;
    let shared = common.of_door::<Shared>();
    exports.instance = shared.instance;
    let group = |export: &Arc<Export>| engine.disks()[export.id.0 as usize].group;
    let groups: BTreeSet<GroupId> = exports.iter().map(group).collect();
    let address = common.connections.add_address(admitted, groups.len() as u32);
    let log = Arc::new(Log::new("nbd"));
    let door = Arc::new(Door {
        exports: Arc::new(exports),
        limits,
        common: Arc::clone(common),
        shared,
        log: Arc::clone(&log),
    });
    let connect = move |client| -> ServiceFactory {
        let door = Arc::clone(&door);
        Box::new(move || Box::new(Connection::new(client, door)))
    };
    let listener =
        Listener::new(socket, common, address, &log, Box::new(connect)).map_err(ServeError::Socket)?;
    engine.add_service(ReactorId(0), Box::new(move || Box::new(listener)));
    common.trim(engine);
    Ok(())
}

/// Why disks cannot be served at an address.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// A limit is out of its range.
    #[error(transparent)]
    Limit(#[from] super::limits::LimitError),
    /// The socket cannot be listened at.
    #[error("the socket cannot be asked for clients: {0}")]
    Socket(#[source] std::io::Error),
    /// The largest request would wait for ever.
    #[error("memory of {bytes} bytes for NBD payload rejected: must hold one request, {payload} bytes")]
    Memory {
        /// Bytes of memory.
        bytes: u64,
        /// Longest payload of a request.
        payload: u32,
    },
    /// An export cannot be as its disk is.
    #[error("disk {disk}: cannot be exported over NBD: {reason}")]
    Export {
        /// The disk's name.
        disk: String,
        /// What is wrong.
        reason: String,
    },
}

fn exports(disks: &[Disk], only: Option<&[String]>) -> Result<ExportTable, ServeError> {
    let is_wanted = |disk: &Disk| match only {
        Some(names) => names.contains(&disk.name),
        None => disk.used_by.is_none(),
    };
    let wanted = disks.iter().enumerate().filter(|(_, disk)| is_wanted(disk));
    let exports: Vec<Export> = wanted
        .map(|(id, disk)| export(ExportId(id as u32), disk))
        .collect();
    ExportTable::new(exports).map_err(|error| ServeError::Export {
        disk: String::from("of this address"),
        reason: error.to_string(),
    })
}

fn export(id: ExportId, disk: &Disk) -> Export {
    let mut export = Export::new(id, disk.name.clone(), disk.size);
    export.description = disk.description.clone();
    export.block_min_bytes = disk.block_size;
    export.block_preferred_bytes = disk.limits.physical_block.max(disk.block_size).clamp(4096, 65536);
    export.features = Features {
        read_only: disk.read_only,
        trim: disk.limits.discard_max > 0,
        write_zeroes: disk.limits.zeroes_max > 0,
        fast_zero: disk.limits.zeroes_max > 0,
        ..Features::default()
    };
    export
}
