//! Decides what is sent to a disk, and checks what comes back: writes, forced writes, zeroes, discards, flushes and reads at
//! random, on several connections, each with several requests under way. [`crate::history`] knows what is right.

use std::ops::Range;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use blkmq_export::nbd::codec::request::{Command, RequestHeader};
use blkmq_export::nbd::codec::{CommandFlags, TransmissionFlags};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::Timespec;

use crate::chance::Chance;
use crate::connection::{Connection, Ended};
use crate::history::{History, Kind, Wrong, content};
use crate::medium::SECTOR_BYTES;

/// Load on one disk, by one thread.
#[derive(Debug)]
pub struct Load {
    connections: Vec<Connection<Request>>,
    chance: Chance,
    counts: Counts,
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
}

/// A request under way.
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
        let connect = |_| {
            let connection = Connection::open(socket, export)?;
            let flags = connection.agreed().flags;
            ensure!(flags.contains(USED), "the server has {flags:?}, wanted {USED:?}");
            Ok(connection)
        };
        Ok(Self {
            connections: (0..connections).map(connect).collect::<Result<_>>()?,
            chance: Chance::new(seed),
            counts: Counts::default(),
        })
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
            for index in self.ready()? {
                let is_there = self.connections[index].receive(&mut ended)?;
                if !is_there {
                    return Err(anyhow::anyhow!("the server has hung up").into());
                }
            }
            for ended in ended.drain(..) {
                self.end(ended, history, allowed)?;
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

    /// Returns the connections on which something has come.
    fn ready(&self) -> Result<Vec<usize>> {
        let mut fds: Vec<PollFd<'_>> = self
            .connections
            .iter()
            .map(|each| PollFd::new(each, PollFlags::IN))
            .collect();
        let limit = Timespec {
            tv_sec: SILENCE_MAX_S,
            tv_nsec: 0,
        };
        let count = poll(&mut fds, Some(&limit)).context("waiting for replies")?;
        ensure!(count > 0, "no reply within {SILENCE_MAX_S} s");
        let ready = fds.iter().enumerate().filter(|(_, fd)| !fd.revents().is_empty());
        Ok(ready.map(|(index, _)| index).collect())
    }

    /// Sends a request of the kind and range that chance has. Returns false if it can be none now.
    fn send(&mut self, index: usize, history: &mut History) -> Result<bool> {
        let kind = self.chance.below(100);
        if kind < FLUSH_PERCENT {
            let sent = history.flush_sent();
            return self.issue(
                index,
                Command::FLUSH,
                CommandFlags::NONE,
                0..0,
                &[],
                Request::Flush { sent },
            );
        }
        let Some(range) = self.draw_range(history) else {
            return Ok(false);
        };
        if kind < FLUSH_PERCENT + READ_PERCENT {
            history.read_sent(range.clone());
            let request = Request::Read { range: range.clone() };
            return self.issue(index, Command::READ, CommandFlags::NONE, range, &[], request);
        }
        let is_forced = self.chance.below(5) == 0;
        let flags = CommandFlags::NONE.with_if(is_forced, CommandFlags::FUA);
        let (command, flags, kind) = match self.chance.below(10) {
            0 => (Command::TRIM, flags, Kind::Discard),
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
        let is_sent = self.connections[index].send(header, data, reads, request)?;
        ensure!(is_sent, "the server has hung up");
        Ok(true)
    }

    /// Draws a range on which nothing is under way.
    fn draw_range(&mut self, history: &History) -> Option<Range<usize>> {
        for _ in 0..TRIES_MAX {
            let len_max = if self.chance.below(8) == 0 {
                LONG_SECTORS
            } else {
                SHORT_SECTORS
            };
            let len = 1 + self.chance.below(len_max) as usize;
            let start = self.chance.below((history.sectors() - len + 1) as u64) as usize;
            if !history.is_busy(start..start + len) {
                return Some(start..start + len);
            }
        }
        None
    }

    fn end(&mut self, ended: Ended<Request>, history: &mut History, allowed: Allowed) -> Result<(), Trouble> {
        let is_done = ended.error == 0;
        if is_done {
            self.counts.done += 1;
        } else {
            self.counts.failed += 1;
            let error = std::io::Error::from_raw_os_error(ended.error);
            if !allowed.failures {
                return Err(anyhow::anyhow!("{:?} failed: {error}", ended.tag).into());
            }
        }
        match ended.tag {
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
                .read_ended(range, &ended.data, allowed.stale_reads)
                .map_err(Trouble::Read)?,
            Request::Read { .. } => return Err(anyhow::anyhow!("a read failed").into()),
        }
        Ok(())
    }
}

/// What the load needs of a server.
const USED: TransmissionFlags = TransmissionFlags::SEND_FLUSH
    .with(TransmissionFlags::SEND_FUA)
    .with(TransmissionFlags::SEND_TRIM)
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
const SILENCE_MAX_S: i64 = 30;
