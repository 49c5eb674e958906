//! Tenants as their clients see them: shares by weight over NBD and vhost-user, a tenant that pauses
//! beside a flood, and one whose request hangs; with fio as the clients, reads beside a flood below
//! kyber and with a latency target. The bounds are wide enough for a busy machine, and each is
//! missed without the scheduler or the target.

mod changing_weights;

use std::io::Read;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use blkmq_testkit::vhost_user as guest;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::process::Signal;
use serde_json::Value;

use crate::common::nbd::{ANSWER_TIME, Client, Command};
use crate::common::tools::{installed, run};
use crate::common::{Daemon, Scratch};
use crate::fio::jobs;
use crate::nbd_disk::Below;
use crate::vhost_user::{HEADS, Ring};

#[test]
fn weights_one_to_three_are_what_nbd_clients_get() {
    weights_one_to_three_are_what_clients_get(|scratch, disk| {
        Load::begin(&scratch.path("nbd.sock"), disk, 16)
    });
}

#[test]
fn weights_one_to_three_are_what_vhost_user_front_ends_get() {
    weights_one_to_three_are_what_clients_get(|scratch, disk| {
        Load::begin_guest(&scratch.path(&format!("{disk}.vsock")))
    });
}

fn weights_one_to_three_are_what_clients_get(begin: impl Fn(&Scratch, &str) -> Load) {
    let share = |sched: &str| {
        let (_daemon, scratch) = two_tenants(sched, [",weight=100", ",weight=300"]);
        let loads = ["a", "b"].map(|disk| begin(&scratch, disk));
        std::thread::sleep(RUN);
        let [a, b] = loads.map(Load::end);
        b as f64 / a as f64
    };
    let (none, bfq) = (share("none"), share("bfq"));
    assert!((0.5..1.8).contains(&none), "without a scheduler: 1:{none:.2}");
    assert!((2.4..3.6).contains(&bfq), "1:{bfq:.2} instead of 1:3");
}

#[test]
fn tenant_that_pauses_finds_no_queue_beside_a_flood() {
    let beside = |sched: &str| {
        let (_daemon, scratch) = two_tenants(sched, ["", ""]);
        let flood = Load::begin(&scratch.path("nbd.sock"), "a", 32);
        let mut light = Client::connect(&scratch.path("nbd.sock"), "b").expect("the daemon serves it");
        let end = Instant::now() + RUN;
        let mut times = Vec::new();
        while Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
            let begin = Instant::now();
            light.read(times.len() as u64 * 4096, 4096).expect("a read ends");
            times.push(begin.elapsed());
        }
        times.sort_unstable();
        (times[times.len() / 2], flood.end() as f64)
    };
    light_tenant_finds_a_queue_only(beside, ["none", "bfq"], 0.75);
}

/// Checks the median of a light tenant's reads and what the flood beside it has, without what keeps
/// the queue short and with it: more than this part.
///
/// On a machine that is too busy for the load, the drive is not what is waited for, and there is no
/// queue to be seen; so there are some tries. What keeps nothing short passes in none of them. On such a
/// machine the flood, too, loses by a short queue, since its next request comes late.
fn light_tenant_finds_a_queue_only(
    beside: impl Fn(&str) -> (Duration, f64),
    [without, with]: [&str; 2],
    part: f64,
) {
    let mut tries = Vec::new();
    while tries.len() < TRIES {
        let ((queued, all), (median, flood)) = (beside(without), beside(with));
        if queued > QUEUE_TIME / 2 && median < QUEUE_TIME / 4 && flood > all * part {
            return;
        }
        tries.push(format!(
            "median {queued:?}, {median:?}, the flood has {flood} of {all}"
        ));
    }
    panic!("without {with:?} and with it: {tries:#?}");
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

#[test]
fn latency_target_is_kept_for_reads_of_fio_beside_a_flood_of_fio() {
    if !installed(&["fio"]) {
        return;
    }
    let beside = |target: &str| {
        let (daemon, _scratch) = two_tenants("mq-deadline", ["", target]);
        let jobs = fio(
            ("--rw=randread --bs=128k --iodepth=16", &daemon.uri("a")),
            (LIGHT, &daemon.uri("b")),
        );
        (median(&jobs[1]), bandwidth(&jobs[0], "read"))
    };
    light_tenant_finds_a_queue_only(beside, ["", ",latency_target=10ms"], 0.4);
}

#[test]
fn kyber_takes_tokens_from_writes_of_fio_until_its_reads_are_in_time() {
    if !installed(&["fio"]) {
        return;
    }
    let beside = |sched: &str| {
        let (daemon, _scratch) = two_tenants(sched, ["", ""]);
        let disk = daemon.uri("a");
        let jobs = fio(("--rw=randwrite --bs=128k --iodepth=16", &disk), (LIGHT, &disk));
        (median(&jobs[1]), bandwidth(&jobs[0], "write"))
    };
    light_tenant_finds_a_queue_only(beside, ["none", "kyber"], 0.4);
}

/// Runs fio's NBD engine with a job for each of two disks; returns what it reports of each job.
fn fio(flood: (&str, &str), light: (&str, &str)) -> Vec<Value> {
    let mut words = vec![
        "--output-format=json",
        "--time_based",
        "--ramp_time=4",
        "--runtime=3",
    ];
    let uris = [flood, light].map(|(_, uri)| format!("--uri={uri}"));
    for ((options, _), uri) in [flood, light].into_iter().zip(&uris) {
        // The engine must precede its address.
        words.extend(["--name=job", "--ioengine=nbd", uri]);
        words.extend(options.split(' '));
    }
    jobs(&run("fio", &words))
}

fn median(job: &Value) -> Duration {
    let time = job["read"]["clat_ns"]["percentile"]["50.000000"].as_u64();
    // None if it had no turn at all.
    time.map_or(Duration::MAX, Duration::from_nanos)
}

fn bandwidth(job: &Value, kind: &str) -> f64 {
    job[kind]["bw_bytes"].as_f64().expect("fio reports it")
}

/// A modelled drive of 20 MB/s, which a busy machine keeps busy, with a disk for each of two tenants,
/// by NBD and by vhost-user; kyber's targets are those of such a drive.
fn two_tenants(sched: &str, settings: [&str; 2]) -> (Daemon, Scratch) {
    let scratch = Scratch::new();
    let nbd = format!("unix:{}", scratch.word("nbd.sock"));
    let vhost_user = format!("unix:{}", scratch.word("{disk}.vsock"));
    let config = scratch.word("blkmq.toml");
    let kyber = "[queue.drive]\ntunables = { read_lat_nsec = 20000000, write_lat_nsec = 1000000000 }\n";
    std::fs::write(&config, if sched == "kyber" { kyber } else { "" }).expect("a file can be written");
    let control = format!("unix:{}", scratch.word("control.sock"));
    let doors = ["--nbd", &nbd, "--vhost-user", &vhost_user, "--control", &control];
    let mut words: Vec<String> = ["-c", &config]
        .into_iter()
        .chain(doors)
        .map(str::to_owned)
        .collect();
    for (name, settings) in ["a", "b"].into_iter().zip(settings) {
        let keys = format!("null=1G,latency=100us,parallel=4,bandwidth=20M,queue=drive,sched={sched}");
        words.extend(["--disk".to_owned(), format!("name={name},{keys},group=/{name}")]);
        words.extend(["--group".to_owned(), format!("/{name}{settings}")]);
    }
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    (Daemon::start(&words), scratch)
}

/// A client that keeps reads, or writes, of 64 KiB under way.
pub(crate) struct Load {
    ends: Arc<AtomicBool>,
    client: JoinHandle<u64>,
}

impl Load {
    pub(crate) fn begin(socket: &Path, disk: &str, depth: u64) -> Self {
        Self::begin_with(Command::Read, socket, disk, depth)
    }

    pub(crate) fn begin_with(command: Command, socket: &Path, disk: &str, depth: u64) -> Self {
        let ends = Arc::new(AtomicBool::new(false));
        let mut client = Client::connect(socket, disk).expect("the daemon serves it");
        let is_over = Arc::clone(&ends);
        let run = move || {
            let (mut sent, mut data) = (0, vec![0; SIZE as usize]);
            let is_read = matches!(command, Command::Read);
            let written = vec![7; if is_read { 0 } else { SIZE as usize }];
            let mut send = |client: &mut Client| {
                let offset = place(sent);
                sent += 1;
                client
                    .send(command, 0, offset, SIZE as u32, &written)
                    .expect("a request is taken");
            };
            (0..depth).for_each(|_| send(&mut client));
            let mut ended = 0;
            while !is_over.load(Ordering::Relaxed) {
                client.reply().expect("a request ends");
                if is_read {
                    client.stream().read_exact(&mut data).expect("it has its data");
                }
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

    /// The same of a guest, with five under way.
    pub(crate) fn begin_guest(socket: &Path) -> Self {
        let ends = Arc::new(AtomicBool::new(false));
        let (client, mut ring) = (guest::FrontEnd::connect(socket), Ring::SPLIT);
        let call = eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd");
        client.start();
        client.call(call.as_fd());
        let is_over = Arc::clone(&ends);
        let run = move || {
            let mut sent = 0;
            let mut send = |ring: &mut Ring, head: u16| {
                let sector = place(sent) / 512;
                sent += 1;
                let base = client.fill(head, 0, sector);
                let data = guest::DATA + 0x2_0000 + SIZE * u64::from(head / 3);
                let chain = [
                    (base, 16, 0),
                    (data, SIZE as u32, guest::WRITE),
                    (base + 1024, 1, guest::WRITE),
                ];
                ring.offer(&client, head, chain);
            };
            HEADS.into_iter().for_each(|head| send(&mut ring, head));
            client.kick();
            let mut ended = 0;
            while !is_over.load(Ordering::Relaxed) {
                let mut fds = [PollFd::new(&call, PollFlags::IN)];
                poll(&mut fds, Some(&ANSWER_TIME.try_into().expect("it fits"))).expect("it can wait");
                rustix::io::read(&call, &mut [0; 8]).expect("a read ends");
                while let Some(head) = ring.take(&client) {
                    assert_eq!(client.status(head), 0);
                    ended += 1;
                    send(&mut ring, head);
                }
                client.kick();
            }
            ended
        };
        Self {
            ends,
            client: std::thread::spawn(run),
        }
    }

    /// Ends it; returns how many of its requests have ended.
    pub(crate) fn end(self) -> u64 {
        self.ends.store(true, Ordering::Relaxed);
        self.client.join().expect("the client did not fail")
    }
}

/// Never next to the one before, so that nothing is merged.
fn place(number: u64) -> u64 {
    number * 7919 % 8192 * 2 * SIZE
}

/// fio's reads; they pause, so that moments count as long as they last.
const LIGHT: &str = "--rw=randread --bs=4k --iodepth=1 --thinktime=10ms";
const SIZE: u64 = 64 << 10;
/// That of 32 such requests on the drive, and of 16 of twice the size.
const QUEUE_TIME: Duration = Duration::from_millis(100);
const OTHERS: usize = 8;
const TRIES: usize = 3;
const RUN: Duration = Duration::from_secs(3);
