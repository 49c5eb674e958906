//! What groups have at the drives now, as the reactors find it in their tags when they are asked.

use std::collections::BTreeMap;
use std::sync::mpsc::channel;
use std::time::Duration;

use blkmq_core::ids::{GroupId, ReactorId};
use blkmq_core::local::InFlight;

use super::Control;
use crate::disk::QueueId;
use crate::reactor::core::ReactorCore;
use crate::reactor::shared::Order;

/// What each group has at the drive of a queue; groups that have nothing there are not in it.
pub type InFlightOfGroups = BTreeMap<(QueueId, GroupId), InFlight>;

impl Control {
    /// Asks every reactor what groups have at its drivers. None if one has not answered for `limit`. An engine without
    /// requests under way is not woken. Attached threads are not asked. For any thread but a reactor's.
    pub fn in_flight(&self, limit: Duration) -> Option<InFlightOfGroups> {
        let mut all = InFlightOfGroups::new();
        if self.queues().iter().all(|(_, queue)| queue.outstanding() == 0) {
            return Some(all);
        }
        let (sender, receiver) = channel();
        let reactors = self.shared.inboxes.len();
        for number in 0..reactors {
            let sender = sender.clone();
            let answer = move |core: &mut ReactorCore| {
                // Whoever asked may wait no longer.
                let _ = sender.send(core.in_flight());
            };
            self.shared
                .order(ReactorId(number as u16), Order::Change(Box::new(answer)));
        }
        for _ in 0..reactors {
            for (group, has) in receiver.recv_timeout(limit).ok()? {
                all.entry(group).or_default().add(has);
            }
        }
        Some(all)
    }
}
