//! Tests that clients continue which are in the middle of an operation when another daemon takes over.

use std::io::{Read, Write};
use std::time::Duration;

use super::{Stage, read_back};
use crate::common::nbd::{
    Client, Command, OPT_GO, REP_ACK, go_payload, greeted, option, read_option_reply, request,
};
use crate::common::pattern::{BLOCK, block};

#[test]
fn client_that_negotiates_goes_on() {
    let stage = Stage::new();
    let daemon = stage.start();
    let mut silent = greeted(&stage.socket()).expect("a greeting");
    // An option with half of its name.
    let mut half = greeted(&stage.socket()).expect("a greeting");
    let go = option(OPT_GO, &go_payload("vm1"));
    half.write_all(&go[..go.len() - 4]).expect("half an option");
    // An option that is refused, the rest of whose data the daemon skips.
    let mut skipped = greeted(&stage.socket()).expect("a greeting");
    let unknown = option(0x7fff, &[7; 9000]);
    skipped.write_all(&unknown[..5000]).expect("half an option");
    std::thread::sleep(SETTLE);
    let daemon = stage.upgrade(stage.upgrade(daemon));
    silent.write_all(&go).expect("an option");
    half.write_all(&go[go.len() - 4..]).expect("the rest");
    skipped.write_all(&unknown[5000..]).expect("the rest");
    let (refused, _) = read_option_reply(&mut skipped).expect("an answer");
    assert_eq!(refused, 1 << 31 | 1, "an option that nobody knows");
    skipped.write_all(&go).expect("an option");
    for mut stream in [silent, half, skipped] {
        while read_option_reply(&mut stream).expect("an answer").0 != REP_ACK {}
        stream
            .write_all(&request(Command::Read as u16, 0, 5, 0, 512))
            .expect("a request");
        let mut reply = [0; 16 + 512];
        stream.read_exact(&mut reply).expect("a reply");
    }
    daemon.stop();
}

#[test]
fn write_of_which_half_has_come_is_done_by_the_other_daemon() {
    let stage = Stage::new();
    let daemon = stage.start();
    let mut client = Client::connect(&stage.socket(), "vm1").expect("it is served");
    let data: Vec<u8> = (0..BLOCKS).flat_map(|number| block(number, 1)).collect();
    let mut message = request(Command::Write as u16, 0, 77, 0, data.len() as u32);
    message.extend(&data);
    // Cut in the header, and early and late in the payload, over three daemons.
    let (mut daemon, mut sent) = (daemon, 0);
    for cut in [11, 28 + 5000, 28 + data.len() - 1, message.len()] {
        client
            .stream()
            .write_all(&message[sent..cut])
            .expect("a part of a write");
        sent = cut;
        std::thread::sleep(SETTLE);
        daemon = stage.upgrade(daemon);
    }
    assert_eq!(client.reply().expect("a reply"), 77);
    (0..BLOCKS).for_each(|number| read_back(&stage.socket(), number, 1));
    daemon.stop();
}

#[test]
fn replies_that_nobody_has_read_are_sent_by_the_other_daemon_each_once() {
    let stage = Stage::new();
    let daemon = stage.start();
    let mut client = Client::connect(&stage.socket(), "vm1").expect("it is served");
    for number in 0..BLOCKS {
        client
            .write(number * BLOCK as u64, &block(number, 3))
            .expect("a write");
    }
    // 24 MiB of replies, far more than a socket holds.
    let bytes = (BLOCKS as usize * BLOCK) as u32;
    let mut asked: Vec<u64> = (0..24)
        .map(|_| {
            client
                .send(Command::Read, 0, 0, bytes, &[])
                .expect("a read is sent")
        })
        .collect();
    std::thread::sleep(SETTLE);
    let mut daemon = Some(stage.upgrade(daemon));
    let mut data = vec![0; bytes as usize];
    for round in 0..asked.len() {
        if round == 5 {
            std::thread::sleep(SETTLE);
            daemon = daemon.map(|daemon| stage.upgrade(daemon));
        }
        let answered = client.reply().expect("a reply");
        let at = asked.iter().position(|cookie| *cookie == answered);
        asked.swap_remove(at.expect("a reply to what was asked, and once"));
        client.stream().read_exact(&mut data).expect("the data of a read");
        let expected: Vec<u8> = (0..BLOCKS).flat_map(|number| block(number, 3)).collect();
        assert!(data == expected, "reply {round} has other data");
    }
    client.write(0, &block(0, 4)).expect("a write");
    daemon.into_iter().for_each(crate::common::Daemon::stop);
}

#[test]
fn named_session_can_be_fenced_over_the_other_daemon() {
    let stage = Stage::new();
    let daemon = stage.start();
    let socket = stage.socket();
    let mut lost = Client::connect_as(&socket, "vm1", 9, 1).expect("it is served");
    let mut other = Client::connect_as(&socket, "vm1", 9, 2).expect("it is served");
    let daemon = stage.upgrade(daemon);
    other.fence(1).expect("a fence");
    assert!(lost.read(0, BLOCK).is_err(), "it was fenced");
    other.write(0, &block(0, 1)).expect("a write");
    daemon.stop();
}

/// Time for the daemon to receive what was sent.
const SETTLE: Duration = Duration::from_millis(200);
/// 1 MiB.
const BLOCKS: u64 = 256;
