//! Tenants as their clients see them: shares by weight over NBD, a tenant that pauses beside a
//! flood, and one whose request hangs. The bounds are wide enough for a busy machine, and each is
//! missed without the scheduler.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::Signal;

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
    // What lies in the first MiB hangs, and so does a flush.
    let hangs = |call: &str, then: &str| format!("{call}=[ $4 -ge 1048576 ] || sleep 1; {then}");
    let calls = [
        // Without a process of its own: there are many reads.
        hangs("pread", "printf %0${3}d 0"),
        hangs("pwrite", "cat >/dev/null"),
        hangs("trim", "exit 0"),
        hangs("zero", "exit 0"),
    ];
    let mut words = vec![
        "eval",
        "get_size=echo 64M",
        "flush=sleep 1",
        "thread_model=echo parallel",
    ];
    words.extend(calls.iter().map(String::as_str));
    let _below = Below::nbdkit(&scratch, &words);
    let mut disks = vec![format!(
        "name=d,nbd=nbd+unix:///?socket={},sched=bfq",
        scratch.word("below.sock")
    )];
    let begin = |n: usize| if n == 0 { 0 } else { 28 + 4 * n };
    disks.extend((0..=OTHERS).map(|n| format!("name=t{n},linear=d:{}M:4M,group=/t{n}", begin(n))));
    let _daemon = Daemon::serve(&scratch, &disks.iter().map(String::as_str).collect::<Vec<_>>());
    let socket = scratch.path("nbd.sock");
    let mut slow = Client::connect(&socket, "t0").expect("the daemon serves it");
    let others =
        (1..=OTHERS).map(|n| Client::connect(&socket, &format!("t{n}")).expect("the daemon serves it"));
    let mut others: Vec<Client> = others.collect();
    slow.read(2 << 20, 4096).expect("a read ends");
    slow.write(2 << 20, &[1; 4096]).expect("a write ends");
    for (command, data) in [
        (Command::Read, 0),
        (Command::Write, 4096),
        (Command::Flush, 0),
        (Command::Trim, 0),
        (Command::WriteZeroes, 0),
    ] {
        let bytes = if matches!(command, Command::Flush) {
            0
        } else {
            4096
        };
        let hangs = slow
            .send(command, 0, 0, bytes, &vec![1; data])
            .expect("it is taken");
        let sent = Instant::now();
        let longest = longest_reads(&mut others, Duration::from_millis(800));
        assert!(
            longest.iter().all(|time| *time < Duration::from_millis(400)),
            "beside a {command:?} that hangs: {longest:?}"
        );
        assert_eq!(slow.reply().expect("it ends"), hangs);
        if matches!(command, Command::Read) {
            slow.stream().read_exact(&mut [0; 4096]).expect("it has its data");
        }
        assert!(
            sent.elapsed() >= Duration::from_millis(950),
            "the {command:?} did not hang"
        );
    }
}

/// The longest time of a read of each of these clients, which read a block now and then for so long.
fn longest_reads(clients: &mut [Client], time: Duration) -> Vec<Duration> {
    let read = |client: &mut Client| {
        let (start, mut longest, mut reads) = (Instant::now(), Duration::ZERO, 0);
        while start.elapsed() < time {
            let begin = Instant::now();
            client.read(reads * 4096 % (1 << 20), 4096).expect("a read ends");
            longest = longest.max(begin.elapsed());
            reads += 1;
            std::thread::sleep(Duration::from_millis(50));
        }
        longest
    };
    std::thread::scope(|scope| {
        let readers: Vec<_> = clients
            .iter_mut()
            .map(|client| scope.spawn(move || read(client)))
            .collect();
        readers
            .into_iter()
            .map(|reader| reader.join().expect("its reads ended"))
            .collect()
    })
}

#[test]
fn nested_tenants_are_said_to_wait_behind_their_siblings() {
    let scratch = Scratch::new();
    let keys = "null=1G,latency=100us,parallel=4,bandwidth=300M,queue=drive,sched=bfq";
    let disks = ["vm1", "vm2"].map(|name| format!("name={name},{keys},group=/customers/a/{name}"));
    let mut daemon = Daemon::serve(&scratch, &[&disks[0], &disks[1]]);
    let socket = scratch.path("nbd.sock");
    let loads = ["vm1", "vm2"].map(|disk| Load::begin(&socket, disk, 8));
    std::thread::sleep(Duration::from_millis(100));
    daemon.signal(Signal::USR1);
    let line = "delayed: /customers/a/vm1 behind /customers/a/vm2: ";
    let is_said = daemon.wait_for(Duration::from_secs(10), |said| {
        said.trim_start().starts_with(line)
    });
    loads.into_iter().for_each(|load| assert!(load.end() > 0));
    assert!(is_said, "no sibling is named");
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
const OTHERS: usize = 8;
const RUN: Duration = Duration::from_secs(2);
