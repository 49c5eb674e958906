//! A software context: the bios of one reactor's own submitters, from submission to completion. Some are
//! staged, some wait for a free request, some are split or sequenced. It gets bios from `bio`, and hands
//! staged requests to `local` through `plug`.
//!
//! The number of requests of a reactor is bounded, and a bio that waits for a cap or behind a neighbour of
//! more weight keeps its request. So that one group does not block the others, requests that are taken
//! while no more than half are free are counted, and each group has a share of them (`holding`). A bio
//! that cannot have a request waits in its group's line; the lines take turns, and the room in the lines
//! is shared in the same way. While more than half are free, nothing is counted.
//!
//! Of what waits in the lines, no more large data is staged in one turn of the reactor than a drive that completes
//! inline copies in a tenth of a millisecond: a bio of many parts takes several turns, and others go between.

mod grace_period;

use std::collections::VecDeque;

use crate::bio::{Bio, Flags, Full, Parent, Passed, Status, Submission};
use crate::flush::{Begin, Flush};
use crate::ids::ReactorId;
use crate::plug::Plug;
use crate::qos::holding::{self, DynamicThreshold};
use crate::qos::lines::Lines;
use crate::queue::{Effects, LocalDisk, Queue};
use crate::request::{Request, State};
use crate::split::{self, Splits};
use crate::stat::StatsMode;

/// One reactor's software context for one queue.
pub(crate) struct SwCtx {
    me: ReactorId,
    pool: Vec<Box<Request>>,
    /// Requests are short while no more than this many are in the pool.
    short_at: usize,
    /// For each group, the requests taken while they were short.
    held: DynamicThreshold,
    pub(crate) plug: Plug,
    /// Bios, and remainders of bios, that wait for a request: a line for each group.
    waiting: Lines<Bio>,
    /// The lines with bios, once each.
    turns: VecDeque<u32>,
    waiting_max: usize,
    /// Data that may still be staged from the lines in this turn, in bytes.
    turn_left: u64,
    /// The lines have a bio that waits for the next turn alone.
    awaits_turn: bool,
    splits: Splits,
    pub(crate) flush: Flush,
    /// The queue's disks, as of the last `refresh_disks`.
    disks: Vec<LocalDisk>,
    /// Bios of this reactor's submitters that have not ended.
    pub(crate) outstanding: u32,
    requests: usize,
    /// The grace period under way, or the latest: its number, and how many requests it still waits for.
    grace_period: u64,
    before_grace_period: usize,
}

impl SwCtx {
    /// Allocates all memory that the context will need.
    pub(crate) fn new(queue: &Queue, me: ReactorId) -> Self {
        let requests = queue.requests_per_reactor();
        let max = requests as usize;
        let groups = queue.group_states.capacity();
        let held = DynamicThreshold::new(groups);
        let mut sw = Self {
            me,
            pool: (0..max).map(|_| Request::free(me)).collect(),
            short_at: held.short_at(max),
            held,
            plug: Plug::new(),
            // Twice: at most `max` bios of submitters, and at most `max` data writes of sequences.
            waiting: Lines::new(groups, 2 * max),
            turns: VecDeque::with_capacity(groups),
            waiting_max: max,
            turn_left: TURN_BYTES,
            awaits_turn: false,
            splits: Splits::new(requests),
            flush: Flush::new(me, queue.fitted_disks(), requests, groups),
            disks: queue.local_disks(),
            outstanding: 0,
            requests: max,
            grace_period: queue.attach_reactor(me),
            before_grace_period: 0,
        };
        sw.mark_pooled();
        sw
    }

    /// Submits a bio: stages it, puts it in a line, or ends it at once.
    ///
    /// # Errors
    /// Returns the bio if too many bios wait, of all groups or, when there is little room, of its own.
    #[inline(always)]
    pub(crate) fn submit(&mut self, queue: &Queue, bio: Bio, fx: &mut Effects) -> Result<(), Bio> {
        if let Some(disk) = self.disks.get(bio.disk.index())
            && queue.is_plain(&bio, bio.offset, disk)
            && self.can_stage_uncounted()
        {
            self.outstanding += 1;
            self.stage(queue, bio, disk.base);
            return Ok(());
        }
        self.submit_checked(queue, bio, fx)
    }

    /// Submits a bio that is still to be made: if it can be staged, it is written into its request.
    ///
    /// # Errors
    /// If too many bios wait, as for [`SwCtx::submit`].
    #[inline(always)]
    pub(crate) fn submit_new(
        &mut self,
        queue: &Queue,
        new: &Submission,
        fx: &mut Effects,
    ) -> Result<(), Full> {
        if let Some(disk) = self.disks.get(new.disk.index())
            && queue.will_be_plain(new, disk)
            && self.can_stage_uncounted()
        {
            self.outstanding += 1;
            let mut rq = self.pool.pop().expect("looked at above");
            rq.start_new(new, disk.base);
            self.plug.add(rq, queue.limits(), queue.merges());
            return Ok(());
        }
        self.make_and_submit(queue, new, fx)
    }

    /// Out of line, so that no bio is made where none is needed.
    #[inline(never)]
    fn make_and_submit(&mut self, queue: &Queue, new: &Submission, fx: &mut Effects) -> Result<(), Full> {
        self.submit_checked(queue, new.bio(), fx).map_err(|_| Full)
    }

    /// Submits a mapped disk's bio that goes unsplit to a place on one of this queue's disks.
    ///
    /// # Errors
    /// As for [`SwCtx::submit`]; the returned bio contains the place.
    #[inline(always)]
    pub(crate) fn submit_passed(
        &mut self,
        queue: &Queue,
        mut bio: Bio,
        to: Passed,
        fx: &mut Effects,
    ) -> Result<(), Bio> {
        if let Some(disk) = self.disks.get(to.disk.index())
            && queue.is_plain(&bio, to.offset, disk)
            && self.can_stage_uncounted()
        {
            self.outstanding += 1;
            let mut rq = self.pool.pop().expect("looked at above");
            rq.start(bio, 0);
            // Only here: small stores before the copy would delay it (store forwarding).
            rq.position = disk.base + to.offset;
            to.put_into(&mut rq.bio);
            self.plug.add(rq, queue.limits(), queue.merges());
            return Ok(());
        }
        to.put_into(&mut bio);
        self.submit_checked(queue, bio, fx)
    }

    /// A new turn of the reactor begins.
    #[inline]
    pub(crate) fn begin_turn(&mut self) {
        self.turn_left = TURN_BYTES;
    }

    /// Says whether the latest [`SwCtx::admit`] left something for the next turn.
    pub(crate) fn awaits_turn(&self) -> bool {
        self.awaits_turn
    }

    /// Stages as many waiting bios as requests, room in the plug and the turn allow. Says whether it did anything.
    pub(crate) fn admit(&mut self, queue: &Queue, fx: &mut Effects) -> bool {
        self.awaits_turn = false;
        while let Some(data) = self.flush.next_data(queue.limits()) {
            self.wait(data);
        }
        let mut any = false;
        let mut looks = self.turns.len();
        while looks > 0 && !self.plug.is_full() && !self.pool.is_empty() {
            looks -= 1;
            let line = self.turns.pop_front().expect("no more looks than lines");
            let has_gone = self.admit_first(queue, line, fx);
            if !self.waiting.is_empty(line) {
                self.turns.push_back(line);
            }
            if has_gone {
                any = true;
                looks = self.turns.len();
            }
        }
        any
    }

    /// Returns one of this reactor's requests, with its single bio, to the pool and ends the bio.
    #[inline]
    pub(crate) fn end_bio(&mut self, queue: &Queue, rq: Box<Request>, fx: &mut Effects) {
        if rq.is_flush {
            return self.complete_flush(queue, rq, fx);
        }
        if queue.counts_outside(&rq) {
            queue.reactor(self.me).shard.count_end(&rq);
        }
        self.reclaim(queue, rq, fx);
    }

    /// Returns a request that is no flush and has been counted to the pool.
    #[inline(always)]
    fn reclaim(&mut self, queue: &Queue, mut rq: Box<Request>, fx: &mut Effects) {
        self.finish_request(queue, &mut rq);
        if rq.bio.origin.is_whole() {
            self.outstanding -= 1;
            fx.passed += u32::from(rq.bio.is_passed());
            fx.ended.push(rq.bio.take());
        } else {
            self.end_part(rq.bio.take(), fx);
        }
        self.pool.push(rq);
    }

    /// Returns the first `count` requests of a list, at least one, to the pool: each of this reactor,
    /// with a single bio, no flush, and none whose end the gate's holder counts.
    #[inline]
    pub(crate) fn end_bios(
        &mut self,
        queue: &Queue,
        list: &mut Vec<Box<Request>>,
        count: usize,
        fx: &mut Effects,
    ) {
        let shard = &queue.reactor(self.me).shard;
        let is_counted = queue.stats.mode != StatsMode::Off;
        if list.len() == 1
            && let Some(rq) = list.pop()
        {
            // The work for a list costs too much for a single request, as at depth 1.
            if is_counted {
                shard.count_end(&rq);
            }
            return self.reclaim(queue, rq, fx);
        }
        if is_counted {
            shard.count_ends(&list[..count]);
        }
        let (mut are_whole, mut passed) = (true, 0);
        for rq in &mut list[..count] {
            self.finish_request(queue, rq);
            match rq.bio.origin.0 {
                Parent::Submitter => {}
                Parent::Passed(_) => passed += 1,
                _ => are_whole = false,
            }
        }
        if are_whole {
            // In one step: each bio is copied once, to its final place.
            self.outstanding -= count as u32;
            fx.passed += passed;
            fx.ended.extend(list[..count].iter_mut().map(|rq| rq.bio.take()));
        } else {
            for rq in &mut list[..count] {
                self.end_part(rq.bio.take(), fx);
            }
        }
        self.pool.extend(list.drain(..count));
    }

    /// Resets everything except the bio of a request that returns to the pool.
    #[inline(always)]
    fn finish_request(&mut self, queue: &Queue, rq: &mut Request) {
        debug_assert_eq!(
            rq.owner, self.me,
            "a request was completed on another reactor than its owner"
        );
        if rq.grace_period != self.grace_period as u32 {
            self.pass_grace_period(queue, rq);
        }
        if let Some(group) = rq.held_by {
            rq.held_by = None;
            self.held.give(group.0);
        }
        rq.state = State::Free;
        // The status is usually OK since the start of the request: a store now would delay the copy
        // (store forwarding).
        if !rq.status.is_ok() {
            rq.bio.status = rq.status;
        }
    }

    fn complete_flush(&mut self, queue: &Queue, mut rq: Box<Request>, fx: &mut Effects) {
        debug_assert!(
            rq.held_by.is_none(),
            "a flush is held by no group: it is not of the pool"
        );
        if queue.counts_outside(&rq) {
            queue.reactor(self.me).shard.count_end(&rq);
        }
        if rq.grace_period != self.grace_period as u32 {
            self.pass_grace_period(queue, &mut rq);
        }
        self.flush.flush_ended(rq);
        self.collect_sequences(fx);
    }

    /// Makes room for `disks` disks.
    pub(crate) fn fit_disks(&mut self, disks: usize) {
        self.flush.fit_disks(disks, self.me, self.grace_period as u32);
    }

    /// Copies the queue's list of disks.
    pub(crate) fn refresh_disks(&mut self, queue: &Queue) {
        self.disks = queue.local_disks();
    }

    /// Says whether nothing is staged, waits, or is due.
    pub(crate) fn is_idle(&self) -> bool {
        self.plug.list.is_empty() && self.turns.is_empty() && !self.flush.has_due()
    }

    /// Says whether no bio is staged or waits, in whole or in part.
    pub(crate) fn has_started_all(&self) -> bool {
        self.is_idle() && self.splits.len() == 0 && self.flush.len() == 0
    }

    /// Says whether a bio or request could start if the queue lets it.
    pub(crate) fn has_work_to_start(&self) -> bool {
        !self.plug.list.is_empty() || self.flush.has_due()
    }

    /// Says whether no bio and no request of this context is under way.
    pub(crate) fn is_at_rest(&self) -> bool {
        self.outstanding == 0 && self.pool.len() == self.requests && self.is_idle()
    }

    /// Asserts that the tables agree with each other.
    pub(crate) fn check_invariants(&self) {
        assert!(
            self.pool.len() <= self.requests,
            "reactor {}: more requests in the pool than made",
            self.me
        );
        self.waiting.check_invariants();
        for line in 0..self.waiting.lines() {
            let turns = self.turns.iter().filter(|turn| **turn == line).count();
            assert_eq!(
                turns,
                usize::from(!self.waiting.is_empty(line)),
                "reactor {}: turns of line {line}",
                self.me
            );
        }
        assert!(
            self.held.is_empty() || self.pool.len() < self.requests,
            "reactor {}: requests are counted as held, and all are in the pool",
            self.me
        );
        let under_way =
            self.splits.len() + self.flush.len() + self.waiting.count() + self.requests - self.pool.len();
        assert!(
            self.outstanding == 0 || under_way > 0,
            "reactor {}: {} bios outstanding and nothing under way",
            self.me,
            self.outstanding
        );
        let marked = self
            .pool
            .iter()
            .filter(|rq| rq.grace_period == self.grace_period as u32)
            .count();
        assert_eq!(
            marked,
            self.pool.len(),
            "reactor {}: requests in the pool that the grace period waits for",
            self.me
        );
        assert!(
            self.pool.iter().all(|rq| rq.state == State::Free),
            "reactor {}: busy request in the pool",
            self.me
        );
    }

    /// The slow path: bios that are not plain or cannot be staged now.
    #[inline(never)]
    fn submit_checked(&mut self, queue: &Queue, bio: Bio, fx: &mut Effects) -> Result<(), Bio> {
        let Some(&disk) = self.disks.get(bio.disk.index()) else {
            fx.end(bio, Status::Invalid);
            return Ok(());
        };
        if !queue.group_states.is_living(bio.group) {
            return self.submit_to_ancestor(queue, bio, fx);
        }
        if let Err(status) = queue.check_bio(&bio, &disk) {
            fx.end(bio, status);
            return Ok(());
        }
        if Flush::concerns(&bio) {
            return self.submit_flush(queue, bio, fx);
        }
        self.stage_or_wait(queue, bio, disk.base)
    }

    /// Submits the bio of a removed group to the ancestor that takes its bios; a group that never existed has none.
    #[cold]
    fn submit_to_ancestor(&mut self, queue: &Queue, mut bio: Bio, fx: &mut Effects) -> Result<(), Bio> {
        match queue.group_states.effective_group(bio.group) {
            Some(group) => {
                bio.group = group;
                self.submit(queue, bio, fx)
            }
            None => {
                fx.end(bio, Status::Invalid);
                Ok(())
            }
        }
    }

    fn submit_flush(&mut self, queue: &Queue, bio: Bio, fx: &mut Effects) -> Result<(), Bio> {
        let is_capped = queue.group_states.is_capped(bio.group);
        match self.flush.begin(bio, queue.limits(), is_capped) {
            Begin::Full(bio) => return Err(bio),
            Begin::Ended(bio) => fx.give_back(bio),
            Begin::Sequenced => self.outstanding += 1,
            Begin::Plain(bio) => {
                let base = self.disks[bio.disk.index()].base;
                return self.stage_or_wait(queue, bio, base);
            }
        }
        Ok(())
    }

    /// Says whether the next bio of any group can be staged at once: no bio waits, requests are not short, and
    /// the plug has room.
    #[inline]
    fn can_stage_uncounted(&self) -> bool {
        self.turns.is_empty() && self.pool.len() > self.short_at && !self.plug.is_full()
    }

    /// Says whether a group may have a request now.
    fn may_take(&self, group: u32) -> bool {
        let free = self.pool.len();
        free > self.short_at || self.held.may_take(group, free)
    }

    fn stage_or_wait(&mut self, queue: &Queue, bio: Bio, base: u64) -> Result<(), Bio> {
        let line = bio.group.0;
        if self.waiting.is_empty(line)
            && !self.plug.is_full()
            && self.may_take(line)
            && split::fits(&bio, base, queue.limits())
        {
            self.stage_counted(queue, bio, base);
        } else if self.has_room(line) {
            self.wait(bio);
        } else {
            return Err(bio);
        }
        self.outstanding += 1;
        Ok(())
    }

    /// Says whether one more bio of a submitter may wait in a line.
    fn has_room(&self, line: u32) -> bool {
        let room = self.waiting_max.saturating_sub(self.waiting.count());
        room > self.held.short_at(self.waiting_max)
            || (room > 0 && self.waiting.len(line) < holding::share(room, self.turns.len()))
    }

    fn wait(&mut self, bio: Bio) {
        let line = bio.group.0;
        if self.waiting.is_empty(line) {
            self.turns.push_back(line);
        }
        self.waiting.push(line, bio);
    }

    #[inline(never)]
    fn stage_counted(&mut self, queue: &Queue, bio: Bio, base: u64) {
        if self.pool.len() <= self.short_at {
            let group = bio.group;
            self.held.take(group.0);
            self.pool.last_mut().expect("the caller has looked").held_by = Some(group);
        }
        self.stage(queue, bio, base);
    }

    #[inline(always)]
    fn stage(&mut self, queue: &Queue, bio: Bio, base: u64) {
        let mut rq = self.pool.pop().expect("the caller has looked");
        rq.start(bio, base);
        self.plug.add(rq, queue.limits(), queue.merges());
    }

    /// Stages the first bio of a line, or a part of it. False if the bio cannot be staged now.
    fn admit_first(&mut self, queue: &Queue, line: u32, fx: &mut Effects) -> bool {
        let first = self.waiting.first(line).expect("lines with turns have bios");
        if !self.may_take(first.group.0) {
            return false;
        }
        let base = self.disks[first.disk.index()].base;
        if self.turn_left == 0 && first.op.has_data() && first.len >= LARGE_BYTES {
            self.awaits_turn = true;
            return false;
        }
        if split::fits(first, base, queue.limits()) {
            let mut bio = self.waiting.pop(line).expect("looked at above");
            bio.flags = bio.flags.without(Flags::REST);
            self.count_for_turn(&bio);
            self.stage_counted(queue, bio, base);
            return true;
        }
        if !first.flags.has(Flags::REST) {
            let whole = self.waiting.pop(line).expect("looked at above");
            queue.reactor(self.me).shard.events.split.add(1);
            match self.splits.begin(whole) {
                Ok(rest) => self.waiting.push_front(line, rest),
                Err(whole) => {
                    self.waiting.push_front(line, whole);
                    return false;
                }
            }
        }
        let first = self.waiting.first_mut(line).expect("put there above");
        match split::cut(first, base, queue.limits()) {
            Some(part) => {
                self.count_for_turn(&part);
                self.stage_counted(queue, part, base);
            }
            None => {
                let mut rest = self.waiting.pop(line).expect("looked at above");
                rest.status = Status::Invalid;
                self.end_part(rest, fx);
            }
        }
        true
    }

    /// A drive that completes inline copies the data in this turn, and all others of the reactor wait.
    fn count_for_turn(&mut self, bio: &Bio) {
        if bio.op.has_data() {
            self.turn_left = self.turn_left.saturating_sub(bio.len);
        }
    }

    /// Ends a bio, or a part of one.
    fn end_part(&mut self, bio: Bio, fx: &mut Effects) {
        match bio.origin.0 {
            Parent::Submitter | Parent::Passed(_) | Parent::Part(_) => {
                self.outstanding -= 1;
                fx.give_back(bio);
            }
            Parent::Split(index) => {
                if let Some(whole) = self.splits.part_ended(index, bio.len, bio.status) {
                    self.end_part(whole, fx);
                }
            }
            Parent::Sequence(index) => {
                self.flush.data_ended(index, bio.status);
                self.collect_sequences(fx);
            }
        }
    }

    fn collect_sequences(&mut self, fx: &mut Effects) {
        while let Some(bio) = self.flush.next_ended() {
            self.outstanding -= 1;
            fx.give_back(bio);
        }
    }
}

/// Data that is staged from the lines in one turn: a tenth of a millisecond of copying to memory that was touched
/// before. What exceeds it is a whole request at most.
const TURN_BYTES: u64 = 1 << 20;
/// Smaller bios are bounded by their number.
const LARGE_BYTES: u64 = 32 << 10;
