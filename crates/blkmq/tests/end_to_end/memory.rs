//! Tests that connections use as much memory as configured: `memory` of `[nbd]`, and 256 KiB for each
//! connection.

use std::fmt::Write;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Resource, Rlimit, prlimit};

use crate::common::nbd::{Client, Command};
use crate::common::pattern::{BLOCK, block};
use crate::common::{Daemon, Scratch};

#[test]
fn connections_of_all_sizes_of_requests_take_the_memory_that_is_configured() {
    let scratch = Scratch::new();
    let mut text = format!("[nbd]\nmemory = {NBD_MEMORY}\n");
    for disk in 0..DISKS {
        let _ = write!(text, "[disk.d{disk}]\nram = \"64M\"\n");
    }
    let _ = write!(text, "[[export]]\nnbd = \"unix:{}\"\n", scratch.word("nbd.sock"));
    std::fs::write(scratch.path("blkmq.toml"), text).expect("a configuration can be written");
    let daemon = Daemon::start(&["-c", &scratch.word("blkmq.toml")]);
    let socket = scratch.path("nbd.sock");
    let connect = |number: u64| {
        let disk = format!("d{}", number * DISKS / CONNECTIONS);
        Client::connect(&socket, &disk).expect("the daemon serves it")
    };
    let mut clients: Vec<Client> = (0..CONNECTIONS).map(connect).collect();
    let idle = settled_kib(&daemon, LONG);
    let mut dice = 1;
    // One group after the other: each takes its share of what is free at that time.
    for of_disk in clients.chunks_mut((CONNECTIONS / DISKS) as usize) {
        for client in of_disk {
            ask_and_do_not_read(client, &mut dice);
        }
        settled_kib(&daemon, Duration::from_millis(50));
    }
    let full = settled_kib(&daemon, LONG) - idle;
    // No connection can continue, so the daemon must not use CPU time.
    let (start, before) = (Instant::now(), daemon.cpu_ns());
    std::thread::sleep(Duration::from_secs(1));
    let busy = (daemon.cpu_ns() - before) as f64 / start.elapsed().as_nanos() as f64;
    assert!(busy < 0.05, "{:.0} % of a core for those who wait", busy * 100.0);
    let figure = (NBD_MEMORY + CONNECTIONS * ALLOWANCE) / 1024;
    let permille = full * 1000 / figure;
    assert!(
        (900..=1100).contains(&permille),
        "{full} KiB where {figure} KiB are configured: {permille} permille"
    );
    // Unused memory is given back, except each connection's own.
    drop(clients);
    let left = settled_kib(&daemon, LONG).saturating_sub(idle);
    assert!(left < figure / 10, "{left} KiB stay when all are gone");
    daemon.stop();
}

#[test]
fn idle_connections_take_little_whoever_has_been_there_before() {
    let scratch = Scratch::new();
    let daemon = Daemon::serve(&scratch, &["name=vm1,ram=1M"]);
    let socket = scratch.path("nbd.sock");
    let before = settled_kib(&daemon, LONG);
    let mut clients = Vec::new();
    for _ in 0..3 {
        while clients.len() < IDLE as usize {
            let mut client = Client::connect(&socket, "vm1").expect("the daemon serves it");
            client.read(0, 512).expect("a read");
            clients.push(client);
        }
        let each = settled_kib(&daemon, LONG).saturating_sub(before) / IDLE;
        assert!(each <= 40, "{each} KiB for each of {IDLE} idle connections");
        // The remaining connections' memory is scattered among that of the others.
        let mut number = 0;
        clients.retain(|_| {
            number += 1;
            number % 8 == 0
        });
        settled_kib(&daemon, Duration::from_millis(100));
    }
    daemon.stop();
}

#[test]
fn memory_that_the_system_refuses_ends_only_the_connection_that_asked_for_it() {
    let scratch = Scratch::new();
    let mut daemon = Daemon::serve(&scratch, &["name=vm1,ram=64M"]);
    let socket = scratch.path("nbd.sock");
    let connect = || Client::connect(&socket, "vm1").expect("the daemon serves it");
    let mut neighbour = connect();
    neighbour.write(0, &block(0, 1)).expect("a write");
    let mut greedy = connect();
    greedy.read(0, 512).expect("a read");
    refuse_more_than(&daemon, 16 << 20);
    let sent = greedy.send(Command::Read, 0, 0, 32 << 20, &[]);
    sent.expect("a request is taken");
    greedy.reply().expect_err("there is no memory for it");
    assert!(
        daemon.wait_for(LONG, |line| line.contains("no memory for a request")),
        "nothing tells of it:\n{}",
        daemon.said()
    );
    assert!(neighbour.read(0, BLOCK).expect("a read") == block(0, 1));
    let length = connect()
        .read(0, 8 << 20)
        .expect("there is memory for that")
        .len();
    assert_eq!(length, 8 << 20);
    // It must end in order without more memory.
    daemon.stop();
}

/// Has the system refuse the daemon more than `bytes` in addition to what it has.
fn refuse_more_than(daemon: &Daemon, bytes: u64) {
    let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.id())).expect("our own child's");
    let line = status.lines().find(|line| line.starts_with("VmData:"));
    let kib = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
    let now = kib.expect("the kernel tells the size of data") * 1024;
    limit_data(daemon, Some(now + bytes));
}

fn limit_data(daemon: &Daemon, current: Option<u64>) {
    let limit = Rlimit {
        current,
        maximum: None,
    };
    prlimit(Pid::from_raw(daemon.id() as i32), Resource::Data, limit).expect("our own child can be limited");
}

/// Sends reads of all sizes, for more data than there is memory, and receives no replies.
fn ask_and_do_not_read(client: &mut Client, dice: &mut u64) {
    let mut ask = |kib: u64| {
        let sent = client.send(Command::Read, 0, 0, kib as u32 * 1024, &[]);
        sent.expect("a request is taken");
    };
    // The first ones fill the socket, and then the connection's own memory.
    for _ in 0..8 {
        ask(ALLOWANCE / 1024);
    }
    for _ in 0..40 {
        *dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let size = SIZES_KIB[(*dice >> 33) as usize % SIZES_KIB.len()];
        ask(size);
    }
}

/// The daemon's memory once it has not changed for `pause`.
fn settled_kib(daemon: &Daemon, pause: Duration) -> u64 {
    let end = Instant::now() + Duration::from_secs(60);
    let mut last = daemon.memory_kib();
    while Instant::now() < end {
        std::thread::sleep(pause);
        let now = daemon.memory_kib();
        if now.abs_diff(last) < 256 {
            return now;
        }
        last = now;
    }
    last
}

const SIZES_KIB: [u64; 10] = [4, 8, 12, 20, 36, 64, 100, 260, 520, 1028];
const NBD_MEMORY: u64 = 64 << 20;
/// Each has its own group, because one group leaves half of the memory to others.
const DISKS: u64 = 40;
const CONNECTIONS: u64 = 400;
const ALLOWANCE: u64 = 256 << 10;
const LONG: Duration = Duration::from_millis(1500);
const IDLE: u64 = 400;
