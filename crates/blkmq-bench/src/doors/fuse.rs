//! The load on a disk that is a file: a thread per queue, which keeps reads in flight past the page cache and
//! sleeps until some end.

mod sys;

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use rustix::fs::OFlags;

use self::sys::Reads;
use super::BLOCK_BYTES;
use crate::histogram::Histogram;
use crate::offsets::Offsets;
use crate::window::{Phase, Window};

/// One thread's load.
pub(super) struct Load {
    path: PathBuf,
    seed: u64,
    depth: usize,
}

/// Its reads, and when each began.
struct Reader {
    reads: Reads,
    offsets: Offsets,
    started: Vec<Instant>,
}

impl Load {
    /// Reads the disk at `path`, at offsets of its own.
    pub(super) fn new(path: &Path, seed: u64, depth: usize) -> Self {
        Self {
            path: path.to_owned(),
            seed,
            depth,
        }
    }

    /// Runs until the window says stop, takes what is under way to its end, and returns the latencies of what ended within it.
    ///
    /// # Errors
    /// If the file cannot be opened, or a read ends with an error.
    pub(super) fn run(self, index: usize, window: &Window) -> Result<Histogram> {
        let latency = self.open().and_then(|reader| reader.run(index, window));
        if latency.is_err() {
            window.fail();
        }
        latency
    }

    fn open(&self) -> Result<Reader> {
        let mut options = File::options();
        options.read(true).custom_flags(OFlags::DIRECT.bits() as i32);
        let file = options
            .open(&self.path)
            .with_context(|| format!("opening {}", self.path.display()))?;
        let size = file.metadata()?.len();
        Ok(Reader {
            offsets: Offsets::new(size, u64::from(BLOCK_BYTES), true, self.seed),
            reads: Reads::new(file, self.depth).context("asking for asynchronous I/O")?,
            started: vec![Instant::now(); self.depth],
        })
    }
}

impl Reader {
    fn run(mut self, index: usize, window: &Window) -> Result<Histogram> {
        let mut latency = Histogram::new();
        let (mut phase, mut count, mut under_way) = (Phase::WarmUp, 0, self.started.len());
        (0..under_way).for_each(|number| self.begin(number, Instant::now()));
        while under_way > 0 {
            self.reads.submit().context("submitting reads")?;
            let ended = self.reads.wait().context("waiting for reads to end")?.to_vec();
            let now = Instant::now();
            let before = std::mem::replace(&mut phase, window.phase());
            if phase == Phase::Measure && phase != before {
                latency.clear();
            }
            for end in &ended {
                ensure!(
                    end.result == i64::from(BLOCK_BYTES),
                    "a read ended with {} instead of {BLOCK_BYTES} bytes",
                    end.result
                );
                let number = end.number as usize;
                if phase == Phase::Stop {
                    under_way -= 1;
                    continue;
                }
                latency.record((now - self.started[number]).as_nanos() as u64);
                self.begin(number, now);
            }
            if phase != Phase::Stop {
                count += ended.len() as u64;
                window.publish(index, count);
            }
        }
        Ok(latency)
    }

    fn begin(&mut self, number: usize, now: Instant) {
        self.started[number] = now;
        self.reads.read(number, self.offsets.next());
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn each_read_ends_once_with_its_bytes_or_an_errno() {
        let path = std::env::temp_dir().join(format!("blkmq-bench-reads-{}", std::process::id()));
        let mut file = File::create(&path).unwrap();
        file.write_all(&[7; 8 * 4096]).unwrap();
        let mut reads = Reads::new(File::open(&path).unwrap(), 4).unwrap();
        (0..4).for_each(|number| reads.read(number, 4096 * number as u64));
        reads.submit().unwrap();
        let mut seen = [0; 4];
        while seen.iter().sum::<u32>() < 4 {
            for end in reads.wait().unwrap() {
                assert_eq!(end.result, 4096);
                seen[end.number as usize] += 1;
            }
        }
        assert_eq!(seen, [1; 4]);
        let mut of_directory = Reads::new(File::open("/").unwrap(), 1).unwrap();
        of_directory.read(0, 0);
        assert!(of_directory.submit().is_err());
        std::fs::remove_file(&path).unwrap();
    }
}
