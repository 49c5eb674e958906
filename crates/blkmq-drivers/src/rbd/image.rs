//! An open image: its size, which may grow while clients use it, its lock, and the stored ranges. Made
//! here, joined with others by `device`, used by all hardware contexts at once.

use std::borrow::Cow;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use blkmq_core::time::Instant;
use blkmq_host::LogBudget;
use blkmq_host::device::{Extent, State};
use blkmq_host::runner::Runner;

use super::calls::{self, Calls};
use super::config::RbdConfig;
use super::error::RbdError;
use super::sys::RawImage;
use super::{cluster, lock};

/// An open image, which waits for the others of its queue.
pub struct RbdDisk {
    pub(super) image: Arc<Image>,
    /// The pool, as the name of a queue.
    pub(super) queue: String,
}

/// An image that is served.
pub(super) struct Image {
    name: String,
    /// Always there, until this is dropped. Shared: a lookup may continue after the disk is gone.
    raw: Option<Arc<RawImage>>,
    size: AtomicU64,
    pub(super) object_size: u32,
    pub(super) read_only: bool,
    pub(super) is_locked: bool,
    /// How long the cluster may take to answer a control command or a lookup.
    limit: Duration,
    changes: Arc<Changes>,
    /// Queries that the cluster has not answered, including those for which nobody waits any more.
    asked: Arc<Calls>,
    /// The closes of its drive's images, once it has joined one.
    closings: OnceLock<Arc<Calls>>,
    /// Whether the last request failed, so that a failure is logged once, and the budget of log
    /// lines.
    is_failing: AtomicBool,
    /// The error of the latest request, 0 if it succeeded.
    latest_errno: AtomicI32,
    log: LogBudget,
    errors: AtomicU64,
}

/// Receives notifications of changes of an image, and has its size read.
#[derive(Debug, Default)]
pub(super) struct Changes(Mutex<Option<Runner>>);

impl Changes {
    /// The image's size may have changed. For librbd's threads: does not block.
    pub(super) fn tell(&self) {
        if let Some(runner) = &*self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            runner.resized();
        }
    }

    fn set_runner(&self, runner: &Runner) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(runner.clone());
    }
}

impl RbdDisk {
    /// Opens an image, and takes its lock if it is to be written. Blocks for at most `open_timeout`
    /// and `lock_wait`.
    ///
    /// # Errors
    /// Why the image cannot be served.
    pub fn open(config: &RbdConfig) -> Result<Self, RbdError> {
        let waits = if config.lock {
            config.lock_wait
        } else {
            Duration::ZERO
        };
        let limit = config.open_timeout + waits;
        let wanted = config.clone();
        let opened = calls::within(limit, move || open_image(&wanted));
        opened.unwrap_or_else(|| {
            Err(RbdError::Late {
                image: config.image.text.clone(),
                limit,
            })
        })
    }
}

/// Opens an image without a limit of time.
fn open_image(config: &RbdConfig) -> Result<RbdDisk, RbdError> {
    let name = &config.image.text;
    let failed = |action: &'static str, error: io::Error| RbdError::Call {
        image: name.clone(),
        action: action.into(),
        advice: advice(&error, config),
        error,
    };
    let rados = cluster::connect(name, &config.cluster, config.open_timeout)?;
    let read_only = config.is_read_only();
    let opened = rados.open(&config.image, read_only);
    let mut raw = opened.map_err(|(action, error)| failed(action, error))?;
    if config.lock && !read_only {
        lock::take(&raw, name, config.lock_wait)?;
    }
    let changes = Arc::<Changes>::default();
    let watched = raw.watch(Arc::clone(&changes));
    watched.map_err(|error| failed("watch the image", error))?;
    let info = raw.info().map_err(|error| failed("ask for its size", error))?;
    if info.size < 512 {
        return Err(RbdError::Empty { image: name.clone() });
    }
    let queue = format!("rbd-{}-{}", rados.fsid(), config.image.pool);
    let image = Image {
        name: name.clone(),
        raw: Some(Arc::new(raw)),
        size: AtomicU64::new(info.size),
        object_size: u32::try_from(info.object_size).unwrap_or(OBJECT_SIZE),
        read_only,
        is_locked: config.lock && !read_only,
        limit: config.open_timeout,
        changes,
        asked: Arc::default(),
        closings: OnceLock::new(),
        is_failing: AtomicBool::new(false),
        latest_errno: AtomicI32::new(0),
        log: LogBudget::new("it"),
        errors: AtomicU64::new(0),
    };
    Ok(RbdDisk {
        image: Arc::new(image),
        queue,
    })
}

fn advice(error: &io::Error, config: &RbdConfig) -> Cow<'static, str> {
    match error.raw_os_error() {
        Some(libc::ENOENT) => ": there is none of this name; see `rbd ls` and `ceph osd lspools`".into(),
        Some(libc::EPERM | libc::EACCES) => {
            let user = config.cluster.id.as_deref().unwrap_or("admin");
            let pool = &config.image.pool;
            let profile = if config.is_read_only() {
                "rbd-read-only"
            } else {
                "rbd"
            };
            format!(
                ": the user client.{user} may not: it needs mon 'profile rbd' and osd 'profile {profile} pool={pool}'; if the image is \
                 a clone of one in another pool (rbd info names its parent), osd 'profile {profile} pool={pool}, profile \
                 rbd-read-only pool=PARENTS' (ceph auth caps)"
            )
            .into()
        }
        _ => "".into(),
    }
}

impl Image {
    /// Returns its name as it was given.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Returns the size in bytes.
    pub(super) fn size(&self) -> u64 {
        // Relaxed: code that relies on a new size has been told of it.
        self.size.load(Ordering::Relaxed)
    }

    /// Registers `runner` to be notified when the image has changed.
    pub(super) fn set_runner(&self, runner: &Runner) {
        self.changes.set_runner(runner);
    }

    /// Has its close be one of `closings`.
    pub(super) fn join(&self, closings: &Arc<Calls>) {
        let _ = self.closings.set(Arc::clone(closings));
    }

    fn closings(&self) -> Arc<Calls> {
        // Nobody waits for the close of an image that has joined no drive.
        self.closings.get().cloned().unwrap_or_default()
    }

    #[inline]
    pub(super) fn raw(&self) -> &Arc<RawImage> {
        self.raw.as_ref().expect("there until it is dropped")
    }

    /// Reads the present size, after setting it to `wanted` bytes if that is asked for. Blocks for
    /// at most `open_timeout`.
    ///
    /// # Errors
    /// Ceph's error, or Ceph did not answer.
    pub(super) fn resize(&self, wanted: Option<u64>) -> io::Result<u64> {
        let size = self.ask(move |raw| {
            let size = raw.size()?;
            match wanted {
                Some(wanted) if wanted > size => raw.resize(wanted).map(|()| wanted),
                _ => Ok(size),
            }
        })?;
        if size > self.size() {
            self.size.store(size, Ordering::Relaxed);
        }
        Ok(size)
    }

    /// Appends the image's data and holes; see [`blkmq_host::device::Allocation`]. The unit is
    /// whole objects: what is stored within an object would cost a query to its OSD. Blocks for at
    /// most `open_timeout`.
    pub(super) fn extents(&self, offset: u64, len: u64, max: usize, out: &mut Vec<Extent>) -> io::Result<()> {
        let end = offset.saturating_add(len.min(LOOKUP_BYTES_MAX)).min(self.size());
        if offset >= end || max == 0 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let found = self.ask(move |raw| {
            let mut map = Map::new(offset, max);
            raw.for_each_stored(offset, end - offset, |at, len| map.add_stored(at, len, end))?;
            Ok(map.finish(end))
        })?;
        out.extend(found);
        Ok(())
    }

    /// Queries the cluster once it has answered the previous query: a cluster that hangs blocks one
    /// thread for each image, however often it is queried.
    fn ask<T: Send + 'static>(
        &self,
        question: impl FnOnce(&RawImage) -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let late = || io::Error::new(io::ErrorKind::TimedOut, "the cluster does not answer");
        let Some(call) = self.asked.begin_alone(self.limit) else {
            return Err(late());
        };
        let (raw, closings) = (Arc::clone(self.raw()), self.closings());
        let answer = calls::within(self.limit, move || {
            let answer = question(&raw);
            close(raw, &closings);
            drop(call);
            answer
        });
        answer.unwrap_or_else(|| Err(late()))
    }

    /// Returns whether the cluster has not answered a query in time, nor since.
    pub(super) fn is_silent(&self) -> bool {
        self.asked.are_late(self.limit)
    }

    /// How its latest requests have ended.
    pub(super) fn state(&self) -> State {
        match self.latest_errno.load(Ordering::Relaxed) {
            _ if self.is_silent() => State::Gone,
            libc::ESHUTDOWN => State::LockLost,
            libc::ENOSPC | libc::EDQUOT => State::Full,
            _ if self.is_failing.load(Ordering::Relaxed) => State::Failing,
            _ => State::Ok,
        }
    }

    /// Counts a failed request, and logs it if the one before did not fail, unless too many lines
    /// were written lately.
    #[cold]
    pub(super) fn note_failure(&self, now: Instant, doing: &str, offset: u64, len: u64, errno: i32) {
        // Relaxed: a counter and a latch for the log, which order nothing.
        self.errors.fetch_add(1, Ordering::Relaxed);
        self.latest_errno.store(errno, Ordering::Relaxed);
        if self.is_failing.swap(true, Ordering::Relaxed) {
            return;
        }
        let Some(withheld) = self.log.take(now) else {
            return;
        };
        let error = match errno {
            0 => io::Error::other("the image ends before the disk does: was it made smaller?"),
            libc::ESHUTDOWN => io::Error::other(
                "the cluster has barred this client: another one has taken the image's lock; remove the disk and add it again",
            ),
            _ => io::Error::from_raw_os_error(errno),
        };
        tracing::error!(
            "rbd {}: {doing} of {len} bytes at {offset} failed: {error}; further failures are counted only{withheld}",
            self.name
        );
    }

    /// Records a request that succeeded.
    #[inline]
    pub(super) fn note_success(&self, now: Instant) {
        if self.is_failing.load(Ordering::Relaxed) {
            self.note_recovery(now);
        }
    }

    #[cold]
    fn note_recovery(&self, now: Instant) {
        self.is_failing.store(false, Ordering::Relaxed);
        self.latest_errno.store(0, Ordering::Relaxed);
        if let Some(withheld) = self.log.take(now) {
            tracing::info!("rbd {}: requests succeed again{withheld}", self.name);
        }
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        if let Some(raw) = self.raw.take() {
            close(raw, &self.closings());
        }
    }
}

/// Releases an image. The last user closes it, on a thread of its own, since the caller may be a
/// reactor.
fn close(raw: Arc<RawImage>, closings: &Arc<Calls>) {
    if let Some(raw) = Arc::into_inner(raw) {
        calls::drop_aside(raw, closings);
    }
}

/// The stored parts of a range, as they are found.
struct Map {
    extents: Vec<Extent>,
    at: u64,
    max: usize,
}

impl Map {
    fn new(at: u64, max: usize) -> Self {
        Self {
            extents: Vec::new(),
            at,
            max,
        }
    }

    /// Records bytes that are stored. Returns whether there is room for more.
    fn add_stored(&mut self, offset: u64, len: u64, end: u64) -> bool {
        let (from, to) = (
            offset.clamp(self.at, end),
            offset.saturating_add(len).clamp(self.at, end),
        );
        if from > self.at {
            self.push(Extent::hole(from - self.at));
        }
        if to > from {
            self.push(Extent::data(to - from));
        }
        self.extents.len() < self.max
    }

    /// The extents found, and a hole behind them if all of the range was visited.
    fn finish(mut self, end: u64) -> Vec<Extent> {
        if self.extents.len() < self.max && self.at < end {
            self.push(Extent::hole(end - self.at));
        }
        self.extents
    }

    /// Appends an extent, if there is room.
    fn push(&mut self, extent: Extent) {
        let has_room = self.extents.len() < self.max;
        match self.extents.last_mut() {
            Some(last) if last.hole == extent.hole => last.len += extent.len,
            _ if has_room => self.extents.push(extent),
            _ => return,
        }
        self.at += extent.len;
    }
}

/// The default object size, in bytes.
const OBJECT_SIZE: u32 = 4 << 20;
/// The longest range whose objects one query visits, in bytes.
const LOOKUP_BYTES_MAX: u64 = 4 << 30;

#[cfg(test)]
mod tests {
    use super::*;

    fn map(max: usize, stored: &[(u64, u64)], range: std::ops::Range<u64>) -> Vec<Extent> {
        let mut map = Map::new(range.start, max);
        let _ = stored.iter().all(|&(at, len)| map.add_stored(at, len, range.end));
        map.finish(range.end)
    }

    #[test]
    fn objects_that_are_not_stored_are_holes_and_neighbours_one_extent() {
        let (data, hole) = (Extent::data, Extent::hole);
        assert_eq!(map(9, &[], 10..30), [hole(20)]);
        assert_eq!(map(9, &[(10, 5), (15, 5)], 10..30), [data(10), hole(10)]);
        assert_eq!(map(9, &[(0, 12), (28, 99)], 10..30), [data(2), hole(16), data(2)]);
        assert_eq!(map(2, &[(12, 2), (20, 2)], 10..30), [hole(2), data(2)]);
        assert_eq!(map(1, &[(12, 2), (20, 2)], 10..30), [hole(2)]);
    }
}
