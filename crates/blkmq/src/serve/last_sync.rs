//! The last sync, at the end of an orderly shutdown: every file that clients could write to, even if others
//! fail. The files are opened at the start, so that write errors of the kernel since then are reported here.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;

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
            self.0.push(Arc::new(Written {
                disk: disk.to_owned(),
                path: path.to_owned(),
                file,
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

    /// Makes writes of clients durable that no flush has covered. May block for as long as a drive
    /// does not answer.
    ///
    /// # Errors
    /// All files with data that may be lost, by name.
    pub(super) fn sync(&self) -> Result<()> {
        let mut failed = Vec::new();
        for written in &self.0 {
            let Written { path, file, .. } = &**written;
            if let Err(error) = file.sync_data() {
                failed.push(format!(
                    "file {}: what was not flushed may be lost: {error}",
                    path.display()
                ));
            }
        }
        if !failed.is_empty() {
            bail!("{}", failed.join("; "));
        }
        Ok(())
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
        // Neither of the two can be synced at all (EINVAL).
        let open = |path: &str| {
            Arc::new(Written {
                disk: path.to_owned(),
                path: PathBuf::from(path),
                file: File::open(path).unwrap(),
            })
        };
        let good = std::env::current_exe().unwrap();
        let files = Files(vec![
            open("/dev/null"),
            open(good.to_str().unwrap()),
            open("/proc/self/status"),
        ]);
        let said = files.sync().unwrap_err().to_string();
        assert!(
            said.contains("/dev/null") && said.contains("/proc/self/status"),
            "{said}"
        );
        assert!(!said.contains(good.to_str().unwrap()), "{said}");
    }
}
