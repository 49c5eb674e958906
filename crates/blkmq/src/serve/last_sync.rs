//! Decides what is made durable at the end of an orderly shutdown: every file that clients could write to, whatever becomes of the
//! others. The files are opened at the start, so that what the kernel failed to write since then is heard of here.

use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use blkmq_config::Config;

/// The files that clients can write to.
#[derive(Debug, Default)]
pub(super) struct Files(Vec<(PathBuf, File)>);

impl Files {
    /// Opens them. Call it after the disks are open, and so locked and there.
    ///
    /// # Errors
    /// The file that cannot be opened for reading.
    pub(super) fn open(config: &Config) -> Result<Self> {
        let writable = config.disks.iter().filter(|disk| !disk.read_only);
        let written = writable.filter_map(|disk| Some(disk.source.driver()?.file()?.path));
        let open = |path: &Path| {
            let file = File::open(path)
                .with_context(|| format!("file {}: cannot be opened once more", path.display()));
            Ok((path.to_owned(), file?))
        };
        written.map(open).collect::<Result<_>>().map(Self)
    }

    /// Makes what clients wrote without a flush durable.
    ///
    /// # Errors
    /// All files of which something may be lost, by name.
    pub(super) fn sync(&self) -> Result<()> {
        let mut failed = Vec::new();
        for (path, file) in &self.0 {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_fails_does_not_keep_the_others_from_being_synced_and_all_are_named() {
        // Neither of the two can be synced at all (EINVAL).
        let open = |path: &str| (PathBuf::from(path), File::open(path).unwrap());
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
