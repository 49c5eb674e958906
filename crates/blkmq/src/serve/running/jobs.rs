//! Work on images in the background: images that are made flat while they are used. A job's requests go through the
//! queue of its disk, accounted to a group of their own, so its weight decides how fast it is; a thread waits for it.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use blkmq_core::bio::{Bio, Flags, Op, Status};
use blkmq_core::ids::{GroupId, ReactorId};
use blkmq_host::device::Replacement;
use blkmq_host::disk::{Disk, Use};
use blkmq_host::ring::Completion;
use blkmq_host::service::{Cx, Service};

use super::Running;

/// The jobs of a daemon, by their disks; those that have ended stay until the next one of their disk.
#[derive(Debug, Default)]
pub(crate) struct Jobs(Mutex<BTreeMap<String, Arc<Job>>>);

/// A job.
#[derive(Debug, Default)]
pub(crate) struct Job {
    /// Bytes that may have to be copied, and those that are done with.
    all: AtomicU64,
    done: AtomicU64,
    is_cancelled: AtomicBool,
    stage: Mutex<Stage>,
    changed: Condvar,
}

/// How far a job is.
///
/// ```text
///  Copying ─► Copied ─► Ended
///      └──────────────────▲
/// ```
#[derive(Clone, Debug, Default)]
enum Stage {
    #[default]
    Copying,
    /// No request of it is under way any more.
    Copied(Status),
    Ended(Result<(), String>),
}

/// What is told of a job.
pub(crate) struct Report {
    pub(crate) disk: String,
    pub(crate) all: u64,
    pub(crate) done: u64,
    /// How it ended, if it did.
    pub(crate) end: Option<Result<(), String>>,
}

impl Jobs {
    /// All of them.
    pub(crate) fn reports(&self) -> Vec<Report> {
        let report = |(disk, job): (&String, &Arc<Job>)| Report {
            disk: disk.clone(),
            // Relaxed, as all uses: counts for people.
            all: job.all.load(Ordering::Relaxed),
            done: job.done.load(Ordering::Relaxed),
            end: match &*job.stage() {
                Stage::Ended(end) => Some(end.clone()),
                _ => None,
            },
        };
        self.lock().iter().map(report).collect()
    }

    /// Gives a disk's job up: it ends soon.
    ///
    /// # Errors
    /// There is none.
    pub(crate) fn cancel(&self, disk: &str) -> Result<()> {
        let job = self.lock().get(disk).filter(|job| !job.has_ended()).cloned();
        let job = job.with_context(|| format!("disk {disk}: nothing is done to it: see ctl jobs"))?;
        job.cancel();
        Ok(())
    }

    /// Gives all jobs up.
    pub(super) fn cancel_all(&self) {
        self.lock().values().for_each(|job| job.cancel());
    }

    /// The same, and waits until they have ended. Returns whether they have, within `limit` each.
    pub(super) fn end_all(&self, limit: Duration) -> bool {
        self.cancel_all();
        let all: Vec<_> = self.lock().values().cloned().collect();
        all.iter().all(|job| {
            let has_not = |stage: &mut Stage| !matches!(stage, Stage::Ended(_));
            let waited = job.changed.wait_timeout_while(job.stage(), limit, has_not);
            !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
        })
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Job>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Job {
    fn stage(&self) -> MutexGuard<'_, Stage> {
        self.stage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn has_ended(&self) -> bool {
        matches!(*self.stage(), Stage::Ended(_))
    }

    fn cancel(&self) {
        // Relaxed: it says nothing of other memory.
        self.is_cancelled.store(true, Ordering::Relaxed);
    }

    fn is_cancelled(&self) -> bool {
        self.is_cancelled.load(Ordering::Relaxed)
    }

    fn enter(&self, stage: Stage) {
        *self.stage() = stage;
        self.changed.notify_all();
    }

    /// Waits until no request is under way, and returns how they have ended.
    fn wait_copied(&self) -> Status {
        let is_copying = |stage: &mut Stage| matches!(stage, Stage::Copying);
        let waited = self.changed.wait_while(self.stage(), is_copying);
        match *waited.unwrap_or_else(PoisonError::into_inner) {
            Stage::Copied(status) => status,
            _ => Status::Shutdown,
        }
    }
}

impl Running {
    /// The jobs.
    pub(crate) fn jobs(&self) -> &Jobs {
        &self.jobs
    }

    /// Begins to make the image of a disk flat, with this weight of the group of all jobs.
    ///
    /// # Errors
    /// There is no such disk, it is in no image with a base, or there is a job already.
    pub(crate) fn flatten(self: &Arc<Self>, name: &str, weight: u16) -> Result<()> {
        // Nobody takes over or ends meanwhile.
        let _state = self.open_state()?;
        let disk = self.engine.disk(name);
        let disk = disk.with_context(|| format!("disk {name}: there is no such disk"))?;
        self.control()
            .replace_disks(&[(name.to_owned(), Replacement::BeginFlat)])?;
        let group = self.control().make_group(disk.queue, GROUP)?;
        self.control().set_group_weight(disk.queue, GROUP, weight)?;
        let job = Arc::new(Job::default());
        let mut jobs = self.jobs.lock();
        let is_free = jobs.get(name).is_none_or(|job| job.has_ended());
        ensure!(
            is_free,
            "disk {name}: it is being made flat already: see ctl jobs"
        );
        let (running, begun) = (Arc::clone(self), Arc::clone(&job));
        let work = move || {
            let ended = running.copy_and_finish(&disk, group, &begun);
            match &ended {
                Ok(()) => tracing::info!("disk {}: its image lies on nothing now", disk.name),
                Err(error) => tracing::warn!(
                    "disk {}: its image lies on its base as before: {error:#}",
                    disk.name
                ),
            }
            begun.enter(Stage::Ended(ended.map_err(|error| format!("{error:#}"))));
        };
        let spawned = thread::Builder::new().name("blkmq-job".to_owned()).spawn(work);
        spawned.with_context(|| format!("disk {name}: there is no thread for it"))?;
        jobs.insert(name.to_owned(), job);
        Ok(())
    }

    fn copy_and_finish(&self, disk: &Disk, group: GroupId, job: &Arc<Job>) -> Result<()> {
        let ranges = ranges_with_data(disk, job)?;
        let all: u64 = ranges.iter().map(|range| range.end - range.start).sum();
        job.all.store(all, Ordering::Relaxed);
        let (walked, disk) = (Arc::clone(job), disk.clone());
        let name = disk.name.clone();
        let walk = Walk {
            ranges,
            next: 0,
            disk,
            group,
            place: None,
            status: Status::Ok,
            job: walked,
        };
        self.engine.add_service(
            ReactorId(0),
            Box::new(move || -> Box<dyn Service> { Box::new(walk) }),
        );
        let copied = job.wait_copied();
        if job.is_cancelled() {
            bail!("it was given up; what was copied stays, and the next one goes on from there");
        }
        ensure!(
            copied.is_ok(),
            "a part of it could not be copied ({copied:?}): see the log"
        );
        let replace = |wanted| self.control().replace_disks(&[(name.clone(), wanted)]);
        replace(Replacement::SettleFlat)?;
        Ok(replace(Replacement::Flat)?)
    }
}

/// The parts of a disk that are no holes, in pieces.
fn ranges_with_data(disk: &Disk, job: &Job) -> Result<Vec<Range<u64>>> {
    let (mut ranges, mut at) = (Vec::<Range<u64>>::new(), 0);
    let size = disk.current_size();
    while at < size && !job.is_cancelled() {
        let mut extents = Vec::new();
        disk.extents(at, size - at, EXTENTS, &mut extents)
            .with_context(|| format!("disk {}: its data cannot be found", disk.name))?;
        for extent in extents {
            if !extent.zero {
                ranges.push(at..at + extent.len);
            }
            at += extent.len;
        }
    }
    Ok(ranges)
}

/// The requests of a job, a few at a time.
struct Walk {
    /// What there is to do, from the one with the number `next` on.
    ranges: Vec<Range<u64>>,
    next: usize,
    disk: Disk,
    group: GroupId,
    place: Option<Use>,
    status: Status,
    job: Arc<Job>,
}

impl Walk {
    fn is_over(&self) -> bool {
        let is_to_end = self.place.as_ref().is_none_or(Use::is_to_end);
        let has_no_more = self.next == self.ranges.len();
        has_no_more || is_to_end || !self.status.is_ok() || self.job.is_cancelled()
    }

    fn submit(&mut self, cx: &mut Cx<'_>) {
        while cx.outstanding() < DEPTH && !self.is_over() {
            let range = &mut self.ranges[self.next];
            let len = PIECE.min(range.end - range.start);
            let bio = Bio {
                op: Op::Read,
                flags: Flags::TASK.with(Flags::NO_MERGE),
                disk: self.disk.id,
                group: self.group,
                offset: range.start,
                len,
                ..Bio::default()
            };
            if cx.submit(self.disk.queue, bio).is_err() {
                return;
            }
            range.start += len;
            self.next += usize::from(range.start == range.end);
        }
    }
}

impl Service for Walk {
    fn start(&mut self, cx: &mut Cx<'_>) {
        self.place = self.disk.users.enter_as_part(cx.waker());
        self.submit(cx);
    }

    fn on_ring(&mut self, _cx: &mut Cx<'_>, _completed: &[Completion]) {}

    fn on_end(&mut self, cx: &mut Cx<'_>, bio: Bio) {
        self.status = self.status.and(bio.status);
        self.job.done.fetch_add(bio.len, Ordering::Relaxed);
        self.submit(cx);
    }

    fn on_room(&mut self, cx: &mut Cx<'_>) {
        self.submit(cx);
    }

    fn drain(&mut self, _cx: &mut Cx<'_>) {
        self.job.cancel();
    }

    fn is_finished(&self) -> bool {
        self.is_over()
    }
}

/// However it came, no request is under way any more.
impl Drop for Walk {
    fn drop(&mut self) {
        if self.next < self.ranges.len() && self.status.is_ok() && !self.job.is_cancelled() {
            self.status = Status::Shutdown;
        }
        // Before the thread goes on: it replaces the disk's image.
        self.place = None;
        self.job.enter(Stage::Copied(self.status));
    }
}

/// The group of all jobs, on each queue.
const GROUP: &str = "/blkmq/jobs";
/// Bytes of a request, and requests at a time.
const PIECE: u64 = 256 << 10;
const DEPTH: u32 = 2;
const EXTENTS: usize = 1024;
