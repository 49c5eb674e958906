//! The attacked tenant: steady load on two connections that checks every byte, and a visitor that
//! connects repeatedly and must be accepted each time.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::connection::Connection;
use crate::history::{History, content};
use crate::load::{Load, Trouble, read_all};
use crate::medium::SECTOR_BYTES;
use anyhow::{Context, Result, anyhow, ensure};
use blkmq_nbd::codec::CommandFlags;
use blkmq_nbd::codec::request::{Command, RequestHeader};

/// A tenant whose load runs.
#[derive(Debug)]
pub struct Tenant {
    thread: Option<JoinHandle<Result<History, Trouble>>>,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    is_over: AtomicBool,
    latencies: Mutex<Vec<Duration>>,
}

impl Tenant {
    /// Checks that the disk has the content that `history` requires, and starts the load.
    ///
    /// # Errors
    /// If the daemon refuses, or the content is wrong.
    pub fn start(socket: &Path, mut history: History, seed: u64) -> Result<Self> {
        let found = read_all(socket, GOOD, GOOD_BYTES)?;
        history
            .crashed(&found)
            .map_err(|wrong| anyhow!("after the daemon's end in order: {}", Trouble::AfterCrash(wrong)))?;
        let mut load = Load::connect(socket, GOOD, CONNECTIONS, seed)?;
        let shared = Arc::new(Shared::default());
        let own = Arc::clone(&shared);
        let work = move || {
            // Relaxed: nothing else is published with it.
            while !own.is_over.load(Ordering::Relaxed) {
                load.run_paced(&mut history, INTERVAL, Instant::now() + SLICE)?;
                let mut latencies = own.latencies.lock().unwrap_or_else(PoisonError::into_inner);
                latencies.extend(load.take_latencies());
            }
            load.drain_and_flush(&mut history)?;
            Ok(history)
        };
        Ok(Self {
            thread: Some(thread::Builder::new().name("tenant".to_owned()).spawn(work)?),
            shared,
        })
    }

    /// Returns the latencies since the last call.
    ///
    /// # Errors
    /// The first fault of the load.
    pub fn take_latencies(&mut self) -> Result<Vec<Duration>> {
        if self.thread.as_ref().is_none_or(JoinHandle::is_finished) {
            self.finish()?;
        }
        let mut latencies = self
            .shared
            .latencies
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        Ok(std::mem::take(&mut *latencies))
    }

    /// Ends the load and flushes its writes. Returns what the disk must hold.
    ///
    /// # Errors
    /// The first fault of the load.
    pub fn finish(&mut self) -> Result<History> {
        self.shared.is_over.store(true, Ordering::Relaxed);
        let thread = self.thread.take().context("the tenant has ended already")?;
        let ended = thread.join().map_err(|_| anyhow!("the tenant has panicked"))?;
        ended.map_err(|trouble| anyhow!("the tenant was hurt: {trouble}"))
    }
}

impl Drop for Tenant {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Relaxed);
    }
}

/// A client that connects anew for each read of a disk that does not change.
#[derive(Debug)]
pub struct Visitor {
    socket: PathBuf,
}

/// The results of a visitor.
#[derive(Clone, Copy, Debug, Default)]
pub struct Visits {
    /// How many times it read the disk.
    pub count: u64,
    /// How many times it was refused and tried again.
    pub refused: u64,
    /// The longest time from connecting to the end of the check.
    pub longest: Duration,
}

impl Visitor {
    /// Writes the content that the visits check.
    ///
    /// # Errors
    /// If a write fails.
    pub fn new(socket: &Path) -> Result<Self> {
        fill(socket, GUEST, GUEST_BYTES, |sector| content(sector, VISITORS))?;
        Ok(Self {
            socket: socket.to_owned(),
        })
    }

    /// Connects and reads until `end`. If it `may_be_refused`, it tries again for a while: a daemon
    /// that was stopped finds that all its deadlines have passed.
    ///
    /// # Errors
    /// If it is refused, or the content is wrong.
    pub fn visit(&self, end: Instant, may_be_refused: bool) -> Result<Visits> {
        let (mut visits, mut first_try) = (Visits::default(), Instant::now());
        while visits.count == 0 || Instant::now() + VISIT_INTERVAL < end {
            let start = Instant::now();
            let found = match read_all(&self.socket, GUEST, GUEST_BYTES) {
                Ok(found) => found,
                Err(_) if may_be_refused && first_try.elapsed() < LET_IN_TIME_MAX => {
                    visits.refused += 1;
                    thread::sleep(COME_AGAIN);
                    continue;
                }
                Err(error) => return Err(error.context("a visitor was hurt")),
            };
            let mut sectors = found.chunks(SECTOR_BYTES).enumerate();
            let wrong = sectors.find(|(sector, data)| content(*sector, VISITORS)[..] != **data);
            ensure!(
                wrong.is_none(),
                "a visitor found something else in sector {}",
                wrong.map_or(0, |it| it.0)
            );
            visits.count += 1;
            visits.longest = visits.longest.max(start.elapsed());
            thread::sleep(VISIT_INTERVAL);
            first_try = Instant::now();
        }
        Ok(visits)
    }
}

/// Writes each sector of a disk.
///
/// # Errors
/// If a write fails.
pub fn fill(
    socket: &Path,
    export: &str,
    bytes: usize,
    sector: impl Fn(usize) -> [u8; SECTOR_BYTES],
) -> Result<()> {
    let (mut connection, mut ended) = (Connection::open(socket, export)?, Vec::new());
    for offset in (0..bytes).step_by(FILL_BYTES) {
        let sectors = offset / SECTOR_BYTES..(offset + FILL_BYTES) / SECTOR_BYTES;
        let data: Vec<u8> = sectors.flat_map(&sector).collect();
        let header = RequestHeader {
            cookie: 0,
            offset: offset as u64,
            length: FILL_BYTES as u64,
            command: Command::WRITE,
            flags: CommandFlags::NONE,
        };
        connection.send(header, &data, 0, ())?;
        while ended.is_empty() {
            ensure!(connection.receive(&mut ended)?, "the server has hung up");
        }
        let error = ended.pop().map_or(0, |written| written.error);
        ensure!(error == 0, "filling disk {export} failed with error {error}");
    }
    Ok(())
}

/// The tenant's disk.
pub const GOOD: &str = "good";
/// Size of [`GOOD`].
pub const GOOD_BYTES: usize = 4 << 20;
/// The visitor's disk.
pub const GUEST: &str = "guest";
/// Size of [`GUEST`].
pub const GUEST_BYTES: usize = 1 << 20;
const CONNECTIONS: usize = 2;
/// Time between two requests: 1000 per second, less than the daemon could do.
const INTERVAL: Duration = Duration::from_millis(1);
/// Time between two checks whether the load must end.
const SLICE: Duration = Duration::from_millis(50);
/// Limit on the duration of a visit.
pub const LET_IN_TIME_MAX: Duration = Duration::from_millis(1500);
const COME_AGAIN: Duration = Duration::from_millis(10);
const VISIT_INTERVAL: Duration = Duration::from_millis(50);
/// The version that the visitor's disk holds.
const VISITORS: u64 = 1;
const FILL_BYTES: usize = 256 << 10;
