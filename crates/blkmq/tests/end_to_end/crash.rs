//! Tests whether data that was acknowledged as flushed is there after the daemon was killed during writes.
//!
//! Several writers with a connection each overwrite the blocks of their own region repeatedly, each
//! block with its place and a rising generation in every sector. A writer records, per block, which
//! generation it has sent, and which one an acknowledged flush has covered. After the kill, every
//! sector must hold a generation from the second to the first.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use blkmq_testkit::Random;
use blkmq_torture::mount::{Cache, Mount};
use rustix::process::Signal;

use crate::common::nbd::Client;
use crate::common::pattern::{BLOCK, SECTOR, block, generation};
use crate::common::{Daemon, Scratch};

#[test]
fn flushed_writes_survive_kill_9_in_the_middle_of_others() {
    let scratch = Scratch::new();
    let image = scratch.image("vm1.raw", DISK_BYTES);
    let disk = format!("name=vm1,file={image}");
    let mut history = History::new();
    for round in 0..KILLS {
        let daemon = Daemon::serve(&scratch, &[&disk]);
        let socket = scratch.path("nbd.sock");
        let flushed_before = history.flushes();
        write_until_killed(
            &socket,
            &mut history,
            daemon,
            Duration::from_millis(150 + 137 * round),
        );
        assert!(
            history.flushes() > flushed_before,
            "round {round}: nothing was flushed before the kill: no test"
        );

        let daemon = Daemon::serve(&scratch, &[&disk]);
        history.check(&socket, round);
        daemon.stop();
    }
    assert!(
        history.in_doubt_seen > 0,
        "no kill came in the middle of a write: no test"
    );
}

/// On a filesystem that forgets: the page cache of this host survives the daemon.
#[test]
fn forced_writes_survive_a_crash_without_a_flush() {
    let scratch = Scratch::new();
    let dir = scratch.path("mount");
    let mount = std::fs::create_dir(&dir).and_then(|()| Mount::new(&dir, 1 << 20, Cache::Back));
    let mount = match mount {
        Ok(mount) => mount,
        Err(error) => return blkmq_testkit::skip(&format!("no FUSE here: {error}")),
    };
    let disk = format!("name=vm1,file={}", mount.image().display());
    let daemon = Daemon::serve(&scratch, &[&disk]);
    let mut client = Client::connect(&scratch.path("nbd.sock"), "vm1").expect("the daemon serves it");
    for number in 0..FORCED {
        let block = block(number, number + 1);
        client
            .write_through(number * BLOCK as u64, &block)
            .expect("a forced write");
        // What only the page cache has is forgotten: else this filesystem forgets nothing.
        client
            .write((FORCED + number) * BLOCK as u64, &block)
            .expect("a write");
    }
    daemon.kill();
    mount
        .wait_closed(Duration::from_secs(10))
        .expect("nobody has it open");
    mount.forget(1);

    let daemon = Daemon::serve(&scratch, &[&disk]);
    let mut client = Client::connect(&scratch.path("nbd.sock"), "vm1").expect("the daemon serves it again");
    let mut is_there = |place: u64, number: u64| {
        let found = client.read(place * BLOCK as u64, BLOCK).expect("a read");
        found == block(number, number + 1)
    };
    for number in 0..FORCED {
        assert!(is_there(number, number), "block {number} is not what was forced");
    }
    let others = (0..FORCED).filter(|number| is_there(FORCED + number, *number));
    assert!((others.count() as u64) < FORCED, "nothing was forgotten: no test");
    daemon.stop();
}

/// What the writers know of every block of the disk.
pub(crate) struct History {
    /// The last generation that was sent, acknowledged or not.
    sent: Vec<u64>,
    /// The last generation that an acknowledged flush has covered.
    flushed: Vec<u64>,
    flushes: u64,
    in_doubt_seen: u64,
}

/// One writer's part of the history, and its random numbers.
struct Writer<'a> {
    client: Client,
    first_block: u64,
    sent: &'a mut [u64],
    flushed: &'a mut [u64],
    /// Acknowledged and not flushed: (block, generation).
    written: Vec<(usize, u64)>,
    random: Random,
}

impl History {
    pub(crate) fn new() -> History {
        let blocks = (WRITERS * REGION_BLOCKS) as usize;
        History {
            sent: vec![0; blocks],
            flushed: vec![0; blocks],
            flushes: 0,
            in_doubt_seen: 0,
        }
    }

    fn flushes(&self) -> u64 {
        self.flushes
    }

    /// Asserts that something was flushed, and something not, when the daemon was killed.
    pub(crate) fn was_a_test(&self) {
        assert!(
            self.flushes > 0 && self.in_doubt_seen > 0,
            "no kill came in the middle of a write: no test"
        );
    }

    /// Reads everything and checks every sector against the history.
    pub(crate) fn check(&mut self, socket: &Path, round: u64) {
        let mut client = Client::connect(socket, "vm1").expect("the daemon serves it again");
        for number in 0..self.sent.len() {
            let found = client
                .read((number * BLOCK) as u64, BLOCK)
                .expect("a read after the restart");
            let (flushed, sent) = (self.flushed[number], self.sent[number]);
            self.in_doubt_seen += u64::from(flushed < sent);
            for (index, sector) in found.chunks(SECTOR).enumerate() {
                let held = generation(number as u64, index as u64, sector)
                    .unwrap_or_else(|wrong| panic!("round {round}: {wrong}"));
                assert!(
                    (flushed..=sent).contains(&held),
                    "round {round}: block {number} sector {index} holds generation {held}: {flushed} was flushed, {sent} sent"
                );
            }
        }
        // Blocks with several possible generations are overwritten in the next round; until then
        // each remains possible.
    }
}

/// Runs the writers until all of them have lost the daemon, which is killed after `time`, or after the first flush if that
/// is later.
pub(crate) fn write_until_killed(socket: &Path, history: &mut History, daemon: Daemon, time: Duration) {
    let flushes = AtomicU64::new(0);
    let region = REGION_BLOCKS as usize;
    let regions = history
        .sent
        .chunks_mut(region)
        .zip(history.flushed.chunks_mut(region));
    std::thread::scope(|scope| {
        for (index, (sent, flushed)) in regions.enumerate() {
            let client = Client::connect(socket, "vm1").expect("the daemon serves it");
            let first_block = index as u64 * REGION_BLOCKS;
            let random = (time.as_millis() as u64) << 8 | (index as u64 + 1);
            let mut writer = Writer {
                client,
                first_block,
                sent,
                flushed,
                written: Vec::new(),
                random: Random::new(random),
            };
            let flushes = &flushes;
            scope.spawn(move || {
                // Ends with the error that the kill causes; the history has the rest.
                while writer.write_batch().and_then(|()| writer.flush()).is_ok() {
                    // Relaxed: a count, read after the scope has joined the threads.
                    flushes.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        std::thread::sleep(time);
        // On a busy machine the first batch may take longer.
        let begun = Instant::now();
        while flushes.load(Ordering::Relaxed) == 0 && begun.elapsed() < FLUSH_MAX {
            std::thread::sleep(Duration::from_millis(10));
        }
        daemon.kill();
    });
    history.flushes += flushes.into_inner();
}

impl Writer<'_> {
    /// Sends a batch of writes to different blocks at once, then collects the replies.
    fn write_batch(&mut self) -> std::io::Result<()> {
        let mut in_flight = Vec::new();
        for _ in 0..BATCH {
            let index = self.random.below(self.sent.len() as u64) as usize;
            if in_flight.iter().any(|(_, other, _)| *other == index) {
                continue;
            }
            let number = self.first_block + index as u64;
            // Recorded before it is sent, because it may be on the disk from then on.
            self.sent[index] += 1;
            let data = block(number, self.sent[index]);
            let command = crate::common::nbd::Command::Write;
            let cookie = self
                .client
                .send(command, 0, number * BLOCK as u64, BLOCK as u32, &data)?;
            in_flight.push((cookie, index, self.sent[index]));
        }
        while !in_flight.is_empty() {
            let cookie = self.client.reply()?;
            let position = in_flight.iter().position(|(sent, ..)| *sent == cookie);
            let (_, index, generation) = in_flight.swap_remove(position.expect("a reply to what was asked"));
            self.written.push((index, generation));
        }
        Ok(())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.client.flush()?;
        for (index, generation) in self.written.drain(..) {
            self.flushed[index] = generation;
        }
        Ok(())
    }
}

#[test]
fn disk_that_lost_a_flushed_block_fails_the_check() {
    let scratch = Scratch::new();
    let image = scratch.image("vm1.raw", DISK_BYTES);
    let daemon = Daemon::serve(&scratch, &[&format!("name=vm1,file={image}")]);
    let mut history = History::new();
    // A block that was flushed according to the history, but never written.
    (history.sent[5], history.flushed[5]) = (1, 1);
    let socket = scratch.path("nbd.sock");
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| history.check(&socket, 0)));
    assert!(caught.is_err(), "a lost block went unnoticed");
    daemon.signal(Signal::TERM);
}

/// The size of the disk that is written, in bytes.
pub(crate) const DISK_BYTES: u64 = WRITERS * REGION_BLOCKS * BLOCK as u64;
const WRITERS: u64 = 3;
const REGION_BLOCKS: u64 = 256;
const BATCH: usize = 24;
const KILLS: u64 = 6;
const FLUSH_MAX: Duration = Duration::from_secs(30);
/// Blocks that are forced, and as many others.
const FORCED: u64 = 64;
