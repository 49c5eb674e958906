//! Tenants as their clients see them: shares by weight over NBD, a tenant that pauses beside a
//! flood, and one whose request hangs. The bounds are wide enough for a busy machine, and each is
//! missed without the scheduler.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::common::nbd::{Client, Command};
use crate::common::tools::installed;
use crate::common::{Daemon, Scratch};
use crate::nbd_disk::Below;

#[test]
fn weights_one_to_three_are_what_nbd_clients_get() {
    let share = |sched: &str| {
        let (_daemon, socket) = two_tenants(sched, [100, 300]);
        let ios = [("a", 16), ("b", 16)].map(|(disk, depth)| Load::begin(&socket.1, disk, depth));
        std::thread::sleep(RUN);
        let [a, b] = ios.map(Load::end);
        b as f64 / a as f64
    };
    let (none, bfq) = (share("none"), share("bfq"));
    assert!((0.5..1.8).contains(&none), "without a scheduler: 1:{none:.2}");
    assert!((2.4..3.6).contains(&bfq), "1:{bfq:.2} instead of 1:3");
}

#[test]
fn tenant_that_pauses_finds_no_queue_beside_a_flood() {
    let beside = |sched: &str| {
        let (_daemon, socket) = two_tenants(sched, [100, 100]);
        let flood = Load::begin(&socket.1, "a", 32);
        let mut light = Client::connect(&socket.1, "b").expect("the daemon serves it");
        let end = Instant::now() + RUN;
        let mut times = Vec::new();
        while Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
            let begin = Instant::now();
            light.read(times.len() as u64 * 4096, 4096).expect("a read ends");
            times.push(begin.elapsed());
        }
        times.sort_unstable();
        (times[times.len() / 2], flood.end())
    };
    let ((queued, all), (median, flood)) = (beside("none"), beside("bfq"));
    assert!(
        queued > Duration::from_millis(5),
        "without a scheduler: {queued:?}"
    );
    assert!(median < Duration::from_millis(2), "median of {median:?}");
    assert!(flood * 10 >= all * 8, "the flood has {flood} of {all}");
}

#[test]
fn request_that_hangs_holds_no_other_tenant() {
    if !installed(&["nbdkit"]) {
        return;
    }
    let scratch = Scratch::new();
    let slow_start = "pread=[ $4 -ge 1048576 ] || sleep 2; head -c $3 /dev/zero";
    let _below = Below::nbdkit(
        &scratch,
        &[
            "eval",
            "get_size=echo 64M",
            slow_start,
            "thread_model=echo parallel",
        ],
    );
    let below = format!(
        "name=d,nbd=nbd+unix:///?socket={},sched=bfq",
        scratch.word("below.sock")
    );
    let _daemon = Daemon::serve(
        &scratch,
        &[
            &below,
            "name=slow,linear=d:0:32M,group=/slow",
            "name=fast,linear=d:32M:32M,group=/fast",
        ],
    );
    let socket = scratch.path("nbd.sock");
    let mut slow = Client::connect(&socket, "slow").expect("the daemon serves it");
    let mut fast = Client::connect(&socket, "fast").expect("the daemon serves it");
    slow.read(2 << 20, 4096).expect("a read ends");
    let hangs = slow.send(Command::Read, 0, 0, 4096, &[]).expect("it is taken");
    let (sent, mut longest, mut reads) = (Instant::now(), Duration::ZERO, 0);
    while sent.elapsed() < Duration::from_millis(1500) {
        let begin = Instant::now();
        fast.read(reads * 4096 % (1 << 20), 4096).expect("a read ends");
        longest = longest.max(begin.elapsed());
        reads += 1;
    }
    assert!(
        longest < Duration::from_millis(500),
        "{longest:?} for one of {reads} reads"
    );
    assert_eq!(slow.reply().expect("it ends"), hangs);
    assert!(sent.elapsed() >= Duration::from_secs(2), "it did not hang");
}

/// A modelled drive of 300 MB/s with a disk for each of two tenants.
fn two_tenants(sched: &str, weights: [u16; 2]) -> (Daemon, (Scratch, PathBuf)) {
    let scratch = Scratch::new();
    let keys = format!("null=1G,latency=100us,parallel=4,bandwidth=300M,queue=drive,sched={sched}");
    let nbd = format!("unix:{}", scratch.word("nbd.sock"));
    let disks = ["a", "b"].map(|name| format!("name={name},{keys},group=/{name}"));
    let groups = [0, 1].map(|n| format!("/{},weight={}", ["a", "b"][n], weights[n]));
    let words = [
        "--disk", &disks[0], "--disk", &disks[1], "--group", &groups[0], "--group", &groups[1], "--nbd", &nbd,
    ];
    let daemon = Daemon::start(&words);
    let socket = scratch.path("nbd.sock");
    (daemon, (scratch, socket))
}

/// A client that keeps reads of 64 KiB under way.
struct Load {
    ends: Arc<AtomicBool>,
    client: JoinHandle<u64>,
}

impl Load {
    fn begin(socket: &Path, disk: &str, depth: u64) -> Self {
        let ends = Arc::new(AtomicBool::new(false));
        let mut client = Client::connect(socket, disk).expect("the daemon serves it");
        let is_over = Arc::clone(&ends);
        let run = move || {
            let mut sent = 0;
            let mut send = |client: &mut Client| {
                // Never next to the one before, so that nothing is merged.
                let offset = sent * 7919 % 8192 * 2 * SIZE;
                sent += 1;
                client
                    .send(Command::Read, 0, offset, SIZE as u32, &[])
                    .expect("a request is taken");
            };
            (0..depth).for_each(|_| send(&mut client));
            let (mut ended, mut data) = (0, vec![0; SIZE as usize]);
            while !is_over.load(Ordering::Relaxed) {
                client.reply().expect("a read ends");
                client.stream().read_exact(&mut data).expect("it has its data");
                ended += 1;
                send(&mut client);
            }
            ended
        };
        Self {
            ends,
            client: std::thread::spawn(run),
        }
    }

    /// Ends it; returns how many of its reads have ended.
    fn end(self) -> u64 {
        self.ends.store(true, Ordering::Relaxed);
        self.client.join().expect("the client did not fail")
    }
}

const SIZE: u64 = 64 << 10;
const RUN: Duration = Duration::from_secs(2);
