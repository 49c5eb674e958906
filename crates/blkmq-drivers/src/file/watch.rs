//! The threads that ask servers where files end (`disk/end`): one for each filesystem whose answers may take long, as FUSE
//! and NFS, so that one that does not answer keeps nobody from looking at the others. `device` has the files looked at.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::Duration;

use blkmq_host::threads::spawn;

use super::disk::{Backing, FileDisk};

/// The files of each filesystem that has a thread.
static WATCHED: Mutex<BTreeMap<u64, Vec<Weak<FileDisk>>>> = Mutex::new(BTreeMap::new());

/// Has a file looked at until it is closed, if that may block and clients can write to it.
pub(super) fn watch(disk: &Arc<FileDisk>) {
    let Backing::Filesystem(filesystem) = disk.device() else {
        return;
    };
    // The files of images have no size: their ends are no ends of disks.
    if !disk.may_block || disk.is_read_only() || disk.size() == 0 {
        return;
    }
    let mut watched = watched();
    let is_new = !watched.contains_key(&filesystem);
    watched.entry(filesystem).or_default().push(Arc::downgrade(disk));
    if is_new && let Err(error) = spawn("file-ends", move || look_at_all(filesystem)) {
        // The next one tries it again.
        watched.remove(&filesystem);
        tracing::warn!(
            source = %disk.path().display(),
            "file {:?}: there is no thread that asks its filesystem where it ends: {error}",
            disk.path()
        );
    }
}

fn look_at_all(filesystem: u64) {
    while let Some(disks) = living(filesystem) {
        for disk in disks {
            // One at a time: a file that was closed meanwhile is not kept open for longer than a look.
            disk.upgrade().iter().for_each(|disk| disk.look_if_due());
        }
        thread::sleep(PAUSE);
    }
}

/// The files that are open; none if this was the last round.
fn living(filesystem: u64) -> Option<Vec<Weak<FileDisk>>> {
    let mut watched = watched();
    let disks = watched.get_mut(&filesystem)?;
    disks.retain(|disk| disk.strong_count() > 0);
    if disks.is_empty() {
        watched.remove(&filesystem);
        return None;
    }
    Some(disks.clone())
}

fn watched() -> MutexGuard<'static, BTreeMap<u64, Vec<Weak<FileDisk>>>> {
    WATCHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The pause between two looks at a file that is written.
const PAUSE: Duration = Duration::from_millis(200);

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::time::Instant;

    use super::*;
    use crate::testing::scratch_file;

    #[test]
    fn file_of_a_server_is_found_truncated_and_its_thread_ends_with_it() {
        let path = scratch_file("watched", 8192);
        let file = File::options().read(true).write(true).open(&*path).unwrap();
        let of = Backing::Filesystem(u64::MAX - 1);
        let mut disk = FileDisk::new(file, path.to_path_buf(), 8192, 512, of);
        disk.may_block = true;
        let disk = Arc::new(disk);
        watch(&disk);
        disk.look_before_write(blkmq_core::time::Instant(5), 512);
        disk.file.set_len(4096).unwrap();
        let begun = Instant::now();
        while !disk.is_truncated() {
            assert!(begun.elapsed() < Duration::from_secs(20), "nobody looks");
            thread::sleep(PAUSE / 10);
        }
        drop(disk);
        while watched().contains_key(&(u64::MAX - 1)) {
            assert!(begun.elapsed() < Duration::from_secs(20), "the thread goes on");
            thread::sleep(PAUSE / 10);
        }
    }
}
