//! Decides whether a history is right: watches what clients submit and get back, and what the drive is given, and knows
//! the invariants of the architecture, nothing of the core's inside. The first fault is kept and ends the run.
//!
//! `record` follows each bio, `wire` the requests at the drive, `content` the blocks.

mod content;
mod record;
mod wire;

use std::ops::Range;

use blkmq_core::bio::{Bio, Flags, Op, Status};
use blkmq_core::driver::{Done, Issued, TimedOut};
use blkmq_core::ids::{Cookie, HctxId, ReactorId};
use blkmq_core::limits::Limits;
use blkmq_core::request::Request;

use crate::drive::{Memory, Span};
use crate::images::Images;
pub use content::content_of;
use content::{Content, Tick};
use record::{BioRecord, BioRecords, token_of};
use wire::Wire;

/// What a read's buffer holds before the drive has stored anything.
const UNREAD: u64 = u64::MAX;

/// What the oracle has to know of the queue.
#[derive(Clone, Debug)]
pub struct Rules {
    /// The drive's limits.
    pub limits: Limits,
    /// Where each disk lies.
    pub places: Vec<Span>,
    /// Disks that refuse changes.
    pub read_only: Vec<bool>,
    /// How many hardware contexts there are.
    pub hctxs: u16,
    /// The depth of each tag set.
    pub depth: u32,
    /// There is one tag set for all hardware contexts.
    pub shared_tags: bool,
    /// Groups come and go: a bio of a removed one may be given to its ancestor.
    pub groups_change: bool,
}

/// What was counted on the way.
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
    /// Requests that the drive sent back.
    pub requeues: u64,
    /// Most requests at the drive at a time.
    pub in_flight_max: u64,
}

/// The watcher of one history.
#[derive(Debug)]
pub struct Oracle {
    rules: Rules,
    content: Content,
    records: BioRecords,
    wire: Wire,
    now: Tick,
    /// When flushes of a disk failed, and how.
    flush_errors: Vec<Vec<(Tick, Status)>>,
    /// Counters, for the summary.
    pub counts: Counts,
    failure: Option<String>,
}

impl Oracle {
    /// Makes the watcher of a fresh queue over a fresh drive.
    pub fn new(rules: Rules) -> Self {
        let blocks = rules.places.iter().map(|p| p.first + p.blocks).max().unwrap_or(0);
        let disks = rules.places.len();
        let block = u64::from(rules.limits.logical_block);
        let bases = rules.places.iter().map(|p| u64::from(p.first) * block).collect();
        let wire = Wire::new(
            rules.limits.clone(),
            bases,
            rules.hctxs,
            rules.depth,
            rules.shared_tags,
        );
        Self {
            content: Content::new(blocks, disks),
            records: BioRecords::new(rules.groups_change),
            wire,
            now: 1,
            flush_errors: vec![Vec::new(); disks],
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

    /// Returns a bio of a reactor that is not `away` that could be issued now and waits for nothing else.
    /// Each reactor has `plenty` requests for whoever asks first. Those of who is away may hold the depth.
    pub fn held_back(&self, plenty: u32, away: &[ReactorId]) -> Option<u64> {
        if !self.wire.has_room_anywhere() {
            return None;
        }
        // Disks, and contexts without an elevator, have a share of shared tags alone: what is beyond it is held back on purpose.
        if self.rules.shared_tags && (self.rules.places.len() > 1 || !self.wire.is_scheduled()) {
            return None;
        }
        let parts_max = self.records.parts_max(self.block());
        // With tags for all that the depth allows, requests are in flight as soon as they are dispatched.
        let dispatched_is_issued = !self.rules.shared_tags && !self.records.any_depends_on_flush();
        let taken = match dispatched_is_issued {
            true => 0,
            false => away.iter().filter_map(|id| parts_max.get(id)).sum(),
        };
        let counts = |reactor| {
            let has_requests = parts_max[&reactor] <= u64::from(plenty);
            has_requests && !away.contains(&reactor) && self.wire.has_room(reactor, taken)
        };
        self.records.waiting_for_room(counts)
    }

    /// Returns how many requests are at the drive.
    pub fn in_flight(&self) -> usize {
        self.wire.in_flight()
    }

    /// A client is about to submit a bio; its cookie and token are one number, higher than all before.
    pub fn submit(&mut self, reactor: ReactorId, bio: &Bio) {
        let token = bio.cookie;
        let now = self.tick();
        let place = self.rules.places[bio.disk.index()];
        let size = u64::from(place.blocks) * self.block();
        let read_only = self.rules.read_only[bio.disk.index()];
        let verdict = self.rules.limits.check_bio(bio, size, read_only);
        let mut record = BioRecord {
            bio: bio.clone(),
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
            record.snapshot = self.content.snapshot(self.blocks(bio), now);
            record.buffer = vec![UNREAD; (bio.len / self.block()) as usize];
        } else if verdict.is_ok() && bio.op.is_write() {
            self.content.write_submitted(token, bio.op, self.blocks(bio), now);
        }
        let result = self.records.start(token, record);
        self.check(result);
    }

    /// The core did not take the bio that was just submitted.
    pub fn refused(&mut self, token: u64) {
        self.content.withdraw(token);
        self.records.remove(token);
    }

    /// A bio has come back.
    pub fn end(&mut self, reactor: ReactorId, bio: &Bio) {
        let now = self.tick();
        self.counts.ended += 1;
        self.counts.errors += u64::from(!bio.status.is_ok());
        let errors = &self.flush_errors[bio.disk.index()];
        let flush_errors = |record: &BioRecord| flush_errors_since(record, errors);
        match self.records.end(reactor, bio, flush_errors) {
            Ok(record) if record.verdict.is_ok() => self.take_effect(&record, bio.status, now),
            Ok(_) => {}
            Err(fault) => self.fail(fault),
        }
        if self.records.len() == 0 {
            self.wire.idle();
        }
    }

    fn take_effect(&mut self, record: &BioRecord, status: Status, now: Tick) {
        let bio = &record.bio;
        let durable = !self.rules.limits.cache || bio.flags.has(Flags::FUA);
        if status.is_ok() && (bio.op == Op::Flush || bio.flags.has(Flags::PREFLUSH)) {
            self.content.flushed(bio.disk, record.submitted);
        }
        if bio.op.is_write() {
            self.content
                .write_ended(bio.cookie, status.is_ok(), durable, bio.disk, now);
        } else if bio.op == Op::Read && status.is_ok() {
            let first = self.blocks(bio).start;
            let result = self
                .content
                .check_read(bio.cookie, first, &record.buffer, &record.snapshot);
            self.check(result);
        }
    }

    /// The core asks the drive to take a request.
    pub fn issue(&mut self, hctx: HctxId, rq: &Request, cookie: Cookie) {
        let mut result = self.wire.issue(hctx, rq, cookie);
        rq.for_each_bio(|bio| {
            if result.is_ok() && bio.len > 0 {
                result = self.part_issued(bio);
            }
        });
        self.check(result);
        self.wire.taken(hctx, rq, cookie);
    }

    fn part_issued(&mut self, part: &Bio) -> Result<(), String> {
        self.records.part_issued(part)?;
        let Some(token) = token_of(part) else {
            return Ok(());
        };
        let record = self.records.get(token)?;
        if record.bio.flags.has(Flags::PREFLUSH) {
            // What ended before this write was submitted must be durable by now.
            self.content.flushed(record.bio.disk, record.submitted);
        }
        Ok(())
    }

    /// The drive has answered.
    pub fn answered(&mut self, hctx: HctxId, rq: &Request, cookie: Cookie, answer: Issued) {
        let status = match answer {
            Issued::Queued => None,
            Issued::Done(status) => Some(Some(status)),
            Issued::Resource | Issued::DeviceResource => Some(None),
        };
        if status != Some(None) {
            self.counts.requests += 1;
            self.counts.merged += u64::from(rq.bio_count() - 1);
            self.counts.flushes += u64::from(rq.op() == Op::Flush);
            self.counts.in_flight_max = self.counts.in_flight_max.max(self.wire.in_flight() as u64);
        }
        if let Some(status) = status {
            self.left(hctx, cookie, status);
            if status.is_none() {
                self.wire.not_used(hctx, cookie);
            }
        }
    }

    /// The drive has reported an end.
    pub fn done(&mut self, hctx: HctxId, done: Done) {
        if !self.left(hctx, done.cookie, Some(done.status)) {
            self.counts.stale += 1;
        }
    }

    /// The core has told the drive that a request timed out.
    pub fn timed_out(&mut self, hctx: HctxId, cookie: Cookie, answer: TimedOut) {
        self.counts.timeouts += 1;
        if answer == TimedOut::Ended && !self.left(hctx, cookie, Some(Status::Timeout)) {
            self.fail(format!(
                "tag {} of hctx {hctx} timed out, but is not in flight",
                cookie.tag()
            ));
        }
    }

    /// A request has left the drive; `status` is `None` if the drive did not take it. Says whether it was there.
    fn left(&mut self, hctx: HctxId, cookie: Cookie, status: Option<Status>) -> bool {
        let Some(busy) = self.wire.left(hctx, cookie) else {
            return false;
        };
        self.counts.requeues += u64::from(status == Some(Status::Requeue));
        for &(token, bytes) in &busy.parts {
            let result = self.records.part_left(token, bytes, status);
            self.check(result);
        }
        if let (Op::Flush, Some(error)) = (busy.op, status.filter(|s| !s.is_ok() && *s != Status::Requeue)) {
            let now = self.tick();
            self.flush_errors[busy.disk.index()].push((now, error));
        }
        true
    }

    /// From here on, nothing may be issued, for this reason; or it may again.
    pub fn close(&mut self, why: Option<&'static str>) {
        self.wire.closed = why;
    }

    /// The depth of the tag sets has been changed.
    pub fn set_depth(&mut self, depth: u32) {
        self.wire.set_depth(depth);
    }

    /// The queue has an elevator from now on, or none.
    pub fn set_scheduled(&mut self, scheduled: bool) {
        self.wire.set_scheduled(scheduled);
    }

    /// Checks what a power cut now would leave.
    pub fn check_durable(&mut self, images: &mut Images) {
        let result = self.content.check_durable(images);
        self.check(result);
    }

    /// The power was cut, and the host with it: nothing is under way any more.
    pub fn power_cut(&mut self, images: &mut Images) {
        self.check_durable(images);
        self.content.power_cut(images);
        self.records.clear();
        self.wire.clear();
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
        u64::from(self.rules.limits.logical_block)
    }

    fn blocks(&self, bio: &Bio) -> Range<u32> {
        let first = self.rules.places[bio.disk.index()].first + (bio.offset / self.block()) as u32;
        first..first + (bio.len / self.block()) as u32
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

/// The statuses of flushes that failed since a bio was submitted that depends on them, as a set of numbers.
fn flush_errors_since(record: &BioRecord, errors: &[(Tick, Status)]) -> u32 {
    if !record::depends_on_flush(&record.bio) {
        return 0;
    }
    let since = errors.iter().rev().take_while(|(at, _)| *at > record.submitted);
    since.fold(0, |set, (_, status)| set | 1 << *status as u8)
}
