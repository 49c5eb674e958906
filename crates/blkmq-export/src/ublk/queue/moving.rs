//! Decides how a device is handed over to another daemon: its queues begin nothing more, what they
//! have begun is answered, and the state that the successor needs is saved; then they continue
//! unchanged, or release the device without stopping it. The kernel gives the device to the
//! successor when this process has ended, with the requests that came meanwhile.

use std::sync::Arc;

use blkmq_host::service::Cx;

use super::super::device::Reason;
use super::super::front_door::DOOR;
use super::super::keeper::Order;
use super::Queue;
use crate::handover::{Phase, Saved};

/// How far the hand-over of a queue to another daemon, or from one, is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Moving {
    /// None is under way.
    No,
    /// Nothing more is begun, and what was begun ends.
    Stopping,
    /// The queue has been saved, or is restored and not served yet.
    AtRest,
}

impl Queue {
    /// Records whether the device is to be handed over, is not any more, or has been.
    pub(super) fn follow(&mut self) {
        match (self.member.phase(), self.moving) {
            (Phase::Suspended, Moving::No) if self.device.address.is_none() => {
                let name = &self.device.name;
                self.member.fail(format!(
                    "{name} cannot be handed over: give it a number, and have root serve it"
                ));
            }
            (Phase::Suspended, Moving::No) => self.moving = Moving::Stopping,
            (Phase::Suspended, Moving::AtRest) if !self.member.has_settled() => {
                self.moving = Moving::Stopping;
            }
            (Phase::Serving, Moving::Stopping | Moving::AtRest) => {
                self.moving = Moving::No;
                self.begin_when_served();
            }
            (Phase::Gone, _) if !self.is_stopping => self.device.let_go(),
            _ => {}
        }
    }

    /// Makes requests come to a device that had to wait.
    fn begin_when_served(&mut self) {
        let Some(first) = &mut self.first else { return };
        // The saver undoes this, so neither overtakes the other.
        self.device.set_saved(false);
        if !std::mem::replace(&mut first.has_begun, true) && !self.device.order(Order::Begin(None)) {
            self.device.ask_end(Reason::Removed);
        }
    }

    /// Saves the device, or this queue's part, if all that was begun has been answered.
    pub(super) fn save_if_at_rest(&mut self, cx: &Cx<'_>) {
        if self.is_stopping || !self.is_idle() || cx.outstanding() > 0 {
            return;
        }
        self.moving = Moving::AtRest;
        let (Some(first), Some(address)) = (&self.first, &self.device.address) else {
            return self.member.settle(None);
        };
        self.device.set_saved(true);
        let saved = Saved {
            door: DOOR,
            address: address.clone(),
            body: self.device.save(first.told_size).bytes(),
            fds: vec![Arc::clone(&self.device.control)],
        };
        self.member.settle(Some(saved));
    }
}
