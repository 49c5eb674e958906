//! The hand-over to another daemon that takes over from this one: listeners, connections and mounts are the
//! members. Members stop when they are told, save the state that their successors need, and then continue or
//! end. A reactor never waits: it looks at one flag when it is woken, and leaves saved state here; the
//! daemon's own thread waits for that state.
//!
//! ```text
//!             suspend                 resume: members continue unchanged
//!  Serving ─────────────► Suspended ─────────────► Serving
//!                             └──────────────────► Gone: each member closes its socket silently
//!                               leave
//! ```
//!
//! The incoming daemon begins with `Suspended`, makes its members of what the other daemon saved,
//! and resumes.

pub mod channel;
pub mod codec;

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use std::{fmt, io};

use blkmq_core::ids::ReactorId;
use blkmq_host::device::FileId;
use blkmq_host::engine::Engine;
use blkmq_host::service::{ServiceFactory, Waker};

use self::codec::Origin;
use crate::common::{OwnedPath, Socket};

/// Whether clients are served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Clients are served.
    Serving,
    /// Nothing more is taken from clients, and nothing is sent to them once all that was begun has
    /// ended.
    Suspended,
    /// Another process serves the clients.
    Gone,
}

/// What is handed over, and how far the hand-over is.
pub struct Handover {
    phase: AtomicU8,
    state: Mutex<State>,
    /// A member has been saved, settled or dropped.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    next: u64,
    members: BTreeMap<u64, Entry>,
    doors: Vec<Door>,
    /// Sockets of another daemon that are not opened here yet.
    inherited: Vec<(codec::Socket, OwnedFd)>,
    /// Addresses whose sockets were inherited; this daemon owns their paths once it serves.
    paths: BTreeSet<String>,
    /// The identities of inherited paths, by address.
    files: BTreeMap<String, FileId>,
    /// Addresses whose sockets belong to systemd, with the names by which they were asked for.
    of_systemd: BTreeMap<String, Option<String>>,
    instance: Option<u64>,
}

/// An address that is served.
struct Door {
    door: &'static str,
    address: String,
    origin: Origin,
    /// The descriptor with which another daemon starts. None where this side connects.
    socket: Option<OwnedFd>,
    /// The identity of the socket's path, if a daemon has made it.
    file: Option<FileId>,
    restore: Restore,
}

/// One listener or connection.
#[derive(Default)]
struct Entry {
    waker: Option<Waker>,
    /// The disk that the client has selected.
    disk: Option<String>,
    report: Report,
}

#[derive(Default)]
enum Report {
    /// The member has not stopped, or not begun.
    #[default]
    None,
    /// The member has stopped, or is restored: this is what its successor needs, if anything.
    Settled(Option<Saved>),
    /// The member cannot be handed over, or taken over.
    Unable(String),
}

/// What a successor needs to know of a client.
#[derive(Clone, Debug)]
pub struct Saved {
    /// The front door.
    pub door: &'static str,
    /// The address at which the client connected.
    pub address: String,
    /// What the client's front door wrote.
    pub body: Vec<u8>,
    /// The client's socket, and the descriptors that belong to it.
    pub fds: Vec<Arc<OwnedFd>>,
}

/// Makes the service of a client that another daemon has saved.
pub type Restore = Arc<
    dyn Fn(&[u8], Vec<OwnedFd>) -> Result<ServiceFactory, Box<dyn std::error::Error + Send + Sync>>
        + Send
        + Sync,
>;

/// The registration of a listener or connection for the hand-over, as long as that exists. It belongs to a service on a
/// reactor, and no call blocks.
pub struct Registration {
    handover: Arc<Handover>,
    number: u64,
}

/// Why clients cannot be handed over, or taken over.
#[derive(Debug, thiserror::Error)]
pub enum HandoverError {
    /// A member cannot.
    #[error("{0}")]
    Unable(String),
    /// Some have not stopped in time.
    #[error("{left} of {all} clients and addresses have requests in flight after {limit:?}")]
    Late {
        /// How many.
        left: usize,
        /// Of how many.
        all: usize,
        /// The time that they had.
        limit: Duration,
    },
    /// Nothing here serves that address.
    #[error("nobody serves {door} at {address} here")]
    NoDoor {
        /// The front door.
        door: String,
        /// The address.
        address: String,
    },
}

impl Handover {
    /// Begins in this phase: `Serving`, or `Suspended` in a daemon that takes over.
    pub fn new(phase: Phase) -> Self {
        Self {
            phase: AtomicU8::new(phase as u8),
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Whether clients are served.
    pub fn phase(&self) -> Phase {
        // Acquire: pairs with the Release in `enter`.
        match self.phase.load(Ordering::Acquire) {
            SERVING => Phase::Serving,
            SUSPENDED => Phase::Suspended,
            _ => Phase::Gone,
        }
    }

    /// Makes all members stop.
    pub fn suspend(&self) {
        self.enter(Phase::Suspended);
    }

    /// Makes all members serve again, unchanged.
    pub fn resume(&self) {
        self.enter(Phase::Serving);
    }

    /// Makes all members release what another process serves now.
    pub fn leave(&self) {
        self.enter(Phase::Gone);
    }

    /// Enters a phase and wakes the members that are at rest.
    fn enter(&self, phase: Phase) {
        let mut state = self.lock();
        // Release: pairs with the Acquire in `phase`, which members read when they are woken.
        self.phase.store(phase as u8, Ordering::Release);
        let members = state.members.values_mut();
        let wakers: Vec<Waker> = members
            .filter_map(|entry| {
                entry.report = Report::None;
                entry.waker.clone()
            })
            .collect();
        drop(state);
        wakers.iter().for_each(Waker::wake);
    }

    /// Waits until all members have stopped, or are restored.
    ///
    /// # Errors
    /// A member is unable to, or some have not settled after `limit`.
    pub fn wait_until_settled(&self, limit: Duration) -> Result<(), HandoverError> {
        let until = Instant::now() + limit;
        let mut state = self.lock();
        loop {
            let mut left = 0;
            for entry in state.members.values() {
                match &entry.report {
                    Report::None => left += 1,
                    Report::Settled(_) => {}
                    Report::Unable(why) => return Err(HandoverError::Unable(why.clone())),
                }
            }
            if left == 0 {
                return Ok(());
            }
            let rest = until.saturating_duration_since(Instant::now());
            if rest.is_zero() {
                let all = state.members.len();
                return Err(HandoverError::Late { left, all, limit });
            }
            let waited = self.changed.wait_timeout(state, rest);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// What the members that have stopped saved.
    pub fn take_saved(&self) -> Vec<Saved> {
        let mut state = self.lock();
        let saved = state
            .members
            .values_mut()
            .filter_map(|entry| match &mut entry.report {
                Report::Settled(saved) => saved.take(),
                _ => None,
            });
        saved.collect()
    }

    /// The disks that clients have selected, each once.
    pub fn disks(&self) -> BTreeSet<String> {
        let state = self.lock();
        state
            .members
            .values()
            .filter_map(|entry| entry.disk.clone())
            .collect()
    }

    /// The sockets that listen, and the substitute where there is none, at which another daemon is
    /// to serve.
    ///
    /// # Errors
    /// There is no descriptor left.
    pub fn sockets(&self) -> io::Result<Vec<(codec::Socket, OwnedFd)>> {
        let state = self.lock();
        let socket = |door: &Door| {
            let socket = door.socket.as_ref()?;
            let named = codec::Socket {
                door: door.door.to_owned(),
                address: door.address.clone(),
                origin: door.origin.clone(),
            };
            Some(socket.try_clone().map(|socket| (named, socket)))
        };
        state.doors.iter().filter_map(socket).collect()
    }

    /// The addresses that are served, with their front doors.
    pub fn addresses(&self) -> Vec<(String, String)> {
        let state = self.lock();
        let named = |door: &Door| (door.door.to_owned(), door.address.clone());
        state.doors.iter().map(named).collect()
    }

    /// Makes the service of a client that another daemon has saved: the client settles on its
    /// reactor.
    ///
    /// # Errors
    /// There is no such address here, or its front door cannot continue the client.
    pub fn restore(
        &self,
        engine: &Engine,
        reactor: ReactorId,
        session: &codec::Session,
        fds: Vec<OwnedFd>,
    ) -> Result<(), HandoverError> {
        let is_wanted = |door: &&Door| door.door == session.door && door.address == session.address;
        let found = self
            .lock()
            .doors
            .iter()
            .find(is_wanted)
            .map(|door| Arc::clone(&door.restore));
        let restore = found.ok_or_else(|| HandoverError::NoDoor {
            door: session.door.clone(),
            address: session.address.clone(),
        })?;
        let factory = restore(&session.body, fds).map_err(|error| {
            HandoverError::Unable(format!("{} at {}: {error}", session.door, session.address))
        })?;
        engine.add_service(reactor, factory);
        Ok(())
    }

    /// The instance of the server that clients know: the first one's, however often another daemon
    /// has taken over.
    pub fn instance(&self) -> Option<u64> {
        self.lock().instance
    }

    /// Sets the instance of the server that clients know.
    pub fn set_instance(&self, instance: Option<u64>) {
        self.lock().instance = instance;
    }

    /// Stores a socket of another daemon, which is used instead of opening a new one.
    pub fn inherit(&self, named: codec::Socket, socket: OwnedFd) {
        self.lock().inherited.push((named, socket));
    }

    /// Takes the inherited sockets of a front door that `is_wanted` names by address and origin.
    pub fn take_inherited(
        &self,
        is_wanted: impl Fn(&str, &Origin) -> bool,
    ) -> Vec<(String, Origin, OwnedFd)> {
        let mut state = self.lock();
        let taken = state
            .inherited
            .extract_if(.., |(named, _)| is_wanted(&named.address, &named.origin));
        let taken: Vec<_> = taken
            .map(|(named, socket)| (named.address, named.origin, socket))
            .collect();
        for (address, origin, _) in &taken {
            match origin {
                Origin::Daemon => drop(state.paths.insert(address.clone())),
                Origin::Systemd(name) => drop(state.of_systemd.insert(address.clone(), name.clone())),
            }
        }
        taken
    }

    /// Records that the socket of an address belongs to systemd, by which name it was asked for.
    pub(crate) fn note_systemd(&self, address: String, name: Option<String>) {
        self.lock().of_systemd.insert(address, name);
    }

    /// Closes the inherited sockets that nothing here serves, and removes their paths. Returns
    /// their addresses.
    pub fn drop_unused(&self) -> Vec<String> {
        let unused = std::mem::take(&mut self.lock().inherited);
        for (named, _) in &unused {
            if let (Origin::Daemon, Some(path)) = (&named.origin, named.address.strip_prefix("unix:"))
                && !path.starts_with('@')
            {
                let path = PathBuf::from(path);
                // The path may be gone already.
                drop(match self.file_of(&named.address) {
                    Some(file) => Some(OwnedPath::inherited(path, file)),
                    None => OwnedPath::of(path).ok(),
                });
            }
        }
        unused.into_iter().map(|(named, _)| named.address).collect()
    }

    /// Returns whether the socket of an address belongs to another daemon until this one serves.
    pub fn is_inherited(&self, address: &str) -> bool {
        self.lock().paths.contains(address)
    }

    /// Stores the identity of the path of an inherited socket.
    pub fn inherit_path(&self, address: String, file: FileId) {
        self.lock().files.insert(address, file);
    }

    /// The identity that the path of an inherited socket had, if the other daemon told it.
    pub fn file_of(&self, address: &str) -> Option<FileId> {
        self.lock().files.get(address).copied()
    }

    /// The identities of the paths of sockets, with their addresses.
    pub fn paths(&self) -> Vec<(String, FileId)> {
        let state = self.lock();
        let path = |door: &Door| Some((door.address.clone(), door.file?));
        state.doors.iter().filter_map(path).collect()
    }

    /// Adds an address that is served from now on: its clients are restored with `restore`.
    ///
    /// # Errors
    /// There is no descriptor left.
    pub fn add_door(&self, door: &'static str, socket: &Socket, restore: Restore) -> io::Result<()> {
        let address = socket.address();
        let mut state = self.lock();
        let of_systemd = state.of_systemd.get(&address).cloned();
        let file = socket.file().or_else(|| state.files.get(&address).copied());
        state.doors.push(Door {
            door,
            address,
            origin: of_systemd.map_or(Origin::Daemon, Origin::Systemd),
            socket: Some(socket.as_fd().try_clone_to_owned()?),
            file,
            restore,
        });
        Ok(())
    }

    /// The same for a disk of this host: a file, with a copy of the descriptor on which the kernel
    /// sends requests, or a device.
    #[cfg(any(feature = "fuse", feature = "ublk"))]
    pub(crate) fn add_mount(&self, door: &'static str, address: String, device: OwnedFd, restore: Restore) {
        self.lock().doors.push(Door {
            door,
            address,
            origin: Origin::Daemon,
            socket: Some(device),
            file: None,
            restore,
        });
    }

    /// The same for an address that this side connects to.
    #[cfg(feature = "vhost-user")]
    pub(crate) fn add_dialed_door(&self, door: &'static str, address: String, restore: Restore) {
        self.lock().doors.push(Door {
            door,
            address,
            origin: Origin::Daemon,
            socket: None,
            file: None,
            restore,
        });
    }

    /// Removes an address that is not served any more.
    pub fn remove_door(&self, door: &str, address: &str) {
        let mut state = self.lock();
        let found = state
            .doors
            .iter()
            .position(|one| one.door == door && one.address == address);
        let removed = found.map(|index| state.doors.remove(index));
        drop(state);
        // Dropped with the lock released: it contains what restores clients.
        drop(removed);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic leaves the lists consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Registration {
    /// Registers a listener or connection that is about to be made.
    pub fn new(handover: &Arc<Handover>) -> Self {
        let mut state = handover.lock();
        state.next += 1;
        let number = state.next;
        state.members.insert(number, Entry::default());
        drop(state);
        Self {
            handover: Arc::clone(handover),
            number,
        }
    }

    /// Reports that the member is on its reactor; `waker` is used at each change. Returns the phase
    /// in which it begins.
    pub fn arrive(&self, waker: Waker) -> Phase {
        self.with(|entry| entry.waker = Some(waker));
        self.handover.phase()
    }

    /// Whether clients are served.
    pub fn phase(&self) -> Phase {
        self.handover.phase()
    }

    /// Returns whether the member has settled since the last suspension. It may have missed a short
    /// resumption in between.
    pub fn has_settled(&self) -> bool {
        let state = self.handover.lock();
        let entry = state.members.get(&self.number);
        entry.is_some_and(|entry| !matches!(entry.report, Report::None))
    }

    /// Records the disk that the client selected.
    pub fn select(&self, disk: &str) {
        self.with(|entry| entry.disk = Some(disk.to_owned()));
    }

    /// Reports that the member has stopped, with what its successor needs, or that it is restored.
    pub fn settle(&self, saved: Option<Saved>) {
        self.report(Report::Settled(saved));
    }

    /// Reports that the member cannot be handed over, or taken over.
    pub fn fail(&self, why: String) {
        self.report(Report::Unable(why));
    }

    fn report(&self, report: Report) {
        self.with(|entry| entry.report = report);
        self.handover.changed.notify_all();
    }

    fn with(&self, change: impl FnOnce(&mut Entry)) {
        if let Some(entry) = self.handover.lock().members.get_mut(&self.number) {
            change(entry);
        }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let mut state = self.handover.lock();
        let entry = state.members.remove(&self.number);
        if self.handover.phase() == Phase::Suspended
            && let Some(Entry {
                report: Report::Unable(why),
                ..
            }) = entry
        {
            // The member ended because it could not be taken over: that is kept.
            state.next += 1;
            let number = state.next;
            let failed = Entry {
                report: Report::Unable(why),
                ..Entry::default()
            };
            state.members.insert(number, failed);
        }
        drop(state);
        self.handover.changed.notify_all();
    }
}

impl fmt::Debug for Handover {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handover")
            .field("phase", &self.phase())
            .finish_non_exhaustive()
    }
}

const SERVING: u8 = Phase::Serving as u8;
const SUSPENDED: u8 = Phase::Suspended as u8;
