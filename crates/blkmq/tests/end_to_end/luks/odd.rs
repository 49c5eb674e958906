//! Requests that begin or end inside a sector of an encrypted disk.

use std::path::Path;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use blkmq_testkit::Random;

use super::crypt::{Crypt, has_tools};
use super::{MIB, disks, serve};
use crate::common::nbd::{Client, Command};
use crate::common::{Daemon, Scratch};

/// Clients write to bytes of their own, between those of others in the same sectors.
#[test]
fn writes_of_parts_of_sectors_lose_nothing_of_what_others_write_to_the_same() {
    if !has_tools(&["cryptsetup"]) {
        return;
    }
    for sector in ["512", "4096"] {
        let scratch = Scratch::new();
        let crypt = Crypt::new(&scratch);
        let image = crypt.encrypt("odd", &vec![7; BYTES], 8 * MIB, sector);
        let [encrypted, below] = disks("vm1", &image, &crypt);
        let nbd = format!("unix:{}", scratch.word("nbd.sock"));
        let words = [
            "--reactors",
            "2",
            "--disk",
            &encrypted,
            "--disk",
            &below,
            "--nbd",
            &nbd,
        ];
        let daemon = Daemon::start(&words);
        let ends = ends_of_stripes();
        let all_here = Barrier::new(CLIENTS);
        let parts: Vec<Vec<u8>> = std::thread::scope(|scope| {
            let clients: Vec<_> = (0..CLIENTS)
                .map(|number| {
                    let mut client = Client::connect(&scratch.path("nbd.sock"), "vm1").unwrap();
                    let (ends, all_here) = (&ends, &all_here);
                    scope.spawn(move || {
                        all_here.wait();
                        work(number, &mut client, ends)
                    })
                })
                .collect();
            clients.into_iter().map(|client| client.join().unwrap()).collect()
        });
        let mut expected = vec![0; BYTES];
        for (stripe, range) in ends.windows(2).enumerate() {
            let range = range[0]..range[1];
            expected[range.clone()].copy_from_slice(&parts[stripe % CLIENTS][range]);
        }
        let mut client = Client::connect(&scratch.path("nbd.sock"), "vm1").unwrap();
        assert!(client.read(0, BYTES).unwrap() == expected, "sectors of {sector}");
        drop(client);
        daemon.stop();
        let decrypted = std::fs::read(Path::new(&crypt.decrypt(&image))).unwrap();
        assert!(
            decrypted[..BYTES] == expected,
            "sectors of {sector}, by cryptsetup"
        );
    }
}

#[test]
fn large_request_that_begins_inside_a_sector_is_served_in_pieces() {
    if !has_tools(&["cryptsetup"]) {
        return;
    }
    let scratch = Scratch::new();
    let crypt = Crypt::new(&scratch);
    let image = crypt.format("odd", 48 * MIB, "--type luks2 --pbkdf pbkdf2 --sector-size 4096");
    let daemon = serve(&scratch, &disks("vm1", &image, &crypt));
    let mut client = Client::connect(&scratch.path("nbd.sock"), "vm1").unwrap();
    let (mut random, at) = (Random::new(5), 4096 * 3 + 1);
    let around = random.bytes(8 << 20);
    client.write(0, &around).unwrap();
    let data = random.bytes((5 << 20) + 77);
    client.write_through(at as u64, &data).unwrap();
    let zeroes: std::ops::Range<usize> = (6 << 20)..(6 << 20) + 777;
    let cookie = client
        .send(
            Command::WriteZeroes,
            0,
            zeroes.start as u64,
            zeroes.len() as u32,
            &[],
        )
        .unwrap();
    assert_eq!(client.reply().unwrap(), cookie);
    let mut expected = around;
    expected[at..at + data.len()].copy_from_slice(&data);
    expected[zeroes].fill(0);
    assert!(client.read(0, expected.len()).unwrap() == expected);
    assert!(client.read(5, expected.len() - 9).unwrap() == expected[5..expected.len() - 4]);
    let [mut beyond, last] = [client.size() - 1; 2];
    client.write(last, &[3]).unwrap();
    assert_eq!(client.read(last, 1).unwrap(), [3]);
    beyond += 1;
    assert!(client.write(beyond, &[3]).is_err(), "a byte beyond the end");
    daemon.stop();
}

#[test]
fn discard_leaves_the_sectors_that_it_has_in_part() {
    if !has_tools(&["cryptsetup"]) {
        return;
    }
    let scratch = Scratch::new();
    let crypt = Crypt::new(&scratch);
    let image = crypt.format("odd", 48 * MIB, "--type luks2 --pbkdf pbkdf2 --sector-size 4096");
    let [encrypted, below] = disks("vm1", &image, &crypt);
    let daemon = serve(&scratch, &[format!("{encrypted},discard=on"), below]);
    let mut client = Client::connect(&scratch.path("nbd.sock"), "vm1").unwrap();
    let data = Random::new(6).bytes(64 << 10);
    client.write(0, &data).unwrap();
    for (start, end) in [(100_u64, 4000), (4000, 5000), (8191, 40961)] {
        let bytes = end - start;
        let cookie = client.send(Command::Trim, 0, start, bytes as u32, &[]).unwrap();
        assert_eq!(client.reply().unwrap(), cookie);
    }
    let found = client.read(0, data.len()).unwrap();
    for kept in [0..8192, 40960..65536] {
        assert!(found[kept.clone()] == data[kept.clone()], "{kept:?}");
    }
    assert!(found[8192..40960] != data[8192..40960], "nothing was discarded");
    daemon.stop();
}

/// Many wait for one sector: each is written eight times, and the writes of several threads share a drive.
#[test]
fn row_of_small_writes_with_many_in_flight_ends_and_leaves_others_their_turns() {
    if !has_tools(&["cryptsetup"]) {
        return;
    }
    let scratch = Scratch::new();
    let crypt = Crypt::new(&scratch);
    let options = "--type luks2 --pbkdf pbkdf2 --sector-size 4096";
    let [encrypted, below] = disks("vm1", &crypt.format("odd", 48 * MIB, options), &crypt);
    let nbd = format!("unix:{}", scratch.word("nbd.sock"));
    let mut words = vec!["--reactors", "2", "--disk", &encrypted, "--disk", &below];
    words.extend(["--disk", "name=other,ram=1M", "--nbd", &nbd]);
    let daemon = Daemon::start(&words);
    let socket = scratch.path("nbd.sock");
    let (mut reads, mut worst) = (0, Duration::ZERO);
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..4_u64)
            .map(|number| {
                let mut client = Client::connect(&socket, "vm1").unwrap();
                scope.spawn(move || {
                    let at = |write: u64| (number << 20) + 512 * write;
                    for write in 0..IN_FLIGHT {
                        client.send(Command::Write, 0, at(write), 512, &[1; 512]).unwrap();
                    }
                    for write in IN_FLIGHT..WRITES {
                        client.reply().unwrap();
                        client.send(Command::Write, 0, at(write), 512, &[1; 512]).unwrap();
                    }
                    for _ in 0..IN_FLIGHT {
                        client.reply().unwrap();
                    }
                })
            })
            .collect();
        let mut other = Client::connect(&socket, "other").unwrap();
        while !writers.iter().all(std::thread::ScopedJoinHandle::is_finished) {
            let start = Instant::now();
            other.read(0, 4096).unwrap();
            worst = worst.max(start.elapsed());
            reads += 1;
        }
    });
    println!(
        "{reads} reads of another disk beside {} small writes, the slowest {worst:?}",
        4 * WRITES
    );
    assert!(worst < Duration::from_secs(1), "{worst:?}");
    let found = Client::connect(&socket, "vm1")
        .unwrap()
        .read(0, 512 * WRITES as usize)
        .unwrap();
    assert!(found.iter().all(|byte| *byte == 1));
    daemon.stop();
}

/// The ends of the stripes that belong to the clients in turn: most are inside of sectors, some at an end of one.
fn ends_of_stripes() -> Vec<usize> {
    let mut random = Random::new(1);
    let mut ends = vec![0];
    while let Some(&last) = ends.last()
        && last < BYTES
    {
        let next = last + 1 + random.index(9000);
        let next = match random.below(4) {
            0 => next.next_multiple_of(4096),
            _ => next,
        };
        ends.push(next.min(BYTES));
    }
    ends
}

/// Writes to the stripes of a client and reads them. Returns the whole disk, right where these are.
fn work(number: usize, client: &mut Client, ends: &[usize]) -> Vec<u8> {
    let mut random = Random::new(number as u64 + 10);
    let mut content = vec![7; BYTES];
    let own: Vec<_> = ends.windows(2).skip(number).step_by(CLIENTS).collect();
    for round in 0..ROUNDS {
        let stripe = random.one_of(&own);
        let start = stripe[0] + random.index(stripe[1] - stripe[0]);
        let end = start + 1 + random.index(stripe[1] - start);
        // Now and then all of it, which may be whole sectors.
        let range = if random.below(3) == 0 {
            stripe[0]..stripe[1]
        } else {
            start..end
        };
        match random.below(8) {
            0 => {
                let cookie = client
                    .send(
                        Command::WriteZeroes,
                        0,
                        range.start as u64,
                        range.len() as u32,
                        &[],
                    )
                    .unwrap();
                assert_eq!(client.reply().unwrap(), cookie);
                content[range].fill(0);
            }
            1 => client.flush().unwrap(),
            2 | 3 => {
                let found = client.read(range.start as u64, range.len()).unwrap();
                assert!(
                    found == content[range.clone()],
                    "client {number}, round {round}, {range:?}"
                );
            }
            _ => {
                content[range.clone()].copy_from_slice(&random.bytes(range.len()));
                client.write(range.start as u64, &content[range]).unwrap();
            }
        }
    }
    content
}

const BYTES: usize = 128 << 10;
const CLIENTS: usize = 5;
const ROUNDS: usize = 300;
const IN_FLIGHT: u64 = 64;
const WRITES: u64 = 1000;
