//! Measures how two guests share one drive by weight, as seen in the guests: how much each reads while
//! both flood, and how long the light guest's reads take during the other's flood.
//!
//! The drive is modelled and so slow that it is the bottleneck, not the emulated processors.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::initrd::Initrd;
use super::load::{ENDED, LATENCIES};
use super::machine::{self, Machine};
use super::packages::Place;
use super::virtual_disk::{Daemon, words};

/// Measures once, and prints the result.
///
/// # Errors
/// If shares or latency miss their goals, the drive was not the bottleneck, or a guest fails.
pub(super) fn visit(place: &Place, program: &Path, load: &Path) -> Result<()> {
    let plain = shares(place, program, load, "none")?;
    let shared = shares(place, program, load, "bfq")?;
    let alone = latencies(place, program, load, false)?;
    let beside = latencies(place, program, load, true)?;
    let ratio = beside.p99 as f64 / alone.p99 as f64;
    println!(
        "    none: {plain}\n    bfq: {shared}\n    \
         one read of 4 KiB at a time: alone p50 {} µs, p99 {} µs; beside the flood p50 {} µs, p99 {} µs; p99 {ratio:.2} times",
        alone.p50, alone.p99, beside.p50, beside.p99
    );
    ensure!(
        shared.total() >= DRIVE_IOPS * 0.9,
        "the drive has not been what was waited for: {shared}"
    );
    ensure!(
        plain.error() > 0.2,
        "shares are as weights have them without a scheduler: {plain}"
    );
    ensure!(
        shared.error() <= ERROR_MAX,
        "shares are not as weights have them: {shared}"
    );
    ensure!(
        ratio <= RATIO_MAX,
        "p99 beside a flood is {ratio:.2} times that alone"
    );
    Ok(())
}

/// Reads per second of both guests while both flooded.
struct Shares {
    flood: f64,
    light: f64,
}

impl Shares {
    fn total(&self) -> f64 {
        self.flood + self.light
    }

    /// The larger relative difference from what is due.
    fn error(&self) -> f64 {
        let due = self.total() / (FLOOD_WEIGHT + LIGHT_WEIGHT);
        let off = |rate: f64, weight: f64| (rate / (due * weight) - 1.0).abs();
        off(self.flood, FLOOD_WEIGHT).max(off(self.light, LIGHT_WEIGHT))
    }
}

impl std::fmt::Display for Shares {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "weight {FLOOD_WEIGHT} {:.0} IOPS, weight {LIGHT_WEIGHT} {:.0} IOPS, share error {:.1} %",
            self.flood,
            self.light,
            self.error() * 100.0
        )
    }
}

fn shares(place: &Place, program: &Path, load: &Path, sched: &str) -> Result<Shares> {
    let scene = Scene::start(place, program, load, sched)?;
    let light = scene.initrd("light", FLOOD_DEPTH, MEASURED_S)?;
    let flood = scene.initrd("flood", FLOOD_DEPTH, MEASURED_S)?;
    let (flood, light) = thread::scope(|scope| {
        let flood = scope.spawn(|| scene.boot("flood", &flood, &mut || {}));
        let light = scene.boot("light", &light, &mut || {});
        (flood.join().expect("a boot does not panic"), light)
    });
    let (flood, light) = (flood?, light?);
    let begin = flood.begin()?.max(light.begin()?) + SETTLE;
    let end = flood.end()?.min(light.end()?);
    ensure!(
        end > begin + Duration::from_secs(5),
        "the guests have not flooded at the same time for 5 s"
    );
    Ok(Shares {
        flood: flood.rate(begin, end),
        light: light.rate(begin, end),
    })
}

/// Latencies in µs.
struct Latencies {
    p50: u64,
    p99: u64,
}

fn latencies(place: &Place, program: &Path, load: &Path, is_beside: bool) -> Result<Latencies> {
    let scene = Scene::start(place, program, load, "bfq")?;
    let light = scene.initrd("light", 1, MEASURED_S)?;
    let reads = if is_beside {
        let flood = scene.initrd("flood", FLOOD_DEPTH, MEASURED_S + BOOT_S)?;
        let (flooding, floods) = mpsc::channel();
        let (flood, light) = thread::scope(|scope| {
            let flood = scope.spawn(|| {
                // The receiver is gone if the other guest failed.
                scene.boot("flood", &flood, &mut || {
                    let _ = flooding.send(());
                })
            });
            let begun = floods.recv_timeout(TIME_MAX);
            let light = begun.map(|()| scene.boot("light", &light, &mut || {}));
            (flood.join().expect("a boot does not panic"), light)
        });
        let (flood, light) = (flood?, light.context("the flood has not begun")??);
        ensure!(
            flood.end()? > light.end()?,
            "the flood ended before the light guest's reads"
        );
        light
    } else {
        scene.boot("light", &light, &mut || {})?
    };
    let said = reads.said.lines().find_map(|line| line.strip_prefix(LATENCIES));
    let (p50, p99) = said
        .and_then(|said| said.split_once(' '))
        .context("the guest has not said its latencies")?;
    Ok(Latencies {
        p50: p50.parse()?,
        p99: p99.parse()?,
    })
}

/// A daemon with a disk for each guest, on one drive.
struct Scene<'a> {
    place: &'a Place,
    load: &'a Path,
    directory: PathBuf,
    /// Dropped with the scene.
    _daemon: Daemon,
}

impl<'a> Scene<'a> {
    fn start(place: &'a Place, program: &Path, load: &'a Path, sched: &str) -> Result<Self> {
        let directory = place.file("weights");
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir_all(&directory)?;
        let mut words = Vec::new();
        for (name, weight) in [("flood", FLOOD_WEIGHT), ("light", LIGHT_WEIGHT)] {
            let disk = format!("name={name},{DRIVE},queue=drive,sched={sched},group=/{name}");
            let group = format!("/{name},weight={}", weight * 100.0);
            words.extend(["--disk".to_owned(), disk, "--group".to_owned(), group]);
        }
        Ok(Self {
            place,
            load,
            _daemon: Daemon::start(program, &directory, words)?,
            directory,
        })
    }

    /// The file system of a guest with this load.
    fn initrd(&self, name: &str, depth: u64, seconds: u64) -> Result<PathBuf> {
        let mut initrd = Initrd::new(self.place)?;
        initrd.add_program(self.load, "xtask")?;
        initrd.add_module("virtio_blk", "")?;
        let packed = initrd.pack(&format!("xtask {} {depth} {seconds}\n", super::LOAD))?;
        let own = self.directory.join(format!("{name}.img"));
        fs::rename(packed, &own)?;
        Ok(own)
    }

    /// Boots a guest. `begins` is called when its load begins.
    fn boot(&self, name: &str, initrd: &Path, begins: &mut dyn FnMut()) -> Result<Reads> {
        let mut samples = Vec::new();
        let said = machine::boot(Machine {
            place: self.place,
            initrd,
            limit: TIME_MAX,
            words: &words(&self.directory.join(format!("{name}.sock")), "packed=off"),
            heard: &mut |line| {
                if let Some(Ok(count)) = line.strip_prefix(ENDED).map(str::parse) {
                    if samples.is_empty() {
                        begins();
                    }
                    samples.push((Instant::now(), count));
                }
            },
        })?;
        Ok(Reads { samples, said })
    }
}

/// A guest's reports: how many reads had ended, and when it reported that.
struct Reads {
    samples: Vec<(Instant, f64)>,
    said: String,
}

impl Reads {
    fn begin(&self) -> Result<Instant> {
        Ok(self.samples.first().context("a guest has not read")?.0)
    }

    fn end(&self) -> Result<Instant> {
        Ok(self.samples.last().context("a guest has not read")?.0)
    }

    /// Reads per second between two instants.
    fn rate(&self, begin: Instant, end: Instant) -> f64 {
        (self.at(end) - self.at(begin)) / (end - begin).as_secs_f64()
    }

    /// How many reads had ended at an instant, which lies within the samples: interpolated between
    /// two.
    fn at(&self, instant: Instant) -> f64 {
        let next = self.samples.partition_point(|sample| sample.0 < instant).max(1);
        let ((before, low), (after, high)) = (
            self.samples[next - 1],
            self.samples[next.min(self.samples.len() - 1)],
        );
        let span = (after - before).as_secs_f64();
        let part = if span > 0.0 {
            (instant - before).as_secs_f64() / span
        } else {
            0.0
        };
        low + (high - low) * part
    }
}

/// Four units of 8 ms each.
const DRIVE: &str = "null=1G,latency=8ms,parallel=4,depth=4";
const DRIVE_IOPS: f64 = 500.0;
const FLOOD_WEIGHT: f64 = 1.0;
const LIGHT_WEIGHT: f64 = 4.0;
const FLOOD_DEPTH: u64 = 32;
const MEASURED_S: u64 = 15;
/// The longest boot while another guest floods.
const BOOT_S: u64 = 20;
/// Time after both have begun that is not measured.
const SETTLE: Duration = Duration::from_secs(1);
const TIME_MAX: Duration = Duration::from_secs(120);
/// The goals.
const ERROR_MAX: f64 = 0.03;
const RATIO_MAX: f64 = 2.0;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_off_by_as_much_as_the_one_that_is_farther_off() {
        let due = Shares {
            flood: 400.0,
            light: 1600.0,
        };
        assert!(due.error() < 1e-9);
        let equal = Shares {
            flood: 1000.0,
            light: 1000.0,
        };
        assert!((equal.error() - 1.5).abs() < 1e-9, "{}", equal.error());
    }

    #[test]
    fn rate_between_samples_is_in_proportion() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let reads = Reads {
            samples: vec![(at(0), 0.0), (at(1000), 100.0), (at(2000), 300.0)],
            said: String::new(),
        };
        assert_eq!(reads.rate(at(0), at(2000)), 150.0);
        assert_eq!(reads.rate(at(500), at(1500)), 150.0);
        assert_eq!(reads.rate(at(0), at(500)), 100.0);
    }
}
