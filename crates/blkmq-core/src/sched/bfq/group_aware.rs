//! What the gate asks and tells of groups: urgent requests beyond the depth, whom others wait for, what was learnt, and
//! groups that come, move and go.

use super::Bfq;
use super::dispatch::Turns;
use super::history::TurnEnd;
use crate::group::Node;
use crate::ids::{GroupId, ReactorId, ReactorSet};
use crate::request::Request;
use crate::sched::elevator::{Elevator, GroupAware};
use crate::time::{Instant, Nanos};

impl GroupAware for Bfq {
    /// A few requests of clients that return within their due may exceed the depth: on a drive that holds two
    /// large writes, waiting for the end of one would be most of a small read's time.
    fn dispatch_urgent(&mut self, now: Instant) -> Option<Box<Request>> {
        self.notice(now);
        self.unpark();
        let limit = self.depth.limit();
        let room = limit.saturating_add((limit / URGENT_PART).max(1));
        let in_flight = self.punctual();
        if self.has_turns() || in_flight >= room || self.is_at_reserve() || !self.wf2q.is_next_urgent() {
            return None;
        }
        self.dispatch_one(Turns::Urgent)
    }

    fn awaits(&mut self) -> ReactorSet {
        if self.has_turns() || self.queued() == 0 {
            return ReactorSet::default();
        }
        self.idling.awaited()
    }

    fn answered(&mut self, reactor: ReactorId, until: Instant, now: Instant) {
        self.notice(now);
        self.idling.answered(reactor, until, self.now);
    }

    fn drain_idled(&mut self, take: &mut dyn FnMut(GroupId, Nanos)) {
        self.idled.drain(..).for_each(|(group, time)| take(group, time));
    }

    fn learnt(&mut self, group: GroupId) -> Vec<u64> {
        let known = self.probing.learnt(self.wf2q.group(group.index()), self.now);
        known.map_or_else(Vec::new, |known| known.to_vec())
    }

    fn take_learnt(&mut self, group: GroupId, learnt: &[u64], now: Instant) {
        self.notice(now);
        let id = self.wf2q.group(group.index());
        if let Ok(learnt) = learnt.try_into()
            && self.lead_max() > 0
        {
            self.probing.take_learnt(&mut self.wf2q, id, learnt, self.now);
        }
    }

    fn group_set(&mut self, id: GroupId, node: &Node) {
        self.end_turn(TurnEnd::Asked);
        self.probing.abandon(&mut self.wf2q);
        let entity = self.wf2q.group(id.index());
        self.wf2q.move_group(entity, node.parent.index());
        self.wf2q.set_weight(entity, node.weight.into());
    }

    fn group_gone(&mut self, id: GroupId) {
        self.end_turn(TurnEnd::Asked);
        self.probing.abandon(&mut self.wf2q);
        self.slow.forget_group(id.index());
        let wf2q = &mut self.wf2q;
        self.clients.forget(id, |queue| wf2q.forget(wf2q.leaf(queue)));
        let group = wf2q.group(id.index());
        wf2q.forget(group);
        self.probing.forget(&mut self.wf2q, group);
        self.idling.forget(group);
    }
}

/// One urgent request may exceed the depth for each so many requests that the drive may hold.
const URGENT_PART: u32 = 4;
