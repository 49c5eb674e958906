//! Decides what a daemon may take of its host: memory up to what its documents say, and no descriptor and no thread for good.

use std::fmt;
use std::fs;
use std::io;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::process::Pid;

/// What a process holds at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resources {
    /// File descriptors.
    pub descriptors: usize,
    /// Threads, but for those that the kernel runs io_uring's work on: it makes and ends them as it likes.
    pub threads: usize,
    /// Resident memory, in bytes.
    pub resident_bytes: u64,
}

/// What a daemon may hold: what it does before an attack, and what its documents add to that for connections.
#[derive(Clone, Copy, Debug)]
pub struct Allowance {
    pid: Pid,
    before: Resources,
    nbd_memory: u64,
}

impl Resources {
    /// Looks at a process.
    ///
    /// # Errors
    /// If there is none.
    pub fn by(pid: Pid) -> Result<Self> {
        let dir = format!("/proc/{}", pid.as_raw_nonzero());
        let descriptors = descriptors(&format!("{dir}/fd")).context(GONE)?;
        let mut threads = 0;
        for thread in fs::read_dir(format!("{dir}/task")).context(GONE)? {
            // One that ends meanwhile is none.
            let name = fs::read_to_string(thread?.path().join("comm"));
            threads += usize::from(name.is_ok_and(|name| !name.starts_with(KERNELS)));
        }
        Ok(Self {
            descriptors,
            threads,
            resident_bytes: resident_bytes(pid)?,
        })
    }
}

impl Allowance {
    /// Takes what the daemon holds now as what it needs.
    ///
    /// # Errors
    /// If there is no such process.
    pub fn new(pid: Pid, nbd_memory: u64) -> Result<Self> {
        let before = Resources::by(pid)?;
        Ok(Self {
            pid,
            before,
            nbd_memory,
        })
    }

    /// Returns what the daemon held before.
    pub fn before(&self) -> Resources {
        self.before
    }

    /// Returns how much memory the documents let it take beside so many connections, of which so many do I/O, and a tenth for what an
    /// allocator rounds up.
    pub fn resident_max(&self, connections: u64, loaded: u64) -> u64 {
        let loaded = connections.min(loaded);
        let documented = self.nbd_memory + connections * IDLE_BYTES + loaded * LOADED_BYTES;
        self.before.resident_bytes + documented + documented / 10
    }

    /// Waits until the daemon has given back what attackers had of it.
    ///
    /// # Errors
    /// What it still has when time is up.
    pub fn wait_given_back(&self) -> Result<()> {
        let end = Instant::now() + GIVE_BACK_TIME_MAX;
        loop {
            let held = Resources::by(self.pid)?;
            let (before, now) = (self.before, held);
            if now.descriptors <= before.descriptors && now.threads <= before.threads {
                return Ok(());
            }
            ensure!(
                Instant::now() < end,
                "{GIVE_BACK_TIME_MAX:?} after the attack it holds {now}, where it held {before} before"
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Counts a process's descriptors. Linux tells their number as the size of the directory (6.2 and later); to read it takes 2 ms with
/// 2,000 of them, and twenty times a second that would be what the tenant waits for.
fn descriptors(dir: &str) -> io::Result<usize> {
    match fs::metadata(dir)?.len() {
        0 => Ok(fs::read_dir(dir)?.count()),
        count => Ok(count as usize),
    }
}

/// Returns the resident memory of a process, in bytes.
///
/// # Errors
/// If there is no such process.
pub fn resident_bytes(pid: Pid) -> Result<u64> {
    status_bytes(pid, "VmRSS:")
}

/// Returns the private, writable memory that a process has mapped, in bytes: what `RLIMIT_DATA` limits.
///
/// # Errors
/// If there is no such process.
pub fn data_bytes(pid: Pid) -> Result<u64> {
    status_bytes(pid, "VmData:")
}

fn status_bytes(pid: Pid, name: &str) -> Result<u64> {
    let path = format!("/proc/{}/status", pid.as_raw_nonzero());
    let status = fs::read_to_string(path).context(GONE)?;
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    Ok(kib.context(GONE)? << 10)
}

impl fmt::Display for Resources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} descriptors, {} threads, {} MiB",
            self.descriptors,
            self.threads,
            self.resident_bytes >> 20
        )
    }
}

/// What `docs/exports/nbd.md` says that a connection may take beside `nbd_memory`: 16 KiB; and with I/O its own 256 KiB, and 144 KiB
/// for large writes.
const IDLE_BYTES: u64 = 16 << 10;
const LOADED_BYTES: u64 = (256 + 144) << 10;
/// Requests of clients that have left are waited for.
const GIVE_BACK_TIME_MAX: Duration = Duration::from_secs(15);
const KERNELS: &str = "iou-";
const GONE: &str = "the daemon is gone";
