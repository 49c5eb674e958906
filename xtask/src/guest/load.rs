//! The guest's load on its disk while shares and latencies are measured, and its report.
//!
//! This program runs in the guest; [`weights`](super::weights) starts it there and reads its
//! output.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

/// Reads 4 KiB at random places of the guest's disk with direct I/O, `depth` at a time, for
/// `seconds` seconds. Prints how many reads have ended every [`PERIOD`], and their latencies at the
/// end.
///
/// # Errors
/// If a read fails.
pub(crate) fn run(depth: u64, seconds: u64) -> Result<()> {
    let (ended, stop) = (&AtomicU64::new(0), &AtomicBool::new(false));
    let mut latencies = thread::scope(|scope| {
        let readers: Vec<_> = (1..=depth)
            .map(|seed| scope.spawn(move || read(seed, ended, stop)))
            .collect();
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(seconds) {
            println!("{ENDED}{}", ended.load(Ordering::Relaxed));
            thread::sleep(PERIOD);
        }
        stop.store(true, Ordering::Relaxed);
        let mut all = Vec::new();
        for reader in readers {
            all.extend(reader.join().expect("a reader does not panic")?);
        }
        anyhow::Ok(all)
    })?;
    ensure!(!latencies.is_empty(), "no read has ended");
    latencies.sort_unstable();
    let at = |part: f64| latencies[((latencies.len() - 1) as f64 * part) as usize];
    println!("{LATENCIES}{} {}", at(0.5), at(0.99));
    Ok(())
}

/// The body of one reader; returns the latency of each read, in µs.
fn read(seed: u64, ended: &AtomicU64, stop: &AtomicBool) -> Result<Vec<u64>> {
    let disk = OpenOptions::new().read(true).custom_flags(O_DIRECT).open(DISK)?;
    let blocks = blocks()?;
    let mut memory = vec![0; 2 * BLOCK];
    let aligned = memory.as_ptr().align_offset(BLOCK);
    let block = &mut memory[aligned..aligned + BLOCK];
    let (mut chance, mut latencies) = (seed.wrapping_mul(0x9e37_79b9_7f4a_7c15), Vec::new());
    while !stop.load(Ordering::Relaxed) {
        // Marsaglia, "Xorshift RNGs", 2003: the shifts 13, 7 and 17.
        chance ^= chance << 13;
        chance ^= chance >> 7;
        chance ^= chance << 17;
        let start = Instant::now();
        disk.read_exact_at(block, chance % blocks * BLOCK as u64)?;
        latencies.push(start.elapsed().as_micros() as u64);
        ended.fetch_add(1, Ordering::Relaxed);
    }
    Ok(latencies)
}

fn blocks() -> Result<u64> {
    let sectors = std::io::read_to_string(File::open(SECTORS)?)?;
    let sectors: u64 = sectors.trim().parse().context("the size of the disk")?;
    Ok(sectors * 512 / BLOCK as u64)
}

/// Precedes the number of reads that have ended.
pub(super) const ENDED: &str = "reads ended: ";
/// Precedes the median and the 99th percentile, in µs.
pub(super) const LATENCIES: &str = "latencies: ";
/// Interval at which the number of reads is printed.
const PERIOD: Duration = Duration::from_millis(250);
const BLOCK: usize = 4096;
const DISK: &str = "/dev/vda";
const SECTORS: &str = "/sys/block/vda/size";
/// The value on x86_64, the guest's architecture.
const O_DIRECT: i32 = 0o40000;
