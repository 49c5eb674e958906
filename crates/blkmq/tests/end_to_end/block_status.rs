//! Tests that a client which asks repeatedly what is allocated delays nobody else and stays within its caps.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use blkmq_testkit::p99;

use crate::common::nbd::{Client, OPT_GO, REP_ACK, go_payload, greeted, option, read_option_reply, request};
use crate::common::{Daemon, Scratch};

#[test]
fn questions_about_allocation_do_not_hold_up_a_neighbour() {
    let scratch = Scratch::new();
    let mut words: Vec<String> = vec!["--reactors".into(), "1".into()];
    for number in 0..FILES {
        let file = fragmented(&scratch, &format!("part{number}.raw"));
        words.extend(["--disk".into(), format!("name=part{number},file={file}")]);
    }
    let nbd = format!("unix:{}", scratch.word("nbd.sock"));
    for disk in [
        "name=asked,striped=part0+part1+part2+part3,chunk=4K",
        "name=light,null=1G",
    ] {
        words.extend(["--disk".into(), disk.into()]);
    }
    words.extend(["--nbd".into(), nbd]);
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let daemon = Daemon::start(&words);
    let socket = scratch.path("nbd.sock");
    let stop = AtomicBool::new(false);
    let (p99, answered) = std::thread::scope(|scope| {
        let asking = scope.spawn(|| ask_until(&socket, &stop));
        std::thread::sleep(Duration::from_millis(100));
        let p99 = p99_of_reads(&socket);
        // Relaxed: nothing else is published with it.
        stop.store(true, Ordering::Relaxed);
        (p99, asking.join().expect("the client that asks"))
    });
    assert!(answered > 0, "no question was answered");
    assert!(p99 < P99_MAX, "p99 {p99:?} beside the questions");
    daemon.stop();
}

#[test]
fn questions_about_allocation_count_for_the_caps_of_the_group() {
    let scratch = Scratch::new();
    let image = scratch.image("vm1.raw", 1 << 20);
    let nbd = format!("unix:{}", scratch.word("nbd.sock"));
    let disk = format!("name=vm1,file={image}");
    let daemon = Daemon::start(&["--disk", &disk, "--group", "/vm1,iops=20", "--nbd", &nbd]);
    let mut asking = asks(&scratch.path("nbd.sock"), "vm1");
    let start = Instant::now();
    for cookie in 0..40 {
        asking.write_all(&question(cookie, 1 << 20)).expect("a question");
    }
    for _ in 0..40 {
        answer(&mut asking);
    }
    // 40 requests at 20 a second; at the start some tenths of a second's worth may pass at once.
    let taken = start.elapsed();
    assert!(taken > Duration::from_secs(1), "40 questions in {taken:?}");
    daemon.stop();
}

/// Asks for the block status of the whole disk, hundreds of times at once.
fn ask_until(socket: &Path, stop: &AtomicBool) -> u64 {
    let mut stream = asks(socket, "asked");
    let batch: Vec<u8> = (0..QUESTIONS)
        .flat_map(|cookie| question(cookie, FILES as u32 * FILE_BYTES as u32))
        .collect();
    let mut answered = 0;
    // Relaxed: only the flag itself matters.
    while !stop.load(Ordering::Relaxed) {
        stream.write_all(&batch).expect("questions are taken");
        for _ in 0..QUESTIONS {
            answer(&mut stream);
        }
        answered += QUESTIONS;
    }
    answered
}

/// A file with data and holes alternating, as a guest's filesystem leaves them.
fn fragmented(scratch: &Scratch, name: &str) -> String {
    let word = scratch.image(name, FILE_BYTES);
    let file = File::options().write(true).open(&word).expect("the image opens");
    // Long runs of data, divided into pieces by the stripes, so that a reply with few extents takes
    // much work.
    for at in (0..FILE_BYTES).step_by(8 << 20) {
        file.write_all_at(&[1; 4 << 20], at).expect("the image takes it");
    }
    word
}

/// Connects for structured replies with block status.
pub(crate) fn asks(socket: &Path, export: &str) -> UnixStream {
    asks_for(socket, export, "base:allocation")
}

/// The same with another context.
pub(crate) fn asks_for(socket: &Path, export: &str, query: &str) -> UnixStream {
    let mut stream = greeted(socket).expect("anyone is greeted");
    stream
        .write_all(&option(OPT_STRUCTURED_REPLY, &[]))
        .expect("sent");
    let mut context = (export.len() as u32).to_be_bytes().to_vec();
    context.extend(export.as_bytes());
    context.extend(1_u32.to_be_bytes());
    context.extend((query.len() as u32).to_be_bytes());
    context.extend(query.as_bytes());
    stream
        .write_all(&option(OPT_SET_META_CONTEXT, &context))
        .expect("sent");
    stream
        .write_all(&option(OPT_GO, &go_payload(export)))
        .expect("sent");
    let mut acknowledged = 0;
    while acknowledged < 3 {
        let (kind, _) = read_option_reply(&mut stream).expect("the server answers");
        assert!(kind < 1 << 31, "an option was refused: {kind:#x}");
        acknowledged += u32::from(kind == REP_ACK);
    }
    stream
}

/// A request for the block status of the first `bytes` bytes.
pub(crate) fn question(cookie: u64, bytes: u32) -> Vec<u8> {
    request(BLOCK_STATUS, 0, cookie, 0, bytes)
}

/// Receives one reply of one chunk.
pub(crate) fn answer(stream: &mut UnixStream) {
    let mut head = [0; 20];
    stream.read_exact(&mut head).expect("a reply");
    assert_eq!(head[4..8], [0, 1, 0, 5], "flag done, and block status");
    let bytes = u32::from_be_bytes(head[16..].try_into().expect("four bytes"));
    let mut payload = vec![0; bytes as usize];
    stream.read_exact(&mut payload).expect("its extents");
    assert!(bytes >= 12, "{bytes} bytes of a reply");
}

/// Reads repeatedly, one at a time; returns the 99th percentile.
fn p99_of_reads(socket: &Path) -> Duration {
    let mut client = Client::connect(socket, "light").expect("the daemon serves it");
    let (start, mut times) = (Instant::now(), Vec::new());
    while start.elapsed() < Duration::from_secs(3) {
        let start = Instant::now();
        client.read(0, 4096).expect("a read");
        times.push(start.elapsed());
    }
    p99(times)
}

const FILES: usize = 4;
const FILE_BYTES: u64 = 256 << 20;
/// How many requests are sent before the first reply is read.
const QUESTIONS: u64 = 500;
/// The limit on a busy machine. When the serving thread did the lookups itself, a read waited for a
/// hundred or more of them.
const P99_MAX: Duration = Duration::from_millis(10);
const OPT_STRUCTURED_REPLY: u32 = 8;
const OPT_SET_META_CONTEXT: u32 = 10;
const BLOCK_STATUS: u16 = 7;
