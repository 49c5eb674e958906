//! Clients whose requests hang, and what they leave of the queue's depth. What `depth` does not count, requests that are
//! overdue or of slow clients, still takes a place each; so such a client is taken out of the order, *parked*, until some of
//! its group's requests have ended.

use super::Bfq;

impl Bfq {
    /// Says whether a queue has to leave what room there is to others: half of what it has out hangs, and its group has more
    /// out than half of the room. So the first group whose requests hang fills a third of the queue's depth, and each
    /// further one a third of the rest.
    #[inline]
    pub(super) fn fills_depth(&mut self, id: usize) -> bool {
        self.hangs_any() && self.hangs_too_much(id)
    }

    /// Whether requests are in flight that the depth does not count.
    #[inline]
    fn hangs_any(&self) -> bool {
        self.out_apart != 0 || self.overdue.finds_any()
    }

    #[cold]
    fn hangs_too_much(&mut self, id: usize) -> bool {
        let free = self.queue_depth.saturating_sub(self.in_flight);
        let queue = &mut self.clients[id];
        let late = self.overdue.late_of(&mut queue.late, queue.in_flight);
        let hanging = late.max(queue.out_apart);
        hanging > 0
            && 2 * hanging >= queue.in_flight
            && self.in_flight_of[queue.group()] >= (free / 2).max(OUT_MIN)
    }

    /// Takes the queue whose turn it is out of the order, until [`Bfq::unpark`].
    #[cold]
    pub(super) fn park(&mut self, id: usize) {
        self.wf2q.release(self.wf2q.leaf(id), None);
        self.parked.push(id);
    }

    /// Lets the parked queues that do not fill the depth any more have their turns again.
    #[inline]
    pub(super) fn unpark(&mut self) {
        if !self.parked.is_empty() {
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

/// A group may have so many requests out whether they hang or not: one that hangs is no reason to keep the others back.
const OUT_MIN: u32 = 4;
