//! `clients` measures how long 1 to 512 clients of a filesystem take for a fixed amount of work each, on
//! one rotating disk behind 64 hardware contexts; with the gate, with Linux's way before 2020, and with a
//! single hardware queue.
//!
//! It is a model: the clients are modelled on dbench over XFS (`program`), CPUs and disk are those
//! of `rig`; the queue and the elevator are real. Equal seeds give equal times.

mod program;
mod rig;

use std::fmt::Write;

use blkmq_core::sched::ElevatorType;
use blkmq_core::time::Nanos;

pub use self::program::DISK_BYTES;
pub use self::rig::{CPUS, DISK_DEPTH, measure};

/// Its name on the command line.
pub const NAME: &str = "clients";
/// A summary, for the command line.
pub const ABOUT: &str = "measures 1 to 512 dbench-like clients on a disk with seeks and 64 contexts; a table";
/// The numbers of clients in the published table.
pub const CLIENTS: [usize; 8] = [1, 2, 4, 8, 16, 32, 64, 512];

/// How requests reach the disk from 64 reactors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// 64 hardware contexts; an insertion runs one, a completion all of them, as SCSI did. Each
    /// waits for the elevator's lock.
    Before,
    /// 64 hardware contexts and the gate.
    After,
    /// One hardware context for all reactors, on the CPU that owns it.
    SingleQueue,
    /// The same, but a hand-over to that CPU takes no time: a single queue that any CPU may issue
    /// to.
    SingleDirect,
}

impl Side {
    /// All sides, in the order of the published table.
    pub const ALL: [Self; 4] = [Self::Before, Self::SingleQueue, Self::SingleDirect, Self::After];

    /// Its name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Before => "before",
            Self::After => "after",
            Self::SingleQueue => "single-queue",
            Self::SingleDirect => "single-direct",
        }
    }
}

/// The result of one run.
#[derive(Clone, Debug)]
pub struct Point {
    /// Virtual time until the last client had finished.
    pub time: Nanos,
    /// Bios that the clients submitted. Their number minus that of requests is the number of merged
    /// ones.
    pub bios: u64,
    /// Requests that reached the disk.
    pub requests: u64,
    /// CPU time, summed over all CPUs.
    pub busy: Nanos,
    /// The time that each bio took in nanoseconds, in ascending order.
    pub latencies: Vec<u64>,
}

impl Point {
    /// Returns the share of bios that were merged into another's request, in millionths.
    pub fn merged_ppm(&self) -> u64 {
        (self.bios - self.requests) * 1_000_000 / self.bios.max(1)
    }
}

/// Measures all points for `seeds` seeds from `first` on, and returns the table of medians.
pub fn table(elevator: &'static ElevatorType, first: u64, seeds: u64) -> String {
    let mut table = format!(
        "{elevator}, a 7200 rpm disk, 64 reactors; virtual seconds, median of {seeds} seeds: a model, see docs/simulator.md\n\
         clients      before  single-queue  single-direct         after    merged: before  single  direct  after\n"
    );
    for clients in CLIENTS {
        let [before, single, direct, after] =
            Side::ALL.map(|side| median(side, elevator, clients, first, seeds));
        let _ = writeln!(
            table,
            "{clients:>7} {:>11.3} {:>13.3} {:>14.3} {:>13.3}           {:>6.1} % {:>5.1} % {:>5.1} % {:>4.1} %",
            before.0, single.0, direct.0, after.0, before.1, single.1, direct.1, after.1
        );
    }
    table
}

/// The medians of the time in seconds and of the percentage merged.
fn median(side: Side, elevator: &'static ElevatorType, clients: usize, first: u64, seeds: u64) -> (f64, f64) {
    let points = (first..first + seeds).map(|seed| measure(side, elevator, clients, seed));
    let (mut times, mut merged): (Vec<_>, Vec<_>) =
        points.map(|point| (point.time.0, point.merged_ppm())).unzip();
    times.sort_unstable();
    merged.sort_unstable();
    let middle = times.len() / 2;
    (times[middle] as f64 / 1e9, merged[middle] as f64 / 1e4)
}

#[cfg(test)]
mod tests {
    use blkmq_core::sched;

    use super::*;

    fn times(side: Side, clients: usize) -> u64 {
        measure(side, sched::MQ_DEADLINE, clients, 1).time.0
    }

    #[test]
    fn every_side_does_the_same_work_and_a_seed_replays() {
        for clients in [1, 3] {
            let points = Side::ALL.map(|side| measure(side, sched::MQ_DEADLINE, clients, 7));
            assert!(
                points
                    .iter()
                    .all(|point| point.bios == points[0].bios && point.bios > 0)
            );
            assert!(points.iter().all(|point| point.requests <= point.bios));
        }
        assert_eq!(times(Side::After, 2), times(Side::After, 2));
    }

    #[test]
    fn one_dispatcher_is_no_slower_than_every_context_for_itself_and_merges_as_much() {
        for clients in [1, 8] {
            let [before, _, _, after] = Side::ALL.map(|side| measure(side, sched::MQ_DEADLINE, clients, 1));
            assert!(
                after.time <= before.time,
                "{clients}: {:?} {:?}",
                after.time,
                before.time
            );
            assert!(after.merged_ppm() + 10_000 >= before.merged_ppm(), "{clients}");
            assert!(after.busy < before.busy, "{clients}");
        }
    }
}
