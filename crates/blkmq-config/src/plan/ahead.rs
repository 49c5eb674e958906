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
    let remote: Vec<&DiskSpec> = disks.iter().filter(|spec| is_remote(spec)).collect();
    let opened = side_by_side(&remote, |spec| {
        let driver = spec.source.driver()?;
        Some((spec.name.clone(), driver.open(&attributes(spec, purpose))))
    });
    opened.into_iter().flatten().collect()
}

/// Whether a disk is at another host.
pub(crate) fn is_remote(spec: &DiskSpec) -> bool {
    spec.source.driver().is_some_and(|driver| driver.is_remote())
}

/// Opens each thing on a thread of its own, a limited number at a time. The results have the order of the things.
pub(crate) fn side_by_side<T: Sync, R: Send>(things: &[T], open: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let (next, opened) = (AtomicUsize::new(0), Mutex::new(BTreeMap::new()));
    let open_some = || {
        loop {
            // Relaxed: a number for each, and nothing else.
            let place = next.fetch_add(1, Ordering::Relaxed);
            let Some(thing) = things.get(place) else { return };
            let result = open(thing);
            let mut opened = opened.lock().unwrap_or_else(PoisonError::into_inner);
            opened.insert(place, result);
        }
    };
    // One alone is opened by this thread, too, and so are all if there can be no others.
    thread::scope(|scope| {
        for _ in 1..things.len().min(SIDE_BY_SIDE_MAX) {
            let thread = thread::Builder::new().name("open".to_owned());
            if thread.spawn_scoped(scope, open_some).is_err() {
                break;
            }
        }
        open_some();
    });
    let opened = opened.into_inner().unwrap_or_else(PoisonError::into_inner);
    opened.into_values().collect()
}

/// Most disks that are being opened at a time.
const SIDE_BY_SIDE_MAX: usize = 64;

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    #[test]
    fn things_are_opened_at_a_time_and_stay_in_order() {
        let all = Barrier::new(8);
        let opened = side_by_side(&[0, 1, 2, 3, 4, 5, 6, 7], |number| {
            all.wait();
            2 * number
        });
        assert_eq!(opened, [0, 2, 4, 6, 8, 10, 12, 14]);
        assert!(side_by_side(&[] as &[u8], |_| ()).is_empty());
    }
}
