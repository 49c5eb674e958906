//! Files that a check makes, since the disks on them cannot be opened otherwise. It removes only those: not a
//! file that somebody else has put in their place, nor one that existed.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::PathBuf;

use blkmq_config::Config;

/// The files that were made; dropping it removes them.
#[derive(Debug, Default)]
pub(super) struct Placeholders(Vec<Placeholder>);

#[derive(Debug)]
struct Placeholder {
    path: PathBuf,
    /// The identity of the file: its device and its inode number.
    identity: (u64, u64),
}

impl Placeholders {
    /// Makes the files that are missing and to be created. If that fails, the open of the
    /// disk reports the reason.
    pub(super) fn make(config: &Config) -> Self {
        let writable = config.disks.iter().filter(|disk| !disk.read_only);
        let wanted = writable.filter_map(|disk| {
            let file = disk.source.driver()?.file()?;
            Some((file.path, file.size?))
        });
        Self(
            wanted
                .filter_map(|(path, size)| make(path.to_owned(), size))
                .collect(),
        )
    }
}

fn make(path: PathBuf, size: u64) -> Option<Placeholder> {
    let mut options = OpenOptions::new();
    let file = options
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&path)
        .ok()?;
    let metadata = file.metadata().ok()?;
    let made = Placeholder {
        path,
        identity: (metadata.dev(), metadata.ino()),
    };
    if file.set_len(size).is_err() {
        made.remove();
        return None;
    }
    Some(made)
}

impl Placeholder {
    fn remove(&self) {
        let found = fs::symlink_metadata(&self.path);
        if found.is_ok_and(|found| (found.dev(), found.ino()) == self.identity) {
            // If it stays, it is empty and ours.
            let _ = fs::remove_file(&self.path);
        }
    }
}

impl Drop for Placeholders {
    fn drop(&mut self) {
        self.0.iter().for_each(Placeholder::remove);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use blkmq_config::DiskSpec;

    #[test]
    fn placeholder_is_removed_but_no_file_that_replaced_it_or_was_there() {
        let dir = std::env::temp_dir().join(format!("blkmq-placeholder-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let path = |name: &str| dir.join(name);
        fs::write(path("old"), "precious").unwrap();
        fs::write(path("other"), "precious").unwrap();
        let disk = |name: &str| {
            let file = path(name);
            DiskSpec::parse(&format!("name={name},file={},size=1M,create=on", file.display())).unwrap()
        };
        let config = Config {
            disks: ["old", "new", "replaced"].map(disk).into(),
            ..Config::default()
        };
        let made = Placeholders::make(&config);
        assert_eq!(fs::metadata(path("new")).unwrap().len(), 1 << 20);
        fs::rename(path("other"), path("replaced")).unwrap();
        drop(made);
        assert!(!path("new").exists());
        for kept in ["old", "replaced"] {
            assert_eq!(fs::read(path(kept)).unwrap(), b"precious", "{kept}");
        }
        fs::remove_dir_all(dir).unwrap();
    }
}
