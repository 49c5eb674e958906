//! The flush machinery: flushes, and the order of the writes that depend on them (flush before, data,
//! flush after). `sw_ctx` passes bios that need it here; `local` issues the flushes and stages the data
//! writes that are due.
//!
//! Each disk has one flush under way per reactor; bios that need one meanwhile share the next one. Groups
//! with caps have a flush of their own, which waits for the caps: other groups do not wait with it.
//!
//! ```text
//!  Flush            ─► [flush] ─► end
//!  PREFLUSH write   ─► [flush] ─► data ─► end
//!  FUA write        ─► data ─► [flush] ─► end       (drive without FUA; with it, FUA goes along with the data)
//! ```
//! A flush makes durable what has *completed* before it was issued. A bio joins a flush only before that flush
//! is issued, so the flush covers every bio that waits for it (invariant 5).

use crate::bio::{Bio, Flags, Op, Origin, Parent, Status};
use crate::ids::{DiskId, ReactorId};
use crate::limits::Limits;
use crate::qos::holding::DynamicThreshold;
use crate::request::Request;

/// One reactor's flushes and ordered writes on one queue.
#[derive(Debug)]
pub(crate) struct Flush {
    /// Two for each disk: for groups without caps, and for groups with caps.
    disks: Vec<DiskFlush>,
    slots: Vec<Option<Sequence>>,
    free: Vec<u32>,
    /// Sequences of each group; when sequences are short, each group has a share.
    held: DynamicThreshold,
    /// Those of `disks` that may need a flush.
    due: Vec<FlushKey>,
    /// Sequences whose data write must be staged.
    data_due: Vec<u32>,
    /// Bios that have finished all steps.
    ended: Vec<Bio>,
}

/// A place in the list of flushes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FlushKey(u32);

/// How many flushes a disk has on each reactor.
pub(crate) const PER_DISK: usize = 2;

/// A disk's flush: its request while it is not in flight, and the sequences that wait.
#[derive(Debug)]
struct DiskFlush {
    rq: Option<Box<Request>>,
    /// Sequences that the flush under way is for.
    running: List,
    /// Sequences that the next one is for.
    pending: List,
}

/// A list of sequences, linked through them.
#[derive(Debug, Default)]
struct List(Option<u32>);

/// One bio on its way through its steps.
#[derive(Debug)]
struct Sequence {
    bio: Bio,
    steps: Steps,
    status: Status,
    is_capped: bool,
    next: Option<u32>,
    /// The group that it is counted for; the group may be removed by now.
    user: u32,
}

/// The steps that are still to be done.
#[derive(Clone, Copy, Debug, Default)]
struct Steps {
    flush_before: bool,
    data: bool,
    flush_after: bool,
}

/// The result of [`Flush::begin`].
pub(crate) enum Begin {
    /// The bio needs no sequence: it can be staged as it now is.
    Plain(Bio),
    /// It has ended: there is nothing to make durable.
    Ended(Bio),
    /// The bio is under way here.
    Sequenced,
    /// No room now.
    Full(Bio),
}

impl Flush {
    /// Makes the tables for `disks` disks and up to `max` bios of `groups` groups.
    pub(crate) fn new(owner: ReactorId, disks: usize, max: u32, groups: usize) -> Self {
        Self {
            disks: (0..disks * PER_DISK).map(|_| DiskFlush::new(owner, 0)).collect(),
            slots: (0..max).map(|_| None).collect(),
            free: (0..max).rev().collect(),
            held: DynamicThreshold::new(groups),
            due: Vec::with_capacity(2 * (disks * PER_DISK + max as usize)),
            data_due: Vec::with_capacity(max as usize),
            ended: Vec::with_capacity(max as usize),
        }
    }

    /// Makes room for `disks` disks; `grace_period` is the latest that began in `sw_ctx`.
    pub(crate) fn fit_disks(&mut self, disks: usize, owner: ReactorId, grace_period: u32) {
        let wanted = disks * PER_DISK;
        let more = wanted.saturating_sub(self.disks.len());
        self.disks
            .extend((0..more).map(|_| DiskFlush::new(owner, grace_period)));
        self.due.reserve(2 * (wanted + self.slots.len()) - self.due.len());
    }

    /// Says whether the bio must go through [`Flush::begin`].
    #[inline]
    pub(crate) fn concerns(bio: &Bio) -> bool {
        bio.op == Op::Flush || bio.flags.has_any(Flags::FUA.with(Flags::PREFLUSH))
    }

    /// Starts a bio on its steps; `is_capped` says that its group has caps, or is part of one that has.
    pub(crate) fn begin(&mut self, mut bio: Bio, limits: &Limits, is_capped: bool) -> Begin {
        let drive_fua = limits.fua && bio.op == Op::Write;
        let steps = Steps {
            flush_before: limits.cache && (bio.op == Op::Flush || bio.flags.has(Flags::PREFLUSH)),
            data: bio.op != Op::Flush,
            flush_after: limits.cache && bio.flags.has(Flags::FUA) && !drive_fua,
        };
        if !steps.flush_before && !steps.flush_after {
            if !steps.data {
                bio.status = Status::Ok;
                return Begin::Ended(bio);
            }
            if !(limits.cache && drive_fua) {
                bio.flags = bio.flags.without(Flags::FUA.with(Flags::PREFLUSH));
            }
            return Begin::Plain(bio);
        }
        let user = bio.group.0;
        let free = self.free.len();
        if free <= self.held.short_at(self.slots.len()) && !self.held.may_take(user, free) {
            return Begin::Full(bio);
        }
        let index = self.free.pop().expect("looked at above");
        self.held.take(user);
        self.slots[index as usize] = Some(Sequence {
            user,
            bio,
            steps,
            status: Status::Ok,
            is_capped,
            next: None,
        });
        self.advance(index);
        Begin::Sequenced
    }

    /// Returns the next flush to issue, if one is due, and whether it is for groups with caps; the request returns
    /// through [`Flush::flush_ended`].
    pub(crate) fn next_flush(&mut self) -> Option<(Box<Request>, bool)> {
        while let Some(place) = self.due.pop() {
            let disk = &mut self.disks[place.0 as usize];
            if disk.pending.0.is_none() {
                continue;
            }
            // If one is under way, its end checks again.
            let Some(mut rq) = disk.rq.take() else { continue };
            disk.running = std::mem::take(&mut disk.pending);
            let first = disk.running.0.expect("checked above");
            let group = self.slots[first as usize]
                .as_ref()
                .expect("a listed sequence lives")
                .bio
                .group;
            rq.start(
                Bio {
                    op: Op::Flush,
                    disk: place.disk(),
                    group,
                    // The place to which the request returns.
                    cookie: place.0.into(),
                    ..Bio::default()
                },
                0,
            );
            rq.is_flush = true;
            return Some((rq, place.is_capped()));
        }
        None
    }

    /// Says whether a flush may be due.
    pub(crate) fn has_due(&self) -> bool {
        !self.due.is_empty() || !self.data_due.is_empty()
    }

    /// Returns the next data write to stage, if one is due.
    pub(crate) fn next_data(&mut self, limits: &Limits) -> Option<Bio> {
        let index = self.data_due.pop()?;
        let mut bio = self.sequence(index).bio.clone();
        bio.origin = Origin(Parent::Sequence(index));
        bio.flags = bio.flags.without(Flags::PREFLUSH);
        if !limits.fua || bio.op != Op::Write {
            bio.flags = bio.flags.without(Flags::FUA);
        }
        Some(bio)
    }

    /// Takes back the engine's flush request, and advances all sequences that waited for it.
    pub(crate) fn flush_ended(&mut self, mut rq: Box<Request>) {
        let status = rq.status;
        let place = FlushKey(rq.bio.cookie as u32);
        rq.state = crate::request::State::Free;
        let disk = &mut self.disks[place.0 as usize];
        debug_assert!(disk.rq.is_none(), "two flush requests of disk {}", place.disk());
        disk.rq = Some(rq);
        let mut at = std::mem::take(&mut disk.running).0;
        self.due.push(place);
        while let Some(index) = at {
            let sequence = self.sequence(index);
            at = sequence.next.take();
            sequence.status = sequence.status.and(status);
            self.advance(index);
        }
    }

    /// Handles the end of a sequence's data write.
    pub(crate) fn data_ended(&mut self, index: u32, status: Status) {
        let sequence = self.sequence(index);
        sequence.status = sequence.status.and(status);
        self.advance(index);
    }

    /// Returns a bio that has finished all its steps.
    pub(crate) fn next_ended(&mut self) -> Option<Bio> {
        self.ended.pop()
    }

    /// Visits the bios that are under way here.
    pub(crate) fn for_each_bio(&mut self, visit: impl FnMut(&mut Bio)) {
        let used = self.slots.iter_mut().flatten();
        used.map(|sequence| &mut sequence.bio).for_each(visit);
    }

    /// Marks the flush requests that are not in flight with a grace period of `sw_ctx`; returns the number of the others.
    pub(crate) fn mark_idle(&mut self, grace_period: u32) -> usize {
        let mut away = 0;
        for disk in &mut self.disks {
            match &mut disk.rq {
                Some(rq) => rq.grace_period = grace_period,
                None => away += 1,
            }
        }
        away
    }

    /// How many bios are under way here.
    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Advances a sequence to its next step, or to its end.
    fn advance(&mut self, index: u32) {
        let sequence = self.sequence(index);
        let place = FlushKey::new(sequence.bio.disk, sequence.is_capped);
        let steps = &mut sequence.steps;
        if !sequence.status.is_ok() {
            *steps = Steps::default();
        }
        if std::mem::take(&mut steps.flush_before) {
            self.wait_for_flush(index, place);
        } else if std::mem::take(&mut steps.data) {
            self.data_due.push(index);
        } else if std::mem::take(&mut steps.flush_after) {
            self.wait_for_flush(index, place);
        } else {
            self.end(index);
        }
    }

    fn wait_for_flush(&mut self, index: u32, place: FlushKey) {
        let lists = &mut self.disks[place.0 as usize];
        let old = lists.pending.0.replace(index);
        self.sequence(index).next = old;
        self.due.push(place);
    }

    fn end(&mut self, index: u32) {
        let ended = self.slots[index as usize].take().expect("ends once");
        let Sequence {
            mut bio,
            status,
            user,
            ..
        } = ended;
        bio.status = status;
        self.free.push(index);
        self.held.give(user);
        self.ended.push(bio);
    }

    fn sequence(&mut self, index: u32) -> &mut Sequence {
        self.slots[index as usize]
            .as_mut()
            .expect("a sequence that is under way")
    }
}

impl DiskFlush {
    fn new(owner: ReactorId, grace_period: u32) -> Self {
        let mut rq = Request::free(owner);
        rq.grace_period = grace_period;
        Self {
            rq: Some(rq),
            running: List(None),
            pending: List(None),
        }
    }
}

impl FlushKey {
    fn new(disk: DiskId, is_capped: bool) -> Self {
        Self(disk.0 * PER_DISK as u32 + u32::from(is_capped))
    }

    fn disk(self) -> DiskId {
        DiskId(self.0 / PER_DISK as u32)
    }

    fn is_capped(self) -> bool {
        self.0 % PER_DISK as u32 == 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CACHED: fn() -> Limits = || Limits {
        cache: true,
        ..Limits::default()
    };

    fn flush(cookie: u64) -> Bio {
        Bio {
            op: Op::Flush,
            cookie,
            ..Bio::default()
        }
    }

    fn write(flags: Flags) -> Bio {
        Bio {
            op: Op::Write,
            flags,
            len: 4096,
            ..Bio::default()
        }
    }

    fn machine() -> Flush {
        Flush::new(ReactorId(0), 2, 8, 1)
    }

    fn ended(flush: &mut Flush) -> Vec<u64> {
        let mut cookies: Vec<u64> = std::iter::from_fn(|| flush.next_ended())
            .map(|bio| bio.cookie)
            .collect();
        cookies.sort_unstable();
        cookies
    }

    #[test]
    fn flushes_that_come_while_one_is_under_way_share_the_next() {
        let mut flushes = machine();
        let limits = CACHED();
        assert!(matches!(
            flushes.begin(flush(1), &limits, false),
            Begin::Sequenced
        ));
        let first = flushes.next_flush().unwrap().0;
        for cookie in 2..5 {
            flushes.begin(flush(cookie), &limits, false);
        }
        assert!(flushes.next_flush().is_none(), "only one is under way");
        flushes.flush_ended(first);
        assert_eq!(ended(&mut flushes), [1]);
        let second = flushes.next_flush().unwrap().0;
        flushes.flush_ended(second);
        assert_eq!(ended(&mut flushes), [2, 3, 4]);
        assert!(flushes.next_flush().is_none());
    }

    #[test]
    fn preflush_fua_write_flushes_around_its_data_when_the_drive_has_no_fua() {
        let mut flushes = machine();
        let limits = CACHED();
        flushes.begin(write(Flags::FUA.with(Flags::PREFLUSH)), &limits, false);
        assert!(
            flushes.next_data(&limits).is_none(),
            "data waits for the first flush"
        );
        let rq = flushes.next_flush().unwrap().0;
        flushes.flush_ended(rq);
        let data = flushes.next_data(&limits).unwrap();
        assert_eq!(data.flags, Flags::NONE);
        let Parent::Sequence(index) = data.origin.0 else {
            panic!("data knows its sequence")
        };
        flushes.data_ended(index, Status::Ok);
        assert!(flushes.next_ended().is_none());
        let rq = flushes.next_flush().unwrap().0;
        flushes.flush_ended(rq);
        assert_eq!(ended(&mut flushes).len(), 1);
        assert_eq!(flushes.len(), 0);
    }

    #[test]
    fn drive_with_fua_gets_it_with_the_data_and_no_flush() {
        let mut flushes = machine();
        let limits = Limits {
            fua: true,
            ..CACHED()
        };
        assert!(
            matches!(flushes.begin(write(Flags::FUA), &limits, false), Begin::Plain(bio) if bio.flags == Flags::FUA)
        );
    }

    #[test]
    fn without_a_cache_nothing_needs_a_flush() {
        let mut flushes = machine();
        let limits = Limits::default();
        assert!(matches!(flushes.begin(flush(1), &limits, false), Begin::Ended(_)));
        assert!(
            matches!(flushes.begin(write(Flags::FUA), &limits, false), Begin::Plain(bio) if bio.flags == Flags::NONE)
        );
    }

    #[test]
    fn failed_flush_ends_what_waits_for_it_and_writes_no_data() {
        let mut flushes = machine();
        let limits = CACHED();
        flushes.begin(write(Flags::PREFLUSH), &limits, false);
        let mut rq = flushes.next_flush().unwrap().0;
        rq.status = Status::Io;
        flushes.flush_ended(rq);
        assert!(flushes.next_data(&limits).is_none());
        assert_eq!(flushes.next_ended().unwrap().status, Status::Io);
    }

    #[test]
    fn flush_that_waits_for_caps_keeps_nobody_waiting_who_has_none() {
        let mut flushes = machine();
        let limits = CACHED();
        flushes.begin(flush(1), &limits, true);
        let (held, is_capped) = flushes.next_flush().unwrap();
        assert!(is_capped);
        flushes.begin(flush(2), &limits, false);
        flushes.begin(flush(3), &limits, true);
        let (free, is_capped) = flushes.next_flush().unwrap();
        assert!(!is_capped);
        assert!(
            flushes.next_flush().is_none(),
            "the third shares the next of its kind"
        );
        flushes.flush_ended(free);
        assert_eq!(ended(&mut flushes), [2]);
        flushes.flush_ended(held);
        assert_eq!(ended(&mut flushes), [1]);
        let (last, _) = flushes.next_flush().unwrap();
        flushes.flush_ended(last);
        assert_eq!(ended(&mut flushes), [3]);
    }
}
