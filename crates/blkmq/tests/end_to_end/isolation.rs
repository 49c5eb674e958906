//! Tests that a tenant whose caps hold it back delays nobody else, however much it has under way, and that no
//! tenant sees what another has written.

use std::io::Read;
use std::path::Path;
use std::time::{Duration, Instant};

use blkmq_testkit::p99;
use blkmq_torture::mount::{Cache, Faults, Mount};

use crate::common::nbd::{Client, Command};
use crate::common::{Daemon, Scratch};
use crate::fuse;

#[test]
fn light_reader_does_not_wait_for_requests_that_a_capped_flood_holds() {
    for sched in ["none", "bfq"] {
        let scratch = Scratch::new();
        let keys = format!("null=1G,latency=80us,queue=drive,sched={sched}");
        let nbd = format!("unix:{}", scratch.word("nbd.sock"));
        let (heavy, light) = (format!("name=heavy,{keys}"), format!("name=light,{keys}"));
        let cap = format!("/heavy,iops={FLOOD_IOPS}");
        // One reactor, so that both use the same requests.
        let words = format!("--reactors 1 --disk {heavy} --disk {light} --group {cap} --nbd {nbd}");
        let words: Vec<&str> = words.split(' ').collect();
        let daemon = Daemon::start(&words);
        let socket = scratch.path("nbd.sock");
        let mut flood: Vec<Flood> = (0..FLOODERS)
            .map(|_| Flood::begin(&socket, FLOOD_READS, 4096))
            .collect();
        // Long enough for the daemon to receive as much as it ever does.
        std::thread::sleep(Duration::from_millis(200));
        let p99 = p99_of_reads(&socket, 4096, FLOOD_TIME / 2);
        assert!(p99 < P99_MAX, "{sched}: p99 {p99:?} beside the flood");
        end_all(&mut flood, sched == "none");
        daemon.stop();
    }
}

#[test]
fn light_reader_does_not_wait_for_memory_that_a_capped_flood_holds() {
    const MIB: usize = 1 << 20;
    let scratch = Scratch::new();
    let nbd = scratch.word("nbd.sock");
    let config = format!(
        "[nbd]\nmemory = \"32M\"\n[disk.heavy]\nnull = \"1G\"\n[disk.light]\nnull = \"1G\"\n\
         [group.\"/heavy\"]\nread_bps = \"16M\"\n[[export]]\nnbd = \"unix:{nbd}\"\n"
    );
    std::fs::write(scratch.path("blkmq.toml"), config).expect("a configuration can be written");
    let daemon = Daemon::start(&["-c", &scratch.word("blkmq.toml")]);
    let socket = scratch.path("nbd.sock");
    // Twice the memory, for four seconds.
    let mut flood: Vec<Flood> = (0..8).map(|_| Flood::begin(&socket, 8, MIB)).collect();
    std::thread::sleep(Duration::from_millis(200));
    let p99 = p99_of_reads(&socket, MIB, Duration::from_secs(2));
    assert!(p99 < Duration::from_millis(100), "p99 {p99:?} beside the flood");
    // Either reactor issues what the cap has released, so that reads end in another order.
    end_all(&mut flood, false);
    daemon.stop();
}

/// The memory of one tenant's writes is used by others next.
#[test]
fn read_brings_nothing_that_another_connection_has_written() {
    const BYTES: usize = 2 << 20;
    let scratch = Scratch::new();
    let disks = [
        "secret,ram=64M",
        "blank,null=64M",
        "bare,null=64M,zero=off",
        "part,null=64M,zero=off",
    ];
    let disks = disks.map(|disk| format!("name={disk}"));
    let mut words: Vec<&str> = disks.iter().flat_map(|disk| ["--disk", disk]).collect();
    let nbd = format!("unix:{}", scratch.word("nbd.sock"));
    words.extend(["--disk", "name=mapped,linear=part", "--nbd", &nbd]);
    let daemon = Daemon::start(&words);
    let socket = scratch.path("nbd.sock");
    let connect = |disk| Client::connect(&socket, disk).expect("the daemon serves it");
    let mut writer = connect("secret");
    for disk in ["blank", "bare", "mapped"] {
        for bytes in [4096, 64 << 10, 256 << 10, BYTES] {
            // More than a connection's own memory, so that some of it is kept for other
            // connections.
            for at in 0..4 {
                writer
                    .write(at * BYTES as u64, &[SECRET; BYTES])
                    .expect("a write");
            }
            let mut reader = connect(disk);
            for _ in 0..BYTES / bytes {
                let sent = reader.send(Command::Read, 0, 0, bytes as u32, &[]);
                sent.expect("a request is taken");
            }
            for _ in 0..BYTES / bytes {
                reader.reply().expect("a reply");
                let mut read = vec![0; bytes];
                reader.stream().read_exact(&mut read).expect("its data");
                let foreign = read.iter().filter(|byte| **byte == SECRET).count();
                assert_eq!(
                    foreign, 0,
                    "bytes of another's in a read of {bytes} of disk {disk}"
                );
            }
        }
    }
    daemon.stop();
}

/// No request of a drive may block the reactor at submission. The kernel's threads do for a reactor
/// what would block it, one thread for each such request. They must not all be used by one drive.
#[test]
fn drive_that_does_not_answer_holds_up_no_other() {
    const REQUESTS: u64 = 64;
    let scratch = Scratch::new();
    let dir = scratch.path("mnt");
    std::fs::create_dir_all(&dir).expect("a directory can be made");
    let mount = match Mount::new(&dir, 4 << 20, Cache::Bypassed) {
        Ok(mount) => mount,
        Err(error) => {
            blkmq_testkit::skip(&format!("no FUSE here: {error}"));
            return;
        }
    };
    let nbd = format!("unix:{}", scratch.word("nbd.sock"));
    let slow = format!("name=slow,file={}", mount.image().display());
    let good = format!("name=good,file={}", scratch.image("good.raw", 1 << 20));
    let daemon = Daemon::start(&["--reactors", "1", "--disk", &slow, "--disk", &good, "--nbd", &nbd]);
    let socket = scratch.path("nbd.sock");
    mount.set_faults(Faults {
        delay: Duration::from_millis(100),
        ..Faults::default()
    });
    let mut flood = Client::connect(&socket, "slow").expect("the daemon serves it");
    for number in 0..REQUESTS {
        // Zeroes never block the reactor; they occupy threads of the kernel.
        let sent = match number % 4 {
            0 => flood.send(Command::Write, 0, number * 8192, 4096, &[7; 4096]),
            _ => flood.send(Command::WriteZeroes, 0, number * 8192, 4096, &[]),
        };
        sent.expect("a request is taken");
    }
    std::thread::sleep(Duration::from_millis(50));
    let mut client = Client::connect(&socket, "good").expect("the daemon serves it");
    let start = Instant::now();
    client.flush().expect("a flush");
    let took = start.elapsed();
    mount.set_faults(Faults::default());
    for _ in 0..REQUESTS {
        flood.reply().expect("a slow request ends");
    }
    // The filesystem has four threads. The flood takes 1.6 s, and with eight threads of the kernel
    // a flush waits for seven eighths of it.
    assert!(
        took < Duration::from_millis(700),
        "a flush of another drive took {took:?}"
    );
    drop((flood, client));
    daemon.stop();
}

/// A tenant whose drive answers nothing leaves room in the queue's depth, however many connections it has.
#[test]
fn reader_goes_on_beside_a_tenant_of_many_connections_whose_file_hangs() {
    const CONNECTIONS: usize = 32;
    let Some(silent) = fuse::Stage::on(Scratch::new(), "name=vm1,ram=16M") else {
        return;
    };
    let scratch = Scratch::new();
    let nbd = format!("unix:{}", scratch.word("nbd.sock"));
    let hung = format!("name=hung,file={},queue=q,sched=bfq", silent.word());
    let good = format!("name=light,file={},queue=q", scratch.image("good.raw", 16 << 20));
    let daemon = Daemon::start(&["--disk", &hung, "--disk", &good, "--nbd", &nbd]);
    let socket = scratch.path("nbd.sock");
    let mut others: Vec<Client> = (0..CONNECTIONS)
        .map(|_| Client::connect(&socket, "hung").expect("the daemon serves it"))
        .collect();
    let mut reader = Client::connect(&socket, "light").expect("the daemon serves it");
    silent.pause();
    for (number, other) in (0..).zip(&mut others) {
        for at in 0..4 {
            let sent = other.send(Command::Read, 0, (number * 4 + at) * 8192, 4096, &[]);
            sent.expect("a request is taken");
        }
    }
    let (begun, mut longest, mut reads) = (Instant::now(), Duration::ZERO, 0);
    while begun.elapsed() < Duration::from_secs(3) {
        let sent = Instant::now();
        reader
            .read(reads % 4096 * 4096, 4096)
            .expect("nothing is wrong with it");
        (longest, reads) = (longest.max(sent.elapsed()), reads + 1);
    }
    silent.go_on();
    for other in &mut others {
        for _ in 0..4 {
            other.reply().expect("it ends when its drive answers");
            other
                .stream()
                .read_exact(&mut [0; 4096])
                .expect("its data follow");
        }
    }
    // The whole stop, if one of them holds the others up.
    assert!(longest < Duration::from_secs(1), "a read took {longest:?}");
    assert!(reads >= 100, "{reads} reads in 3 s");
    drop((others, reader));
    daemon.stop();
}

#[test]
fn largest_requests_come_back_as_they_went() {
    const BYTES: usize = 32 << 20;
    let scratch = Scratch::new();
    let daemon = Daemon::serve(&scratch, &["name=vm1,ram=64M"]);
    let mut client = Client::connect(&scratch.path("nbd.sock"), "vm1").expect("the daemon serves it");
    let data: Vec<u8> = (0..BYTES as u32 / 4)
        .flat_map(|word| word.to_le_bytes())
        .collect();
    client.write(512, &data).expect("a write in pieces");
    let found = client.read(512, BYTES).expect("a read in pieces");
    assert!(found == data, "32 MiB do not come back as they went");
    let edges = [client.read(0, 512), client.read(512 + BYTES as u64, 512)];
    let is_zero = |found: std::io::Result<Vec<u8>>| found.expect("a read").iter().all(|byte| *byte == 0);
    assert!(
        edges.into_iter().all(is_zero),
        "more was written than was asked for"
    );
    daemon.stop();
}

/// A client that sends many reads and is slow to receive the replies.
struct Flood {
    client: Client,
    bytes: usize,
    sent: Vec<u64>,
}

impl Flood {
    fn begin(socket: &Path, reads: u64, bytes: usize) -> Self {
        let mut client = Client::connect(socket, "heavy").expect("the daemon serves it");
        let send = |number: u64| {
            // Backwards, so that nothing is merged.
            let offset = (reads - number) * 2 * bytes as u64;
            client
                .send(Command::Read, 0, offset, bytes as u32, &[])
                .expect("a request is taken")
        };
        let sent = (0..reads).map(send).collect();
        Self { client, bytes, sent }
    }

    /// Receives all replies. There is one for each read, in the order of the requests if nothing
    /// reorders them.
    fn end(&mut self, in_order: bool) {
        let mut data = vec![0; self.bytes];
        let mut answered: Vec<u64> = Vec::new();
        for _ in &self.sent {
            answered.push(self.client.reply().expect("a read is answered"));
            std::io::Read::read_exact(self.client.stream(), &mut data).expect("its data follow");
        }
        if !in_order {
            answered.sort_unstable();
        }
        assert!(
            answered == self.sent,
            "not every read was answered once, in its order"
        );
    }
}

/// Ends them simultaneously, because memory of unread replies is needed by others.
fn end_all(flood: &mut [Flood], in_order: bool) {
    std::thread::scope(|scope| {
        for flood in flood {
            scope.spawn(move || flood.end(in_order));
        }
    });
}

/// Reads repeatedly, one at a time; returns the 99th percentile.
fn p99_of_reads(socket: &Path, bytes: usize, limit: Duration) -> Duration {
    let mut client = Client::connect(socket, "light").expect("the daemon serves it");
    let (start, mut times) = (Instant::now(), Vec::new());
    while start.elapsed() < limit {
        let start = Instant::now();
        let offset = (times.len() % 256 * 2 * bytes) as u64;
        client.read(offset, bytes).expect("a read");
        times.push(start.elapsed());
    }
    p99(times)
}

/// With all the reads that they may have in flight, these are four times the requests of the
/// largest host, and more than may wait in addition.
const FLOODERS: u64 = 64;
const FLOOD_READS: u64 = 256;
const FLOOD_IOPS: u64 = 4000;
const FLOOD_TIME: Duration = Duration::from_millis(1000 * FLOODERS * FLOOD_READS / FLOOD_IOPS);
/// Without a share of the requests a read waits for the flood's reads to end at the cap's rate, a
/// second or more.
const P99_MAX: Duration = Duration::from_millis(20);
/// Data that no other client may read.
const SECRET: u8 = 0x5e;
