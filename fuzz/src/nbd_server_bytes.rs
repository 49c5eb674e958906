//! Bytes of a client against the NBD server's session and a disk in memory.
//!
//! The first three bytes choose the setting: where the stream begins, whether TLS comes first, what the export can do, the size of the pieces
//! it arrives in, and how late replies are given. The rest is the stream. Broken would be: a panic, a buffer or a count
//! beyond its limit, a request outside the export, or any number of replies other than one.

use std::collections::VecDeque;
use std::sync::Arc;

use blkmq_export::nbd::export::{Export, ExportId, ExportTable};
use blkmq_export::nbd::limits::Limits;
use blkmq_export::nbd::session::{Event, Op, Request, Session};
use blkmq_nbd::codec::handshake::{
    InfoRequest, MetaRequest, OptionCode, SessionName, write_client_flags, write_option,
};
use blkmq_nbd::codec::reply::{ChunkPayload, Extent, ReplyHead};
use blkmq_nbd::codec::{ChunkFlags, ClientFlags, ErrorCode, ExtentState, HeaderStyle};
use blkmq_tls::Mode;

/// Bytes of the disk.
const DISK_BYTES: usize = 128 << 10;
/// Longest answer the session can write at once: every export listed, or the longest error text.
const ANSWER_BYTES_MAX: usize = 1024;

/// What a session is called that has a name from the start.
const NAME: SessionName = SessionName {
    client: 0x0123_4567_89ab_cdef_0123_4567_89ab_cdef,
    number: 1,
};

/// Runs one input.
///
/// # Panics
/// An invariant is broken.
pub fn run(data: &[u8]) {
    let Some((&[place, piece, lateness], stream)) = data.split_first_chunk() else {
        return;
    };
    let mut server = Server::new(place, usize::from(lateness % 8));
    server.negotiate(place);
    for piece in stream.chunks(usize::from(piece) + 1) {
        server.feed(piece);
        if server.session.has_ended() {
            break;
        }
    }
    server.finish();
}

struct Server {
    session: Session,
    /// What the client may select once TLS has been started.
    secured: Arc<ExportTable>,
    needs_tls: bool,
    limits: Limits,
    disk: Vec<u8>,
    /// Requests that may wait for their reply.
    lateness: usize,
    selected: bool,
    waiting: VecDeque<Request>,
    received: Vec<u8>,
    payload: Vec<u8>,
    payload_of: Option<Request>,
    out: Vec<u8>,
    /// What the client has to find in the server's stream: cookie, and bytes of data if the reply is simple.
    expected: VecDeque<(u64, usize)>,
}

impl Server {
    fn new(place: u8, lateness: usize) -> Server {
        let limits = Limits {
            payload_bytes_max: 64 << 10,
            memory_bytes_max: 96 << 10,
            requests_max: 4,
            unsent_bytes_max: 4096,
            options_max: 20,
            option_bytes_max: 4160,
            option_skip_bytes_max: 8192,
            extents_max: 3,
            ..Limits::default()
        };
        limits.check().expect("limits that fit together");
        let mut export = Export::new(ExportId(1), "a", DISK_BYTES as u64);
        export.features.read_only = place & 4 != 0;
        export.features.fua = place & 8 == 0;
        export.features.trim = place & 8 == 0;
        export.block_min_bytes = if place & 16 != 0 { 512 } else { 1 };
        let mut table = ExportTable::new([export, Export::new(ExportId(2), "b", 0)]).expect("proper exports");
        table.instance = (place & 64 == 0).then_some(0x1122_3344_5566_7788);
        let mut out = Vec::new();
        let secured = Arc::new(table.only(|name| name == "a"));
        let mut session = Session::new(Arc::new(table), limits.clone(), &mut out);
        let needs_tls = place & 3 == 0 && place & 128 != 0;
        session.offer_tls(match (needs_tls, place & 128) {
            (true, _) => Mode::Require,
            (false, 0) => Mode::Off,
            (false, _) => Mode::Allow,
        });
        Server {
            session,
            secured,
            needs_tls,
            limits,
            disk: vec![0; DISK_BYTES],
            lateness,
            selected: false,
            waiting: VecDeque::new(),
            received: Vec::new(),
            payload: Vec::new(),
            payload_of: None,
            out: Vec::new(),
            expected: VecDeque::new(),
        }
    }

    /// Skips negotiation if `place` says so: 1 to 3 are the three header styles, with 32 the session has a name.
    fn negotiate(&mut self, place: u8) {
        let mut bytes = Vec::new();
        let style = match place & 3 {
            0 => return,
            1 => None,
            2 => Some(OptionCode::STRUCTURED_REPLY),
            _ => Some(OptionCode::EXTENDED_HEADERS),
        };
        write_client_flags(ClientFlags::KNOWN, &mut bytes);
        if let Some(style) = style {
            let mut contexts = Vec::new();
            MetaRequest::write("a", &["base:allocation"], &mut contexts);
            write_option(style, &[], &mut bytes);
            write_option(OptionCode::SET_META_CONTEXT, &contexts, &mut bytes);
        }
        if place & 32 != 0 {
            let mut name = Vec::new();
            NAME.write(&mut name);
            write_option(OptionCode::SESSION, &name, &mut bytes);
        }
        let mut name = Vec::new();
        InfoRequest::write("a", &[], &mut name);
        write_option(OptionCode::GO, &name, &mut bytes);
        self.feed(&bytes);
        assert!(self.selected);
    }

    fn feed(&mut self, piece: &[u8]) {
        self.received.extend_from_slice(piece);
        while self.take_payload() {
            let step = self.session.receive(&self.received, &mut self.out);
            let unsent = self.out.len();
            assert!(
                unsent <= self.limits.unsent_bytes_max + ANSWER_BYTES_MAX,
                "{unsent} bytes unsent"
            );
            self.received.drain(..step.consumed);
            match step.event {
                Event::NeedMore => {
                    assert!(
                        self.received.len() < self.limits.receive_bytes_min(),
                        "a message that never fits"
                    );
                    return;
                }
                Event::Busy => self.make_room(),
                Event::StartTls => {
                    assert!(self.received.is_empty(), "bytes from before TLS are kept");
                    assert!(self.session.style() == HeaderStyle::Simple || !self.needs_tls);
                    self.needs_tls = false;
                    self.session.secure(Arc::clone(&self.secured));
                    assert_eq!(
                        self.session.style(),
                        HeaderStyle::Simple,
                        "what was said before TLS holds"
                    );
                }
                Event::Selected(_) => {
                    assert!(!self.selected, "selected twice");
                    assert!(!self.needs_tls, "selected without TLS");
                    self.selected = true;
                    self.out.clear();
                }
                Event::Request(request) => self.begin(request),
                Event::Write(request) => self.payload_of = Some(self.checked(request)),
                Event::Refused(refused) => self.expected.push_back((refused.header.cookie, 0)),
                Event::Disconnect | Event::Close(_) => return assert!(self.session.has_ended()),
            }
        }
    }

    /// Moves received bytes to the payload that is due; whether none is due any more.
    fn take_payload(&mut self) -> bool {
        let Some(request) = self.payload_of else {
            return true;
        };
        let missing = request.length as usize - self.payload.len();
        let taken = missing.min(self.received.len());
        self.payload.extend(self.received.drain(..taken));
        self.session.payload_taken(taken as u64);
        if taken < missing {
            return false;
        }
        let at = request.offset as usize;
        self.disk[at..at + self.payload.len()].copy_from_slice(&self.payload);
        self.payload.clear();
        self.payload_of = None;
        self.begin(request);
        true
    }

    fn begin(&mut self, request: Request) {
        let request = self.checked(request);
        self.waiting.push_back(request);
        if self.waiting.len() > self.lateness {
            self.reply_to_latest();
        }
    }

    fn checked(&mut self, request: Request) -> Request {
        let end = request
            .offset
            .checked_add(request.length)
            .expect("an end in range");
        if request.op == Op::Fence {
            let name = self.session.name().expect("a session that fences has a name");
            assert!(
                request.length == 0 && request.offset != name.number,
                "{request:?}"
            );
        } else {
            assert!(end <= DISK_BYTES as u64, "{request:?} is outside the export");
        }
        let replies = self.session.replies();
        assert!(replies.requests() <= self.limits.requests_max);
        assert!(replies.memory_bytes() <= self.limits.memory_bytes_max);
        request
    }

    /// A busy session must go on once everything is replied to and sent.
    fn make_room(&mut self) {
        assert!(
            !self.out.is_empty() || !self.waiting.is_empty(),
            "busy with nothing to wait for"
        );
        while !self.waiting.is_empty() {
            self.reply_to_latest();
        }
        self.send();
    }

    fn reply_to_latest(&mut self) {
        let Some(request) = self.waiting.pop_back() else {
            return;
        };
        let replies = self.session.replies();
        let mut data_bytes = 0;
        match request.op {
            Op::Read => {
                let (at, length) = (request.offset as usize, request.length as usize);
                let data = &self.disk[at..at + length];
                if replies.has_holes() && data.iter().all(|byte| *byte == 0) {
                    replies.hole(&request, &mut self.out);
                } else {
                    replies.read(&request, &mut self.out);
                    self.out.extend_from_slice(data);
                    replies.read_sent(&request);
                }
                data_bytes = length;
            }
            Op::BlockStatus => {
                let run = Extent {
                    bytes: request.cookie % (1 << 33),
                    state: ExtentState::HOLE,
                };
                replies.block_status(&request, Some(&[run; 5]), &[], &mut self.out);
            }
            Op::Trim => replies.error(&request, ErrorCode::NotSupported, "no", &mut self.out),
            _ => replies.ok(&request, &mut self.out),
        }
        self.expected.push_back((request.cookie, data_bytes));
        self.send();
    }

    /// Hands what is written to a client that checks it.
    fn send(&mut self) {
        let style = self.session.style();
        // Answers to options have their own tests.
        let mut rest = if self.selected { &self.out[..] } else { &[] };
        while !rest.is_empty() {
            let (cookie, data_bytes) = self.expected.pop_front().expect("a reply to a request");
            rest = skip_reply(style, rest, cookie, data_bytes);
        }
        self.out.clear();
    }

    fn finish(mut self) {
        while !self.waiting.is_empty() {
            self.reply_to_latest();
        }
        self.send();
        if !self.selected {
            return;
        }
        assert!(self.expected.is_empty(), "no reply to {:?}", self.expected);
        let pending = u32::from(self.payload_of.is_some());
        assert_eq!(self.session.replies().requests(), pending);
    }
}

/// Reads one whole reply, which must be to `cookie`, off the start of `stream`.
fn skip_reply(style: HeaderStyle, stream: &[u8], cookie: u64, data_bytes: usize) -> &[u8] {
    let (head, head_bytes) = ReplyHead::parse(style, stream)
        .expect("a magic")
        .expect("a whole head");
    let rest = &stream[head_bytes..];
    match head {
        ReplyHead::Simple { cookie: found, .. } => {
            assert_eq!((style, found), (HeaderStyle::Simple, cookie));
            &rest[data_bytes..]
        }
        ReplyHead::Chunk(chunk) => {
            assert_eq!((chunk.cookie, chunk.flags), (cookie, ChunkFlags::DONE));
            let (payload, rest) = rest.split_at(chunk.payload_bytes as usize);
            ChunkPayload::parse(chunk.kind, payload).expect("a well-formed chunk");
            rest
        }
    }
}
