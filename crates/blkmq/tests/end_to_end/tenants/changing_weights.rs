//! Weights that an operator changes again and again while two tenants are under load. `BLKMQ_WEIGHT_CHANGES=600` makes
//! the changes of two minutes instead of two seconds.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;
use std::process::Command as Process;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::{RUN, SIZE, place, two_tenants};
use crate::common::Scratch;
use crate::common::daemon::program;
use crate::common::nbd::{Client, Command};
use crate::common::tools::output_within;

#[test]
fn weights_that_change_all_the_time_are_followed_and_every_read_ends() {
    let (daemon, scratch) = two_tenants("bfq", ["", ""]);
    let readers = ["a", "b"].map(|disk| Reader::begin(&scratch.path("nbd.sock"), disk));
    // The last weights are 1:3 and then 3:1, so that a scheduler which keeps any weights is found.
    for last in [[100, 300], [300, 100]] {
        for number in 0..changes() {
            set(&scratch, PASSING[number % PASSING.len()]);
            std::thread::sleep(BETWEEN);
        }
        set(&scratch, last);
        // What was under way by former weights ends.
        std::thread::sleep(BETWEEN);
        let before = readers.each_ref().map(Reader::ended);
        std::thread::sleep(RUN);
        let after = readers.each_ref().map(Reader::ended);
        let [a, b] = [0, 1].map(|at| (after[at] - before[at]) as f64);
        let [light, heavy] = if last[0] < last[1] { [a, b] } else { [b, a] };
        let ratio = heavy / light;
        assert!(
            (2.4..3.6).contains(&ratio),
            "1:{ratio:.2} instead of 1:3, after weights {last:?}"
        );
    }
    for longest in readers.map(Reader::end) {
        assert!(longest < STUCK, "a read took {longest:?}");
    }
    daemon.stop();
}

/// Gives both tenants a weight, as an operator does.
fn set(scratch: &Scratch, weights: [u32; 2]) {
    let socket = format!("unix:{}", scratch.word("control.sock"));
    for (name, weight) in ["/a", "/b"].into_iter().zip(weights) {
        let weight = format!("weight={weight}");
        let mut command = Process::new(program());
        command.args(["ctl", "--socket", &socket, "set", "group", name, &weight]);
        let output = output_within(&mut command, Duration::from_secs(20));
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{name} {weight}: {said}");
    }
}

fn changes() -> usize {
    match std::env::var("BLKMQ_WEIGHT_CHANGES") {
        Ok(number) => number.parse().expect("BLKMQ_WEIGHT_CHANGES is a number"),
        Err(_) => 10,
    }
}

/// A client that keeps reads under way, and looks at each of them: one that is stuck beside others which end is found.
struct Reader {
    is_over: Arc<AtomicBool>,
    ended: Arc<AtomicU64>,
    client: JoinHandle<Duration>,
}

impl Reader {
    fn begin(socket: &Path, disk: &str) -> Self {
        let (is_over, ended) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let mut client = Client::connect(socket, disk).expect("the daemon serves it");
        let run = {
            let (is_over, ended) = (Arc::clone(&is_over), Arc::clone(&ended));
            move || {
                let (mut under_way, mut data) = (BTreeMap::new(), vec![0; SIZE as usize]);
                let (mut sent, mut longest) = (0, Duration::ZERO);
                loop {
                    while under_way.len() < DEPTH && !is_over.load(Ordering::Relaxed) {
                        let cookie = client.send(Command::Read, 0, place(sent), SIZE as u32, &[]);
                        under_way.insert(cookie.expect("a request is taken"), Instant::now());
                        sent += 1;
                    }
                    if under_way.is_empty() {
                        return longest;
                    }
                    let cookie = client.reply().expect("a read ends, without an error");
                    client.stream().read_exact(&mut data).expect("it has its data");
                    let begun = under_way.remove(&cookie).expect("it was under way");
                    longest = longest.max(begun.elapsed());
                    ended.fetch_add(1, Ordering::Relaxed);
                }
            }
        };
        Self {
            is_over,
            ended,
            client: std::thread::spawn(run),
        }
    }

    fn ended(&self) -> u64 {
        self.ended.load(Ordering::Relaxed)
    }

    /// Ends it when all of its reads have ended; returns how long the longest took.
    fn end(self) -> Duration {
        self.is_over.store(true, Ordering::Relaxed);
        self.client.join().expect("each read ended, without an error")
    }
}

/// Weights that are set on the way, from one extreme to the other.
const PASSING: [[u32; 2]; 5] = [[1000, 100], [100, 1000], [100, 100], [1, 1000], [700, 300]];
const BETWEEN: Duration = Duration::from_millis(200);
const DEPTH: usize = 16;
/// Ten times what 16 reads take with a twentieth of the drive; one that is forgotten takes for ever.
const STUCK: Duration = Duration::from_secs(10);
