//! The jobs of a daemon: which disks have one, how far each is, and how those that have ended went.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use blkmq_host::device::GivenUp;
use blkmq_host::service::Waker;

/// The jobs, by their disks; of those that have ended, the last one of a disk, and the last [`KEPT`] of all.
#[derive(Debug, Default)]
pub(crate) struct Jobs(Mutex<BTreeMap<String, Arc<Job>>>);

/// What is done to an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// What it lies on is copied into it.
    Flatten,
    /// It is written into what it lies on.
    Commit,
}

impl Kind {
    /// Its name.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Flatten => "flatten",
            Self::Commit => "commit",
        }
    }

    /// What happens to the image, for people.
    fn describe(self) -> &'static str {
        match self {
            Self::Flatten => "it is being made flat",
            Self::Commit => "it is being committed into its base",
        }
    }
}

/// A job.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) kind: Kind,
    /// Bytes of the disk, and those that are done with. Relaxed, as all uses: counts for people.
    pub(super) all: AtomicU64,
    pub(super) done: AtomicU64,
    pub(super) given_up: GivenUp,
    /// Wakes its requests' service, so that it finds out that it is cancelled.
    waker: Mutex<Option<Waker>>,
    /// When and how it ended.
    end: Mutex<Option<(Instant, Result<(), String>)>>,
    ended: Condvar,
}

/// What is told of a job.
pub(crate) struct Report {
    pub(crate) disk: String,
    pub(crate) kind: Kind,
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
            kind: job.kind,
            all: job.all.load(Ordering::Relaxed),
            done: job.done.load(Ordering::Relaxed),
            end: job.lock_end().as_ref().map(|(_, end)| end.clone()),
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

    /// Checks that a disk has no job.
    ///
    /// # Errors
    /// It has one.
    pub(in crate::serve::running) fn check_free(&self, disk: &str) -> Result<()> {
        match self.lock().get(disk).filter(|job| !job.has_ended()) {
            None => Ok(()),
            Some(job) => bail!(
                "disk {disk}: {}: wait for the end, which ctl jobs shows, or give that up by ctl cancel {disk}",
                job.kind.describe()
            ),
        }
    }

    /// Adds a job of a disk that has none.
    ///
    /// # Errors
    /// There are [`RUNNING_MAX`].
    pub(super) fn add(&self, disk: &str, kind: Kind) -> Result<Arc<Job>> {
        let mut jobs = self.lock();
        let running = jobs.values().filter(|job| !job.has_ended()).count();
        ensure!(
            running < RUNNING_MAX,
            "disk {disk}: {running} disks are being made flat or committed, and more cannot be at a time: wait for one of them, see ctl jobs"
        );
        let job = Arc::new(Job::new(kind));
        jobs.insert(disk.to_owned(), Arc::clone(&job));
        let mut ended: Vec<(Instant, String)> = jobs
            .iter()
            .filter_map(|(disk, job)| Some((job.lock_end().as_ref()?.0, disk.clone())))
            .collect();
        ended.sort_unstable();
        let spare = ended.len().saturating_sub(KEPT);
        ended.iter().take(spare).for_each(|(_, disk)| {
            jobs.remove(disk);
        });
        Ok(job)
    }

    /// Removes a disk's job, which has not begun.
    pub(super) fn remove(&self, disk: &str) {
        self.lock().remove(disk);
    }

    /// Gives up the job of a disk, if there is one, and waits until it has ended. Returns whether it has, within `limit`.
    pub(in crate::serve::running) fn end(&self, disk: &str, limit: Duration) -> bool {
        let job = self.lock().get(disk).cloned();
        end_within(job.as_slice(), limit)
    }

    /// The same of all, or of all of a kind.
    pub(in crate::serve::running) fn end_all(&self, kind: Option<Kind>, limit: Duration) -> bool {
        let jobs: Vec<_> = self.lock().values().cloned().collect();
        let is_wanted = |job: &&Arc<Job>| kind.is_none_or(|kind| job.kind == kind);
        let wanted: Vec<_> = jobs.iter().filter(is_wanted).cloned().collect();
        end_within(&wanted, limit)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Job>>> {
        lock(&self.0)
    }
}

fn end_within(jobs: &[Arc<Job>], limit: Duration) -> bool {
    let until = Instant::now() + limit;
    jobs.iter().for_each(|job| job.cancel());
    jobs.iter().all(|job| {
        let left = until.saturating_duration_since(Instant::now());
        let waited = job
            .ended
            .wait_timeout_while(job.lock_end(), left, |end| end.is_none());
        waited.unwrap_or_else(PoisonError::into_inner).0.is_some()
    })
}

impl Job {
    fn new(kind: Kind) -> Self {
        Self {
            kind,
            all: AtomicU64::default(),
            done: AtomicU64::default(),
            given_up: GivenUp::default(),
            waker: Mutex::default(),
            end: Mutex::default(),
            ended: Condvar::default(),
        }
    }

    fn has_ended(&self) -> bool {
        self.lock_end().is_some()
    }

    fn cancel(&self) {
        self.given_up.give_up();
        if let Some(waker) = &*lock(&self.waker) {
            waker.wake();
        }
    }

    pub(super) fn is_cancelled(&self) -> bool {
        self.given_up.is_given_up()
    }

    /// Who has its requests is woken when it is cancelled.
    pub(super) fn is_done_by(&self, waker: Waker) {
        *lock(&self.waker) = Some(waker);
    }

    pub(super) fn end(&self, how: Result<(), String>) {
        *self.lock_end() = Some((Instant::now(), how));
        self.ended.notify_all();
    }

    fn lock_end(&self) -> MutexGuard<'_, Option<(Instant, Result<(), String>)>> {
        lock(&self.end)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Most jobs at a time: each has a thread.
const RUNNING_MAX: usize = 16;
/// Jobs that have ended and are still listed.
const KEPT: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_beyond_the_limit_are_refused_until_one_has_ended() {
        let jobs = Jobs::default();
        let all: Vec<_> = (0..RUNNING_MAX)
            .map(|number| jobs.add(&format!("vm{number}"), Kind::Flatten).unwrap())
            .collect();
        let refused = jobs.add("other", Kind::Commit).unwrap_err().to_string();
        assert!(refused.contains("disk other: 16 disks"), "{refused}");
        assert!(jobs.check_free("vm3").is_err());
        all[3].end(Ok(()));
        jobs.check_free("vm3").unwrap();
        jobs.add("other", Kind::Commit).unwrap();
        jobs.add("another", Kind::Commit).unwrap_err();
    }

    #[test]
    fn jobs_that_have_ended_long_ago_are_forgotten() {
        let jobs = Jobs::default();
        let running = jobs.add("running", Kind::Flatten).unwrap();
        for number in 0..KEPT + 9 {
            jobs.add(&format!("vm{number}"), Kind::Flatten)
                .unwrap()
                .end(Ok(()));
        }
        jobs.add("next", Kind::Commit).unwrap();
        let listed: Vec<String> = jobs.reports().into_iter().map(|report| report.disk).collect();
        assert_eq!(listed.len(), KEPT + 2);
        for (disk, is_there) in [("vm8", false), ("vm9", true), ("running", true), ("next", true)] {
            assert_eq!(listed.iter().any(|other| other == disk), is_there, "{disk}");
        }
        drop(running);
    }

    #[test]
    fn jobs_are_cancelled_and_waited_for_within_one_limit() {
        let jobs = Jobs::default();
        let (one, _other) = (
            jobs.add("one", Kind::Commit).unwrap(),
            jobs.add("other", Kind::Commit).unwrap(),
        );
        assert!(jobs.end("none", Duration::ZERO));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !one.is_cancelled() {
                    std::thread::yield_now();
                }
                one.end(Err("given up".to_owned()));
            });
            assert!(jobs.end("one", Duration::from_secs(60)));
        });
        assert!(jobs.end_all(Some(Kind::Flatten), Duration::ZERO));
        assert!(!jobs.end_all(None, Duration::from_millis(1)));
    }
}
