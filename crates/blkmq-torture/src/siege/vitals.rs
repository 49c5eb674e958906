//! The resources that a daemon may use: memory up to what the documents state, and no descriptor or
//! thread that it does not give back.

use std::fmt;
use std::fs;
use std::io;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::process::Pid;

/// The resources of a process at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resources {
    /// File descriptors.
    pub descriptors: usize,
    /// Threads, except the kernel's io_uring workers, which it starts and ends as it likes.
    pub threads: usize,
    /// Resident memory, in bytes.
    pub resident_bytes: u64,
}

/// What a daemon may use: what it used before an attack, and what the documents add for
/// connections.
#[derive(Clone, Copy, Debug)]
pub struct Allowance {
    pid: Pid,
    before: Resources,
    nbd_memory: u64,
}

impl Resources {
    /// Reads the resources of a process.
    ///
    /// # Errors
    /// If there is no such process.
    pub fn by(pid: Pid) -> Result<Self> {
        let dir = format!("/proc/{}", pid.as_raw_nonzero());
        let descriptors = descriptors(&format!("{dir}/fd")).context(GONE)?;
        let mut threads = 0;
        for thread in fs::read_dir(format!("{dir}/task")).context(GONE)? {
            // A thread that has just ended does not count.
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
    /// Records what the daemon uses now as its baseline.
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

    /// Returns what the daemon used before the attack.
    pub fn before(&self) -> Resources {
        self.before
    }

    /// Returns the memory that the documents allow with this many connections, `loaded` of which do
    /// I/O, plus a tenth for rounding in the allocator.
    pub fn resident_max(&self, connections: u64, loaded: u64) -> u64 {
        let loaded = connections.min(loaded);
        let documented = self.nbd_memory + connections * IDLE_BYTES + loaded * LOADED_BYTES;
        self.before.resident_bytes + documented + documented / 10
    }

    /// Waits until the daemon has given back the descriptors and threads that attackers caused.
    ///
    /// # Errors
    /// What it still holds at the end of the time limit.
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

/// Counts a process's descriptors. Since Linux 6.2 their number is the size of the directory.
/// Reading it takes 2 ms with 2000 descriptors, and twenty times a second that would delay the
/// tenant.
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

/// What `docs/exports/nbd.md` allows a connection in addition to `nbd_memory`: 16 KiB, and with I/O
/// another 256 KiB, and 144 KiB for large writes.
const IDLE_BYTES: u64 = 16 << 10;
const LOADED_BYTES: u64 = (256 + 144) << 10;
/// Includes the end of requests whose clients have disconnected.
const GIVE_BACK_TIME_MAX: Duration = Duration::from_secs(15);
const KERNELS: &str = "iou-";
const GONE: &str = "the daemon is gone";
