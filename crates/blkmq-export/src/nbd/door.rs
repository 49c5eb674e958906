//! Decides how the NBD session meets sockets: a listener that spreads connections over the reactors, and the making of the
//! table of exports from the engine's disks. A connection's own life is in `connection`.
//!
//! ```text
//!  listener ─► connection (on a reactor):  socket ─► receive ─► Session ─► slots ─► bio ─► queue
//!                                          socket ◄─ transmit ◄── reply ◄─ slots ◄─ end of bio
//! ```

mod connection;
mod listener;
mod log;
mod losses;
mod memory;
mod receive;
mod slots;
mod sys;
mod transmit;

use std::sync::Arc;

use blkmq_core::ids::ReactorId;
use blkmq_host::disk::Disk;
use blkmq_host::engine::Engine;

use super::export::{Export, ExportId, ExportTable, Features};
use super::limits::Limits;

pub use listener::Socket;
pub use memory::{ALLOWANCE, BYTES_MAX, Memory};

/// What all connections of one address have in common.
#[derive(Debug)]
pub(crate) struct Door {
    /// What clients may select; an export's id is the disk's place in the engine's table.
    exports: Arc<ExportTable>,
    limits: Limits,
    /// What payload is held in.
    memory: Arc<Memory>,
    connections_max: u32,
    log: log::Log,
}

/// How many clients one address serves at a time, by default. More cost memory only as they are used.
pub const CONNECTIONS_MAX: u32 = 4096;

/// Serves disks at a socket that listens: the ones named, or all that no mapped disk lies on. `memory` is what the connections of this socket, and of
/// all others that are given the same one, hold payload in.
///
/// # Errors
/// The limit that is out of its range, or the disk that cannot be offered, with the reason.
pub fn serve(
    engine: &Engine,
    socket: Socket,
    disks: Option<&[String]>,
    limits: Limits,
    memory: &Arc<Memory>,
) -> Result<(), ServeError> {
    limits.check()?;
    if memory.bytes_max() < u64::from(limits.payload_bytes_max) {
        return Err(ServeError::Memory {
            bytes: memory.bytes_max(),
            payload: limits.payload_bytes_max,
        });
    }
    let exports = exports(engine.disks(), disks)?;
    let door = Arc::new(Door {
        exports: Arc::new(exports),
        limits,
        memory: Arc::clone(memory),
        connections_max: CONNECTIONS_MAX,
        log: log::Log::default(),
    });
    engine.add_service(
        ReactorId(0),
        Box::new(move || Box::new(listener::Listener::new(socket, door))),
    );
    Ok(())
}

/// Why disks cannot be served at an address.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// A limit is out of its range.
    #[error(transparent)]
    Limit(#[from] super::limits::LimitError),
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
