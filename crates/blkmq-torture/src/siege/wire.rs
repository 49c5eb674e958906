//! The connection of hostile clients to the daemon: a socket that sends any bytes, and whole
//! conversations as bytes, which attacks cut, change and repeat. Valid messages come from the project's
//! codec.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use blkmq_nbd::codec::handshake::{
    InfoKind, InfoRequest, MetaRequest, OptionCode, write_client_flags, write_option,
};
use blkmq_nbd::codec::request::{Command, RequestHeader};
use blkmq_nbd::codec::{ClientFlags, CommandFlags, HeaderStyle};
use rustix::net::sockopt;

/// A connection that may violate the protocol.
#[derive(Debug)]
pub(crate) enum Wire {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Wire {
    pub(crate) fn unix(path: &Path) -> io::Result<Self> {
        let stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(Self::Unix(stream))
    }

    pub(crate) fn tcp(address: SocketAddr) -> io::Result<Self> {
        let stream = TcpStream::connect_timeout(&address, CONNECT_TIME_MAX)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(Self::Tcp(stream))
    }

    /// Sends until the timeout. Returns whether all bytes were taken.
    pub(crate) fn send(&mut self, bytes: &[u8]) -> bool {
        match self {
            Self::Unix(stream) => stream.write_all(bytes).is_ok(),
            Self::Tcp(stream) => stream.write_all(bytes).is_ok(),
        }
    }

    /// Shuts down the sending side, and discards what arrives until the end, or until nothing
    /// arrives for a moment.
    pub(crate) fn finish(&mut self) {
        let _ = match self {
            Self::Unix(stream) => stream.shutdown(Shutdown::Write),
            Self::Tcp(stream) => stream.shutdown(Shutdown::Write),
        };
        self.discard(usize::MAX);
    }

    /// Discards at least `bytes` bytes, or less if nothing more arrives. Returns their number.
    pub(crate) fn discard(&mut self, bytes: usize) -> usize {
        let (mut scrap, mut all) = ([0; 64 << 10], 0);
        while all < bytes {
            let count = match self {
                Self::Unix(stream) => stream.read(&mut scrap),
                Self::Tcp(stream) => stream.read(&mut scrap),
            };
            match count {
                Ok(count) if count > 0 => all += count,
                _ => break,
            }
        }
        all
    }

    /// Disconnects; over TCP with a reset instead of an orderly end.
    pub(crate) fn reset(self) {
        if let Self::Tcp(stream) = &self {
            let _ = sockopt::set_socket_linger(stream.as_fd(), Some(Duration::ZERO));
        }
    }
}

/// A client's side of a conversation that uses every option and command, and ends in order.
pub(crate) fn conversation(style: HeaderStyle, export: &str) -> Vec<u8> {
    let mut out = negotiation(style, export);
    let requests = [
        (Command::READ, CommandFlags::NONE, 0, 4096),
        (Command::WRITE, CommandFlags::NONE, 4096, 512),
        (Command::WRITE, CommandFlags::FUA, 8192, 512),
        (Command::WRITE_ZEROES, CommandFlags::NO_HOLE, 4096, 4096),
        (Command::TRIM, CommandFlags::NONE, 8192, 4096),
        (Command::CACHE, CommandFlags::NONE, 0, 4096),
        (Command::FLUSH, CommandFlags::NONE, 0, 0),
        (Command::BLOCK_STATUS, CommandFlags::REQ_ONE, 0, 65536),
        (Command(77), CommandFlags::NONE, 0, 0),
    ];
    for (cookie, (command, flags, offset, length)) in (1..).zip(requests) {
        push_request(style, (command, flags), cookie, (offset, length), &mut out);
        if command == Command::WRITE {
            out.extend(std::iter::repeat_n(MARK, length as usize));
        }
    }
    push_request(style, (Command::DISC, CommandFlags::NONE), 0, (0, 0), &mut out);
    out
}

/// The options of a client that requests everything, and then selects the export.
pub(crate) fn negotiation(style: HeaderStyle, export: &str) -> Vec<u8> {
    let mut out = Vec::new();
    write_client_flags(ClientFlags::FIXED_NEWSTYLE.with(ClientFlags::NO_ZEROES), &mut out);
    write_option(OptionCode::LIST, &[], &mut out);
    write_option(OptionCode::INFO, &info(export), &mut out);
    match style {
        HeaderStyle::Simple => {}
        HeaderStyle::Structured => write_option(OptionCode::STRUCTURED_REPLY, &[], &mut out),
        HeaderStyle::Extended => write_option(OptionCode::EXTENDED_HEADERS, &[], &mut out),
    }
    if style != HeaderStyle::Simple {
        let mut contexts = Vec::new();
        MetaRequest::write(export, &["base:allocation"], &mut contexts);
        write_option(OptionCode::LIST_META_CONTEXT, &contexts, &mut out);
        write_option(OptionCode::SET_META_CONTEXT, &contexts, &mut out);
    }
    write_option(OptionCode::GO, &info(export), &mut out);
    out
}

/// The data of an `INFO` or `GO` that requests all details.
pub(crate) fn info(export: &str) -> Vec<u8> {
    let mut out = Vec::new();
    let kinds = [
        InfoKind::EXPORT,
        InfoKind::NAME,
        InfoKind::DESCRIPTION,
        InfoKind::BLOCK_SIZE,
    ];
    InfoRequest::write(export, &kinds, &mut out);
    out
}

/// Appends a request's header; the caller appends a payload.
pub(crate) fn push_request(
    style: HeaderStyle,
    (command, flags): (Command, CommandFlags),
    cookie: u64,
    (offset, length): (u64, u64),
    out: &mut Vec<u8>,
) {
    let has_payload = command == Command::WRITE && style == HeaderStyle::Extended;
    let header = RequestHeader {
        cookie,
        offset,
        length,
        command,
        flags: flags.with_if(has_payload, CommandFlags::PAYLOAD_LEN),
    };
    header.write(style, out);
}

/// What hostile writes consist of: no tenant's disk ever holds it.
pub(crate) const MARK: u8 = 0xa5;
/// How long a hostile client waits for anything.
const PATIENCE: Duration = Duration::from_millis(30);
const CONNECT_TIME_MAX: Duration = Duration::from_millis(500);
