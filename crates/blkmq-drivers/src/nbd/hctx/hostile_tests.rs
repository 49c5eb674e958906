//! Servers that answer what they cannot have read: the memory of a request stays lent until all of
//! it was sent, whatever its server says.

use std::io::Read;

use blkmq_nbd::codec::reply::write_simple;
use blkmq_nbd::codec::{ErrorCode, HeaderStyle};

use super::rig::{SHARED, Server, pattern, rig, write};
use super::*;

/// More than a socket holds.
const LARGE: usize = 1 << 20;

#[test]
fn answer_to_a_write_that_is_not_sent_whole_ends_the_connection() {
    for error in [None, Some(ErrorCode::NoSpace)] {
        let server = Server::new(HeaderStyle::Structured, SHARED);
        let (mut rig, mut client) = rig(&server, &[]);
        let mut memory = pattern(LARGE);
        rig.issue(0, &write(0, &mut memory));
        let header = client.header();
        let mut early = Vec::new();
        write_simple(header.cookie, error, &mut early);
        client.send(&early);
        assert_eq!(rig.wait(1), [(0, Status::Transport)], "{error:?}");
        assert_eq!(rig.connections(), 0);
        // What the socket had taken still arrives, and then the end.
        let mut arrived = Vec::new();
        client.stream.read_to_end(&mut arrived).unwrap();
        assert!(arrived.len() < LARGE, "{} bytes have arrived", arrived.len());
    }
}

#[test]
fn answer_to_a_write_behind_one_that_is_not_sent_ends_the_connection() {
    let server = Server::new(HeaderStyle::Simple, SHARED);
    let (mut rig, mut client) = rig(&server, &[]);
    let (mut first, mut second) = (pattern(LARGE), pattern(4096));
    rig.issue(0, &write(0, &mut first));
    rig.issue(1, &write(0, &mut second));
    let mut header = client.header();
    // The second request's number is easily guessed.
    header.cookie = crate::testing::cookie(1).raw();
    client.reply(&header, &[]);
    assert_eq!(rig.wait(2), [(0, Status::Transport), (1, Status::Transport)]);
}

#[test]
fn answer_to_a_write_that_was_sent_counts_while_others_wait() {
    let server = Server::new(HeaderStyle::Simple, SHARED);
    let (mut rig, mut client) = rig(&server, &[]);
    let (mut first, mut second) = (pattern(4096), pattern(LARGE));
    rig.issue(0, &write(0, &mut first));
    rig.issue(1, &write(0, &mut second));
    let (header, _) = client.request();
    client.reply(&header, &[]);
    assert_eq!(rig.wait(1), [(0, Status::Ok)]);
    let server = std::thread::spawn(move || {
        let (header, data) = client.request();
        client.reply(&header, &[]);
        (client, data)
    });
    assert_eq!(rig.wait(1), [(1, Status::Ok)]);
    assert!(server.join().unwrap().1 == pattern(LARGE), "another content");
}

#[test]
fn write_that_its_server_answers_early_is_repeated_whole() {
    let server = Server::new(HeaderStyle::Simple, SHARED);
    let (mut rig, mut client) = rig(&server, &[("reconnect", "30")]);
    let mut memory = pattern(LARGE);
    rig.issue(0, &write(0, &mut memory));
    let header = client.header();
    client.reply(&header, &[]);
    rig.wait_for_connections(0);
    let mut client = server.accept();
    let server = std::thread::spawn(move || {
        let (header, data) = client.request();
        client.reply(&header, &[]);
        (client, data)
    });
    assert_eq!(rig.wait(1), [(0, Status::Ok)]);
    assert!(server.join().unwrap().1 == pattern(LARGE), "another content");
}
