//! Tests whether the daemon connects to front ends that listen, again when they have restarted, and over
//! upgrades without a reconnect.

use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::common::daemon::program;
use crate::common::{Daemon, Scratch};
use blkmq_testkit::vhost_user::{FEATURES, FrontEnd};

/// Waits for the daemon's connection to a front end.
fn accept(listener: &UnixListener) -> UnixStream {
    listener.set_nonblocking(true).expect("a socket");
    let start = Instant::now();
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false).expect("a socket");
                return stream;
            }
            Err(error) => assert!(start.elapsed() < LONG, "nobody comes: {error}"),
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Reads a block over a new connection.
fn read_a_block(client: &mut FrontEnd) {
    client.start();
    client.request(0, 0, 0);
    client.offer(&[0]);
    client.kick();
    assert_eq!((client.used(1), client.status(0)), (vec![0], 0));
}

fn words(scratch: &Scratch, how: &str) -> Vec<String> {
    let disk = format!("name=vm,file={},size=1M,create=on", scratch.word("vm.raw"));
    let address = format!("connect:unix:{}", scratch.word("{disk}.sock"));
    let upgrade = format!("unix:{}", scratch.word("up.sock"));
    ["--disk", &disk, "--vhost-user", &address, how, &upgrade]
        .map(str::to_owned)
        .into()
}

fn start(scratch: &Scratch, how: &str) -> Daemon {
    let words = words(scratch, how);
    Daemon::start(&words.iter().map(String::as_str).collect::<Vec<_>>())
}

fn listen(path: &Path) -> UnixListener {
    let _ = std::fs::remove_file(path);
    UnixListener::bind(path).expect("it can be listened at")
}

#[test]
fn front_end_that_listens_is_served_as_soon_as_it_is_there_and_when_it_comes_again() {
    let scratch = Scratch::new();
    let control = format!("unix:{}", scratch.word("control.sock"));
    let words = [
        words(&scratch, "--upgrade-socket"),
        vec!["--control".to_owned(), control.clone()],
    ]
    .concat();
    let daemon = Daemon::start(&words.iter().map(String::as_str).collect::<Vec<_>>());
    let shown = |client| {
        let words = [
            "ctl", "show", "disk", "vm", "--client", client, "--socket", &control,
        ];
        let output = Command::new(program()).args(words).output().expect("ctl runs");
        output
            .status
            .success()
            .then(|| String::from_utf8_lossy(&output.stdout).into_owned())
    };
    assert!(shown("qemu").expect("QEMU can listen").contains("server=on"));
    assert_eq!(shown("crosvm"), None, "it cannot listen");
    std::thread::sleep(Duration::from_millis(300));
    let before = daemon.cpu_ns();
    std::thread::sleep(Duration::from_secs(1));
    let idle = daemon.cpu_ns() - before;
    assert!(
        idle < 20_000_000,
        "waiting for a front end takes {idle} ns of a second"
    );
    for _ in 0..3 {
        let listener = listen(&scratch.path("vm.sock"));
        let mut client = FrontEnd::of(accept(&listener), FEATURES);
        read_a_block(&mut client);
        listener.set_nonblocking(true).expect("a socket");
        std::thread::sleep(Duration::from_millis(200));
        assert!(listener.accept().is_err(), "one connection is enough");
    }
    daemon.stop();
}

#[test]
fn front_end_that_hangs_up_again_and_again_costs_little() {
    let scratch = Scratch::new();
    let listener = listen(&scratch.path("vm.sock"));
    let daemon = start(&scratch, "--upgrade-socket");
    let start = Instant::now();
    let mut connections = 0;
    listener.set_nonblocking(true).expect("a socket");
    while start.elapsed() < Duration::from_secs(1) {
        connections += u32::from(listener.accept().is_ok());
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(
        (2..=6).contains(&connections),
        "{connections} connections in a second"
    );
    daemon.stop();
}

#[test]
fn listening_front_end_stays_connected_over_an_upgrade() {
    let scratch = Scratch::new();
    let listener = listen(&scratch.path("vm.sock"));
    let mut old = start(&scratch, "--upgrade-socket");
    let mut client = FrontEnd::of(accept(&listener), FEATURES);
    read_a_block(&mut client);
    let daemon = start(&scratch, "--take-over");
    assert!(old.ended_within(LONG).success(), "{}", old.said());
    client.request(1, 0, 0);
    client.offer(&[0, 1]);
    client.kick();
    assert_eq!(client.used(2), [0, 1]);
    listener.set_nonblocking(true).expect("a socket");
    std::thread::sleep(Duration::from_millis(300));
    assert!(listener.accept().is_err(), "it was connected to once more");
    // The new daemon also connects again when it must.
    drop(client);
    let mut again = FrontEnd::of(accept(&listener), FEATURES);
    read_a_block(&mut again);
    daemon.stop();
}

const LONG: Duration = Duration::from_secs(20);
