//! Groups whose requests hang, and what they leave of the queue's depth. What the depth's law does not count, requests that
//! are overdue or of slow clients, still takes a place each; so the clients of such a group are taken out of the order,
//! *parked*, until some of the group's requests have ended. A part of the depth is not used before it is known whose hang.

use super::super::overdue::{Late, Overdue};
use super::Bfq;
use super::clients::Clients;

/// The requests in flight of a group's own clients.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct GroupOut {
    pub(super) in_flight: u32,
    /// Of slow clients.
    pub(super) apart: u32,
    pub(super) late: Late,
    parked: Parked,
}

impl GroupOut {
    /// Whether half of what the group has out is overdue, or of slow clients.
    pub(super) fn hangs(&mut self, overdue: &Overdue) -> bool {
        let late = overdue.late_of(&mut self.late, self.in_flight);
        hangs(late.max(self.apart), self.in_flight)
    }
}

/// The parked queues of a group: the first and the last one, linked by [`Queue::next_parked`](super::clients::Queue). Those
/// whose turn was longest ago are first.
#[derive(Clone, Copy, Debug, Default)]
struct Parked(Option<(u32, u32)>);

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
        let group = self.clients[id].group();
        if self.group_hangs_too_much(group) {
            return true;
        }
        let (in_flight, may_have) = (self.groups_out[group].in_flight, self.room() / 2);
        if in_flight < may_have || !self.group_hangs(group) {
            return false;
        }
        let queue = &mut self.clients[id];
        let late = self.overdue.late_of(&mut queue.late, queue.in_flight);
        hangs(late.max(queue.out_apart), queue.in_flight)
    }

    /// Whether a group has to leave what room there is, whichever of its queues has its turn.
    fn group_hangs_too_much(&mut self, group: usize) -> bool {
        let (in_flight, room) = (self.groups_out[group].in_flight, self.room());
        if room <= self.depth_reserve {
            // One that has nothing out may try again, in the first half.
            let may_try = in_flight == 0 && room > self.depth_reserve / 2;
            return in_flight >= room || !may_try && self.slow.is_suspect(group);
        }
        in_flight >= room && self.group_hangs(group)
    }

    fn group_hangs(&mut self, group: usize) -> bool {
        self.groups_out[group].hangs(&self.overdue)
    }

    fn room(&self) -> u32 {
        self.queue_depth.saturating_sub(self.in_flight)
    }

    /// Takes the queue whose turn it is out of the order, until [`Bfq::unpark`].
    #[cold]
    pub(super) fn park(&mut self, id: usize) {
        self.wf2q.release(self.wf2q.leaf(id), None);
        let group = self.clients[id].group();
        if self.groups_out[group].parked.is_empty() {
            self.parking.push(group);
        }
        self.groups_out[group].parked.push(&mut self.clients, id as u32);
    }

    /// Lets parked queues that do not fill the depth any more have their turns again: only an end, or another depth, can
    /// change that.
    #[inline]
    pub(super) fn unpark(&mut self) {
        if !self.parking.is_empty() && std::mem::take(&mut self.may_unpark) {
            (0..self.parking.len())
                .rev()
                .for_each(|place| self.unpark_of(place));
        }
    }

    /// The same for one of the groups that have some, as many as there is room for requests of theirs. A group has as many
    /// queues as a tenant has connections, so they are not looked at while the group itself fills the depth.
    #[cold]
    fn unpark_of(&mut self, place: usize) {
        let group = self.parking[place];
        if self.group_hangs_too_much(group) {
            return;
        }
        let mut left = self
            .room()
            .saturating_sub(self.groups_out[group].in_flight)
            .max(1);
        let mut parked = std::mem::take(&mut self.groups_out[group].parked);
        let mut stay = Parked::default();
        while left > 0
            && let Some(id) = parked.pop(&mut self.clients)
        {
            if self.hangs_too_much(id as usize) {
                stay.push(&mut self.clients, id);
                continue;
            }
            left -= 1;
            let queue = &self.clients[id as usize];
            let is_urgent = queue.key().is_sync() && queue.in_flight == 0;
            let budget = self
                .next_budget(id as usize)
                .expect("a parked queue has a request");
            self.wf2q.activate(self.wf2q.leaf(id as usize), budget, is_urgent);
        }
        while let Some(id) = stay.pop(&mut self.clients) {
            parked.push(&mut self.clients, id);
        }
        if parked.is_empty() {
            self.parking.swap_remove(place);
        }
        self.groups_out[group].parked = parked;
    }

    /// Whether a queue is parked.
    pub(super) fn is_parked(&self, id: usize) -> bool {
        let last = self.groups_out[self.clients[id].group()]
            .parked
            .0
            .map(|(_, last)| last);
        last == Some(id as u32) || self.clients[id].next_parked.is_some()
    }
}

impl Parked {
    fn is_empty(self) -> bool {
        self.0.is_none()
    }

    fn push(&mut self, clients: &mut Clients, id: u32) {
        let first = match self.0 {
            Some((first, last)) => {
                clients[last as usize].next_parked = Some(id);
                first
            }
            None => id,
        };
        self.0 = Some((first, id));
    }

    fn pop(&mut self, clients: &mut Clients) -> Option<u32> {
        let (first, last) = self.0?;
        let next = clients[first as usize].next_parked.take();
        self.0 = next.map(|next| (next, last));
        Some(first)
    }
}

/// Whether half of what is in flight hangs.
fn hangs(hanging: u32, in_flight: u32) -> bool {
    hanging > 0 && 2 * hanging >= in_flight
}

/// The reserve of the depth: this part of it, and so many requests at most.
pub(super) const RESERVE_PART: u32 = 8;
pub(super) const RESERVE_MAX: u32 = 16;
