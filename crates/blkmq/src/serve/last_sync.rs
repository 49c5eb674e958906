//! The last sync, at the end of an orderly shutdown: every file that clients could write to, even if others
//! fail. The files are opened at the start, so that write errors of the kernel since then are reported here.

use std::collections::BTreeMap;
use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use blkmq_config::{Config, DiskSpec};
use blkmq_host::found::open_file_or_device;

/// The files that clients can write to. A clone shares them, so that they are synced with no lock held.
#[derive(Clone, Debug, Default)]
pub(super) struct Files(Vec<Arc<Written>>);

/// A file that clients can write to.
#[derive(Debug)]
struct Written {
    disk: String,
    path: PathBuf,
    file: File,
    /// What may stop to answer, with all that lies on it: see [`device`].
    device: u64,
}

impl Files {
    /// Opens the files. Call it after the disks are open, so that files exist and are locked.
    ///
    /// # Errors
    /// A file cannot be opened for reading.
    pub(super) fn open(config: &Config) -> Result<Self> {
        let mut files = Self::default();
        for disk in &config.disks {
            files.open_one(config, &disk.name)?;
        }
        Ok(files)
    }

    /// Opens the files of a disk and of its paths.
    ///
    /// # Errors
    /// As for [`Files::open`].
    pub(super) fn open_of(config: &Config, disk: &str) -> Result<Self> {
        let mut files = Self::default();
        let mut all = paths(config, disk).into_iter().chain([disk]);
        all.try_for_each(|disk| files.open_one(config, disk))?;
        Ok(files)
    }

    /// Opens the file of one disk, if it is in a file and clients can write to it.
    fn open_one(&mut self, config: &Config, disk: &str) -> Result<()> {
        let mut writable = config.disks.iter().filter(|disk| !disk.read_only);
        let found = writable.find(|spec| spec.name == disk);
        let written = found.and_then(|disk| Some(disk.source.driver()?.file()?.path));
        if let Some(path) = written {
            let file = open_file_or_device(path)
                .with_context(|| format!("file {}: cannot be opened once more", path.display()))?;
            let device = file.metadata().map_or(0, |found| device(&found));
            self.0.push(Arc::new(Written {
                disk: disk.to_owned(),
                path: path.to_owned(),
                file,
                device,
            }));
        }
        Ok(())
    }

    /// Adds others.
    pub(super) fn add(&mut self, others: &Self) {
        self.0.extend(others.0.iter().cloned());
    }

    /// The files of a disk of `config`, and of its paths.
    pub(super) fn of(&self, config: &Config, disk: &str) -> Self {
        let paths = paths(config, disk);
        let is_its = |written: &&Arc<Written>| written.disk == disk || paths.contains(&&*written.disk);
        Self(self.0.iter().filter(is_its).cloned().collect())
    }

    /// Removes others.
    pub(super) fn remove(&mut self, others: &Self) {
        let is_other = |written: &Arc<Written>| others.0.iter().any(|other| Arc::ptr_eq(other, written));
        self.0.retain(|written| !is_other(written));
    }

    /// Makes writes of clients durable that no flush has covered, for at most about `limit`. Each filesystem and block
    /// device has a thread of its own, so that one that does not answer keeps no other's files from being synced.
    ///
    /// # Errors
    /// All files with data that may be lost, by name.
    pub(super) fn sync(&self, limit: Duration) -> Result<()> {
        let named = || thread::Builder::new().name("sync".to_owned());
        self.sync_by(limit, |work| named().spawn(work).map(drop))
    }

    /// The same, with threads that `spawn` starts. What has none is synced by the calling thread, for as long as that takes.
    fn sync_by(
        &self,
        limit: Duration,
        spawn: impl Fn(Box<dyn FnOnce() + Send>) -> io::Result<()>,
    ) -> Result<()> {
        let until = Instant::now() + limit;
        let (end, ended) = mpsc::channel();
        let mut devices: BTreeMap<u64, Vec<Arc<Written>>> = BTreeMap::new();
        for written in &self.0 {
            devices
                .entry(written.device)
                .or_default()
                .push(Arc::clone(written));
        }
        let mut without_thread = Vec::new();
        for files in devices.into_values() {
            let (its, end) = (files.clone(), end.clone());
            match spawn(Box::new(move || sync_each(its, &end))) {
                Ok(()) => {}
                Err(error) => {
                    tracing::warn!("there is no thread for a sync, which is done in turn: {error}");
                    without_thread.extend(files);
                }
            }
        }
        sync_each(without_thread, &end);
        drop(end);
        let (mut left, mut failed) = (self.0.clone(), Vec::new());
        while let Ok((file, synced)) = ended.recv_timeout(until.saturating_duration_since(Instant::now())) {
            left.retain(|other| !Arc::ptr_eq(other, &file));
            if let Err(error) = synced {
                let path = file.path.display();
                failed.push(format!("file {path}: what was not flushed may be lost: {error}"));
            }
        }
        for Written { disk, path, .. } in left.iter().map(|file| &**file) {
            let path = path.display();
            failed.push(format!(
                "disk {disk}: file {path}: its sync has not ended after {limit:?}: what was not flushed may be lost"
            ));
        }
        if !failed.is_empty() {
            bail!("{}", failed.join("; "));
        }
        Ok(())
    }
}

/// Syncs files one after the other, and sends the result of each.
fn sync_each(files: Vec<Arc<Written>>, end: &mpsc::Sender<(Arc<Written>, io::Result<()>)>) {
    for file in files {
        let synced = file.file.sync_data();
        // Nobody may wait any more.
        let _ = end.send((file, synced));
    }
}

/// The number of the block device that this is, or of the filesystem that it lies on. The nodes of all devices lie on one.
fn device(found: &Metadata) -> u64 {
    match found.file_type().is_block_device() {
        true => found.rdev(),
        false => found.dev(),
    }
}

/// The disks that a disk is made of.
fn paths<'a>(config: &'a Config, disk: &str) -> Vec<&'a str> {
    let mut disks = config.disks.iter();
    let found = disks.find(|spec| spec.name == disk);
    found.map(DiskSpec::below).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use rustix::fs::{CWD, Mode};

    use super::*;

    #[test]
    fn pipe_in_the_place_of_a_served_file_is_refused_at_once() {
        let pipe = std::env::temp_dir().join(format!("blkmq-last-sync-{}", std::process::id()));
        rustix::fs::mkfifoat(CWD, &pipe, Mode::RUSR | Mode::WUSR).unwrap();
        let config = Config {
            disks: vec![DiskSpec::parse(&format!("name=vm,file={}", pipe.display())).unwrap()],
            ..Config::default()
        };
        let (done, said) = mpsc::channel();
        std::thread::spawn(move || done.send(format!("{:#}", Files::open(&config).unwrap_err())));
        let said = said.recv_timeout(Duration::from_secs(20)).unwrap();
        assert!(
            said.contains("cannot be opened once more: it is a pipe"),
            "{said}"
        );
        std::fs::remove_file(pipe).unwrap();
    }

    #[test]
    fn file_that_fails_does_not_keep_the_others_from_being_synced_and_all_are_named() {
        let (files, good) = good_between_bad();
        let said = files.sync(LIMIT).unwrap_err().to_string();
        assert!(
            said.contains("/dev/null") && said.contains("/proc/self/status"),
            "{said}"
        );
        assert!(!said.contains(&good), "{said}");
    }

    #[test]
    fn files_without_threads_are_synced_and_named() {
        let (files, good) = good_between_bad();
        let none = |_| Err(io::ErrorKind::WouldBlock.into());
        let said = files.sync_by(LIMIT, none).unwrap_err().to_string();
        assert!(
            said.contains("/dev/null") && said.contains("/proc/self/status"),
            "{said}"
        );
        assert!(!said.contains(&good), "{said}");
    }

    #[test]
    fn block_devices_have_a_thread_each_and_files_one_for_their_filesystem() {
        let file = std::env::current_exe().unwrap().metadata().unwrap();
        assert_eq!(device(&file), file.dev());
        let nodes = std::fs::read_dir("/dev").unwrap().flatten();
        let found = nodes.filter_map(|node| node.metadata().ok());
        let blocks: Vec<Metadata> = found.filter(|node| node.file_type().is_block_device()).collect();
        for block in &blocks {
            assert_eq!(device(block), block.rdev());
        }
    }

    /// A file that can be synced, between two that cannot (EINVAL), each on a device of its own, and the path of the good one.
    fn good_between_bad() -> (Files, String) {
        let good = std::env::current_exe().unwrap().display().to_string();
        let paths = ["/dev/null", &good, "/proc/self/status"];
        let open = |(device, path): (u64, &str)| {
            Arc::new(Written {
                disk: path.to_owned(),
                path: PathBuf::from(path),
                file: File::open(path).unwrap(),
                device,
            })
        };
        (Files((0..).zip(paths).map(open).collect()), good)
    }

    const LIMIT: Duration = Duration::from_secs(60);
}
