//! The tenants' images: files in one directory, or in turn in several, full of incompressible data, and unlinked from the start, so
//! that no file remains however the bench ends. Other processes open them through procfs.

use std::fs::{self, File};
use std::io::{Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use blkmq_drivers::file::{Direct, FileConfig, FileDisk};

use crate::interrupt;

/// The images of a run, in turn in these directories, which share a drive.
pub(super) struct Images {
    dirs: Vec<PathBuf>,
    filesystem: String,
    each_bytes: u64,
    files: Vec<File>,
}

impl Images {
    /// Looks up the filesystem of the first of `dirs`, at least one; makes no file yet.
    ///
    /// # Errors
    /// If there is no such directory.
    pub(super) fn in_dirs(dirs: &[PathBuf], each_bytes: u64) -> Result<Self> {
        let canonical = |dir: &PathBuf| {
            dir.canonicalize()
                .with_context(|| format!("--dir {} rejected: must be a directory", dir.display()))
        };
        let dirs: Vec<PathBuf> = dirs.iter().map(canonical).collect::<Result<_>>()?;
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        Ok(Self {
            filesystem: filesystem(&mounts, &dirs[0]).unwrap_or_else(|| "unknown".into()),
            dirs,
            each_bytes,
            files: Vec::new(),
        })
    }

    /// Makes and fills files until there are `count`.
    ///
    /// # Errors
    /// If one cannot be made or filled.
    pub(super) fn fill(&mut self, count: usize) -> Result<()> {
        let missing = count.saturating_sub(self.files.len()) as u64;
        let first = self.dirs[0].display();
        let free = rustix::fs::statvfs(&self.dirs[0])
            .map(|stat| stat.f_bavail.saturating_mul(stat.f_frsize))
            .with_context(|| format!("asking how much is free in {first}"))?;
        ensure!(
            missing.saturating_mul(self.each_bytes) <= free,
            "{}: {count} images of {} MiB do not fit into the {} MiB that are free; choose another --dir or a smaller --size",
            first,
            self.each_bytes >> 20,
            free >> 20
        );
        let block = noise();
        while self.files.len() < count {
            let name = format!(".blkmq-bench-{}-{}", std::process::id(), self.files.len());
            let dir = &self.dirs[self.files.len() % self.dirs.len()];
            let path = dir.join(name);
            eprintln!(
                "filling image {} of {count}, {} MiB, in {}",
                self.files.len() + 1,
                self.each_bytes >> 20,
                dir.display()
            );
            let file = make(&path, &block, self.each_bytes).with_context(|| {
                format!(
                    "{}: cannot be filled with {} MiB; choose another --dir or a smaller --size",
                    dir.display(),
                    self.each_bytes >> 20
                )
            })?;
            self.files.push(file);
        }
        Ok(())
    }

    /// The path at which processes of this user can open the image, as long as this process lives.
    ///
    /// # Panics
    /// If there are fewer images.
    pub(super) fn path(&self, place: usize) -> PathBuf {
        let fd = self.files[place].as_raw_fd();
        format!("/proc/{}/fd/{fd}", std::process::id()).into()
    }

    /// The type of the filesystem, such as `ext4`.
    pub(super) fn filesystem(&self) -> &str {
        &self.filesystem
    }

    /// A description for the report.
    pub(super) fn description(&self) -> String {
        let dirs: Vec<_> = self.dirs.iter().map(|dir| dir.display().to_string()).collect();
        format!(
            "files of {} MiB in {}",
            self.each_bytes >> 20,
            dirs.join(" and, in turn, ")
        )
    }

    /// The size of each.
    pub(super) fn each_bytes(&self) -> u64 {
        self.each_bytes
    }

    /// Whether the first of them supports direct I/O, as the daemon checks it.
    pub(super) fn is_direct(&self) -> bool {
        let config = FileConfig {
            path: self.path(0),
            read_only: true,
            direct: Direct::On,
            ..FileConfig::default()
        };
        FileDisk::open(&config).is_ok()
    }
}

/// Makes a file, unlinks it, fills it and syncs it: writeback during a measurement would distort
/// it.
fn make(path: &Path, block: &[u8], bytes: u64) -> std::io::Result<File> {
    let mut file = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(path)?;
    fs::remove_file(path)?;
    for _ in 0..bytes / block.len() as u64 {
        interrupt::check().map_err(std::io::Error::other)?;
        file.write_all(block)?;
    }
    file.sync_all()?;
    file.seek(SeekFrom::Start(0))?;
    Ok(file)
}

/// 1 MiB by Marsaglia's xorshift ("Xorshift RNGs", 2003) with shifts 13, 7, 17.
fn noise() -> Vec<u8> {
    let mut state: u64 = 0x9e37_79b9_7f4a_7c15;
    let words = (0..BLOCK_BYTES / 8).flat_map(|_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    });
    words.collect()
}

/// The type of the innermost mount that contains `dir`, by a table with lines of `device, mount
/// point, type, ...`.
fn filesystem(mounts: &str, dir: &Path) -> Option<String> {
    let mount = |line: &str| -> Option<(usize, String)> {
        let mut words = line.split(' ');
        let point = words.nth(1)?;
        dir.starts_with(point)
            .then(|| Some((point.len(), words.next()?.to_owned())))?
    };
    // Of two mounts at the same point the later one is visible.
    let deepest = mounts.lines().filter_map(mount).max_by_key(|(depth, _)| *depth);
    deepest.map(|(_, name)| name)
}

const BLOCK_BYTES: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn filesystem_is_that_of_the_deepest_mount() {
        let mounts = "/dev/a / ext4 rw 0 0\ntmpfs /dev/shm tmpfs rw 0 0\nx /dev/shm/x overlay rw 0 0\n";
        let of = |dir: &str| filesystem(mounts, Path::new(dir)).unwrap();
        assert_eq!(
            ["/var/a", "/dev/shm", "/dev/shmother", "/dev/shm/x/y"].map(of),
            ["ext4", "tmpfs", "ext4", "overlay"]
        );
    }

    #[test]
    fn images_are_full_of_data_can_be_opened_and_leave_no_name() {
        let dir = std::env::temp_dir().join(format!("blkmq-images-{}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        let mut images = Images::in_dirs(std::slice::from_ref(&dir), 2 << 20).unwrap();
        images.fill(2).unwrap();
        // This fails unless the directory is empty.
        fs::remove_dir(&dir).unwrap();
        let mut read = Vec::new();
        File::open(images.path(1))
            .unwrap()
            .read_to_end(&mut read)
            .unwrap();
        assert_eq!(read.len(), 2 << 20);
        let zeroes = read.iter().filter(|byte| **byte == 0).count();
        assert!(zeroes < read.len() / 100, "{zeroes} zeroes");
    }

    #[test]
    fn directory_that_is_not_there_is_refused_by_its_name() {
        let error = Images::in_dirs(&["/no/such/dir".into()], 1)
            .err()
            .expect("refused");
        assert!(format!("{error:#}").contains("--dir /no/such/dir rejected"));
    }
}
