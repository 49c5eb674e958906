//! A client for the session's tests, which plays one with bytes.

mod bitmaps;
mod client;
mod fence;
mod hostile;
mod negotiation;
mod streams;
mod transmission;

use std::sync::Arc;

use blkmq_nbd::codec::handshake::{
    InfoKind, InfoRequest, MetaRequest, OptionCode, write_client_flags, write_option,
};
use blkmq_nbd::codec::option_reply::{REPLY_HEADER_BYTES, ReplyHeader, ReplyKind};
use blkmq_nbd::codec::reply::{ChunkPayload, Extent, ReplyHead};
use blkmq_nbd::codec::request::{Command, RequestHeader};
use blkmq_nbd::codec::{ClientFlags, CommandFlags, ErrorCode, ExtentState, HeaderStyle};

use super::{Event, Refused, Request, Session};
use crate::nbd::export::{Export, ExportId, ExportTable};
use crate::nbd::limits::Limits;

const MIB: u64 = 1 << 20;

/// An export of 1 MiB with blocks of 512 bytes.
fn disk() -> Export {
    let mut export = Export::new(ExportId(1), "vm1", MIB);
    export.description = "root disk".into();
    export.block_min_bytes = 512;
    export
}

/// Both ends of a connection without a socket.
struct Wire {
    session: Session,
    /// Bytes that the server wrote and the test has not read.
    out: Vec<u8>,
    /// Bytes that the server has not consumed.
    unread: Vec<u8>,
}

impl Wire {
    fn new(exports: impl IntoIterator<Item = Export>, limits: Limits) -> Wire {
        limits.check().expect("limits that fit together");
        let table = Arc::new(ExportTable::new(exports).unwrap());
        let mut out = Vec::new();
        let session = Session::new(table, limits, &mut out);
        assert_eq!(out, b"NBDMAGICIHAVEOPT\x00\x03");
        out.clear();
        Wire {
            session,
            out,
            unread: Vec::new(),
        }
    }

    /// The state after the client's flags.
    fn greeted(exports: impl IntoIterator<Item = Export>) -> Wire {
        let mut wire = Wire::new(exports, Limits::default());
        assert_eq!(wire.send(&flags(ClientFlags::KNOWN)), [Event::NeedMore]);
        wire
    }

    /// The state after `export` was selected with `style` and, if possible, the allocation context.
    fn selected_with(export: Export, style: HeaderStyle, limits: Limits) -> Wire {
        let mut wire = Wire::new([export.clone()], limits);
        wire.send(&flags(ClientFlags::KNOWN));
        match style {
            HeaderStyle::Simple => {}
            HeaderStyle::Structured => wire.acked(OptionCode::STRUCTURED_REPLY, &[]),
            HeaderStyle::Extended => wire.acked(OptionCode::EXTENDED_HEADERS, &[]),
        }
        if style != HeaderStyle::Simple {
            wire.acked(
                OptionCode::SET_META_CONTEXT,
                &contexts(&export.name, &["base:allocation"]),
            );
        }
        let events = wire.send(&option(
            OptionCode::GO,
            &info(&export.name, &[InfoKind::BLOCK_SIZE]),
        ));
        assert_eq!(events, [Event::Selected(Arc::new(export)), Event::NeedMore]);
        wire.out.clear();
        wire
    }

    fn selected(export: Export, style: HeaderStyle) -> Wire {
        Wire::selected_with(export, style, Limits::default())
    }

    /// Sends an option that must succeed.
    fn acked(&mut self, code: OptionCode, data: &[u8]) {
        assert_eq!(self.send(&option(code, data)), [Event::NeedMore]);
        assert_eq!(self.answers().last().map(|(kind, _)| *kind), Some(ReplyKind::ACK));
    }

    /// Sends bytes, and returns the events until there are no more (payload of accepted writes is
    /// skipped).
    fn send(&mut self, bytes: &[u8]) -> Vec<Event> {
        self.unread.extend_from_slice(bytes);
        let mut events = Vec::new();
        loop {
            let step = self.session.receive(&self.unread, &mut self.out);
            self.unread.drain(..step.consumed);
            let last = match &step.event {
                Event::Write(request) => {
                    let taken = self.unread.len().min(request.length as usize);
                    assert_eq!(taken as u64, request.length, "the test sends whole payloads");
                    self.unread.drain(..taken);
                    self.session.payload_taken(request.length);
                    false
                }
                Event::Request(_) | Event::Selected(_) | Event::Refused(_) => false,
                Event::NeedMore | Event::Busy | Event::StartTls | Event::Disconnect | Event::Close(_) => true,
            };
            events.push(step.event);
            if last {
                return events;
            }
        }
    }

    /// The option replies written since the last call.
    fn answers(&mut self) -> Vec<(ReplyKind, Vec<u8>)> {
        let (mut answers, out) = (Vec::new(), std::mem::take(&mut self.out));
        let mut rest = &out[..];
        while let Some(header) = ReplyHeader::parse(rest).unwrap() {
            let end = REPLY_HEADER_BYTES + header.data_bytes as usize;
            answers.push((header.kind, rest[REPLY_HEADER_BYTES..end].to_vec()));
            rest = &rest[end..];
        }
        assert!(rest.is_empty(), "half an answer: {rest:?}");
        answers
    }

    /// The one reply written since the last call: its cookie and error (zero for success).
    fn reply(&mut self) -> (u64, u32) {
        let out = std::mem::take(&mut self.out);
        let (head, bytes) = ReplyHead::parse(self.session.style(), &out)
            .unwrap()
            .expect("a reply");
        match head {
            ReplyHead::Simple { cookie, error } => {
                assert_eq!(out.len(), bytes);
                (cookie, error)
            }
            ReplyHead::Chunk(head) => {
                assert_eq!(out.len() as u64, bytes as u64 + head.payload_bytes);
                match ChunkPayload::parse(head.kind, &out[bytes..]).expect("a well-formed chunk") {
                    ChunkPayload::Error { error, .. } => (head.cookie, error.to_wire()),
                    _ => (head.cookie, 0),
                }
            }
        }
    }
}

fn flags(flags: ClientFlags) -> Vec<u8> {
    let mut out = Vec::new();
    write_client_flags(flags, &mut out);
    out
}

fn option(code: OptionCode, data: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    write_option(code, data, &mut out);
    out
}

fn info(name: &str, kinds: &[InfoKind]) -> Vec<u8> {
    let mut out = Vec::new();
    InfoRequest::write(name, kinds, &mut out);
    out
}

fn contexts(name: &str, queries: &[&str]) -> Vec<u8> {
    let mut out = Vec::new();
    MetaRequest::write(name, queries, &mut out);
    out
}

/// A request's header on the wire. Extended writes get their payload flag.
fn header(style: HeaderStyle, command: Command, flags: CommandFlags, offset: u64, length: u64) -> Vec<u8> {
    let payload = style == HeaderStyle::Extended && command == Command::WRITE;
    let flags = flags.with_if(payload, CommandFlags::PAYLOAD_LEN);
    let mut out = Vec::new();
    RequestHeader {
        cookie: 42,
        offset,
        length,
        command,
        flags,
    }
    .write(style, &mut out);
    out
}

/// A request with its payload, if it has one.
fn command(style: HeaderStyle, command: Command, flags: CommandFlags, offset: u64, length: u64) -> Vec<u8> {
    let mut out = header(style, command, flags, offset, length);
    if command == Command::WRITE {
        out.resize(out.len() + length as usize, 0xab);
    }
    out
}

fn refused(events: &[Event]) -> Refused {
    match events {
        [Event::Refused(refused), Event::NeedMore] => *refused,
        other => panic!("not refused: {other:?}"),
    }
}

fn request(events: &[Event]) -> Request {
    match events {
        [Event::Request(request) | Event::Write(request), Event::NeedMore] => *request,
        other => panic!("no request: {other:?}"),
    }
}
