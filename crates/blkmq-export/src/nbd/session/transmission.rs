//! The transmission phase of a session: each request is begun, refused, or ends the session. `rules` has the
//! rules; `reply` counts open requests and writes the answers.

use blkmq_nbd::codec::handshake::SessionName;
use blkmq_nbd::codec::request::{Command, RequestHeader};
use blkmq_nbd::codec::{HeaderStyle, TransmissionFlags};

use std::sync::Arc;

use super::contexts::Contexts;
use super::negotiation::Selection;
use super::reply::Replies;
use super::rules::{Fault, Rules, request};
use super::saved::{RestoreError, SavedPhase, SavedSession};
use super::{CloseReason, Event, Op, Refused, Step};
use crate::nbd::export::{Export, ExportTable};
use crate::nbd::limits::Limits;

#[derive(Debug)]
pub(super) struct Transmission {
    export: Arc<Export>,
    contexts: Contexts,
    style: HeaderStyle,
    rules: Rules,
    replies: Replies,
    /// Bytes of an accepted write's payload that the caller has not taken yet.
    payload_left: u64,
    drain: Option<Drain>,
    drain_bytes_max: u64,
    unsent_bytes_max: usize,
}

/// A refused request whose payload is discarded before the reply.
#[derive(Debug)]
struct Drain {
    left: u64,
    header: RequestHeader,
    fault: Fault,
}

impl Transmission {
    pub(super) fn new(selection: &Selection, limits: &Limits) -> Transmission {
        Transmission {
            export: Arc::clone(&selection.export),
            contexts: selection.contexts.clone(),
            style: selection.style,
            rules: Rules::new(selection, limits),
            replies: Replies::new(selection, limits),
            payload_left: 0,
            drain: None,
            drain_bytes_max: limits.drain_bytes_max(),
            unsent_bytes_max: limits.unsent_bytes_max,
        }
    }

    /// Continues where another daemon stopped, if the export matches what its client was told. The
    /// export may have grown since: for this client it keeps the old size.
    pub(super) fn restore(
        saved: &SavedSession,
        exports: &ExportTable,
        limits: &Limits,
    ) -> Result<Transmission, RestoreError> {
        let SavedPhase::Transmission {
            export: name,
            size_bytes,
            block_min_bytes,
            flags,
            contexts,
            drain,
        } = &saved.phase
        else {
            unreachable!("the caller has looked")
        };
        // By its own name: whether there is a default export may have changed.
        let found = exports.iter().find(|export| export.name == *name);
        let export = found.ok_or_else(|| RestoreError::NoExport(name.clone()))?;
        let differs = |what, told, found| RestoreError::Differs {
            export: name.clone(),
            what,
            told,
            found,
        };
        if export.size_bytes < *size_bytes {
            return Err(differs("a size of", *size_bytes, export.size_bytes));
        }
        if export.block_min_bytes != *block_min_bytes {
            let (told, found) = (u64::from(*block_min_bytes), u64::from(export.block_min_bytes));
            return Err(differs("a block size of", told, found));
        }
        let here = export.transmission_flags(saved.style);
        let is_writer = !flags.contains(TransmissionFlags::READ_ONLY);
        let has_become_read_only = is_writer && here.contains(TransmissionFlags::READ_ONLY);
        let promised = TransmissionFlags(flags.0 & !TransmissionFlags::READ_ONLY.0);
        if has_become_read_only || !here.contains(promised) {
            return Err(RestoreError::Lacks(name.clone(), flags.0, here.0));
        }
        let has_grown = export.size_bytes > *size_bytes;
        let as_told = || Export {
            size_bytes: *size_bytes,
            ..Export::clone(export)
        };
        let selection = Selection {
            export: if has_grown {
                Arc::new(as_told())
            } else {
                Arc::clone(export)
            },
            style: saved.style,
            contexts: contexts.clone(),
            session: saved.name,
        };
        let mut transmission = Transmission::new(&selection, limits);
        transmission.drain = drain.map(|(left, header)| Drain {
            left,
            fault: transmission
                .rules
                .check(&header)
                .err()
                .unwrap_or(Fault::NotOffered),
            header,
        });
        Ok(transmission)
    }

    pub(super) fn save(&self) -> SavedSession {
        SavedSession {
            style: self.style,
            name: self.name(),
            phase: SavedPhase::Transmission {
                export: self.export.name.clone(),
                size_bytes: self.export.size_bytes,
                block_min_bytes: self.export.block_min_bytes,
                flags: self.export.transmission_flags(self.style),
                contexts: self.contexts.clone(),
                drain: self.drain.as_ref().map(|drain| (drain.left, drain.header)),
            },
        }
    }

    pub(super) fn contexts(&self) -> &Contexts {
        &self.contexts
    }

    pub(super) fn export(&self) -> &Arc<Export> {
        &self.export
    }

    #[inline]
    pub(super) fn receive(&mut self, input: &[u8], out: &mut Vec<u8>) -> Step {
        assert_eq!(self.payload_left, 0, "payload of a write was not taken");
        if self.drain.is_some() {
            return self.receive_drained(0, input, out);
        }
        if out.len() >= self.unsent_bytes_max {
            return Step {
                consumed: 0,
                event: Event::Busy,
            };
        }
        let header = match RequestHeader::parse(self.style, input) {
            Ok(Some(header)) => header,
            Ok(None) => {
                return Step {
                    consumed: 0,
                    event: Event::NeedMore,
                };
            }
            Err(magic) => {
                return Step {
                    consumed: 0,
                    event: Event::Close(CloseReason::BadRequestMagic(magic)),
                };
            }
        };
        match self.rules.admit(&header) {
            Some(op) => self.begin(op, &header),
            None => self.receive_exception(&header, input, out),
        }
    }

    pub(super) fn payload_taken(&mut self, bytes: u64) {
        assert!(
            bytes <= self.payload_left,
            "{bytes} bytes of payload taken, {} announced",
            self.payload_left
        );
        self.payload_left -= bytes;
    }

    pub(super) fn replies(&mut self) -> &mut Replies {
        &mut self.replies
    }

    pub(super) fn shut_down(&mut self) {
        self.rules.shut_down();
    }

    pub(super) fn name(&self) -> Option<SessionName> {
        self.rules.name()
    }

    pub(super) fn style(&self) -> HeaderStyle {
        self.style
    }

    #[inline]
    fn begin(&mut self, op: Op, header: &RequestHeader) -> Step {
        let request = request(op, header);
        if !self.replies.has_room(&request) {
            return Step {
                consumed: 0,
                event: Event::Busy,
            };
        }
        self.replies.begin(&request);
        let consumed = self.style.request_bytes();
        if op == Op::Write {
            self.payload_left = request.length;
            return Step {
                consumed,
                event: Event::Write(request),
            };
        }
        Step {
            consumed,
            event: Event::Request(request),
        }
    }

    /// Handles a header that the rules do not admit at once: a flush, a fence, the end, or a fault.
    #[inline(never)]
    fn receive_exception(&mut self, header: &RequestHeader, input: &[u8], out: &mut Vec<u8>) -> Step {
        let consumed = self.style.request_bytes();
        if header.command == Command::DISC {
            return Step {
                consumed,
                event: Event::Disconnect,
            };
        }
        let fault = match self.rules.check(header) {
            Ok(op) => return self.begin(op, header),
            Err(fault) => fault,
        };
        let payload_bytes = self.rules.payload_bytes(header);
        if payload_bytes > self.drain_bytes_max {
            let reason = CloseReason::PayloadTooLong {
                payload_bytes,
                bytes_max: self.drain_bytes_max,
            };
            return Step {
                consumed,
                event: Event::Close(reason),
            };
        }
        self.drain = Some(Drain {
            left: payload_bytes,
            header: *header,
            fault,
        });
        self.receive_drained(consumed, &input[consumed..], out)
    }

    /// Discards payload at the start of `input`, which lies behind `consumed` bytes; replies when
    /// all of it is gone.
    #[cold]
    fn receive_drained(&mut self, consumed: usize, input: &[u8], out: &mut Vec<u8>) -> Step {
        let drain = self.drain.as_mut().expect("the caller saw a request to drain");
        let taken = drain.left.min(input.len() as u64);
        drain.left -= taken;
        let consumed = consumed + taken as usize;
        if drain.left > 0 {
            return Step {
                consumed,
                event: Event::NeedMore,
            };
        }
        let (header, fault) = (drain.header, drain.fault);
        self.drain = None;
        let error = self.rules.error(&header, fault);
        let (command, length, offset) = (header.command.name(), header.length, header.offset);
        let message = format!("{command} of {length} bytes at {offset} refused: {fault}");
        self.replies.refuse(&header, error, &message, out);
        Step {
            consumed,
            event: Event::Refused(Refused { header, fault, error }),
        }
    }
}
