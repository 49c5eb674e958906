//! The load during upgrades: clients that write, read and check without a pause, each on its own blocks, with
//! several requests under way.

use std::io::Read;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::common::nbd::{Client, Command};
use crate::common::pattern::{BLOCK, block};

/// The clients. A failed request, a lost connection or a wrong byte panics.
pub(crate) struct Load {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<Written>>,
}

#[derive(Default)]
struct Shared {
    is_over: AtomicBool,
    requests: AtomicU64,
    slowest_ns: AtomicU64,
    gap: LongestGap,
}

/// The longest time between two answers to one client.
#[derive(Debug, Default)]
pub(crate) struct LongestGap(AtomicU64);

/// What a client wrote last.
struct Written {
    first: u64,
    /// The blocks before this one have this generation, the others the previous one.
    until: u64,
    generation: u64,
}

impl LongestGap {
    /// Records an answer; `last` is the time of the previous one.
    pub(crate) fn answered(&self, last: &mut Instant) {
        let now = Instant::now();
        let gap = now.duration_since(std::mem::replace(last, now));
        self.0.fetch_max(gap.as_nanos() as u64, Ordering::Relaxed);
    }

    /// Returns the longest gap since the last call.
    pub(crate) fn take(&self) -> Duration {
        Duration::from_nanos(self.0.swap(0, Ordering::Relaxed))
    }
}

impl Load {
    pub(crate) fn start(socket: &Path, disk: &str, clients: u64) -> Load {
        let shared = Arc::new(Shared::default());
        let threads = (0..clients).map(|number| {
            let (client, shared) = (
                Client::connect(socket, disk).expect("it is served"),
                Arc::clone(&shared),
            );
            std::thread::spawn(move || run(client, number, &shared))
        });
        Load {
            threads: threads.collect(),
            shared,
        }
    }

    pub(crate) fn forget_slowest(&self) {
        self.shared.slowest_ns.store(0, Ordering::Relaxed);
    }

    /// Returns how long the slowest batch of requests took.
    pub(crate) fn slowest(&self) -> Duration {
        Duration::from_nanos(self.shared.slowest_ns.load(Ordering::Relaxed))
    }

    /// Returns the longest time that a client was without an answer since the last call.
    pub(crate) fn take_longest_gap(&self) -> Duration {
        self.shared.gap.take()
    }

    /// Ends the load of clients that have lost their daemon.
    pub(crate) fn give_up(self) {
        self.shared.is_over.store(true, Ordering::Relaxed);
        self.threads.into_iter().for_each(|thread| drop(thread.join()));
    }

    /// Ends the load. Returns how many requests there were.
    pub(crate) fn stop(self) -> u64 {
        self.end().0
    }

    /// Ends the load, and checks the image against what was written last. Returns how many requests
    /// there were.
    pub(crate) fn stop_and_verify(self, image: &Path) -> u64 {
        self.stop_and_verify_what(|| std::fs::read(image).expect("the image"))
    }

    /// The same against what `read` finds after the end of the load.
    pub(crate) fn stop_and_verify_what(self, read: impl FnOnce() -> Vec<u8>) -> u64 {
        let (requests, written) = self.end();
        let image = read();
        for Written {
            first,
            until,
            generation,
        } in written
        {
            for number in first..first + BLOCKS {
                let at = number as usize * BLOCK;
                let expected = if number < until {
                    generation
                } else {
                    generation - 1
                };
                assert!(
                    image[at..at + BLOCK] == block(number, expected),
                    "block {number} is not of generation {expected}"
                );
            }
        }
        requests
    }

    fn end(self) -> (u64, Vec<Written>) {
        self.shared.is_over.store(true, Ordering::Relaxed);
        let threads = self.threads.into_iter();
        let written = threads.map(|thread| thread.join().expect("no client saw an error, or a wrong byte"));
        let written = written.collect();
        (self.shared.requests.load(Ordering::Relaxed), written)
    }
}

fn run(mut client: Client, number: u64, shared: &Shared) -> Written {
    let first = number * BLOCKS;
    let mut last = Instant::now();
    for generation in 1.. {
        for batch in 0..BLOCKS / BATCH {
            if shared.is_over.load(Ordering::Relaxed) {
                return Written {
                    first,
                    until: first + batch * BATCH,
                    generation,
                };
            }
            let blocks = first + batch * BATCH..first + (batch + 1) * BATCH;
            let start = Instant::now();
            let mut answered = || shared.gap.answered(&mut last);
            write_all(&mut client, blocks.clone(), generation, &mut answered);
            read_all(&mut client, blocks, generation, &mut answered);
            shared
                .slowest_ns
                .fetch_max(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
            shared.requests.fetch_add(2 * BATCH, Ordering::Relaxed);
        }
        client.flush().expect("a flush");
    }
    unreachable!("there are enough generations")
}

fn write_all(
    client: &mut Client,
    blocks: std::ops::Range<u64>,
    generation: u64,
    answered_one: &mut impl FnMut(),
) {
    let send = |number: u64| {
        let data = block(number, generation);
        client.send(Command::Write, 0, number * BLOCK as u64, BLOCK as u32, &data)
    };
    let mut sent: Vec<u64> = blocks
        .map(send)
        .map(|cookie| cookie.expect("a write is sent"))
        .collect();
    for _ in 0..sent.len() {
        let answered = client.reply().expect("a reply");
        answered_one();
        let at = sent.iter().position(|cookie| *cookie == answered);
        sent.swap_remove(at.expect("a reply to what was asked, and once"));
    }
}

fn read_all(
    client: &mut Client,
    blocks: std::ops::Range<u64>,
    generation: u64,
    answered_one: &mut impl FnMut(),
) {
    let send = |number: u64| {
        let cookie = client.send(Command::Read, 0, number * BLOCK as u64, BLOCK as u32, &[]);
        (cookie.expect("a read is sent"), number)
    };
    let mut sent: Vec<(u64, u64)> = blocks.map(send).collect();
    for _ in 0..sent.len() {
        let answered = client.reply().expect("a reply");
        answered_one();
        let at = sent.iter().position(|(cookie, _)| *cookie == answered);
        let (_, number) = sent.swap_remove(at.expect("a reply to what was asked, and once"));
        let mut data = vec![0; BLOCK];
        client.stream().read_exact(&mut data).expect("the data of a read");
        assert!(
            data == block(number, generation),
            "block {number}, generation {generation}"
        );
    }
}

const BATCH: u64 = 16;
/// Blocks of each client.
const BLOCKS: u64 = 512;
