//! The client that loads every server: one thread for all connections, one send per batch of requests,
//! replies parsed in bulk, no allocation, and one clock reading per batch. It blocks when no data has
//! arrived, like real clients, so that a server's wake-ups cost it time.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use blkmq_nbd::client::{Agreed, Wanted, negotiate};
use blkmq_nbd::codec::reply::ReplyHead;
use blkmq_nbd::codec::request::{Command, RequestHeader};
use blkmq_nbd::codec::{ChunkFlags, CommandFlags, HeaderStyle};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::Timespec;

use crate::histogram::Histogram;
use crate::offsets::Offsets;
use crate::window::{Phase, Window};

/// Connects `conns` times and negotiates.
///
/// # Errors
/// If the server refuses, its answer is invalid, or it does not grant the requested style of replies.
pub(crate) fn connect(socket: &Path, conns: usize, style: HeaderStyle) -> Result<Vec<(UnixStream, Agreed)>> {
    let connect = |_| connect_to(socket, super::peers::EXPORT, style);
    (0..conns).map(connect).collect()
}

/// Connects once, to the export `name`.
///
/// # Errors
/// As [`connect`].
pub(crate) fn connect_to(socket: &Path, name: &str, style: HeaderStyle) -> Result<(UnixStream, Agreed)> {
    let mut stream =
        UnixStream::connect(socket).with_context(|| format!("connecting to {}", socket.display()))?;
    stream.set_read_timeout(Some(SILENCE_MAX))?;
    stream.set_write_timeout(Some(SILENCE_MAX))?;
    let agreed = agree(&mut stream, name, style).context("negotiating with the server")?;
    Ok((stream, agreed))
}

fn agree(stream: &mut UnixStream, name: &str, style: HeaderStyle) -> Result<Agreed> {
    let agreed = negotiate(
        stream,
        Wanted {
            style,
            ..Wanted::plain(name)
        },
    )?;
    ensure!(
        agreed.style == style,
        "the server grants {:?} replies where {style:?} are wanted",
        agreed.style
    );
    Ok(agreed)
}

/// The load: all connections and the requests in flight on each.
pub(crate) struct Load {
    /// Separate from the sessions, so that the list of descriptors to wait for is made once.
    streams: Vec<UnixStream>,
    sessions: Vec<Session>,
    depth: usize,
}

impl Load {
    /// Makes a load that keeps `depth` reads of `block_bytes` in flight on each connection.
    pub(crate) fn new(connections: Vec<(UnixStream, Agreed)>, depth: usize, block_bytes: u32) -> Self {
        let (streams, agreed): (Vec<_>, Vec<_>) = connections.into_iter().unzip();
        let session = |(index, agreed): (usize, Agreed)| Session {
            in_flight: 0,
            requests: Vec::with_capacity(depth * agreed.style.request_bytes()),
            replies: ReplyStream::new(agreed.style, block_bytes),
            offsets: Offsets::new(agreed.size_bytes, u64::from(block_bytes), true, index as u64),
            block_bytes,
        };
        Self {
            streams,
            sessions: agreed.into_iter().enumerate().map(session).collect(),
            depth,
        }
    }

    /// Runs until the window says stop and all replies have arrived, and returns the latencies of the reads that
    /// ended within it. May be called again.
    ///
    /// # Errors
    /// If a server disconnects, is silent for ten seconds, violates the protocol or answers with an error.
    pub(crate) fn run(&mut self, window: &Window) -> Result<Histogram> {
        let latency = self.run_phases(window);
        if latency.is_err() {
            window.fail();
        }
        latency
    }

    fn run_phases(&mut self, window: &Window) -> Result<Histogram> {
        let (streams, sessions) = (&self.streams, &mut self.sessions);
        let mut tally = Tally {
            started: Instant::now(),
            ended: 0,
            latency: Histogram::new(),
        };
        for (session, stream) in sessions.iter_mut().zip(streams) {
            session.send(stream, self.depth, tally.now())?;
        }
        let fds = streams.iter();
        let mut fds: Vec<PollFd<'_>> = fds.map(|each| PollFd::new(each, PollFlags::IN)).collect();
        let mut phase = Phase::WarmUp;
        loop {
            let before = std::mem::replace(&mut phase, window.phase());
            if phase == Phase::Stop {
                let latency = std::mem::take(&mut tally.latency);
                for (session, stream) in sessions.iter_mut().zip(streams) {
                    session.finish(stream, &mut tally)?;
                }
                return Ok(latency);
            }
            if phase != before {
                tally.latency.clear();
            }
            if let [session] = &mut sessions[..] {
                session.turn(&streams[0], &mut tally)?;
            } else {
                turn_all_ready(&mut fds, streams, sessions, &mut tally)?;
            }
            window.publish(0, tally.ended);
        }
    }
}

/// Waits for any connection, and serves each that has replies.
fn turn_all_ready(
    fds: &mut [PollFd<'_>],
    streams: &[UnixStream],
    sessions: &mut [Session],
    tally: &mut Tally,
) -> Result<()> {
    let events = poll(fds, Some(&SILENCE_MAX_TIMESPEC)).context("waiting for replies")?;
    ensure!(events > 0, "no reply within {SILENCE_MAX:?}");
    for ((fd, stream), session) in fds.iter().zip(streams).zip(sessions) {
        if !fd.revents().is_empty() {
            session.turn(stream, tally)?;
        }
    }
    Ok(())
}

/// What the load has done so far.
struct Tally {
    started: Instant,
    ended: u64,
    latency: Histogram,
}

impl Tally {
    /// Nanoseconds since the start of the load.
    fn now(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }
}

/// The state of one connection besides its socket.
struct Session {
    /// Reads whose replies have not ended.
    in_flight: usize,
    requests: Vec<u8>,
    replies: ReplyStream,
    offsets: Offsets,
    block_bytes: u32,
}

impl Session {
    /// Takes the replies that have arrived and sends as many new requests.
    fn turn(&mut self, stream: &UnixStream, tally: &mut Tally) -> Result<()> {
        let (ended, now) = self.take(stream, tally)?;
        if ended > 0 {
            self.send(stream, ended, now)?;
        }
        Ok(())
    }

    /// Takes the replies that are still to come, and sends nothing more.
    fn finish(&mut self, stream: &UnixStream, tally: &mut Tally) -> Result<()> {
        while self.in_flight > 0 {
            self.take(stream, tally)?;
        }
        Ok(())
    }

    /// Takes what has arrived; returns how many reads ended by it, and when.
    fn take(&mut self, stream: &UnixStream, tally: &mut Tally) -> Result<(usize, u64)> {
        let count = self.receive(stream)?;
        let now = tally.now();
        let mut run = Run::default();
        let ended = self
            .replies
            .add(count, |cookie| run.add(cookie, &mut tally.latency, now))?;
        run.flush(&mut tally.latency, now);
        let left = self.in_flight.checked_sub(ended);
        self.in_flight = left.context("a reply to nothing")?;
        tally.ended += ended as u64;
        Ok((ended, now))
    }

    /// Sends `count` reads in one call. The cookie is the time: a reply tells its own latency.
    fn send(&mut self, mut stream: &UnixStream, count: usize, now: u64) -> Result<()> {
        self.requests.clear();
        for _ in 0..count {
            let header = RequestHeader {
                cookie: now,
                offset: self.offsets.next(),
                length: u64::from(self.block_bytes),
                command: Command::READ,
                flags: CommandFlags::NONE,
            };
            header.write(self.replies.style, &mut self.requests);
        }
        self.in_flight += count;
        stream.write_all(&self.requests).context("sending requests")
    }

    fn receive(&mut self, mut stream: &UnixStream) -> Result<usize> {
        loop {
            match stream.read(self.replies.room()) {
                Ok(0) => bail!("the server has hung up"),
                Ok(count) => return Ok(count),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    bail!("no reply within {SILENCE_MAX:?}")
                }
                Err(error) => return Err(error).context("receiving replies"),
            }
        }
    }
}

/// The receive buffer of a connection, and the state of its parser.
pub(crate) struct ReplyStream {
    buffer: Box<[u8]>,
    filled: usize,
    /// Payload of the current reply or chunk that has not arrived.
    payload_left: usize,
    /// The cookie of the reply whose payload is arriving, if the I/O ends with it.
    ends_with_payload: Option<u64>,
    style: HeaderStyle,
    block_bytes: u32,
}

impl ReplyStream {
    /// Makes the buffer for replies that carry `block_bytes` bytes: 0 for those to writes.
    pub(crate) fn new(style: HeaderStyle, block_bytes: u32) -> Self {
        Self {
            buffer: vec![0; BUFFER_BYTES].into_boxed_slice(),
            filled: 0,
            payload_left: 0,
            ends_with_payload: None,
            style,
            block_bytes,
        }
    }

    /// Where the next bytes from the server go.
    pub(crate) fn room(&mut self) -> &mut [u8] {
        &mut self.buffer[self.filled..]
    }

    /// Parses what has arrived, the first `count` bytes of the room with it; returns how many I/Os ended, and calls
    /// `end` with the cookie of each.
    ///
    /// # Errors
    /// If the server violates the protocol or answers with an error.
    #[inline]
    pub(crate) fn add(&mut self, count: usize, mut end: impl FnMut(u64)) -> Result<usize> {
        self.filled += count;
        let (mut at, mut ended) = (0, 0);
        loop {
            let skipped = self.payload_left.min(self.filled - at);
            at += skipped;
            self.payload_left -= skipped;
            if self.payload_left > 0 {
                break;
            }
            if let Some(cookie) = self.ends_with_payload.take() {
                ended += 1;
                end(cookie);
            }
            let Some((head, bytes)) = ReplyHead::parse(self.style, &self.buffer[at..self.filled])? else {
                break;
            };
            at += bytes;
            self.begin(head)?;
        }
        // The rest is less than one header.
        self.buffer.copy_within(at..self.filled, 0);
        self.filled -= at;
        Ok(ended)
    }

    /// Records what follows a header: the payload's length, and whether the I/O ends with it.
    fn begin(&mut self, head: ReplyHead) -> Result<()> {
        match head {
            ReplyHead::Simple { cookie, error } => {
                ensure!(error == 0, "an I/O was answered with error {error}");
                self.payload_left = self.block_bytes as usize;
                self.ends_with_payload = Some(cookie);
            }
            ReplyHead::Chunk(chunk) => {
                let kind = chunk.kind;
                ensure!(
                    !kind.is_error(),
                    "an I/O was answered with error chunk {:#x}",
                    kind.0
                );
                self.payload_left = chunk.payload_bytes as usize;
                self.ends_with_payload = chunk.flags.contains(ChunkFlags::DONE).then_some(chunk.cookie);
            }
        }
        Ok(())
    }
}

/// Consecutive replies to one batch of requests, counted at once.
#[derive(Default)]
struct Run {
    cookie: u64,
    times: u64,
}

impl Run {
    #[inline]
    fn add(&mut self, cookie: u64, latency: &mut Histogram, now: u64) {
        if cookie != self.cookie {
            self.flush(latency, now);
            self.cookie = cookie;
        }
        self.times += 1;
    }

    fn flush(&mut self, latency: &mut Histogram, now: u64) {
        if self.times > 0 {
            latency.record_many(now.saturating_sub(self.cookie), self.times);
            self.times = 0;
        }
    }
}

/// Room for 63 replies of 4 KiB: more than a unix socket holds.
const BUFFER_BYTES: usize = 256 << 10;
const SILENCE_MAX: Duration = Duration::from_secs(10);
const SILENCE_MAX_TIMESPEC: Timespec = Timespec {
    tv_sec: 10,
    tv_nsec: 0,
};

#[cfg(test)]
mod tests {
    use blkmq_nbd::codec::ErrorCode;
    use blkmq_nbd::codec::reply::{ChunkHead, ChunkKind, write_chunk_head, write_simple};

    use super::*;

    const STYLES: [HeaderStyle; 3] = [
        HeaderStyle::Simple,
        HeaderStyle::Structured,
        HeaderStyle::Extended,
    ];

    /// A server's replies to reads with the given cookies; styles with chunks have one for the data
    /// and an empty last one.
    fn replies_to(cookies: &[u64], style: HeaderStyle, block: usize) -> Vec<u8> {
        let mut stream = Vec::new();
        for &cookie in cookies {
            if style == HeaderStyle::Simple {
                write_simple(cookie, None, &mut stream);
                stream.resize(stream.len() + block, 0x67);
                continue;
            }
            for (kind, flags, payload) in [
                (ChunkKind::OFFSET_DATA, ChunkFlags::NONE, 8 + block),
                (ChunkKind::NONE, ChunkFlags::DONE, 0),
            ] {
                let head = ChunkHead {
                    cookie,
                    offset: 0,
                    payload_bytes: payload as u64,
                    kind,
                    flags,
                };
                write_chunk_head(style, &head, &mut stream);
                stream.resize(stream.len() + payload, 0x67);
            }
        }
        stream
    }

    fn feed(replies: &mut ReplyStream, stream: &[u8], step: usize) -> (usize, Histogram) {
        let (mut ended, mut latency) = (0, Histogram::new());
        for piece in stream.chunks(step) {
            replies.room()[..piece.len()].copy_from_slice(piece);
            let mut run = Run::default();
            ended += replies
                .add(piece.len(), |cookie| run.add(cookie, &mut latency, 1_000))
                .unwrap();
            run.flush(&mut latency, 1_000);
        }
        (ended, latency)
    }

    #[test]
    fn replies_are_counted_however_the_stream_is_cut() {
        let cookies = [100, 100, 100, 300, 100];
        for step in [1, 7, 15, 16, 17, 529, 4_000] {
            for style in STYLES {
                let stream = replies_to(&cookies, style, 512);
                let mut replies = ReplyStream::new(style, 512);
                let (ended, latency) = feed(&mut replies, &stream, step);
                assert_eq!((ended, latency.len()), (5, 5), "cut every {step} bytes");
                assert_eq!((replies.filled, replies.payload_left), (0, 0));
                assert!(latency.quantile(0.2).abs_diff(700) < 12 && latency.max() == 900);
            }
        }
    }

    #[test]
    fn error_and_a_stream_out_of_step_stop_the_load() {
        let refused = |stream: &[u8]| {
            let mut replies = ReplyStream::new(HeaderStyle::Simple, 512);
            replies.room()[..stream.len()].copy_from_slice(stream);
            replies.add(stream.len(), |_| {}).unwrap_err().to_string()
        };
        let mut failed = Vec::new();
        write_simple(1, Some(ErrorCode::Io), &mut failed);
        assert!(refused(&failed).contains("error 5"));
        assert!(refused(&[0; 16]).contains("magic number 0x0"));
    }
}
