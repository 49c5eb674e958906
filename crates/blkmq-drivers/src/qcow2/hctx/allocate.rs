//! Writes to clusters that are not there, as far as a reactor can do them: clusters are claimed in the tables in memory,
//! the ring reads what is around the data in a base, writes all of it, and then the claim lands. The threads of `pool`
//! have the others: tables that are not in memory, a file that has to grow, several clusters of which parts are copied.

use std::ops::Range;
use std::sync::Arc;

use blkmq_core::bio::{Op, Status};
use blkmq_core::driver::{Done, Issued};
use blkmq_core::ids::{Cookie, DiskId};
use blkmq_core::time::Instant;

use super::super::image::Image;
use super::super::pool::{self, Job};
use super::super::sys;
use super::super::tables::Claim;
use super::{Found, ImageHctx};
use crate::file::part::{Part, Pieces};
use crate::mapping::Mapping;

/// A write to new clusters under way.
pub(super) struct Allocation {
    image: Arc<Image>,
    /// `None` once it has landed.
    claim: Option<Claim>,
    /// What was asked for, which is handed over if the files have no room.
    job: Box<Job>,
    /// The clusters of the disk.
    clusters: Range<u64>,
    /// The file that gets the data.
    data: DiskId,
    /// A cluster in memory, if some of it is what was there before.
    copy: Option<Mapping>,
    step: Step,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// The old cluster is read from this byte of a file.
    Read(DiskId, u64),
    Write,
}

/// What is around the data in its clusters.
enum Around {
    /// Nothing, or what is there already.
    Nothing,
    /// Zeroes.
    Zeroes,
    /// What is at this byte of a file.
    Data(DiskId, u64),
}

impl ImageHctx {
    /// Returns whether a write goes to clusters for which a write of this context is under way: it can go when that has
    /// ended.
    pub(super) fn is_allocating(&self, rq: &Part<'_>) -> bool {
        let Some(view) = self.image(rq.disk).filter(|_| !self.allocating.is_empty()) else {
            return false;
        };
        let clusters = view.image.clusters(&(rq.offset..rq.offset + rq.len));
        self.allocating.iter().any(|number| {
            let other = self.allocations[*number as usize].as_ref();
            other.is_some_and(|other| {
                let claim = other.claim.as_ref();
                Arc::ptr_eq(&other.image, &view.image) && claim.is_some_and(|claim| claim.overlaps(&clusters))
            })
        })
    }

    /// Begins a write to new clusters. Returns `None` if that is for the threads.
    pub(super) fn allocate(
        &mut self,
        number: u32,
        cookie: Cookie,
        rq: &Part<'_>,
        last: bool,
        now: Instant,
    ) -> Option<Issued> {
        // Before the look: see `guests`.
        let range = rq.offset..rq.offset + rq.len;
        self.announced.announce(number as usize, rq.disk.0, &range);
        let Some(allocation) = self.claim(number, rq) else {
            self.announced.withdraw(number as usize);
            return None;
        };
        self.begin(number, cookie, 1);
        self.active[number as usize].is_announced = true;
        self.allocations[number as usize] = Some(Box::new(allocation));
        self.allocating.push(number);
        Some(match self.go_on(number, cookie, last, now) {
            Some(done) => Issued::Done(done.status),
            None => Issued::Queued,
        })
    }

    fn claim(&mut self, number: u32, rq: &Part<'_>) -> Option<Allocation> {
        let image = Arc::clone(&self.image(rq.disk)?.image);
        let tables = image.writable_tables()?;
        let (range, cluster) = (rq.offset..rq.offset + rq.len, tables.cluster());
        let whole = image.whole_clusters(&range);
        let whole = whole.start..image.end_of_clusters(&whole);
        let around = self.around(rq, &whole, cluster)?;
        let view = self.image(rq.disk)?;
        let data = view.files[usize::from(image.data_file())].0;
        let is_odd = image.files()[usize::from(image.data_file())].is_odd(rq.offset, rq.len);
        let _gate = image.try_enter()?;
        if image.is_idle() {
            return None;
        }
        let claim = tables.claim(image.clusters(&range))?;
        // All of them are in the image from now on. Those of zeroes were before.
        image.note_change(&whole);
        self.track(rq.disk, &range);
        let host = claim.host..claim.host + (whole.end - whole.start);
        let is_fresh = !image.has_beside() && tables.space.is_fresh(host.clone());
        let around = match around {
            Around::Zeroes if is_fresh && !is_odd => Around::Nothing,
            Around::Nothing if is_odd => Around::Zeroes,
            other => other,
        };
        let needs_copy = !matches!(around, Around::Nothing);
        let copy = match needs_copy && whole.end - whole.start == cluster && cluster <= COPY_BYTES {
            true => self
                .copies
                .pop()
                .or_else(|| Mapping::new(COPY_BYTES as usize).ok()),
            false => None,
        };
        let is_there = image.has_beside() || tables.space.has(host.end);
        if !is_there || needs_copy && copy.is_none() {
            self.copies.extend(copy);
            tables.land(claim, false);
            return None;
        }
        let (start, end) = match needs_copy {
            true => (host.start, host.end),
            false => (
                host.start + (range.start - whole.start),
                host.start + (range.end - whole.start),
            ),
        };
        if !image.has_beside() {
            tables.space.note_written(start..end);
        }
        let mut allocation = Allocation {
            clusters: whole,
            data,
            copy,
            step: Step::Write,
            claim: Some(claim),
            job: self.job(&image, number, rq),
            image: Arc::clone(&image),
        };
        match around {
            Around::Data(file, host) => allocation.step = Step::Read(file, host),
            _ => allocation.fill(true),
        }
        Some(allocation)
    }

    /// What is around the data of a write in its clusters, if the map says so and a reactor can get it.
    fn around(&mut self, rq: &Part<'_>, whole: &Range<u64>, cluster: u64) -> Option<Around> {
        if (whole.start, whole.end) == (rq.offset, rq.offset + rq.len) {
            return Some(Around::Nothing);
        }
        let part = Part {
            op: Op::Read,
            offset: whole.start,
            len: whole.end - whole.start,
            ..rq.clone()
        };
        let mut extents = std::mem::take(&mut self.extents);
        let found = self.image(rq.disk).map(|view| view.locate(&part, &mut extents));
        let place = match extents[..] {
            [extent] if found == Some(Found::All) => Some(extent.place),
            _ => None,
        };
        self.extents = extents;
        match place? {
            None => Some(Around::Zeroes),
            Some((file, host)) if whole.end - whole.start == cluster => {
                let file = self.image(rq.disk)?.files[usize::from(file)].0;
                Some(Around::Data(file, host))
            }
            Some(_) => None,
        }
    }

    /// Does the steps of a write until one is under way. Returns its end, if it ends at once.
    fn go_on(&mut self, number: u32, cookie: Cookie, last: bool, now: Instant) -> Option<Done> {
        loop {
            let allocation = self.allocations[number as usize].as_ref()?;
            let memory;
            let part = match (allocation.step, &allocation.copy) {
                (Step::Write, None) => allocation.job.part(),
                (_, copy) => {
                    let len = allocation.clusters.end - allocation.clusters.start;
                    memory = [copy.as_ref()?.lend(0..len as usize)];
                    Part {
                        offset: 0,
                        len,
                        skip: 0,
                        memory: Pieces::List(&memory),
                        ..allocation.job.part()
                    }
                }
            };
            let part = allocation.place(part);
            match self.file.issue_part(&part, cookie, last, now) {
                Issued::Queued => return None,
                Issued::Done(status) => {
                    if !self.end_step(number, status) {
                        return self.end_allocation(number, status);
                    }
                }
                // The threads need no room here.
                Issued::Resource | Issued::DeviceResource => {
                    self.give_up_allocation(number);
                    return None;
                }
            }
        }
    }

    /// Takes the end of a step of a write.
    pub(super) fn step_ended(&mut self, number: u32, status: Status, now: Instant) -> Option<Done> {
        let cookie = self.active[number as usize].cookie?;
        match self.end_step(number, status) {
            true => self.go_on(number, cookie, true, now),
            false => self.end_allocation(number, status),
        }
    }

    /// Returns whether another step follows.
    fn end_step(&mut self, number: u32, status: Status) -> bool {
        let Some(allocation) = &mut self.allocations[number as usize] else {
            return false;
        };
        let is_next = status.is_ok() && allocation.step != Step::Write;
        if is_next {
            allocation.fill(false);
            allocation.step = Step::Write;
        }
        is_next
    }

    fn end_allocation(&mut self, number: u32, status: Status) -> Option<Done> {
        let cookie = self.active[number as usize].cookie?;
        let mut allocation = self.take_allocation(number)?;
        allocation.land(status.is_ok());
        if !status.is_ok() {
            self.undone.push(cookie);
        }
        self.keep_copy(allocation.copy);
        // Not announced any more: its clusters are entered.
        self.end_file_part(number, status)
    }

    #[cold]
    fn give_up_allocation(&mut self, number: u32) {
        let Some(mut allocation) = self.take_allocation(number) else {
            return;
        };
        allocation.land(false);
        self.keep_copy(allocation.copy);
        self.end_parts(number, 1);
        pool::submit(allocation.job);
    }

    /// Keeps the memory of a copy for others; after a burst, only what a usual one needs.
    fn keep_copy(&mut self, copy: Option<Mapping>) {
        self.copies.extend(copy);
        if self.allocating.is_empty() {
            self.copies.truncate(COPIES_KEPT);
        }
    }

    fn take_allocation(&mut self, number: u32) -> Option<Box<Allocation>> {
        let at = self.allocating.iter().position(|other| *other == number)?;
        self.allocating.swap_remove(at);
        self.allocations[number as usize].take()
    }
}

impl Allocation {
    /// Puts the data into the copy of its cluster, if there is one; over zeroes if it is `new`.
    fn fill(&mut self, is_new: bool) {
        let Some(copy) = &mut self.copy else { return };
        let bytes = &mut copy.bytes_mut()[..(self.clusters.end - self.clusters.start) as usize];
        if is_new {
            bytes.fill(0);
        }
        let at = (self.job.offset - self.clusters.start) as usize;
        sys::gather(
            &self.job.pieces,
            self.job.skip,
            &mut bytes[at..at + self.job.len as usize],
        );
    }

    /// Where a step goes.
    fn place<'a>(&self, part: Part<'a>) -> Part<'a> {
        let host = self.claim.as_ref().map_or(0, |claim| claim.host);
        match self.step {
            Step::Read(disk, host) => Part {
                op: Op::Read,
                disk,
                offset: host,
                ..part
            },
            Step::Write if self.copy.is_some() => Part {
                disk: self.data,
                offset: host,
                ..part
            },
            Step::Write => Part {
                disk: self.data,
                offset: host + (part.offset - self.clusters.start),
                ..part
            },
        }
    }

    fn land(&mut self, is_written: bool) {
        let Some(claim) = self.claim.take() else { return };
        let range = self.job.offset..self.job.offset + self.job.len;
        self.image.end_claim(claim, range, is_written);
    }
}

/// Clusters of at most so many bytes are copied on a reactor.
const COPY_BYTES: u64 = 256 << 10;
/// Copies whose memory is kept while none is under way.
const COPIES_KEPT: usize = 32;
