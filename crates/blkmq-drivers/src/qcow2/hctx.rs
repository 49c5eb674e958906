//! A hardware context of a drive of files of which some are images: what their maps know goes to the files at
//! once, as whole requests or in parts, and `allocate` has writes to new clusters; everything else goes to the threads of
//! `pool` and comes back here. Requests of raw files pass through.

mod allocate;
mod view;

use std::ops::Range;
use std::sync::Arc;

use blkmq_core::bio::{Flags, Op, Status};
use blkmq_core::driver::{DisksError, Done, HctxDriver, Issued, TimedOut};
use blkmq_core::ids::{Cookie, DiskId, HctxId, Tag};
use blkmq_core::request::Request;
use blkmq_core::time::Instant;
use blkmq_host::runner::Runner;
use blkmq_sync::mpsc::{self, Receiver};

use self::allocate::Allocation;
use self::view::{EXTENTS_MAX, Extent, Found, View};
use super::guests::Guests;
use super::image::Image;
use super::pool::{self, End, Job, Outcome, Reply};
use super::sys;
use crate::file::hctx::FileHctx;
use crate::file::part::Part;
use crate::mapping::Mapping;
use blkmq_host::block_locks::Announced;

/// The driver's side of one hardware context.
pub(crate) struct ImageHctx {
    file: FileHctx,
    /// The images by the ids of their disks.
    views: Vec<Option<View>>,
    guests: Arc<Guests>,
    announced: Arc<Announced>,
    /// The requests of images under way, by tag.
    active: Box<[Active]>,
    in_flight: u32,
    /// The tags of parts that are free, behind those of requests; and the requests of those that are not.
    free: Vec<u32>,
    parents: Box<[u32]>,
    reply: Arc<Reply>,
    ends: Receiver<End>,
    /// Jobs that came back when there was no room, and those that wait for a write to the same new clusters.
    waiting: Vec<Box<Job>>,
    /// Writes to new clusters by tag, the tags of those that there are, and memory for copies.
    allocations: Box<[Option<Box<Allocation>>]>,
    allocating: Vec<u32>,
    copies: Vec<Mapping>,
    /// Those of the last turn that failed: nothing of them is there.
    undone: Vec<Cookie>,
    /// Where the request at hand lies.
    extents: Vec<Extent>,
}

/// A request of an image under way.
#[derive(Clone, Copy, Debug, Default)]
struct Active {
    cookie: Option<Cookie>,
    /// Parts and jobs that have not ended.
    left: u32,
    /// The parts among them, which the files have: its range is announced for them, and not longer.
    parts: u32,
    status: Status,
    is_announced: bool,
}

/// What became of a request that was looked up.
enum Tried {
    /// The files have it; or it is done.
    Issued(Issued),
    /// The map does not know where it is.
    Unknown,
    /// It is not for the files.
    Work,
    /// Another write goes to its clusters, which are new: it can go afterwards.
    Later,
}

impl ImageHctx {
    /// Makes a context around one for files, which has room for tags below `depth` and [`PARTS`] more.
    pub(crate) fn new(
        file: FileHctx,
        guests: Arc<Guests>,
        runner: Option<Runner>,
        hctx: HctxId,
        depth: u32,
    ) -> Self {
        let (sender, ends) = mpsc::channel(depth as usize + PARTS as usize);
        let mut context = Self {
            views: Vec::new(),
            announced: guests.add(depth),
            guests,
            active: vec![Active::default(); depth as usize].into(),
            in_flight: 0,
            free: (depth..depth + PARTS).rev().collect(),
            parents: vec![0; PARTS as usize].into(),
            reply: Arc::new(Reply { sender, runner, hctx }),
            ends,
            waiting: Vec::new(),
            allocations: (0..depth).map(|_| None).collect(),
            allocating: Vec::with_capacity(depth as usize),
            copies: Vec::new(),
            undone: Vec::new(),
            extents: Vec::with_capacity(EXTENTS_MAX),
            file,
        };
        context.take_images();
        context
    }

    fn take_images(&mut self) {
        let disks = self.file.disks();
        let view = |image: &Arc<Image>| View::new(image, disks);
        self.views = disks
            .images()
            .iter()
            .map(|image| image.as_ref().map(view))
            .collect();
    }

    fn image(&self, disk: DiskId) -> Option<&View> {
        self.views.get(disk.index())?.as_ref()
    }

    #[inline]
    fn track(&mut self, disk: DiskId, range: &Range<u64>) {
        if let Some(Some(view)) = self.views.get_mut(disk.index()) {
            view.track(range);
        }
    }

    #[inline(never)]
    fn issue_to_image(&mut self, rq: &Request, cookie: Cookie, last: bool, now: Instant) -> Issued {
        let number = cookie.tag().0;
        let part = Part::whole(rq);
        let tried = self.try_here(number, cookie, &part, last, now);
        if let Tried::Issued(issued) = tried {
            return issued;
        }
        let Some(view) = self.image(rq.disk()) else {
            return Issued::Done(Status::Invalid);
        };
        let image = Arc::clone(&view.image);
        let mut job = self.job(&image, number, &part);
        self.begin(number, cookie, 1);
        match tried {
            Tried::Later => self.waiting.push(job),
            tried => {
                job.only_map = matches!(tried, Tried::Unknown);
                pool::submit(job);
            }
        }
        Issued::Queued
    }

    /// Work for the threads.
    fn job(&self, image: &Arc<Image>, number: u32, rq: &Part<'_>) -> Box<Job> {
        let mut pieces = Vec::new();
        rq.memory.for_each(|piece| pieces.push(piece));
        Box::new(Job {
            image: Arc::clone(image),
            disk: rq.disk,
            op: rq.op,
            flags: rq.flags,
            offset: rq.offset,
            len: rq.len,
            pieces,
            skip: rq.skip,
            only_map: false,
            is_ordered: rq.is_ordered,
            number,
            reply: Arc::clone(&self.reply),
        })
    }

    /// Does a request without the threads, if that can be.
    fn try_here(&mut self, number: u32, cookie: Cookie, rq: &Part<'_>, last: bool, now: Instant) -> Tried {
        match self.try_map(number, cookie, rq, last, now) {
            Tried::Work if rq.op == Op::Write && !rq.flags.has(Flags::FUA) => {
                if self.is_allocating(rq) {
                    return Tried::Later;
                }
                let issued = self.allocate(number, cookie, rq, last, now);
                issued.map_or(Tried::Work, Tried::Issued)
            }
            tried => tried,
        }
    }

    /// Gives a request to the files, if its map says where it is.
    fn try_map(&mut self, number: u32, cookie: Cookie, rq: &Part<'_>, last: bool, now: Instant) -> Tried {
        let Some(view) = self.views.get(rq.disk.index()).and_then(Option::as_ref) else {
            return Tried::Issued(Issued::Done(Status::Invalid));
        };
        match rq.op {
            _ if rq.flags.has(Flags::TASK) => return Tried::Work,
            Op::Read | Op::Write => {}
            Op::Flush => {
                // Of all: who replaces the image waits for it.
                self.announced
                    .announce(number as usize, rq.disk.0, &(0..u64::MAX));
                if !view.image.is_clean() {
                    self.announced.withdraw(number as usize);
                    return Tried::Work;
                }
                let disk = view.files[usize::from(view.image.data_file())].0;
                return self.issue_parts(number, cookie, &Part { disk, ..rq.clone() }, last, now);
            }
            _ => return Tried::Work,
        }
        // Before the look: who gives up clusters looks for this afterwards.
        let range = rq.offset..rq.offset + rq.len;
        self.announced.announce(number as usize, rq.disk.0, &range);
        let mut extents = std::mem::take(&mut self.extents);
        let found = view.locate(rq, &mut extents);
        self.extents = extents;
        let tried = match found {
            // After the look: a place that was found is in the file once the tables are clean.
            Found::All if rq.flags.has(Flags::FUA) && !view.image.is_clean() => Tried::Work,
            Found::All if self.extents.len() > 1 && self.extents.len() > self.free.len() => Tried::Work,
            Found::All => {
                if rq.op == Op::Write {
                    self.track(rq.disk, &range);
                }
                self.zero(rq);
                return self.issue_parts(number, cookie, rq, last, now);
            }
            Found::Unknown => Tried::Unknown,
            Found::Other => Tried::Work,
        };
        self.announced.withdraw(number as usize);
        tried
    }

    /// Zeroes the memory of what reads as zeroes, and leaves the other extents.
    fn zero(&mut self, rq: &Part<'_>) {
        self.extents.retain(|extent| {
            if extent.place.is_none() {
                let zeroes = Part {
                    skip: rq.skip + extent.at,
                    len: extent.len,
                    ..rq.clone()
                };
                zeroes.for_each_piece(sys::zero);
            }
            extent.place.is_some()
        });
    }

    /// Issues a request that was looked up: a flush as it is, others by their extents. A request of one extent keeps
    /// its tag.
    fn issue_parts(&mut self, number: u32, cookie: Cookie, rq: &Part<'_>, last: bool, now: Instant) -> Tried {
        if rq.op == Op::Flush {
            self.begin(number, cookie, 1);
            self.active[number as usize].is_announced = true;
            let issued = self.file.issue_part(rq, cookie, last, now);
            return Tried::Issued(self.settle(number, issued));
        }
        let count = self.extents.len();
        if count == 0 {
            self.announced.withdraw(number as usize);
            return Tried::Issued(Issued::Done(Status::Ok));
        }
        self.begin(number, cookie, count as u32);
        self.active[number as usize].is_announced = true;
        let mut issued = Issued::Queued;
        for at in 0..count {
            let extent = self.extents[at];
            let part = self.part(rq, extent);
            let own = match count {
                1 => cookie,
                _ => self.take_part(number, cookie),
            };
            let last = last && at + 1 == count;
            match self.file.issue_part(&part, own, last, now) {
                Issued::Queued => {}
                other => {
                    if count > 1 {
                        self.free.push(own.tag().0);
                    }
                    match other {
                        Issued::Done(status) => issued = self.settle(number, Issued::Done(status)),
                        _ if at == 0 => {
                            self.end(number);
                            return Tried::Issued(other);
                        }
                        // The rest goes by the threads, which need no room here.
                        _ => {
                            self.hand_over_rest(number, rq, at);
                            return Tried::Issued(Issued::Queued);
                        }
                    }
                }
            }
        }
        Tried::Issued(issued)
    }

    fn part<'a>(&self, rq: &Part<'a>, extent: Extent) -> Part<'a> {
        let (file, host) = extent.place.expect("others were zeroed");
        let view = self.image(rq.disk).expect("it was looked up");
        Part {
            disk: view.files[usize::from(file)].0,
            offset: host,
            len: extent.len,
            skip: rq.skip + extent.at,
            ..rq.clone()
        }
    }

    fn take_part(&mut self, number: u32, cookie: Cookie) -> Cookie {
        let tag = self.free.pop().expect("there are enough");
        self.parents[tag as usize - self.active.len()] = number;
        Cookie::new(Tag(tag), cookie.generation())
    }

    /// Gives the extents from `first` on to the threads, as one job each.
    #[cold]
    fn hand_over_rest(&mut self, number: u32, rq: &Part<'_>, first: usize) {
        let Some(view) = self.image(rq.disk) else { return };
        let image = Arc::clone(&view.image);
        let begin = self.extents[first].at;
        // What the threads do is not announced, since they wait for what is.
        self.announced
            .announce(number as usize, rq.disk.0, &(rq.offset..rq.offset + begin));
        self.end_parts(number, (self.extents.len() - first) as u32);
        for extent in &self.extents[first..] {
            let part = Part {
                offset: rq.offset + extent.at,
                len: extent.len,
                skip: rq.skip + extent.at,
                ..rq.clone()
            };
            pool::submit(self.job(&image, number, &part));
        }
    }

    fn begin(&mut self, number: u32, cookie: Cookie, left: u32) {
        debug_assert_eq!(
            self.active[number as usize].cookie, None,
            "tag {number} is issued twice"
        );
        self.in_flight += 1;
        self.active[number as usize] = Active {
            cookie: Some(cookie),
            left,
            parts: left,
            status: Status::Ok,
            is_announced: false,
        };
    }

    /// Returns what a request has come to whose part was answered at once.
    fn settle(&mut self, number: u32, issued: Issued) -> Issued {
        match issued {
            Issued::Queued => Issued::Queued,
            Issued::Done(status) => self
                .end_file_part(number, status)
                .map_or(Issued::Queued, |done| Issued::Done(done.status)),
            no_room => {
                self.end(number);
                no_room
            }
        }
    }

    /// Counts the end of a part that the files had.
    fn end_file_part(&mut self, number: u32, status: Status) -> Option<Done> {
        self.end_parts(number, 1);
        self.end_part(number, status)
    }

    /// So many parts of a request are not in the files any more. After the last one nobody has to wait for it: threads
    /// that do would hold up its own jobs, or those of a request that waits for them.
    fn end_parts(&mut self, number: u32, ended: u32) {
        let active = &mut self.active[number as usize];
        active.parts -= ended;
        if active.parts == 0 && std::mem::take(&mut active.is_announced) {
            self.announced.withdraw(number as usize);
        }
    }

    /// Counts the end of a part or a job. Returns that of the request, if it was the last one.
    fn end_part(&mut self, number: u32, status: Status) -> Option<Done> {
        let active = &mut self.active[number as usize];
        active.status = active.status.and(status);
        active.left -= 1;
        if active.left > 0 {
            return None;
        }
        let status = active.status;
        let cookie = active.cookie?;
        self.end(number);
        Some(Done { cookie, status })
    }

    fn end(&mut self, number: u32) {
        if std::mem::take(&mut self.active[number as usize]).is_announced {
            self.announced.withdraw(number as usize);
        }
        self.in_flight -= 1;
    }

    /// Takes an end of the context for files. Returns that of a request, if it is one.
    fn take_end(&mut self, end: Done, now: Instant) -> Option<Done> {
        let tag = end.cookie.tag().0;
        let requests = self.active.len();
        let number = match self.parents.get((tag as usize).wrapping_sub(requests)) {
            Some(parent) => {
                self.free.push(tag);
                *parent
            }
            None if self.active[tag as usize].cookie.is_none() => return Some(end),
            None if self.allocations[tag as usize].is_some() => return self.step_ended(tag, end.status, now),
            None => tag,
        };
        self.end_file_part(number, end.status)
    }

    /// Goes on with a request whose job has ended.
    fn take_job(&mut self, mut job: Box<Job>, outcome: Outcome, now: Instant, done: &mut Vec<Done>) {
        let number = job.number;
        if let Outcome::Done(status) = outcome {
            done.extend(self.end_part(number, status));
            return;
        }
        let Some(cookie) = self.active[number as usize].cookie else {
            return;
        };
        self.end(number);
        match self.try_here(number, cookie, &job.part(), true, now) {
            Tried::Issued(Issued::Queued) => {}
            Tried::Issued(Issued::Done(status)) => done.push(Done { cookie, status }),
            Tried::Issued(_) | Tried::Later => {
                self.begin(number, cookie, 1);
                self.waiting.push(job);
            }
            Tried::Unknown | Tried::Work => {
                job.only_map = false;
                self.begin(number, cookie, 1);
                pool::submit(job);
            }
        }
    }
}

impl HctxDriver for ImageHctx {
    #[inline]
    fn issue(&mut self, rq: &Request, cookie: Cookie, last: bool, now: Instant) -> Issued {
        match self.views.get(rq.disk().index()) {
            Some(Some(_)) => self.issue_to_image(rq, cookie, last, now),
            _ => self.file.issue(rq, cookie, last, now),
        }
    }

    fn commit(&mut self) {
        self.file.commit();
    }

    fn reap(&mut self, now: Instant, done: &mut Vec<Done>) {
        let first = done.len();
        self.undone.clear();
        self.file.reap(now, done);
        if self.in_flight == 0 {
            return;
        }
        let mut kept = first;
        for at in first..done.len() {
            if let Some(end) = self.take_end(done[at], now) {
                done[kept] = end;
                kept += 1;
            }
        }
        done.truncate(kept);
        for job in std::mem::take(&mut self.waiting) {
            self.take_job(job, Outcome::Mapped, now, done);
        }
        while let Some((job, outcome)) = self.ends.pop() {
            self.take_job(job, outcome, now, done);
        }
    }

    fn set_polled(&mut self, on: bool) -> bool {
        // Ends of jobs wake the reactor anyway.
        self.file.set_polled(on)
    }

    fn refresh_disks(&mut self) -> Result<(), DisksError> {
        self.file.refresh_disks()?;
        self.take_images();
        Ok(())
    }

    fn done_before(&mut self, cookie: Cookie) -> u64 {
        match self.undone.contains(&cookie) {
            true => 0,
            false => self.file.done_before(cookie),
        }
    }

    fn timed_out(&mut self, cookie: Cookie) -> TimedOut {
        let active = &self.active[cookie.tag().index()];
        match active.cookie {
            None => self.file.timed_out(cookie),
            Some(of) if of == cookie => {
                // One with a tag of its own is cancelled there; jobs and parts end by themselves.
                if active.is_announced && active.left == 1 {
                    let _ = self.file.timed_out(cookie);
                }
                TimedOut::Wait
            }
            Some(_) => TimedOut::Ended,
        }
    }
}

impl Drop for ImageHctx {
    fn drop(&mut self) {
        self.guests.remove(&self.announced);
        if self.in_flight > 0 {
            tracing::error!(
                "qcow2 driver: a hardware context ends with {} requests under way",
                self.in_flight
            );
            // The kernel may use their memory.
            std::mem::forget(std::mem::take(&mut self.allocations));
        }
    }
}

/// Parts of requests at once, in all.
pub(crate) const PARTS: u32 = 64;
