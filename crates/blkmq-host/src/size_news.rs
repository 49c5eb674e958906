//! The news that a disk may have a new size: a device reports it, from any thread, and the thread that
//! resizes disks waits for it. The device reports through its `runner`.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// A flag that disks must be checked. Several reports before a check result in one check.
#[derive(Debug, Default)]
pub struct SizeNews {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    is_new: bool,
    is_closed: bool,
}

impl SizeNews {
    /// Makes the waiting thread check. Does not block.
    pub(crate) fn notify(&self) {
        self.lock().is_new = true;
        self.changed.notify_all();
    }

    /// Waits until a disk may have a new size. Returns false if no more checks are needed.
    pub fn wait(&self) -> bool {
        let mut state = self.lock();
        loop {
            if state.is_closed {
                return false;
            }
            if std::mem::take(&mut state.is_new) {
                return true;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Ends all waiting.
    pub fn close(&self) {
        self.lock().is_closed = true;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn news_sent_twice_is_one_look_and_the_end_is_none() {
        let news = SizeNews::default();
        news.notify();
        news.notify();
        assert!(news.wait());
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| news.wait());
            news.close();
            assert!(!waits.join().unwrap());
        });
        assert!(!news.wait());
    }
}
