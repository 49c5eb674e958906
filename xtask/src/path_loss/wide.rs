//! Verifies a disk with fio while links are cut: in each pass, fio writes the whole disk in random order
//! and reads it back.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use anyhow::{Context, Result, anyhow, ensure};

/// A running fio.
pub(crate) struct Wide {
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<u64>>>,
}

impl Wide {
    pub(crate) fn start(socket: &Path, export: &str, scratch: &Path, seed: u64) -> Self {
        let is_over = Arc::new(AtomicBool::new(false));
        let until = Arc::clone(&is_over);
        let uri = format!("nbd+unix:///{export}?socket={}", socket.display());
        let scratch = scratch.to_owned();
        let passes = move || {
            let mut passes = 0;
            while !until.load(Ordering::Relaxed) {
                pass(&uri, &scratch, seed + passes)?;
                passes += 1;
            }
            Ok(passes)
        };
        Self {
            is_over,
            thread: Some(thread::spawn(passes)),
        }
    }

    /// # Errors
    /// The fault that fio found, or that it has ended.
    pub(crate) fn check(&mut self) -> Result<()> {
        match self.thread.take_if(|thread| thread.is_finished()) {
            Some(thread) => Err(join(thread).map_or_else(|error| error, |_| anyhow!("fio has ended early"))),
            None => Ok(()),
        }
    }

    /// Waits for the end of the present pass. Returns the number of passes.
    ///
    /// # Errors
    /// The fault that fio found.
    pub(crate) fn finish(&mut self) -> Result<u64> {
        self.is_over.store(true, Ordering::Relaxed);
        self.thread.take().map_or(Ok(0), join)
    }
}

fn join(thread: JoinHandle<Result<u64>>) -> Result<u64> {
    thread.join().map_err(|_| anyhow!("the thread of fio panicked"))?
}

fn pass(uri: &str, scratch: &Path, seed: u64) -> Result<()> {
    let mut fio = Command::new("fio");
    fio.args(["--name=wide", "--ioengine=nbd"])
        .arg(format!("--uri={uri}"))
        .args(WORK.split_whitespace())
        .arg(format!("--randseed={seed}"))
        .current_dir(scratch);
    let output = fio.output().context("starting fio")?;
    ensure!(
        output.status.success(),
        "fio on `wide`: {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

/// Blocks of one size, each written once: only then does fio check which write a block is from, and
/// not just its checksum.
const WORK: &str = "--rw=randwrite --bs=16k --size=16m --iodepth=16 --fsync=64 --rate_iops=1000 --verify=crc32c --verify_fatal=1 \
                    --verify_state_save=0";
