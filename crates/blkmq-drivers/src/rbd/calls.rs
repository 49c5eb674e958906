//! Calls of librbd that may block: each runs on a thread of its own, for which callers wait only for a
//! limited time. A cluster that hangs blocks that thread, and nobody else.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

/// Runs `call` on a thread of its own. `None` if it takes longer than `limit`: its result is
/// dropped there when it comes.
pub(super) fn within<T: Send + 'static>(
    limit: Duration,
    call: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (sender, receiver) = mpsc::sync_channel(1);
    let thread = thread::Builder::new().name("blkmq-rbd".to_owned());
    let work = move || {
        // The caller may have given up.
        let _ = sender.send(call());
        do_left();
    };
    thread.spawn(work).ok()?;
    receiver.recv_timeout(limit).ok()
}

/// Drops `value` on a thread of its own, since the drop may block. It is one of `closings` until then.
pub(super) fn drop_aside<T: Send + 'static>(value: T, closings: &Arc<Calls>) {
    let closing = closings.begin();
    let work = move || {
        drop(value);
        drop(closing);
    };
    left().push(Box::new(work));
    let thread = thread::Builder::new().name("blkmq-rbd".to_owned());
    if let Err(error) = thread.spawn(do_left) {
        tracing::warn!(
            "rbd: there is no thread to close an image: {error}; it is closed after the next call of Ceph"
        );
    }
}

/// Does what waits for a thread.
fn do_left() {
    loop {
        // Not locked during the work, which may block.
        let Some(work) = left().pop() else { return };
        work();
    }
}

fn left() -> MutexGuard<'static, Vec<Work>> {
    LEFT.lock().unwrap_or_else(PoisonError::into_inner)
}

type Work = Box<dyn FnOnce() + Send>;

/// Work for which no thread could be made yet.
static LEFT: Mutex<Vec<Work>> = Mutex::new(Vec::new());

/// Calls that have begun and not ended, whether or not anybody waits for them.
#[derive(Debug, Default)]
pub(super) struct Calls {
    count: Mutex<usize>,
    changed: Condvar,
    /// When the last call began that is alone.
    begun: Mutex<Option<Instant>>,
}

impl Calls {
    fn begin(self: &Arc<Self>) -> Call {
        *self.count.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        Call(Arc::clone(self))
    }

    fn end(&self) {
        *self.count.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.changed.notify_all();
    }

    /// Waits until no call is under way, at most `limit`. Returns whether that is so.
    pub(super) fn wait_for_none(&self, limit: Duration) -> bool {
        self.lock_when_none(limit).is_some()
    }

    /// Begins a call once no other is under way, at most `limit` from now.
    pub(super) fn begin_alone(self: &Arc<Self>, limit: Duration) -> Option<Call> {
        let mut count = self.lock_when_none(limit)?;
        *count += 1;
        *self.begun.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        Some(Call(Arc::clone(self)))
    }

    /// Returns whether a call by [`Calls::begin_alone`] is under way for longer than `limit`.
    pub(super) fn are_late(&self, limit: Duration) -> bool {
        let count = self.count.lock().unwrap_or_else(PoisonError::into_inner);
        let begun = self.begun.lock().unwrap_or_else(PoisonError::into_inner);
        *count > 0 && begun.is_some_and(|begun| begun.elapsed() >= limit)
    }

    fn lock_when_none(&self, limit: Duration) -> Option<MutexGuard<'_, usize>> {
        let end = Instant::now() + limit;
        let mut count = self.count.lock().unwrap_or_else(PoisonError::into_inner);
        while *count > 0 {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            let waited = self.changed.wait_timeout(count, left);
            count = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        Some(count)
    }
}

/// A call among others, until this is dropped.
pub(super) struct Call(Arc<Calls>);

impl Drop for Call {
    fn drop(&mut self) {
        self.0.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn call_that_hangs_is_given_up_and_its_result_dropped_where_it_comes() {
        struct Told(mpsc::Sender<Option<String>>);
        impl Drop for Told {
            fn drop(&mut self) {
                let name = thread::current().name().map(str::to_owned);
                let _ = self.0.send(name);
            }
        }
        let (goes_on, hangs) = mpsc::channel::<()>();
        let (told, tells) = mpsc::channel();
        let call = move || {
            let _ = hangs.recv();
            Told(told)
        };
        assert!(within(Duration::from_millis(20), call).is_none());
        drop(goes_on);
        let dropped_on = tells.recv_timeout(Duration::from_secs(10)).unwrap();
        assert_eq!(dropped_on.as_deref(), Some("blkmq-rbd"));
        assert_eq!(within(Duration::from_secs(10), || 7), Some(7));
    }

    #[test]
    fn close_that_hangs_is_waited_for_by_its_own_drive_alone() {
        struct Image(mpsc::Receiver<()>);
        impl Drop for Image {
            fn drop(&mut self) {
                let _ = self.0.recv();
            }
        }
        let drives = [Arc::<Calls>::default(), Arc::default()];
        let (goes_on, hangs) = mpsc::channel::<()>();
        drop_aside(Image(hangs), &drives[0]);
        assert!(!drives[0].wait_for_none(Duration::from_millis(20)));
        drop_aside((), &drives[1]);
        assert!(drives[1].wait_for_none(Duration::from_secs(10)));
        drop(goes_on);
        assert!(drives[0].wait_for_none(Duration::from_secs(10)));
    }

    #[test]
    fn close_without_a_thread_is_done_after_the_next_call() {
        let (told, tells) = mpsc::channel();
        // As if no thread could be made for it.
        left().push(Box::new(move || drop(told)));
        assert_eq!(within(Duration::from_secs(10), || 7), Some(7));
        let dropped = tells.recv_timeout(Duration::from_secs(10));
        assert_eq!(dropped, Err::<(), _>(mpsc::RecvTimeoutError::Disconnected));
    }

    #[test]
    fn call_that_nobody_waits_for_any_more_is_waited_for_by_the_next() {
        let calls = Arc::<Calls>::default();
        let (goes_on, hangs) = mpsc::channel::<()>();
        let call = calls.begin_alone(Duration::ZERO).expect("there is none");
        let given_up = within(Duration::from_millis(20), move || {
            let _ = hangs.recv();
            drop(call);
        });
        assert!(given_up.is_none());
        assert!(!calls.wait_for_none(Duration::from_millis(20)));
        assert!(calls.are_late(Duration::from_millis(20)));
        assert!(!calls.are_late(Duration::from_secs(3600)));
        drop(goes_on);
        assert!(calls.wait_for_none(Duration::from_secs(10)));
        assert!(!calls.are_late(Duration::ZERO));
    }
}
