//! The load of a tenant on its disk: as an NBD client on one connection that keeps a number of requests in
//! flight, each followed by the next when it has ended.

use std::fmt;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use blkmq_nbd::client::{Wanted, negotiate};
use blkmq_nbd::codec::reply::ReplyHead;
use blkmq_nbd::codec::request::{Command, RequestHeader};
use blkmq_nbd::codec::{CommandFlags, HeaderStyle};

use super::latencies::Latencies;
use super::stage::{Cue, Phase};

/// What a tenant does: requests of one kind and size, at random places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Job {
    command: Command,
    block_bytes: u32,
    depth: usize,
    /// The least time from one request to the next.
    every: Duration,
}

impl Job {
    pub(super) fn reads(block_bytes: u32, depth: usize) -> Self {
        Self {
            command: Command::READ,
            block_bytes,
            depth,
            every: Duration::ZERO,
        }
    }

    pub(super) fn writes(block_bytes: u32, depth: usize) -> Self {
        Self {
            command: Command::WRITE,
            block_bytes,
            depth,
            every: Duration::ZERO,
        }
    }

    pub(super) fn with_depth(self, depth: usize) -> Self {
        Self { depth, ..self }
    }

    /// One request at a time, so many a second at most, with a pause after each.
    pub(super) fn with_rate(self, per_second: u32) -> Self {
        let every = Duration::from_secs(1) / per_second;
        Self {
            depth: 1,
            every,
            ..self
        }
    }

    pub(super) fn block_bytes(self) -> u32 {
        self.block_bytes
    }

    fn is_write(self) -> bool {
        self.command == Command::WRITE
    }
}

impl fmt::Display for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (verb, size, depth) = (
            if self.is_write() { "writes" } else { "reads" },
            self.block_bytes >> 10,
            self.depth,
        );
        write!(f, "random {verb} of {size} KiB, {depth} in flight")?;
        if self.every > Duration::ZERO {
            write!(f, ", {:.0} a second", 1.0 / self.every.as_secs_f64())?;
        }
        Ok(())
    }
}

/// What was measured of a tenant.
#[derive(Clone, Debug, Default)]
pub(super) struct Sample {
    /// From before a request is sent until its reply is read.
    pub(super) latency: Latencies,
    /// How long the measurement took, in seconds.
    pub(super) seconds: f64,
    /// Bytes of each request.
    pub(super) block_bytes: u32,
}

/// One tenant, connected.
pub(super) struct Client {
    stream: UnixStream,
    job: Job,
    places: Places,
    /// When the request with this cookie was sent.
    sent_at: Vec<Instant>,
    /// Cookies with no request in flight.
    idle: Vec<usize>,
    out: Vec<u8>,
    payload: Vec<u8>,
    input: Box<[u8]>,
    filled: usize,
    /// The read whose data is arriving, and how much of it is still to come.
    arriving: Option<(usize, usize)>,
}

impl Client {
    /// Connects to a disk.
    ///
    /// # Errors
    /// The server refuses, or has no such disk.
    pub(super) fn connect(socket: &Path, disk: &str, job: Job) -> Result<Self> {
        let mut stream =
            UnixStream::connect(socket).with_context(|| format!("connecting to {}", socket.display()))?;
        stream.set_read_timeout(Some(SILENCE_MAX))?;
        stream.set_write_timeout(Some(SILENCE_MAX))?;
        let agreed = negotiate(&mut stream, Wanted::plain(disk))
            .with_context(|| format!("negotiating for disk {disk}"))?;
        Ok(Self {
            stream,
            places: Places::new(agreed.size_bytes, job),
            sent_at: vec![Instant::now(); job.depth],
            idle: (0..job.depth).collect(),
            out: Vec::new(),
            payload: noise(if job.is_write() { job.block_bytes } else { 0 }),
            input: vec![0; BUFFER_BYTES].into_boxed_slice(),
            filled: 0,
            arriving: None,
            job,
        })
    }

    /// Runs until the cue to stop; nothing is in flight afterwards.
    ///
    /// # Errors
    /// The server hangs up, is silent for ten seconds, or replies with an error.
    pub(super) fn run(&mut self, cue: &Cue) -> Result<Sample> {
        let (mut latency, mut began) = (Latencies::default(), None);
        while cue.phase() != Phase::Stop {
            if cue.phase() == Phase::Measure && began.is_none() {
                latency.clear();
                began = Some(Instant::now());
            }
            if self.job.every > Duration::ZERO {
                let next = self.sent_at[0] + self.job.every;
                std::thread::sleep(next.saturating_duration_since(Instant::now()));
            }
            self.send_all_idle()?;
            self.receive(&mut latency)?;
        }
        let seconds = began.map_or(0.0, |began| began.elapsed().as_secs_f64());
        if began.is_none() {
            latency.clear();
        }
        let mut unmeasured = Latencies::default();
        while self.idle.len() < self.job.depth {
            self.receive(&mut unmeasured)?;
        }
        Ok(Sample {
            latency,
            seconds,
            block_bytes: self.job.block_bytes,
        })
    }

    /// Sends a request for each idle cookie.
    fn send_all_idle(&mut self) -> Result<()> {
        self.out.clear();
        let now = Instant::now();
        for cookie in self.idle.drain(..) {
            self.sent_at[cookie] = now;
            let header = RequestHeader {
                cookie: cookie as u64,
                offset: self.places.next(),
                length: u64::from(self.job.block_bytes),
                command: self.job.command,
                flags: CommandFlags::NONE,
            };
            header.write(HeaderStyle::Simple, &mut self.out);
            self.out.extend_from_slice(&self.payload);
        }
        self.stream.write_all(&self.out).context("sending requests")
    }

    /// Waits for bytes and handles the replies that are whole.
    fn receive(&mut self, latency: &mut Latencies) -> Result<()> {
        let count = self
            .stream
            .read(&mut self.input[self.filled..])
            .context("waiting for replies, ten seconds at most")?;
        ensure!(count > 0, "the server has hung up");
        self.filled += count;
        let now = Instant::now();
        let mut at = 0;
        while let Some(taken) = self.take(at)? {
            at += taken;
            if let Some((cookie, 0)) = self.arriving {
                self.arriving = None;
                latency.record((now - self.sent_at[cookie]).as_nanos() as u64);
                self.idle.push(cookie);
            }
        }
        self.input.copy_within(at..self.filled, 0);
        self.filled -= at;
        Ok(())
    }

    /// Takes a head, or a piece of data, from `at` on; `None` if nothing is whole.
    fn take(&mut self, at: usize) -> Result<Option<usize>> {
        let rest = &self.input[at..self.filled];
        if let Some((_, missing)) = &mut self.arriving {
            let taken = rest.len().min(*missing);
            *missing -= taken;
            return Ok((taken > 0).then_some(taken));
        }
        let Some((ReplyHead::Simple { cookie, error }, taken)) = ReplyHead::parse(HeaderStyle::Simple, rest)?
        else {
            return Ok(None);
        };
        ensure!(error == 0, "a request was answered with error {error}");
        let cookie = usize::try_from(cookie)
            .ok()
            .filter(|cookie| *cookie < self.job.depth);
        let cookie = cookie.context("a reply to no request")?;
        let data_bytes = if self.job.is_write() {
            0
        } else {
            self.job.block_bytes as usize
        };
        self.arriving = Some((cookie, data_bytes));
        Ok(Some(taken))
    }
}

/// Random offsets for requests, each a multiple of their size; the same sequence each time.
struct Places {
    count: u64,
    block_bytes: u64,
    chance: Chance,
}

impl Places {
    fn new(disk_bytes: u64, job: Job) -> Self {
        let block_bytes = u64::from(job.block_bytes);
        Self {
            count: disk_bytes / block_bytes,
            block_bytes,
            chance: Chance::new(block_bytes),
        }
    }

    fn next(&mut self) -> u64 {
        self.chance.next() % self.count * self.block_bytes
    }
}

/// Marsaglia's xorshift ("Xorshift RNGs", 2003) with shifts 13, 7, 17.
pub(super) struct Chance(u64);

impl Chance {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

/// Bytes that no drive can compress.
pub(super) fn noise(bytes: u32) -> Vec<u8> {
    let mut chance = Chance::new(1);
    let words = (0..bytes / 8).flat_map(|_| chance.next().to_le_bytes());
    words.collect()
}

const SILENCE_MAX: Duration = Duration::from_secs(10);
/// Replies under way to the deeper reader, 64 of 4 KiB, and their heads.
const BUFFER_BYTES: usize = 272 << 10;
