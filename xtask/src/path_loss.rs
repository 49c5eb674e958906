//! Tests "no path lost, no data lost" in reality: two hosts (network namespaces), a daemon on each, and
//! disks reached over three links, which are cut and restored at random under verified load.
//!
//! ```text
//!  near host                                               far host
//!  load ─► hold = hold-1 + hold-2 + hold-3 ─┐ link 1 ┌─► hold     ram
//!  load ─► fail = fail-1 + …                ├ link 2 ┤   fail
//!  fio  ─► wide = stripes of left and right ─┘ link 3 └─► left, right
//! ```
//!
//! `hold`, `left` and `right` hold requests while there is no path, so no request may ever fail
//! there. `fail` is configured to fail them: none may fail while one link is up, and with all links
//! down all requests must, soon after the last path has failed.

pub(crate) mod daemon;
mod load;
mod net;
mod wide;

use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use blkmq_testkit::{Daemon, Random, Scratch};

use self::load::{DISK_BYTES, Failure, Load, THREADS};
use self::net::{Cut, Net, far_address};
use self::wide::Wide;
use crate::setup::is_root;
use crate::steps::Steps;
use blkmq_testkit::tools::find;

/// # Errors
/// If a request fails that must not, one does not fail that must, or a read returns data that was
/// not written. If the machine lacks a requirement, the test is skipped.
pub(crate) fn run(steps: &mut Steps, seconds: u64, seed: Option<u64>) -> Result<()> {
    let name = "path loss";
    if let Some(reason) = missing() {
        steps.skip(name, &reason);
        return Ok(());
    }
    let program = steps.command_under_test()?;
    let net = match Net::set_up(LINKS) {
        Ok(net) => net,
        Err(error) => {
            steps.skip(name, &format!("no network namespaces here: {error:#}"));
            return Ok(());
        }
    };
    let drawn = || {
        SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(1, |time| time.as_secs())
    };
    let seed = seed.unwrap_or_else(drawn);
    steps.time(name, || {
        let again = format!("again: cargo xtask path-loss --seconds {seconds} --seed {seed}");
        println!("    {again}");
        test(&program, &net, Duration::from_secs(seconds), seed).context(again)
    })
}

fn missing() -> Option<String> {
    if !is_root() {
        return Some("network namespaces need root".to_owned());
    }
    let tools = ["ip", "setpriv", "fio"];
    let missing: Vec<&str> = tools.into_iter().filter(|tool| find(tool).is_none()).collect();
    (!missing.is_empty()).then(|| format!("not installed: {}", missing.join(", ")))
}

fn test(program: &Path, net: &Net, time: Duration, seed: u64) -> Result<()> {
    let scratch = Scratch::new();
    let mut scene = Scene::start(program, net, scratch.dir(), seed)?;
    if time <= Duration::from_secs(SECONDS_SHORT) {
        scene.failure_max = FAILURE_MAX_SHORT;
    }
    let end = Instant::now() + time;
    let storm = (time / 4).clamp(STORM_MIN, STORM_MAX);
    let mut survivor = 0;
    while Instant::now() < end {
        let both = scene.storm(survivor, storm).and_then(|()| scene.lose_all());
        both.with_context(|| daemon::last_words("the near daemon", &scene.near))?;
        survivor = (survivor + 1) % LINKS;
    }
    scene.finish()
}

/// All components of the test.
struct Scene<'a> {
    net: &'a Net,
    near: Daemon,
    far: Daemon,
    hold: Load,
    fail: Load,
    wide: Wide,
    random: Random,
    /// By link: how it is cut, and until when.
    cuts: [Option<(Cut, Instant)>; LINKS],
    cuts_made: u64,
    outages: u64,
    /// Failures that are allowed on `fail`, those of outages.
    allowed: usize,
    slowest_failure: Duration,
    failure_max: Duration,
    longest_hold: Duration,
    longest_in_storm: Duration,
}

impl<'a> Scene<'a> {
    fn start(program: &Path, net: &'a Net, scratch: &Path, seed: u64) -> Result<Self> {
        let mut far = Net::command(&net.far, program);
        far.args(["serve", "--insecure"]);
        for disk in DISKS {
            far.args(["--disk", &format!("name={disk},ram={DISK_BYTES}")]);
        }
        for link in 0..LINKS {
            far.args(["--nbd", &format!("tcp:{}:10809", far_address(link))]);
        }
        let far = Daemon::try_spawn(far, Stdio::piped())?;
        let socket = scratch.join("nbd.sock");
        let near = Daemon::try_spawn(near_command(program, net, &socket), Stdio::piped())?;
        Ok(Self {
            hold: Load::start(&socket, "hold", seed),
            fail: Load::start(&socket, "fail", seed + 100),
            wide: Wide::start(&socket, "wide", scratch, seed),
            net,
            near,
            far,
            random: Random::new(seed),
            cuts: [None; LINKS],
            cuts_made: 0,
            outages: 0,
            allowed: 0,
            slowest_failure: Duration::ZERO,
            failure_max: FAILURE_MAX,
            longest_hold: Duration::ZERO,
            longest_in_storm: Duration::ZERO,
        })
    }

    /// Cuts a link every second, for up to two seconds, but never `survivor`: no request may fail.
    fn storm(&mut self, survivor: usize, time: Duration) -> Result<()> {
        self.hold.take_longest();
        let end = Instant::now() + time;
        let mut next = Instant::now();
        while Instant::now() < end {
            self.look()?;
            self.restore(|until| until <= Instant::now())?;
            let whole = |link: &usize| *link != survivor && self.cuts[*link].is_none();
            let whole: Vec<usize> = (0..LINKS).filter(whole).collect();
            if Instant::now() >= next && !whole.is_empty() {
                next += Duration::from_secs(1);
                let link = whole[self.random.below(whole.len() as u64) as usize];
                let time = Duration::from_millis(200 + self.random.below(1700));
                self.cut(link, time)?;
            }
            thread::sleep(LOOK);
        }
        self.restore(|_| true)?;
        self.wait_for_paths()?;
        self.longest_in_storm = self.longest_in_storm.max(self.hold.take_longest());
        self.look()
    }

    /// Cuts all links: `hold` must stop and continue later; on `fail` every thread must get an
    /// error.
    fn lose_all(&mut self) -> Result<()> {
        let before = self.fail.failures().len();
        self.outages += 1;
        for link in 0..LINKS {
            self.cut(link, Duration::MAX / 4)?;
        }
        self.wait("every thread of the load on `fail` gets an error", |scene| {
            let failures = scene.fail.failures();
            let told = |thread| failures[before..].iter().any(|failure| failure.thread == thread);
            Ok((0..THREADS).all(told))
        })?;
        // Requests that were in the links when they were cut have arrived by now.
        let done = self.hold.done();
        thread::sleep(STANDSTILL);
        ensure!(
            self.hold.done() == done,
            "requests on `hold` end although there is no path"
        );
        self.restore(|_| true)?;
        self.wait("requests on `hold` go on", |scene| {
            Ok(scene.hold.done() > done + 100)
        })?;
        self.wait_for_paths()?;
        let failures = self.fail.failures();
        self.check_failures(&failures[before..])?;
        self.allowed = failures.len();
        self.longest_hold = self.longest_hold.max(self.hold.take_longest());
        self.look()
    }

    /// Each failure must have come soon after the loss of a connection, or after its request,
    /// whichever was later.
    fn check_failures(&mut self, failures: &[Failure]) -> Result<()> {
        let lost = daemon::log(&self.near);
        let lost = lost.iter().filter(|line| line.contains("/fail: connection lost"));
        let lost: Vec<u64> = lost.filter_map(|line| time_of_day(line)).collect();
        for failure in failures {
            let (begun, ended) = (micros_of_day(failure.begun), micros_of_day(failure.ended));
            let since_loss = lost.iter().map(|at| micros_between(*at, ended)).min();
            let took = micros_between(begun, ended).min(since_loss.unwrap_or(u64::MAX));
            let took = Duration::from_micros(took);
            self.slowest_failure = self.slowest_failure.max(took);
            ensure!(
                took <= self.failure_max,
                "a request on `fail`, begun {}, got its error ({}) at {}, {took:?} after the last path was given up; {:?} are allowed",
                clock(begun),
                failure.error,
                clock(ended),
                self.failure_max
            );
        }
        Ok(())
    }

    fn cut(&mut self, link: usize, time: Duration) -> Result<()> {
        let cut = self.random.one_of(&Cut::ALL);
        self.net.cut(link, cut)?;
        self.note(&format!("link {} cut: {cut:?}", link + 1));
        self.cuts[link] = Some((cut, Instant::now() + time));
        self.cuts_made += 1;
        Ok(())
    }

    /// Restores the links whose cut is due to end.
    fn restore(&mut self, is_due: impl Fn(Instant) -> bool) -> Result<()> {
        for link in 0..LINKS {
            if let Some((cut, _)) = self.cuts[link].take_if(|(_, until)| is_due(*until)) {
                self.net.restore(link, cut)?;
                self.note(&format!("link {} restored", link + 1));
            }
        }
        Ok(())
    }

    /// Adds a line to the near daemon's log.
    fn note(&self, what: &str) {
        let now = clock(micros_of_day(SystemTime::now()));
        daemon::note(&self.near, format!("           {now}   CUT {what}"));
    }

    /// Checks what must never happen.
    fn look(&mut self) -> Result<()> {
        let failures = self.hold.failures();
        ensure!(failures.is_empty(), "`hold` failed: {:?}", failures[0]);
        // The far daemon runs all the time, and reports this: none of its data may be lost.
        let told = self.hold.flushes_failed();
        ensure!(told == 0, "{told} flushes on `hold` failed");
        let failures = self.fail.failures();
        ensure!(
            failures.len() <= self.allowed,
            "`fail` failed while a link was up: {:?}",
            failures[self.allowed]
        );
        self.look_at_threads()
    }

    /// Fails if a thread has ended early: it does so only if it found a fault.
    fn look_at_threads(&mut self) -> Result<()> {
        for load in [&mut self.hold, &mut self.fail] {
            load.check()?;
        }
        self.wide.check()
    }

    fn wait_for_paths(&mut self) -> Result<()> {
        let mut in_a_row = 0;
        self.wait("all paths are active again", |scene| {
            let paths = daemon::paths(&scene.near, DISKS.len())?;
            ensure!(
                paths.len() == DISKS.len() * LINKS,
                "the report shows {} paths",
                paths.len()
            );
            in_a_row = if paths.iter().all(|path| path.is_active) {
                in_a_row + 1
            } else {
                0
            };
            Ok(in_a_row == 3)
        })
    }

    fn wait(&mut self, what: &str, mut is_so: impl FnMut(&mut Self) -> Result<bool>) -> Result<()> {
        let end = Instant::now() + PATIENCE;
        while !is_so(self)? {
            self.look_at_threads()?;
            ensure!(Instant::now() < end, "waited {PATIENCE:?} in vain until {what}");
            thread::sleep(LOOK);
        }
        Ok(())
    }

    /// Ends the load, and checks that everything is at rest.
    fn finish(mut self) -> Result<()> {
        let requests = self.hold.done() + self.fail.done();
        let passes = self.wide.finish()?;
        self.look()?;
        self.hold.finish()?;
        self.fail.finish()?;
        let paths = daemon::paths(&self.near, DISKS.len())?;
        for path in &paths {
            ensure!(path.is_active && path.in_flight == 0, "not at rest: {path:?}");
        }
        daemon::stop(self.near)?;
        daemon::stop(self.far)?;
        let lost: u64 = paths.iter().map(|path| path.failures).sum();
        println!(
            "    {} cuts of {LINKS} links, {} times all of them; {lost} times a path failed; {requests} requests and {passes} passes of fio verified",
            self.cuts_made, self.outages
        );
        println!(
            "    while a path lived: 0 errors, longest request {:.1?}; without: held up to {:.1?}, or EIO within {:.1?} of the last path's loss",
            self.longest_in_storm, self.longest_hold, self.slowest_failure
        );
        ensure!(passes > 0, "fio did not get through once; give more --seconds");
        ensure!(lost > 0, "no path failed, so nothing was tested");
        Ok(())
    }
}

fn near_command(program: &Path, net: &Net, socket: &Path) -> Command {
    let mut near = Net::command(&net.near, program);
    near.arg("serve");
    for disk in DISKS {
        for link in 0..LINKS {
            let uri = format!("nbd://{}/{disk}", far_address(link));
            near.args([
                "--disk",
                &format!("name={disk}-{},nbd={uri},{PATH_KEYS}", link + 1),
            ]);
        }
        let paths: Vec<String> = (1..=LINKS).map(|link| format!("{disk}-{link}")).collect();
        let holds = if disk == "fail" { "off" } else { "on" };
        let paths = paths.join("+");
        near.args([
            "--disk",
            &format!("name={disk},multipath={paths},queue_if_no_path={holds},check_interval=200ms"),
        ]);
    }
    near.args(["--disk", "name=wide,striped=left+right,chunk=8K"]);
    near.args(["--nbd", &format!("unix:{}", socket.display())]);
    near
}

/// The time at the beginning of a log line, such as `2026-11-22T00:22:19.149796Z`, in microseconds
/// of its day.
fn time_of_day(line: &str) -> Option<u64> {
    let (_, time) = line
        .split_whitespace()
        .next()?
        .trim_end_matches('Z')
        .split_once('T')?;
    let mut parts = time.split([':', '.']);
    let mut next = || parts.next()?.parse::<u64>().ok();
    let (hours, minutes, seconds, micros) = (next()?, next()?, next()?, next()?);
    Some(((hours * 60 + minutes) * 60 + seconds) * 1_000_000 + micros)
}

/// A time of day in the log's format.
fn clock(micros: u64) -> String {
    let (seconds, micros) = (micros / 1_000_000, micros % 1_000_000);
    let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    format!("{hours:02}:{minutes:02}:{seconds:02}.{micros:06}")
}

fn micros_of_day(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    (since.as_micros() % DAY_MICROS) as u64
}

/// The time from one time of day to a later one, which may be on the next day.
fn micros_between(from: u64, to: u64) -> u64 {
    let day = DAY_MICROS as u64;
    (to + day - from) % day
}

pub(crate) const SECONDS_DEFAULT: u64 = 300;
/// The duration as a part of the tests.
pub(crate) const SECONDS_SHORT: u64 = 10;
const LINKS: usize = 3;
const DISKS: [&str; 4] = ["hold", "fail", "left", "right"];
const PATH_KEYS: &str = "timeout=500ms,connect_timeout=500ms";
/// The limit from the loss of the last path to the error.
const FAILURE_MAX: Duration = Duration::from_millis(100);
/// The same limit beside other tests, where a thread may wait long for a processor. It is shorter
/// than the paths' timeout, which must not be the cause of the error.
const FAILURE_MAX_SHORT: Duration = Duration::from_millis(400);
const STORM_MIN: Duration = Duration::from_secs(4);
const STORM_MAX: Duration = Duration::from_secs(15);
const STANDSTILL: Duration = Duration::from_millis(500);
const PATIENCE: Duration = Duration::from_secs(30);
const LOOK: Duration = Duration::from_millis(20);
const DAY_MICROS: u128 = 86_400_000_000;

#[cfg(test)]
mod tests {
    use super::{micros_between, time_of_day};

    #[test]
    fn times_of_the_log_are_read_and_compared_over_midnight() {
        let late = time_of_day("2026-11-22T23:59:59.900000Z  WARN x").unwrap();
        let early = time_of_day("2026-11-23T00:00:00.100000Z  WARN x").unwrap();
        assert_eq!(early, 100_000);
        assert_eq!(micros_between(late, early), 200_000);
        assert_eq!(time_of_day("ready"), None);
    }
}
