//! The NBD session on sockets: a listener that spreads connections over the reactors, and a table of
//! exports made from the engine's disks. `connection` is what one client has of it.
//!
//! ```text
//!  listener ─► connection (on a reactor):  socket ─► receive ─► Session ─► slots ─► bio ─► queue
//!                                          socket ◄─ transmit ◄── reply ◄─ slots ◄─ end of bio
//! ```

mod connection;
mod handshakes;
mod receive;
mod request;
mod slots;
mod transmit;
mod wire;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blkmq_core::ids::ReactorId;
use blkmq_host::disk::{Disk, Tenant};
use blkmq_host::engine::Engine;
use blkmq_host::service::ServiceFactory;
use blkmq_nbd::identity;
use blkmq_tls::{FileError, Server, Settings};

use self::handshakes::Handshakes;
use super::export::{Bitmaps, Export, ExportId, ExportTable, Features};
use super::front_door::ConfiguredAddress;
use super::limits::Limits;
use super::session::Session;
use super::tls_files::TlsFiles;
use crate::common::listener::{Admitted, Listener, OpenAddress};
use crate::common::log::Log;
use crate::common::sessions::DiskSessions;
use crate::common::{AddressLimits, Common, Socket};
use crate::front_door;
use crate::handover::{Registration, Restore};
use crate::nbd::saved::SavedConnection;

/// What the connections of all NBD addresses share.
#[derive(Debug)]
struct Shared {
    /// The sessions of each disk.
    sessions: Arc<DiskSessions>,
    /// Which instance of a server this is.
    instance: Option<u64>,
    /// The threads that do the arithmetic of TLS handshakes.
    handshakes: Handshakes,
}

impl Default for Shared {
    fn default() -> Self {
        Self {
            sessions: Arc::default(),
            instance: identity::new_instance(),
            handshakes: Handshakes::default(),
        }
    }
}

/// What is served at a socket.
#[derive(Debug)]
pub struct Served<'a> {
    /// The socket that listens.
    pub socket: Socket,
    /// The names of the disks; `None` for all disks that no mapped disk lies on.
    pub disks: Option<&'a [String]>,
    /// What one connection may take.
    pub limits: Limits,
    /// How many connections are admitted.
    pub admitted: AddressLimits,
    /// The TLS settings of the address.
    pub tls: Arc<TlsFiles>,
}

/// What new clients find.
#[derive(Debug)]
pub(crate) struct Offered {
    /// The exports that clients may select; an export's id is the disk's number.
    exports: Arc<ExportTable>,
    tls: Arc<TlsFiles>,
    /// What clients find of the TLS files.
    server: Option<Server>,
}

/// What all connections of one address share.
#[derive(Debug)]
pub(crate) struct Door {
    offered: Mutex<Arc<Offered>>,
    limits: Limits,
    common: Arc<Common>,
    shared: Arc<Shared>,
    log: Arc<Log>,
    /// The address, as its socket reports it.
    address: String,
}

/// Serves disks at a socket that listens.
///
/// # Errors
/// A limit is out of its range, or a disk cannot be offered, with the reason.
pub fn serve(engine: &Engine, served: Served<'_>, common: &Arc<Common>) -> Result<NbdAddress, ServeError> {
    let Served {
        socket,
        disks,
        limits,
        admitted,
        tls,
    } = served;
    check_reach(&socket, &tls)?;
    let server = tls.latest()?;
    warn_of(server.as_ref(), &socket.address());
    limits.check()?;
    if common.memory.bytes_max() < u64::from(limits.payload_bytes_max) {
        return Err(ServeError::Memory {
            bytes: common.memory.bytes_max(),
            payload: limits.payload_bytes_max,
        });
    }
    let mut exports = exports(&engine.disks(), disks)?;
    let shared = common.of_door::<Shared>();
    exports.instance = common.handover.instance().or(shared.instance);
    common.handover.set_instance(exports.instance);
    let groups = groups(&engine.disks(), disks);
    let address = common.connections.add_address(admitted, groups);
    let log = Arc::new(Log::new("nbd"));
    let door = Arc::new(Door {
        offered: Mutex::new(Arc::new(Offered {
            exports: Arc::new(exports),
            tls,
            server,
        })),
        limits,
        common: Arc::clone(common),
        shared,
        log: Arc::clone(&log),
        address: socket.address(),
    });
    let handover = &common.handover;
    let added = handover.add_door(log.door(), &socket, restorer(&door, address, socket.is_tcp()));
    added.map_err(ServeError::Socket)?;
    let served = Arc::clone(&door);
    let connect = move |admitted| -> ServiceFactory {
        let door = Arc::clone(&door);
        Box::new(move || Box::new(connection::client(admitted, door)))
    };
    let listener =
        Listener::new(socket, common, address, &log, Box::new(connect)).map_err(ServeError::Socket)?;
    let address = listener.address();
    engine.add_service(ReactorId(0), Box::new(move || Box::new(listener)));
    common.trim(engine);
    Ok(NbdAddress {
        door: served,
        address,
    })
}

/// An address at which disks are served over NBD.
#[derive(Debug)]
pub struct NbdAddress {
    door: Arc<Door>,
    address: OpenAddress,
}

impl front_door::Served for NbdAddress {
    fn offer(&self, disks: &[Disk], what: front_door::Offer<'_>) -> Result<(), front_door::ServeError> {
        let wrong = |error: ServeError| front_door::ServeError(error.into());
        let mut table = exports(disks, what.disks).map_err(wrong)?;
        let before = self.door.offered();
        let settings = what.settings::<ConfiguredAddress>();
        let tls = settings.map_or(&before.tls, |at| &at.tls);
        let other = match **before.tls == ***tls {
            true => None,
            false => Some(tls.latest().map_err(|error| wrong(error.into()))?),
        };
        if let Some(server) = &other {
            warn_of(server.as_ref(), &self.door.address);
        }
        table.instance = before.exports.instance;
        let mut offered = self.door.lock();
        // The files may have been read again meanwhile.
        let server = other.unwrap_or_else(|| offered.server.clone());
        tls.set(server.clone());
        *offered = Arc::new(Offered {
            exports: Arc::new(table),
            tls: Arc::clone(tls),
            server,
        });
        drop(offered);
        self.address.set_limits(what.admitted, groups(disks, what.disks));
        Ok(())
    }

    fn refresh(&self) -> Result<bool, front_door::ServeError> {
        let before = self.door.offered();
        let read = before.tls.read();
        let server = read.map_err(|error| front_door::ServeError(error.into()))?;
        warn_of(server.as_ref(), &self.door.address);
        let has_files = server.is_some();
        let mut offered = self.door.lock();
        // An offer that came meanwhile stays; one of other files has read those.
        if **offered.tls == **before.tls {
            offered.tls.set(server.clone());
            *offered = Arc::new(Offered {
                exports: Arc::clone(&offered.exports),
                tls: Arc::clone(&offered.tls),
                server,
            });
        }
        Ok(has_files)
    }

    fn close(&self) {
        self.address.close();
    }
}

impl Door {
    /// What clients find who connect now.
    fn offered(&self) -> Arc<Offered> {
        Arc::clone(&self.lock())
    }

    fn lock(&self) -> MutexGuard<'_, Arc<Offered>> {
        self.offered.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Checks that an address that other hosts reach requires TLS, or that plain connections are
/// permitted explicitly.
///
/// # Errors
/// If neither holds.
fn check_reach(socket: &Socket, tls: &Settings) -> Result<(), ServeError> {
    let Socket::Tcp(listener) = socket else {
        return Ok(());
    };
    let is_here = |address: SocketAddr| address.ip().to_canonical().is_loopback();
    let address = socket.address();
    if listener.local_addr().is_ok_and(is_here) {
        if !tls.is_secure() || tls.ca.is_none() {
            tracing::info!(
                "export {address}: each user of this host has its disks: a unix socket has an owner"
            );
        }
        return Ok(());
    }
    match (tls.is_secure(), &tls.ca) {
        (true, Some(_)) => {}
        (true, None) => tracing::warn!(
            "export {address}: clients need no certificate there, so whoever reaches it has its disks: add tls_ca"
        ),
        (false, _) if tls.allow_insecure => tracing::warn!(
            "export {address}: other hosts reach it without authentication; a network of storage alone is assumed"
        ),
        (false, _) => return Err(ServeError::Exposed(address)),
    }
    Ok(())
}

/// Says which authorities of the TLS files of an address are left out.
fn warn_of(server: Option<&Server>, address: &str) {
    for problem in server.into_iter().flat_map(Server::left_out) {
        tracing::warn!("export {address}: an authority is left out: {problem}");
    }
}

/// How many groups have disks at an address.
fn groups(disks: &[Disk], only: Option<&[String]>) -> u32 {
    let groups: BTreeSet<Tenant> = wanted(disks, only).map(|disk| disk.tenant).collect();
    groups.len() as u32
}

/// What makes a connection of the state that another daemon saved.
fn restorer(door: &Arc<Door>, address: u32, is_tcp: bool) -> Restore {
    // A weak reference: the door holds what is handed over, and a strong one would keep the door
    // for ever.
    let door = Arc::downgrade(door);
    Arc::new(move |body, mut fds| {
        let door = door.upgrade().ok_or("nobody listens there any more")?;
        let socket = fds
            .pop()
            .filter(|_| fds.is_empty())
            .ok_or("one descriptor is needed")?;
        let admitted = Admitted {
            socket,
            is_tcp,
            ticket: door
                .common
                .connections
                .readmit(address)
                .map_err(|refusal| refusal.to_string())?,
            member: Registration::new(&door.common.handover),
        };
        if body.is_empty() {
            return Ok(Box::new(move || Box::new(connection::client(admitted, door))));
        }
        let saved = SavedConnection::parse(body)?;
        // Made here, so that a mismatch is known at once.
        let offered = door.offered();
        let exports = Arc::clone(&offered.exports);
        let mut session = Session::restore(&saved.session, exports, door.limits.clone())?;
        session.offer_tls(offered.tls.mode);
        Ok(Box::new(move || {
            Box::new(connection::restored(admitted, door, session, saved))
        }))
    })
}

/// Why disks cannot be served at an address. The texts have the causes.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// A limit is out of its range.
    #[error(transparent)]
    Limit(#[from] super::limits::LimitError),
    /// The socket cannot listen.
    #[error("the socket cannot be asked for clients: {0}")]
    Socket(std::io::Error),
    /// Other hosts reach the address, and TLS is not required there.
    #[error(
        "other hosts reach {0}, and whoever does can read and write the disks: have clients prove who they are with \
         tls = \"require\", tls_certificate, tls_key and tls_ca (--tls require, ...); or, on a network of storage alone, \
         say allow_insecure = true (--insecure)"
    )]
    Exposed(String),
    /// A file of TLS cannot be used.
    #[error("TLS: {0}")]
    Tls(FileError),
    /// The largest request would wait for ever.
    #[error("memory of {bytes} bytes for NBD payload rejected: must hold one request, {payload} bytes")]
    Memory {
        /// Bytes of memory.
        bytes: u64,
        /// Longest payload of a request.
        payload: u32,
    },
    /// An export cannot have the properties of its disk.
    #[error("disk {disk}: cannot be exported over NBD: {reason}")]
    Export {
        /// The disk's name.
        disk: String,
        /// What is wrong.
        reason: String,
    },
}

impl From<FileError> for ServeError {
    fn from(error: FileError) -> Self {
        Self::Tls(error)
    }
}

/// The disks that an address serves: those that are named, or all that no mapped disk lies on.
fn wanted<'a>(disks: &'a [Disk], only: Option<&'a [String]>) -> impl Iterator<Item = &'a Disk> {
    disks.iter().filter(move |disk| match only {
        Some(names) => names.contains(&disk.name),
        None => disk.used_by.is_none(),
    })
}

fn exports(disks: &[Disk], only: Option<&[String]>) -> Result<ExportTable, ServeError> {
    ExportTable::new(wanted(disks, only).map(export)).map_err(|error| ServeError::Export {
        disk: String::from("of this address"),
        reason: error.to_string(),
    })
}

fn export(disk: &Disk) -> Export {
    let mut export = Export::new(ExportId(disk.number), disk.export.clone(), disk.size);
    export.disk.clone_from(&disk.name);
    export.description = disk.description.clone();
    export.block_min_bytes = disk.block_size;
    export.block_preferred_bytes = disk.limits.physical_block.max(disk.block_size).clamp(4096, 65536);
    export.features = Features {
        read_only: disk.read_only,
        trim: disk.limits.discard_max > 0,
        write_zeroes: disk.limits.zeroes_max > 0,
        fast_zero: disk.limits.zeroes_max > 0,
        // Clients that do not ask for block sizes use sectors of 512 bytes, or bytes.
        any_alignment: disk.limits.any_alignment,
        ..Features::default()
    };
    let (allocation, id) = (Arc::clone(&disk.allocation), disk.id);
    export.bitmaps = Bitmaps::of(move || allocation.bitmap_names(id));
    export
}
