//! Groups whose requests hang, and what they leave of the queue's depth. What the depth's law does not count, requests that
//! are overdue or of slow clients, still takes a place each; so the clients of such a group are taken out of the order,
//! *parked*, until some of the group's requests have ended. A part of the depth is not used before it is known whose hang.

use super::super::overdue::Late;
use super::Bfq;

/// The requests in flight of a group's own clients.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct GroupOut {
    pub(super) in_flight: u32,
    /// Of slow clients.
    pub(super) apart: u32,
    pub(super) late: Late,
}

impl Bfq {
    /// Says whether a queue has to leave what room there is to others: half of what its group has out hangs, and that is
    /// more than half of the room; or more than the room, if little of the queue's own hangs. So the first group whose
    /// requests hang fills a third of the depth, or half, and each further one as much of the rest. The reserve of the depth is
    /// for groups that have less out than is left of it, since others may hang as well.
    #[inline]
    pub(super) fn fills_depth(&mut self, id: usize) -> bool {
        self.hangs_any() && self.hangs_too_much(id)
    }

    /// Whether only the reserve of the depth is free, and nothing is known to hang: a drive that goes on ends something soon.
    #[inline]
    pub(super) fn is_at_reserve(&self) -> bool {
        self.queue_depth.saturating_sub(self.in_flight) <= self.depth_reserve && !self.hangs_any()
    }

    /// Whether requests are in flight that the depth does not count.
    #[inline]
    fn hangs_any(&self) -> bool {
        self.out_apart != 0 || self.overdue.finds_any()
    }

    #[cold]
    fn hangs_too_much(&mut self, id: usize) -> bool {
        let room = self.queue_depth.saturating_sub(self.in_flight);
        let queue = &mut self.clients[id];
        let group = &mut self.groups_out[queue.group()];
        if room <= self.depth_reserve && group.in_flight >= room {
            return true;
        }
        let late = self.overdue.late_of(&mut group.late, group.in_flight);
        if !hangs(late.max(group.apart), group.in_flight) {
            return false;
        }
        let late = self.overdue.late_of(&mut queue.late, queue.in_flight);
        let may_have = match hangs(late.max(queue.out_apart), queue.in_flight) {
            true => room / 2,
            false => room,
        };
        group.in_flight >= may_have
    }

    /// Takes the queue whose turn it is out of the order, until [`Bfq::unpark`].
    #[cold]
    pub(super) fn park(&mut self, id: usize) {
        self.wf2q.release(self.wf2q.leaf(id), None);
        self.parked.push(id);
    }

    /// Lets the parked queues that do not fill the depth any more have their turns again: only an end, or another depth, can
    /// change that.
    #[inline]
    pub(super) fn unpark(&mut self) {
        if !self.parked.is_empty() && std::mem::take(&mut self.may_unpark) {
            (0..self.parked.len())
                .rev()
                .for_each(|place| self.unpark_at(place));
        }
    }

    #[cold]
    fn unpark_at(&mut self, place: usize) {
        let id = self.parked[place];
        if self.fills_depth(id) {
            return;
        }
        self.parked.swap_remove(place);
        let budget = self.next_budget(id).expect("a parked queue has a request");
        let is_urgent = self.clients[id].key().is_sync() && self.clients[id].in_flight == 0;
        self.wf2q.activate(self.wf2q.leaf(id), budget, is_urgent);
    }
}

/// Whether half of what is in flight hangs.
fn hangs(hanging: u32, in_flight: u32) -> bool {
    hanging > 0 && 2 * hanging >= in_flight
}

/// The reserve of the depth: this part of it, and so many requests at most.
pub(super) const RESERVE_PART: u32 = 8;
pub(super) const RESERVE_MAX: u32 = 16;
