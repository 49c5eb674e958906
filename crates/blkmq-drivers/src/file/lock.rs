//! The lock that keeps two daemons, or a daemon and QEMU, from one file: one writer, or any number of
//! readers. `open` takes the lock.
//!
//! There are two locks, because two kinds of neighbours check different ones. Scripts and udev use
//! `flock` (udev leaves a block device alone while it is held), and /proc/locks names its holder.
//! QEMU uses open-file-description locks on byte ranges of images: a writer here locks all bytes,
//! which excludes every QEMU that has the image open; a reader takes the two bytes by which QEMU's
//! users announce "I read" and "nobody else may write" (`docs/drivers/file.md`), so that both can
//! read an image together. Both locks end with the file description, however the process ends. If
//! the process was killed, the kernel may need a moment to dismantle its rings, and a successor
//! that starts at once waits for that.
//!
//! A daemon that takes over from another one gets the description that holds the lock
//! ([`inherit`]). Then both have the lock, and nobody else, whichever of them ends first.

use std::fs::{File, Metadata};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use blkmq_host::process;
use rustix::fs::FlockOperation;

use super::disk::{filesystem, is_local};
use super::error::FileError;
use super::place;
use super::sys::{self, ByteLock};

/// What excludes others from a file.
#[derive(Debug)]
pub(super) enum Lock {
    /// Nothing: `lock=off`.
    None,
    /// The file's description has a reader's lock.
    Reader,
    /// The file's description has the writer's lock.
    Writer,
    /// Another description of the file has it, which another process opened.
    Inherited(File),
}

/// Locks of another process with which no disk has been opened yet.
static INHERITED: Mutex<Vec<File>> = Mutex::new(Vec::new());

/// Those with which a disk was opened, until they are in the name of this process.
static TAKEN: Mutex<Vec<(File, PathBuf)>> = Mutex::new(Vec::new());

/// Another process still writes to what this one has opened: it is about to take over. SeqCst, and seldom.
static IS_TAKING_OVER: AtomicBool = AtomicBool::new(false);

/// Notes that this process takes over from another one, which still writes, until [`release_unused`].
pub fn begin_takeover() {
    IS_TAKING_OVER.store(true, Ordering::SeqCst);
}

/// Returns whether another process still writes to what this one has opened.
#[cfg(feature = "qcow2")]
pub(crate) fn is_taking_over() -> bool {
    IS_TAKING_OVER.load(Ordering::SeqCst)
}

/// Records an open file that holds a writer's lock, and that another process has handed over: the
/// disk in that file uses it instead of a lock of its own.
pub fn inherit(file: OwnedFd) {
    let mut inherited = INHERITED.lock().unwrap_or_else(PoisonError::into_inner);
    inherited.push(file.into());
}

/// Ends a takeover: the other process writes nothing any more. Releases the locks that it has handed over and that no disk
/// uses. Returns their number.
pub fn release_unused() -> usize {
    IS_TAKING_OVER.store(false, Ordering::SeqCst);
    let mut inherited = INHERITED.lock().unwrap_or_else(PoisonError::into_inner);
    let unused = std::mem::take(&mut *inherited);
    unused.len()
}

/// Takes the locks of disks that another process has handed over in the name of this one. Waits for a moment where another
/// program has such a lock, too, and logs it if that does not end.
pub fn retake_all() {
    let taken = std::mem::take(&mut *TAKEN.lock().unwrap_or_else(PoisonError::into_inner));
    for (file, path) in taken {
        if !retake(&file) {
            let path = path.display();
            tracing::error!(
                "file {path}: taken over, and another program has its flock, too, so that others may take it: see /proc/locks"
            );
        }
    }
}

/// Returns whether another process has handed over the lock of the file at this path.
pub(super) fn is_inherited(path: &Path) -> bool {
    let Ok(wanted) = std::fs::metadata(path) else {
        return false;
    };
    let inherited = INHERITED.lock().unwrap_or_else(PoisonError::into_inner);
    inherited.iter().any(|file| is_of(file, &wanted))
}

/// Takes the lock of a file that another process has handed over: one disk's.
fn take_inherited(file: &File, path: &Path) -> Option<File> {
    let wanted = file.metadata().ok()?;
    let mut inherited = INHERITED.lock().unwrap_or_else(PoisonError::into_inner);
    let at = inherited.iter().position(|file| is_of(file, &wanted))?;
    let file = inherited.swap_remove(at);
    drop(inherited);
    let mut taken = TAKEN.lock().unwrap_or_else(PoisonError::into_inner);
    taken.extend(file.try_clone().map(|file| (file, path.to_owned())));
    Some(file)
}

/// Takes the lock of a file that this process has inherited once more, so that /proc/locks names this process: others ask
/// there, and a process in a sandbox nowhere else. Between the two kinds the lock may be lost to somebody who takes it at
/// that moment; the locks on bytes, which keep other daemons and QEMU away, are held throughout. Where a server has both
/// kinds as one, nothing is done. Returns whether nobody else has it: else this process has a shared one, if that can be had.
fn retake(file: &File) -> bool {
    if !is_locked_here(file) {
        return true;
    }
    // What fails is repeated.
    let share = || rustix::fs::flock(file, FlockOperation::NonBlockingLockShared);
    for _ in 0..RETAKES_MAX {
        let _ = share();
        if rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive).is_ok() {
            return true;
        }
        // The kernel has released the shared lock, although it refused the other.
        let _ = share();
        thread::sleep(LEAVING_LOOK);
    }
    false
}

/// Returns whether the locks of the file are known to be this kernel's alone.
fn is_locked_here(file: &File) -> bool {
    is_local(file) || LOCKED_HERE.contains(&filesystem(file))
}

fn is_of(file: &File, wanted: &Metadata) -> bool {
    let found = file.metadata();
    found.is_ok_and(|found| (found.dev(), found.ino()) == (wanted.dev(), wanted.ino()))
}

/// Locks an open file for one writer, or among readers. Waits for a while for a holder that has
/// ended already or cannot be seen (it has released the lock since, or is in another container);
/// fails at once if the holder is alive.
pub(super) fn lock(file: &File, path: &Path, for_reading: bool) -> Result<Lock, FileError> {
    if let Some(inherited) = take_inherited(file, path) {
        // The description has the lock already, so this changes nothing; without it, the lock would
        // be taken now, or refused.
        return try_lock(&inherited, path, false).map(|()| Lock::Inherited(inherited));
    }
    let kind = if for_reading { Lock::Reader } else { Lock::Writer };
    wait_for_lock(file, path, for_reading).map(|()| kind)
}

/// Returns whether this process holds a `flock` on the file: another disk has it.
pub(super) fn is_ours(file: &File) -> bool {
    holders_of(file).any(|pid| pid == std::process::id())
}

/// Returns whether some process holds a `flock` on the file.
pub(super) fn is_held(file: &File) -> bool {
    holders_of(file).next().is_some()
}

/// Makes a writer's lock one of a reader.
#[cfg(feature = "qcow2")]
pub(super) fn share(file: &File, path: &Path) -> Result<(), FileError> {
    let shared = rustix::fs::flock(file, FlockOperation::NonBlockingLockShared).map_err(io::Error::from);
    let shared = shared.and_then(|()| sys::lock_bytes(file, ByteLock::None, 0, 0));
    let shared = shared.and_then(|()| lock_as_reader(file));
    shared.map_err(|error| refused(file, path, error, || holder_of(file)))
}

/// Takes one of a reader, at once or not at all.
#[cfg(feature = "qcow2")]
pub(super) fn take_as_reader(file: &File, path: &Path) -> Result<(), FileError> {
    try_lock(file, path, true)
}

/// Gives a lock up, whichever it is.
#[cfg(feature = "qcow2")]
pub(super) fn give_up(file: &File) {
    // Without one there is nothing to do.
    let _ = sys::lock_bytes(file, ByteLock::None, 0, 0);
    let _ = rustix::fs::flock(file, FlockOperation::NonBlockingUnlock);
}

/// Makes it a writer's again.
#[cfg(feature = "qcow2")]
pub(super) fn take_back(file: &File, path: &Path) -> Result<(), FileError> {
    try_lock(file, path, false)
}

fn wait_for_lock(file: &File, path: &Path, for_reading: bool) -> Result<(), FileError> {
    let deadline = Instant::now() + LEAVING_TIME_MAX;
    loop {
        let result = try_lock(file, path, for_reading);
        let is_held = matches!(result, Err(FileError::Locked { .. }));
        // After a conflict over bytes alone, this process itself locks the whole file: a holder
        // that is alive.
        if !is_held || holders_of(file).any(|pid| !has_ended(pid)) || Instant::now() > deadline {
            return result;
        }
        thread::sleep(LEAVING_LOOK);
    }
}

fn try_lock(file: &File, path: &Path, for_reading: bool) -> Result<(), FileError> {
    let whole = if for_reading {
        FlockOperation::NonBlockingLockShared
    } else {
        FlockOperation::NonBlockingLockExclusive
    };
    // On NFS it would be a lock on all bytes, and another host's reader would see it on QEMU's byte for writers.
    if !for_reading || filesystem(file) != NFS {
        rustix::fs::flock(file, whole)
            .map_err(|error| refused(file, path, error.into(), || holder_of(file)))?;
    }
    let ranges = if for_reading {
        lock_as_reader(file)
    } else {
        sys::lock_bytes(file, ByteLock::Exclusive, 0, 0)
    };
    // The holders of byte ranges cannot be found out.
    ranges.map_err(|error| refused(file, path, error, || None))
}

fn lock_as_reader(file: &File) -> io::Result<()> {
    sys::lock_bytes(file, ByteLock::Shared, QEMU_READS, 1)?;
    sys::lock_bytes(file, ByteLock::Shared, QEMU_FORBIDS_WRITES, 1)?;
    if sys::is_locked(file, QEMU_WRITES, 1)? {
        return Err(io::ErrorKind::WouldBlock.into());
    }
    Ok(())
}

fn refused(file: &File, path: &Path, error: io::Error, holder: impl FnOnce() -> Option<String>) -> FileError {
    let path = path.to_owned();
    let unknown = || match is_locked_here(file) {
        true => "another program (QEMU, for instance)",
        // On NFS, for example, where nothing names it.
        false => "another program (QEMU, for instance), or one on another host",
    };
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::PermissionDenied => FileError::Locked {
            path,
            holder: holder().unwrap_or_else(|| unknown().to_owned()),
            advice: "stop the other user, or serve it read-only on both sides",
        },
        _ => FileError::System {
            path,
            action: "lock it",
            error,
            advice: "; lock=off serves it without a lock",
        },
    }
}

/// Names a process that holds a `flock` on the file, one that lives if there is one: files in several subvolumes of btrfs may
/// have one number.
fn holder_of(file: &File) -> Option<String> {
    let mut holders = holders_of(file).peekable();
    let first = holders.peek().copied();
    holders.find(|pid| !has_ended(*pid)).or(first).map(describe)
}

/// The processes that took a `flock` on the file which is still held.
fn holders_of(file: &File) -> impl Iterator<Item = u32> {
    let id = id_of(file);
    let locks = std::fs::read_to_string("/proc/locks").unwrap_or_default();
    let holders: Vec<u32> = locks.lines().filter_map(|line| holder(line, &id)).collect();
    holders.into_iter()
}

/// A file as /proc/locks names it: by the device number of its whole filesystem, as the table of mounts has it. A file's own
/// number is another one on btrfs, where each subvolume has one, and on some overlays.
fn id_of(file: &File) -> String {
    file.metadata().map_or_else(
        |_| String::new(),
        |meta| {
            let device = place::mounted_device(file).unwrap_or(meta.dev());
            let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
            format!("{major:02x}:{minor:02x}:{}", meta.ino())
        },
    )
}

/// The process that took a `flock` on a file, from a line of /proc/locks.
fn holder(line: &str, id: &str) -> Option<u32> {
    let mut words = line.split_whitespace().skip(1);
    let is_flock = words.next() == Some("FLOCK");
    // Waiters have an arrow in front of the kind, so they are not taken for holders.
    let mut words = words.skip(2);
    let pid: u32 = words.next()?.parse().ok()?;
    (is_flock && words.next() == Some(id)).then_some(pid)
}

fn has_ended(pid: u32) -> bool {
    process::has_ended(pid).unwrap_or(true)
}

fn describe(pid: u32) -> String {
    if pid == std::process::id() {
        return "this process (another disk has the same file)".to_owned();
    }
    match std::fs::read_to_string(format!("/proc/{pid}/comm")) {
        Ok(name) => format!("{} (process {pid})", name.trim_end()),
        Err(_) => format!("process {pid}, which has ended, or a daemon that took over from it"),
    }
}
/// How long to wait for the kernel to finish with a process that has ended. It took up to 0.1 s
/// where it was measured.
const LEAVING_TIME_MAX: Duration = Duration::from_secs(5);
const LEAVING_LOOK: Duration = Duration::from_millis(5);
/// How often a lock is taken again that somebody else has taken for a moment, as udev does.
const RETAKES_MAX: u32 = 20;
/// The magic numbers of other filesystems whose locks are this kernel's alone: overlays, ZFS and bcachefs.
const LOCKED_HERE: [u64; 3] = [0x794c_7630, 0x2fc1_2fc1, 0xca45_1a4e];
/// The magic number of NFS, whose clients have the server lock bytes for both kinds of locks.
const NFS: u64 = 0x6969;
/// The byte on which QEMU's users of an image that rely on consistent reads hold a shared lock.
const QEMU_READS: u64 = 100;
/// The byte of those that write.
const QEMU_WRITES: u64 = 101;
/// The byte of those that let nobody else write.
const QEMU_FORBIDS_WRITES: u64 = 201;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::scratch_file;

    fn open(path: &Path) -> File {
        File::options().read(true).write(true).open(path).unwrap()
    }

    #[test]
    fn second_writer_is_told_who_has_the_file() {
        let path = scratch_file("second_writer", 4096);
        let first = open(&path);
        lock(&first, &path, false).unwrap();
        let error = lock(&open(&path), &path, false).unwrap_err().to_string();
        assert!(
            error.contains("in use by this process") && error.contains("serve it read-only"),
            "{error}"
        );
        assert!(
            lock(&open(&path), &path, true).is_err(),
            "a reader beside a writer"
        );
        drop(first);
        lock(&open(&path), &path, false).unwrap();
    }

    #[test]
    fn lock_that_was_handed_over_lets_its_owner_in_once_and_nobody_else() {
        let path = scratch_file("inherited_lock", 4096);
        let first = open(&path);
        lock(&first, &path, false).unwrap();
        assert!(!is_inherited(&path));
        inherit(first.try_clone().unwrap().into());
        assert!(is_inherited(&path));
        let second = open(&path);
        let held = lock(&second, &path, false).unwrap();
        assert!(matches!(held, Lock::Inherited(_)), "{held:?}");
        assert!(
            lock(&open(&path), &path, false).is_err(),
            "a third one, beside both"
        );
        drop(first);
        assert!(
            lock(&open(&path), &path, false).is_err(),
            "the first one has ended"
        );
        drop(held);
        assert!(
            lock(&open(&path), &path, false).is_err(),
            "it is to be taken again"
        );
        TAKEN.lock().unwrap().clear();
        lock(&open(&path), &path, false).unwrap();
    }

    #[test]
    fn readers_share_and_keep_writers_out() {
        let path = scratch_file("readers_share", 4096);
        let readers = [open(&path), open(&path)];
        for reader in &readers {
            lock(reader, &path, true).unwrap();
        }
        assert!(lock(&open(&path), &path, false).is_err());
    }

    #[test]
    fn lock_that_was_handed_over_is_taken_again_in_the_name_of_its_heir() {
        let path = scratch_file("heir", 4096);
        let file = open(&path);
        // `flock` takes the lock of a file that its parent keeps open, and ends.
        let taken = std::process::Command::new("flock")
            .args(["-x", "0"])
            .stdin(file.try_clone().unwrap())
            .status();
        if !taken.is_ok_and(|status| status.success()) {
            blkmq_testkit::skip("the command flock is not installed");
            return;
        }
        assert!(is_held(&file) && !is_ours(&file));
        assert!(retake(&file));
        assert!(is_ours(&file));
        assert!(rustix::fs::flock(open(&path), FlockOperation::NonBlockingLockShared).is_err());
    }

    #[test]
    fn heir_keeps_the_lock_beside_a_program_that_shares_it_for_a_moment() {
        let path = scratch_file("heir_shares", 4096);
        let [heir, moment, other] = [(); 3].map(|()| open(&path));
        rustix::fs::flock(&moment, FlockOperation::NonBlockingLockShared).unwrap();
        assert!(!retake(&heir), "somebody else has it, too");
        drop(moment);
        assert!(rustix::fs::flock(&other, FlockOperation::NonBlockingLockExclusive).is_err());
        assert!(retake(&heir));
        assert!(rustix::fs::flock(&other, FlockOperation::NonBlockingLockShared).is_err());
    }

    #[test]
    fn another_process_is_named() {
        let path = scratch_file("other_process", 4096);
        let child = std::process::Command::new("flock")
            .arg(&*path)
            .args(["-c", "echo locked; read -r _"])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn();
        let Ok(mut child) = child else {
            blkmq_testkit::skip("the command flock is not installed");
            return;
        };
        let mut line = String::new();
        let mut output = io::BufReader::new(child.stdout.take().unwrap());
        io::BufRead::read_line(&mut output, &mut line).unwrap();
        let error = lock(&open(&path), &path, false).unwrap_err().to_string();
        drop(child.stdin.take());
        child.wait().unwrap();
        assert!(error.contains("in use by flock (process "), "{error}");
    }

    #[test]
    fn image_that_qemu_writes_is_not_served() {
        let path = scratch_file("qemu_writes", 4096);
        let qemu = open(&path);
        sys::lock_bytes(&qemu, ByteLock::Shared, QEMU_WRITES, 1).unwrap();
        for for_reading in [true, false] {
            let error = lock(&open(&path), &path, for_reading).unwrap_err().to_string();
            assert!(error.contains("another program (QEMU"), "{error}");
        }
    }
}
