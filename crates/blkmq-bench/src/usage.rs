//! The CPU time and the context switches of a process, per thread from procfs, in nanoseconds. `rounds` takes
//! the difference over a window; the engine bench reads this process, the NBD bench the server's.

use std::fs;
use std::ops::{AddAssign, Sub};
use std::path::Path;

use anyhow::{Context, Result, ensure};

/// The resources that a process has used so far, or between two readings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// User and system time of all its threads, in nanoseconds.
    pub cpu_ns: u64,
    /// Context switches of all its threads, voluntary or not.
    pub switches: u64,
}

impl Usage {
    /// Reads the usage of this process's living threads.
    ///
    /// # Errors
    /// If procfs is missing or unlike Linux's.
    pub fn of_this_process() -> Result<Self> {
        Self::of(std::process::id())
    }

    /// Reads the usage of this thread: the process's usage omits threads that have ended.
    ///
    /// # Errors
    /// If procfs is missing or unlike Linux's.
    pub fn of_this_thread() -> Result<Self> {
        of_thread(Path::new("/proc/thread-self"))
    }

    /// Reads the CPU time of all descendants of this process that have been waited for: in ticks of
    /// 10 ms.
    ///
    /// # Errors
    /// If procfs is missing or unlike Linux's.
    pub fn of_ended_children() -> Result<Self> {
        Self::of_stat("/proc/self/stat", CHILDREN)
    }

    /// Reads the CPU time of process `pid`, including threads that have ended: in ticks of 10 ms,
    /// and without context switches.
    ///
    /// # Errors
    /// If the process is gone or procfs is not readable.
    pub fn of_with_ended_threads(pid: u32) -> Result<Self> {
        Self::of_stat(&format!("/proc/{pid}/stat"), OWN)
    }

    fn of_stat(path: &str, field: usize) -> Result<Self> {
        let stat = fs::read_to_string(path).with_context(|| format!("reading {path}"))?;
        let ticks = ticks(&stat, field).with_context(|| format!("{path} has no such time"))?;
        Ok(Self {
            cpu_ns: ticks * 1_000_000_000 / rustix::param::clock_ticks_per_second().max(1),
            switches: 0,
        })
    }

    /// Reads the usage of the living threads of process `pid`. A running thread's time may be up to a
    /// scheduler tick (at most 10 ms) old.
    ///
    /// # Errors
    /// If the process is gone or procfs is not readable.
    pub fn of(pid: u32) -> Result<Self> {
        let tasks = format!("/proc/{pid}/task");
        let mut sum = Self::default();
        let mut found = 0;
        for entry in fs::read_dir(&tasks).with_context(|| format!("reading {tasks}"))? {
            // A thread that ends between its listing and its reading is not counted.
            if let Ok(thread) = of_thread(&entry?.path()) {
                sum.cpu_ns += thread.cpu_ns;
                sum.switches += thread.switches;
                found += 1;
            }
        }
        ensure!(found > 0, "{tasks}: no thread's usage could be read");
        Ok(sum)
    }
}

impl AddAssign for Usage {
    fn add_assign(&mut self, more: Self) {
        self.cpu_ns += more.cpu_ns;
        self.switches += more.switches;
    }
}

impl Sub for Usage {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        Self {
            cpu_ns: self.cpu_ns.saturating_sub(earlier.cpu_ns),
            switches: self.switches.saturating_sub(earlier.switches),
        }
    }
}

fn of_thread(task: &Path) -> Result<Usage> {
    let times = fs::read_to_string(task.join("schedstat"))?;
    let status = fs::read_to_string(task.join("status"))?;
    Ok(Usage {
        cpu_ns: run_time(&times).context("schedstat has no run time")?,
        switches: switches(&status),
    })
}

/// The index of the user and system time of the process, the 14th and 15th field of its line, and
/// of its ended children, the 16th and 17th. Fields are counted from the end of the name, which may
/// contain anything.
const OWN: usize = 11;
const CHILDREN: usize = 13;

/// The sum of a field and the next one.
fn ticks(stat: &str, field: usize) -> Option<u64> {
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_whitespace().skip(field);
    let user: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    Some(user + system)
}

/// The first of the three numbers: nanoseconds on a CPU.
fn run_time(schedstat: &str) -> Option<u64> {
    schedstat.split_whitespace().next()?.parse().ok()
}

/// The sum of the lines `voluntary_ctxt_switches:` and `nonvoluntary_ctxt_switches:`.
fn switches(status: &str) -> u64 {
    let of_line = |line: &str| {
        let (name, value) = line.split_once(':')?;
        name.ends_with("voluntary_ctxt_switches")
            .then(|| value.trim().parse::<u64>().ok())?
    };
    status.lines().filter_map(of_line).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_of_context_switches_are_added() {
        let status =
            "Name:\tx\nThreads:\t1\nvoluntary_ctxt_switches:\t150\nnonvoluntary_ctxt_switches:\t545\n";
        assert_eq!(switches(status), 695);
        assert_eq!(run_time("572791898 319070 31\n"), Some(572_791_898));
    }

    #[test]
    fn time_of_children_stands_behind_any_name() {
        let stat = "7 (a) b) S 1 7 7 0 -1 4194560 1 2 3 4 10 11 200 30 20 0 1 0 99 1 1";
        assert_eq!((ticks(stat, CHILDREN), ticks(stat, OWN)), (Some(230), Some(21)));
    }

    #[test]
    fn work_done_by_this_process_is_seen() {
        let before = Usage::of_this_process().unwrap();
        let start = std::time::Instant::now();
        let mut used = Usage::default();
        // The kernel updates a running thread's time at its ticks; on a busy machine this thread
        // may have to wait for a CPU.
        while used.cpu_ns == 0 {
            assert!(start.elapsed().as_secs() < 20, "work left no trace");
            used = Usage::of_this_process().unwrap() - before;
        }
    }

    #[test]
    fn process_that_is_not_there_is_an_error() {
        assert!(Usage::of(u32::MAX).is_err());
    }
}
