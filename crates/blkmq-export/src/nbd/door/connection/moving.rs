//! What another daemon needs to continue a connection, and how a connection that another daemon has
//! saved is restored. `Client` has the steps of a hand-over.
//!
//! A request that has not arrived whole, or waits for memory, is handed over as the bytes in which
//! it came, in front of those that were not decoded. So a successor need not know of requests: it
//! takes their bytes as if they had just arrived.

use std::sync::Arc;

use blkmq_host::service::Cx;
use blkmq_nbd::codec::request::{Command, RequestHeader};

use super::super::Door;
use super::intake::Intake;
use super::{Connection, NbdClient, SELECTED};
use crate::common::life::{Life, Resume};
use crate::common::listener::Admitted;
use crate::common::losses::LossCursor;
use crate::handover::Saved;
use crate::handover::codec::{BODY_BYTES_MAX, TEXT_BYTES_MAX};
use crate::nbd::saved::SavedConnection;
use crate::nbd::session::{Op, Request, Session};

/// Makes the client that continues a connection saved by another daemon.
pub(in super::super) fn restored(
    admitted: Admitted,
    door: Arc<Door>,
    session: Session,
    saved: SavedConnection,
) -> NbdClient {
    let mut client = super::client(admitted, door);
    client.life = Life::Saved(match saved.is_closing {
        true => Resume::Ending,
        false => Resume::Serving,
    });
    let connection = &mut client.protocol;
    connection.session = session;
    connection.transmit.restore(saved.unsent);
    connection.receive.restore(saved.input);
    connection.loss_cursor = saved.has_losses.then(LossCursor::unsampled);
    client
}

impl NbdClient {
    /// Selects the disk of a session that has one: another daemon has begun it.
    ///
    /// # Errors
    /// Why the client may not have it.
    pub(super) fn reselect(&mut self, cx: &Cx<'_>) -> Result<(), String> {
        let Some(export) = self.protocol.session.export() else {
            return Ok(());
        };
        let disk = cx.disk_of_number(export.id.0).ok_or("its disk is removed")?;
        self.select_disk(cx, disk)
    }

    /// What another daemon needs to continue the connection. No other process has the keys of TLS:
    /// such a client connects again, to the daemon that continues.
    ///
    /// # Errors
    /// More bytes are on their way than can be handed over.
    pub(super) fn save(&mut self) -> Result<Option<Saved>, String> {
        let has_losses = match (&self.disk, self.protocol.loss_cursor) {
            (Some(disk), Some(loss_cursor)) => loss_cursor.check(disk),
            _ => false,
        };
        let is_closing = !self.life.is_open();
        // It is not called while it is at rest, and would keep others from what becomes free.
        self.protocol.slots.give_up();
        let connection = &mut self.protocol;
        if connection.has_secrets() {
            return Ok(None);
        }
        let saved = SavedConnection {
            session: connection.session.save(),
            is_closing,
            has_losses,
            input: connection.unbegun_input(),
            unsent: connection.transmit.unsent(&connection.slots),
        };
        let bytes = saved.input.len() + saved.unsent.len();
        if bytes > BODY_BYTES_MAX - 2 * TEXT_BYTES_MAX {
            return Err(format!("{bytes} bytes are on their way"));
        }
        Ok(Some(Saved {
            door: connection.door.log.door(),
            address: connection.door.address.clone(),
            body: saved.bytes(),
            fds: vec![Arc::clone(connection.wire.socket())],
        }))
    }
}

impl Connection {
    /// The client's bytes, from the first request on that has not arrived whole.
    fn unbegun_input(&mut self) -> Vec<u8> {
        let mut input = Vec::new();
        let style = self.session.style();
        match &self.intake {
            Intake::Message | Intake::Held => {}
            Intake::Starved(request) => header(request).write(style, &mut input),
            Intake::Payload { slot, filled } => {
                let slot = self.slots.get(*slot);
                header(&slot.request).write(style, &mut input);
                let payload = slot.payload.as_ref().expect(SELECTED);
                payload
                    .slices(0..*filled)
                    .for_each(|piece| input.extend_from_slice(piece));
            }
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
