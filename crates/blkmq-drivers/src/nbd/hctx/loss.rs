//! Handles a lost connection: what becomes of its requests, and which requests a new connection gets.

use blkmq_core::bio::Status;
use blkmq_core::time::Nanos;
use blkmq_nbd::codec::TransmissionFlags;

use super::super::connection::{Connection, Lost};
use super::super::dial::Dialed;
use super::super::reconnect::News;
use super::super::slots::State;
use super::super::wire::Wire;
use super::{CANCEL, EPOCH_MAX, NEWS, NbdHctx, READABLE, READABLE_EVENTS, WRITABLE, user};

impl NbdHctx {
    /// Gives a connection up, and decides what becomes of its requests.
    #[cold]
    pub(super) fn lose(&mut self, number: u16, why: &Lost) {
        self.give_up_session(number);
        let link = &mut self.links[usize::from(number)];
        let Some(connection) = link.connection.take() else {
            return;
        };
        connection.abandon();
        for kind in [READABLE, WRITABLE] {
            self.ring_client
                .push_cancel(user(kind, number, link.epoch), user(CANCEL, number, 0));
        }
        link.epoch = link.epoch.wrapping_add(1) & EPOCH_MAX;
        let is_short = self.now < link.since + SHORT_LIFE;
        link.short_lived = if is_short { link.short_lived + 1 } else { 0 };
        if self.batch == Some(number) {
            self.batch = None;
        }
        let is_last = self.links.iter().all(|link| link.connection.is_none());
        if is_last {
            self.down_since = Some(self.now);
        }
        self.ledger.session_lost();
        self.shared.health.disconnected();
        let (again, failed) = self.settle_lost(number);
        tracing::warn!(
            source = self.shared.disk.config.text,
            "nbd {}: connection lost: {why}; {again} requests wait to be sent again, {failed} have failed",
            self.shared.disk.config.text
        );
        self.request_connection(number);
        self.send_held();
    }

    /// Requests a connection for an entry that has none.
    pub(super) fn request_connection(&mut self, number: u16) {
        let short_lived = self.links[usize::from(number)].short_lived;
        let reconnector = &self.shared.reconnector;
        if !reconnector.missing_one(number, short_lived, &self.mailbox) {
            self.schedule_heartbeat();
        }
    }

    /// Holds the requests of a lost connection, or ends them. Returns how many were held, and how
    /// many ended.
    pub(super) fn settle_lost(&mut self, link: u16) -> (u32, u32) {
        let may_repeat = !self.shared.disk.config.reconnect.is_zero() && self.holds();
        let lost = self
            .slots
            .iter()
            .filter(|(_, slot)| slot.state == State::Sent(link));
        let lost: Vec<u32> = lost.map(|(number, _)| number).collect();
        let (mut again, mut failed) = (0, 0);
        for number in lost {
            let slot = self.slots.get_mut(number);
            if slot.is_fence {
                slot.state = State::Idle;
                let session = slot.range().0;
                self.ledger.fences().release(session);
                continue;
            }
            slot.losses = slot.losses.saturating_add(1);
            if may_repeat && slot.losses <= LOSSES_MAX {
                slot.rewind();
                self.held.push_back(number);
                again += 1;
            } else {
                self.end(number, Status::Transport);
                failed += 1;
            }
        }
        (again, failed)
    }

    /// Sends held requests, if there is a connection; ends them, if they are to wait no longer.
    pub(super) fn send_held(&mut self) {
        if self.held.is_empty() {
            return;
        }
        let Some(link) = self.lane_for_batch() else {
            if !self.holds() {
                while let Some(number) = self.held.pop_front() {
                    self.end(number, Status::Transport);
                }
            }
            return;
        };
        for _ in 0..self.held.len() {
            let number = self.held.pop_front().expect("as many as there are");
            if self.must_wait(link, number) {
                self.held.push_back(number);
            } else {
                self.push(link, number);
            }
        }
        self.send_batch();
    }

    /// Begins to use a connection.
    pub(super) fn connected(&mut self, number: u16, dialed: Dialed) {
        let shape = &self.shared.disk.shape;
        let can_fua = shape.can(TransmissionFlags::SEND_FUA);
        let requests = self.held.capacity();
        let link = &mut self.links[usize::from(number)];
        let mut connection = Connection::new(
            Wire::new(dialed.socket, dialed.tls),
            dialed.agreed.style,
            can_fua,
            requests,
        );
        connection.session = dialed.session;
        self.ring_client.push_poll(
            connection.fd(),
            READABLE_EVENTS,
            true,
            user(READABLE, number, link.epoch),
        );
        let was_lost = link.epoch > 0;
        link.since = self.now;
        link.connection = Some(connection);
        self.shared.health.connected();
        self.down_since = None;
        self.is_young = false;
        if was_lost {
            tracing::info!(
                source = self.shared.disk.config.text,
                "nbd {}: connected again",
                self.shared.disk.config.text
            );
        }
        let instance = dialed.session.map(|session| session.instance);
        if self.ledger.session_made(self.shared.place, instance) {
            tracing::warn!(
                source = self.shared.disk.config.text,
                "nbd {}: what was written and not flushed may be lost with the server: each user's next flush fails",
                self.shared.disk.config.text
            );
        }
        self.send_fence();
        self.send_held();
    }

    pub(super) fn watch_news(&self) {
        self.ring_client
            .push_poll(self.mailbox.fd(), libc::POLLIN, true, user(NEWS, 0, 0));
    }

    pub(super) fn take_news(&mut self) {
        for news in self.mailbox.take() {
            match news {
                News::Connected(number, dialed) => {
                    self.connected(number, dialed);
                    self.wants_rerun = true;
                }
                News::Failed => {
                    if std::mem::take(&mut self.is_young) {
                        self.down_since = Some(self.now);
                    }
                    self.send_held();
                }
                News::Fences => {
                    self.send_fence();
                    self.send_held();
                }
            }
        }
    }
}

/// A connection that is lost sooner was short-lived.
const SHORT_LIFE: Nanos = Nanos::from_secs(1);
/// Most connections that a request may be lost with.
const LOSSES_MAX: u8 = 100;
