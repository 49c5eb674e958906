//! Decides for whom a client that selects a disk has to wait: for every connection to the same disk whose client has left by
//! then, until all that it began has ended. So nothing that a dead client wrote lands behind what its successor has read.
//! `connection` enters when its client selects, and is woken when it may go on.
//!
//! Connections whose clients are there are not waited for, and nobody who transmits is ever stopped: several connections of one
//! client look like several clients, and one that comes again does not disturb the others. Who has left, the kernel knows before
//! the connection's own reactor may: so it is asked.
//!
//! A client may give its sessions names. Then it can say of one that it has given it up, whatever the network still carries of
//! it: *fence* it. That connection is ended at once, and the client hears when all that it began has ended. Only who knows the
//! client's name, a random number of 128 bits, can do so, over a connection to the same disk.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blkmq_host::service::Waker;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::nbd::codec::handshake::SessionName;

/// The connections that have selected a disk, by the disk's place in the engine's table.
#[derive(Debug, Default)]
pub(super) struct Disks {
    connections: Mutex<BTreeMap<u32, OfDisk>>,
    next: AtomicU64,
}

/// The connections that have selected one disk.
#[derive(Debug, Default)]
struct OfDisk {
    by_number: BTreeMap<u64, Arc<Life>>,
    by_name: BTreeMap<SessionName, Arc<Life>>,
}

/// One connection, as others see it.
#[derive(Debug)]
pub(super) struct Life {
    socket: Arc<OwnedFd>,
    name: Option<SessionName>,
    waker: Waker,
    /// It takes nothing more, whatever its client does.
    is_leaving: AtomicBool,
    /// Its client has given it up: it is to end, whatever still comes.
    is_fenced: AtomicBool,
    end: Mutex<End>,
}

#[derive(Debug, Default)]
struct End {
    has_come: bool,
    /// Those who wait for it, by their numbers.
    wakers: BTreeMap<u64, Waker>,
}

/// A session that was fenced, for the connection of a number that waits for its end.
#[derive(Debug)]
pub(super) struct Fenced(Arc<Life>, u64);

/// A connection's place among those of its disk, until all that it began has ended.
#[derive(Debug)]
pub(super) struct Place {
    disks: Arc<Disks>,
    disk: u32,
    number: u64,
    life: Arc<Life>,
    /// Those who have to end first.
    predecessors: Vec<Arc<Life>>,
}

impl Disks {
    /// A client has selected a disk, and may have a name for the session. `waker` is used when it does not have to wait any more,
    /// and when it is fenced. None if another connection has that name.
    pub(super) fn enter(
        self: &Arc<Self>,
        disk: u32,
        socket: &Arc<OwnedFd>,
        name: Option<SessionName>,
        waker: &Waker,
    ) -> Option<Place> {
        let life = Arc::new(Life {
            socket: Arc::clone(socket),
            name,
            waker: waker.clone(),
            is_leaving: AtomicBool::new(false),
            is_fenced: AtomicBool::new(false),
            end: Mutex::default(),
        });
        // Relaxed: only a number of its own.
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let others: Vec<Arc<Life>> = {
            let mut connections = self.lock();
            let of_disk = connections.entry(disk).or_default();
            if let Some(name) = name {
                match of_disk.by_name.entry(name) {
                    Entry::Vacant(vacant) => vacant.insert(Arc::clone(&life)),
                    Entry::Occupied(_) => return None,
                };
            }
            let others = of_disk.by_number.values().cloned().collect();
            of_disk.by_number.insert(number, Arc::clone(&life));
            others
        };
        let mut predecessors = leaving(others);
        predecessors.retain(|other| other.wake_at_end(number, waker));
        Some(Place {
            disks: Arc::clone(self),
            disk,
            number,
            life,
            predecessors,
        })
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u32, OfDisk>> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Place {
    /// Says whether some have to end first.
    pub(super) fn must_wait(&mut self) -> bool {
        self.predecessors.retain(|other| !other.lock().has_come);
        !self.predecessors.is_empty()
    }

    /// The client has given up its session of this number. Says which connection has to end for that, if there still is one.
    pub(super) fn fence(&self, number: u64) -> Option<Fenced> {
        let client = self.life.name?.client;
        let other = {
            let connections = self.disks.lock();
            let of_disk = connections.get(&self.disk)?;
            Arc::clone(of_disk.by_name.get(&SessionName { client, number })?)
        };
        // Release: pairs with the Acquire in `is_fenced`, which its connection asks when it is woken.
        other.is_fenced.store(true, Ordering::Release);
        other.waker.wake();
        other
            .wake_at_end(self.number, &self.life.waker)
            .then_some(Fenced(other, self.number))
    }

    /// Says whether the client has given this connection up, and said so over another one.
    pub(super) fn is_fenced(&self) -> bool {
        // Acquire: pairs with the Release in `fence`.
        self.life.is_fenced.load(Ordering::Acquire)
    }

    /// The connection takes nothing more: those who come have to wait for what it has begun.
    pub(super) fn leave(&self) {
        // Release: pairs with the Acquire in `leaving`.
        self.life.is_leaving.store(true, Ordering::Release);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut connections = self.disks.lock();
        if let Some(of_disk) = connections.get_mut(&self.disk) {
            of_disk.by_number.remove(&self.number);
            if let Some(name) = self.life.name {
                of_disk.by_name.remove(&name);
            }
            if of_disk.by_number.is_empty() {
                connections.remove(&self.disk);
            }
        }
        drop(connections);
        for other in &self.predecessors {
            other.lock().wakers.remove(&self.number);
        }
        let mut end = self.life.lock();
        end.has_come = true;
        for waker in std::mem::take(&mut end.wakers).into_values() {
            waker.wake();
        }
    }
}

impl Fenced {
    /// Says whether all that it began has ended.
    pub(super) fn has_ended(&self) -> bool {
        self.0.lock().has_come
    }
}

impl Drop for Fenced {
    fn drop(&mut self) {
        self.0.lock().wakers.remove(&self.1);
    }
}

impl Life {
    /// Has the connection of a number woken when it ends. Says whether it has not ended yet.
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

/// Keeps those whose clients have left, or which are being ended.
fn leaving(mut others: Vec<Arc<Life>>) -> Vec<Arc<Life>> {
    if others.is_empty() {
        return others;
    }
    let mut asked: Vec<PollFd<'_>> = others
        .iter()
        .map(|other| PollFd::new(&*other.socket, PollFlags::RDHUP))
        .collect();
    let now = Timespec::default();
    // If the kernel cannot say, all are waited for: better late than wrong.
    let is_known = poll(&mut asked, Some(&now)).is_ok();
    let gone = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL;
    let mut has_left = asked
        .iter()
        .map(|one| !is_known || one.revents().intersects(gone))
        .collect::<Vec<bool>>()
        .into_iter();
    // Acquire: pairs with the Release in `leave`.
    others.retain(|other| has_left.next() == Some(true) || other.is_leaving.load(Ordering::Acquire));
    others
}
