//! The rules for files that an image names: which may be opened. A name in an image is somebody else's text, so it
//! is a path below a directory that the configuration names, and never an address of something else.

use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use super::chain::{named, system};
use super::error::ImageError;
use crate::file::FileDisk;

/// Where the files of an image may be.
#[derive(Clone, Debug)]
pub(super) struct Rules {
    /// Directories, without links in their paths.
    directories: Vec<PathBuf>,
    /// Most images of a chain.
    pub(super) chain_max: usize,
}

impl Rules {
    /// Files below these directories, or below that of the image if there are none.
    ///
    /// # Errors
    /// A directory cannot be found.
    pub(super) fn new(image: &Path, directories: &[PathBuf], chain_max: usize) -> Result<Self, ImageError> {
        let own = || image.canonicalize().map(|path| path.parent().map(Path::to_owned));
        let found = match directories {
            [] => vec![
                own()
                    .map_err(|source| system(image, "find its directory", source))?
                    .unwrap_or_default(),
            ],
            named => {
                let find = |path: &PathBuf| {
                    path.canonicalize()
                        .map_err(|source| system(path, "find the directory of dirs=", source))
                };
                named.iter().map(find).collect::<Result<_, _>>()?
            }
        };
        Ok(Self {
            directories: found,
            chain_max,
        })
    }

    /// Finds the file that an image names, relative to its own directory.
    ///
    /// # Errors
    /// It is no path, is not there, or is elsewhere.
    pub(super) fn resolve(&self, of: &Path, what: &'static str, name: &str) -> Result<PathBuf, ImageError> {
        if has_scheme(name) {
            let why = "it is an address and no path: serve what is there as a disk of its own".to_owned();
            return Err(named(of, what, name, why));
        }
        let directory = of
            .canonicalize()
            .ok()
            .and_then(|path| path.parent().map(Path::to_owned));
        let path = directory.unwrap_or_default().join(name);
        let path = path
            .canonicalize()
            .map_err(|error| named(of, what, name, error.to_string()))?;
        self.check(&path, of, what, name)?;
        Ok(path)
    }

    /// Checks where a file is that was opened: links may have changed since.
    ///
    /// # Errors
    /// It is elsewhere.
    pub(super) fn check_open(
        &self,
        disk: &FileDisk,
        of: &Path,
        what: &'static str,
        name: &str,
    ) -> Result<(), ImageError> {
        let link = format!("/proc/self/fd/{}", disk.handle().as_raw_fd());
        match std::fs::read_link(link) {
            Ok(path) => self.check(&path, of, what, name),
            Err(error) => Err(named(of, what, name, error.to_string())),
        }
    }

    /// Returns whether a path without links is below one of the directories, or is one.
    pub(super) fn is_inside(&self, path: &Path) -> bool {
        let mut directories = self.directories.iter();
        directories.any(|directory| path.starts_with(directory))
    }

    fn check(&self, path: &Path, of: &Path, what: &'static str, name: &str) -> Result<(), ImageError> {
        if self.is_inside(path) {
            return Ok(());
        }
        let why = format!(
            "{path:?} is not below {:?}: name its directory with dirs=",
            self.directories
        );
        Err(named(of, what, name, why))
    }
}

/// Returns whether a name is an address, such as `nbd://host/x` or `json:{}`: it has a colon before its first slash.
fn has_scheme(name: &str) -> bool {
    let colon = name.find(':');
    let slash = name.find('/').unwrap_or(name.len());
    colon.is_some_and(|colon| colon < slash)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_are_addresses_are_no_paths() {
        for name in [
            "nbd://h/x",
            "json:{\"driver\":\"file\"}",
            "file:x",
            "ssh://h/x",
            "C:x",
        ] {
            assert!(has_scheme(name), "{name}");
        }
        for name in ["base.img", "a/b:c", "/x/y:z", "./n:x"] {
            assert!(!has_scheme(name), "{name}");
        }
    }

    #[test]
    fn files_elsewhere_are_refused_also_behind_links() {
        let directory = std::env::temp_dir().join(format!("blkmq-rules-{}", std::process::id()));
        let (inside, outside) = (directory.join("in"), directory.join("out"));
        std::fs::create_dir_all(&inside).unwrap();
        std::fs::create_dir_all(&outside).unwrap();
        let image = inside.join("top.qcow2");
        for path in [&image, &inside.join("base"), &outside.join("base")] {
            std::fs::write(path, b"").unwrap();
        }
        std::os::unix::fs::symlink("../out/base", inside.join("link")).unwrap();
        let rules = Rules::new(&image, &[], 16).unwrap();
        let refuses = |name: &str| rules.resolve(&image, "backing file", name).is_err();
        assert!(!refuses("base") && !refuses("../in/base"));
        assert!(refuses("../out/base") && refuses("link") && refuses("/etc/passwd") && refuses("missing"));
        let wider = Rules::new(&image, std::slice::from_ref(&directory), 16).unwrap();
        assert!(wider.resolve(&image, "backing file", "link").is_ok());
        std::fs::remove_dir_all(&directory).unwrap();
    }
}
