//! The negotiation of a session: answers to a client's flags and options, up to the selection of an export.
//! `transmission` takes over from there. Only counters are kept: option data is read where it was received.
//!
//! ```text
//!  flags ──► options ⇄ skipping (data that is discarded)
//!               └────► selected, or the end
//! ```

use std::sync::Arc;

use blkmq_nbd::codec::handshake::{
    InfoKind, InfoRequest, OPTION_HEADER_BYTES, OptionCode, OptionHeader, SessionName, parse_client_flags,
    parse_name,
};
use blkmq_nbd::codec::option_reply::{
    BlockSizes, Info, OptionReplies, ReplyKind, truncate, write_export_name_reply,
};
use blkmq_nbd::codec::{ClientFlags, HeaderStyle, STRING_BYTES_MAX};
use blkmq_tls::Mode;

use super::contexts::Contexts;
use super::saved::{REFUSED_BEFORE, SavedPhase, SavedSession, SavedState};
use super::tls::Tls;
use super::{CloseReason, Event};
use crate::nbd::export::{Export, ExportId, ExportTable};
use crate::nbd::limits::Limits;

/// Bytes of a client's string that an error message quotes.
const QUOTED_BYTES_MAX: usize = 256;

/// What became of the next message.
#[derive(Debug)]
pub(super) enum Next {
    /// It has not arrived whole.
    Incomplete,
    /// Answers must be sent first.
    Busy,
    /// These bytes were taken; another message may follow.
    Taken(usize),
    /// These bytes ask for TLS, which is granted.
    StartTls(usize),
    /// These bytes, of this option, selected an export.
    Selected(usize, OptionCode, Selection),
    /// These bytes ended the session.
    End(usize, Event),
}

/// What the client negotiated.
#[derive(Debug)]
pub(super) struct Selection {
    pub(super) export: Arc<Export>,
    pub(super) style: HeaderStyle,
    /// What replies to block status requests have; without any, they are not permitted.
    pub(super) contexts: Contexts,
    /// The client's name for the session, so that it can be fenced.
    pub(super) session: Option<SessionName>,
}

#[derive(Debug)]
pub(super) struct Negotiation {
    exports: Arc<ExportTable>,
    state: State,
    pub(super) style: HeaderStyle,
    padded: bool,
    options: u32,
    /// The export whose contexts the client selected last.
    pub(super) context: Option<(ExportId, Contexts)>,
    session: Option<SessionName>,
    tls: Tls,
    /// An option was refused for lack of TLS.
    has_missed_tls: bool,
    shutting_down: bool,
}

#[derive(Clone, Copy, Debug)]
enum State {
    Flags,
    Options,
    /// `left` bytes of an option's data are discarded, then it is answered with an error.
    Skipping {
        left: usize,
        option: OptionCode,
        kind: ReplyKind,
        message: &'static str,
    },
}

impl Negotiation {
    pub(super) fn new(exports: Arc<ExportTable>) -> Self {
        Negotiation {
            exports,
            state: State::Flags,
            style: HeaderStyle::Simple,
            padded: true,
            options: 0,
            context: None,
            session: None,
            tls: Tls::Off,
            has_missed_tls: false,
            shutting_down: false,
        }
    }

    /// Continues where another daemon stopped. If the export of a selected context no longer
    /// exists, no context is selected.
    pub(super) fn restore(saved: &SavedSession, exports: Arc<ExportTable>) -> Self {
        let mut negotiation = Negotiation::new(exports);
        negotiation.style = saved.style;
        negotiation.session = saved.name;
        if let SavedPhase::Negotiation {
            state,
            is_padded,
            options,
            context,
        } = &saved.phase
        {
            negotiation.state = match *state {
                SavedState::Flags => State::Flags,
                SavedState::Options => State::Options,
                SavedState::Skipping { left, option, kind } => State::Skipping {
                    left: left as usize,
                    option,
                    kind,
                    message: REFUSED_BEFORE,
                },
            };
            negotiation.padded = *is_padded;
            negotiation.options = *options;
            negotiation.context = context.as_ref().and_then(|(name, contexts)| {
                let export = negotiation.exports.find(name)?;
                Some((export.id, contexts.clone()))
            });
        }
        negotiation
    }

    pub(super) fn save(&self) -> SavedSession {
        let name_of = |id: ExportId| self.exports.iter().find(|export| export.id == id);
        let state = match self.state {
            State::Flags => SavedState::Flags,
            State::Options => SavedState::Options,
            State::Skipping {
                left, option, kind, ..
            } => SavedState::Skipping {
                left: left as u32,
                option,
                kind,
            },
        };
        SavedSession {
            style: self.style,
            name: self.session,
            phase: SavedPhase::Negotiation {
                state,
                is_padded: self.padded,
                options: self.options,
                context: self.context.as_ref().and_then(|(export, contexts)| {
                    let export = name_of(*export)?;
                    Some((export.name.clone(), contexts.clone()))
                }),
            },
        }
    }

    pub(super) fn offer_tls(&mut self, mode: Mode) {
        self.tls = mode.into();
    }

    /// TLS is established: the client begins again, and may select from `exports`.
    pub(super) fn secure(&mut self, exports: Arc<ExportTable>) {
        self.exports = exports;
        self.tls = Tls::Started;
        self.style = HeaderStyle::Simple;
        (self.context, self.session) = (None, None);
    }

    pub(super) fn has_missed_tls(&self) -> bool {
        self.has_missed_tls && self.tls == Tls::Required
    }

    pub(super) fn style(&self) -> HeaderStyle {
        self.style
    }

    pub(super) fn shut_down(&mut self) {
        self.shutting_down = true;
    }

    pub(super) fn receive(&mut self, input: &[u8], out: &mut Vec<u8>, limits: &Limits) -> Next {
        match self.state {
            _ if self.tls == Tls::Starting && input.is_empty() => Next::Incomplete,
            _ if self.tls == Tls::Starting => close(0, CloseReason::BytesBehindStartTls),
            State::Flags => self.receive_flags(input),
            State::Skipping { .. } => self.skip(input, out),
            State::Options if out.len() >= limits.unsent_bytes_max => Next::Busy,
            State::Options => self.receive_option(input, out, limits),
        }
    }

    fn receive_flags(&mut self, input: &[u8]) -> Next {
        let Some(flags) = parse_client_flags(input) else {
            return Next::Incomplete;
        };
        if !ClientFlags::KNOWN.contains(flags) {
            return Next::End(4, Event::Close(CloseReason::UnknownClientFlags(flags)));
        }
        self.padded = !flags.contains(ClientFlags::NO_ZEROES);
        self.state = State::Options;
        Next::Taken(4)
    }

    fn receive_option(&mut self, input: &[u8], out: &mut Vec<u8>, limits: &Limits) -> Next {
        let header = match OptionHeader::parse(input) {
            Ok(Some(header)) => header,
            Ok(None) => return Next::Incomplete,
            Err(magic) => return close(0, CloseReason::BadOptionMagic(magic)),
        };
        if self.options >= limits.options_max {
            return close(0, CloseReason::TooManyOptions(limits.options_max));
        }
        if header.code == OptionCode::ABORT {
            OptionReplies::new(header.code, out).ack();
            return Next::End(OPTION_HEADER_BYTES, Event::Disconnect);
        }
        if let Some((kind, message)) = self.refusal(&header, limits) {
            self.has_missed_tls |= kind == ReplyKind::ERR_TLS_REQD;
            return self.begin_skipping(&header, kind, message, limits);
        }
        let data = &input[OPTION_HEADER_BYTES..];
        if header.code == OptionCode::STARTTLS {
            return self.start_tls(data, out);
        }
        let Some(data) = data.get(..header.data_bytes as usize) else {
            return Next::Incomplete;
        };
        self.options += 1;
        self.answer(header.code, data, out, limits)
    }

    /// Grants TLS, if no bytes follow the option: an attacker may have sent those.
    fn start_tls(&mut self, behind: &[u8], out: &mut Vec<u8>) -> Next {
        if !behind.is_empty() {
            return close(0, CloseReason::BytesBehindStartTls);
        }
        self.options += 1;
        self.tls = Tls::Starting;
        OptionReplies::new(OptionCode::STARTTLS, out).ack();
        Next::StartTls(OPTION_HEADER_BYTES)
    }

    /// The refusal of an option that is refused whatever its data is.
    fn refusal(&self, header: &OptionHeader, limits: &Limits) -> Option<(ReplyKind, &'static str)> {
        let empty = header.data_bytes == 0;
        let kind = match header.code {
            // It has no error reply: see `answer_export_name`.
            OptionCode::EXPORT_NAME if header.data_bytes as usize <= STRING_BYTES_MAX => return None,
            _ if self.shutting_down => (ReplyKind::ERR_SHUTDOWN, "the server is shutting down"),
            OptionCode::STARTTLS => return self.tls.refusal(header),
            _ if self.tls == Tls::Required => return self.tls.refusal(header),
            OptionCode::LIST | OptionCode::STRUCTURED_REPLY | OptionCode::EXTENDED_HEADERS if !empty => {
                (ReplyKind::ERR_INVALID, "this option has no data")
            }
            OptionCode::LIST
            | OptionCode::STRUCTURED_REPLY
            | OptionCode::EXTENDED_HEADERS
            | OptionCode::INFO
            | OptionCode::GO
            | OptionCode::LIST_META_CONTEXT
            | OptionCode::SET_META_CONTEXT
            | OptionCode::SESSION
                if header.code != OptionCode::SESSION || self.exports.instance.is_some() =>
            {
                let too_long = header.data_bytes > limits.option_bytes_max;
                return too_long.then_some((ReplyKind::ERR_TOO_BIG, "the option's data is too long"));
            }
            _ => (ReplyKind::ERR_UNSUP, "this server does not know the option"),
        };
        Some(kind)
    }

    fn begin_skipping(
        &mut self,
        header: &OptionHeader,
        kind: ReplyKind,
        message: &'static str,
        limits: &Limits,
    ) -> Next {
        let (option, data_bytes) = (header.code, header.data_bytes);
        let is_name = option == OptionCode::EXPORT_NAME;
        let bytes_max = if is_name {
            STRING_BYTES_MAX as u32
        } else {
            limits.option_skip_bytes_max
        };
        if data_bytes > bytes_max {
            return close(
                0,
                CloseReason::OptionTooLong {
                    option,
                    data_bytes,
                    bytes_max,
                },
            );
        }
        if option == OptionCode::SET_META_CONTEXT {
            self.context = None;
        }
        self.options += 1;
        self.state = State::Skipping {
            left: data_bytes as usize,
            option,
            kind,
            message,
        };
        Next::Taken(OPTION_HEADER_BYTES)
    }

    fn skip(&mut self, input: &[u8], out: &mut Vec<u8>) -> Next {
        let State::Skipping {
            left,
            option,
            kind,
            message,
        } = &mut self.state
        else {
            unreachable!("skipping in state {:?}", self.state)
        };
        let taken = input.len().min(*left);
        *left -= taken;
        if *left == 0 {
            OptionReplies::new(*option, out).error(*kind, message);
            self.state = State::Options;
            return Next::Taken(taken);
        }
        if taken == 0 {
            Next::Incomplete
        } else {
            Next::Taken(taken)
        }
    }

    fn answer(&mut self, option: OptionCode, data: &[u8], out: &mut Vec<u8>, limits: &Limits) -> Next {
        let taken = OPTION_HEADER_BYTES + data.len();
        let mut replies = OptionReplies::new(option, out);
        match option {
            OptionCode::EXPORT_NAME => return self.answer_export_name(data, out),
            OptionCode::GO | OptionCode::INFO => {
                let described = self.answer_info(data, &mut replies, limits);
                if let (Some(export), OptionCode::GO) = (described, option) {
                    return Next::Selected(taken, option, self.select(export));
                }
            }
            OptionCode::LIST => self.answer_list(&mut replies),
            OptionCode::STRUCTURED_REPLY => self.answer_structured_reply(&mut replies),
            OptionCode::EXTENDED_HEADERS => {
                self.style = HeaderStyle::Extended;
                replies.ack();
            }
            OptionCode::LIST_META_CONTEXT => self.answer_list_contexts(data, &mut replies),
            OptionCode::SET_META_CONTEXT => self.answer_set_contexts(data, &mut replies),
            OptionCode::SESSION => self.answer_session(data, &mut replies),
            other => unreachable!("{other} passed `refusal`"),
        }
        Next::Taken(taken)
    }

    fn answer_export_name(&mut self, data: &[u8], out: &mut Vec<u8>) -> Next {
        if self.shutting_down {
            return close(0, CloseReason::ShuttingDown);
        }
        if self.tls == Tls::Required {
            return close(0, CloseReason::TlsRequired);
        }
        if self.style == HeaderStyle::Extended {
            return close(0, CloseReason::ExportNameWithExtendedHeaders);
        }
        let Some(export) = parse_name(data).and_then(|name| self.exports.find(name)) else {
            return close(0, CloseReason::UnknownExport);
        };
        write_export_name_reply(
            export.size_bytes,
            export.transmission_flags(self.style),
            self.padded,
            out,
        );
        let taken = OPTION_HEADER_BYTES + data.len();
        Next::Selected(taken, OptionCode::EXPORT_NAME, self.select(Arc::clone(export)))
    }

    fn select(&self, export: Arc<Export>) -> Selection {
        let selected = self.context.as_ref().filter(|(of, _)| *of == export.id);
        let contexts = selected.map(|(_, contexts)| contexts.clone());
        Selection {
            export,
            style: self.style,
            contexts: contexts.unwrap_or_default(),
            session: self.session,
        }
    }

    fn answer_list(&self, replies: &mut OptionReplies<'_>) {
        for export in self.exports.iter() {
            replies.server(&export.name, &export.description);
        }
        replies.ack();
    }

    fn answer_structured_reply(&mut self, replies: &mut OptionReplies<'_>) {
        if self.style == HeaderStyle::Extended {
            let message = "extended headers are agreed on and include structured replies";
            return replies.error(ReplyKind::ERR_EXT_HEADER_REQD, message);
        }
        self.style = HeaderStyle::Structured;
        replies.ack();
    }

    fn answer_session(&mut self, data: &[u8], replies: &mut OptionReplies<'_>) {
        let (Some(name), None) = (SessionName::parse(data), self.session) else {
            let message = "malformed option, or the session has a name already";
            return replies.error(ReplyKind::ERR_INVALID, message);
        };
        self.session = Some(name);
        self.exports
            .instance
            .iter()
            .for_each(|instance| replies.session(*instance));
        replies.ack();
    }

    /// Answers `INFO` or `GO`; returns the export if it succeeded.
    fn answer_info(
        &self,
        data: &[u8],
        replies: &mut OptionReplies<'_>,
        limits: &Limits,
    ) -> Option<Arc<Export>> {
        let Some(request) = InfoRequest::parse(data) else {
            replies.error(
                ReplyKind::ERR_INVALID,
                "malformed option: name and kinds do not fill its data",
            );
            return None;
        };
        let export = self.find(request.name, replies)?;
        let flags = export.transmission_flags(self.style);
        replies.info(Info::Export {
            size_bytes: export.size_bytes,
            flags,
        });
        if request.wants(InfoKind::NAME) {
            replies.info(Info::Name(&export.name));
        }
        if request.wants(InfoKind::DESCRIPTION) && !export.description.is_empty() {
            replies.info(Info::Description(&export.description));
        }
        replies.info(Info::BlockSize(block_sizes(export, limits)));
        replies.ack();
        Some(Arc::clone(export))
    }

    pub(super) fn find(&self, name: &str, replies: &mut OptionReplies<'_>) -> Option<&Arc<Export>> {
        let found = self.exports.find(name);
        if found.is_none() {
            let name = truncate(name, QUOTED_BYTES_MAX);
            let message = format!("export '{name}' is not here; LIST names those that are");
            replies.error(ReplyKind::ERR_UNKNOWN, &message);
        }
        found
    }
}

fn close(taken: usize, reason: CloseReason) -> Next {
    Next::End(taken, Event::Close(reason))
}

/// The block sizes in the reply: a connection's limit is the largest payload, and bounds the
/// preferred block.
fn block_sizes(export: &Export, limits: &Limits) -> BlockSizes {
    let payload_max = limits.payload_bytes_max;
    let preferred_max = 1 << payload_max.ilog2();
    BlockSizes {
        minimum: export.block_min_bytes,
        preferred: export.block_preferred_bytes.min(preferred_max),
        payload_max,
    }
}
