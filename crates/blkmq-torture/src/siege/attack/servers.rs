//! NBD servers behind the daemon that break the protocol: they answer early, twice, for others,
//! never, by half, or with anything. Whoever has a disk there may get errors; nobody else notices,
//! and the servers get what was written to them and nothing else.

use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::connection::Connection;
use anyhow::{Context, Result, bail};
use blkmq_nbd::codec::handshake::{OptionCode, write_greeting};
use blkmq_nbd::codec::option_reply::{Info, OptionReplies, ReplyKind};
use blkmq_nbd::codec::reply::{write_data_head, write_hole_chunk, write_simple};
use blkmq_nbd::codec::request::{Command, RequestHeader};
use blkmq_nbd::codec::{CommandFlags, ErrorCode, HandshakeFlags, HeaderStyle, TransmissionFlags};
use blkmq_testkit::Random;

use super::{DISK_BYTES, REMOTES, Site, Tally};
use crate::siege::wire::MARK;

/// The servers of a scene, at one socket: honest, except while somebody attacks.
#[derive(Debug)]
pub struct Servers {
    path: PathBuf,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    attackers: AtomicU64,
    connections: AtomicU64,
    is_over: AtomicBool,
    /// The first thing that a server got and must not get.
    finding: Mutex<Option<String>>,
}

impl Servers {
    /// Listens, and serves on threads of its own.
    ///
    /// # Errors
    /// If it cannot listen.
    pub fn start(path: PathBuf) -> Result<Self> {
        let listener = UnixListener::bind(&path).context("listening as an NBD server")?;
        let shared = Arc::<Shared>::default();
        let own = Arc::clone(&shared);
        thread::spawn(move || {
            for stream in listener.incoming() {
                // Relaxed here and below: flags and counters, which order nothing.
                if own.is_over.load(Ordering::Relaxed) {
                    return;
                }
                let Ok(stream) = stream else { continue };
                let (shared, seed) = (Arc::clone(&own), own.connections.fetch_add(1, Ordering::Relaxed));
                thread::spawn(move || {
                    let serve = || serve(stream, &shared, Random::new(seed));
                    if catch_unwind(AssertUnwindSafe(serve)).is_err() {
                        shared.find("has panicked".to_owned());
                    }
                });
            }
        });
        Ok(Self { path, shared })
    }

    /// Where they listen.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Makes them hostile until the result is dropped.
    fn besiege(&self) -> Hostility<'_> {
        self.shared.attackers.fetch_add(1, Ordering::Relaxed);
        Hostility(&self.shared)
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Relaxed);
        // Wakes the thread; it may have ended.
        let _ = UnixStream::connect(&self.path);
    }
}

struct Hostility<'a>(&'a Shared);

impl Drop for Hostility<'_> {
    fn drop(&mut self) {
        self.0.attackers.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Shared {
    fn is_hostile(&self) -> bool {
        self.attackers.load(Ordering::Relaxed) > 0
    }

    fn find(&self, what: String) {
        let mut finding = self.finding.lock().unwrap_or_else(PoisonError::into_inner);
        finding.get_or_insert(what);
    }
}

/// Uses disks of hostile servers.
pub(super) fn servers(site: &Site<'_>, random: &mut Random, end: Instant) -> Result<Tally> {
    let mut tally = Tally::default();
    let hostility = site.servers.besiege();
    while Instant::now() < end {
        match use_remote(site, random.one_of(&REMOTES), random) {
            Ok(used) => tally.add(&used),
            Err(error) if error.is::<Foreign>() => return Err(error),
            Err(_) => tally.failed += 1,
        }
        let finding = &site.servers.shared.finding;
        if let Some(finding) = finding.lock().unwrap_or_else(PoisonError::into_inner).take() {
            bail!("an NBD server behind the daemon {finding}");
        }
    }
    drop(hostility);
    Ok(tally)
}

/// A read that brought what nobody has written.
#[derive(Debug, Clone, Copy)]
struct Foreign(u64);

impl std::error::Error for Foreign {}

impl std::fmt::Display for Foreign {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "a read from a server at {} brought what the server has not sent",
            self.0
        )
    }
}

fn use_remote(site: &Site<'_>, export: &str, random: &mut Random) -> Result<Tally> {
    let mut connection = Connection::open_within(&site.socket, export, SILENCE_MAX)?;
    let (mut tally, mut ended) = (Tally::default(), Vec::new());
    for _ in 0..BURST {
        let command = random.one_of(&[
            Command::WRITE,
            Command::WRITE,
            Command::READ,
            Command::TRIM,
            Command::FLUSH,
        ]);
        // Most of a large write is not sent when its header arrives.
        let length = random.one_of(&[4096, 64 << 10, LARGE, LARGE, LARGE]);
        let offset = random.below((DISK_BYTES as u64 - length) / 512 + 1) * 512;
        let is_flush = command == Command::FLUSH;
        let header = RequestHeader {
            cookie: 0,
            offset: if is_flush { 0 } else { offset },
            length: if is_flush { 0 } else { length },
            command,
            flags: CommandFlags::NONE,
        };
        let of = |wanted: Command| if command == wanted { length as usize } else { 0 };
        let data = content(offset, of(Command::WRITE));
        connection.send(header, &data, of(Command::READ), offset)?;
    }
    while connection.depth() > 0 && connection.receive(&mut ended)? {
        for ended in ended.drain(..) {
            let is_zero = ended.data.iter().all(|byte| *byte == 0);
            if !is_zero && ended.data != content(ended.tag, ended.data.len()) {
                bail!(Foreign(ended.tag));
            }
            tally.done += 1;
            tally.failed += u64::from(ended.error != 0);
        }
    }
    Ok(tally)
}

/// What all writes to these disks have at an offset, and all reads: no other disk has it.
fn content(offset: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![MARK; len];
    for (sector, bytes) in (offset / 512..).zip(bytes.chunks_mut(512)) {
        bytes[..8].copy_from_slice(&sector.to_le_bytes());
    }
    bytes
}

/// Serves one connection of the daemon until its end.
fn serve(mut stream: UnixStream, shared: &Shared, mut random: Random) {
    // As attackers: their own work must not slow the tenant down.
    let _ = rustix::process::nice(19);
    let style = random.one_of(&[HeaderStyle::Simple, HeaderStyle::Structured]);
    let is_false = shared.is_hostile() && random.below(4) == 0;
    let greeted = if is_false {
        mock(&mut stream, &mut random)
    } else {
        shake_hands(&mut stream, style)
    };
    if greeted.is_err() || is_false {
        return;
    }
    let mut server = Server {
        stream,
        style,
        shared,
        random,
    };
    // Its end is the daemon's, or a trick's.
    while server.serve_one().is_ok() {}
}

/// A false start: anything, a part of a greeting, or silence.
fn mock(stream: &mut UnixStream, random: &mut Random) -> io::Result<()> {
    let mut bytes = Vec::new();
    write_greeting(HandshakeFlags::FIXED_NEWSTYLE, &mut bytes);
    match random.below(3) {
        0 => garbage(random, &mut bytes),
        1 => bytes.truncate(random.below(bytes.len() as u64) as usize),
        _ => bytes.clear(),
    }
    stream.write_all(&bytes)?;
    thread::sleep(Duration::from_millis(random.below(100)));
    Ok(())
}

fn shake_hands(stream: &mut UnixStream, style: HeaderStyle) -> io::Result<()> {
    let mut out = Vec::new();
    let flags = HandshakeFlags::FIXED_NEWSTYLE.with(HandshakeFlags::NO_ZEROES);
    write_greeting(flags, &mut out);
    stream.write_all(&out)?;
    stream.read_exact(&mut [0; 4])?;
    loop {
        let mut header = [0; 16];
        stream.read_exact(&mut header)?;
        let word =
            |at: usize| u32::from_be_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        let (option, len) = (OptionCode(word(8)), word(12) as usize);
        stream.read_exact(&mut vec![0; len.min(OPTION_BYTES_MAX)])?;
        out.clear();
        let mut replies = OptionReplies::new(option, &mut out);
        let is_structured = style == HeaderStyle::Structured && option == OptionCode::STRUCTURED_REPLY;
        if option == OptionCode::GO {
            replies.info(Info::Export {
                size_bytes: DISK_BYTES as u64,
                flags: FLAGS,
            });
        }
        if is_structured || option == OptionCode::GO {
            replies.ack();
        } else {
            replies.error(ReplyKind::ERR_UNSUP, "no");
        }
        stream.write_all(&out)?;
        if option == OptionCode::GO {
            return Ok(());
        }
    }
}

/// A server in the transmission phase.
struct Server<'a> {
    stream: UnixStream,
    style: HeaderStyle,
    shared: &'a Shared,
    random: Random,
}

/// What a server does with a request.
#[derive(Clone, Copy, Debug)]
enum Trick {
    /// What it should.
    Honest,
    /// Answers before it has read the data.
    Early,
    /// Answers twice.
    Twice,
    /// Answers another request, or none.
    Foreign,
    /// Does not answer.
    Never,
    /// A part of the answer, and the end.
    Half,
    /// Anything.
    Garbage,
    /// Data that was not asked for.
    Misfit,
    /// Reads a part of the data, and the end.
    Gone,
}

impl Server<'_> {
    /// Takes one request and answers it, or plays a trick.
    ///
    /// # Errors
    /// The connection has ended, or is to end.
    fn serve_one(&mut self) -> io::Result<()> {
        let mut bytes = vec![0; self.style.request_bytes()];
        self.stream.read_exact(&mut bytes)?;
        let Ok(Some(header)) = RequestHeader::parse(self.style, &bytes) else {
            self.shared.find("got a request that is none".to_owned());
            return Err(io::ErrorKind::InvalidData.into());
        };
        if header.command == Command::DISC {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let is_tricky = self.shared.is_hostile() && self.random.below(TRICK_EVERY) == 0;
        let trick = if is_tricky {
            self.random.one_of(&TRICKS)
        } else {
            Trick::Honest
        };
        self.play(trick, &header)
    }

    fn play(&mut self, trick: Trick, header: &RequestHeader) -> io::Result<()> {
        let mut answer = self.answer(header, None);
        match trick {
            Trick::Honest => self.take(header)?,
            Trick::Early => {
                let error = self.random.one_of(&[None, Some(ErrorCode::NoSpace)]);
                let early = self.answer(header, error);
                self.stream.write_all(&early)?;
                thread::sleep(Duration::from_millis(self.random.below(5)));
                return self.take(header);
            }
            Trick::Twice => {
                self.take(header)?;
                answer.extend_from_within(..);
            }
            Trick::Foreign => {
                self.take(header)?;
                let cookie = header.cookie ^ 1 << self.random.below(64);
                answer = self.answer(&RequestHeader { cookie, ..*header }, None);
            }
            Trick::Never => return self.take(header),
            Trick::Half => {
                self.take(header)?;
                let bytes = self.random.below(answer.len() as u64) as usize;
                self.stream.write_all(&answer[..bytes])?;
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
            Trick::Misfit if self.style != HeaderStyle::Simple => {
                self.take(header)?;
                answer.clear();
                let (cookie, offset) = (header.cookie, header.offset + 512);
                write_hole_chunk(self.style, cookie, offset, LARGE as u32, &mut answer);
            }
            Trick::Garbage | Trick::Misfit => {
                self.take(header)?;
                answer.clear();
                garbage(&mut self.random, &mut answer);
            }
            Trick::Gone => {
                let mut part = vec![0; self.random.below(header.length.clamp(1, LARGE)) as usize];
                if header.command == Command::WRITE {
                    self.stream.read_exact(&mut part)?;
                }
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
        }
        self.stream.write_all(&answer)
    }

    /// The answer to a request.
    fn answer(&self, header: &RequestHeader, error: Option<ErrorCode>) -> Vec<u8> {
        let (cookie, offset, len) = (header.cookie, header.offset, header.length);
        let mut out = Vec::new();
        match (header.command, self.style) {
            (Command::READ, HeaderStyle::Simple) => write_simple(cookie, None, &mut out),
            (Command::READ, style) => write_data_head(style, cookie, offset, offset, len, &mut out),
            _ => write_simple(cookie, error, &mut out),
        }
        if header.command == Command::READ {
            out.extend(content(offset, len as usize));
        }
        out
    }

    /// Reads the data of a write, and checks that it is what clients write there.
    fn take(&mut self, header: &RequestHeader) -> io::Result<()> {
        if header.command != Command::WRITE {
            return Ok(());
        }
        let (end, mut offset) = (header.offset + header.length, header.offset);
        while offset < end {
            let mut piece = vec![0; PIECE.min(end - offset) as usize];
            self.stream.read_exact(&mut piece)?;
            if piece != content(offset, piece.len()) {
                let (from, bytes) = (header.offset, header.length);
                self.shared.find(format!(
                    "got, in a write of {bytes} bytes at {from}, what nobody writes at {offset}"
                ));
                return Err(io::ErrorKind::InvalidData.into());
            }
            offset += piece.len() as u64;
        }
        Ok(())
    }
}

fn garbage(random: &mut Random, out: &mut Vec<u8>) {
    for _ in 0..8 {
        out.extend_from_slice(&random.draw().to_le_bytes());
    }
}

/// Most of them end the connection.
const TRICKS: [Trick; 11] = [
    Trick::Early,
    Trick::Early,
    Trick::Early,
    Trick::Early,
    Trick::Twice,
    Trick::Foreign,
    Trick::Never,
    Trick::Half,
    Trick::Garbage,
    Trick::Misfit,
    Trick::Gone,
];
/// One request in so many is played a trick on: most of the time a lost connection is not there.
const TRICK_EVERY: u64 = 6;
/// Requests of one use of a disk.
const BURST: u64 = 12;
const LARGE: u64 = 1 << 20;
/// Read at once: small, so that much of a write waits in the daemon.
const PIECE: u64 = 64 << 10;
/// Longer than the daemon waits for an answer, and then for a connection.
const SILENCE_MAX: Duration = Duration::from_secs(8);
const OPTION_BYTES_MAX: usize = 64 << 10;
const FLAGS: TransmissionFlags = TransmissionFlags::HAS_FLAGS
    .with(TransmissionFlags::SEND_FLUSH)
    .with(TransmissionFlags::SEND_FUA)
    .with(TransmissionFlags::SEND_TRIM)
    .with(TransmissionFlags::CAN_MULTI_CONN);
