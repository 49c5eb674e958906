//! The sessions of each disk. A client that selects a disk waits for the earlier sessions: those whose
//! clients have left by then, until all of their requests have ended. So nothing that a dead client
//! wrote lands behind what its successor has read. `client` enters when a disk is selected, and is
//! woken when it may go on.
//!
//! Connections whose clients are present are not waited for, and nobody who transmits is ever
//! stopped: several connections of one client look like several clients, and one that reconnects
//! does not disturb the others. The kernel is asked who has left (`hang_ups`): it knows before
//! the connection's own reactor may.
//!
//! A client may give its sessions names. Then it can *fence* a session that it has given up,
//! whatever the network still carries of that session: the connection is ended at once, and the
//! client is told when all of its requests have ended. Only a client that knows the name, a random
//! number of 128 bits, can do so, over a connection to the same disk.

mod earlier;
mod hang_ups;

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::{fmt, io};

use blkmq_host::service::Waker;

use self::earlier::{EarlierSessions, Wait};
use self::hang_ups::HangUps;

/// A client's name for a session: the client's own name, and a number that it uses once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SessionName {
    pub(crate) client: u128,
    pub(crate) number: u64,
}

/// The connections that have selected a disk, by the disk's place in the engine's table.
#[derive(Debug, Default)]
pub(crate) struct DiskSessions {
    connections: Mutex<BTreeMap<u32, OneDisk>>,
    next: AtomicU64,
}

/// The connections that have selected one disk.
#[derive(Debug)]
struct OneDisk {
    by_number: BTreeMap<u64, Registered>,
    by_name: BTreeMap<SessionName, Arc<SessionState>>,
    /// Watches the clients that have not left, as far as is known.
    hang_ups: HangUps,
    earlier: EarlierSessions<Waiter>,
}

/// One connection, as its disk knows it.
#[derive(Debug)]
struct Registered {
    state: Arc<SessionState>,
    /// Its number among the earlier sessions, once its client has left or it takes nothing more.
    left_as: Option<u64>,
}

/// A connection that waits for those that have left.
#[derive(Clone, Debug)]
struct Waiter {
    waker: Waker,
    /// Set before the waker is used: the wait is over.
    may_go_on: Arc<AtomicBool>,
}

/// Why a connection gets no place.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// Another session has the same name.
    NameTaken,
    /// The system cannot watch one more connection.
    Unwatched(io::Error),
}

/// One connection, as others see it.
#[derive(Debug)]
pub(crate) struct SessionState {
    socket: Arc<OwnedFd>,
    name: Option<SessionName>,
    waker: Waker,
    /// The client has given up the connection, which is to end whatever still comes.
    is_fenced: AtomicBool,
    end: Mutex<End>,
}

#[derive(Debug, Default)]
struct End {
    has_come: bool,
    /// The connections that wait for its end, by their numbers.
    wakers: BTreeMap<u64, Waker>,
}

/// A fenced session, with the number of the connection that waits for its end.
#[derive(Debug)]
pub(crate) struct Fenced(Arc<SessionState>, u64);

/// A connection's entry among those of its disk, until all of its requests have ended.
#[derive(Debug)]
pub(crate) struct DiskSession {
    disks: Arc<DiskSessions>,
    disk: u32,
    number: u64,
    state: Arc<SessionState>,
    /// Some connections have to end first.
    wait: Option<(Wait, Waiter)>,
}

impl DiskSessions {
    /// A client has selected a disk, perhaps with a name for the session. `waker` is used when the
    /// wait is over, and when the session is fenced.
    ///
    /// # Errors
    /// Another connection has that name, or the system cannot watch one more.
    pub(crate) fn enter(
        self: &Arc<Self>,
        disk: u32,
        socket: &Arc<OwnedFd>,
        name: Option<SessionName>,
        waker: &Waker,
    ) -> Result<DiskSession, Refusal> {
        let state = Arc::new(SessionState {
            socket: Arc::clone(socket),
            name,
            waker: waker.clone(),
            is_fenced: AtomicBool::new(false),
            end: Mutex::default(),
        });
        // Relaxed: only a unique number.
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let wait = {
            let mut connections = self.lock();
            let of_disk = match connections.entry(disk) {
                Entry::Occupied(occupied) => occupied.into_mut(),
                Entry::Vacant(vacant) => vacant.insert(OneDisk::new()?),
            };
            of_disk.find_left()?;
            of_disk.add(number, &state)?;
            let waiter = Waiter {
                waker: waker.clone(),
                may_go_on: Arc::default(),
            };
            let wait = of_disk.earlier.wait(number, waiter.clone());
            wait.map(|wait| (wait, waiter))
        };
        Ok(DiskSession {
            disks: Arc::clone(self),
            disk,
            number,
            state,
            wait,
        })
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u32, OneDisk>> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DiskSession {
    /// Returns whether some connections have to end first.
    pub(crate) fn must_wait(&mut self) -> bool {
        // Acquire: pairs with the Release where the last of them has ended.
        self.wait
            .take_if(|(_, waiter)| waiter.may_go_on.load(Ordering::Acquire));
        self.wait.is_some()
    }

    /// Ends the wait.
    pub(crate) fn wait_for_nobody(&mut self) {
        if self.must_wait()
            && let Some((wait, _)) = self.wait.take()
            && let Some(of_disk) = self.disks.lock().get_mut(&self.disk)
        {
            of_disk.earlier.give_up(wait);
        }
    }

    /// The client has given up its session of this number. Returns the connection that has to end,
    /// if there still is one.
    pub(crate) fn fence(&self, number: u64) -> Option<Fenced> {
        let client = self.state.name?.client;
        let other = {
            let connections = self.disks.lock();
            let of_disk = connections.get(&self.disk)?;
            Arc::clone(of_disk.by_name.get(&SessionName { client, number })?)
        };
        // Release: pairs with the Acquire in `is_fenced`, which the connection reads when it is
        // woken.
        other.is_fenced.store(true, Ordering::Release);
        other.waker.wake();
        other
            .wake_at_end(self.number, &self.state.waker)
            .then_some(Fenced(other, self.number))
    }

    /// Returns whether the client has fenced this connection over another one.
    pub(crate) fn is_fenced(&self) -> bool {
        // Acquire: pairs with the Release in `fence`.
        self.state.is_fenced.load(Ordering::Acquire)
    }

    /// The connection takes nothing more: new clients have to wait for its open requests.
    pub(crate) fn leave(&self) {
        if let Some(of_disk) = self.disks.lock().get_mut(&self.disk) {
            of_disk.leave(self.number);
        }
    }
}

impl OneDisk {
    fn new() -> io::Result<Self> {
        Ok(Self {
            by_number: BTreeMap::new(),
            by_name: BTreeMap::new(),
            hang_ups: HangUps::new()?,
            earlier: EarlierSessions::new(),
        })
    }

    fn add(&mut self, number: u64, state: &Arc<SessionState>) -> Result<(), Refusal> {
        if state.name.is_some_and(|name| self.by_name.contains_key(&name)) {
            return Err(Refusal::NameTaken);
        }
        self.hang_ups.watch(state.socket.as_fd(), number)?;
        let member = Registered {
            state: Arc::clone(state),
            left_as: None,
        };
        self.by_number.insert(number, member);
        if let Some(name) = state.name {
            self.by_name.insert(name, Arc::clone(state));
        }
        Ok(())
    }

    /// Removes a connection that has ended. Returns the waiters to wake.
    fn remove(&mut self, number: u64) -> Vec<Waiter> {
        let Some(Registered { state, left_as }) = self.by_number.remove(&number) else {
            return Vec::new();
        };
        if let Some(name) = state.name {
            self.by_name.remove(&name);
        }
        match left_as {
            Some(left_as) => self.earlier.end(left_as),
            None => {
                self.hang_ups.forget(state.socket.as_fd());
                Vec::new()
            }
        }
    }

    /// Records the clients that have left since the last time.
    fn find_left(&mut self) -> io::Result<()> {
        for number in self.hang_ups.all(self.by_number.len())? {
            self.leave(number);
        }
        Ok(())
    }

    /// From now on new clients wait for the connection of this number, which is not watched any
    /// more.
    fn leave(&mut self, number: u64) {
        if let Some(member) = self.by_number.get_mut(&number)
            && member.left_as.is_none()
        {
            member.left_as = Some(self.earlier.add());
            self.hang_ups.forget(member.state.socket.as_fd());
        }
    }
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        Self::Unwatched(error)
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NameTaken => f.write_str("another session has its name"),
            Self::Unwatched(error) => write!(f, "the system cannot watch one more connection: {error}"),
        }
    }
}

impl Drop for DiskSession {
    fn drop(&mut self) {
        self.wait_for_nobody();
        let (mut waiters, mut woken) = (Vec::new(), Vec::new());
        let mut connections = self.disks.lock();
        if let Some(of_disk) = connections.get_mut(&self.disk) {
            waiters = of_disk.remove(self.number);
            if of_disk.by_number.is_empty() {
                connections.remove(&self.disk);
            }
        }
        drop(connections);
        let mut end = self.state.lock();
        end.has_come = true;
        woken.extend(std::mem::take(&mut end.wakers).into_values());
        drop(end);
        for waiter in waiters {
            // Release: pairs with the Acquire in `must_wait`.
            waiter.may_go_on.store(true, Ordering::Release);
            woken.push(waiter.waker);
        }
        // With the locks released: a woken reactor may run at once, on this processor.
        woken.iter().for_each(Waker::wake);
    }
}

impl Fenced {
    /// Returns whether all requests of the session have ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.0.lock().has_come
    }
}

impl Drop for Fenced {
    fn drop(&mut self) {
        self.0.lock().wakers.remove(&self.1);
    }
}

impl SessionState {
    /// Registers the connection `number` to be woken at the end. Returns whether the end is still
    /// to come.
    fn wake_at_end(&self, number: u64, waker: &Waker) -> bool {
        let mut end = self.lock();
        if !end.has_come {
            end.wakers.insert(number, waker.clone());
        }
        !end.has_come
    }

    fn lock(&self) -> MutexGuard<'_, End> {
        self.end.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
