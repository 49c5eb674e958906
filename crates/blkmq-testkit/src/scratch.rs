//! The files and sockets of a test: in its own directory, which is removed when the test passes.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::Random;

/// A directory that only one test uses. It is kept for inspection when the test fails.
#[derive(Debug)]
pub struct Scratch {
    dir: PathBuf,
}

impl Scratch {
    /// Makes a directory with a short path, because the path of a unix socket has at most 107 bytes.
    ///
    /// # Panics
    /// If it cannot be made; so do the others.
    pub fn new() -> Self {
        Self::below(&std::env::temp_dir())
    }

    /// Makes it in another directory than that of temporary files.
    pub fn below(parent: &Path) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        // Relaxed: the numbers must only differ.
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let dir = parent.join(format!("blkmq-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("the scratch directory can be made");
        Self { dir }
    }

    /// Returns where it is.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns a name that no other test has.
    pub fn name(&self) -> &str {
        let name = self.dir.file_name().and_then(|name| name.to_str());
        name.expect("the scratch directory has a name of its own")
    }

    /// Returns the path of a file in it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Returns the path as an argument of a command.
    pub fn word(&self, name: &str) -> String {
        self.path(name)
            .to_str()
            .expect("the scratch directory's name is UTF-8")
            .to_owned()
    }

    /// Makes a sparse image of `bytes` and returns its path as an argument.
    pub fn image(&self, name: &str, bytes: u64) -> String {
        let file = File::create(self.path(name)).expect("an image can be made");
        file.set_len(bytes).expect("an image can be sized");
        self.word(name)
    }

    /// Makes an image of `bytes` of incompressible data without repetitions, with a hole in its
    /// middle third.
    pub fn noisy_image(&self, name: &str, bytes: u64, seed: u64) -> String {
        let word = self.image(name, bytes);
        let third = bytes / 3 / 4096 * 4096;
        write_noise(Path::new(&word), 0, third, seed);
        write_noise(Path::new(&word), 2 * third, bytes - 2 * third, seed + 1);
        word
    }
}

impl Default for Scratch {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the files of this test are left in {}", self.dir.display());
        } else if let Err(error) = std::fs::remove_dir_all(&self.dir) {
            eprintln!("{} is left behind: {error}", self.dir.display());
        }
    }
}

fn write_noise(path: &Path, offset: u64, bytes: u64, seed: u64) {
    let file = File::options().write(true).open(path).expect("the image opens");
    file.write_all_at(&Random::new(seed).bytes(bytes as usize), offset)
        .expect("the image takes the noise");
}
