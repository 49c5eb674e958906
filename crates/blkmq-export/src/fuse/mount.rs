//! How a regular file becomes a disk, and when it is a plain file again: what may be mounted
//! over, who owns it, and who unmounts it. Root mounts directly; other users need `fusermount3`.
//! All of this may block: no reactor calls it.

use std::fs::OpenOptions;
use std::io::{self, ErrorKind, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, mount};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags, SocketType, recvmsg,
    socketpair,
};

use super::dentry::{Dentry, path_of};
use super::mount_probe::{Daemon, MountProbe};
use super::mount_table::{self, Entry};
use super::protocol::DATA_BYTES_MAX;
use super::rights::Way;
use super::saved::SavedMount;
use crate::common::OpenError;
use crate::common::place::check_directory;
use crate::common::turn::Turn;

/// A file that a disk may be mounted over.
#[derive(Debug)]
pub(super) struct Place {
    path: PathBuf,
    /// The file was made for the mount, and is removed afterwards.
    is_made: bool,
    /// The user and the group that own the file.
    owner: (u32, u32),
}

/// A file that is a disk, until it is unmounted.
#[derive(Debug)]
pub(super) struct Mount {
    place: Place,
    /// The mount's entry in the table of mounts, if that could be read.
    entry: Option<Entry>,
    is_over: bool,
    ownership: Ownership,
}

/// Whether this daemon is to unmount a mount: during a takeover, only the daemon that serves it
/// does. A clone shares the state.
#[derive(Clone, Debug)]
pub(super) struct Ownership(Arc<AtomicBool>);

/// How an unmount ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unmounted {
    /// Nobody had it open.
    Whole,
    /// Some processes have it open: the path is free, and they keep the disk as long as it is
    /// served.
    Busy,
}

impl Place {
    /// Checks that a disk may be mounted at a path: over a regular file, which is made if nothing
    /// is there. A mount that a killed daemon left is unmounted.
    ///
    /// # Errors
    /// What is there instead, and what to do.
    pub(super) fn find(path: &Path) -> Result<Self, OpenError> {
        let path = absolute(path)?;
        let refused = |error: io::Error| OpenError::new(format!("export fuse:{}: {error}", path.display()));
        Way::find().map_err(|what| refused(io::Error::other(what)))?;
        let turn = remove_dead(&path)?;
        let place = Dentry::of(&path).map_err(refused)?;
        let is_made = place.make().map_err(refused)?;
        let (_, owner) = place.file().map_err(refused)?;
        drop(turn);
        Ok(Self { path, is_made, owner })
    }

    /// Mounts a filesystem of one file over it. Requests for it come from the returned descriptor,
    /// which never blocks.
    ///
    /// # Errors
    /// The error of the system or of `fusermount3`, or another daemon has mounted one meanwhile.
    pub(super) fn mount(mut self) -> io::Result<(Mount, OwnedFd)> {
        let _turn = Turn::wait_for(&self.path);
        if is_fuse(&self.path)? {
            return Err(io::Error::other(SERVED));
        }
        // Another daemon may have ended meanwhile, and removed the file that it had made. Somebody may have
        // put something else there: what is looked at here is what is mounted over.
        let place = Dentry::of(&self.path)?;
        self.is_made |= place.make()?;
        let (file, owner) = place.file()?;
        self.owner = owner;
        let mounted = match Way::find().map_err(io::Error::other)? {
            Way::Directly => mount_directly(&file),
            Way::ByHelper => Err(ErrorKind::PermissionDenied.into()),
        };
        let device = match mounted {
            Err(error) if error.kind() == ErrorKind::PermissionDenied => mount_by_helper(&self.path)?,
            mounted => mounted?,
        };
        let entry = mount_table::at(&self.path).ok();
        if entry
            .as_ref()
            .is_some_and(|entry| !entry.as_ref().is_some_and(Entry::is_fuse))
        {
            // The mount is where the file is now.
            let left = std::fs::read_link(path_of(&file)).and_then(|moved| unmount_with(&moved, true));
            return Err(io::Error::other(match left {
                Ok(()) => "the file was moved meanwhile".to_owned(),
                Err(error) => format!("the file was moved meanwhile, and stays mounted: {error}"),
            }));
        }
        let entry = entry.flatten();
        let mount = Mount {
            place: self,
            entry,
            is_over: false,
            ownership: Ownership::new(true),
        };
        Ok((mount, device))
    }
}

/// Checks, without making anything, that a disk could be mounted at a path. What is mounted there now does not matter:
/// it is not asked, since it may not answer.
///
/// # Errors
/// What is there instead, or that no file can be made there.
pub(super) fn check(path: &Path) -> Result<(), OpenError> {
    let path = absolute(path)?;
    let name = format!("export fuse:{}", path.display());
    if is_fuse(&path).is_ok_and(|is_fuse| is_fuse) {
        return Ok(());
    }
    let looked = Dentry::of(&path).and_then(|place| place.file());
    match looked {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let parent = path.parent().unwrap_or(Path::new("/"));
            check_directory(parent).map_err(|error| error.of(&name))
        }
        looked => looked
            .map(drop)
            .map_err(|error| OpenError::new(format!("{name}: {error}"))),
    }
}

impl Place {
    /// Removes the file, if it was made for this.
    fn clear(&mut self) {
        if !std::mem::take(&mut self.is_made) {
            return;
        }
        let _turn = Turn::wait_for(&self.path);
        // Where another daemon serves, it is asked for nothing.
        if is_fuse(&self.path).is_ok_and(|is_fuse| !is_fuse) {
            // A file that is not ours, or not empty, or gone, is left alone.
            let _ = Dentry::of(&self.path).and_then(|place| place.remove_if_empty());
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.clear();
    }
}

impl Ownership {
    fn new(is_ours: bool) -> Self {
        Self(Arc::new(AtomicBool::new(is_ours)))
    }

    pub(super) fn is_ours(&self) -> bool {
        // Acquire: pairs with the Release in `set`.
        self.0.load(Ordering::Acquire)
    }

    pub(super) fn set(&self, is_ours: bool) {
        // Release: the unmounter has seen all that was done before it became ours.
        self.0.store(is_ours, Ordering::Release);
    }
}

impl Mount {
    /// A mount that another daemon has made, and that belongs to it until this daemon serves.
    pub(super) fn inherited(path: PathBuf, saved: &SavedMount) -> Self {
        Self {
            place: Place {
                path,
                is_made: saved.is_made,
                owner: saved.owner,
            },
            entry: saved.entry(),
            is_over: false,
            ownership: Ownership::new(false),
        }
    }

    /// Where it is.
    pub(super) fn path(&self) -> &Path {
        &self.place.path
    }

    /// The user and the group that own the file.
    pub(super) fn owner(&self) -> (u32, u32) {
        self.place.owner
    }

    /// Returns whether this daemon is to unmount it.
    pub(super) fn ownership(&self) -> Ownership {
        self.ownership.clone()
    }

    /// Returns whether its file was made for it, and its entry in the table of mounts.
    pub(super) fn handover_state(&self) -> (bool, Option<Entry>) {
        (self.place.is_made, self.entry.clone())
    }

    /// Unmounts it, if it is ours; processes that have it open keep it. `is_lost`: somebody else has unmounted it.
    ///
    /// # Errors
    /// The system's error.
    pub(super) fn unmount(&mut self, is_lost: bool) -> io::Result<Unmounted> {
        if !self.ownership.is_ours() {
            return Ok(Unmounted::Whole);
        }
        let there = self.find(is_lost)?;
        if std::mem::replace(&mut self.is_over, true) {
            self.place.clear();
            return Ok(Unmounted::Whole);
        }
        let unmounted = match there {
            None => Ok(Unmounted::Whole),
            Some(path) => match unmount_with(&path, false) {
                Ok(()) => Ok(Unmounted::Whole),
                // What prevents more than that prevents this, too.
                Err(_) => unmount_with(&path, true).map(|()| Unmounted::Busy),
            },
        };
        self.place.clear();
        unmounted
    }

    /// Where it is, if it is mounted. The number of its filesystem may be another one's once that has ended.
    fn find(&self, is_lost: bool) -> io::Result<Option<PathBuf>> {
        let path = &self.place.path;
        match &self.entry {
            Some(entry) if mount_table::at(path)?.as_ref() != Some(entry) => match is_lost {
                true => Ok(None),
                false => mount_table::path_of(entry),
            },
            _ => Ok(Some(path.clone())),
        }
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        // The daemon that serves it removes the file.
        self.place.is_made &= self.ownership.is_ours();
        if !self.is_over
            && let Err(error) = self.unmount(false)
        {
            tracing::warn!("fuse: {} stays mounted: {error}", self.place.path.display());
        }
    }
}

fn open_device() -> io::Result<OwnedFd> {
    let opened = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK)
        .open("/dev/fuse");
    opened
        .map(OwnedFd::from)
        .map_err(|error| io::Error::new(error.kind(), format!("/dev/fuse cannot be opened: {error}")))
}

/// The path as the table of mounts has it. The last part may be a mount whose daemon is dead, so it
/// is not accessed.
pub(super) fn absolute(path: &Path) -> Result<PathBuf, OpenError> {
    let refused = |what: String| OpenError::new(format!("export fuse:{}: {what}", path.display()));
    let name = path
        .file_name()
        .ok_or_else(|| refused("a path of a file is needed".to_owned()))?;
    let parent = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let parent = parent.canonicalize();
    let parent = parent.map_err(|error| refused(format!("its directory cannot be found: {error}")))?;
    Ok(parent.join(name))
}

/// Says whether a daemon serves a path, or did until it was killed. The daemon is not asked.
fn is_fuse(path: &Path) -> io::Result<bool> {
    Ok(mount_table::at(path)?.is_some_and(|entry| entry.is_fuse()))
}

/// Unmounts what a killed daemon left there. Returns the turn to go on with.
fn remove_dead(path: &Path) -> Result<Turn, OpenError> {
    let refused = |what: String| OpenError::new(format!("export fuse:{}: {what}", path.display()));
    for _ in 0..STACKED_MAX {
        let turn = Turn::wait_for(path);
        let is_fuse =
            is_fuse(path).map_err(|error| refused(format!("the table of mounts cannot be read: {error}")))?;
        if !is_fuse {
            return Ok(turn);
        }
        let mut probe = MountProbe::ask(path);
        match probe.answer_within(MOMENT, path) {
            Some(Daemon::Dead) => {
                unmount_with(path, true)
                    .map_err(|error| refused(format!("what a killed daemon left stays mounted: {error}")))?;
                tracing::info!(
                    "fuse: {}: unmounted what a killed daemon had left",
                    path.display()
                );
            }
            Some(Daemon::Alive) => return Err(refused(SERVED.to_owned())),
            Some(Daemon::NotAsked) => return Err(refused(INTERRUPTED.to_owned())),
            None => {
                drop(turn);
                // The end of a killed daemon takes as long as what it has begun at its drives.
                match probe.answer_within(ANSWER_MAX, path) {
                    Some(Daemon::NotAsked) => return Err(refused(INTERRUPTED.to_owned())),
                    Some(_) => {}
                    None => {
                        probe.give_up();
                        let limit = (MOMENT + ANSWER_MAX).as_secs();
                        return Err(refused(format!("{SERVED}; it has not answered for {limit} s")));
                    }
                }
            }
        }
    }
    Err(refused(format!(
        "more than {STACKED_MAX} filesystems are mounted there: unmount them"
    )))
}

fn mount_directly(file: &OwnedFd) -> io::Result<OwnedFd> {
    let device = open_device()?;
    let options = format!(
        "fd={},rootmode=100000,user_id={},group_id={},{OPTIONS},allow_other\0",
        device.as_raw_fd(),
        rustix::process::geteuid().as_raw(),
        rustix::process::getegid().as_raw(),
    );
    let options = std::ffi::CStr::from_bytes_with_nul(options.as_bytes()).expect("one zero, at its end");
    let flags = MountFlags::NOSUID | MountFlags::NODEV;
    mount(NAME, path_of(file), "fuse.blkmq", flags, options)?;
    Ok(device)
}

/// Mounts by `fusermount3`, which takes a path, and looks itself what is there: no symbolic link, and a file that this user may
/// write. The system's `fuse.conf` decides whether other users may use the mount.
fn mount_by_helper(path: &Path) -> io::Result<OwnedFd> {
    let options = format!("fsname={NAME},subtype={NAME},nosuid,nodev,{OPTIONS}");
    let for_others = format!("{options},allow_other");
    ask_helper(path, &for_others).or_else(|_| ask_helper(path, &options))
}

fn ask_helper(path: &Path, options: &str) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC;
    let (ours, its) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    let mut command = Command::new(HELPER);
    command.args(["-o", options, "--"]).arg(path);
    // `fusermount3` sends the descriptor there.
    command.env("_FUSE_COMMFD", "0").stdin(Stdio::from(its));
    let output = command.stdout(Stdio::null()).stderr(Stdio::piped()).output();
    drop(command);
    let said = helped(output)?;
    let device = receive_descriptor(ours.as_fd())?
        .ok_or_else(|| io::Error::other(format!("{HELPER} gave no descriptor: {said}")))?;
    fcntl_setfl(&device, fcntl_getfl(&device)? | OFlags::NONBLOCK)?;
    Ok(device)
}

/// The descriptor that the helper sent before it ended, if it sent one.
fn receive_descriptor(socket: BorrowedFd<'_>) -> io::Result<Option<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    recvmsg(socket, &mut [IoSliceMut::new(&mut byte)], &mut ancillary, flags)?;
    let descriptor = ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    Ok(descriptor)
}

fn unmount_with(path: &Path, is_lazy: bool) -> io::Result<()> {
    let lazily = if is_lazy {
        UnmountFlags::DETACH
    } else {
        UnmountFlags::empty()
    };
    let unmounted = match Way::find() {
        Ok(Way::Directly) => Dentry::of(path)?.unmount(lazily),
        _ => Err(Errno::PERM),
    };
    match unmounted {
        Err(Errno::PERM) => {}
        done => return Ok(done?),
    }
    let how = if is_lazy { "-uz" } else { "-u" };
    let output = Command::new(HELPER)
        .arg(how)
        .arg("--")
        .arg(path)
        .stdin(Stdio::null())
        .output();
    helped(output).map(drop)
}

/// The helper's output, if it succeeded.
fn helped(output: io::Result<std::process::Output>) -> io::Result<String> {
    let output = output.map_err(|error| {
        io::Error::new(
            error.kind(),
            format!("only root mounts by itself, and {HELPER} cannot be started: {error}; install the package fuse3"),
        )
    })?;
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    match output.status.success() {
        true => Ok(said),
        false => Err(io::Error::other(said)),
    }
}

/// The kernel checks the file's mode, and reads are no larger than the buffers.
const OPTIONS: &str = "default_permissions,max_read=1048576";
const _: () = assert!(DATA_BYTES_MAX == 1_048_576);
const NAME: &str = "blkmq";
const HELPER: &str = "fusermount3";
/// Why nothing is mounted at a path.
const SERVED: &str = "another daemon serves there: stop it, or choose another path";
/// As by a signal to all processes of a group.
const INTERRUPTED: &str = "the process was ended that should find out whether a daemon serves there";
/// How long a daemon may take to say what its file looks like: at first, and in the end.
const MOMENT: Duration = Duration::from_secs(1);
const ANSWER_MAX: Duration = Duration::from_secs(10);
/// Most stacked dead mounts that are removed.
const STACKED_MAX: usize = 16;

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn mount_goes_over_no_file_to_which_a_link_leads_that_was_put_there_meanwhile() {
        if !rustix::process::geteuid().is_root() || open_device().is_err() {
            blkmq_testkit::skip("mounting needs root and /dev/fuse");
            return;
        }
        let scratch = std::env::temp_dir().join(format!("blkmq-links-{}", std::process::id()));
        fs::create_dir_all(scratch.join("elsewhere")).unwrap();
        let scratch = scratch.canonicalize().unwrap();
        let (path, victim) = (scratch.join("tenant/disk"), scratch.join("elsewhere/disk"));
        let elsewhere = scratch.join("elsewhere");
        fs::write(&victim, "precious").unwrap();
        for (replaced, target) in [(path.as_path(), &victim), (path.parent().unwrap(), &elsewhere)] {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            let place = Place::find(&path).unwrap();
            fs::rename(replaced, scratch.join("moved")).unwrap();
            symlink(target, replaced).unwrap();
            let mounted = place.mount();
            let is_covered = is_fuse(&victim).unwrap();
            if is_covered {
                let _ = rustix::mount::unmount(&victim, UnmountFlags::DETACH);
            }
            assert!(
                mounted.is_err() && !is_covered,
                "{}: {mounted:?}",
                replaced.display()
            );
            fs::remove_file(replaced).unwrap();
            let moved = scratch.join("moved");
            fs::remove_dir_all(&moved)
                .or_else(|_| fs::remove_file(&moved))
                .unwrap();
        }
        assert_eq!(fs::read(&victim).unwrap(), b"precious");
        fs::remove_dir_all(scratch).unwrap();
    }

    #[test]
    fn mount_whose_directory_was_moved_is_unmounted_where_it_is() {
        if !rustix::process::geteuid().is_root() || open_device().is_err() {
            blkmq_testkit::skip("mounting needs root and /dev/fuse");
            return;
        }
        let scratch = std::env::temp_dir().join(format!("blkmq-moved-{}", std::process::id()));
        fs::create_dir_all(scratch.join("tenant")).unwrap();
        let scratch = scratch.canonicalize().unwrap();
        let moved = scratch.join("elsewhere");
        let (mut mount, device) = Place::find(&scratch.join("tenant/disk"))
            .unwrap()
            .mount()
            .unwrap();
        fs::rename(scratch.join("tenant"), &moved).unwrap();
        assert!(is_fuse(&moved.join("disk")).unwrap());
        mount.unmount(false).unwrap();
        let is_left = is_fuse(&moved.join("disk")).unwrap();
        drop(device);
        let _ = rustix::mount::unmount(moved.join("disk"), UnmountFlags::DETACH);
        fs::remove_dir_all(&scratch).unwrap();
        assert!(!is_left, "it stays mounted where its directory is now");
    }
}
