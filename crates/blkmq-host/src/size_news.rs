//! Decides how it becomes known that a disk may be of another size than it was: a device that hears so tells, from any thread, and
//! whoever resizes disks waits for it. Who tells is `runner`'s holder.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Says that disks are to be looked at. However often that is told before somebody looks, it is one look.
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
    /// Has whoever waits look. Does not block.
    pub(crate) fn tell(&self) {
        self.lock().is_new = true;
        self.changed.notify_all();
    }

    /// Waits until a disk may be of another size. False if nobody is to look any more.
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
    fn what_is_told_twice_is_one_look_and_the_end_is_none() {
        let news = SizeNews::default();
        news.tell();
        news.tell();
        assert!(news.wait());
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| news.wait());
            news.close();
            assert!(!waits.join().unwrap());
        });
        assert!(!news.wait());
    }
}
