//! Decides what a client's bytes mean to the server and what it answers: negotiation first, then requests and replies.
//! The socket layer feeds it and sends what it wrote; requests go to the disk of the selected export.
//!
//! ```text
//!              flags, options            GO / EXPORT_NAME                DISC, ABORT or a violation
//!  Session::new ────────────► negotiation ──────────────► transmission ──────────────────────────► ended
//! ```
//!
//! # How to drive it
//! The caller owns a receive buffer of at least [`Limits::receive_bytes_min`] bytes and the bytes to send. It calls
//! [`Session::receive`] with what is in the receive buffer, drops `consumed` bytes, acts on the event and calls again,
//! until the event is [`Event::NeedMore`] (receive more, keeping the unconsumed rest) or [`Event::Busy`] (send first).
//! After [`Event::Write`] the next `length` bytes of the stream are that request's payload: the caller takes them from
//! the receive buffer and then straight from the socket, and reports each portion to [`Session::payload_taken`].
//! Replies are written through [`Session::replies`], in any order, once for each request begun. The session keeps no copy
//! of any byte and reads no clock.

mod contexts;
mod negotiation;
mod reply;
mod rules;
mod saved;
mod tls;
mod transmission;

use std::fmt;
use std::sync::Arc;

pub use reply::Replies;
pub use rules::Fault;
pub use saved::{RestoreError, SavedPhase, SavedSession, SavedState};

use blkmq_nbd::codec::handshake::{OptionCode, SessionName, write_greeting};
use blkmq_nbd::codec::request::RequestHeader;
use blkmq_nbd::codec::{BadMagic, ClientFlags, CommandFlags, ErrorCode, HandshakeFlags, HeaderStyle};

use blkmq_tls::Mode;

use self::negotiation::{Negotiation, Next};
use self::transmission::Transmission;
use super::export::{Export, ExportTable};
use super::limits::Limits;

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// Read the range.
    Read,
    /// Write the payload to the range.
    Write,
    /// Make completed writes durable; no range.
    Flush,
    /// Discard the range.
    Trim,
    /// Read the range ahead.
    Cache,
    /// Make the range read as zeroes.
    WriteZeroes,
    /// Report what is allocated in the range.
    BlockStatus,
    /// End the client's session whose number is the offset, and wait for what it began; no range.
    Fence,
}

/// A request that passed every check of the protocol: the range lies in the export and keeps to its block size, the
/// flags are those the operation allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The client's name for it; clients may use one twice, so never a key.
    pub cookie: u64,
    /// First byte of the range; of a fence, the number of the session.
    pub offset: u64,
    /// Bytes of the range.
    pub length: u64,
    /// What to do.
    pub op: Op,
    /// How to do it.
    pub flags: CommandFlags,
}

impl Request {
    /// Bytes of buffer the request needs: the range's for reads and writes, else none.
    #[inline]
    pub fn payload_bytes(&self) -> u64 {
        match self.op {
            Op::Read | Op::Write => self.length,
            _ => 0,
        }
    }
}

/// What the caller has to do next.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// What is left of the input, if anything, is an incomplete message: receive more.
    NeedMore,
    /// A limit is reached: call again, with the same input, when replies were written and sent.
    Busy,
    /// The client chose this export; requests follow.
    Selected(Arc<Export>),
    /// `STARTTLS` was granted: send what is written, then shake hands; [`Session::secure`] goes on. Nothing else is taken meanwhile.
    StartTls,
    /// Do this and reply.
    Request(Request),
    /// Take the payload off the stream, do this and reply.
    Write(Request),
    /// A request was wrong; its reply is written already.
    Refused(Refused),
    /// The client takes its leave: finish and reply to what was begun, send everything, close.
    Disconnect,
    /// The session cannot go on: send what is written, close; nothing else is to be replied to.
    Close(CloseReason),
}

/// What [`Session::receive`] did.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// Bytes of the input that are done with.
    pub consumed: usize,
    /// What to do next.
    pub event: Event,
}

/// A request that was answered with an error by the session itself; for counters and logs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused {
    /// The request as it came.
    pub header: RequestHeader,
    /// What is wrong with it.
    pub fault: Fault,
    /// The error the client was told.
    pub error: ErrorCode,
}

/// Why a connection ends without the client's leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CloseReason {
    /// The client's flags have bits the server does not know.
    UnknownClientFlags(ClientFlags),
    /// An option does not begin with the option magic.
    BadOptionMagic(BadMagic),
    /// More options than [`Limits::options_max`].
    TooManyOptions(u32),
    /// An option longer than [`Limits::option_skip_bytes_max`], or a name longer than any name.
    OptionTooLong {
        /// Which option.
        option: OptionCode,
        /// Bytes of its data.
        data_bytes: u32,
        /// Bytes it may have.
        bytes_max: u32,
    },
    /// `EXPORT_NAME`, which cannot be answered with an error, for an export that is not here.
    UnknownExport,
    /// `EXPORT_NAME` after extended headers were agreed on, which rules it out.
    ExportNameWithExtendedHeaders,
    /// `EXPORT_NAME` while the server shuts down.
    ShuttingDown,
    /// `EXPORT_NAME` without TLS, where that is required.
    TlsRequired,
    /// Bytes behind `STARTTLS`, before it was answered: they could be anybody's, and would pass for the client's own.
    BytesBehindStartTls,
    /// A request does not begin with the magic agreed on.
    BadRequestMagic(BadMagic),
    /// A refused request whose payload is too long to be read and thrown away.
    PayloadTooLong {
        /// Bytes of the payload.
        payload_bytes: u64,
        /// Bytes that would have been read and thrown away.
        bytes_max: u64,
    },
}

impl fmt::Display for CloseReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CloseReason::UnknownClientFlags(flags) => {
                let known = ClientFlags::KNOWN.0;
                write!(
                    f,
                    "client flags {:#x} rejected: only the bits of {known:#x} are known",
                    flags.0
                )
            }
            CloseReason::BadOptionMagic(magic) => write!(f, "option rejected: {magic}"),
            CloseReason::TooManyOptions(max) => {
                write!(f, "more than {max} options sent without an export selected")
            }
            CloseReason::OptionTooLong {
                option,
                data_bytes,
                bytes_max,
            } => {
                write!(
                    f,
                    "{option} with {data_bytes} bytes of data rejected: at most {bytes_max} are read"
                )
            }
            CloseReason::UnknownExport => f.write_str("EXPORT_NAME names an export that is not here"),
            CloseReason::ExportNameWithExtendedHeaders => {
                f.write_str("EXPORT_NAME after EXTENDED_HEADERS rejected: GO is needed then")
            }
            CloseReason::ShuttingDown => f.write_str("the server is shutting down"),
            CloseReason::TlsRequired => {
                f.write_str("EXPORT_NAME without TLS rejected: STARTTLS comes first here")
            }
            CloseReason::BytesBehindStartTls => f.write_str(
                "bytes behind STARTTLS rejected: its answer comes first, and then the TLS handshake",
            ),
            CloseReason::BadRequestMagic(magic) => write!(f, "request rejected: {magic}"),
            CloseReason::PayloadTooLong {
                payload_bytes,
                bytes_max,
            } => {
                write!(
                    f,
                    "payload of {payload_bytes} bytes rejected: at most {bytes_max} are read"
                )
            }
        }
    }
}

/// One client's connection, as the server sees it.
#[derive(Debug)]
pub struct Session {
    limits: Limits,
    phase: Phase,
    shutting_down: bool,
    ended: bool,
}

#[derive(Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "one per connection, and the larger variant is the one in use"
)]
enum Phase {
    Negotiation(Negotiation),
    Transmission(Transmission),
}

impl Session {
    /// Begins a session with a client that may select from `exports`; writes the greeting.
    pub fn new(exports: Arc<ExportTable>, limits: Limits, out: &mut Vec<u8>) -> Session {
        write_greeting(HandshakeFlags::KNOWN, out);
        let phase = Phase::Negotiation(Negotiation::new(exports));
        Session {
            limits,
            phase,
            shutting_down: false,
            ended: false,
        }
    }

    /// Goes on with a session that another daemon has begun, with a client that may select from `exports`.
    ///
    /// # Errors
    /// If what the client was told does not hold here.
    pub fn restore(
        saved: &SavedSession,
        exports: Arc<ExportTable>,
        limits: Limits,
    ) -> Result<Session, RestoreError> {
        let phase = match &saved.phase {
            SavedPhase::Negotiation { .. } => Phase::Negotiation(Negotiation::restore(saved, exports)),
            SavedPhase::Transmission { .. } => {
                Phase::Transmission(Transmission::restore(saved, &exports, &limits)?)
            }
        };
        Ok(Session {
            limits,
            phase,
            shutting_down: false,
            ended: false,
        })
    }

    /// Says how the session stands to TLS, before anything is received.
    pub fn offer_tls(&mut self, mode: Mode) {
        if let Phase::Negotiation(negotiation) = &mut self.phase {
            negotiation.offer_tls(mode);
        }
    }

    /// TLS has been started as [`Event::StartTls`] asked: what was negotiated before is forgotten, since anybody may have said it. The
    /// client may select from `exports` now.
    pub fn secure(&mut self, exports: Arc<ExportTable>) {
        if let Phase::Negotiation(negotiation) = &mut self.phase {
            negotiation.secure(exports);
        }
    }

    /// What another daemon has to know to go on with it. The request that was begun last and is not all there does not count.
    pub fn save(&self) -> SavedSession {
        match &self.phase {
            Phase::Negotiation(negotiation) => negotiation.save(),
            Phase::Transmission(transmission) => transmission.save(),
        }
    }

    /// The export that is selected.
    pub fn export(&self) -> Option<&Arc<Export>> {
        match &self.phase {
            Phase::Negotiation(_) => None,
            Phase::Transmission(transmission) => Some(transmission.export()),
        }
    }

    /// Takes the next message from the start of `input`; answers that need no disk are appended to `out`, which the
    /// caller empties as it sends.
    ///
    /// # Panics
    /// Payload announced by [`Event::Write`] was not taken to its end.
    #[inline]
    pub fn receive(&mut self, input: &[u8], out: &mut Vec<u8>) -> Step {
        if let Phase::Transmission(transmission) = &mut self.phase
            && !self.ended
        {
            let step = transmission.receive(input, out);
            if let Event::Disconnect | Event::Close(_) = step.event {
                self.ended = true;
            }
            return step;
        }
        self.negotiate(input, out)
    }

    /// Reports that `bytes` of the payload announced by [`Event::Write`] were taken off the stream.
    ///
    /// # Panics
    /// More than was announced, or nothing was announced.
    #[inline]
    pub fn payload_taken(&mut self, bytes: u64) {
        self.transmission().payload_taken(bytes);
    }

    /// The replies to requests begun.
    ///
    /// # Panics
    /// No export is selected yet, so there is no request to reply to.
    #[inline]
    pub fn replies(&mut self) -> &mut Replies {
        self.transmission().replies()
    }

    /// From here on new requests and options are answered with the shutdown error; what was begun goes on.
    pub fn shut_down(&mut self) {
        self.shutting_down = true;
        match &mut self.phase {
            Phase::Negotiation(negotiation) => negotiation.shut_down(),
            Phase::Transmission(transmission) => transmission.shut_down(),
        }
    }

    /// Whether the client has yet to select an export ([`Limits::handshake_deadline`] applies).
    pub fn is_negotiating(&self) -> bool {
        matches!(self.phase, Phase::Negotiation(_)) && !self.ended
    }

    /// Whether the session took its last message: nothing is received any more.
    pub fn has_ended(&self) -> bool {
        self.ended
    }

    /// What the client calls the session, once an export is selected.
    pub fn name(&self) -> Option<SessionName> {
        match &self.phase {
            Phase::Negotiation(_) => None,
            Phase::Transmission(transmission) => transmission.name(),
        }
    }

    /// Which headers the client negotiated (so far).
    pub fn style(&self) -> HeaderStyle {
        match &self.phase {
            Phase::Negotiation(negotiation) => negotiation.style(),
            Phase::Transmission(transmission) => transmission.style(),
        }
    }

    #[cold]
    fn negotiate(&mut self, input: &[u8], out: &mut Vec<u8>) -> Step {
        let mut consumed = 0;
        while let (Phase::Negotiation(negotiation), false) = (&mut self.phase, self.ended) {
            match negotiation.receive(&input[consumed..], out, &self.limits) {
                Next::Incomplete => {
                    return Step {
                        consumed,
                        event: Event::NeedMore,
                    };
                }
                Next::Busy => {
                    return Step {
                        consumed,
                        event: Event::Busy,
                    };
                }
                Next::Taken(bytes) => consumed += bytes,
                Next::StartTls(bytes) => {
                    return Step {
                        consumed: consumed + bytes,
                        event: Event::StartTls,
                    };
                }
                Next::Selected(bytes, selection) => {
                    let export = Arc::clone(&selection.export);
                    let transmission = Transmission::new(&selection, &self.limits);
                    self.phase = Phase::Transmission(transmission);
                    if self.shutting_down {
                        self.shut_down();
                    }
                    return Step {
                        consumed: consumed + bytes,
                        event: Event::Selected(export),
                    };
                }
                Next::End(bytes, event) => {
                    self.ended = true;
                    return Step {
                        consumed: consumed + bytes,
                        event,
                    };
                }
            }
        }
        // Ended: what the client still sends is thrown away.
        Step {
            consumed: input.len(),
            event: Event::NeedMore,
        }
    }

    #[inline]
    fn transmission(&mut self) -> &mut Transmission {
        match &mut self.phase {
            Phase::Transmission(transmission) => transmission,
            Phase::Negotiation(_) => panic!("no request was begun: no export is selected yet"),
        }
    }
}

#[cfg(test)]
#[path = "session/tests/mod.rs"]
mod tests;
