//! The directory of a proof, with its files and sockets; it is removed at the end.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result};

/// A directory of its own, with a short name: a unix socket's may have 107 bytes.
#[derive(Debug)]
pub struct Scratch(PathBuf);

impl Scratch {
    /// Makes one that no other proof has, below the system's directory for temporary files.
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
        static NEXT: AtomicU32 = AtomicU32::new(0);
        // Relaxed: the numbers must only differ.
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let dir = parent.join(format!("{name}-{}-{number}", std::process::id()));
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
