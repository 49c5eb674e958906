//! What a service manager is told of the daemon's life: a sign as long as every reactor takes orders.

use std::io::ErrorKind;
use std::os::unix::net::UnixDatagram;
use std::time::{Duration, Instant};

use blkmq_testkit::debugger::Stopped;

use crate::common::daemon::serve_command;
use crate::common::{Daemon, Scratch};

#[test]
fn signs_of_life_end_while_a_debugger_has_stopped_any_one_reactor() {
    let scratch = Scratch::new();
    let told = UnixDatagram::bind(scratch.path("notify")).expect("a socket can be bound");
    let nbd = format!("unix:{}", scratch.word("nbd.sock"));
    let words = [
        "--reactors",
        "2",
        "--disk",
        "name=vm1,ram=1M",
        "--nbd",
        &nbd,
        // In its sandbox, nobody but root may debug it.
        "--sandbox",
        "off",
    ];
    let mut command = serve_command(&words);
    let waited_us = (3 * INTERVAL).as_micros().to_string();
    command
        .env("NOTIFY_SOCKET", scratch.path("notify"))
        .env("WATCHDOG_USEC", waited_us);
    let mut daemon = Daemon::spawn(command);
    for number in 0..2 {
        for _ in 0..3 {
            assert!(
                is_alive(&told, SIGN_MAX),
                "no sign of life from a daemon that serves"
            );
        }
        let stopped = Stopped::thread(daemon.id(), &format!("blkmq-r{number}")).expect("our own child");
        // All had answered before; the thread that tells it was about to.
        while is_alive(&told, Duration::ZERO) {}
        let late = (0..2).take_while(|_| is_alive(&told, SILENCE)).count();
        assert!(late < 2, "reactor {number} is stopped, and signs of life go on");
        assert!(!is_alive(&told, SILENCE), "reactor {number} is stopped");
        let silent = format!("watchdog: no answer within 100ms from blkmq-r{number}");
        assert!(
            daemon.wait_for(SIGN_MAX, |line| line.contains(&silent)),
            "{}",
            daemon.said()
        );
        drop(stopped);
    }
    assert!(is_alive(&told, SIGN_MAX), "all reactors go on");
    daemon.stop();
}

/// Returns whether a sign of life comes until then. Other messages are passed over.
fn is_alive(told: &UnixDatagram, limit: Duration) -> bool {
    let end = Instant::now() + limit;
    loop {
        // No limit at all is none.
        let left = end
            .saturating_duration_since(Instant::now())
            .max(Duration::from_millis(1));
        told.set_read_timeout(Some(left)).expect("a time limit");
        let mut message = [0; 64];
        match told.recv(&mut message) {
            Ok(bytes) if &message[..bytes] == b"WATCHDOG=1\n" => return true,
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => return false,
            Err(error) => panic!("{error}"),
        }
    }
}

/// How often the daemon tells.
const INTERVAL: Duration = Duration::from_millis(100);
/// Far longer than a sign takes.
const SILENCE: Duration = Duration::from_secs(1);
/// As long as a busy machine may take.
const SIGN_MAX: Duration = Duration::from_secs(10);
