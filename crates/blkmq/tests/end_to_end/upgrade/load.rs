//! Clients that write, read and check without a pause, each on blocks of its own, with several requests on their way at a time.

use std::io::Read;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::common::nbd::{Client, Command};
use crate::common::pattern::{BLOCK, block};

/// The clients. A request that fails, a connection that is lost, and a byte that is wrong, panic.
pub(super) struct Load {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    is_over: AtomicBool,
    requests: AtomicU64,
    slowest_ns: AtomicU64,
}

impl Load {
    pub(super) fn start(socket: &Path, disk: &str, clients: u64) -> Load {
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

    pub(super) fn forget_slowest(&self) {
        self.shared.slowest_ns.store(0, Ordering::Relaxed);
    }

    /// How long the slowest batch of requests took since then.
    pub(super) fn slowest(&self) -> Duration {
        Duration::from_nanos(self.shared.slowest_ns.load(Ordering::Relaxed))
    }

    /// Ends the load of clients that have lost their daemon.
    pub(super) fn give_up(self) {
        self.shared.is_over.store(true, Ordering::Relaxed);
        self.threads.into_iter().for_each(|thread| drop(thread.join()));
    }

    /// Ends the load. Returns how many requests there were.
    pub(super) fn stop(self) -> u64 {
        self.shared.is_over.store(true, Ordering::Relaxed);
        for thread in self.threads {
            thread.join().expect("no client saw an error, or a wrong byte");
        }
        self.shared.requests.load(Ordering::Relaxed)
    }
}

fn run(mut client: Client, number: u64, shared: &Shared) {
    let first = number * BLOCKS;
    for generation in 1.. {
        for batch in 0..BLOCKS / BATCH {
            if shared.is_over.load(Ordering::Relaxed) {
                return;
            }
            let blocks = first + batch * BATCH..first + (batch + 1) * BATCH;
            let start = Instant::now();
            write_all(&mut client, blocks.clone(), generation);
            read_all(&mut client, blocks, generation);
            shared
                .slowest_ns
                .fetch_max(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
            shared.requests.fetch_add(2 * BATCH, Ordering::Relaxed);
        }
        client.flush().expect("a flush");
    }
}

fn write_all(client: &mut Client, blocks: std::ops::Range<u64>, generation: u64) {
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
        let at = sent.iter().position(|cookie| *cookie == answered);
        sent.swap_remove(at.expect("a reply to what was asked, and once"));
    }
}

fn read_all(client: &mut Client, blocks: std::ops::Range<u64>, generation: u64) {
    let send = |number: u64| {
        let cookie = client.send(Command::Read, 0, number * BLOCK as u64, BLOCK as u32, &[]);
        (cookie.expect("a read is sent"), number)
    };
    let mut sent: Vec<(u64, u64)> = blocks.map(send).collect();
    for _ in 0..sent.len() {
        let answered = client.reply().expect("a reply");
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
