//! Decides how a connection is handed over to another daemon. It stops taking requests, lets those
//! in flight end, and saves the state that its successor needs; then it continues unchanged, or
//! closes its socket silently. The code that restores a connection saved by another daemon is here
//! too.
//!
//! A request that has not arrived whole, or waits for memory, is handed over as the bytes in which
//! it came, in front of those that were not decoded. So a successor need not know of requests: it
//! takes their bytes as if they had just arrived.

use std::sync::Arc;

use blkmq_host::service::Cx;
use blkmq_nbd::codec::request::{Command, RequestHeader};

use super::super::Door;
use super::{Connection, SELECTED};
use crate::common::life::Event;
use crate::common::listener::Client;
use crate::handover::codec::{BODY_BYTES_MAX, TEXT_BYTES_MAX};
use crate::handover::{Phase, Saved};
use crate::nbd::saved::SavedConnection;
use crate::nbd::session::{Op, Request, Session};

/// What another daemon has saved of a connection beside its session and its bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Restored {
    /// Nothing more is taken from the client.
    is_closing: bool,
    /// Writes may have been lost without the client having been told.
    has_losses: bool,
}

impl Connection {
    /// Continues a connection that another daemon has saved.
    pub(in super::super) fn restored(
        client: Client,
        door: Arc<Door>,
        session: Session,
        saved: SavedConnection,
    ) -> Self {
        let mut connection = Self::new(client, door);
        connection.session = session;
        connection.transmit.restore(saved.unsent);
        connection.receive.restore(saved.input);
        connection.restored = Some(Restored {
            is_closing: saved.is_closing,
            has_losses: saved.has_losses,
        });
        connection
    }

    /// Continues where another daemon stopped: takes the place among the connections of the disk,
    /// and is served when all have theirs.
    pub(super) fn take_place(&mut self, cx: &Cx<'_>, restored: Restored) {
        let export = self.session.export().map(|export| export.id.0);
        if let Some(number) = export {
            let Some(disk) = cx.disk_of_number(number) else {
                return self.member.fail(format!("{}: its disk is removed", self.name()));
            };
            self.ticket.reselect(disk.tenant);
            if let Err(refusal) = self.enter(cx, disk) {
                return self.member.fail(format!("{}: {refusal}", self.name()));
            }
            // All requests of other connections ended before they were handed over.
            if let Some(place) = &mut self.place {
                place.wait_for_nobody();
            }
            if restored.has_losses
                && let Some(disk) = &self.disk
            {
                self.heard.miss(disk);
            }
        }
        self.life.apply(Event::Settle);
        if restored.is_closing {
            self.life.apply(Event::Finish);
        }
        self.member.settle(None);
    }

    /// Records whether the connection is to be handed over, is not any more, or has been.
    pub(super) fn follow(&mut self, cx: &mut Cx<'_>, phase: Phase) {
        let before = self.life;
        self.life.apply(match phase {
            Phase::Serving => Event::Resume,
            Phase::Suspended if before.is_at_rest() && self.member.has_settled() => return,
            Phase::Suspended => Event::Suspend,
            Phase::Gone => Event::Leave,
        });
        if phase == Phase::Serving && self.life != before {
            self.go_on(cx);
        }
    }

    /// Continues unchanged: what polls reported meanwhile is handled now.
    fn go_on(&mut self, cx: &mut Cx<'_>) {
        (self.unread_since, self.half_since) = (None, None);
        self.started_at = cx.now();
        let missed = std::mem::take(&mut self.missed);
        self.polled(missed, cx.now());
        self.poll(cx);
    }

    /// Saves the connection, if all open requests have ended and nothing more can be sent now.
    pub(super) fn save_if_at_rest(&mut self, cx: &Cx<'_>) {
        let slots = usize::from(self.filling.is_some()) + self.transmit.data_pieces();
        let has_ended = self.slots.len() == slots && self.refused.is_empty() && cx.outstanding() == 0;
        let is_sent = !self.has_unsent() || self.is_blocked || self.life.is_queued();
        if !has_ended || !is_sent {
            return;
        }
        self.life.apply(Event::Settle);
        if self.has_secrets() {
            // No other process has the keys of TLS: the client connects again, to the daemon that
            // continues.
            return self.member.settle(None);
        }
        let saved = self.save();
        if saved.input.len() + saved.unsent.len() > BODY_BYTES_MAX - 2 * TEXT_BYTES_MAX {
            let bytes = saved.input.len() + saved.unsent.len();
            return self
                .member
                .fail(format!("{}: {bytes} bytes are on their way", self.name()));
        }
        self.member.settle(Some(Saved {
            door: self.door.log.door(),
            address: self.door.address.clone(),
            body: saved.bytes(),
            fds: vec![Arc::clone(self.wire.socket())],
        }));
    }

    fn save(&mut self) -> SavedConnection {
        let has_losses = self
            .disk
            .as_ref()
            .is_some_and(|disk| self.heard.misses_some(disk));
        SavedConnection {
            session: self.session.save(),
            is_closing: !self.life.is_open(),
            has_losses,
            input: self.unbegun_input(),
            unsent: self.transmit.unsent(&self.slots),
        }
    }

    /// The client's bytes, from the first request on that has not arrived whole.
    fn unbegun_input(&mut self) -> Vec<u8> {
        let mut input = Vec::new();
        let style = self.session.style();
        if let Some(request) = &self.starved {
            header(request).write(style, &mut input);
        }
        if let Some((slot, filled)) = self.filling {
            let slot = self.slots.get(slot);
            header(&slot.request).write(style, &mut input);
            let payload = slot.payload.as_ref().expect(SELECTED);
            payload
                .slices(0..filled)
                .for_each(|piece| input.extend_from_slice(piece));
        }
        self.receive.append_waiting_to(&mut input);
        input
    }
}

/// The header in which a request came.
fn header(request: &Request) -> RequestHeader {
    RequestHeader {
        cookie: request.cookie,
        offset: request.offset,
        length: request.length,
        command: match request.op {
            Op::Read => Command::READ,
            Op::Write => Command::WRITE,
            Op::Flush => Command::FLUSH,
            Op::Trim => Command::TRIM,
            Op::Cache => Command::CACHE,
            Op::WriteZeroes => Command::WRITE_ZEROES,
            Op::BlockStatus => Command::BLOCK_STATUS,
            Op::Fence => Command::FENCE,
        },
        flags: request.flags,
    }
}
