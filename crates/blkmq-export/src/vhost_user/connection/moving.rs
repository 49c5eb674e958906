//! Decides how a front end is handed over to another daemon: its rings end once all their chains
//! have ended, and the messages that set the device up are saved; then the rings are served again
//! unchanged, or the socket is closed silently. The code that restores a front end saved by another
//! daemon is here too.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use blkmq_host::disk::Disk;
use blkmq_host::service::Cx;

use super::super::descriptors::Descriptors;
use super::super::device::{Device, Touched};
use super::super::saved::SavedFrontEnd;
use super::{Connection, Shared};
use crate::common::listener::Admitted;
use crate::handover::codec::FDS_MAX;
use crate::handover::{Phase, Saved};

/// How far the hand-over of a connection to another daemon, or from one, is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Moving {
    /// None is under way.
    No,
    /// It takes no more messages, and its rings end.
    Stopping,
    /// The connection has been saved, or is restored and not served yet.
    AtRest,
}

/// Why a front end cannot continue here.
type Refusal = Box<dyn std::error::Error + Send + Sync>;

impl Connection {
    /// Continues a front end that another daemon has saved.
    pub(in super::super) fn restored(
        client: Admitted,
        device: Device,
        shared: Shared,
        saved: SavedFrontEnd,
        fds: Descriptors,
    ) -> Self {
        let mut connection = Self::new(client, device.disk().clone(), shared);
        connection.device = device;
        connection.told_size = saved.size;
        connection.received.extend_from_slice(&saved.received);
        connection.fds = fds;
        connection.is_selected = saved.is_selected;
        connection.is_restored = true;
        connection
    }

    /// Continues where another daemon stopped: enters the connections of the disk, and is served
    /// when all have entered.
    pub(super) fn take_place(&mut self, cx: &mut Cx<'_>) {
        if self.is_selected {
            let tenant = self.device.disk().tenant;
            self.ticket.iter_mut().for_each(|ticket| ticket.reselect(tenant));
            let disk = self.device.disk().number;
            match self.disks.enter(disk, &self.socket, None, &cx.waker()) {
                Ok(mut place) => {
                    // All requests of others ended before they were handed over.
                    place.wait_for_nobody();
                    self.place = Some(place);
                }
                Err(refusal) => return self.member.fail(format!("{}: {refusal}", self.name())),
            }
        }
        self.moving = Moving::AtRest;
        self.member.settle(None);
    }

    /// Records whether the connection is to be handed over, is not any more, or has been.
    pub(super) fn follow(&mut self, cx: &mut Cx<'_>, phase: Phase) {
        match (phase, self.moving) {
            (Phase::Suspended, Moving::No) => self.moving = Moving::Stopping,
            (Phase::Suspended, Moving::AtRest) if !self.member.has_settled() => {
                self.moving = Moving::Stopping
            }
            (Phase::Serving, Moving::Stopping | Moving::AtRest) => {
                self.moving = Moving::No;
                if !self.is_selected {
                    cx.set_timer(cx.now() + self.handshake_deadline);
                }
                self.poll(cx);
            }
            (Phase::Gone, _) => {
                self.moving = Moving::No;
                (self.is_closing, self.is_others) = (true, true);
            }
            _ => {}
        }
    }

    /// Saves the front end, if its rings have ended.
    pub(super) fn save_if_at_rest(&mut self, cx: &mut Cx<'_>) {
        if self.is_closing || !self.device.stop(&Touched::All) {
            return;
        }
        if self.pending.is_some() {
            // The message waited for rings to end, and is answered before the hand-over.
            self.handle(cx);
            return self.save_if_at_rest(cx);
        }
        self.moving = Moving::AtRest;
        let set_up = self.device.set_up();
        let mut fds = vec![Arc::clone(&self.socket)];
        let more = self.fds.iter().map(OwnedFd::try_clone).map(|fd| fd.map(Arc::new));
        let more: Result<Vec<_>, _> = more.collect();
        fds.extend(set_up.iter().flat_map(|(_, fds)| fds.iter().map(Arc::clone)));
        let disk = self.device.disk();
        let saved = SavedFrontEnd {
            disk: disk.name.clone(),
            size: self.told_size,
            block_size: disk.block_size,
            read_only: disk.read_only,
            is_selected: self.is_selected,
            messages: set_up.into_iter().map(|(message, _)| message).collect(),
            received: self.received.clone(),
            ..self.device.saved_state()
        };
        match more {
            Ok(more) => fds.extend(more),
            Err(error) => return self.member.fail(format!("{}: {error}", self.name())),
        }
        if fds.len() > FDS_MAX {
            let count = fds.len();
            let what = format!(
                "{}: it has {count} descriptors, {FDS_MAX} can be handed over",
                self.name()
            );
            return self.member.fail(what);
        }
        self.member.settle(Some(Saved {
            door: self.log.door(),
            address: self.address.to_string(),
            body: saved.bytes(),
            fds,
        }));
    }
}

/// Makes a device of what another daemon has saved, on the disk that is served here. Returns the
/// remaining descriptors: those of a message that has not arrived whole.
pub(in super::super) fn restore(
    disk: &Disk,
    saved: &SavedFrontEnd,
    mut fds: Vec<OwnedFd>,
) -> Result<(Device, Descriptors), Refusal> {
    let told = (saved.disk.as_str(), saved.size, saved.block_size, saved.read_only);
    // A disk that has grown since is larger for a guest that is told.
    let size = match disk.current_size() {
        grown if grown > saved.size => saved.size,
        size => size,
    };
    let found = (disk.name.as_str(), size, disk.block_size, disk.read_only);
    if told != found {
        return Err(format!(
            "the guest's disk is {told:?} (name, size, block size, read-only), here {found:?}"
        )
        .into());
    }
    let mut device = Device::new(disk.clone());
    for message in &saved.messages {
        if message.fds() > fds.len() {
            return Err("descriptors are missing".into());
        }
        let of_message: Vec<OwnedFd> = fds.drain(..message.fds()).collect();
        device.handle(message.clone(), of_message.into())?;
    }
    device.restore_state(saved)?;
    Ok((device, fds.into()))
}
