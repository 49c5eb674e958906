//! Disks at other hosts, opened side by side before the others: each may take seconds, as until the lock of a client
//! that has died is free, and monitors of machines do not wait for the sum. `plan` takes them in the order of the
//! configuration.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use blkmq_drivers::driver::{OpenDisk, OpenError, Purpose};

use super::attributes;
use crate::disk::DiskSpec;

/// What became of each disk that was opened ahead, by its name.
pub(super) type Ahead = BTreeMap<String, Result<Box<dyn OpenDisk>, OpenError>>;

/// Opens the disks at other hosts. Blocks until the last one is open, or has failed.
pub(super) fn open(disks: &[DiskSpec], purpose: Purpose) -> Ahead {
    let is_remote = |spec: &&DiskSpec| spec.source.driver().is_some_and(|driver| driver.is_remote());
    let remote: Vec<&DiskSpec> = disks.iter().filter(is_remote).collect();
    let (next, opened) = (AtomicUsize::new(0), Mutex::new(Ahead::new()));
    let open_some = || {
        // Relaxed: a number for each, and nothing else.
        while let Some(spec) = remote.get(next.fetch_add(1, Ordering::Relaxed)) {
            let Some(driver) = spec.source.driver() else {
                continue;
            };
            let disk = driver.open(&attributes(spec, purpose));
            let mut opened = opened.lock().unwrap_or_else(PoisonError::into_inner);
            opened.insert(spec.name.clone(), disk);
        }
    };
    // One alone is opened by this thread, too, and so are all if there can be no others.
    thread::scope(|scope| {
        for _ in 1..remote.len().min(SIDE_BY_SIDE_MAX) {
            let thread = thread::Builder::new().name("open".to_owned());
            if thread.spawn_scoped(scope, open_some).is_err() {
                break;
            }
        }
        open_some();
    });
    opened.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// Most disks that are being opened at a time.
const SIDE_BY_SIDE_MAX: usize = 64;
