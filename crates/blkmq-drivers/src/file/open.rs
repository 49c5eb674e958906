//! Opens a file as a disk: it is opened or created, locked, measured, and tried for direct I/O. Every
//! fault of the file becomes an error here that says what to do.

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::Ordering;

use blkmq_host::device::FileId;
use blkmq_host::found::Found;
use rustix::fs::{AtFlags, FallocateFlags, OFlags, SeekFrom, StatxFlags};
use rustix::io::Errno;

use super::bounce::BLOCK_BYTES_MAX;
use super::config::{Direct, FileConfig};
use super::disk::{Alignment, Backing, Discards, FileDisk};
use super::error::FileError;
use super::lock::{self, Lock};
use crate::driver::Purpose;
use crate::mapping::Mapping;

impl FileDisk {
    /// Opens, locks and probes a file or block device. Blocks for a few system calls and one read.
    ///
    /// # Errors
    /// See [`FileError`].
    pub fn open(config: &FileConfig) -> Result<Self, FileError> {
        Self::open_for(Purpose::Serve, config)
    }

    /// The same, for a purpose.
    pub(super) fn open_for(purpose: Purpose, config: &FileConfig) -> Result<Self, FileError> {
        let (file, is_new) = open_or_create(purpose, config)?;
        let made = is_new.then(|| file.metadata());
        let disk = Self::of(file, is_new, purpose, config);
        if let (Some(Ok(made)), Err(_)) = (made, &disk) {
            // A file that cannot be served is of no use. The first error is the one to report.
            remove(&config.path, &made);
        }
        disk
    }

    /// Opens a file of an image in some format: what it contains is no disk, so it may be empty, of any size, and
    /// grow. Blocks as [`FileDisk::open`] does.
    ///
    /// # Errors
    /// See [`FileError`].
    #[cfg(feature = "qcow2")]
    pub(crate) fn open_part(purpose: Purpose, config: &FileConfig) -> Result<Self, FileError> {
        let (file, _) = open_or_create(purpose, config)?;
        let lock = match config.unlocked {
            true => Lock::None,
            false => lock_for(purpose, &file, config)?,
        };
        let device = device_of(&file, config)?;
        let end = rustix::fs::seek(&file, SeekFrom::End(0));
        let end = end.map_err(|error| system(config, "measure it", error.into(), ""))?;
        let direct = direct_alignment(&file, config, end, device);
        let mut disk = FileDisk::new(file, config.path.clone(), 0, 0, device);
        disk.lock = lock;
        disk.read_only = config.read_only;
        disk.block_size = choose_block_size(&disk, config)?;
        disk.settle_direct(config, direct)?;
        Ok(disk)
    }

    fn of(file: File, is_new: bool, purpose: Purpose, config: &FileConfig) -> Result<Self, FileError> {
        let lock = match config.unlocked {
            true => Lock::None,
            false => lock_for(purpose, &file, config)?,
        };
        if is_new {
            set_size(&file, config)?;
        }
        let device = device_of(&file, config)?;
        let size = measured_size(&file, config)?;
        let direct = direct_alignment(&file, config, size, device);
        let mut disk = FileDisk::new(file, config.path.clone(), size, 0, device);
        disk.lock = lock;
        disk.read_only = config.read_only;
        disk.config = config.clone();
        disk.block_size = choose_block_size(&disk, config)?;
        if !size.is_multiple_of(disk.block_size.into()) {
            disk.pad_to(disk.block_size);
        }
        disk.settle_direct(config, direct)?;
        let can_punch = disk.read_only || can_punch(&disk);
        disk.lacks.punching.store(!can_punch, Ordering::Relaxed);
        if let Backing::Block(number) = device {
            disk.discards = discards_of(number);
            let is_known = has_discard_command(&rustix::system::uname().release().to_string_lossy());
            disk.lacks.discarding.store(!is_known, Ordering::Relaxed);
        }
        Ok(disk)
    }

    /// Bypasses the page cache if that was found to work and suits the size.
    fn settle_direct(
        &mut self,
        config: &FileConfig,
        found: Result<Alignment, String>,
    ) -> Result<(), FileError> {
        let size = self.size();
        let suited = found.and_then(|found| {
            if size.is_multiple_of(found.range.into()) && found.range <= BLOCK_BYTES_MAX {
                return Ok(found);
            }
            Err(format!(
                "the size {size} is no multiple of the {} bytes that direct I/O needs here",
                found.range
            ))
        });
        match suited {
            Ok(alignment) => {
                self.set_alignment(Some(alignment));
                return Ok(());
            }
            Err(reason) if config.direct == Direct::On => {
                return Err(FileError::NotDirect {
                    path: self.path.clone(),
                    reason,
                });
            }
            Err(_) if config.direct == Direct::Off => {}
            Err(reason) => tracing::warn!(
                source = %self.path.display(),
                "file {:?}: goes through the page cache, since {reason}; direct=off says so without this warning",
                self.path
            ),
        }
        self.use_page_cache();
        Ok(())
    }

    /// Uses the page cache from now on.
    pub(crate) fn use_page_cache(&mut self) {
        self.set_alignment(None);
        // Clearing the flag of an open file does not fail.
        let cleared = set_direct(&self.file, false);
        debug_assert!(cleared.is_ok(), "{cleared:?}");
    }
}

/// Locks the file. For a check, the lock of another process is reported.
fn lock_for(purpose: Purpose, file: &File, config: &FileConfig) -> Result<Lock, FileError> {
    match lock::lock(file, &config.path, config.read_only) {
        Err(FileError::Locked { path, holder, .. }) if purpose == Purpose::Check && !lock::is_ours(file) => {
            tracing::info!(source = %path.display(), "file {path:?}: in use by {holder} now, which a check ignores");
            Ok(Lock::None)
        }
        locked => locked,
    }
}

/// Opens the file, or creates it if it is missing and that is asked for. Returns whether it was created.
fn open_or_create(purpose: Purpose, config: &FileConfig) -> Result<(File, bool), FileError> {
    let mut options = File::options();
    options.read(true).write(!config.read_only);
    match Found::at(&config.path) {
        Ok(found) => {
            refuse_other_kinds(&found, config)?;
            if found.is_block_device() && !config.read_only && !lock::is_inherited(&config.path) {
                // For a block device, O_EXCL without O_CREAT demands that nothing in the kernel, a mount
                // for instance, uses it. After a takeover the outgoing daemon has checked that, and the
                // inherited lock's descriptor keeps it so.
                options.custom_flags(libc::O_EXCL);
            }
            // What was looked at, not what is there by now.
            let path = found.path();
            let file = options.open(&path).or_else(|error| match purpose {
                Purpose::Check if error.kind() == io::ErrorKind::ResourceBusy => {
                    open_in_use(&path).ok_or(error)
                }
                _ => Err(error),
            });
            file.map(|file| (file, false))
                .map_err(|error| cannot_open(config, error))
        }
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(cannot_open(config, error)),
        Err(_) if config.new_size().is_none() => Err(FileError::Missing {
            path: config.path.clone(),
        }),
        Err(_) => {
            let created = options.create_new(true).mode(0o600).open(&config.path);
            let file = created.map_err(|error| system(config, "create it", error, ""))?;
            tracing::warn!(
                source = %config.path.display(),
                "file {:?}: was missing, and is created empty with size={}, as create=on says: if it should be there, is its \
                 filesystem mounted? Take create=on out once the file is there",
                config.path,
                config.size.unwrap_or(0)
            );
            Ok((file, true))
        }
    }
}

/// Opens a block device that a daemon serves now, which has its lock. `None` if the kernel uses the device.
fn open_in_use(path: &str) -> Option<File> {
    let file = File::options().read(true).write(true).open(path).ok()?;
    lock::is_held(&file).then_some(file)
}

fn refuse_other_kinds(found: &Found, config: &FileConfig) -> Result<(), FileError> {
    match found.is_file() || found.is_block_device() {
        true => Ok(()),
        false => Err(FileError::Kind {
            path: config.path.clone(),
            kind: found.kind(),
        }),
    }
}

/// Removes a file that was made, unless something else is in its place by now.
fn remove(path: &Path, made: &Metadata) {
    let found = std::fs::symlink_metadata(path);
    if found.is_ok_and(|found| FileId::of(&found) == FileId::of(made)) {
        let _ = std::fs::remove_file(path);
    }
}

fn cannot_open(config: &FileConfig, error: io::Error) -> FileError {
    let advice = match error.kind() {
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem if !config.read_only => {
            ": change its permissions, or serve it with ro=on"
        }
        io::ErrorKind::PermissionDenied => ": change its permissions",
        io::ErrorKind::ExecutableFileBusy => {
            ": a program that runs cannot be written to; serve it with ro=on"
        }
        io::ErrorKind::NotConnected => {
            ": a daemon that was killed has left its mount there; unmount it (umount -l), and the file is below"
        }
        io::ErrorKind::ResourceBusy => ": the device is mounted or otherwise in use by the kernel",
        _ => "",
    };
    system(config, "open it", error, advice)
}

fn system(config: &FileConfig, action: &'static str, error: io::Error, advice: &'static str) -> FileError {
    FileError::System {
        path: config.path.clone(),
        action,
        error,
        advice,
    }
}

/// Gives a new file its size.
fn set_size(file: &File, config: &FileConfig) -> Result<(), FileError> {
    let sized = file.set_len(config.size.unwrap_or(0));
    sized.map_err(|error| system(config, "give it its size", error, ""))
}

fn device_of(file: &File, config: &FileConfig) -> Result<Backing, FileError> {
    let meta = file
        .metadata()
        .map_err(|error| system(config, "inspect it", error, ""))?;
    Ok(if meta.file_type().is_block_device() {
        Backing::Block(meta.rdev())
    } else {
        Backing::Filesystem(meta.dev())
    })
}

fn measured_size(file: &File, config: &FileConfig) -> Result<u64, FileError> {
    // The end of a block device gives its size; its metadata has 0.
    let end = rustix::fs::seek(file, SeekFrom::End(0));
    let size = end.map_err(|error| system(config, "measure it", error.into(), ""))?;
    let path = config.path.clone();
    match config.size {
        _ if size == 0 => Err(FileError::Empty { path }),
        Some(wanted) if wanted > size => Err(FileError::TooSmall { path, size, wanted }),
        Some(wanted) if wanted < size => {
            tracing::info!(source = %path.display(), "file {path:?}: has grown from size={wanted} to {size} bytes");
            Ok(size)
        }
        _ => Ok(size),
    }
}

/// Chooses the configured block size, or a device's sector, and checks it. What direct I/O needs is no property of the
/// disk: another filesystem, or a clone of the file, needs something else for the same content.
fn choose_block_size(disk: &FileDisk, config: &FileConfig) -> Result<u32, FileError> {
    let path = || config.path.clone();
    let sector = if disk.is_block_device() {
        let sector = rustix::fs::ioctl_blksszget(&disk.file);
        sector.map_err(|error| system(config, "ask for its sector size", error.into(), ""))?
    } else {
        LEAST_BLOCK
    };
    let block = config.block_size.unwrap_or(sector);
    if block < sector {
        return Err(FileError::BlockTooSmall {
            path: path(),
            block,
            least: sector,
        });
    }
    let may_pad = config.read_only && !disk.is_block_device();
    if !disk.size().is_multiple_of(u64::from(block)) && !may_pad {
        return Err(FileError::Ragged {
            path: path(),
            size: disk.size(),
            block,
            next: disk.size().next_multiple_of(u64::from(block)),
        });
    }
    Ok(block)
}

/// Switches direct I/O on and finds out its alignments. On error it is off, and the error has the
/// reason.
fn direct_alignment(
    file: &File,
    config: &FileConfig,
    size: u64,
    device: Backing,
) -> Result<Alignment, String> {
    if config.direct == Direct::Off {
        return Err("direct=off".to_owned());
    }
    set_direct(file, true).map_err(|error| format!("the filesystem has no direct I/O ({error})"))?;
    let tried = announced_alignments(file, device)
        .into_iter()
        .find(|alignment| can_read(file, *alignment, size));
    tried.ok_or_else(|| "a direct read was tried and failed".to_owned())
}

/// Returns the alignments that the kernel reports for direct I/O, or the usual ones if it reports
/// none.
fn announced_alignments(file: &File, device: Backing) -> Vec<Alignment> {
    if let Some(alignment) = announced_alignment(file) {
        return vec![alignment];
    }
    if let (Backing::Block(_), Ok(sector)) = (device, rustix::fs::ioctl_blksszget(file)) {
        return vec![Alignment {
            memory: sector,
            range: sector,
        }];
    }
    let usual = [LEAST_BLOCK, 4096].map(|bytes| Alignment {
        memory: bytes,
        range: bytes,
    });
    usual.into()
}

/// Returns the alignment that the kernel reports for direct I/O.
pub(super) fn announced_alignment(file: &File) -> Option<Alignment> {
    let statx = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok()?;
    let is_known = StatxFlags::from_bits_retain(statx.stx_mask).contains(StatxFlags::DIOALIGN);
    (is_known && statx.stx_dio_offset_align > 0).then(|| Alignment {
        memory: statx.stx_dio_mem_align.max(1),
        range: statx.stx_dio_offset_align.max(LEAST_BLOCK),
    })
}

/// Returns whether holes can be made, unless that cannot be found out. A filesystem is asked for
/// one behind the end of the file, where no data can be lost.
fn can_punch(disk: &FileDisk) -> bool {
    match disk.device {
        Backing::Filesystem(_) => {
            let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let behind = disk.size().next_multiple_of(PUNCHED);
            let punched = rustix::fs::fallocate(&disk.file, mode, behind, PUNCHED);
            !matches!(punched, Err(Errno::OPNOTSUPP | Errno::NOSYS))
        }
        Backing::Block(number) => queue_limit(number, "write_zeroes_max_bytes").is_none_or(|most| most > 0),
    }
}

/// A limit of a block device's queue, if the system tells it.
fn queue_limit(number: u64, name: &str) -> Option<u64> {
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    // A partition's queue is that of its device.
    ["queue", "../queue"].iter().find_map(|queue| {
        let path = format!("/sys/dev/block/{major}:{minor}/{queue}/{name}");
        std::fs::read_to_string(path).ok()?.trim().parse().ok()
    })
}

fn discards_of(number: u64) -> Discards {
    let limit = |name| queue_limit(number, name).unwrap_or(0);
    Discards {
        max: limit("discard_max_bytes"),
        granularity: limit("discard_granularity").try_into().unwrap_or(u32::MAX),
    }
}

/// Returns whether a kernel of this release has io_uring's command for discards (6.12). An older one makes holes, where the
/// device can zero a range by freeing it.
fn has_discard_command(release: &str) -> bool {
    let mut numbers = release
        .split(['.', '-'])
        .map(|part| part.parse::<u32>().unwrap_or(0));
    (numbers.next(), numbers.next()) >= (Some(6), Some(12))
}

fn can_read(file: &File, alignment: Alignment, size: u64) -> bool {
    let wanted = alignment.range as usize;
    let Ok(mut memory) = Mapping::new(wanted) else {
        return false;
    };
    let read = rustix::io::pread(file, memory.bytes_mut(), 0);
    read.is_ok_and(|read| read as u64 == size.min(wanted as u64))
}

fn set_direct(file: &File, is_direct: bool) -> io::Result<()> {
    let mut flags = rustix::fs::fcntl_getfl(file)?;
    flags.set(OFlags::DIRECT, is_direct);
    Ok(rustix::fs::fcntl_setfl(file, flags)?)
}

/// Size of the trial hole, in bytes: a page.
const PUNCHED: u64 = 4096;
/// The smallest logical block, in bytes.
const LEAST_BLOCK: u32 = 512;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::scratch_file;

    fn config(path: &std::path::Path) -> FileConfig {
        FileConfig {
            path: path.to_owned(),
            ..FileConfig::default()
        }
    }

    #[test]
    fn discard_command_is_one_of_newer_kernels() {
        for (release, has) in [
            ("6.12.0-1-amd64", true),
            ("6.18.44-x", true),
            ("7.0-rc1", true),
            ("6.1.0-37", false),
            ("5.15.0", false),
            ("", false),
        ] {
            assert_eq!(has_discard_command(release), has, "{release}");
        }
    }

    fn error(config: &FileConfig) -> String {
        FileDisk::open(config).unwrap_err().to_string()
    }

    #[test]
    fn file_that_was_created_and_cannot_be_served_is_removed() {
        let path = scratch_file("refused", 4096);
        std::fs::remove_file(&*path).unwrap();
        for size in [0, 1000, u64::MAX] {
            let wish = FileConfig {
                size: Some(size),
                create: true,
                ..config(&path)
            };
            FileDisk::open(&wish).expect_err("no size of a disk");
            assert!(!path.exists(), "size={size} left a file behind");
        }
    }

    #[test]
    fn file_that_took_the_place_of_a_made_one_is_not_removed_with_it() {
        let (made, other) = (scratch_file("made", 4096), scratch_file("other", 4096));
        let identity = std::fs::metadata(&*made).unwrap();
        std::fs::rename(&*other, &*made).unwrap();
        remove(&made, &identity);
        assert!(made.exists());
        remove(&made, &std::fs::metadata(&*made).unwrap());
        assert!(!made.exists());
    }

    #[test]
    fn missing_file_is_created_sparse_only_if_that_is_asked_for() {
        let path = scratch_file("created", 4096);
        std::fs::remove_file(&*path).unwrap();
        let mut wish = config(&path);
        assert!(error(&wish).contains("give create=on with size= to have it created"));
        wish.size = Some(64 << 20);
        assert!(error(&wish).contains("give create=on with size= to have it created"));
        assert!(!path.exists());
        wish.create = true;
        let disk = FileDisk::open(&wish).unwrap();
        assert_eq!(disk.size(), 64 << 20);
        assert_eq!(disk.file.metadata().unwrap().blocks(), 0);
        drop(disk);
        FileDisk::open(&wish).expect("a file of the right size is served again");
        let sized = |size| FileConfig {
            size: Some(size),
            ..config(&path)
        };
        let grown = FileDisk::open(&sized(1 << 20)).expect("a file that has grown");
        assert_eq!(grown.size(), 64 << 20);
        drop(grown);
        assert!(error(&sized(65 << 20)).contains("size 67108864 is less than size=68157440"));
    }

    #[test]
    fn sizes_that_are_no_whole_blocks_are_refused_with_one_that_would_do() {
        let path = scratch_file("ragged", 1000);
        let message = error(&config(&path));
        assert!(
            message.contains("size 1000 rejected: must be a multiple of the block size 512")
                && message.contains("truncate -s 1024"),
            "{message}"
        );
        assert!(error(&config(&scratch_file("empty", 0))).contains("is empty"));
        let path = scratch_file("big_blocks", 512);
        let big_blocks = FileConfig {
            block_size: Some(4096),
            ..config(&path)
        };
        assert!(error(&big_blocks).contains("block size 4096"));
    }

    #[test]
    fn path_that_is_no_file_or_device_is_refused_by_name() {
        assert!(error(&config(&std::env::temp_dir())).contains("is a directory"));
        assert!(error(&config("/dev/null".as_ref())).contains("is a character device"));
    }

    #[test]
    fn file_in_use_is_refused_and_lock_off_does_not_care() {
        let path = scratch_file("in_use", 4096);
        let _first = FileDisk::open(&config(&path)).unwrap();
        assert!(error(&config(&path)).contains("in use by this process"));
        let unlocked = FileConfig {
            unlocked: true,
            ..config(&path)
        };
        FileDisk::open(&unlocked).unwrap();
    }

    #[test]
    fn direct_io_is_off_when_asked_for_or_when_the_size_is_no_whole_blocks() {
        let path = scratch_file("direct", 8192);
        let off = FileConfig {
            direct: Direct::Off,
            ..config(&path)
        };
        let disk = FileDisk::open(&off).unwrap();
        assert_eq!(disk.direct(), None);
        assert!(
            !rustix::fs::fcntl_getfl(&disk.file)
                .unwrap()
                .contains(OFlags::DIRECT)
        );
        drop(disk);
        let mut disk = FileDisk::open(&config(&path)).unwrap();
        let coarse = |range| Ok(Alignment { memory: 512, range });
        disk.settle_direct(&config(&path), coarse(4096)).unwrap();
        assert_eq!(disk.direct(), coarse(4096).ok());
        assert_eq!(disk.block_size(), 512, "whatever direct I/O needs");
        disk.settle_direct(&config(&path), coarse(16384)).unwrap();
        assert_eq!(disk.direct(), None);
        let forced = FileConfig {
            direct: Direct::On,
            ..config(&path)
        };
        let message = disk
            .settle_direct(&forced, coarse(16384))
            .unwrap_err()
            .to_string();
        assert!(
            message.contains("direct=on rejected: the size 8192 is no multiple of the 16384 bytes"),
            "{message}"
        );
    }
}
