//! How the requests of a file end: what is counted of failures, what is logged, and the state that is shown.

use std::io;
use std::sync::atomic::Ordering;

use blkmq_core::time::Instant;
use blkmq_host::device::State;
use rustix::io::Errno;

use super::FileDisk;

impl FileDisk {
    /// How its latest requests have ended, and what was found at its path.
    pub(in crate::file) fn state(&self) -> State {
        let of_requests =
            match self.is_failing.load(Ordering::Relaxed) || self.flush_failed.load(Ordering::Relaxed) {
                _ if self.is_truncated() => State::Truncated,
                true if self.is_full.load(Ordering::Relaxed) => State::Full,
                true => State::Failing,
                false => State::Ok,
            };
        of_requests.max(self.state_of_path())
    }

    /// Counts a failed request, and logs it if the one before did not fail, unless too many lines
    /// were written lately.
    pub(crate) fn note_failure(&self, now: Instant, doing: &'static str, offset: u64, len: u64, errno: i32) {
        if errno == Errno::FAULT.raw_os_error() {
            // Memory that a client lent is gone; the file is well, and the client's front door
            // reports it.
            return;
        }
        // Relaxed: a counter and a latch for the log, which order nothing.
        self.errors.fetch_add(1, Ordering::Relaxed);
        let is_full = [Errno::NOSPC, Errno::DQUOT]
            .map(Errno::raw_os_error)
            .contains(&errno);
        self.is_full.store(is_full, Ordering::Relaxed);
        if self.is_failing.swap(true, Ordering::Relaxed) {
            return;
        }
        let Some(withheld) = self.log.take(now) else {
            return;
        };
        let error = match errno {
            0 => io::Error::other("the file ends before the disk does: was it made smaller?"),
            _ => io::Error::from_raw_os_error(errno),
        };
        tracing::error!(
            source = %self.path.display(),
            "file {:?}: {doing} of {len} bytes at {offset} failed: {error}; further failures are counted only{withheld}",
            self.path
        );
    }

    /// Records a request that succeeded.
    #[inline]
    pub(in crate::file) fn note_success(&self, now: Instant) {
        if self.is_failing.load(Ordering::Relaxed) {
            self.note_recovery(now);
        }
    }

    #[cold]
    fn note_recovery(&self, now: Instant) {
        self.is_failing.store(false, Ordering::Relaxed);
        if let Some(withheld) = self.log.take(now) {
            tracing::info!(source = %self.path.display(), "file {:?}: requests succeed again{withheld}", self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::sync::Arc;
    use std::sync::atomic::AtomicU32;

    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Metadata, Subscriber};

    use blkmq_core::time::Nanos;

    use super::super::Backing;
    use super::*;
    use crate::testing::scratch_file;

    /// Counts the lines that would be written.
    #[derive(Clone, Default)]
    struct Lines(Arc<AtomicU32>);

    impl Subscriber for Lines {
        fn enabled(&self, _: &Metadata<'_>) -> bool {
            true
        }
        fn new_span(&self, _: &Attributes<'_>) -> Id {
            Id::from_u64(1)
        }
        fn record(&self, _: &Id, _: &Record<'_>) {}
        fn record_follows_from(&self, _: &Id, _: &Id) {}
        fn event(&self, _: &Event<'_>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
        fn enter(&self, _: &Id) {}
        fn exit(&self, _: &Id) {}
    }

    #[test]
    fn disk_that_fails_and_succeeds_in_turns_does_not_fill_the_log() {
        let path = scratch_file("log", 4096);
        let file = File::open(&*path).unwrap();
        let disk = FileDisk::new(file, path.to_path_buf(), 4096, 512, Backing::Filesystem(1));
        let lines = Lines::default();
        tracing::subscriber::with_default(lines.clone(), || {
            for ms in 0..10_000 {
                let now = Instant(1) + Nanos::from_millis(ms);
                disk.note_failure(now, "read", 0, 512, libc::EIO);
                disk.note_success(now);
            }
        });
        let lines = lines.0.load(Ordering::Relaxed);
        assert_eq!(disk.errors(), 10_000);
        assert!((60..=80).contains(&lines), "{lines} lines in 10 seconds");
    }
}
