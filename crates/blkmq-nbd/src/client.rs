//! The handshake of an NBD client, which selects an export: the options that it sends, in which order,
//! and the replies that it accepts. The load generator and the NBD driver run it over their own sockets;
//! [`super::codec`] has the requests and replies.
//!
//! ```text
//!  greeting ─► STARTTLS, TLS ─► EXTENDED_HEADERS ─► STRUCTURED_REPLY ─► SET_META_CONTEXT ─► SESSION ─► GO ─► agreed
//!             (if wanted)        (if wanted)      (if not extended)     (if wanted)      (if wanted)  └─► EXPORT_NAME, for servers without GO
//! ```

use std::fmt;
use std::io::{self, Read, Write};

use super::codec::handshake::{
    InfoKind, InfoRequest, MetaRequest, OptionCode, SessionName, parse_greeting, write_client_flags,
    write_option,
};
use super::codec::option_reply::{
    BlockSizes, Info, REPLY_HEADER_BYTES, ReplyHeader, ReplyKind, parse_export_name_reply,
    parse_meta_context, parse_session,
};
use super::codec::{BadMagic, ClientFlags, HandshakeFlags, HeaderStyle, TransmissionFlags};

/// The name of the context that [`Wanted::block_status`] selects.
const ALLOCATION_CONTEXT: &str = "base:allocation";
/// Longest accepted data of one reply to an option, in bytes: a name and a description fit.
const ANSWER_BYTES_MAX: u32 = 16 << 10;
/// Most accepted replies to one option.
const ANSWERS_MAX: u32 = 1024;

/// Bytes a receive buffer must be able to hold during the handshake.
pub const RECEIVE_BYTES_MIN: usize = REPLY_HEADER_BYTES + ANSWER_BYTES_MAX as usize;

/// What a client asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// The export's name, at most 4096 bytes; empty for the server's default.
    pub name: String,
    /// The richest headers to ask for; the server may grant less.
    pub style: HeaderStyle,
    /// Ask for `base:allocation` (needs structured replies or extended headers).
    pub block_status: bool,
    /// The name for the session; servers other than ours do not know this option.
    pub session: Option<SessionName>,
}

impl Wanted {
    /// `name` with compact requests and simple replies: the smallest headers.
    pub fn plain(name: impl Into<String>) -> Wanted {
        Wanted {
            name: name.into(),
            style: HeaderStyle::Simple,
            block_status: false,
            session: None,
        }
    }
}

/// What client and server negotiated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Agreed {
    /// Headers of the requests and replies to come.
    pub style: HeaderStyle,
    /// Bytes of the export.
    pub size_bytes: u64,
    /// What the export can do.
    pub flags: TransmissionFlags,
    /// Block sizes to respect, if the server sent them.
    pub block_sizes: Option<BlockSizes>,
    /// Id of the allocation context, if it was wanted and granted.
    pub allocation_context: Option<u32>,
    /// The instance of the server, if a name for the session was wanted and the server has accepted
    /// it.
    pub instance: Option<u64>,
}

/// What the caller has to do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Send what was written, receive more.
    NeedMore,
    /// Send what was written; requests may follow.
    Agreed(Agreed),
    /// Send what was written, if anything, and close.
    Failed(Failure),
}

/// Why a handshake failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The peer does not use newstyle NBD, or the stream is out of step.
    BadMagic(BadMagic),
    /// The server refused.
    Refused {
        /// Which option.
        option: OptionCode,
        /// The kind of refusal.
        kind: ReplyKind,
        /// Its message.
        message: String,
    },
    /// TLS is wanted, and the server has no options.
    NoTls,
    /// A reply that does not have the form of its kind, or belongs to another option, or is too
    /// much.
    Malformed(OptionCode),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::BadMagic(magic) => write!(f, "not a newstyle NBD server: {magic}"),
            Failure::Refused {
                option,
                kind,
                message,
            } => {
                write!(f, "server refused {option} with {kind}")?;
                match message.trim() {
                    "" => Ok(()),
                    message => write!(f, ": {message}"),
                }
            }
            Failure::NoTls => f.write_str("the server is too old for TLS"),
            Failure::Malformed(option) => write!(f, "malformed answer to {option}"),
        }
    }
}

impl std::error::Error for Failure {}

/// Goes through a whole handshake over a stream that blocks.
///
/// # Errors
/// The stream's; that the server has hung up; a [`Failure`], as the source.
pub fn negotiate(stream: &mut (impl Read + Write), wanted: Wanted) -> io::Result<Agreed> {
    let mut handshake = Handshake::new(wanted);
    let (mut input, mut filled, mut out) = (vec![0; RECEIVE_BYTES_MIN], 0, Vec::new());
    loop {
        let count = stream.read(&mut input[filled..])?;
        if count == 0 {
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "the server has hung up",
            ));
        }
        filled += count;
        let (taken, progress) = handshake.receive(&input[..filled], &mut out);
        input.copy_within(taken..filled, 0);
        filled -= taken;
        stream.write_all(&out)?;
        out.clear();
        match progress {
            Progress::NeedMore => {}
            Progress::Failed(failure) => return Err(io::Error::other(failure)),
            // A server sends nothing more before it is asked.
            Progress::Agreed(_) if filled > 0 => return Err(io::ErrorKind::InvalidData.into()),
            Progress::Agreed(agreed) => return Ok(agreed),
        }
    }
}

/// A handshake under way.
#[derive(Debug)]
pub struct Handshake {
    wanted: Wanted,
    wants_tls: bool,
    stage: Stage,
    padded: bool,
    answers: u32,
    export: Option<(u64, TransmissionFlags)>,
    style: HeaderStyle,
    block_sizes: Option<BlockSizes>,
    allocation_context: Option<u32>,
    instance: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Greeting,
    /// Waits for the replies to this option.
    Option(OptionCode),
    /// TLS is being started.
    Tls,
    Done,
}

impl Handshake {
    /// A handshake that has not received the greeting.
    ///
    /// # Panics
    /// The name is longer than 4096 bytes.
    pub fn new(wanted: Wanted) -> Handshake {
        assert!(
            wanted.name.len() <= super::codec::STRING_BYTES_MAX,
            "name of {} bytes",
            wanted.name.len()
        );
        Handshake {
            wanted,
            wants_tls: false,
            stage: Stage::Greeting,
            padded: true,
            answers: 0,
            export: None,
            style: HeaderStyle::Simple,
            block_sizes: None,
            allocation_context: None,
            instance: None,
        }
    }

    /// Requires TLS before anything else: without TLS the handshake fails.
    #[must_use]
    pub fn with_tls(mut self) -> Handshake {
        self.wants_tls = true;
        self
    }

    /// Returns whether TLS is to be started now, if all input was taken; [`Handshake::secured`]
    /// continues.
    pub fn is_starting_tls(&self) -> bool {
        self.stage == Stage::Tls
    }

    /// TLS has been started, as [`Handshake::is_starting_tls`] asked.
    ///
    /// # Panics
    /// It was not to be started.
    pub fn secured(&mut self, out: &mut Vec<u8>) {
        assert_eq!(self.stage, Stage::Tls, "TLS was not asked for");
        self.send(self.first_option(), out);
    }

    /// Takes what it can from `input`, writes what is to be sent to `out` and returns the number of
    /// bytes taken; the caller keeps the rest for the next call. Once agreed or failed, takes
    /// nothing more.
    pub fn receive(&mut self, input: &[u8], out: &mut Vec<u8>) -> (usize, Progress) {
        let mut taken = 0;
        while self.stage != Stage::Done {
            match self.receive_message(&input[taken..], out) {
                Ok(Some(bytes)) => taken += bytes,
                Ok(None) => return (taken, Progress::NeedMore),
                Err(failure) => {
                    self.stage = Stage::Done;
                    self.export = None;
                    if let Failure::Refused { .. } = failure {
                        write_option(OptionCode::ABORT, &[], out);
                    }
                    return (taken, Progress::Failed(failure));
                }
            }
        }
        let Some((size_bytes, flags)) = self.export else {
            return (taken, Progress::NeedMore);
        };
        let (style, block_sizes) = (self.style, self.block_sizes);
        let (allocation_context, instance) = (self.allocation_context, self.instance);
        (
            taken,
            Progress::Agreed(Agreed {
                style,
                size_bytes,
                flags,
                block_sizes,
                allocation_context,
                instance,
            }),
        )
    }

    /// Takes one message; returns its bytes, or `None` if it is not complete.
    fn receive_message(&mut self, input: &[u8], out: &mut Vec<u8>) -> Result<Option<usize>, Failure> {
        match self.stage {
            Stage::Greeting => self.receive_greeting(input, out),
            Stage::Option(OptionCode::EXPORT_NAME) => Ok(self.receive_export_name_reply(input)),
            Stage::Option(option) => self.receive_answer(option, input, out),
            Stage::Tls | Stage::Done => Ok(None),
        }
    }

    fn receive_greeting(&mut self, input: &[u8], out: &mut Vec<u8>) -> Result<Option<usize>, Failure> {
        let Some(flags) = parse_greeting(input).map_err(Failure::BadMagic)? else {
            return Ok(None);
        };
        let fixed = flags.contains(HandshakeFlags::FIXED_NEWSTYLE);
        self.padded = !flags.contains(HandshakeFlags::NO_ZEROES);
        let reply = ClientFlags::NONE
            .with_if(fixed, ClientFlags::FIXED_NEWSTYLE)
            .with_if(!self.padded, ClientFlags::NO_ZEROES);
        write_client_flags(reply, out);
        let first = if self.wants_tls && !fixed {
            return Err(Failure::NoTls);
        } else if self.wants_tls {
            OptionCode::STARTTLS
        } else if fixed {
            self.first_option()
        } else {
            OptionCode::EXPORT_NAME
        };
        self.send(first, out);
        Ok(Some(super::codec::handshake::GREETING_BYTES))
    }

    fn receive_export_name_reply(&mut self, input: &[u8]) -> Option<usize> {
        let (size_bytes, flags, bytes) = parse_export_name_reply(input, self.padded)?;
        self.export = Some((size_bytes, flags));
        self.stage = Stage::Done;
        Some(bytes)
    }

    fn receive_answer(
        &mut self,
        option: OptionCode,
        input: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<Option<usize>, Failure> {
        let Some(header) = ReplyHeader::parse(input).map_err(Failure::BadMagic)? else {
            return Ok(None);
        };
        self.answers += 1;
        if header.option != option || header.data_bytes > ANSWER_BYTES_MAX || self.answers > ANSWERS_MAX {
            return Err(Failure::Malformed(option));
        }
        let bytes = REPLY_HEADER_BYTES + header.data_bytes as usize;
        let Some(data) = input.get(REPLY_HEADER_BYTES..bytes) else {
            self.answers -= 1;
            return Ok(None);
        };
        match header.kind {
            ReplyKind::ACK => self.granted(option, out)?,
            kind if kind.is_error() => self.refused(option, kind, data, out)?,
            kind => self.learn(kind, data).ok_or(Failure::Malformed(option))?,
        }
        Ok(Some(bytes))
    }

    /// Stores a detail that comes before the last reply.
    fn learn(&mut self, kind: ReplyKind, data: &[u8]) -> Option<()> {
        match kind {
            ReplyKind::INFO => match Info::parse(data)? {
                Info::Export { size_bytes, flags } => self.export = Some((size_bytes, flags)),
                Info::BlockSize(sizes) => self.block_sizes = Some(sizes),
                Info::Name(_) | Info::Description(_) | Info::Unknown(_) => {}
            },
            ReplyKind::META_CONTEXT => {
                let (id, name) = parse_meta_context(data)?;
                if name == ALLOCATION_CONTEXT {
                    self.allocation_context = Some(id);
                }
            }
            ReplyKind::SESSION if self.stage == Stage::Option(OptionCode::SESSION) => {
                self.instance = Some(parse_session(data)?)
            }
            _ => return None,
        }
        Some(())
    }

    fn granted(&mut self, option: OptionCode, out: &mut Vec<u8>) -> Result<(), Failure> {
        match option {
            OptionCode::STARTTLS => {
                self.stage = Stage::Tls;
                return Ok(());
            }
            OptionCode::EXTENDED_HEADERS => self.style = HeaderStyle::Extended,
            OptionCode::STRUCTURED_REPLY => self.style = HeaderStyle::Structured,
            OptionCode::GO if self.export.is_none() => return Err(Failure::Malformed(option)),
            OptionCode::GO => {
                self.stage = Stage::Done;
                return Ok(());
            }
            _ => {}
        }
        self.send(self.option_after(option), out);
        Ok(())
    }

    fn refused(
        &mut self,
        option: OptionCode,
        kind: ReplyKind,
        data: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<(), Failure> {
        let next = match option {
            OptionCode::GO if kind == ReplyKind::ERR_UNSUP && self.style != HeaderStyle::Extended => {
                OptionCode::EXPORT_NAME
            }
            OptionCode::GO | OptionCode::STARTTLS => {
                let message = String::from_utf8_lossy(data).into_owned();
                return Err(Failure::Refused {
                    option,
                    kind,
                    message,
                });
            }
            _ => self.option_after(option),
        };
        match option {
            OptionCode::SET_META_CONTEXT => self.allocation_context = None,
            OptionCode::SESSION => self.instance = None,
            _ => {}
        }
        self.send(next, out);
        Ok(())
    }

    fn first_option(&self) -> OptionCode {
        match self.wanted.style {
            HeaderStyle::Extended => OptionCode::EXTENDED_HEADERS,
            HeaderStyle::Structured => OptionCode::STRUCTURED_REPLY,
            HeaderStyle::Simple => self.option_after(OptionCode::SET_META_CONTEXT),
        }
    }

    fn option_after(&self, option: OptionCode) -> OptionCode {
        if option == OptionCode::EXTENDED_HEADERS && self.style != HeaderStyle::Extended {
            return OptionCode::STRUCTURED_REPLY;
        }
        let is_before_contexts = !matches!(option, OptionCode::SET_META_CONTEXT | OptionCode::SESSION);
        if is_before_contexts && self.style != HeaderStyle::Simple && self.wanted.block_status {
            OptionCode::SET_META_CONTEXT
        } else if option != OptionCode::SESSION && self.wanted.session.is_some() {
            OptionCode::SESSION
        } else {
            OptionCode::GO
        }
    }

    fn send(&mut self, option: OptionCode, out: &mut Vec<u8>) {
        let (name, mut data) = (&self.wanted.name, Vec::new());
        match option {
            OptionCode::GO => InfoRequest::write(name, &[InfoKind::BLOCK_SIZE], &mut data),
            OptionCode::EXPORT_NAME => data.extend_from_slice(name.as_bytes()),
            OptionCode::SET_META_CONTEXT => MetaRequest::write(name, &[ALLOCATION_CONTEXT], &mut data),
            OptionCode::SESSION => self.wanted.session.iter().for_each(|name| name.write(&mut data)),
            _ => {}
        }
        write_option(option, &data, out);
        self.stage = Stage::Option(option);
        self.answers = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusal_without_a_text_says_what_its_number_means() {
        let told = |kind, message: &str| {
            let (option, message) = (OptionCode::GO, message.to_owned());
            Failure::Refused {
                option,
                kind,
                message,
            }
            .to_string()
        };
        let said = told(ReplyKind::ERR_UNKNOWN, "");
        assert!(said.ends_with("0x80000006 (it has no such export)"), "{said}");
        assert!(told(ReplyKind(0x8000_0063), " ").ends_with("0x80000063"));
        assert!(told(ReplyKind::ERR_POLICY, "not you").ends_with("(its policy): not you"));
    }
}
