//! The moment at which the kernel learns that a device was left to the next daemon: once the threads that
//! served it have ended, and some time before this process does.
//!
//! Linux 6.12 returns the memory of a device's queues by work of its own, once for each queue. If the
//! next daemon took the device over before all of that was done, the rest of it took the memory of the
//! next daemon's queues away, and the device was lost. The next daemon gets the device only after the
//! end of this process, so this one waits. And a thread that lives on may be given a request that it
//! does not answer any more.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::sleep;
use std::time::Duration;

use super::control::{Control, until};
use super::protocol::{LIVE, RESIZABLE};
use crate::common::command_ring::CommandRing;

/// The rings of queues that were left, each with the number of its device.
static RINGS: Mutex<Vec<(u32, OwnedFd)>> = Mutex::new(Vec::new());

/// Keeps the ring of a queue that is left open.
pub(super) fn keep(number: u32, ring: &CommandRing) {
    match ring.keep_open() {
        Ok(ring) => lock().push((number, ring)),
        Err(error) => {
            tracing::warn!("ublk: the ring of a queue of device {number} is closed too early: {error}")
        }
    }
}

/// Closes the rings of the queues that were left, whose threads have ended, and gives the kernel time
/// for its work. May block.
pub(super) fn close() {
    let rings = std::mem::take(&mut *lock());
    let numbers: BTreeSet<u32> = rings.iter().map(|(number, _)| *number).collect();
    drop(rings);
    if numbers.is_empty() {
        return;
    }
    let Ok(control) = Control::open() else { return };
    let infos = || numbers.iter().filter_map(|number| control.info(*number).ok()?);
    // A kernel that can change sizes does all of it before it gives the device away.
    let are_early = || infos().filter(|info| !info.has(RESIZABLE));
    let work = || match are_early().any(|info| info.state == LIVE) {
        true => Err(io::ErrorKind::ResourceBusy.into()),
        false => Ok(()),
    };
    if are_early().next().is_some() {
        // A device that needs longer is given away later than the others.
        let _ = until(WORK_MAX, |_| true, work);
        sleep(REST);
    }
}

fn lock() -> MutexGuard<'static, Vec<(u32, OwnedFd)>> {
    // A panic under this lock leaves nothing half done.
    RINGS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Time for the kernel to stop requests to a device that was left.
const WORK_MAX: Duration = Duration::from_millis(200);
/// Time for what it does after that, which nobody can see.
const REST: Duration = Duration::from_millis(20);
