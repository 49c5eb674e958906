//! An open image: its size, which may grow while clients use it, its lock, and the stored ranges. Made
//! here, joined with others by `device`, used by all hardware contexts at once.

use std::borrow::Cow;
use std::io::{self, Read};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use blkmq_core::time::Instant;
use blkmq_host::LogBudget;
use blkmq_host::device::{Extent, Losses, State};
use blkmq_host::found::open_file;
use blkmq_host::runner::Runner;
use zeroize::Zeroizing;

use super::calls::{self, Calls};
use super::config::RbdConfig;
use super::error::RbdError;
use super::sys::{Rados, RawImage};
use super::{cluster, lock};
use crate::driver::Purpose;

/// An open image, which waits for the others of its queue.
pub struct RbdDisk {
    pub(super) image: Arc<Image>,
    /// The pool, as the name of a queue.
    pub(super) queue: String,
}

/// An image that is served.
pub(super) struct Image {
    /// As it was opened. `open_timeout` also limits how long the cluster may take to answer a control
    /// command or a lookup.
    config: RbdConfig,
    /// Always there, until this is dropped. Shared: a lookup may continue after the disk is gone.
    raw: Option<Arc<RawImage>>,
    /// Its identity in the cluster: another image that gets its name has another one.
    objects: String,
    size: AtomicU64,
    pub(super) object_size: u32,
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
    /// How often it was opened again without what librbd had cached, and how many of these times were reported.
    losses: AtomicU64,
    seen: AtomicU64,
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
    pub fn open(config: &RbdConfig, purpose: Purpose) -> Result<Self, RbdError> {
        let waits = if config.lock && purpose == Purpose::Serve {
            config.lock_wait
        } else {
            Duration::ZERO
        };
        let limit = config.open_timeout + waits;
        let wanted = config.clone();
        let opened = calls::within(limit, move || open_image(&wanted, purpose));
        opened.unwrap_or_else(|| {
            Err(RbdError::Late {
                image: config.image.text.clone(),
                limit,
            })
        })
    }
}

/// Opens an image without a limit of time. If the cluster has barred the connection that other images with its settings
/// have, it gets a new one.
fn open_image(config: &RbdConfig, purpose: Purpose) -> Result<RbdDisk, RbdError> {
    let connect = || cluster::connect(&config.image.text, &config.cluster, config.open_timeout);
    let rados = connect()?;
    match open_over(&rados, config, purpose) {
        Err(error) if error.is_barred() => {
            cluster::leave(&config.cluster, &rados);
            open_over(&connect()?, config, purpose)
        }
        other => other,
    }
}

fn open_over(rados: &Arc<Rados>, config: &RbdConfig, purpose: Purpose) -> Result<RbdDisk, RbdError> {
    let name = &config.image.text;
    let failed = |action: &'static str, error: io::Error| RbdError::Call {
        image: name.clone(),
        action: action.into(),
        advice: advice(&error, config),
        error,
    };
    let opened = rados.open(&config.image, config.is_read_only());
    let mut raw = opened.map_err(|(action, error)| failed(action, error))?;
    if config.is_locked() {
        match purpose {
            Purpose::Serve => lock::take(&raw, name, config.lock_wait)?,
            // A check neither waits for the client that has the lock, nor bars one that has died.
            Purpose::Check => lock::check(&raw, name)?,
        }
    }
    if let (Some(format), Some(key)) = (config.encryption, &config.key) {
        let passphrase = read_key(key).map_err(|error| failed("read the file of its key (key=)", error))?;
        let loaded = raw.load_encryption(format, &passphrase);
        loaded.map_err(|error| RbdError::Call {
            image: name.clone(),
            action: "load its encryption".into(),
            advice: encryption_advice(&error).into(),
            error,
        })?;
    }
    let changes = Arc::<Changes>::default();
    let watched = raw.watch(Arc::clone(&changes));
    watched.map_err(|error| failed("watch the image", error))?;
    let info = raw.info().map_err(|error| failed("ask for its size", error))?;
    // Without the header of an encryption.
    let size = raw.size().map_err(|error| failed("ask for its size", error))?;
    if size < 512 {
        return Err(RbdError::Empty { image: name.clone() });
    }
    let queue = format!("rbd-{}-{}", rados.fsid(), config.image.pool);
    let image = Image {
        config: config.clone(),
        raw: Some(Arc::new(raw)),
        objects: info.objects_prefix(),
        size: AtomicU64::new(size),
        object_size: u32::try_from(info.object_size).unwrap_or(OBJECT_SIZE),
        changes,
        asked: Arc::default(),
        closings: OnceLock::new(),
        is_failing: AtomicBool::new(false),
        latest_errno: AtomicI32::new(0),
        losses: AtomicU64::new(0),
        seen: AtomicU64::new(0),
        log: LogBudget::new("it"),
        errors: AtomicU64::new(0),
    };
    Ok(RbdDisk {
        image: Arc::new(image),
        queue,
    })
}

/// Reads a passphrase, each byte of the file.
fn read_key(path: &Path) -> io::Result<Zeroizing<Vec<u8>>> {
    let file = open_file(path)?;
    // Not moved while it grows, which would leave a copy.
    let mut bytes = Zeroizing::new(Vec::with_capacity(KEY_BYTES_MAX + 1));
    file.take(KEY_BYTES_MAX as u64 + 1).read_to_end(&mut bytes)?;
    match bytes.len() {
        1..=KEY_BYTES_MAX => Ok(bytes),
        0 => Err(io::Error::other("it is empty")),
        _ => Err(io::Error::other(format!(
            "it has more than {KEY_BYTES_MAX} bytes"
        ))),
    }
}

fn encryption_advice(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EPERM) => ": no key slot opens with this key",
        Some(libc::EINVAL | libc::ENOENT) => {
            ": there is no header of this format; `rbd encryption format` writes one into an empty image"
        }
        _ => "",
    }
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
        &self.config.image.text
    }

    pub(super) fn is_read_only(&self) -> bool {
        self.config.is_read_only()
    }

    /// Returns whether it has the exclusive lock, as long as nobody takes that.
    pub(super) fn is_locked(&self) -> bool {
        self.config.is_locked()
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
        if wanted.is_some_and(|wanted| wanted > self.size()) && self.config.encryption.is_some() {
            // librbd takes a size with the header, and would make the image smaller.
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "it is encrypted by librbd: make the image larger by `rbd resize`, whose size has the header, too",
            ));
        }
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
        if self.config.encryption.is_some() {
            // librbd tells of the objects, which begin with the header.
            out.push(Extent::data(end - offset));
            return Ok(());
        }
        let found = self.ask(move |raw| {
            let mut map = Map::new(offset, max);
            raw.for_each_stored(offset, end - offset, |at, len| map.add_stored(at, len, end))?;
            Ok(map.finish(end))
        })?;
        out.extend(found);
        Ok(())
    }

    /// Opens the image over a new connection, if the cluster has barred the one that it has, or the lock is
    /// lost. Returns what has to take its place. Blocks for at most twice `open_timeout`, and `lock_wait`.
    ///
    /// # Errors
    /// Ceph did not answer, the image cannot be opened, or what has its name now is not what was served.
    pub(super) fn reopen(&self) -> io::Result<Option<RbdDisk>> {
        let is_locked = self.is_locked();
        let is_usable = self.ask(move |raw| match is_locked {
            true => raw.has_lock(),
            // Any answer will do.
            false => raw.lock_owner().map(|_| true),
        });
        match is_usable {
            Ok(true) => return Ok(None),
            Err(error) if error.raw_os_error() != Some(libc::ESHUTDOWN) => return Err(error),
            _ => {}
        }
        let new = RbdDisk::open(&self.config, Purpose::Serve).map_err(io::Error::other)?;
        self.check_successor(&new.image)?;
        let cached = u64::from(self.config.caches_writes());
        for (new, old, more) in [
            (&new.image.losses, &self.losses, cached),
            (&new.image.seen, &self.seen, 0),
            (&new.image.errors, &self.errors, 0),
        ] {
            new.store(old.load(Ordering::Relaxed) + more, Ordering::Relaxed);
        }
        tracing::info!(source = %self.name(), "rbd {}: opened again, over a new connection", self.name());
        Ok(Some(new))
    }

    fn check_successor(&self, new: &Self) -> io::Result<()> {
        if new.objects != self.objects {
            return Err(io::Error::other(format!(
                "another image has the name {} now: remove the disk and add it, or restart the daemon",
                self.name()
            )));
        }
        let (old, found) = (self.size(), new.size());
        if found < old {
            return Err(io::Error::other(format!(
                "the image has {found} bytes now, and the disk {old}: make it as large as before"
            )));
        }
        // Growth is noticed by those who ask for it.
        new.size.store(old, Ordering::Relaxed);
        Ok(())
    }

    /// How often writes may have been lost that were only in librbd's cache.
    pub(super) fn losses(&self) -> Losses {
        Losses {
            count: self.losses.load(Ordering::Relaxed),
            seen: self.seen.load(Ordering::Relaxed),
        }
    }

    pub(super) fn mark_losses_seen(&self) {
        self.seen
            .fetch_max(self.losses.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// Queries the cluster once it has answered the previous query: a cluster that hangs blocks one
    /// thread for each image, however often it is queried.
    fn ask<T: Send + 'static>(
        &self,
        question: impl FnOnce(&RawImage) -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let late = || io::Error::new(io::ErrorKind::TimedOut, "the cluster does not answer");
        let limit = self.config.open_timeout;
        let Some(call) = self.asked.begin_alone(limit) else {
            return Err(late());
        };
        let (raw, closings) = (Arc::clone(self.raw()), self.closings());
        let answer = calls::within(limit, move || {
            let answer = question(&raw);
            close(raw, &closings);
            drop(call);
            answer
        });
        answer.unwrap_or_else(|| Err(late()))
    }

    /// Returns whether the cluster has not answered a query in time, nor since.
    pub(super) fn is_silent(&self) -> bool {
        self.asked.are_late(self.config.open_timeout)
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
                "the cluster has barred this client: another one has taken the image's lock; see what that one has written, then run blkmq ctl reopen",
            ),
            _ => io::Error::from_raw_os_error(errno),
        };
        tracing::error!(
            source = %self.name(),
            "rbd {}: {doing} of {len} bytes at {offset} failed: {error}; further failures are counted only{withheld}",
            self.name()
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
            tracing::info!(source = %self.name(), "rbd {}: requests succeed again{withheld}", self.name());
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

/// Largest passphrase, in bytes.
const KEY_BYTES_MAX: usize = 64 << 10;
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
