//! The files and sockets of a test: in its own directory, which is removed when the test passes.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// A directory that only one test uses. It is kept for inspection when the test fails.
pub(crate) struct Scratch {
    dir: PathBuf,
}

impl Scratch {
    /// Makes a directory with a short path, because the path of a unix socket has at most 107
    /// bytes.
    pub(crate) fn new() -> Scratch {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        // Relaxed: the numbers must only differ.
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("blkmq-e2e-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("the scratch directory can be made");
        Scratch { dir }
    }

    /// A name that no other test has.
    pub(crate) fn name(&self) -> &str {
        let name = self.dir.file_name().and_then(|name| name.to_str());
        name.expect("the scratch directory has a name of its own")
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// The path as an argument of a command.
    pub(crate) fn word(&self, name: &str) -> String {
        self.path(name)
            .to_str()
            .expect("the scratch directory's name is UTF-8")
            .to_owned()
    }

    /// Makes a sparse image of `bytes` and returns its path as an argument.
    pub(crate) fn image(&self, name: &str, bytes: u64) -> String {
        let file = File::create(self.path(name)).expect("an image can be made");
        file.set_len(bytes).expect("an image can be sized");
        self.word(name)
    }

    /// Makes an image of `bytes` of incompressible data without repetitions, with a hole in its
    /// middle third.
    pub(crate) fn noisy_image(&self, name: &str, bytes: u64, seed: u64) -> String {
        let word = self.image(name, bytes);
        let third = bytes / 3 / 4096 * 4096;
        write_noise(Path::new(&word), 0, third, seed);
        write_noise(Path::new(&word), 2 * third, bytes - 2 * third, seed + 1);
        word
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
    use std::os::unix::fs::FileExt;
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let noise: Vec<u8> = (0..bytes.div_ceil(8))
        .flat_map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()
        })
        .take(bytes as usize)
        .collect();
    let file = File::options().write(true).open(path).expect("the image opens");
    file.write_all_at(&noise, offset)
        .expect("the image takes the noise");
}
