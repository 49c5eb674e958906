//! The directory of a proof, with its files and sockets; it is removed at the end.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// A directory of its own, with a short name: a unix socket's may have 107 bytes.
#[derive(Debug)]
pub struct Scratch(PathBuf);

impl Scratch {
    /// Makes it, below the system's directory for temporary files.
    ///
    /// # Errors
    /// If it cannot be made.
    pub fn new(name: &str) -> Result<Self> {
        Self::below(&std::env::temp_dir(), name)
    }

    /// Makes it elsewhere.
    ///
    /// # Errors
    /// If it cannot be made.
    pub fn below(parent: &Path, name: &str) -> Result<Self> {
        let dir = parent.join(format!("{name}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).context("making the scratch directory")?;
        Ok(Self(dir))
    }

    /// Returns where it is.
    pub fn dir(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.0) {
            eprintln!("{} is left behind: {error}", self.0.display());
        }
    }
}
