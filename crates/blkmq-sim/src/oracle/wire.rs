//! Checks the core's requests to the drive: one request per tag, within the depth and the limits, none
//! while quiesced or drained, and merged only where merging is allowed.

use std::collections::BTreeMap;

use blkmq_core::bio::{Bio, Flags, Op};
use blkmq_core::ids::{Cookie, DiskId, HctxId, ReactorId, Tag};
use blkmq_core::limits::Limits;
use blkmq_core::request::Request;

use super::record::token_of;

/// The requests at one drive.
#[derive(Debug)]
pub(super) struct Wire {
    limits: Limits,
    /// The first byte of each disk on the drive.
    bases: Vec<u64>,
    shared: bool,
    spaces: Vec<Space>,
    /// Bounds on requests other than flushes: one for each hardware context, and the last one for
    /// all together.
    bounds: Vec<Bound>,
    /// With an elevator the sum is bounded, without one each context (or the shared tag set).
    scheduled: bool,
    /// The generation of each tag's last use, per hardware context.
    used: BTreeMap<(HctxId, Tag), u32>,
    /// Why nothing may be issued, if that is so.
    pub(super) closed: Option<&'static str>,
}

/// One set of tags.
#[derive(Debug)]
struct Space {
    tags: u32,
    busy: BTreeMap<Tag, Busy>,
}

/// A count that the queue's depth bounds.
#[derive(Clone, Copy, Debug)]
struct Bound {
    depth: u32,
    /// The highest depth since the queue was last idle: requests dispatched under it may still
    /// arrive.
    allowed: u32,
    count: u32,
}

/// A request at the drive.
#[derive(Debug)]
pub(super) struct Busy {
    cookie: Cookie,
    hctx: HctxId,
    pub(super) op: Op,
    pub(super) disk: DiskId,
    /// The parts of bios that it consists of.
    pub(super) pieces: Vec<Piece>,
}

/// The part of one bio in a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    pub(super) token: u64,
    pub(super) bytes: u64,
    /// Its first byte in the bio's buffer.
    pub(super) skip: u64,
}

impl Wire {
    pub(super) fn new(limits: Limits, bases: Vec<u64>, hctxs: u16, depth: u32, shared: bool) -> Self {
        let spaces = if shared { 1 } else { hctxs };
        Self {
            limits,
            bases,
            shared,
            spaces: (0..spaces).map(|_| Space::new(depth)).collect(),
            bounds: vec![Bound::new(depth); usize::from(spaces) + 1],
            scheduled: false,
            used: BTreeMap::new(),
            closed: None,
        }
    }

    /// Checks a request that the core issues. Returns its bios' parts.
    pub(super) fn issue(&mut self, hctx: HctxId, rq: &Request, cookie: Cookie) -> Result<(), String> {
        if let Some(why) = self.closed {
            return Err(format!("issue of {:?} at {} while {why}", rq.op(), rq.offset()));
        }
        self.check_range(rq)?;
        self.check_merge(rq)?;
        let tag = cookie.tag();
        if rq.tag() != tag {
            return Err(format!(
                "request with tag {} issued under cookie of tag {tag}",
                rq.tag()
            ));
        }
        if self.used.get(&(hctx, tag)) == Some(&cookie.generation()) {
            return Err(format!(
                "tag {tag} of hctx {hctx} used twice in generation {}",
                cookie.generation()
            ));
        }
        self.check_depth(hctx, rq.op(), tag)?;
        let space = self.space(hctx);
        if tag.0 >= space.tags {
            return Err(format!("tag {tag} issued, there are {}", space.tags));
        }
        match space.busy.get(&tag) {
            Some(busy) => Err(format!("tag {tag} issued at {hctx}, but is in flight: {busy:?}")),
            None => Ok(()),
        }
    }

    /// Records that the drive has taken it.
    pub(super) fn taken(&mut self, hctx: HctxId, rq: &Request, cookie: Cookie) {
        let mut pieces = Vec::new();
        rq.for_each_bio(|bio| {
            let token = token_of(bio).filter(|_| bio.len > 0);
            pieces.extend(token.map(|token| Piece {
                token,
                bytes: bio.len,
                skip: bio.skip,
            }));
        });
        self.used.insert((hctx, cookie.tag()), cookie.generation());
        let (op, disk) = (rq.op(), rq.disk());
        self.count(hctx, op, 1);
        let busy = Busy {
            cookie,
            hctx,
            op,
            disk,
            pieces,
        };
        self.space(hctx).busy.insert(cookie.tag(), busy);
    }

    /// Records that the drive has reported an end, or dropped a request. Returns `None` if the
    /// cookie is of an earlier use.
    pub(super) fn left(&mut self, hctx: HctxId, cookie: Cookie) -> Option<Busy> {
        let space = self.space(hctx);
        let busy = space.busy.get(&cookie.tag())?;
        if busy.cookie != cookie || busy.hctx != hctx {
            return None;
        }
        let busy = space.busy.remove(&cookie.tag())?;
        self.count(hctx, busy.op, -1);
        Some(busy)
    }

    /// Records that the drive refused the request: its cookie may be used again.
    pub(super) fn not_used(&mut self, hctx: HctxId, cookie: Cookie) {
        self.used.remove(&(hctx, cookie.tag()));
    }

    pub(super) fn set_depth(&mut self, depth: u32) {
        for bound in &mut self.bounds {
            bound.depth = depth;
            bound.allowed = bound.allowed.max(depth);
        }
    }

    /// Records that no bio is under way: later requests are dispatched under the present depth.
    pub(super) fn idle(&mut self) {
        self.bounds
            .iter_mut()
            .for_each(|bound| bound.allowed = bound.depth);
    }

    pub(super) fn is_scheduled(&self) -> bool {
        self.scheduled
    }

    pub(super) fn set_scheduled(&mut self, scheduled: bool) {
        self.scheduled = scheduled;
    }

    /// Says whether any tag set has a free tag within the depth. It is a quick check, because most
    /// have none.
    pub(super) fn has_room_anywhere(&self) -> bool {
        let depth = self.bounds[self.bounds.len() - 1].depth;
        let open = |space: &Space| (space.busy.len() as u32) < depth.min(space.tags);
        self.spaces.iter().any(open)
    }

    /// Says whether a request of `reactor` could be issued now, as far as depth and tags are
    /// concerned, if `taken` tags are in use in addition to those of requests in flight.
    pub(super) fn has_room(&self, reactor: ReactorId, taken: u64) -> bool {
        let depth = u64::from(self.bounds[self.bounds.len() - 1].depth);
        let open = |space: &Space, taken: u64| {
            let tags = u64::from(space.tags);
            space.busy.len() as u64 + taken < depth.min(tags)
        };
        match (self.scheduled, self.shared) {
            // A context without a tag stops its dispatcher, so all must have one.
            (true, _) => {
                self.in_flight() as u64 + taken < depth && self.spaces.iter().all(|space| open(space, taken))
            }
            (false, true) => open(&self.spaces[0], taken),
            (false, false) => open(&self.spaces[reactor.index() % self.spaces.len()], 0),
        }
    }

    /// The requests at the drive.
    pub(super) fn requests(&self) -> impl Iterator<Item = &Busy> {
        self.spaces.iter().flat_map(|space| space.busy.values())
    }

    /// How many more the depth allows.
    pub(super) fn room(&self) -> u64 {
        let depth = u64::from(self.bounds[self.bounds.len() - 1].depth);
        depth.saturating_sub(self.in_flight() as u64)
    }

    pub(super) fn in_flight(&self) -> usize {
        self.spaces.iter().map(|space| space.busy.len()).sum()
    }

    pub(super) fn clear(&mut self) {
        self.closed = None;
        self.used.clear();
        self.spaces.iter_mut().for_each(|space| space.busy.clear());
        self.bounds.iter_mut().for_each(|bound| bound.count = 0);
    }

    fn check_depth(&self, hctx: HctxId, op: Op, tag: Tag) -> Result<(), String> {
        if op == Op::Flush {
            return Ok(());
        }
        let all = self.bounds.len() - 1;
        if !self.scheduled && self.shared {
            // A shared set is bounded by the tag numbers in use.
            let depth = self.bounds[all].depth;
            return if tag.0 < depth {
                Ok(())
            } else {
                Err(format!("tag {tag} issued at depth {depth}"))
            };
        }
        let bound = self.bounds[if self.scheduled { all } else { hctx.index() }];
        if bound.count < bound.allowed {
            return Ok(());
        }
        Err(format!(
            "issue with {} in flight beyond the depth {}",
            bound.count, bound.depth
        ))
    }

    fn count(&mut self, hctx: HctxId, op: Op, by: i32) {
        if op == Op::Flush {
            return;
        }
        let own = if self.shared { 0 } else { hctx.index() };
        let all = self.bounds.len() - 1;
        for index in [own, all] {
            let bound = &mut self.bounds[index];
            bound.count = bound.count.saturating_add_signed(by);
        }
    }

    fn space(&mut self, hctx: HctxId) -> &mut Space {
        let index = if self.shared { 0 } else { hctx.index() };
        &mut self.spaces[index]
    }

    fn check_range(&self, rq: &Request) -> Result<(), String> {
        if rq.op() == Op::Flush {
            return match (rq.len(), self.limits.cache) {
                (0, true) => Ok(()),
                (0, false) => Err("a flush was issued to a drive without a cache".to_owned()),
                (len, _) => Err(format!("a flush of {len} bytes was issued")),
            };
        }
        let max = self.limits.length_max(rq.op(), rq.position());
        if rq.is_empty() || rq.len() > max {
            return Err(format!(
                "{:?} of {} bytes at {} of the drive, the limit is {max}",
                rq.op(),
                rq.len(),
                rq.position()
            ));
        }
        let data = matches!(rq.op(), Op::Read | Op::Write);
        if data && rq.segment_count() > u32::from(self.limits.segments_max) {
            return Err(format!(
                "{} segments, the limit is {}",
                rq.segment_count(),
                self.limits.segments_max
            ));
        }
        if rq.position() != self.bases[rq.disk().index()] + rq.offset() {
            return Err(format!(
                "position {} is not that of {}",
                rq.position(),
                rq.offset()
            ));
        }
        if rq.flags().has(Flags::PREFLUSH) || rq.flags().has(Flags::FUA) && !self.limits.fua {
            return Err(format!("{:?} reached a drive that cannot do it", rq.flags()));
        }
        Ok(())
    }

    fn check_merge(&self, rq: &Request) -> Result<(), String> {
        let mut at = rq.offset();
        let mut fault = None;
        let mut first: Option<Bio> = None;
        rq.for_each_bio(|bio| {
            let model = first.get_or_insert_with(|| bio.clone());
            let alike = bio.op == model.op
                && bio.disk == model.disk
                && bio.group == model.group
                && bio.prio == model.prio
                && bio.flags == model.flags;
            if !alike || bio.offset != at {
                fault.get_or_insert_with(|| format!("merged {bio:?} with {model:?}"));
            }
            at += bio.len;
        });
        let sole = Flags::NO_MERGE.with(Flags::FUA);
        if rq.bio_count() > 1 && (rq.op() == Op::Flush || rq.flags().has_any(sole)) {
            fault = Some(format!("merged {} bios with {:?}", rq.bio_count(), rq.flags()));
        }
        if rq.op() != Op::Flush && at != rq.offset() + rq.len() {
            fault = Some(format!(
                "bios of {} bytes make a request of {}",
                at - rq.offset(),
                rq.len()
            ));
        }
        fault.map_or(Ok(()), Err)
    }
}

impl Space {
    fn new(tags: u32) -> Self {
        Self {
            tags,
            busy: BTreeMap::new(),
        }
    }
}

impl Bound {
    fn new(depth: u32) -> Self {
        Self {
            depth,
            allowed: depth,
            count: 0,
        }
    }
}
