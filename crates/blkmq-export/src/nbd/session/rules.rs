//! The rules by which a request may be begun or, if not, one of its faults is reported to the client.
//! `transmission` asks for every request: one table look-up and a few comparisons for a valid one.

use std::fmt;

use blkmq_nbd::codec::handshake::SessionName;
use blkmq_nbd::codec::request::{Command, RequestHeader};
use blkmq_nbd::codec::{CommandFlags, ErrorCode, HeaderStyle, TransmissionFlags};

use super::negotiation::Selection;
use super::{Op, Request};
use crate::nbd::limits::Limits;

/// What is wrong with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The server is shutting down.
    ShuttingDown,
    /// No such command.
    UnknownCommand,
    /// A write to a read-only export.
    ReadOnly,
    /// A command that the export does not offer.
    NotOffered,
    /// A flag that is not allowed for the command here, or a payload that it does not take.
    WrongFlags,
    /// A write without the payload flag that extended headers require.
    NoPayload,
    /// Block status without a metadata context selected.
    NoContext,
    /// A range of no bytes, or a flush or fence with a range.
    WrongRange,
    /// A session that fences itself.
    OwnSession,
    /// The range ends beyond the export.
    BeyondEnd,
    /// Offset or length is no multiple of the block size.
    Unaligned,
    /// More payload than the server accepts.
    TooLong,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Fault::ShuttingDown => "the server is shutting down",
            Fault::UnknownCommand => "no such command",
            Fault::ReadOnly => "the export is read-only",
            Fault::NotOffered => "the export does not offer it",
            Fault::WrongFlags => "a flag that does not belong here",
            Fault::NoPayload => "the payload flag is missing",
            Fault::NoContext => "no metadata context was selected for this export",
            Fault::WrongRange => "a range that must not be empty (or, of a flush or a fence, must be)",
            Fault::OwnSession => "a session cannot fence itself",
            Fault::BeyondEnd => "the range ends beyond the export",
            Fault::Unaligned => "not a multiple of the export's block size",
            Fault::TooLong => "longer than the largest payload",
        })
    }
}

/// What the selected export and the negotiation allow.
#[derive(Debug)]
pub(super) struct Rules {
    by_command: [Rule; COMMANDS],
    size_bytes: u64,
    block_mask: u64,
    payload_bytes_max: u64,
    offered: TransmissionFlags,
    style: HeaderStyle,
    block_status: bool,
    session: Option<SessionName>,
    shutting_down: bool,
}

/// The rule of one command. `length_max` is zero where `admit` passes no header of the command.
#[derive(Clone, Copy, Debug)]
struct Rule {
    flags_required: u16,
    flags_optional: u16,
    length_max: u64,
}

const COMMANDS: usize = 8;
const CLOSED: Rule = Rule {
    flags_required: 0,
    flags_optional: 0,
    length_max: 0,
};

impl Rules {
    pub(super) fn new(selection: &Selection, limits: &Limits) -> Rules {
        let export = &selection.export;
        let mut rules = Rules {
            by_command: [CLOSED; COMMANDS],
            size_bytes: export.size_bytes,
            block_mask: match export.features.any_alignment {
                true => 0,
                false => u64::from(export.block_min_bytes) - 1,
            },
            payload_bytes_max: u64::from(limits.payload_bytes_max),
            offered: export.transmission_flags(selection.style),
            style: selection.style,
            block_status: !selection.contexts.is_empty(),
            session: selection.session,
            shutting_down: false,
        };
        for command in 0..COMMANDS {
            rules.by_command[command] = rules.rule(Command(command as u16));
        }
        rules
    }

    /// The client's name for the session.
    pub(super) fn name(&self) -> Option<SessionName> {
        self.session
    }

    /// The operation, if the header keeps every rule. Disconnects, flushes and fences are not
    /// handled here.
    #[inline]
    pub(super) fn admit(&self, header: &RequestHeader) -> Option<Op> {
        let rule = self.by_command.get(usize::from(header.command.0))?;
        let flags_fit = (header.flags.0 ^ rule.flags_required) & !rule.flags_optional == 0;
        let length_fits = header.length.wrapping_sub(1) < rule.length_max;
        let inside = header.offset <= self.size_bytes && header.length <= self.size_bytes - header.offset;
        let aligned = (header.offset | header.length) & self.block_mask == 0;
        if flags_fit && length_fits && inside && aligned {
            op(header.command)
        } else {
            None
        }
    }

    /// Checks a header that [`Rules::admit`] did not admit: it may be a valid flush or fence.
    ///
    /// # Errors
    /// The first fault.
    pub(super) fn check(&self, header: &RequestHeader) -> Result<Op, Fault> {
        let op = op(header.command).filter(|op| *op != Op::Fence || self.session.is_some());
        let op = op.ok_or(Fault::UnknownCommand)?;
        let (required, optional) = (self.flags_required(op), self.flags_optional(op));
        let fault = if self.shutting_down {
            Fault::ShuttingDown
        } else if changes_data(op) && self.offered.contains(TransmissionFlags::READ_ONLY) {
            Fault::ReadOnly
        } else if op == Op::BlockStatus && !self.block_status {
            Fault::NoContext
        } else if !self.is_offered(op) {
            Fault::NotOffered
        } else if !header.flags.contains(required) {
            Fault::NoPayload
        } else if !required.with(optional).contains(header.flags) {
            Fault::WrongFlags
        } else if op == Op::Fence && self.session.is_some_and(|name| name.number == header.offset) {
            Fault::OwnSession
        } else if op == Op::Flush && header.offset | header.length == 0
            || op == Op::Fence && header.length == 0
        {
            return Ok(op);
        } else if matches!(op, Op::Flush | Op::Fence) || header.length == 0 {
            Fault::WrongRange
        } else if header.offset > self.size_bytes || header.length > self.size_bytes - header.offset {
            Fault::BeyondEnd
        } else if (header.offset | header.length) & self.block_mask != 0 {
            Fault::Unaligned
        } else if matches!(op, Op::Read | Op::Write) && header.length > self.payload_bytes_max {
            Fault::TooLong
        } else {
            return Ok(op);
        };
        Err(fault)
    }

    /// The error code that reports `fault` to the client.
    pub(super) fn error(&self, header: &RequestHeader, fault: Fault) -> ErrorCode {
        match fault {
            Fault::ShuttingDown => ErrorCode::Shutdown,
            Fault::ReadOnly => ErrorCode::Perm,
            Fault::BeyondEnd if matches!(header.command, Command::WRITE | Command::WRITE_ZEROES) => {
                ErrorCode::NoSpace
            }
            // The protocol has EOVERFLOW for reads only, and only beside the DF flag.
            Fault::TooLong if header.command == Command::READ && self.style != HeaderStyle::Simple => {
                ErrorCode::Overflow
            }
            _ => ErrorCode::Invalid,
        }
    }

    /// Bytes that follow the header, whether or not the command should have any.
    pub(super) fn payload_bytes(&self, header: &RequestHeader) -> u64 {
        let has_payload = match self.style {
            HeaderStyle::Extended => header.flags.contains(CommandFlags::PAYLOAD_LEN),
            HeaderStyle::Simple | HeaderStyle::Structured => header.command == Command::WRITE,
        };
        if has_payload { header.length } else { 0 }
    }

    pub(super) fn shut_down(&mut self) {
        self.shutting_down = true;
        self.by_command = [CLOSED; COMMANDS];
    }

    fn rule(&self, command: Command) -> Rule {
        let Some(op) = op(command) else { return CLOSED };
        let read_only = self.offered.contains(TransmissionFlags::READ_ONLY);
        let open = self.is_offered(op) && !(changes_data(op) && read_only);
        let length_max = match op {
            Op::Flush | Op::Fence => 0,
            _ if !open => 0,
            Op::Read | Op::Write => self.payload_bytes_max,
            Op::BlockStatus if !self.block_status => 0,
            Op::Trim | Op::Cache | Op::WriteZeroes | Op::BlockStatus => u64::MAX,
        };
        Rule {
            flags_required: self.flags_required(op).0,
            flags_optional: self.flags_optional(op).0,
            length_max,
        }
    }

    fn is_offered(&self, op: Op) -> bool {
        match op {
            Op::Read | Op::Write | Op::BlockStatus | Op::Fence => true,
            Op::Flush => self.offered.contains(TransmissionFlags::SEND_FLUSH),
            Op::Trim => self.offered.contains(TransmissionFlags::SEND_TRIM),
            Op::Cache => self.offered.contains(TransmissionFlags::SEND_CACHE),
            Op::WriteZeroes => self.offered.contains(TransmissionFlags::SEND_WRITE_ZEROES),
        }
    }

    fn flags_required(&self, op: Op) -> CommandFlags {
        let payload = op == Op::Write && self.style == HeaderStyle::Extended;
        CommandFlags::NONE.with_if(payload, CommandFlags::PAYLOAD_LEN)
    }

    fn flags_optional(&self, op: Op) -> CommandFlags {
        let fua = self.offered.contains(TransmissionFlags::SEND_FUA);
        let df = self.offered.contains(TransmissionFlags::SEND_DF);
        let fast_zero = self.offered.contains(TransmissionFlags::SEND_FAST_ZERO);
        CommandFlags::NONE
            // Known clients also set it on commands that write nothing.
            .with_if(fua, CommandFlags::FUA)
            .with_if(op == Op::Read && df, CommandFlags::DF)
            .with_if(op == Op::WriteZeroes, CommandFlags::NO_HOLE)
            .with_if(op == Op::WriteZeroes && fast_zero, CommandFlags::FAST_ZERO)
            .with_if(op == Op::BlockStatus, CommandFlags::REQ_ONE)
    }
}

/// The request of a header that keeps every rule.
#[inline]
pub(super) fn request(op: Op, header: &RequestHeader) -> Request {
    Request {
        cookie: header.cookie,
        offset: header.offset,
        length: header.length,
        op,
        flags: header.flags,
    }
}

fn op(command: Command) -> Option<Op> {
    Some(match command {
        Command::READ => Op::Read,
        Command::WRITE => Op::Write,
        Command::FLUSH => Op::Flush,
        Command::TRIM => Op::Trim,
        Command::CACHE => Op::Cache,
        Command::WRITE_ZEROES => Op::WriteZeroes,
        Command::BLOCK_STATUS => Op::BlockStatus,
        Command::FENCE => Op::Fence,
        _ => return None,
    })
}

fn changes_data(op: Op) -> bool {
    matches!(op, Op::Write | Op::Trim | Op::WriteZeroes)
}
