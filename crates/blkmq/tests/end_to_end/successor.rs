//! Tests that writes of a client that died have ended when its successor begins, and none takes effect later.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use crate::common::nbd::{Client, Command, OPT_GO, go_payload, greeted, option, request};
use crate::common::pattern::BLOCK;
use crate::common::{Daemon, Scratch};

#[test]
fn no_write_of_a_dead_client_lands_between_two_reads_of_its_successor() {
    let scratch = Scratch::new();
    let daemon = serve(&scratch);
    let socket = scratch.path("nbd.sock");
    for round in 0..2 {
        die_with_writes_under_way(&socket, round);
        let mut successor = Client::connect(&socket, "vm1").expect("the successor is let in");
        let first = look_at(&mut successor);
        std::thread::sleep(Duration::from_millis(1000 * MIB / CAP));
        assert!(
            first == look_at(&mut successor),
            "round {round}: a write has landed"
        );
    }
    daemon.stop();
}

#[test]
fn living_client_is_not_waited_for_or_stopped_when_one_of_its_connections_is_lost() {
    let scratch = Scratch::new();
    let daemon = serve(&scratch);
    let socket = scratch.path("nbd.sock");
    let mut living = Client::connect(&socket, "vm1").expect("the daemon serves it");
    // A living client that writes for long is not waited for.
    let mut busy = Client::connect(&socket, "vm1").expect("the daemon serves it");
    write_all(&mut busy, 0);
    let start = Instant::now();
    let mut further = Client::connect(&socket, "vm1").expect("a further connection is let in");
    further.read(0, BLOCK).expect("a read");
    assert!(start.elapsed() < SOON, "let in after {:?}", start.elapsed());
    // When it is lost, its other connections in transmission continue.
    drop(busy);
    let start = Instant::now();
    living.read(0, BLOCK).expect("a read");
    further.read(0, BLOCK).expect("a read");
    assert!(start.elapsed() < SOON, "answered after {:?}", start.elapsed());
    // A client that disconnects before it is accepted leaves nothing behind, and shutdown does not
    // wait for one that waits.
    let files = open_files(&daemon);
    let waiting = || {
        let mut stream = greeted(&socket).expect("anyone is greeted");
        let go = option(OPT_GO, &go_payload("vm1"));
        stream.write_all(&go).expect("the option is sent");
        stream
    };
    let (impatient, patient) = (waiting(), waiting());
    std::thread::sleep(Duration::from_millis(50));
    drop(impatient);
    let end = Instant::now() + SOON;
    while open_files(&daemon) > files + 1 {
        assert!(Instant::now() < end, "the impatient one's descriptor stays");
        std::thread::sleep(Duration::from_millis(5));
    }
    daemon.stop();
    drop(patient);
}

fn open_files(daemon: &Daemon) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", daemon.id()))
        .expect("our own child's files can be listed")
        .count()
}

#[test]
fn successor_over_tcp_waits_too() {
    let free = TcpListener::bind("127.0.0.1:0")
        .and_then(|listener| listener.local_addr())
        .expect("a free port");
    let scratch = Scratch::new();
    let (tcp, unix) = (
        format!("tcp:{free}"),
        format!("unix:{}", scratch.word("nbd.sock")),
    );
    let cap = format!("/vm1,write_bps={CAP}");
    let words = [
        "--disk",
        "name=vm1,ram=64M",
        "--group",
        &cap,
        "--nbd",
        &tcp,
        "--nbd",
        &unix,
    ];
    let daemon = Daemon::start(&words);
    // It dies at one address, and connects again at another.
    let mut dying = connect_tcp(free);
    dying.write_all(&writes(1)).expect("the writes are taken");
    std::thread::sleep(Duration::from_millis(100));
    drop(dying);
    let mut successor = Client::connect(&scratch.path("nbd.sock"), "vm1").expect("the successor is let in");
    let first = look_at(&mut successor);
    std::thread::sleep(Duration::from_millis(1000 * MIB / CAP));
    assert!(first == look_at(&mut successor), "a write has landed");
    daemon.stop();
}

fn serve(scratch: &Scratch) -> Daemon {
    let nbd = format!("unix:{}", scratch.word("nbd.sock"));
    let cap = format!("/vm1,write_bps={CAP}");
    Daemon::start(&["--disk", "name=vm1,ram=64M", "--group", &cap, "--nbd", &nbd])
}

/// Sends writes that take seconds under the cap, and disconnects.
fn die_with_writes_under_way(socket: &Path, generation: u64) {
    let mut client = Client::connect(socket, "vm1").expect("the daemon serves it");
    write_all(&mut client, generation);
    // The first writes have been received, and the last ones perhaps not.
    std::thread::sleep(Duration::from_millis(100));
}

fn write_all(client: &mut Client, generation: u64) {
    let data = vec![generation as u8 + 1; MIB as usize];
    for number in 0..WRITES {
        let sent = client.send(Command::Write, 0, number * MIB, MIB as u32, &data);
        sent.expect("the writes are taken");
    }
}

fn writes(generation: u64) -> Vec<u8> {
    let one = |number: u64| {
        let mut message = request(1, 0, number, number * MIB, MIB as u32);
        message.extend(vec![generation as u8 + 1; MIB as usize]);
        message
    };
    (0..WRITES).flat_map(one).collect()
}

/// Reads the first block of each of the writes' ranges.
fn look_at(client: &mut Client) -> Vec<u8> {
    let first = |number: u64| client.read(number * MIB, BLOCK).expect("a read");
    (0..WRITES).flat_map(first).collect()
}

/// Connects and selects the disk with `NBD_OPT_EXPORT_NAME`, without reading an answer in between.
fn connect_tcp(address: std::net::SocketAddr) -> TcpStream {
    let mut stream = TcpStream::connect(address).expect("the daemon listens");
    stream.read_exact(&mut [0; 18]).expect("a greeting");
    let mut select = 3_u32.to_be_bytes().to_vec();
    select.extend(option(1, b"vm1"));
    stream.write_all(&select).expect("a selection");
    stream.read_exact(&mut [0; 10]).expect("the size and the flags");
    stream
}

const MIB: u64 = 1 << 20;
/// Bytes per second that may be written.
const CAP: u64 = 4 << 20;
const WRITES: u64 = 12;
/// A small part of the time that the writes take.
const SOON: Duration = Duration::from_millis(700);
