//! A scene that is played by processes: one for each tenant, fio or our own client, all started together, which
//! log every I/O.
//! Only I/Os count that ended in a window in which all processes ran. `clients` gives them disks of a daemon,
//! `kernel` a loop device.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::own;
use super::scene::{Load, Scene, Tenant};
use super::score::Series;
use super::stage::warm_up;
use crate::args::Plan;
use crate::fio;
use crate::histogram::Histogram;
use crate::rounds::{Latency, Sample};
use crate::usage::Usage;
use blkmq_testkit::Scratch;

/// One tenant's process, as a command to which the load's options are added.
pub(super) enum Process {
    /// A command that becomes fio, and the options that choose engine and target. An engine's own options follow its
    /// name.
    Fio { command: Command, target: Vec<String> },
    /// `blkmq-lab client`, with the options that choose the disk.
    Own(Command),
}

/// The results of the processes: the crowd's first and then the light tenant's.
pub(super) struct Visit {
    pub(super) samples: Vec<Sample>,
    pub(super) series: Series,
    /// Usage over the middle half of the window, scaled to all of it.
    pub(super) usage: Usage,
}

impl Visit {
    /// All tenants together; the latency is that of the light tenant, or else of the first.
    pub(super) fn total(&self, scene: &Scene) -> Sample {
        let shown = if scene.victim.is_some() {
            self.samples.last()
        } else {
            self.samples.first()
        };
        let shown = shown.expect("a scene has tenants");
        Sample {
            ios: self.samples.iter().map(|sample| sample.ios).sum(),
            elapsed: shown.elapsed,
            latency: shown.latency,
            usage: self.usage,
            ..Sample::default()
        }
    }
}

/// Plays a scene with a process for each tenant. `usage` reads the usage of the measured side so
/// far.
///
/// # Errors
/// If a process fails, or none completes an I/O.
pub(super) fn play(
    scene: &Scene,
    plan: &Plan,
    mut process: impl FnMut(usize, &Tenant) -> Result<Process>,
    usage: impl Fn() -> Usage,
) -> Result<Visit> {
    let dir = Scratch::new();
    fs::write(dir.path(WAIT), WAIT_SCRIPT).context("writing the script that clients wait with")?;
    let mut processes = Vec::new();
    for (place, tenant) in scene.tenants().iter().enumerate() {
        processes.push(loaded(process(place, tenant)?, place, &tenant.load, &dir));
    }
    let places = processes.len();
    let (whole, usage) = run(processes, &dir, plan, usage)?;
    let logs = (0..places).map(|place| read_log(&dir.path(&place.to_string())));
    let logs = logs.collect::<Result<Vec<_>>>()?;
    let window = window(&logs, plan)?;
    let samples = logs.iter().zip(&whole);
    Ok(Visit {
        samples: samples.map(|(log, whole)| sample(log, window, whole)).collect(),
        series: series(&logs, window),
        usage,
    })
}

/// The process with the options of its load, its log and its start.
fn loaded(process: Process, place: usize, tenant: &Load, dir: &Scratch) -> Process {
    let prefix = dir.path(&place.to_string());
    match process {
        Process::Fio {
            mut command,
            mut target,
        } => {
            command.current_dir(dir.path(""));
            target.extend(load(tenant));
            target.extend(log(&prefix));
            target.push(format!("--exec_prerun=sh {WAIT} {place}"));
            Process::Fio { command, target }
        }
        Process::Own(mut command) => {
            let files = own::Files {
                prefix: &prefix,
                ready: &dir.path(&format!("{READY}{place}")),
                go: &dir.path(GO),
            };
            own::add_options(&mut command, &files, tenant, place as u64);
            Process::Own(command)
        }
    }
}

/// Starts all processes, lets them begin at once, and waits for them.
fn run(
    processes: Vec<Process>,
    dir: &Scratch,
    plan: &Plan,
    usage: impl Fn() -> Usage,
) -> Result<(Vec<Sample>, Usage)> {
    let (window, warm_up) = (plan.window, warm_up(plan));
    std::thread::scope(|scope| {
        let length = warm_up + window + SLACK;
        let start = |process: Process| {
            scope.spawn(move || match process {
                Process::Fio { command, target } => fio::run_as(command, &target, Duration::ZERO, length),
                Process::Own(command) => own::run_as(command, length),
            })
        };
        let running: Vec<_> = processes.into_iter().map(start).collect();
        wait_until_ready(dir, &running);
        // Also if one has failed: the others would wait forever.
        fs::write(dir.path(GO), "").context("having the clients begin")?;
        std::thread::sleep(warm_up + window / 4);
        let before = usage();
        std::thread::sleep(window / 2);
        let used = usage() - before;
        let ended = running.into_iter().map(|thread| thread.join());
        let samples: Result<Vec<Sample>> = ended
            .map(|sample| sample.expect("a thread that waits for a client"))
            .collect();
        let used = Usage {
            cpu_ns: 2 * used.cpu_ns,
            switches: 2 * used.switches,
        };
        Ok((samples?, used))
    })
}

/// Waits until each process is ready: fio's own start takes half a second of CPU time, and many
/// processes share few CPUs.
fn wait_until_ready<T>(dir: &Scratch, running: &[ScopedJoinHandle<'_, T>]) {
    let start = Instant::now();
    let is_ready = |place: usize| dir.path(&format!("{READY}{place}")).exists();
    let has_ended = || running.iter().any(|thread| thread.is_finished());
    while !(0..running.len()).all(is_ready) && !has_ended() && start.elapsed() < READY_WITHIN {
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn load(load: &Load) -> Vec<String> {
    let rate = (load.rate > 0).then(|| match 1_000_000 / load.rate {
        pause_us if pause_us >= SLEEPS_FROM_US => format!("--thinktime={pause_us}us"),
        _ => format!("--rate_iops={}", load.rate),
    });
    let options = [
        format!("--rw={}", load.rw()),
        format!("--bs={}", load.block_bytes),
        format!("--iodepth={}", load.depth),
        // Otherwise each job would be a child of the started process, with a start of its own.
        "--thread".into(),
    ];
    let bursts = (load.rest_ms > 0).then(|| {
        let pause = format!("--thinktime={}ms", load.rest_ms);
        [pause, format!("--thinktime_blocks={}", load.depth)]
    });
    let bursts = bursts.into_iter().flatten();
    options.into_iter().chain(rate).chain(bursts).collect()
}

/// Options for a log with a line for every I/O, with times of the clock that all processes share.
fn log(prefix: &Path) -> [String; 4] {
    [
        format!("--write_lat_log={}", prefix.display()),
        "--log_unix_epoch=1".into(),
        "--disable_slat=1".into(),
        "--disable_clat=1".into(),
    ]
}

/// An I/O in a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Ended {
    at_ms: u64,
    latency_ns: u64,
    bytes: u64,
}

/// Reads a log, which has lines of `milliseconds, nanoseconds, direction, bytes, ...` in the order
/// in which I/Os ended.
fn read_log(prefix: &Path) -> Result<Vec<Ended>> {
    let path = PathBuf::from(format!("{}_lat.1.log", prefix.display()));
    let text = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
    let ended = |line: &str| -> Option<Ended> {
        let mut words = line.split(',').map(|word| word.trim().parse().ok());
        let (at_ms, latency_ns) = (words.next()??, words.next()??);
        let bytes = words.nth(1)??;
        Some(Ended {
            at_ms,
            latency_ns,
            bytes,
        })
    };
    text.lines()
        .map(|line| ended(line).with_context(|| format!("{}: {line:?}", path.display())))
        .collect()
}

/// The range of time in which all of them ran, in milliseconds, without the warm-up. They begin
/// together, with the first I/O that ends in any of them; one whose first I/O ends much later was
/// waiting.
///
/// The range does not depend on the ends of later I/Os: a tenant that is served in turns would
/// otherwise have its own turn at both ends of it.
fn window(logs: &[Vec<Ended>], plan: &Plan) -> Result<(u64, u64)> {
    let first = logs.iter().filter_map(|log| log.first().map(|ended| ended.at_ms));
    let first = first.min().context("no client ended any I/O")?;
    let start = first + warm_up(plan).as_millis() as u64;
    Ok((start, start + plan.window.as_millis() as u64))
}

/// The results of one process in the window; its usage is the window's part, by time, of that of
/// its whole run.
fn sample(log: &[Ended], (start, end): (u64, u64), whole: &Sample) -> Sample {
    let elapsed = Duration::from_millis(end - start);
    let mut latency = Histogram::new();
    let mut ios = 0;
    for ended in log.iter().filter(|ended| (start..end).contains(&ended.at_ms)) {
        latency.record(ended.latency_ns);
        ios += 1;
    }
    let part = elapsed.as_secs_f64() / whole.elapsed.as_secs_f64().max(1e-9);
    Sample {
        ios,
        elapsed,
        latency: Latency::from(&latency),
        usage: Usage {
            cpu_ns: (whole.usage.cpu_ns as f64 * part) as u64,
            switches: (whole.usage.switches as f64 * part) as u64,
        },
        ..Sample::default()
    }
}

/// Bytes of each tenant since the start of the window, at each step.
fn series(logs: &[Vec<Ended>], (start, end): (u64, u64)) -> Series {
    let times = (start..end).step_by(STEP_MS as usize).chain([end]);
    let mut next = vec![0; logs.len()];
    let mut bytes = vec![0; logs.len()];
    let moment = |time: u64| {
        for (place, log) in logs.iter().enumerate() {
            while let Some(ended) = log.get(next[place]).filter(|ended| ended.at_ms < time) {
                bytes[place] += if ended.at_ms < start { 0 } else { ended.bytes };
                next[place] += 1;
            }
        }
        (Duration::from_millis(time - start), bytes.clone())
    };
    Series {
        moments: times.map(moment).collect(),
    }
}

/// The script that each process runs when it is ready: it reports that, and waits for the signal to
/// begin.
const WAIT_SCRIPT: &str = ": > ready.$1\nuntil [ -e go ]; do sleep 0.01; done\n";
const WAIT: &str = "wait.sh";
const READY: &str = "ready.";
const GO: &str = "go";
const READY_WITHIN: Duration = Duration::from_secs(30);
/// Processes begin within this time after the signal, and run this much longer than they are
/// measured.
const SLACK: Duration = Duration::from_millis(300);
const STEP_MS: u64 = 10;
/// fio sleeps for pauses from this length on, and spins for shorter ones: then each such tenant burns a processor.
const SLEEPS_FROM_US: u32 = 5000;

#[cfg(test)]
mod tests {
    use super::*;

    fn plan() -> Plan {
        Plan {
            rounds: 1,
            window: Duration::from_millis(1000),
            warm_up: Duration::ZERO,
        }
    }

    /// An I/O of `bytes` bytes every 10 ms, from `start` on for three seconds.
    fn log(start: u64, bytes: u64) -> Vec<Ended> {
        let ended = |index: u64| Ended {
            at_ms: start + 10 * index,
            latency_ns: 1000 * index,
            bytes,
        };
        (0..300).map(ended).collect()
    }

    #[test]
    fn log_of_fio_is_read_line_by_line() {
        let read = |text: &str| {
            let dir = Scratch::new();
            fs::write(dir.path("a_lat.1.log"), text).unwrap();
            read_log(&dir.path("a"))
        };
        let ended = Ended {
            at_ms: 1100,
            latency_ns: 2048,
            bytes: 65536,
        };
        assert_eq!(read("1100, 2048, 0, 65536, 0\n").unwrap(), [ended]);
        let error = read("1100, 2048, 0, 65536, 0\n1200, 5\n")
            .unwrap_err()
            .to_string();
        assert!(error.contains("1200, 5"), "{error}");
    }

    #[test]
    fn requests_that_end_in_the_common_window_count() {
        let logs = [log(5000, 100), log(5200, 300)];
        // A second of warm-up and one of measurement, from the end of the first I/O.
        let window = window(&logs, &plan()).unwrap();
        assert_eq!(window, (6000, 7000));
        let series = series(&logs, window);
        assert_eq!(series.moments[0], (Duration::ZERO, vec![0, 0]));
        assert_eq!(series.moments.len(), 101);
        assert_eq!(
            series.moments.last().unwrap(),
            &(plan().window, vec![10_000, 30_000])
        );
        let whole = Sample {
            elapsed: Duration::from_secs(3),
            usage: Usage {
                cpu_ns: 3000,
                switches: 30,
            },
            ..Sample::default()
        };
        let sample = sample(&logs[0], window, &whole);
        assert_eq!((sample.ios, sample.elapsed), (100, plan().window));
        assert_eq!(sample.usage.cpu_ns, 1000);
        // The I/Os from the 100th to the 199th, known to within 1.6 %.
        assert!((145_000..155_000).contains(&sample.latency.p50_ns), "{sample:?}");
    }

    #[test]
    fn tenant_that_is_served_in_turns_has_no_turn_more_for_it() {
        // Nothing in half of the time and twice as much in the other half, also around both ends of
        // the window.
        let turns = |log: Vec<Ended>| -> Vec<Ended> {
            let kept = log.into_iter().filter(|ended| ended.at_ms / 100 % 2 == 0);
            kept.map(|ended| Ended {
                bytes: 2 * ended.bytes,
                ..ended
            })
            .collect()
        };
        let logs = [log(5000, 100), turns(log(5000, 100))];
        let series = series(&logs, window(&logs, &plan()).unwrap());
        assert_eq!(series.share_error(&[0.5, 0.5]), 0.0);
    }

    #[test]
    fn tenant_that_waits_long_for_its_first_io_moves_no_window() {
        let logs = [log(5000, 1), log(6900, 1)];
        let window = window(&logs, &plan()).unwrap();
        assert_eq!(series(&logs, window).moments.last().unwrap().1, [100, 10]);
    }

    #[test]
    fn one_who_ended_nothing_has_nothing() {
        let logs = [log(5000, 100), Vec::new()];
        let found = window(&logs, &plan()).unwrap();
        assert!(window(&[Vec::new()], &plan()).is_err());
        assert_eq!(series(&logs, found).rates()[1], 0.0);
        assert_eq!(sample(&logs[1], found, &Sample::default()).ios, 0);
    }
}
