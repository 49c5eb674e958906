//! Decides how the NBD session meets sockets: a listener that spreads connections over the reactors, and the making of the
//! table of exports from the engine's disks. A connection's own life is in `connection`.
//!
//! ```text
//!  listener ─► connection (on a reactor):  socket ─► receive ─► Session ─► slots ─► bio ─► queue
//!                                          socket ◄─ transmit ◄── reply ◄─ slots ◄─ end of bio
//! ```

mod admission;
mod arena;
mod buffers;
mod connection;
mod departed;
mod departures;
mod listener;
mod log;
mod lookup;
mod losses;
mod memory;
mod pace;
mod payload;
mod peer;
mod pool;
mod predecessors;
mod receive;
mod request;
mod slots;
mod sys;
mod transmit;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use blkmq_core::ids::{GroupId, ReactorId};
use blkmq_host::disk::Disk;
use blkmq_host::engine::Engine;
use blkmq_nbd::identity;

use super::export::{Export, ExportId, ExportTable, Features};
use super::limits::Limits;

pub use admission::{AddressLimits, AddressStats, CONNECTIONS_MAX, Connections, LEAVING_MAX};
pub use listener::Socket;
pub use memory::{ALLOWANCE, BYTES_MAX, Memory};

/// What the connections of all addresses have in common.
#[derive(Debug)]
pub struct Common {
    /// What payload is held in.
    pub memory: Arc<Memory>,
    /// How many there are and may be.
    pub connections: Arc<Connections>,
    /// Who asks what is allocated.
    lookups: lookup::Lookups,
    /// Who has selected which disk.
    disks: Arc<predecessors::Disks>,
    /// Somebody gives memory back that is kept for nobody.
    has_trimmer: AtomicBool,
    /// Which instance of a server this is.
    instance: Option<u64>,
}

/// An address at which disks are served.
#[derive(Debug)]
pub struct Address<'a> {
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
    /// Its number among the addresses.
    address: u32,
    log: log::Log,
}

impl Common {
    /// Memory of so many bytes, and so many connections at most.
    pub fn new(memory_bytes: u64, connections_max: u32) -> Self {
        Self {
            memory: Arc::new(Memory::new(memory_bytes)),
            connections: Arc::new(Connections::new(connections_max)),
            lookups: lookup::Lookups::new(),
            disks: Arc::default(),
            has_trimmer: AtomicBool::new(false),
            instance: identity::new_instance(),
        }
    }
}

/// Serves disks at a socket that listens.
///
/// # Errors
/// The limit that is out of its range, or the disk that cannot be offered, with the reason.
pub fn serve(engine: &Engine, address: Address<'_>, common: &Arc<Common>) -> Result<(), ServeError> {
    let Address {
        socket,
        disks,
        limits,
        admitted,
    } = address;
    limits.check()?;
    if common.memory.bytes_max() < u64::from(limits.payload_bytes_max) {
        return Err(ServeError::Memory {
            bytes: common.memory.bytes_max(),
            payload: limits.payload_bytes_max,
        });
    }
    let mut exports = exports(engine.disks(), disks)?;
    exports.instance = common.instance;
    let group = |export: &Arc<Export>| engine.disks()[export.id.0 as usize].group;
    let groups: BTreeSet<GroupId> = exports.iter().map(group).collect();
    let door = Arc::new(Door {
        exports: Arc::new(exports),
        limits,
        common: Arc::clone(common),
        address: common.connections.add_address(admitted, groups.len() as u32),
        log: log::Log::default(),
    });
    let listener = listener::Listener::new(socket, door).map_err(ServeError::Socket)?;
    engine.add_service(ReactorId(0), Box::new(move || Box::new(listener)));
    // Relaxed: addresses are added by one thread.
    if !common.has_trimmer.swap(true, Ordering::Relaxed) {
        let memory = Arc::clone(&common.memory);
        engine.add_service(
            ReactorId(0),
            Box::new(move || Box::new(pool::Trimmer::new(memory))),
        );
    }
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
