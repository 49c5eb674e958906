//! How much a connection receives in one turn, and what the bytes become: the selection of an export,
//! requests, payload, the end. `requests` handles the decoded requests.

use std::io;
use std::sync::Arc;

use blkmq_core::time::Instant;
use blkmq_host::disk::Disk;
use blkmq_host::service::Cx;

use super::super::slots::Slots;
use super::super::wire::Received;
use super::{Connection, NbdClient};
use crate::common::life::{self, Life};
use crate::common::lookup::ExtentReplies;
use crate::common::losses::LossCursor;
use crate::common::memory::Account;
use crate::common::readiness::Presence;
use crate::common::sessions::{DiskSession, SessionName};
use crate::nbd::session::{Event, Request};

/// What comes next from the client.
#[derive(Debug)]
pub(super) enum Intake {
    /// A message.
    Message,
    /// A message, when replies have been sent.
    Held,
    /// A request that waits for memory for its payload.
    Starved(Request),
    /// The rest of a write's payload: the write's slot, and how many bytes have arrived.
    Payload { slot: u32, filled: usize },
}

/// What the next message needs before it can be decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Needs {
    Nothing,
    /// Bytes from the client.
    Bytes,
    /// Memory, or that replies are sent, or something else that the client's bytes do not bring.
    Room,
}

impl Intake {
    /// Returns whether the payload of a write is being received.
    pub(super) fn is_payload(&self) -> bool {
        matches!(self, Self::Payload { .. })
    }

    /// Returns whether the server takes nothing more for now.
    pub(super) fn is_held_back(&self) -> bool {
        matches!(self, Self::Held | Self::Starved(_))
    }
}

impl NbdClient {
    /// Receives and decodes until the socket is drained or a limit holds the client back.
    pub(super) fn receive_requests(&mut self, cx: &mut Cx<'_>) {
        if self.protocol.handshake.is_some() && self.life == Life::Serving {
            self.shake_hands(cx);
        }
        while self.takes() {
            let needs = match self.protocol.intake {
                Intake::Payload { .. } => Needs::Bytes,
                _ => self.decode(cx),
            };
            if needs == Needs::Room || !self.takes() || !self.protocol.readiness.is_readable {
                return;
            }
            let received = match self.protocol.intake {
                Intake::Payload { slot, filled } => self.fill_payload(cx, slot, filled),
                _ => self.protocol.receive.fill(&mut self.protocol.wire),
            };
            if matches!(received, Ok(Received::Enough)) {
                return self.come_again(cx);
            }
            self.handle_recv(received, cx.now());
        }
    }

    /// Returns whether messages are taken now.
    pub(super) fn takes(&self) -> bool {
        self.life == Life::Serving && self.protocol.handshake.is_none() && self.refused.is_empty()
    }

    /// Decodes what was received, and begins the requests in it, as far as they need nothing.
    fn decode(&mut self, cx: &mut Cx<'_>) -> Needs {
        if let Intake::Starved(request) = std::mem::replace(&mut self.protocol.intake, Intake::Message) {
            let needs = self.begin(cx, request);
            if needs != Needs::Nothing {
                return needs;
            }
        }
        while self.takes() {
            let Connection {
                session,
                receive,
                transmit,
                deadlines,
                ..
            } = &mut self.protocol;
            let step = session.receive(receive.waiting(), &mut transmit.heads);
            transmit.note_heads();
            receive.consume(step.consumed);
            deadlines.messages += u64::from(step.consumed > 0);
            match step.event {
                Event::NeedMore => return Needs::Bytes,
                Event::Busy => {
                    self.protocol.intake = Intake::Held;
                    return Needs::Room;
                }
                Event::Request(request) | Event::Write(request) => {
                    let needs = self.begin(cx, request);
                    if needs != Needs::Nothing {
                        return needs;
                    }
                }
                Event::StartTls => self.start_tls(cx),
                Event::Selected(export) => self.select_export(cx, export.id.0),
                Event::Refused(refused) => tracing::debug!("nbd: {refused:?}"),
                Event::Disconnect => {
                    self.say_missed_tls(cx.now());
                    self.life.apply(life::Event::Finish);
                }
                Event::Close(reason) => {
                    self.warn(cx.now(), format_args!("closed: {reason}"));
                    self.life.apply(life::Event::Finish);
                }
            }
        }
        Needs::Room
    }

    /// Has the client's disk selected, or refuses the option by which it asks for it.
    fn select_export(&mut self, cx: &Cx<'_>, number: u32) {
        let Some(disk) = cx.disk_of_number(number) else {
            return self.refuse_export(cx, None, "the disk is removed");
        };
        let name = disk.name.clone();
        match self.select_disk(cx, disk) {
            Ok(()) => self.protocol.session.accept(),
            Err(refusal) => self.refuse_export(cx, Some(&name), &refusal),
        }
    }

    /// Answers the option by which a disk was selected with an error. The client may go on: it may select another one.
    fn refuse_export(&mut self, cx: &Cx<'_>, name: Option<&str>, why: &str) {
        let to = name.map_or_else(String::new, |name| format!("to {name} "));
        self.warn_about(cx.now(), name, format_args!("{to}refused: {why}"));
        let Connection {
            session, transmit, ..
        } = &mut self.protocol;
        match session.refuse(why, &mut transmit.heads) {
            true => transmit.note_replaced_heads(),
            false => self.life.apply(life::Event::Lose),
        }
    }

    /// Selects a disk, with what its requests need.
    ///
    /// # Errors
    /// Why the client may not have it.
    pub(super) fn select_disk(&mut self, cx: &Cx<'_>, disk: Disk) -> Result<(), String> {
        self.use_disk(cx, &disk)?;
        if let Err(refusal) = self.enter_sessions(cx, &disk) {
            self.leave_disk();
            return Err(refusal);
        }
        let Connection { door, slots, .. } = &mut self.protocol;
        let account = Account::new(Arc::clone(&door.common.memory), disk.tenant, cx.waker());
        slots.set_account(account, disk.limits.leaves_buffers);
        // A client that could write nothing leaves nothing to wait for.
        if disk.read_only {
            self.session.iter_mut().for_each(DiskSession::wait_for_nobody);
        }
        if self.must_wait() {
            self.life.apply(life::Event::Queue);
        }
        self.protocol
            .loss_cursor
            .get_or_insert_with(|| LossCursor::sample(&disk));
        self.protocol.extent_replies = Some(Arc::new(ExtentReplies::new(cx.waker())));
        self.disk = Some(disk);
        Ok(())
    }

    /// Enters the disk's sessions, and is counted among the clients of its group.
    fn enter_sessions(&mut self, cx: &Cx<'_>, disk: &Disk) -> Result<(), String> {
        let Connection {
            door, session, wire, ..
        } = &self.protocol;
        let name = session.name().map(|name| SessionName {
            client: name.client,
            number: name.number,
        });
        let (door, socket) = (Arc::clone(door), Arc::clone(wire.socket()));
        self.enter(cx, disk, &door.shared.sessions, (&socket, name))
            .map_err(|refusal| refusal.to_string())?;
        self.count_among(disk).map_err(|refusal| refusal.to_string())
    }

    /// Takes the received part of a write's payload, and submits the write if that is all of it.
    pub(super) fn take_payload(&mut self, cx: &mut Cx<'_>, slot: u32) -> Needs {
        let Connection { slots, receive, .. } = &mut self.protocol;
        let mut filled = 0;
        loop {
            let rest = rest_of_payload(slots, slot, filled);
            match receive.move_into(rest) {
                0 => break,
                bytes => filled += bytes,
            }
        }
        self.payload_came(cx, (slot, 0), filled)
    }

    /// Receives the rest of a write's payload straight into its buffer.
    fn fill_payload(&mut self, cx: &mut Cx<'_>, slot: u32, filled: usize) -> io::Result<Received> {
        let Connection {
            slots, receive, wire, ..
        } = &mut self.protocol;
        let rest = rest_of_payload(slots, slot, filled);
        let received = receive.receive_into(wire, rest)?;
        if let Received::Full(bytes) | Received::Drained(bytes) = received {
            self.payload_came(cx, (slot, filled), bytes);
        }
        Ok(received)
    }

    /// More of a write's payload has come.
    fn payload_came(&mut self, cx: &mut Cx<'_>, (slot, filled): (u32, usize), bytes: usize) -> Needs {
        let connection = &mut self.protocol;
        connection.session.payload_taken(bytes as u64);
        let filled = filled + bytes;
        if filled as u64 != connection.slots.get(slot).request.length {
            connection.intake = Intake::Payload { slot, filled };
            return Needs::Bytes;
        }
        connection.intake = Intake::Message;
        connection.deadlines.messages += 1;
        self.submit_request(cx, slot);
        Needs::Nothing
    }

    /// Logs at the end of a connection that its client never started the TLS that it needs here.
    fn say_missed_tls(&self, now: Instant) {
        if self.protocol.session.has_missed_tls() {
            self.warn(
                now,
                format_args!("closed: it needs TLS here, and did not start it"),
            );
        }
    }

    /// Handles what the socket reported.
    pub(super) fn handle_recv(&mut self, received: io::Result<Received>, now: Instant) {
        let Connection {
            readiness,
            receive,
            intake,
            ..
        } = &mut self.protocol;
        match received {
            Ok(Received::Full(_) | Received::Enough) => {}
            // A poll reports what comes later; but an end that came together with these bytes has
            // already been reported.
            Ok(Received::Drained(_)) => {
                readiness.is_readable = readiness.presence() != Presence::Present;
            }
            Ok(Received::Nothing) => readiness.is_readable = false,
            Ok(Received::End) => {
                readiness.is_readable = false;
                let is_between = receive.waiting().is_empty() && !intake.is_payload();
                self.say_missed_tls(now);
                if !is_between {
                    self.info(
                        now,
                        format_args!("ended: the client left in the middle of a message"),
                    );
                }
                self.life.apply(life::Event::Finish);
            }
            Err(error) => {
                self.info(now, format_args!("lost: {error}"));
                self.life.apply(life::Event::Lose);
            }
        }
    }
}

/// The part of a write's memory that is still to be filled; empty at the end.
fn rest_of_payload(slots: &mut Slots, slot: u32, filled: usize) -> &mut [u8] {
    let slot = slots.get(slot);
    let length = slot.request.length as usize;
    let payload = slot.payload.as_mut().expect("a write has memory");
    payload.slice_mut(filled..length)
}
