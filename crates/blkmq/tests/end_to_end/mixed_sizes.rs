//! Tests that on a connection with requests of many sizes, a large one that has to wait for its turn is not
//! forgotten when a smaller one after it, or the rest of another, is served at once.

use std::collections::BTreeMap;
use std::io::Read;
use std::time::Duration;

use crate::common::nbd::{Client, Command};
use crate::common::{Daemon, Scratch};

#[test]
fn large_requests_that_wait_for_their_turn_end_beside_smaller_ones() {
    let scratch = Scratch::new();
    let file = format!("name=b,file={},size=64M,create=on", scratch.word("b.raw"));
    let daemon = Daemon::start(&[
        "--disk",
        "name=a,ram=64M",
        "--disk",
        &file,
        "--reactors",
        "1",
        "--nbd",
        &format!("unix:{}", scratch.word("nbd.sock")),
    ]);
    for disk in ["a", "b"] {
        let mut client = Client::connect(&scratch.path("nbd.sock"), disk).expect("the daemon serves it");
        let stream = client.stream();
        stream
            .set_read_timeout(Some(Duration::from_secs(20)))
            .expect("a socket has a timeout");
        for (round, command) in (0..200).zip([Command::Read, Command::Write].into_iter().cycle()) {
            let sizes = SIZES.into_iter().cycle().skip(round).take(5);
            let asked: BTreeMap<u64, usize> = sizes
                .map(|bytes| (send(&mut client, command, bytes), bytes))
                .collect();
            for _ in &asked {
                let cookie = client
                    .reply()
                    .unwrap_or_else(|error| panic!("round {round} of {command:?} on {disk}: {error}"));
                if command == Command::Read {
                    let mut data = vec![1; asked[&cookie]];
                    client
                        .stream()
                        .read_exact(&mut data)
                        .expect("the data that was announced");
                }
            }
        }
    }
    // If a request were left, the daemon would wait for it and fail.
    daemon.stop();
}

fn send(client: &mut Client, command: Command, bytes: usize) -> u64 {
    let data = if command == Command::Write {
        vec![0; bytes]
    } else {
        Vec::new()
    };
    client
        .send(command, 0, 0, bytes as u32, &data)
        .expect("the daemon takes it")
}

/// Around the sizes at which requests are split and limits apply.
const SIZES: [usize; 7] = [
    (1 << 20) + 4096,
    1 << 20,
    68 << 10,
    (256 << 10) + 4096,
    4096,
    (2 << 20) + (288 << 10),
    28 << 10,
];
