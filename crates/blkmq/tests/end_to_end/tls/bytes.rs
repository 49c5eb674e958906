//! Tests that unexpected bytes before, beside and inside a TLS connection affect only their sender.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use super::Secured;
use crate::common::nbd::{self, option};
use crate::common::tools::{installed, run, try_run};

#[test]
fn before_tls_nothing_is_answered_but_that_it_is_needed() {
    let stage = Secured::new(&["name=a,ram=8M"]);
    let daemon = stage.start(&[]);
    let mut stream = nbd::greeted(&stage.scratch.path("nbd.sock")).expect("a greeting");
    for number in [3, 6, 7, 8, 9, 10, 11, 0x626c_6b71, 4711] {
        stream.write_all(&option(number, &[])).expect("it listens");
        let (kind, _) = nbd::read_option_reply(&mut stream).expect("an answer");
        assert_eq!(kind, ERR_TLS_REQD, "option {number}");
    }
    stream.write_all(&option(1, b"a")).expect("it listens");
    assert_eq!(stream.read(&mut [0; 64]).expect("the end"), 0, "EXPORT_NAME");
    daemon.stop();
}

#[test]
fn bytes_behind_starttls_are_not_taken_for_the_clients_own() {
    let stage = Secured::new(&["name=a,ram=8M"]);
    let mut daemon = stage.start(&[]);
    let mut stream = nbd::greeted(&stage.scratch.path("nbd.sock")).expect("a greeting");
    let smuggled = [option(STARTTLS, &[]), option(3, &[])].concat();
    stream.write_all(&smuggled).expect("it listens");
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest);
    assert!(rest.is_empty(), "answered with {rest:?}");
    let is_said = |line: &str| line.contains("bytes behind STARTTLS rejected");
    assert!(
        daemon.wait_for(Duration::from_secs(5), is_said),
        "{}",
        daemon.said()
    );
    daemon.stop();
}

#[test]
fn garbage_half_a_handshake_and_one_that_is_too_long_cost_their_sender_alone() {
    let stage = Secured::new(&["name=a,ram=8M"]);
    let config = stage.scratch.path("deadline.toml");
    std::fs::write(&config, "[nbd]\nhandshake_deadline = \"1s\"\n").expect("a file");
    let mut daemon = stage.start(&["--config", &stage.scratch.word("deadline.toml")]);
    let started = || {
        let mut stream = nbd::greeted(&stage.scratch.path("nbd.sock")).expect("a greeting");
        stream.write_all(&option(STARTTLS, &[])).expect("it listens");
        assert_eq!(
            nbd::read_option_reply(&mut stream).expect("an answer").0,
            nbd::REP_ACK
        );
        stream
    };
    let hello = [22, 3, 1, 2, 0, 1, 0, 1, 252, 3, 3];
    let long = [&[22, 3, 3, 0x40, 0, 1, 1, 0xff, 0xff][..], &[0; 16_384 - 4]].concat();
    for (bytes, why) in [
        (&b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"[..], "TLS handshake failed"),
        (&option(3, &[]), "TLS handshake failed"),
        (&[0xff; 40_000], "TLS handshake failed"),
        (&long, "TLS handshake failed"),
        (&hello, "no export was selected in time"),
        (&[], "no export was selected in time"),
    ] {
        let before = daemon.said().matches(why).count();
        let mut stream = started();
        let _ = stream.write_all(bytes);
        let begun = Instant::now();
        let _ = stream.read_to_end(&mut Vec::new());
        assert!(begun.elapsed() < Duration::from_secs(10), "{why}: still open");
        while daemon.said().matches(why).count() == before {
            assert!(
                begun.elapsed() < Duration::from_secs(10),
                "{why}: {}",
                daemon.said()
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    assert!(daemon.is_running());
    daemon.stop();
}

#[test]
fn record_that_was_changed_ends_its_connection_alone() {
    if !installed(&["nbdinfo", "nbdcopy"]) {
        return;
    }
    let stage = Secured::new(&["name=a,ram=8M"]);
    let image = stage.scratch.noisy_image("there.raw", 8 << 20, 3);
    let mut daemon = stage.start(&[]);
    // A relay that changes one byte of the client's, long after the handshake.
    let between = stage.scratch.path("between.sock");
    let listener = std::os::unix::net::UnixListener::bind(&between).expect("a socket");
    let server = stage.scratch.path("nbd.sock");
    std::thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            let server = UnixStream::connect(&server).expect("somebody listens");
            let (mut from, mut to) = (
                client.try_clone().expect("a copy"),
                server.try_clone().expect("a copy"),
            );
            std::thread::spawn(move || {
                let (mut all, mut bytes) = (0, vec![0; 4096]);
                while let Ok(count @ 1..) = from.read(&mut bytes) {
                    if all < 200_000 && all + count >= 200_000 {
                        bytes[count / 2] ^= 1;
                    }
                    all += count;
                    if to.write_all(&bytes[..count]).is_err() {
                        break;
                    }
                }
                let _ = to.shutdown(std::net::Shutdown::Write);
            });
            let (mut from, mut to) = (server, client);
            std::thread::spawn(move || std::io::copy(&mut from, &mut to));
        }
    });
    let pki = stage.scratch.word("pki");
    let uri = format!(
        "nbds+unix:///a?socket={}&tls-certificates={pki}&tls-hostname=localhost",
        between.display()
    );
    let said = try_run("nbdcopy", &["--connections=1", &image, &uri]);
    assert!(!said.success, "a changed record was taken: {}", said.stdout);
    let is_said = |line: &str| line.contains("cannot decrypt peer's message");
    assert!(
        daemon.wait_for(Duration::from_secs(5), is_said),
        "{}",
        daemon.said()
    );
    run("nbdinfo", &[&stage.own_uri("a")]);
    daemon.stop();
}

pub(super) const STARTTLS: u32 = 5;
const ERR_TLS_REQD: u32 = 1 << 31 | 5;
