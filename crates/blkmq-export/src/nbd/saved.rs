//! The bytes in which a connection is handed over to another daemon: its session, the bytes of its client
//! that were not taken, and those not yet sent to it. They are input from outside: every length has a limit,
//! every fault its own error.

use blkmq_nbd::codec::handshake::{OptionCode, SessionName};
use blkmq_nbd::codec::option_reply::ReplyKind;
use blkmq_nbd::codec::request::{Command, RequestHeader};
use blkmq_nbd::codec::{CommandFlags, HeaderStyle, STRING_BYTES_MAX, TransmissionFlags};

use super::session::{Contexts, SavedPhase, SavedSession, SavedState};
use crate::handover::codec::{BODY_BYTES_MAX, DecodeError, Reader, Writer};

/// A connection at rest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavedConnection {
    /// Its session.
    pub session: SavedSession,
    /// Nothing more is taken from the client: the connection ends when everything is sent.
    pub is_closing: bool,
    /// Writes may have been lost without the client having been told.
    pub has_losses: bool,
    /// Bytes of the client, from the first request on that was not begun or has not arrived whole.
    pub input: Vec<u8>,
    /// Bytes that were not sent to the client yet.
    pub unsent: Vec<u8>,
}

impl SavedConnection {
    /// Decodes a saved connection.
    ///
    /// # Errors
    /// The fault in the bytes.
    pub fn parse(bytes: &[u8]) -> Result<Self, DecodeError> {
        // Without bitmaps, daemons that know of none can read it.
        let version = match bytes.first() {
            Some(&VERSION_OF_ALLOCATION) => VERSION_OF_ALLOCATION,
            _ => VERSION,
        };
        Reader::versioned(bytes, ("a connection's version", version), |reader| {
            Ok(Self {
                session: session(reader, version)?,
                is_closing: reader.flag("whether a connection ends")?,
                has_losses: reader.flag("whether writes are lost")?,
                input: reader.bytes("what a client sent", BODY_BYTES_MAX)?.to_vec(),
                unsent: reader
                    .bytes("what a client was not sent", BODY_BYTES_MAX)?
                    .to_vec(),
            })
        })
    }

    /// Encodes it.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.input.len() + self.unsent.len() + STRING_BYTES_MAX);
        let mut writer = Writer(&mut bytes);
        let version = match self.session.has_bitmaps() {
            true => VERSION,
            false => VERSION_OF_ALLOCATION,
        };
        writer.u8(version);
        write_session(&mut writer, &self.session, version);
        writer.u8(self.is_closing.into());
        writer.u8(self.has_losses.into());
        writer.bytes(&self.input);
        writer.bytes(&self.unsent);
        bytes
    }
}

fn session(reader: &mut Reader<'_>, version: u8) -> Result<SavedSession, DecodeError> {
    let style = match reader.u8("a header style")? {
        0 => HeaderStyle::Simple,
        1 => HeaderStyle::Structured,
        2 => HeaderStyle::Extended,
        other => return Err(DecodeError::Value("a header style", other.into())),
    };
    let name = reader.optional("a session's name", |reader| {
        let (low, high) = (reader.u64("a client")?, reader.u64("a client")?);
        Ok(SessionName {
            client: u128::from(high) << 64 | u128::from(low),
            number: reader.u64("a session's number")?,
        })
    })?;
    let phase = match reader.u8("a phase")? {
        0 => SavedPhase::Negotiation {
            state: state(reader)?,
            is_padded: reader.flag("whether zeroes are expected")?,
            options: reader.u32("a number of options")?,
            context: reader.optional("a context", |reader| {
                let export = reader.text("a context")?;
                let contexts = match version {
                    VERSION => contexts(reader, version)?,
                    _ => Contexts {
                        allocation: true,
                        bitmaps: Vec::new(),
                    },
                };
                Ok((export, contexts))
            })?,
        },
        1 => SavedPhase::Transmission {
            export: reader.text("an export")?,
            size_bytes: reader.u64("an export's size")?,
            block_min_bytes: reader.u32("an export's block size")?,
            flags: TransmissionFlags(reader.u16("transmission flags")?),
            contexts: contexts(reader, version)?,
            drain: reader.optional("a refused request", |reader| {
                Ok((reader.u64("bytes to throw away")?, header(reader)?))
            })?,
        },
        other => return Err(DecodeError::Value("a phase", other.into())),
    };
    Ok(SavedSession { style, name, phase })
}

fn contexts(reader: &mut Reader<'_>, version: u8) -> Result<Contexts, DecodeError> {
    let allocation = reader.flag("whether block status is agreed on")?;
    let count = match version {
        VERSION => reader.u32("a number of bitmaps")?,
        _ => 0,
    };
    let bitmaps = (0..count).map(|_| reader.text("a bitmap"));
    Ok(Contexts {
        allocation,
        bitmaps: bitmaps.collect::<Result<_, _>>()?,
    })
}

fn state(reader: &mut Reader<'_>) -> Result<SavedState, DecodeError> {
    Ok(match reader.u8("a state")? {
        0 => SavedState::Flags,
        1 => SavedState::Options,
        2 => SavedState::Skipping {
            left: reader.u32("bytes to skip")?,
            option: OptionCode(reader.u32("an option")?),
            kind: error_kind(reader)?,
        },
        other => return Err(DecodeError::Value("a state", other.into())),
    })
}

/// The error with which an option that is skipped is answered.
fn error_kind(reader: &mut Reader<'_>) -> Result<ReplyKind, DecodeError> {
    let kind = ReplyKind(reader.u32("a reply")?);
    if kind.is_error() {
        Ok(kind)
    } else {
        Err(DecodeError::Value("an error of an option", kind.0.into()))
    }
}

fn header(reader: &mut Reader<'_>) -> Result<RequestHeader, DecodeError> {
    Ok(RequestHeader {
        cookie: reader.u64("a cookie")?,
        offset: reader.u64("an offset")?,
        length: reader.u64("a length")?,
        command: Command(reader.u16("a command")?),
        flags: CommandFlags(reader.u16("command flags")?),
    })
}

fn write_session(writer: &mut Writer<'_>, session: &SavedSession, version: u8) {
    writer.u8(match session.style {
        HeaderStyle::Simple => 0,
        HeaderStyle::Structured => 1,
        HeaderStyle::Extended => 2,
    });
    writer.optional(session.name.as_ref(), |writer, name| {
        writer.u64(name.client as u64);
        writer.u64((name.client >> 64) as u64);
        writer.u64(name.number);
    });
    match &session.phase {
        SavedPhase::Negotiation {
            state,
            is_padded,
            options,
            context,
        } => {
            writer.u8(0);
            write_state(writer, *state);
            writer.u8((*is_padded).into());
            writer.u32(*options);
            writer.optional(context.as_ref(), |writer, (export, contexts)| {
                writer.text(export);
                if version == VERSION {
                    write_contexts(writer, contexts, version);
                }
            });
        }
        SavedPhase::Transmission {
            export,
            size_bytes,
            block_min_bytes,
            flags,
            contexts,
            drain,
        } => {
            writer.u8(1);
            writer.text(export);
            writer.u64(*size_bytes);
            writer.u32(*block_min_bytes);
            writer.u16(flags.0);
            write_contexts(writer, contexts, version);
            writer.optional(drain.as_ref(), |writer, (left, header)| {
                writer.u64(*left);
                write_header(writer, header);
            });
        }
    }
}

fn write_contexts(writer: &mut Writer<'_>, contexts: &Contexts, version: u8) {
    writer.u8(contexts.allocation.into());
    if version == VERSION {
        writer.u32(contexts.bitmaps.len() as u32);
        contexts.bitmaps.iter().for_each(|name| writer.text(name));
    }
}

fn write_state(writer: &mut Writer<'_>, state: SavedState) {
    match state {
        SavedState::Flags => writer.u8(0),
        SavedState::Options => writer.u8(1),
        SavedState::Skipping { left, option, kind } => {
            writer.u8(2);
            writer.u32(left);
            writer.u32(option.0);
            writer.u32(kind.0);
        }
    }
}

fn write_header(writer: &mut Writer<'_>, header: &RequestHeader) {
    writer.u64(header.cookie);
    writer.u64(header.offset);
    writer.u64(header.length);
    writer.u16(header.command.0);
    writer.u16(header.flags.0);
}

/// The version of these bytes, and that of those before bitmaps.
const VERSION: u8 = 2;
const VERSION_OF_ALLOCATION: u8 = 1;

#[cfg(test)]
mod tests {
    use super::*;

    fn allocation(bitmaps: &[&str]) -> Contexts {
        Contexts {
            allocation: true,
            bitmaps: bitmaps.iter().map(|name| (*name).to_owned()).collect(),
        }
    }

    fn examples() -> Vec<SavedConnection> {
        let negotiation = |state| SavedPhase::Negotiation {
            state,
            is_padded: true,
            options: 7,
            context: Some(("vm1".to_owned(), allocation(&[]))),
        };
        let skipping = SavedState::Skipping {
            left: 9,
            option: OptionCode(5),
            kind: ReplyKind(1 << 31 | 1),
        };
        let header = RequestHeader {
            cookie: 1,
            offset: 2,
            length: 3,
            command: Command::WRITE,
            flags: CommandFlags(1),
        };
        let transmission = |bitmaps| SavedPhase::Transmission {
            export: "vm1".to_owned(),
            size_bytes: 1 << 40,
            block_min_bytes: 512,
            flags: TransmissionFlags(0x55),
            contexts: allocation(bitmaps),
            drain: Some((1, header)),
        };
        let phases = [
            negotiation(SavedState::Flags),
            negotiation(SavedState::Options),
            negotiation(skipping),
            transmission(&[]),
            transmission(&["monday", "x"]),
            SavedPhase::Negotiation {
                state: SavedState::Options,
                is_padded: true,
                options: 7,
                context: Some(("vm1".to_owned(), allocation(&["monday"]))),
            },
        ];
        let styles = [
            HeaderStyle::Simple,
            HeaderStyle::Structured,
            HeaderStyle::Extended,
        ];
        let saved = |(phase, style)| SavedConnection {
            session: SavedSession {
                style,
                name: Some(SessionName {
                    client: u128::MAX - 5,
                    number: 3,
                }),
                phase,
            },
            is_closing: true,
            has_losses: false,
            input: vec![1, 2],
            unsent: vec![3],
        };
        phases
            .into_iter()
            .zip(styles.into_iter().cycle())
            .map(saved)
            .collect()
    }

    #[test]
    fn option_is_not_refused_with_what_is_no_error() {
        let mut saved = examples().swap_remove(2);
        if let SavedPhase::Negotiation { state, .. } = &mut saved.session.phase {
            *state = SavedState::Skipping {
                left: 9,
                option: OptionCode(5),
                kind: ReplyKind(1),
            };
        }
        let error = SavedConnection::parse(&saved.bytes()).unwrap_err();
        assert_eq!(error, DecodeError::Value("an error of an option", 1));
    }

    #[test]
    fn saved_state_is_read_again_and_refused_wherever_it_is_cut() {
        for saved in examples() {
            let bytes = saved.bytes();
            assert_eq!(SavedConnection::parse(&bytes).as_ref(), Ok(&saved));
            for cut in 0..bytes.len() {
                assert!(
                    SavedConnection::parse(&bytes[..cut]).is_err(),
                    "{saved:?} cut at {cut}"
                );
            }
            let long = [&bytes[..], &[0]].concat();
            assert_eq!(SavedConnection::parse(&long), Err(DecodeError::Trailing(1)));
        }
        assert_eq!(
            SavedConnection::parse(&[3]),
            Err(DecodeError::Value("a connection's version", 3))
        );
    }
}
