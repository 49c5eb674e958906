//! A session of an NBD client, from bytes to answers: negotiation first, then requests and replies. The
//! socket layer passes bytes in and sends what the session wrote; requests go to the disk of the selected
//! export.
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

pub(super) use contexts::CHANGED;
pub use contexts::Contexts;
pub use reply::Replies;
pub use rules::Fault;
pub use saved::{RestoreError, SavedPhase, SavedSession, SavedState};

use blkmq_nbd::codec::handshake::{OptionCode, SessionName, write_greeting};
use blkmq_nbd::codec::option_reply::{OptionReplies, ReplyKind};
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
    /// End the client's session whose number is the offset, and wait for its requests to end; no
    /// range.
    Fence,
}

/// A request that passed every check of the protocol: the range lies in the export and respects its
/// block size, and the operation allows the flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The client's number for the request; clients may use one twice, so it is never a key.
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
    /// A limit is reached: call again with the same input after replies were written and sent.
    Busy,
    /// The client selected this export; requests follow, unless [`Session::refuse`] is called before anything else.
    Selected(Arc<Export>),
    /// `STARTTLS` was granted: send what is written, then do the handshake and call
    /// [`Session::secure`]. Nothing else is taken meanwhile.
    StartTls,
    /// Execute the request and reply.
    Request(Request),
    /// Take the payload off the stream, execute the request and reply.
    Write(Request),
    /// A request was wrong; its reply is written already.
    Refused(Refused),
    /// The client disconnects: finish and reply to open requests, send everything, close.
    Disconnect,
    /// The session cannot continue: send what is written, close; nothing else gets a reply.
    Close(CloseReason),
}

/// What [`Session::receive`] did.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// Bytes of the input that were taken.
    pub consumed: usize,
    /// What to do next.
    pub event: Event,
}

/// A request that the session itself answered with an error; for counters and logs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused {
    /// The request as it came.
    pub header: RequestHeader,
    /// What is wrong with it.
    pub fault: Fault,
    /// The error in the reply.
    pub error: ErrorCode,
}

/// Why the server ends a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CloseReason {
    /// The client's flags have unknown bits.
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
    /// `EXPORT_NAME`, which cannot be answered with an error, for an export that does not exist
    /// here.
    UnknownExport,
    /// `EXPORT_NAME` after extended headers were negotiated, which excludes it.
    ExportNameWithExtendedHeaders,
    /// `EXPORT_NAME` while the server shuts down.
    ShuttingDown,
    /// `EXPORT_NAME` without TLS, where that is required.
    TlsRequired,
    /// Bytes behind `STARTTLS` that arrived before its answer: an attacker may have sent them, and
    /// they would count as the client's.
    BytesBehindStartTls,
    /// A request does not begin with the negotiated magic.
    BadRequestMagic(BadMagic),
    /// A refused request whose payload is too long to be read and discarded.
    PayloadTooLong {
        /// Bytes of the payload.
        payload_bytes: u64,
        /// Bytes that would have been read and discarded.
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
    /// How to go on if the selection is refused.
    undo: Option<Box<Undo>>,
    shutting_down: bool,
    ended: bool,
}

/// What a refused selection goes back to.
#[derive(Debug)]
struct Undo {
    negotiation: Negotiation,
    option: OptionCode,
    /// Where the option's replies begin.
    replies_at: usize,
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
    /// Begins a session with a client that may select from `exports`; appends the greeting to
    /// `out`.
    pub fn new(exports: Arc<ExportTable>, limits: Limits, out: &mut Vec<u8>) -> Session {
        write_greeting(HandshakeFlags::KNOWN, out);
        let phase = Phase::Negotiation(Negotiation::new(exports));
        Session {
            limits,
            phase,
            undo: None,
            shutting_down: false,
            ended: false,
        }
    }

    /// Continues a session that another daemon began, with a client that may select from `exports`.
    ///
    /// # Errors
    /// What the client was told does not hold here.
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
            undo: None,
            shutting_down: false,
            ended: false,
        })
    }

    /// Sets whether TLS is offered or required. To be called before anything is received.
    pub fn offer_tls(&mut self, mode: Mode) {
        if let Phase::Negotiation(negotiation) = &mut self.phase {
            negotiation.offer_tls(mode);
        }
    }

    /// Reports that TLS was started as [`Event::StartTls`] asked: earlier negotiation is discarded,
    /// since an attacker may have sent it. The client may select from `exports` now.
    pub fn secure(&mut self, exports: Arc<ExportTable>) {
        if let Phase::Negotiation(negotiation) = &mut self.phase {
            negotiation.secure(exports);
        }
    }

    /// What another daemon needs to continue the session. A request begun last that has not arrived
    /// whole is not included.
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

    /// What replies to block status requests have, once an export is selected.
    pub fn contexts(&self) -> Option<&Contexts> {
        match &self.phase {
            Phase::Negotiation(_) => None,
            Phase::Transmission(transmission) => Some(transmission.contexts()),
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

    /// Takes a selection back that was just reported by [`Event::Selected`], of which `out` has the replies: these are
    /// replaced by an error with `why`, and negotiation goes on. Returns false if the option has no error reply: the
    /// connection is to be closed.
    ///
    /// # Panics
    /// No selection was just reported.
    #[must_use]
    pub fn refuse(&mut self, why: &str, out: &mut Vec<u8>) -> bool {
        let undo = self.undo.take().expect("an export was just selected");
        if undo.option == OptionCode::EXPORT_NAME {
            return false;
        }
        out.truncate(undo.replies_at);
        OptionReplies::new(undo.option, out).error(ReplyKind::ERR_POLICY, why);
        self.phase = Phase::Negotiation(undo.negotiation);
        if self.shutting_down {
            self.shut_down();
        }
        true
    }

    /// Keeps the selection that was just reported by [`Event::Selected`]: what a refusal needs is dropped.
    pub fn accept(&mut self) {
        self.undo = None;
    }

    /// From here on new requests and options are answered with the shutdown error; open requests
    /// continue.
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

    /// Whether the client was refused something for lack of TLS, which it has not started.
    pub fn has_missed_tls(&self) -> bool {
        matches!(&self.phase, Phase::Negotiation(negotiation) if negotiation.has_missed_tls())
    }

    /// Whether the session took its last message: nothing is received any more.
    pub fn has_ended(&self) -> bool {
        self.ended
    }

    /// The client's name for the session, once an export is selected.
    pub fn name(&self) -> Option<SessionName> {
        match &self.phase {
            Phase::Negotiation(_) => None,
            Phase::Transmission(transmission) => transmission.name(),
        }
    }

    /// Which headers the client has negotiated so far.
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
            let replies_at = out.len();
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
                Next::Selected(bytes, option, selection) => {
                    let export = Arc::clone(&selection.export);
                    let next = Phase::Transmission(Transmission::new(&selection, &self.limits));
                    if let Phase::Negotiation(negotiation) = std::mem::replace(&mut self.phase, next) {
                        self.undo = Some(Box::new(Undo {
                            negotiation,
                            option,
                            replies_at,
                        }));
                    }
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
        // Ended: what the client still sends is discarded.
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
mod tests;
