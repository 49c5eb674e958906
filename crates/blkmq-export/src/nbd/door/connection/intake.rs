//! Decides how much a connection receives in one turn, and what the bytes become: the selection of
//! an export, requests, payload, the end. `requests` handles the decoded requests.

use std::io;
use std::sync::Arc;

use blkmq_core::time::Instant;
use blkmq_host::disk::Disk;
use blkmq_host::service::Cx;

use super::super::slots::Slots;
use super::super::wire::Received;
use super::{AGAIN, Connection};
use crate::common::life::{self, Life};
use crate::common::lookup::Asker;
use crate::common::losses::Heard;
use crate::common::memory::Account;
use crate::common::predecessors::Refusal;
use crate::common::predecessors::SessionName;
use crate::nbd::session::Event;

impl Connection {
    /// Receives and judges until the socket is drained or a limit holds the client back.
    pub(super) fn take_in(&mut self, cx: &mut Cx<'_>) {
        if self.handshake.is_some() && self.life == Life::Serving {
            self.shake_hands(cx);
        }
        while self.takes() {
            let held_back = if self.filling.is_some() {
                false
            } else {
                self.judge(cx)
            };
            if held_back || !self.takes() || !self.is_readable {
                return;
            }
            let received = match self.filling {
                Some((slot, filled)) => self.fill_payload(cx, slot, filled),
                None => self.receive.fill(&mut self.wire),
            };
            if matches!(received, Ok(Received::Enough)) {
                return self.come_again(cx);
            }
            self.handle_recv(received, cx.now());
        }
    }

    /// Returns whether messages are taken now.
    fn takes(&self) -> bool {
        self.life == Life::Serving && self.handshake.is_none() && self.refused.is_empty()
    }

    /// Ends this turn for the benefit of others; the connection continues in the next turn.
    pub(super) fn come_again(&mut self, cx: &mut Cx<'_>) {
        if !std::mem::replace(&mut self.comes_again, true) {
            cx.ring_client().push_nop(AGAIN);
        }
    }

    /// Judges what was received. Returns whether the session can take no more until replies are
    /// sent.
    pub(super) fn judge(&mut self, cx: &mut Cx<'_>) -> bool {
        self.is_busy = false;
        if let Some(request) = self.starved.take()
            && (!self.begin(cx, request) || !self.refused.is_empty())
        {
            return self.starved.is_some();
        }
        loop {
            let step = self
                .session
                .receive(self.receive.waiting(), &mut self.transmit.heads);
            self.transmit.note_heads();
            self.receive.consume(step.consumed);
            self.messages += u64::from(step.consumed > 0);
            match step.event {
                Event::NeedMore => return false,
                Event::Busy => {
                    self.is_busy = true;
                    return true;
                }
                Event::Request(request) | Event::Write(request) => {
                    if !self.begin(cx, request) {
                        return self.starved.is_some();
                    }
                }
                Event::StartTls => return self.start_tls(cx),
                Event::Selected(export) => self.select(cx, export.id.0),
                Event::Refused(refused) => tracing::debug!("nbd: {refused:?}"),
                Event::Disconnect => {
                    self.say_missed_tls(cx.now());
                    self.life.apply(life::Event::Finish);
                }
                Event::Close(reason) => {
                    self.log()
                        .warn(cx.now(), format_args!("{} closed: {reason}", self.name()));
                    self.life.apply(life::Event::Finish);
                }
            }
            if !self.takes() {
                return false;
            }
        }
    }

    pub(super) fn select(&mut self, cx: &Cx<'_>, number: u32) {
        let Some(disk) = cx.disk_of_number(number) else {
            let what = format_args!("{} closed: the disk that it selects is removed", self.name());
            self.log().info(cx.now(), what);
            self.life.apply(life::Event::Lose);
            return;
        };
        if let Err(refusal) = self.ticket.select(disk.tenant) {
            let what = format_args!("{} to {} refused: {refusal}", self.name(), disk.name);
            self.log().warn(cx.now(), what);
            self.life.apply(life::Event::Lose);
            return;
        }
        if let Err(refusal) = self.enter(cx, disk) {
            let what = format_args!("{} refused: {refusal}", self.name());
            self.log().warn(cx.now(), what);
            self.life.apply(life::Event::Lose);
        }
    }

    /// Takes the place of the connection among those of a disk.
    ///
    /// # Errors
    /// The place is refused.
    pub(super) fn enter(&mut self, cx: &Cx<'_>, disk: Disk) -> Result<(), Refusal> {
        self.disk_use = disk.users.enter(cx.waker());
        if self.disk_use.is_none() {
            return Err(Refusal::Removed);
        }
        self.member.select(&disk.name);
        let memory = Arc::clone(&self.door.common.memory);
        let account = Account::new(memory, disk.tenant, cx.waker());
        self.slots.set_account(account, disk.limits.leaves_buffers);
        self.heard = Heard::new(&disk);
        self.asker = Some(Arc::new(Asker::new(cx.waker())));
        let disks = &self.door.shared.disks;
        let name = self.session.name().map(|name| SessionName {
            client: name.client,
            number: name.number,
        });
        let mut place = disks.enter(disk.number, self.wire.socket(), name, &cx.waker())?;
        // A client that could write nothing leaves nothing to wait for.
        if disk.read_only {
            place.wait_for_nobody();
        }
        if place.must_wait() {
            self.life.apply(life::Event::Queue);
        }
        self.place = Some(place);
        self.disk = Some(disk);
        Ok(())
    }

    /// Takes the received part of a write's payload. Returns whether the payload is whole, and so
    /// submitted.
    pub(super) fn take_payload(&mut self, cx: &mut Cx<'_>, slot: u32, filled: usize) -> bool {
        let Self { slots, receive, .. } = self;
        let mut all = filled;
        loop {
            let rest = rest_of_payload(slots, slot, all);
            let bytes = receive.move_into(rest);
            all += bytes;
            if bytes == 0 {
                break;
            }
        }
        self.payload_came(cx, slot, filled, all - filled)
    }

    /// Receives the rest of a write's payload straight into its buffer.
    pub(super) fn fill_payload(&mut self, cx: &mut Cx<'_>, slot: u32, filled: usize) -> io::Result<Received> {
        let rest = rest_of_payload(&mut self.slots, slot, filled);
        let received = self.receive.receive_into(&mut self.wire, rest)?;
        if let Received::Full(bytes) | Received::Drained(bytes) = received {
            self.payload_came(cx, slot, filled, bytes);
        }
        Ok(received)
    }

    pub(super) fn payload_came(&mut self, cx: &mut Cx<'_>, slot: u32, filled: usize, bytes: usize) -> bool {
        self.session.payload_taken(bytes as u64);
        let request = self.slots.get(slot).request;
        let filled = filled + bytes;
        let is_whole = filled as u64 == request.length;
        self.filling = (!is_whole).then_some((slot, filled));
        if is_whole {
            self.messages += 1;
            self.submit(cx, slot);
        }
        is_whole
    }

    /// Logs at the end of a connection that its client never started the TLS that it needs here.
    fn say_missed_tls(&self, now: Instant) {
        if self.session.has_missed_tls() {
            let what = format_args!("{} closed: it needs TLS here, and did not start it", self.name());
            self.log().warn(now, what);
        }
    }

    /// Handles what the socket reported.
    pub(super) fn handle_recv(&mut self, received: io::Result<Received>, now: Instant) {
        match received {
            Ok(Received::Full(_) | Received::Enough) => {}
            // A poll reports what comes later; but an end that came together with these bytes has
            // already been reported.
            Ok(Received::Drained(_)) => self.is_readable = self.has_left,
            Ok(Received::Nothing) => self.is_readable = false,
            Ok(Received::End) => {
                self.say_missed_tls(now);
                let is_between = self.receive.waiting().is_empty() && self.filling.is_none();
                if !is_between {
                    if cfg!(blkmq_mutant = "descriptor_leak") {
                        std::mem::forget(Arc::clone(self.wire.socket()));
                    }
                    let what = format_args!("{}: the client left in the middle of a message", self.name());
                    self.log().info(now, what);
                }
                self.is_readable = false;
                self.life.apply(life::Event::Finish);
            }
            Err(error) => {
                self.log()
                    .info(now, format_args!("{} lost: {error}", self.name()));
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
