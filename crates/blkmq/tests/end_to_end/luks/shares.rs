//! Shares by weight of tenants with encrypted disks: of a drive, as without encryption, and of the processor that
//! encryption takes. The bounds are wide enough for a busy machine, and each is missed without the weights.

use std::time::{Duration, Instant};

use blkmq_testkit::p99;

use super::crypt::{Crypt, has_tools};
use crate::common::nbd::{Client, Command};
use crate::common::{Daemon, Scratch};
use crate::tenants::Load;

#[test]
fn processor_that_encryption_takes_is_shared_by_weight() {
    if !has_tools(&["cryptsetup"]) {
        return;
    }
    for command in [Command::Read, Command::Write] {
        let share = |weights: [u32; 2]| {
            // No scheduler: it would not find anything waiting.
            let stage = Stage::new("null=1G,sched=none", &weights, true);
            let loads = ["a", "b"].map(|disk| Load::begin_with(command, &stage.nbd(), disk, 64));
            std::thread::sleep(RUN);
            let [a, b] = loads.map(Load::end);
            stage.daemon.stop();
            b as f64 / a as f64
        };
        let mut tries = Vec::new();
        let is_by_weight = |tries: &mut Vec<[f64; 2]>| {
            let [even, uneven] = [share([100, 100]), share([100, 300])];
            tries.push([even, uneven]);
            // Clients that write have to send the data: on a busy machine they do not keep the fast daemon at work, and
            // less than the weights shows. Without weights nothing does.
            let least = if command == Command::Read { 1.9 } else { 1.3 * even };
            (0.6..1.6).contains(&even) && (least..4.0).contains(&uneven)
        };
        // A machine that is too busy does not let the clients keep their requests under way.
        assert!(
            (0..TRIES).any(|_| is_by_weight(&mut tries)),
            "{command:?}: {tries:.2?} instead of 1 and 3"
        );
    }
}

#[test]
fn weights_one_to_two_to_four_are_what_encrypted_disks_get_by_nbd() {
    weights_are_what_clients_get(|stage, disk| Load::begin(&stage.nbd(), disk, 16));
}

#[test]
fn weights_one_to_two_to_four_are_what_encrypted_disks_get_by_vhost_user() {
    weights_are_what_clients_get(|stage, disk| {
        Load::begin_guest(&stage.scratch.path(&format!("{disk}.vsock")))
    });
}

fn weights_are_what_clients_get(begin: impl Fn(&Stage, &str) -> Load) {
    if !has_tools(&["cryptsetup"]) {
        return;
    }
    let shares = |sched: &str| {
        let stage = Stage::new(&format!("{DRIVE},sched={sched}"), &[100, 200, 400], true);
        let loads = ["a", "b", "c"].map(|disk| begin(&stage, disk));
        std::thread::sleep(RUN);
        let [a, b, c] = loads.map(|load| load.end() as f64);
        stage.daemon.stop();
        (b / a, c / a)
    };
    let (none, bfq) = (shares("none"), shares("bfq"));
    assert!((0.5..1.8).contains(&none.1), "without a scheduler: {none:?}");
    assert!(
        (1.5..2.6).contains(&bfq.0) && (3.0..5.2).contains(&bfq.1),
        "{bfq:?} instead of 1:2:4"
    );
}

/// The same reader beside the same flood, with its data plain and encrypted, and without a scheduler.
#[test]
fn encrypted_flood_delays_a_light_reader_no_more_than_a_plain_one() {
    if !has_tools(&["cryptsetup"]) {
        return;
    }
    for command in [Command::Read, Command::Write] {
        let mut tries = Vec::new();
        let is_short = |tries: &mut Vec<[Duration; 3]>| {
            let none = p99_beside_a_flood(&format!("{DRIVE},sched=none"), true, command);
            let [plain, encrypted] =
                [false, true].map(|is| p99_beside_a_flood(&format!("{DRIVE},sched=bfq"), is, command));
            tries.push([none, plain, encrypted]);
            none > QUEUE_TIME / 2 && encrypted < QUEUE_TIME / 2 && encrypted < 2 * plain + QUEUE_TIME / 4
        };
        // A machine that is too busy for the load has no queue, or delays the reader itself.
        assert!(
            (0..TRIES).any(|_| is_short(&mut tries)),
            "{command:?}: p99 without a scheduler, beside a plain and an encrypted flood: {tries:?}"
        );
    }
}

#[test]
fn encrypted_flood_on_a_drive_without_limits_delays_a_light_reader_for_moments() {
    if !has_tools(&["cryptsetup"]) {
        return;
    }
    for command in [Command::Read, Command::Write] {
        let mut times = Vec::new();
        let is_short = |times: &mut Vec<Duration>| {
            let p99 = p99_beside_a_flood("null=1G,sched=none", true, command);
            times.push(p99);
            p99 < MOMENT
        };
        assert!(
            (0..TRIES).any(|_| is_short(&mut times)),
            "{command:?}: p99 {times:?}"
        );
    }
}

/// The 99th percentile of the reads of a client that reads now and then, beside a flood.
fn p99_beside_a_flood(drive: &str, is_encrypted: bool, command: Command) -> Duration {
    let stage = Stage::new(drive, &[100], is_encrypted);
    let flood = Load::begin_with(command, &stage.nbd(), "a", DEPTH);
    let mut light = Client::connect(&stage.nbd(), "light").expect("the daemon serves it");
    let (end, mut times) = (Instant::now() + RUN, Vec::new());
    while Instant::now() < end {
        std::thread::sleep(Duration::from_millis(5));
        let begin = Instant::now();
        light.read(times.len() as u64 * 4096, 4096).expect("a read ends");
        times.push(begin.elapsed());
    }
    assert!(flood.end() > 0);
    stage.daemon.stop();
    p99(times)
}

/// A daemon with an encrypted disk for each tenant on drives of one queue, and `light`, a plain one there.
struct Stage {
    daemon: Daemon,
    scratch: Scratch,
}

impl Stage {
    fn new(drive: &str, weights: &[u32], is_encrypted: bool) -> Self {
        let scratch = Scratch::new();
        let crypt = Crypt::new(&scratch);
        let nbd = format!("unix:{}", scratch.word("nbd.sock"));
        let vhost_user = format!("unix:{}", scratch.word("{disk}.vsock"));
        let mut words = vec!["--reactors", "1", "--nbd", &nbd, "--vhost-user", &vhost_user];
        let mut more = vec!["--disk".to_owned(), format!("name=light,{drive},queue=drive")];
        for (name, weight) in ["a", "b", "c"].into_iter().zip(weights) {
            let below = match is_encrypted {
                true => {
                    let options = "--type luks2 --pbkdf pbkdf2 --sector-size 4096";
                    let header = crypt.detached_as(&format!("{name}.header"), options);
                    let key = crypt.key_file();
                    more.extend([
                        "--disk".to_owned(),
                        format!("name={name},luks={name}-raw,header={header},key={key}"),
                    ]);
                    format!("name={name}-raw,{drive},queue=drive")
                }
                false => format!("name={name},{drive},queue=drive"),
            };
            more.extend(["--disk".to_owned(), below]);
            more.extend(["--group".to_owned(), format!("/{name},weight={weight}")]);
        }
        words.extend(more.iter().map(String::as_str));
        Self {
            daemon: Daemon::start(&words),
            scratch,
        }
    }

    fn nbd(&self) -> std::path::PathBuf {
        self.scratch.path("nbd.sock")
    }
}

/// A drive of 20 MB/s, which a busy machine keeps busy.
const DRIVE: &str = "null=1G,latency=100us,parallel=4,bandwidth=20M";
/// Of 64 KiB each.
const DEPTH: u64 = 64;
/// What so much takes on that drive.
const QUEUE_TIME: Duration = Duration::from_millis(200);
/// A busy machine needs some for itself.
const MOMENT: Duration = Duration::from_millis(30);
const TRIES: usize = 3;
const RUN: Duration = Duration::from_secs(3);
