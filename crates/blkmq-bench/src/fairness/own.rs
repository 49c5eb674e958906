//! The laboratory's own client of one disk, a process of its own that sleeps in its pauses: `blkmq-lab client`,
//! which `processes` starts for each tenant. It logs every I/O as fio does, and prints what it used.

mod nbd;
mod pace;
mod vhost_user;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};

use self::pace::Pace;
use super::scene::Load;
use super::spec;
use crate::offsets::Offsets;
use crate::programs;
use crate::rounds::Sample;
use crate::usage::Usage;

/// Load one disk as a tenant of `bench fairness --clients` does
#[derive(clap::Args, Clone, Debug)]
pub struct OwnArgs {
    /// The socket of an NBD server
    #[arg(long, value_name = "SOCKET", requires = "export")]
    nbd: Option<PathBuf>,
    /// The name of the NBD export
    #[arg(long, value_name = "NAME")]
    export: Option<String>,
    /// The socket of a vhost-user-blk server
    #[arg(
        long,
        value_name = "SOCKET",
        conflicts_with = "nbd",
        required_unless_present = "nbd"
    )]
    vhost_user: Option<PathBuf>,
    /// What to do: WEIGHT:DEPTH:SIZE[:OP][@RATE][/REST]; the weight is the server's matter
    #[arg(long, value_name = "SPEC", value_parser = spec::tenant)]
    load: (u16, Load),
    /// Distinguishes this client's offsets and the phase of its pauses from those of others
    #[arg(long, value_name = "N")]
    seed: u64,
    /// How long to begin new I/Os
    #[arg(long, value_name = "MILLISECONDS")]
    run_ms: u64,
    /// Write a line for every I/O to this file: milliseconds since 1970, nanoseconds, direction, bytes, 0
    #[arg(long, value_name = "FILE")]
    log: PathBuf,
    /// Make this file when connected
    #[arg(long, value_name = "FILE")]
    ready: PathBuf,
    /// Begin when this file exists
    #[arg(long, value_name = "FILE")]
    go: PathBuf,
}

/// A connection to a disk, through which I/Os of one kind and size go, known by their numbers.
trait Disk {
    /// The disk's size.
    fn size_bytes(&self) -> u64;
    /// Begins an I/O at `offset`, at the latest in the next [`Self::wait`]. The number is not under way.
    fn begin(&mut self, number: usize, offset: u64);
    /// Adds the numbers of I/Os that have ended to `ended`; sleeps until there is one, at most until `until`.
    ///
    /// # Errors
    /// If an I/O or the connection failed.
    fn wait(&mut self, until: Instant, ended: &mut Vec<usize>) -> Result<()>;
}

/// Runs the client, and prints its time, CPU time and context switches.
///
/// # Errors
/// If the disk cannot be reached, an I/O fails, or the log cannot be written.
pub fn main(args: &OwnArgs) -> Result<()> {
    let load = args.load.1;
    let mut disk: Box<dyn Disk> = match (&args.nbd, &args.vhost_user) {
        (Some(socket), _) => {
            let name = args.export.as_deref().unwrap_or_default();
            Box::new(nbd::Connection::open(socket, name, &load)?)
        }
        (None, Some(socket)) => Box::new(vhost_user::Queue::open(socket, &load)?),
        (None, None) => anyhow::bail!("no disk: name one by --nbd or --vhost-user"),
    };
    ensure!(
        disk.size_bytes() >= load.block_bytes.into(),
        "a disk of {} bytes has no block of {}: serve a larger one",
        disk.size_bytes(),
        load.block_bytes
    );
    // Pauses end when they are due, and not up to 50 µs later.
    rustix::thread::set_current_timer_slack(std::num::NonZero::new(1))
        .context("setting the timers' slack")?;
    std::fs::write(&args.ready, "").context("saying that this client is ready")?;
    while !args.go.exists() {
        std::thread::sleep(LOOK_EVERY);
    }
    let before = Usage::of_this_process()?;
    let start = Instant::now();
    let log = run(
        disk.as_mut(),
        &load,
        args.seed,
        Duration::from_millis(args.run_ms),
    )?;
    let (elapsed, used) = (start.elapsed(), Usage::of_this_process()? - before);
    std::fs::write(&args.log, log).with_context(|| format!("writing {}", args.log.display()))?;
    println!("{} {} {}", elapsed.as_nanos(), used.cpu_ns, used.switches);
    Ok(())
}

/// Loads the disk for `length` and until all I/Os have ended; returns the log.
fn run(disk: &mut dyn Disk, load: &Load, seed: u64, length: Duration) -> Result<String> {
    let depth = load.depth as usize;
    let block_bytes = u64::from(load.block_bytes);
    let mut offsets = Offsets::new(disk.size_bytes(), block_bytes, load.is_random, seed);
    let mut free: Vec<usize> = (0..depth).collect();
    let mut started = vec![Instant::now(); depth];
    let mut ended = Vec::with_capacity(depth);
    let mut log = Log::new(load);
    let end = Instant::now() + length;
    let mut pace = Pace::new(load, seed, Instant::now());
    loop {
        let now = Instant::now();
        while now < end && pace.lets_begin(now) {
            let Some(number) = free.pop() else { break };
            started[number] = now;
            disk.begin(number, offsets.next());
            pace.began(now);
        }
        if now >= end && free.len() == depth {
            return Ok(log.text);
        }
        let next = pace.next().filter(|_| now < end && !free.is_empty());
        let until = next.map_or(now + SILENCE_MAX, |next| next.min(end));
        disk.wait(until, &mut ended)?;
        let now = Instant::now();
        ensure!(
            next.is_some() || !ended.is_empty() || now < until,
            "no I/O ended within {SILENCE_MAX:?}"
        );
        for number in ended.drain(..) {
            log.add(now, now - started[number]);
            free.push(number);
        }
        pace.ended(now, free.len() == depth);
    }
}

/// Lines as in fio's log of latencies, by the clock that all processes share.
struct Log {
    text: String,
    /// The same moment by both clocks.
    instant: Instant,
    since_1970: Duration,
    rest: String,
}

impl Log {
    fn new(load: &Load) -> Self {
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH);
        Self {
            text: String::with_capacity(LOG_BYTES),
            instant: Instant::now(),
            since_1970: since_1970.unwrap_or_default(),
            rest: format!("{}, {}, 0", u8::from(load.op.is_write()), load.block_bytes),
        }
    }

    fn add(&mut self, at: Instant, latency: Duration) {
        let at = self.since_1970 + at.saturating_duration_since(self.instant);
        // A String takes any text.
        let _ = writeln!(
            self.text,
            "{}, {}, {}",
            at.as_millis(),
            latency.as_nanos(),
            self.rest
        );
    }
}

/// Where a client's files are: `PREFIX_lat.1.log` as fio names it, and those that start it.
pub(super) struct Files<'a> {
    pub(super) prefix: &'a Path,
    pub(super) ready: &'a Path,
    pub(super) go: &'a Path,
}

/// Adds the options of this client to `command`, which names it and its disk.
pub(super) fn add_options(command: &mut Command, files: &Files<'_>, load: &Load, seed: u64) {
    let log = format!("{}_lat.1.log", files.prefix.display());
    command
        .args(["--load", &format!("1:{}", load.spec())])
        .args(["--seed", &seed.to_string(), "--log", &log, "--ready"])
        .arg(files.ready)
        .arg("--go")
        .arg(files.go);
}

/// Runs a client for `length` and returns its time and usage.
///
/// # Errors
/// If it fails; the error contains its output.
pub(super) fn run_as(mut command: Command, length: Duration) -> Result<Sample> {
    command.args(["--run-ms", &length.as_millis().to_string()]);
    programs::note(&command);
    let output = command
        .stdin(Stdio::null())
        .output()
        .context("starting a client")?;
    let said = String::from_utf8_lossy(&output.stdout);
    ensure!(
        output.status.success(),
        "client: {}\n{}{said}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    let mut numbers = said.split_whitespace().map(|word| word.parse::<u64>().ok());
    let mut next = || numbers.next().flatten().context("a client printed no usage");
    Ok(Sample {
        elapsed: Duration::from_nanos(next()?),
        usage: Usage {
            cpu_ns: next()?,
            switches: next()?,
        },
        ..Sample::default()
    })
}

const LOOK_EVERY: Duration = Duration::from_millis(2);
/// A disk that ends nothing for this long has failed.
const SILENCE_MAX: Duration = Duration::from_secs(30);
/// Some seconds of a light tenant.
const LOG_BYTES: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    /// A disk whose I/Os end `latency` after they began, one after the other.
    struct Slow {
        under_way: Vec<(usize, Instant)>,
        latency: Duration,
        most: usize,
    }

    impl Disk for Slow {
        fn size_bytes(&self) -> u64 {
            1 << 20
        }

        fn begin(&mut self, number: usize, _: u64) {
            self.under_way.push((number, Instant::now() + self.latency));
            self.most = self.most.max(self.under_way.len());
        }

        fn wait(&mut self, until: Instant, ended: &mut Vec<usize>) -> Result<()> {
            let first = self.under_way.first().map(|(_, at)| *at);
            let until = first.map_or(until, |at| at.min(until));
            std::thread::sleep(until.saturating_duration_since(Instant::now()));
            if first.is_some_and(|at| at <= Instant::now()) {
                ended.push(self.under_way.remove(0).0);
            }
            Ok(())
        }
    }

    fn lines(load: &str, latency: Duration) -> (usize, usize) {
        let (_, load) = spec::tenant(load).unwrap();
        let mut disk = Slow {
            under_way: Vec::new(),
            latency,
            most: 0,
        };
        let log = run(&mut disk, &load, 1, Duration::from_millis(400)).unwrap();
        assert!(disk.under_way.is_empty(), "all have ended");
        for line in log.lines() {
            let words: Vec<u64> = line.split(", ").map(|word| word.parse().unwrap()).collect();
            assert!(words.len() == 5 && words[3] == 4096, "{line}");
            assert!(words[1] >= latency.as_nanos() as u64, "{line}");
        }
        (log.lines().count(), disk.most)
    }

    #[test]
    fn client_keeps_its_depth_under_way_and_pauses_at_its_rate() {
        let ms = Duration::from_millis;
        let (flood, most) = lines("1:4:4k", ms(1));
        assert!(flood > 40 && most == 4, "{flood} {most}");
        let (paced, most) = lines("1:4:4k@50", ms(1));
        assert!((5..=21).contains(&paced) && most <= 2, "{paced} {most}");
    }

    #[test]
    fn burst_begins_when_the_one_before_has_ended_and_its_pause_is_over() {
        let (count, most) = lines("1:4:4k/50", Duration::from_millis(2));
        assert!(count % 4 == 0 && (4..=32).contains(&count), "{count}");
        assert_eq!(most, 4);
    }
}
