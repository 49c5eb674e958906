//! The oracle: it observes the clients' submissions and completions and the drive's requests, and checks
//! the invariants of the architecture, without knowledge of the core's internals. The first fault is kept
//! and ends the run.
//!
//! `record` follows each bio, `wire` the requests at the drive, `content` the blocks.

mod content;
mod part_ends;
mod record;
mod rules;
mod wire;

use std::collections::BTreeMap;
use std::rc::Rc;

use blkmq_core::bio::{Bio, Flags, Op, Status};
use blkmq_core::driver::{Done, Issued, TimedOut};
use blkmq_core::ids::{Cookie, GroupId, HctxId, ReactorId};
use blkmq_core::request::Request;

use crate::drive::Memory;
use crate::images::Images;
pub use content::content_of;
use content::{Content, Tick};
use part_ends::PartEnds;
use record::{BioRecord, BioRecords, token_of};
pub use rules::{DiskRules, Rules, WireRules};
use wire::Wire;

/// The content of a read's buffer before the drive has stored anything.
const UNREAD: u64 = u64::MAX;

/// Counters of a history.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// Bios that ended.
    pub ended: u64,
    /// Bios that ended with an error.
    pub errors: u64,
    /// Requests that the drive took.
    pub requests: u64,
    /// Bios that were merged into another's request.
    pub merged: u64,
    /// Flush requests that the drive took.
    pub flushes: u64,
    /// Ends that the drive reported for requests that it no longer had.
    pub stale: u64,
    /// Requests that timed out.
    pub timeouts: u64,
    /// Requests whose end was `Requeue`.
    pub requeues: u64,
    /// The largest number of requests at the drive at a time.
    pub in_flight_max: u64,
}

/// A failed flush: when, where and how.
#[derive(Clone, Copy, Debug)]
struct FlushError {
    at: Tick,
    /// The first block of the disk.
    leaf: u32,
    status: Status,
}

/// Whether a power cut left a bio or block partly written.
#[derive(Clone, Copy, Debug, Default)]
pub struct Torn {
    /// Of two neighbouring parts of a bio that was under way, one is written and one is not.
    pub bios: bool,
    /// A block of a disk, as clients see it, is partly written.
    pub blocks: bool,
}

/// The oracle of one history.
#[derive(Debug)]
pub struct Oracle {
    rules: Rules,
    content: Content,
    records: BioRecords,
    /// One for each queue.
    wires: Vec<Wire>,
    now: Tick,
    /// When flushes of a queue's disk failed, and how.
    flush_errors: Vec<FlushError>,
    /// Counters, for the summary.
    pub counts: Counts,
    failure: Option<String>,
}

impl Oracle {
    /// Makes the oracle of new queues over new drives.
    pub fn new(rules: Rules) -> Self {
        let places = rules.wires.iter().flat_map(|wire| &wire.places);
        let blocks = places.map(|p| p.first + p.blocks).max().unwrap_or(0);
        let block = u64::from(rules.block);
        let wire = |wire: &WireRules| {
            let first = wire.places[0].first;
            let bases = wire.places.iter().map(|p| u64::from(p.first - first) * block);
            Wire::new(
                wire.limits.clone(),
                bases.collect(),
                rules.hctxs,
                rules.depth,
                rules.shared_tags,
            )
        };
        Self {
            content: Content::new(blocks, rules.disks.len()),
            records: BioRecords::new(rules.groups_change, rules.one_reactor),
            wires: rules.wires.iter().map(wire).collect(),
            now: 1,
            flush_errors: Vec::new(),
            counts: Counts::default(),
            failure: None,
            rules,
        }
    }

    /// Returns the first fault.
    pub fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }

    /// Records a fault; the first one counts.
    pub fn fail(&mut self, fault: String) {
        self.failure.get_or_insert(fault);
    }

    /// Returns how many bios are under way.
    pub fn under_way(&self) -> usize {
        self.records.len()
    }

    /// Returns some of the bios under way, for a report.
    pub fn some_under_way(&self) -> Vec<u64> {
        self.records.tokens()
    }

    /// Returns a bio of a reactor that is not `away` that could be issued now and waits for nothing
    /// else. Only reactors whose bios need at most `plenty` requests count. Reactors that are away
    /// may hold tags of the depth.
    pub fn held_back(&self, plenty: u32, away: &[ReactorId]) -> Option<u64> {
        self.held_back_of(plenty, away, &[])
    }

    /// Like [`Oracle::held_back`], without the bios of groups that have as many requests at a drive as they may have
    /// there while those hang: half of the room that is left.
    pub fn held_back_within_due(&self, plenty: u32, away: &[ReactorId]) -> Option<u64> {
        self.held_back(plenty, away)?;
        let mut beyond = Vec::new();
        for wire in &self.wires {
            let mut counts = BTreeMap::<GroupId, u64>::new();
            for group in wire.requests().filter_map(|busy| self.records.group_of(busy)) {
                *counts.entry(group).or_default() += 1;
            }
            let may_have = wire.room() / 2;
            beyond.extend(
                counts
                    .iter()
                    .filter(|(_, count)| **count >= may_have)
                    .map(|(group, _)| *group),
            );
        }
        self.held_back_of(plenty, away, &beyond)
    }

    fn held_back_of(&self, plenty: u32, away: &[ReactorId], beyond: &[GroupId]) -> Option<u64> {
        if !self.wires.iter().all(Wire::has_room_anywhere) {
            return None;
        }
        // Disks, and contexts without an elevator, have shares of shared tags; bios beyond a share
        // are held back on purpose.
        let has_shares = |(wire, rules): (&Wire, &WireRules)| rules.places.len() > 1 || !wire.is_scheduled();
        let mut wires = self.wires.iter().zip(&self.rules.wires);
        if self.rules.shared_tags && wires.any(has_shares) {
            return None;
        }
        let parts_max = self.records.parts_max(self.block());
        // With a tag for each request that the depth allows, requests are in flight as soon as they
        // are dispatched.
        let dispatched_is_issued = !self.rules.shared_tags && !self.records.any_depends_on_flush();
        let taken = match dispatched_is_issued {
            true => 0,
            false => away.iter().filter_map(|id| parts_max.get(id)).sum(),
        };
        let counts = |reactor| {
            let has_requests = parts_max[&reactor] <= u64::from(plenty);
            let has_room = |wire: &Wire| wire.has_room(reactor, taken);
            has_requests && !away.contains(&reactor) && self.wires.iter().all(has_room)
        };
        self.records
            .waiting_for_room(|reactor, group| counts(reactor) && !beyond.contains(&group))
    }

    /// Returns a bio of a reactor, some of whose bytes the drives have reported as done, and some
    /// not.
    pub fn half_done(&self, reactor: ReactorId) -> Option<Bio> {
        self.records.half_done(reactor)
    }

    /// Returns an error that the drives reported for a bio and that differs from the status with
    /// which it ends.
    pub fn another_error(&mut self, bio: &Bio) -> Option<Status> {
        let errors = self.records.get(bio.cookie).ok()?.errors;
        let all = [Status::Io, Status::Medium, Status::Transport, Status::Timeout];
        let is_other = |status: &Status| *status != bio.status && errors & 1 << *status as u8 != 0;
        all.into_iter().find(is_other)
    }

    /// Returns how many requests are at the drives.
    pub fn in_flight(&self) -> usize {
        self.wires.iter().map(Wire::in_flight).sum()
    }

    /// Returns how many requests are at the drive of one queue.
    pub fn in_flight_of(&self, queue: usize) -> usize {
        self.wires[queue].in_flight()
    }

    /// Records that a client is about to submit a bio. Its cookie is its token, higher than all
    /// before.
    pub fn submit(&mut self, reactor: ReactorId, bio: &Bio) {
        let token = bio.cookie;
        let now = self.tick();
        let disk = &self.rules.disks[bio.disk.index()];
        let size = disk.layout.blocks.len() as u64 * self.block();
        let verdict = disk.limits.check_bio(bio, size, disk.read_only);
        let blocks = match verdict {
            Ok(()) => self.blocks(bio),
            Err(_) => [].into(),
        };
        let mut record = BioRecord {
            bio: bio.clone(),
            blocks: Rc::clone(&blocks),
            part_ends: PartEnds::new(self.cuts(bio, blocks.len())),
            reactor,
            submitted: now,
            verdict,
            done: 0,
            in_flight: 0,
            errors: 0,
            buffer: Vec::new(),
            snapshot: content::Snapshot::default(),
        };
        if verdict.is_ok() && bio.op == Op::Read {
            record.snapshot = self.content.snapshot(&blocks, now);
            record.buffer = vec![UNREAD; (bio.len / self.block()) as usize];
        } else if verdict.is_ok() && bio.op.is_write() {
            self.content.write_submitted(token, bio.op, blocks, now);
        }
        let result = self.records.start(token, record);
        self.check(result);
    }

    /// Records that the core refused the bio that was just submitted.
    pub fn refused(&mut self, token: u64) {
        self.content.withdraw(token);
        self.records.remove(token);
    }

    /// Checks a bio that the core returns.
    pub fn end(&mut self, reactor: ReactorId, bio: &Bio) {
        let now = self.tick();
        self.counts.ended += 1;
        self.counts.errors += u64::from(!bio.status.is_ok());
        let disk = &self.rules.disks[bio.disk.index()];
        let flush_errors = |record: &BioRecord| flush_errors_since(record, &self.flush_errors, disk);
        match self.records.end(reactor, bio, flush_errors) {
            Ok(record) if record.verdict.is_ok() => self.take_effect(&record, bio.status, now),
            Ok(_) => {}
            Err(fault) => self.fail(fault),
        }
        if self.records.len() == 0 {
            self.wires.iter_mut().for_each(Wire::idle);
        }
    }

    fn take_effect(&mut self, record: &BioRecord, status: Status, now: Tick) {
        let bio = &record.bio;
        let durable = !self.rules.disks[bio.disk.index()].limits.cache || bio.flags.has(Flags::FUA);
        if status.is_ok() && (bio.op == Op::Flush || bio.flags.has(Flags::PREFLUSH)) {
            self.content.flushed(bio.disk, record.submitted);
        }
        if bio.op.is_write() {
            self.content
                .write_ended(bio.cookie, status.is_ok(), durable, bio.disk, now);
        } else if bio.op == Op::Read && status.is_ok() {
            let result =
                self.content
                    .check_read(bio.cookie, &record.blocks, &record.buffer, &record.snapshot);
            self.check(result);
        }
    }

    /// Checks a request that the core issues to the drive of a queue.
    pub fn issue(&mut self, queue: usize, hctx: HctxId, rq: &Request, cookie: Cookie) {
        let mut result = self.wires[queue].issue(hctx, rq, cookie);
        rq.for_each_bio(|bio| {
            if result.is_ok() && bio.len > 0 {
                result = self.part_issued(queue, bio);
            }
        });
        self.check(result);
        self.wires[queue].taken(hctx, rq, cookie);
    }

    fn part_issued(&mut self, queue: usize, part: &Bio) -> Result<(), String> {
        let block = self.block();
        let first = self.rules.wires[queue].places[part.disk.index()].first;
        let blocks = first + (part.offset / block) as u32..first + (part.end() / block) as u32;
        self.records.part_issued(part, blocks, block)?;
        let Some(token) = token_of(part) else {
            return Ok(());
        };
        let record = self.records.get(token)?;
        if record.bio.flags.has(Flags::PREFLUSH) {
            // All writes that ended before this one was submitted must be durable by now.
            self.content.flushed(record.bio.disk, record.submitted);
        }
        Ok(())
    }

    /// Records the drive's answer.
    pub fn answered(&mut self, queue: usize, hctx: HctxId, rq: &Request, cookie: Cookie, answer: Issued) {
        let status = match answer {
            Issued::Queued => None,
            Issued::Done(status) => Some(Some(status)),
            Issued::Resource | Issued::DeviceResource => Some(None),
        };
        if status != Some(None) {
            self.counts.requests += 1;
            self.counts.merged += u64::from(rq.bio_count() - 1);
            self.counts.flushes += u64::from(rq.op() == Op::Flush);
            self.counts.in_flight_max = self.counts.in_flight_max.max(self.in_flight() as u64);
        }
        if let Some(status) = status {
            self.left(queue, hctx, cookie, status);
            if status.is_none() {
                self.wires[queue].not_used(hctx, cookie);
            }
        }
    }

    /// Records an end that the drive has reported.
    pub fn done(&mut self, queue: usize, hctx: HctxId, done: Done) {
        if !self.left(queue, hctx, done.cookie, Some(done.status)) {
            self.counts.stale += 1;
        }
    }

    /// Records that the core has told the drive about a timeout.
    pub fn timed_out(&mut self, queue: usize, hctx: HctxId, cookie: Cookie, answer: TimedOut) {
        self.counts.timeouts += 1;
        if answer == TimedOut::Ended && !self.left(queue, hctx, cookie, Some(Status::Timeout)) {
            self.fail(format!(
                "tag {} of hctx {hctx} timed out, but is not in flight",
                cookie.tag()
            ));
        }
    }

    /// Records that a request has left the drive; `status` is `None` if the drive refused it.
    /// Returns whether it was there.
    fn left(&mut self, queue: usize, hctx: HctxId, cookie: Cookie, status: Option<Status>) -> bool {
        let Some(busy) = self.wires[queue].left(hctx, cookie) else {
            return false;
        };
        self.counts.requeues += u64::from(status == Some(Status::Requeue));
        for piece in &busy.pieces {
            let result = self.records.part_left(piece, status, self.rules.block);
            self.check(result);
        }
        if let (Op::Flush, Some(status)) = (busy.op, status.filter(|s| !s.is_ok() && *s != Status::Requeue)) {
            let at = self.tick();
            let leaf = self.rules.wires[queue].places[busy.disk.index()].first;
            self.flush_errors.push(FlushError { at, leaf, status });
        }
        true
    }

    /// Forbids issues on a queue from now on, for this reason; `None` allows them again.
    pub fn close(&mut self, queue: usize, why: Option<&'static str>) {
        self.wires[queue].closed = why;
    }

    /// Records a change of the depth of a queue's tag sets.
    pub fn set_depth(&mut self, queue: usize, depth: u32) {
        self.wires[queue].set_depth(depth);
    }

    /// Records whether a queue has an elevator from now on.
    pub fn set_scheduled(&mut self, queue: usize, scheduled: bool) {
        self.wires[queue].set_scheduled(scheduled);
    }

    /// Checks what a power cut now would leave on a drive.
    pub fn check_durable(&mut self, images: &mut Images) {
        let result = self.content.check_durable(images);
        self.check(result);
    }

    /// Returns what a power cut has left of the writes under way; `durable` has the content of the
    /// drives' blocks.
    pub fn torn(&self, durable: impl Fn(u32) -> u64) -> Torn {
        let mut torn = Torn::default();
        for record in self.records.writes() {
            let (token, blocks) = (record.bio.cookie, &record.blocks);
            let written = |index: usize| durable(blocks[index]) == content_of(token, index as u32);
            let disk = &self.rules.disks[record.bio.disk.index()];
            let block = (u64::from(disk.limits.logical_block) / self.block()) as usize;
            let cuts = record.part_ends.cuts();
            for next in 1..blocks.len() {
                // A write that another write under way has overwritten since is not torn.
                let both = [blocks[next - 1], blocks[next]];
                let is_torn = written(next - 1) != written(next)
                    && both
                        .iter()
                        .all(|&at| durable(at) >> 16 <= token && durable(at) > 0);
                torn.bios |= is_torn && cuts.contains(&next);
                torn.blocks |= is_torn && !next.is_multiple_of(block);
            }
        }
        torn
    }

    /// Records a power cut of a drive: checks what is left of its content.
    pub fn power_cut(&mut self, images: &mut Images) {
        self.check_durable(images);
        self.content.power_cut(images);
    }

    /// Records a power cut of all drives and the host: nothing is under way any more.
    pub fn restart(&mut self) {
        self.records.clear();
        self.wires.iter_mut().for_each(Wire::clear);
    }

    fn check(&mut self, result: Result<(), String>) {
        if let Err(fault) = result {
            self.fail(fault);
        }
    }

    fn tick(&mut self) -> Tick {
        self.now += 1;
        self.now
    }

    fn block(&self) -> u64 {
        u64::from(self.rules.block)
    }

    /// The blocks of a bio at which its parts begin.
    fn cuts(&self, bio: &Bio, blocks: usize) -> Vec<usize> {
        if blocks == 0 {
            return Vec::new();
        }
        let first = (bio.offset / self.block()) as usize;
        let cuts = self.rules.disks[bio.disk.index()]
            .layout
            .cuts
            .range(first + 1..first + blocks);
        std::iter::once(0).chain(cuts.map(|cut| cut - first)).collect()
    }

    /// The blocks of a valid bio.
    fn blocks(&self, bio: &Bio) -> Rc<[u32]> {
        let index = |offset: u64| (offset / self.block()) as usize;
        let disk = &self.rules.disks[bio.disk.index()];
        disk.layout.blocks[index(bio.offset)..index(bio.end())].into()
    }
}

impl Memory for Oracle {
    fn store(&mut self, token: u64, index: u32, content: u64) {
        match self.records.get(token) {
            Ok(record) if record.bio.op == Op::Read => record.buffer[index as usize] = content,
            Ok(_) => self.fail(format!("the buffer of write {token} was written")),
            Err(_) => self.fail(format!("the buffer of bio {token} was written after its end")),
        }
    }

    fn load(&mut self, token: u64, index: u32) -> u64 {
        if self.records.get(token).is_err() {
            self.fail(format!("the buffer of bio {token} was read after its end"));
        }
        content_of(token, index)
    }
}

/// The statuses of the flushes below a disk that failed since this bio, which depends on them, was
/// submitted, as a set of numbers.
fn flush_errors_since(record: &BioRecord, errors: &[FlushError], disk: &DiskRules) -> u32 {
    if !record::depends_on_flush(&record.bio) {
        return 0;
    }
    let since = errors
        .iter()
        .rev()
        .take_while(|error| error.at > record.submitted);
    let below = since.filter(|error| disk.layout.leaves.contains(&error.leaf));
    below.fold(0, |set, error| set | 1 << error.status as u8)
}
