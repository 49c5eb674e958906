//! Tests that a client which violates the protocol harms only itself.
//!
//! A good client checks every byte that it writes, on the same socket and the same disk, while
//! others misbehave. Afterwards the daemon has no more files open and little more memory than
//! before.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::common::daemon::{program, serve_command};
use crate::common::nbd::{Client, Command, OPT_GO, go_payload, greeted, option, request};
use crate::common::pattern::{BLOCK, block};
use crate::common::{Daemon, Scratch};

#[test]
fn limit_of_a_files_size_costs_the_requests_beyond_it_alone() {
    let scratch = Scratch::new();
    let disk = format!("name=vm1,file={}", scratch.image("vm1.raw", 8 * MIB));
    let nbd = format!("unix:{}", scratch.word("nbd.sock"));
    let mut command = std::process::Command::new("bash");
    // In KiB.
    command
        .args(["-c", "ulimit -f 4096 && exec \"$0\" \"$@\""])
        .arg(program());
    command.args(serve_command(&["--disk", &disk, "--nbd", &nbd]).get_args());
    let daemon = Daemon::spawn(command);
    let mut client = Client::connect(&scratch.path("nbd.sock"), "vm1").expect("it is served");
    client.write(0, &block(0, 1)).expect("within the limit");
    let beyond = client
        .write(6 * MIB, &block(1, 1))
        .expect_err("beyond it")
        .to_string();
    assert!(beyond.contains("ENOSPC") || beyond.contains("28"), "{beyond}");
    assert_eq!(client.read(0, BLOCK).expect("it is served on"), block(0, 1));
    daemon.stop();
}

#[test]
fn hostile_clients_do_not_disturb_a_good_one() {
    let scratch = Scratch::new();
    let image = scratch.image("vm1.raw", 8 * MIB);
    let mut daemon = Daemon::serve(&scratch, &[&format!("name=vm1,file={image}"), "name=big,null=1G"]);
    let socket = scratch.path("nbd.sock");
    // One round to warm up: memory that stays allocated after it is not a leak.
    misbehave_in_every_way(&socket);
    wait_for_open_files(&daemon, open_files(&daemon));
    let (files_before, memory_before) = (open_files(&daemon), daemon.memory_kib());

    let stop = AtomicBool::new(false);
    let rounds = std::thread::scope(|scope| {
        let good = scope.spawn(|| use_well(&socket, &stop));
        for _ in 0..ROUNDS {
            misbehave_in_every_way(&socket);
        }
        // Relaxed: nothing else is published with it.
        stop.store(true, Ordering::Relaxed);
        good.join().expect("the good client was disturbed")
    });

    assert!(rounds >= ROUNDS, "the good client got only {rounds} rounds done");
    assert!(
        daemon.is_running(),
        "the daemon died; it said:\n{}",
        daemon.said()
    );
    wait_for_open_files(&daemon, files_before);
    let grown = daemon.memory_kib().saturating_sub(memory_before);
    assert!(grown < MEMORY_GROWTH_MAX_KIB, "the daemon grew by {grown} KiB");
    daemon.stop();
}

#[test]
fn request_out_of_range_is_refused_and_the_connection_goes_on() {
    let scratch = Scratch::new();
    let daemon = Daemon::serve(&scratch, &["name=vm1,ram=1M"]);
    let mut client = Client::connect(&scratch.path("nbd.sock"), "vm1").expect("the daemon serves it");
    assert_eq!(client.size(), MIB);
    let refused = client
        .read(MIB - 512, 1024)
        .expect_err("a read beyond the end is refused");
    assert_eq!(refused.raw_os_error(), Some(EINVAL), "{refused}");
    let refused = client
        .write(MIB, &[1; 512])
        .expect_err("a write beyond the end is refused");
    assert_eq!(refused.raw_os_error(), Some(ENOSPC), "{refused}");
    let refused = client
        .read(u64::MAX - 511, 512)
        .expect_err("an offset that wraps is refused");
    assert_eq!(refused.raw_os_error(), Some(EINVAL), "{refused}");
    client.write(0, &block(0, 1)).expect("the connection goes on");
    assert!(client.read(0, BLOCK).expect("the connection goes on") == block(0, 1));
    daemon.stop();
}

#[test]
fn log_says_who_spoke_garbage_to_which_disk() {
    let scratch = Scratch::new();
    let mut daemon = Daemon::serve(&scratch, &["name=vm1,ram=1M"]);
    send_garbage_for_a_request(&scratch.path("nbd.sock"));
    let wanted = format!("connection of process {} of user", std::process::id());
    let is_said = daemon.wait_for(GOOD_WAIT_MAX, |line| {
        line.contains(&wanted) && line.contains("vm1")
    });
    assert!(is_said, "{wanted} is missing in:\n{}", daemon.said());
    daemon.stop();
}

#[test]
fn clients_that_break_the_rules_again_and_again_do_not_fill_the_log() {
    let scratch = Scratch::new();
    let mut daemon = Daemon::serve(&scratch, &["name=vm1,ram=1M"]);
    let started = Instant::now();
    for _ in 0..FLOOD {
        send_garbage_for_a_request(&scratch.path("nbd.sock"));
    }
    let seconds = started.elapsed().as_secs() as usize;
    let lines = daemon
        .said()
        .lines()
        .filter(|line| line.contains("closed"))
        .count();
    assert!(
        lines <= 66 + seconds && lines < FLOOD,
        "{lines} lines about {FLOOD} connections in {seconds} s"
    );
    std::thread::sleep(Duration::from_millis(1100));
    send_garbage_for_a_request(&scratch.path("nbd.sock"));
    let is_counted = daemon.wait_for(GOOD_WAIT_MAX, |line| {
        line.contains("lines about other connections")
    });
    assert!(
        is_counted,
        "nothing tells of the lines that are missing in:\n{}",
        daemon.said()
    );
    daemon.stop();
}

#[test]
fn unknown_export_is_refused_by_name() {
    let scratch = Scratch::new();
    let daemon = Daemon::serve(&scratch, &["name=vm1,ram=1M"]);
    let refused = Client::connect(&scratch.path("nbd.sock"), "vm2").expect_err("there is no vm2");
    assert!(
        refused.to_string().contains("0x80000006"),
        "NBD_REP_ERR_UNKNOWN was wanted: {refused}"
    );
    daemon.stop();
}

/// Writes and checks blocks until it is told to stop; returns the number of rounds. Any error
/// panics.
fn use_well(socket: &Path, stop: &AtomicBool) -> u64 {
    let mut client = Client::connect(socket, "vm1").expect("the good client connects");
    let mut round = 0;
    // Relaxed: only the flag itself matters.
    while !stop.load(Ordering::Relaxed) || round < ROUNDS {
        round += 1;
        for number in 0..GOOD_BLOCKS {
            client
                .write(number * BLOCK as u64, &block(number, round))
                .expect("a good write");
        }
        client.flush().expect("a good flush");
        for number in 0..GOOD_BLOCKS {
            let started = Instant::now();
            let found = client.read(number * BLOCK as u64, BLOCK).expect("a good read");
            assert!(
                found == block(number, round),
                "block {number} is not what the good client wrote"
            );
            assert!(
                started.elapsed() < GOOD_WAIT_MAX,
                "a good read took {:?}",
                started.elapsed()
            );
        }
    }
    round
}

/// Every kind of misbehaviour once, each on its own connection. None may hang, because the client's
/// sockets have timeouts.
fn misbehave_in_every_way(socket: &Path) {
    vanish_at_once(socket);
    send_garbage_for_a_greeting(socket);
    send_an_option_without_end(socket);
    send_garbage_for_a_request(socket);
    claim_an_oversize_write(socket);
    ask_for_an_oversize_read(socket);
    send_an_unknown_command(socket);
    vanish_in_the_middle_of_a_write(socket);
    vanish_with_many_requests_in_flight(socket);
    stop_reading_replies(socket);
    let _silent = fall_silent_in_the_middle_of_a_request(socket);
}

fn vanish_at_once(socket: &Path) {
    drop(UnixStream::connect(socket).expect("anyone may connect"));
}

fn send_garbage_for_a_greeting(socket: &Path) {
    let mut stream = UnixStream::connect(socket).expect("anyone may connect");
    // The server may close the connection meanwhile, which is a valid answer.
    let _ = stream.write_all(&GARBAGE.repeat(1000));
    drained_within(&mut stream);
}

fn send_an_option_without_end(socket: &Path) {
    let mut stream = greeted(socket).expect("anyone is greeted");
    let mut huge = option(OPT_GO, b"");
    huge.truncate(12);
    huge.extend(u32::MAX.to_be_bytes());
    let _ = stream.write_all(&huge);
    let _ = stream.write_all(&[0; 65536]);
    drop(stream);

    let mut stream = greeted(socket).expect("anyone is greeted");
    // A name that is longer than its option.
    let mut payload = go_payload("vm1");
    payload[..4].copy_from_slice(&u32::MAX.to_be_bytes());
    let _ = stream.write_all(&option(OPT_GO, &payload));
    let _ = stream.write_all(&option(0xdead_beef, b"what is this"));
    drop(stream);
}

fn send_garbage_for_a_request(socket: &Path) {
    let mut client = Client::connect(socket, "vm1").expect("a hostile client connects like any other");
    let _ = client.stream().write_all(&GARBAGE.repeat(100));
    assert!(
        drained_within(client.stream()),
        "a connection that speaks garbage was not closed"
    );
}

/// The server must neither wait for four gigabytes nor make room for them.
fn claim_an_oversize_write(socket: &Path) {
    let mut client = Client::connect(socket, "big").expect("a hostile client connects like any other");
    let _ = client
        .stream()
        .write_all(&request(Command::Write as u16, 0, 1, 0, u32::MAX));
    let _ = client.stream().write_all(&[0; 4096]);
    drop(client);
}

fn ask_for_an_oversize_read(socket: &Path) {
    let mut client = Client::connect(socket, "big").expect("a hostile client connects like any other");
    let refused = client.read(0, 1 << 30);
    assert!(refused.is_err(), "a read of a gigabyte was served");
}

fn send_an_unknown_command(socket: &Path) {
    let mut client = Client::connect(socket, "vm1").expect("a hostile client connects like any other");
    let _ = client.stream().write_all(&request(0x7777, 0, 1, 0, 0));
    assert!(client.reply().is_err(), "an unknown command was served");
}

fn vanish_in_the_middle_of_a_write(socket: &Path) {
    let mut client = Client::connect(socket, "vm1").expect("a hostile client connects like any other");
    // After the good client's blocks: the result of half a write is not checked.
    let offset = 4 * MIB;
    let _ = client
        .stream()
        .write_all(&request(Command::Write as u16, 0, 1, offset, 65536));
    let _ = client.stream().write_all(&[0x42; 30_000]);
}

fn vanish_with_many_requests_in_flight(socket: &Path) {
    let mut client = Client::connect(socket, "vm1").expect("a hostile client connects like any other");
    for number in 0..64 {
        let (offset, data) = (4 * MIB + number * 4096, [0x43; 4096]);
        if client.send(Command::Write, 0, offset, 4096, &data).is_err() {
            return;
        }
    }
}

/// Requests far more than the sockets hold and reads none of it.
fn stop_reading_replies(socket: &Path) {
    let mut client = Client::connect(socket, "vm1").expect("a hostile client connects like any other");
    client
        .stream()
        .set_write_timeout(Some(Duration::from_millis(200)))
        .expect("a timeout can be set");
    for _ in 0..256 {
        if client.send(Command::Read, 0, 0, 65536, &[]).is_err() {
            break;
        }
    }
    std::thread::sleep(Duration::from_millis(50));
}

/// Half a header and then nothing; the caller decides how long the connection stays open.
fn fall_silent_in_the_middle_of_a_request(socket: &Path) -> Client {
    let mut client = Client::connect(socket, "vm1").expect("a hostile client connects like any other");
    let half = &request(Command::Write as u16, 0, 1, 0, 4096)[..14];
    client.stream().write_all(half).expect("half a request is sent");
    client
}

/// Whether the server closes the connection soon; its remaining output is discarded.
fn drained_within(stream: &mut UnixStream) -> bool {
    stream
        .set_read_timeout(Some(Duration::from_secs(5)))
        .expect("a timeout can be set");
    let mut scrap = [0; 4096];
    loop {
        match stream.read(&mut scrap) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) => return error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }
}

/// Waits until the daemon has closed the files of the hostile connections.
fn wait_for_open_files(daemon: &Daemon, wanted: usize) {
    let end = Instant::now() + Duration::from_secs(10);
    while open_files(daemon) > wanted {
        assert!(
            Instant::now() < end,
            "{} files are open, {wanted} before",
            open_files(daemon)
        );
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn open_files(daemon: &Daemon) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", daemon.id()))
        .expect("our own child's files can be listed")
        .count()
}

const GARBAGE: &[u8] = b"\xff\x00GET / HTTP/1.1\r\n\x00\x13\x37";
const ROUNDS: u64 = 8;
/// Connections that violate the protocol, one after the other.
const FLOOD: usize = 500;
const GOOD_BLOCKS: u64 = 64;
/// Far more than a read takes on a busy machine, and far less than any deadline of a hostile
/// client.
const GOOD_WAIT_MAX: Duration = Duration::from_secs(3);
const MEMORY_GROWTH_MAX_KIB: u64 = 64 * 1024;
const MIB: u64 = 1 << 20;
const EINVAL: i32 = 22;
const ENOSPC: i32 = 28;
