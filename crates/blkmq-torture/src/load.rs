//! A verified load on a disk: writes, forced writes, zeroes, discards, flushes and reads at random, on
//! several connections, each with several requests under way. [`crate::history`] knows what is right.

use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use blkmq_nbd::codec::request::{Command, RequestHeader};
use blkmq_nbd::codec::{CommandFlags, TransmissionFlags};
use blkmq_testkit::Random;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::Timespec;

use crate::connection::{Connection, Ended};
use crate::history::{History, Kind, Wrong, content};
use crate::medium::SECTOR_BYTES;

/// Load on one disk, by one thread.
#[derive(Debug)]
pub struct Load {
    connections: Vec<Connection<Sent>>,
    random: Random,
    counts: Counts,
    /// From before a request was sent until its reply was read.
    latencies: Vec<Duration>,
    /// So many of a hundred requests are flushes.
    flush_percent: u64,
    /// Some are discards.
    trims: bool,
}

/// How many requests ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Well, flushes too.
    pub done: u64,
    /// Flushes that were acknowledged.
    pub flushes: u64,
    /// Forced changes that were acknowledged.
    pub forced: u64,
    /// With an error.
    pub failed: u64,
}

/// What may go wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allowed {
    /// Requests may fail.
    pub failures: bool,
    /// Reads may bring what was there before changes that were answered, and that no flush has covered: Linux drops pages that it could
    /// not write out, and tells the next sync.
    pub stale_reads: bool,
    /// Such reads may bring anything, too: of an image, these pages are new clusters, with copies around the data, and
    /// below them is what their space in the file had before.
    pub lost_clusters: bool,
}

/// A request under way, and since when.
#[derive(Clone, Debug)]
struct Sent {
    request: Request,
    at: Instant,
}

#[derive(Clone, Debug)]
enum Request {
    Change { range: Range<usize>, is_forced: bool },
    Read { range: Range<usize> },
    Flush { sent: u64 },
}

/// Why the load came to an end that it should not have.
#[derive(Debug)]
pub enum Trouble {
    /// A read has brought what the disk may not hold.
    Read(Wrong),
    /// A crash has left what it may not.
    AfterCrash(Wrong),
    /// Something else.
    Other(anyhow::Error),
}

impl Counts {
    /// Returns how many ended, well or not.
    pub fn ended(&self) -> u64 {
        self.done + self.failed
    }
}

impl Trouble {
    /// Says where it was met.
    pub fn at(self, place: &str) -> Self {
        let at = |wrong| match wrong {
            Wrong::Lost(what) => Wrong::Lost(format!("{what}\nat {place}")),
            Wrong::Foreign(what) => Wrong::Foreign(format!("{what}\nat {place}")),
        };
        match self {
            Self::Read(wrong) => Self::Read(at(wrong)),
            Self::AfterCrash(wrong) => Self::AfterCrash(at(wrong)),
            Self::Other(error) => Self::Other(error.context(place.to_owned())),
        }
    }
}

impl From<anyhow::Error> for Trouble {
    fn from(error: anyhow::Error) -> Self {
        Self::Other(error)
    }
}

impl Load {
    /// Connects so many times.
    ///
    /// # Errors
    /// If the server refuses, or does not have all that the load uses.
    pub fn connect(socket: &Path, export: &str, connections: usize, seed: u64) -> Result<Self> {
        let mut load = Self::connect_without_trims(socket, export, connections, seed)?;
        for connection in &load.connections {
            let flags = connection.agreed().flags;
            ensure!(
                flags.contains(TransmissionFlags::SEND_TRIM),
                "the server has {flags:?}, and no SEND_TRIM"
            );
        }
        load.trims = true;
        Ok(load)
    }

    /// The same on an encrypted disk, which takes no discards.
    ///
    /// # Errors
    /// As for [`Self::connect`].
    pub(crate) fn connect_without_trims(
        socket: &Path,
        export: &str,
        connections: usize,
        seed: u64,
    ) -> Result<Self> {
        let connect = |_| {
            let connection = Connection::open(socket, export)?;
            let flags = connection.agreed().flags;
            ensure!(flags.contains(USED), "the server has {flags:?}, wanted {USED:?}");
            Ok(connection)
        };
        Ok(Self {
            connections: (0..connections).map(connect).collect::<Result<_>>()?,
            random: Random::new(seed),
            counts: Counts::default(),
            latencies: Vec::new(),
            flush_percent: FLUSH_PERCENT,
            trims: false,
        })
    }

    /// Has every third request be a flush.
    pub fn flush_often(&mut self) {
        self.flush_percent = 33;
    }

    /// Keeps the connections busy until `requests` have ended. As many as are under way then stay so.
    ///
    /// # Errors
    /// What was wrong, or that the server is gone.
    pub fn run(&mut self, history: &mut History, requests: u64, allowed: Allowed) -> Result<Counts, Trouble> {
        let mut ended = Vec::new();
        while self.counts.ended() < requests {
            for index in 0..self.connections.len() {
                while self.connections[index].depth() < DEPTH && self.send(index, history)? {}
            }
            let ready = self.ready(SILENCE_MAX)?;
            if ready.is_empty() {
                return Err(anyhow!("no reply within {SILENCE_MAX:?}").into());
            }
            self.take_replies(&ready, &mut ended)?;
            for ended in ended.drain(..) {
                self.end(ended, history, allowed)?;
            }
        }
        Ok(self.counts)
    }

    /// Sends a request every `interval` until `end`, on each connection in turn, and checks the replies. Nothing may fail.
    /// What would be the 9th under way on a connection is left out.
    ///
    /// # Errors
    /// What was wrong, or that the server is gone.
    pub fn run_paced(
        &mut self,
        history: &mut History,
        interval: Duration,
        end: Instant,
    ) -> Result<(), Trouble> {
        let (mut ended, mut due, mut last_reply) = (Vec::new(), Instant::now(), Instant::now());
        for turn in (0..self.connections.len()).cycle() {
            if due >= end {
                break;
            }
            if self.connections[turn].depth() < DEPTH {
                self.send(turn, history)?;
            }
            due += interval;
            loop {
                let ready = self.ready(due.saturating_duration_since(Instant::now()))?;
                self.take_replies(&ready, &mut ended)?;
                let is_idle = self.connections.iter().all(|each| each.depth() == 0);
                if is_idle || !ready.is_empty() {
                    last_reply = Instant::now();
                }
                if last_reply.elapsed() > SILENCE_MAX {
                    return Err(anyhow!("no reply within {SILENCE_MAX:?}").into());
                }
                for ended in ended.drain(..) {
                    self.end(ended, history, Allowed::NOTHING)?;
                }
                if Instant::now() >= due {
                    break;
                }
            }
        }
        Ok(())
    }

    /// Returns how long each request took that has ended since the last call.
    pub fn take_latencies(&mut self) -> Vec<Duration> {
        std::mem::take(&mut self.latencies)
    }

    /// Waits until nothing is under way, flushes, and so makes everything durable that was written.
    ///
    /// # Errors
    /// What was wrong, or that the server is gone.
    pub fn drain_and_flush(&mut self, history: &mut History) -> Result<Counts, Trouble> {
        let mut ended = Vec::new();
        for is_flushed in [false, true] {
            if is_flushed {
                self.send_flush(0, history)?;
            }
            while self.connections.iter().any(|each| each.depth() > 0) {
                let ready = self.ready(SILENCE_MAX)?;
                if ready.is_empty() {
                    return Err(anyhow!("no reply within {SILENCE_MAX:?}").into());
                }
                self.take_replies(&ready, &mut ended)?;
                for ended in ended.drain(..) {
                    self.end(ended, history, Allowed::NOTHING)?;
                }
            }
        }
        Ok(self.counts)
    }

    /// Takes the last replies of a server that was killed.
    ///
    /// # Errors
    /// What was wrong with them.
    pub fn drain(mut self, history: &mut History, allowed: Allowed) -> Result<Counts, Trouble> {
        let mut ended = Vec::new();
        for connection in &mut self.connections {
            while connection.receive(&mut ended)? {}
        }
        for ended in ended {
            self.end(ended, history, allowed)?;
        }
        Ok(self.counts)
    }

    /// Waits for at most `limit`, and returns the connections on which something has come.
    fn ready(&self, limit: Duration) -> Result<Vec<usize>> {
        let mut fds: Vec<PollFd<'_>> = self
            .connections
            .iter()
            .map(|each| PollFd::new(each, PollFlags::IN))
            .collect();
        let limit = Timespec::try_from(limit).context("a time to wait")?;
        poll(&mut fds, Some(&limit)).context("waiting for replies")?;
        let ready = fds.iter().enumerate().filter(|(_, fd)| !fd.revents().is_empty());
        Ok(ready.map(|(index, _)| index).collect())
    }

    fn take_replies(&mut self, ready: &[usize], ended: &mut Vec<Ended<Sent>>) -> Result<()> {
        for index in ready {
            let is_there = self.connections[*index].receive(ended)?;
            ensure!(is_there, "the server has hung up");
        }
        Ok(())
    }

    /// Sends a request of the kind and range that chance has. Returns false if it can be none now.
    fn send(&mut self, index: usize, history: &mut History) -> Result<bool> {
        let kind = self.random.below(100);
        if kind < self.flush_percent {
            return self.send_flush(index, history);
        }
        let Some(range) = self.draw_range(history) else {
            return Ok(false);
        };
        if kind < self.flush_percent + READ_PERCENT {
            history.read_sent(range.clone());
            let request = Request::Read { range: range.clone() };
            return self.issue(index, Command::READ, CommandFlags::NONE, range, &[], request);
        }
        let is_forced = self.random.below(5) == 0;
        let flags = CommandFlags::NONE.with_if(is_forced, CommandFlags::FUA);
        let (command, flags, kind) = match self.random.below(10) {
            0 if self.trims => (Command::TRIM, flags, Kind::Discard),
            1 => (Command::WRITE_ZEROES, flags, Kind::Zero),
            2 => (
                Command::WRITE_ZEROES,
                flags.with(CommandFlags::NO_HOLE),
                Kind::Zero,
            ),
            _ => (Command::WRITE, flags, Kind::Write),
        };
        let change = history.change_sent(range.clone(), kind);
        let data: Vec<u8> = match kind {
            Kind::Write => range.clone().flat_map(|index| content(index, change)).collect(),
            Kind::Zero | Kind::Discard => Vec::new(),
        };
        let request = Request::Change {
            range: range.clone(),
            is_forced,
        };
        self.issue(index, command, flags, range, &data, request)
    }

    fn send_flush(&mut self, index: usize, history: &mut History) -> Result<bool> {
        let sent = history.flush_sent();
        let request = Request::Flush { sent };
        self.issue(index, Command::FLUSH, CommandFlags::NONE, 0..0, &[], request)
    }

    fn issue(
        &mut self,
        index: usize,
        command: Command,
        flags: CommandFlags,
        range: Range<usize>,
        data: &[u8],
        request: Request,
    ) -> Result<bool> {
        let header = RequestHeader {
            cookie: 0,
            offset: (range.start * SECTOR_BYTES) as u64,
            length: (range.len() * SECTOR_BYTES) as u64,
            command,
            flags,
        };
        let reads = if command == Command::READ {
            range.len() * SECTOR_BYTES
        } else {
            0
        };
        let at = Instant::now();
        let is_sent = self.connections[index].send(header, data, reads, Sent { request, at })?;
        ensure!(is_sent, "the server has hung up");
        Ok(true)
    }

    /// Draws a range on which nothing is under way.
    fn draw_range(&mut self, history: &History) -> Option<Range<usize>> {
        for _ in 0..TRIES_MAX {
            let len_max = if self.random.below(8) == 0 {
                LONG_SECTORS
            } else {
                SHORT_SECTORS
            };
            let len = 1 + self.random.below(len_max) as usize;
            let start = self.random.below((history.sectors() - len + 1) as u64) as usize;
            if !history.is_busy(start..start + len) {
                return Some(start..start + len);
            }
        }
        None
    }

    fn end(&mut self, ended: Ended<Sent>, history: &mut History, allowed: Allowed) -> Result<(), Trouble> {
        let is_done = ended.error == 0;
        let Sent { request, at } = ended.tag;
        self.latencies.push(at.elapsed());
        if is_done {
            self.counts.done += 1;
        } else {
            self.counts.failed += 1;
            let error = std::io::Error::from_raw_os_error(ended.error);
            if !allowed.failures {
                return Err(anyhow!("{request:?} failed: {error}").into());
            }
        }
        match request {
            Request::Flush { sent } if is_done => {
                self.counts.flushes += 1;
                history.flush_ended(sent);
            }
            Request::Flush { .. } => {}
            Request::Change { range, is_forced } => {
                self.counts.forced += u64::from(is_forced && is_done);
                history.change_ended(range, is_done, is_forced);
            }
            Request::Read { range } if is_done => history
                .read_ended(range, &ended.data, allowed)
                .map_err(Trouble::Read)?,
            Request::Read { .. } => return Err(anyhow!("a read failed").into()),
        }
        Ok(())
    }
}

impl Allowed {
    /// Everything has to go well.
    pub const NOTHING: Self = Self {
        failures: false,
        stale_reads: false,
        lost_clusters: false,
    };
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Read(Wrong::Lost(what)) | Self::AfterCrash(Wrong::Lost(what)) => write!(f, "LOST: {what}"),
            Self::Read(Wrong::Foreign(what)) | Self::AfterCrash(Wrong::Foreign(what)) => {
                write!(f, "FOREIGN: {what}")
            }
            Self::Other(error) => write!(f, "{error:#}"),
        }
    }
}

/// Reads the first `bytes` of an export, over a connection of its own.
///
/// # Errors
/// If the server refuses, or a read fails.
pub fn read_all(socket: &Path, export: &str, bytes: usize) -> Result<Vec<u8>> {
    let mut connection = Connection::open(socket, export)?;
    let (mut found, mut ended) = (Vec::with_capacity(bytes), Vec::new());
    for offset in (0..bytes).step_by(READ_ALL_BYTES) {
        let length = READ_ALL_BYTES.min(bytes - offset);
        let header = RequestHeader {
            cookie: 0,
            offset: offset as u64,
            length: length as u64,
            command: Command::READ,
            flags: CommandFlags::NONE,
        };
        connection.send(header, &[], length, ())?;
        while ended.is_empty() {
            ensure!(connection.receive(&mut ended)?, "the server has hung up");
        }
        let read = ended.pop().expect("looked at above");
        ensure!(
            read.error == 0,
            "a read of the whole disk failed with error {}",
            read.error
        );
        found.extend(read.data);
    }
    Ok(found)
}

/// What the load needs of a server.
const USED: TransmissionFlags = TransmissionFlags::SEND_FLUSH
    .with(TransmissionFlags::SEND_FUA)
    .with(TransmissionFlags::SEND_WRITE_ZEROES)
    .with(TransmissionFlags::CAN_MULTI_CONN);
/// Requests under way on each connection.
const DEPTH: usize = 8;
const FLUSH_PERCENT: u64 = 8;
const READ_PERCENT: u64 = 20;
/// Sectors of most requests, and of some.
const SHORT_SECTORS: u64 = 16;
const LONG_SECTORS: u64 = 256;
/// How often a range is drawn that nothing is under way on.
const TRIES_MAX: u32 = 16;
/// A server that says nothing for so long has lost a request.
const SILENCE_MAX: Duration = Duration::from_secs(30);
const READ_ALL_BYTES: usize = 256 << 10;
