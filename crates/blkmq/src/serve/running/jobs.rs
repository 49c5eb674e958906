//! Work on images in the background: images that are made flat while they are used. A job's requests go through the
//! queue of its disk, accounted to a group of their own, so its weight decides how fast it is; a thread waits for them.
//! `list` keeps the jobs, also those that have ended, and `walk` has their requests.

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

use self::list::Job;
pub(crate) use self::list::Jobs;
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
            self.jobs.check_free(name)?;
        }
        self.control().replace_disks(wanted)?;
        self.note_replaced();
        wanted.iter().for_each(|(name, _)| self.close_replaced(name));
        Ok(())
    }

    /// Closes the file of a disk's former image, which may be deleted: its space is free then.
    fn close_replaced(&self, disk: &str) {
        if let Err(error) = self.follow_files(disk) {
            tracing::warn!("disk {disk}: the space of its former image stays in use: {error:#}");
        }
    }

    /// Begins to make the image of a disk flat, with this weight of the group of all jobs.
    ///
    /// # Errors
    /// There is no such disk, it is in no image with a base, there is a job of it, or there are too many.
    pub(crate) fn flatten(self: &Arc<Self>, name: &str, weight: u16) -> Result<()> {
        // Nobody takes over or ends meanwhile.
        let _state = self.open_state()?;
        let disk = self.engine.disk(name);
        let disk = disk.with_context(|| format!("disk {name}: there is no such disk"))?;
        self.jobs.check_free(name)?;
        let control = self.control();
        control.replace_disks(&[(name.to_owned(), Replacement::BeginFlat)])?;
        let group = live::make_group(&control, &self.config(), disk.queue, GROUP)?;
        let job = self.jobs.add(name)?;
        let set = control.set_group_weight(disk.queue, GROUP, weight);
        let begun = set.map_err(Into::into).and_then(|()| {
            let (running, job) = (Arc::clone(self), Arc::clone(&job));
            let work = move || running.work(&disk, group, &job);
            let spawned = thread::Builder::new().name("blkmq-job".to_owned()).spawn(work);
            spawned.with_context(|| format!("disk {name}: there is no thread for it"))
        });
        if begun.is_err() {
            self.jobs.remove(name);
        }
        begun.map(drop)
    }

    fn work(&self, disk: &Disk, group: GroupId, job: &Arc<Job>) {
        // A job that never ends would keep its disk, and each take-over, from all others.
        let work = AssertUnwindSafe(|| self.copy_and_finish(disk, group, job));
        let ended = catch_unwind(work).unwrap_or_else(|_| Err(anyhow!("the daemon failed: see the log")));
        match &ended {
            Ok(()) => tracing::info!("disk {}: its image lies on nothing now", disk.name),
            Err(error) => tracing::warn!(
                "disk {}: its image lies on its base as before: {error:#}",
                disk.name
            ),
        }
        job.end(ended.map_err(|error| format!("{error:#}")));
    }

    /// Does all of it. The disk stays until then: nobody has another one of its name meanwhile.
    fn copy_and_finish(&self, disk: &Disk, group: GroupId, job: &Arc<Job>) -> Result<()> {
        // What a disk grows by has nothing below it.
        let size = disk.current_size();
        job.all.store(size, Ordering::Relaxed);
        let (mut at, mut place) = (0, None);
        while at < size {
            let end = size.min(at + WINDOW);
            let ranges = ranges_with_data(disk, at..end)?;
            if job.is_cancelled() {
                bail!(GIVEN_UP);
            }
            if !ranges.is_empty() {
                place = self.copy(disk, group, job, ranges)?;
            }
            job.done.store(end, Ordering::Relaxed);
            at = end;
        }
        let control = self.control();
        let replace = |wanted| control.replace_disks(&[(disk.name.clone(), wanted)]);
        let settled = replace(Replacement::SettleFlat(job.given_up.clone()));
        if job.is_cancelled() {
            bail!(GIVEN_UP);
        }
        settled?;
        replace(Replacement::Flat)?;
        self.note_replaced();
        drop(place);
        Ok(())
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
            _ if job.is_cancelled() => bail!(GIVEN_UP),
            Status::Shutdown => bail!(GIVEN_UP),
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

/// The parts of a range of a disk that are no holes.
fn ranges_with_data(disk: &Disk, within: Range<u64>) -> Result<Vec<Range<u64>>> {
    let (mut ranges, mut at) = (Vec::<Range<u64>>::new(), within.start);
    let mut extents = Vec::with_capacity(EXTENTS);
    while at < within.end {
        extents.clear();
        disk.extents(at, within.end - at, EXTENTS, &mut extents)
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

/// The group of all jobs, on each queue.
const GROUP: &str = "/blkmq/jobs";
/// Bytes whose extents are looked for at a time: writes that free something wait meanwhile.
const WINDOW: u64 = 1 << 30;
const EXTENTS: usize = 1024;
const GIVEN_UP: &str = "it was given up; what was copied stays, and the next one goes on from there";
