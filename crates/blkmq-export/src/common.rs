//! What all front doors share: the life of a client, admission of clients, memory for payload, look-ups of
//! allocation, and the number of lines that an address writes to the log.
//!
//! | part | decides |
//! |---|---|
//! | `client`, `life` | what every client does whatever its protocol, and in which states |
//! | `access`, `accounts`, `path_rights` | who may open the disks at a unix socket |
//! | `address`, `socket` | how an address is written, and how it becomes a socket that listens |
//! | `systemd` | which of the sockets that systemd hands over an address gets |
//! | `owned_path`, `turn` | whose the path of a socket is; daemons that start at the same moment |
//! | `place` | which addresses are in each other's way, and what keeps one from being opened |
//! | `descriptors` | which file descriptors a client may send, and who closes the others |
//! | `listener` | which reactor serves a client, and how many clients a turn accepts (`pace`) |
//! | `dialer` | when this daemon connects to a peer that listens for it |
//! | `admission` | how many connections there may be: in all, of an address, of a group |
//! | `memory` | how much payload all connections may hold, and who gets memory first when it is short |
//! | `arena`, `pool`, `sys` | where memory comes from, and when it goes back to the system |
//! | `buffers`, `payload` | how much of it one connection has, and how one request lies in it |
//! | `sessions` | which sessions a disk has, and which earlier ones a client that selects it waits for |
//! | `lookup` | in which order drives are asked for their allocation |
//! | `losses` | which client is told of writes that may be lost |
//! | `command_ring`, `io_flusher`, `resident`, `touched` | how the kernel sends requests to doors of this host, and that nobody waits for memory then |
//! | `worker` | which thread does for reactors what may block |
//! | `deadline` | the key for how long a client may take to begin |
//! | `log`, `peer`, `readiness` | what is logged of clients, how they are named, and what their sockets are ready for |

pub(crate) mod access;
pub mod accounts;
pub(crate) mod address;
pub(crate) mod admission;
pub(crate) mod arena;
pub(crate) mod buffers;
pub(crate) mod client;
#[cfg(any(feature = "fuse", feature = "ublk"))]
pub(crate) mod command_ring;
mod credentials;
#[cfg(any(feature = "nbd", feature = "vhost-user"))]
pub(crate) mod deadline;
pub(crate) mod descriptors;
#[cfg(feature = "vhost-user")]
pub(crate) mod dialer;
mod extents;
#[cfg(any(feature = "fuse", feature = "ublk"))]
pub(crate) mod io_flusher;
pub(crate) mod life;
pub(crate) mod listener;
pub(crate) mod log;
pub(crate) mod lookup;
pub(crate) mod losses;
pub(crate) mod memory;
mod owned_path;
mod pace;
mod path_rights;
pub(crate) mod payload;
pub(crate) mod peer;
pub(crate) mod place;
mod pool;
pub(crate) mod readiness;
#[cfg(any(feature = "fuse", feature = "ublk"))]
mod resident;
pub(crate) mod sessions;
pub(crate) mod socket;
pub(crate) mod sys;
mod systemd;
#[cfg(any(feature = "fuse", feature = "ublk"))]
pub(crate) mod touched;
pub(crate) mod turn;
#[cfg(any(feature = "fuse", feature = "vhost-user"))]
pub(crate) mod worker;

use std::any::{Any, TypeId};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use blkmq_core::ids::ReactorId;
use blkmq_host::engine::Engine;

use crate::handover::{Handover, Phase};

pub use access::{Access, Allowed};
pub use address::{Address, AddressError};
pub use admission::{AddressLimits, AddressState, AddressStats, CONNECTIONS_MAX, Connections, LEAVING_MAX};
pub use credentials::Credentials;
#[cfg(feature = "ublk")]
pub(crate) use credentials::has_ended;
pub use descriptors::listen_at;
pub use memory::{ALLOWANCE, BYTES_MAX, MemoryBudget};
pub use owned_path::{FreePath, OwnedPath};
pub use path_rights::PathRights;
pub use place::{Place, check_socket};
pub use socket::{OpenError, Socket, listen_at_port, loopbacks, open};
pub use systemd::untaken as untaken_sockets;

/// What the connections of all addresses share, of any front door.
#[derive(Debug)]
pub struct Common {
    /// The memory that holds payload.
    pub memory: Arc<MemoryBudget>,
    /// The counts and limits of connections.
    pub connections: Arc<Connections>,
    /// What is handed over when another daemon takes over from this one.
    pub handover: Arc<Handover>,
    /// The threads that look up allocation.
    pub(crate) lookups: lookup::Lookups,
    /// A trimmer gives memory back that nobody needs.
    has_trimmer: AtomicBool,
    /// What each front door shares among all of its addresses.
    of_doors: Mutex<BTreeMap<TypeId, Arc<dyn Any + Send + Sync>>>,
}

impl Common {
    /// Makes it with at most `memory_bytes` bytes of memory and `connections_max` connections.
    pub fn new(memory_bytes: u64, connections_max: u32) -> Self {
        Self::taking_part(
            memory_bytes,
            connections_max,
            &Arc::new(Handover::new(Phase::Serving)),
        )
    }

    /// The same, with the members of a hand-over, to or from another daemon.
    pub fn taking_part(memory_bytes: u64, connections_max: u32, handover: &Arc<Handover>) -> Self {
        Self {
            handover: Arc::clone(handover),
            memory: Arc::new(MemoryBudget::new(memory_bytes)),
            connections: Arc::new(Connections::new(connections_max)),
            lookups: lookup::Lookups::new(),
            has_trimmer: AtomicBool::new(false),
            of_doors: Mutex::default(),
        }
    }

    /// Starts the trimmer, with the first address.
    pub(crate) fn trim(&self, engine: &Engine) {
        // Relaxed: addresses are added by one thread.
        if !self.has_trimmer.swap(true, Ordering::Relaxed) {
            let memory = Arc::clone(&self.memory);
            engine.add_service(
                ReactorId(0),
                Box::new(move || Box::new(pool::Trimmer::new(memory))),
            );
        }
    }

    /// What a front door shares among all of its addresses; made when it is first asked for.
    pub fn of_door<T: Default + Send + Sync + 'static>(&self) -> Arc<T> {
        let mut all = self.of_doors.lock().unwrap_or_else(PoisonError::into_inner);
        let of_door = all
            .entry(TypeId::of::<T>())
            .or_insert_with(|| Arc::<T>::default());
        Arc::clone(of_door).downcast().expect("found by its type")
    }
}
