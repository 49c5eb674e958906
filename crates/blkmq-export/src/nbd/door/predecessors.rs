//! Decides for whom a client that selects a disk has to wait: for every connection to the same disk whose client has left by
//! then, until all that it began has ended. So nothing that a dead client wrote lands behind what its successor has read.
//! `connection` enters when its client selects, and is woken when it may go on.
//!
//! Connections whose clients are there are not waited for, and nobody who transmits is ever stopped: several connections of one
//! client look like several clients, and one that comes again does not disturb the others. Who has left, the kernel knows before
//! the connection's own reactor may: so it is asked.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blkmq_host::service::Waker;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// The connections that have selected a disk, by the disk's place in the engine's table.
#[derive(Debug, Default)]
pub(super) struct Disks {
    connections: Mutex<BTreeMap<u32, BTreeMap<u64, Arc<Life>>>>,
    next: AtomicU64,
}

/// One connection, as others see it.
#[derive(Debug)]
pub(super) struct Life {
    socket: Arc<OwnedFd>,
    /// It takes nothing more, whatever its client does.
    is_leaving: AtomicBool,
    end: Mutex<End>,
}

#[derive(Debug, Default)]
struct End {
    has_come: bool,
    /// Those who wait for it.
    wakers: Vec<Waker>,
}

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
    /// A client has selected a disk. If it has to wait, `waker` is used when that may be over.
    pub(super) fn enter(self: &Arc<Self>, disk: u32, socket: &Arc<OwnedFd>, waker: &Waker) -> Place {
        let life = Arc::new(Life {
            socket: Arc::clone(socket),
            is_leaving: AtomicBool::new(false),
            end: Mutex::default(),
        });
        // Relaxed: only a number of its own.
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let others: Vec<Arc<Life>> = {
            let mut connections = self.lock();
            let of_disk = connections.entry(disk).or_default();
            let others = of_disk.values().cloned().collect();
            of_disk.insert(number, Arc::clone(&life));
            others
        };
        let mut predecessors = leaving(others);
        predecessors.retain(|other| other.wake_at_end(waker));
        Place {
            disks: Arc::clone(self),
            disk,
            number,
            life,
            predecessors,
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u32, BTreeMap<u64, Arc<Life>>>> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Place {
    /// Says whether some have to end first.
    pub(super) fn must_wait(&mut self) -> bool {
        self.predecessors.retain(|other| !other.lock().has_come);
        !self.predecessors.is_empty()
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
            of_disk.remove(&self.number);
            if of_disk.is_empty() {
                connections.remove(&self.disk);
            }
        }
        drop(connections);
        let mut end = self.life.lock();
        end.has_come = true;
        for waker in end.wakers.drain(..) {
            waker.wake();
        }
    }
}

impl Life {
    /// Has somebody woken when it ends. Says whether it has not ended yet.
    fn wake_at_end(&self, waker: &Waker) -> bool {
        let mut end = self.lock();
        if !end.has_come {
            end.wakers.push(waker.clone());
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
