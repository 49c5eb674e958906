//! Work on images in the background: images that are made flat, or committed into their bases, while they are used. A job's requests go through the
//! queue of its disk, accounted to a group of their own, so its weight decides how fast it is; a thread waits for them.
//! `list` keeps the jobs, also those that have ended, and `walk` has their requests. `claims` has the short work on images
//! that is no job.

mod claims;
mod list;
mod walk;

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::thread;

use anyhow::{Context, Result, anyhow, bail, ensure};
use blkmq_config::live;
use blkmq_core::bio::Status;
use blkmq_core::ids::{GroupId, ReactorId};
use blkmq_host::device::Replacement;
use blkmq_host::disk::{Disk, Use};
use blkmq_host::service::Service;

pub(crate) use self::claims::Claims;
use self::list::Job;
pub(crate) use self::list::{Jobs, Kind};
use self::walk::Walk;
use super::Running;

impl Running {
    /// The jobs.
    pub(crate) fn jobs(&self) -> &Jobs {
        &self.jobs
    }

    /// Replaces what is below disks, all at one moment.
    ///
    /// # Errors
    /// There is a job of one of them, or as of [`Control::replace_disks`](blkmq_host::control::Control::replace_disks).
    pub(crate) fn replace_disks(&self, wanted: &[(String, Replacement)]) -> Result<()> {
        // No job begins meanwhile, and nobody takes over what is replaced.
        let _state = self.open_state()?;
        for (name, _) in wanted {
            self.check_idle(name)?;
        }
        self.control().replace_disks(wanted)?;
        self.note_replaced();
        wanted.iter().for_each(|(name, _)| self.close_replaced(name));
        Ok(())
    }

    /// Checks that nothing is done to a disk's image.
    fn check_idle(&self, disk: &str) -> Result<()> {
        self.jobs.check_free(disk)?;
        self.claims.check_free(disk)
    }

    /// Closes the file of a disk's former image, which may be deleted: its space is free then.
    fn close_replaced(&self, disk: &str) {
        if let Err(error) = self.follow_files(disk) {
            tracing::warn!(
                disk,
                "disk {disk}: the space of its former image stays in use: {error:#}"
            );
        }
    }

    /// Begins to do something to the image of a disk, with this weight of the group of all jobs.
    ///
    /// # Errors
    /// There is no such disk, it is in no image with a base, there is a job of it, or there are too many; of a commit,
    /// others use the base, or it cannot be written.
    pub(crate) fn begin_job(self: &Arc<Self>, name: &str, kind: Kind, weight: u16) -> Result<()> {
        // Nobody takes over or ends meanwhile.
        let _state = self.open_state()?;
        let disk = self.engine.disk(name);
        let disk = disk.with_context(|| format!("disk {name}: there is no such disk"))?;
        self.check_idle(name)?;
        let begin = match kind {
            Kind::Flatten => Replacement::BeginFlat,
            Kind::Commit => {
                self.check_base(&disk)?;
                Replacement::BeginCommit
            }
        };
        self.replace(&disk, begin)?;
        let begun = self.jobs.add(name, kind).and_then(|job| {
            let started = self.start(&disk, &job, weight);
            started.inspect_err(|_| self.jobs.remove(name))
        });
        begun.inspect_err(|_| self.leave(&disk, kind))
    }

    /// Starts the thread of a job.
    fn start(self: &Arc<Self>, disk: &Disk, job: &Arc<Job>, weight: u16) -> Result<()> {
        let control = self.control();
        let group = live::make_group(&control, &self.config(), disk.queue, GROUP)?;
        control.set_group_weight(disk.queue, GROUP, weight)?;
        let (running, disk, job) = (Arc::clone(self), disk.clone(), Arc::clone(job));
        let name = disk.name.clone();
        let work = move || running.work(&disk, group, &job);
        let spawned = thread::Builder::new().name("blkmq-job".to_owned()).spawn(work);
        spawned
            .map(drop)
            .with_context(|| format!("disk {name}: there is no thread for it"))
    }

    /// Checks that no other disk lies on what a disk's image lies on.
    fn check_base(&self, disk: &Disk) -> Result<()> {
        let control = self.control();
        let device = |disk: &Disk| control.device(disk.queue).ok();
        let base = device(disk).map_or_else(Vec::new, |device| device.files_of_base(disk.id));
        for other in control.disks().iter().filter(|other| other.name != disk.name) {
            let files = device(other).map_or_else(Vec::new, |device| device.files(other.id));
            ensure!(
                !files.iter().any(|file| base.contains(file)),
                "disk {}: disk {} uses its base, too, and would find other data: remove that one, or make it flat, first",
                disk.name,
                other.name
            );
        }
        Ok(())
    }

    fn work(&self, disk: &Disk, group: GroupId, job: &Arc<Job>) {
        // A job that never ends would keep its disk, and each take-over, from all others.
        let work = AssertUnwindSafe(|| match job.kind {
            Kind::Flatten => self.make_flat(disk, group, job),
            Kind::Commit => self.commit(disk, group, job),
        });
        let ended = catch_unwind(work).unwrap_or_else(|_| Err(anyhow!("the daemon failed: see the log")));
        if ended.is_err() {
            self.leave(disk, job.kind);
        }
        let name = &disk.name;
        match (&ended, job.kind) {
            (Ok(()), Kind::Flatten) => {
                tracing::info!(disk = name, "disk {name}: its image lies on nothing now")
            }
            (Ok(()), Kind::Commit) => {
                tracing::info!(disk = name, "disk {name}: its base has all that its image had")
            }
            (Err(error), Kind::Flatten) => {
                tracing::warn!(
                    disk = name,
                    "disk {name}: its image lies on its base as before: {error:#}"
                );
            }
            (Err(error), Kind::Commit) => {
                tracing::warn!(
                    disk = name,
                    "disk {name}: its image is as before, and its base alone no disk until a commit has ended: {error:#}"
                );
            }
        }
        job.end(ended.map_err(|error| format!("{error:#}")));
    }

    /// Lets go of what has not ended well.
    fn leave(&self, disk: &Disk, kind: Kind) {
        if kind == Kind::Commit
            && let Err(error) = self.replace(disk, Replacement::LeaveCommit)
        {
            tracing::warn!(disk = disk.name, "disk {}: its base: {error:#}", disk.name);
        }
    }

    fn replace(&self, disk: &Disk, wanted: Replacement) -> Result<()> {
        let replaced = self.control().replace_disks(&[(disk.name.clone(), wanted)]);
        Ok(replaced?)
    }

    /// Does all of it. The disk stays until then: nobody has another one of its name meanwhile.
    fn make_flat(&self, disk: &Disk, group: GroupId, job: &Arc<Job>) -> Result<()> {
        // What a disk grows by has nothing below it.
        let size = disk.current_size();
        job.all.store(size, Ordering::Relaxed);
        let mut place = None;
        self.pass(disk, group, job, size, &mut place)?;
        job.done.store(size, Ordering::Relaxed);
        self.settle(disk, job, Replacement::SettleFlat(job.given_up.clone()))?;
        self.replace(disk, Replacement::Flat)?;
        self.note_replaced();
        drop(place);
        Ok(())
    }

    /// Does all of it: copies the image, and then what has been written meanwhile, until that is little.
    fn commit(&self, disk: &Disk, group: GroupId, job: &Arc<Job>) -> Result<()> {
        let mut place = None;
        for number in 0..PASSES_MAX {
            let size = disk.current_size();
            if number == 0 {
                job.all.store(size, Ordering::Relaxed);
            }
            let found = self.pass(disk, group, job, size, &mut place)?;
            let settle = Replacement::SettleCommit(job.given_up.clone());
            self.settle(disk, job, settle)?;
            if number > 0 && found <= LITTLE {
                self.replace(disk, Replacement::Commit)?;
                self.note_replaced();
                self.close_replaced(&disk.name);
                return Ok(());
            }
        }
        bail!(
            "clients write as fast as it is copied, after {PASSES_MAX} times: begin again when they write less, or with a larger --weight"
        );
    }

    /// Waits until what was copied is durable.
    fn settle(&self, disk: &Disk, job: &Job, how: Replacement) -> Result<()> {
        let settled = self.replace(disk, how);
        if job.is_cancelled() {
            bail!(given_up(job.kind));
        }
        settled
    }

    /// Does what is to be done in the first `size` bytes of a disk. Returns for how many of them something was, and keeps the
    /// place among the disk's users.
    fn pass(
        &self,
        disk: &Disk,
        group: GroupId,
        job: &Arc<Job>,
        size: u64,
        place: &mut Option<Use>,
    ) -> Result<u64> {
        // The first one looks at all of the disk, and others add what they find.
        let before = job.done.load(Ordering::Relaxed);
        let (mut at, mut found) = (0, 0);
        while at < size {
            let end = size.min(at + WINDOW);
            let ranges = ranges_with_data(disk, at..end)?;
            if job.is_cancelled() {
                bail!(given_up(job.kind));
            }
            found += ranges.iter().map(|range| range.end - range.start).sum::<u64>();
            if before > 0 {
                job.all.store(before + found, Ordering::Relaxed);
            }
            if !ranges.is_empty() {
                *place = self.copy(disk, group, job, ranges)?;
            }
            let done = if before > 0 { before + found } else { end };
            job.done.store(done, Ordering::Relaxed);
            at = end;
        }
        Ok(found)
    }

    /// Copies what is in some ranges, and returns the place among the disk's users.
    fn copy(
        &self,
        disk: &Disk,
        group: GroupId,
        job: &Arc<Job>,
        ranges: Vec<Range<u64>>,
    ) -> Result<Option<Use>> {
        let (end, ended) = mpsc::sync_channel(1);
        let walk = Walk::new(disk.clone(), group, Arc::clone(job), ranges, end);
        self.engine.add_service(
            ReactorId(0),
            Box::new(move || -> Box<dyn Service> { Box::new(walk) }),
        );
        let (status, place) = ended.recv().unwrap_or((Status::Shutdown, None));
        match status {
            _ if job.is_cancelled() => bail!(given_up(job.kind)),
            Status::Shutdown => bail!(given_up(job.kind)),
            status => ensure!(
                status.is_ok(),
                "a part of it could not be copied ({status:?}): see the log"
            ),
        }
        Ok(place)
    }

    /// Counts it as a change: a daemon that is about to take over has opened what was there before.
    fn note_replaced(&self) {
        // Relaxed, as in `changes`.
        self.changes.fetch_add(1, Ordering::Relaxed);
    }
}

/// The parts of a range of a disk in which there is something to do.
fn ranges_with_data(disk: &Disk, within: Range<u64>) -> Result<Vec<Range<u64>>> {
    let (mut ranges, mut at) = (Vec::<Range<u64>>::new(), within.start);
    let mut extents = Vec::with_capacity(EXTENTS);
    while at < within.end {
        extents.clear();
        disk.left(at, within.end - at, EXTENTS, &mut extents)
            .with_context(|| format!("disk {}: its data cannot be found", disk.name))?;
        for extent in &extents {
            if !extent.zero {
                ranges.push(at..at + extent.len);
            }
            at += extent.len;
        }
    }
    Ok(ranges)
}

fn given_up(kind: Kind) -> &'static str {
    match kind {
        Kind::Flatten => "it was given up; what was copied stays, and the next one goes on from there",
        Kind::Commit => "it was given up; the disk is as before, and the next one begins anew",
    }
}

/// The group of all jobs, on each queue.
const GROUP: &str = "/blkmq/jobs";
/// Bytes whose extents are looked for at a time: writes that free something wait meanwhile.
const WINDOW: u64 = 1 << 30;
const EXTENTS: usize = 1024;
/// Bytes that may be left for the time in which requests wait, and how often what was written meanwhile is copied.
const LITTLE: u64 = 4 << 20;
const PASSES_MAX: u32 = 24;
