//! The threads of the process that do for reactors what may block: one for each kind of work,
//! made when it is first needed. `fuse` unmounts by one, and `vhost_user` unmaps memory.

use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

/// A thread that does the work that is sent to it.
pub(crate) struct Worker<T: 'static> {
    sender: OnceLock<SyncSender<T>>,
    spawn: fn() -> Option<SyncSender<T>>,
}

impl<T: Send> Worker<T> {
    /// A thread that `spawn` makes. `None` from it means that there can be none at the moment.
    pub(crate) const fn new(spawn: fn() -> Option<SyncSender<T>>) -> Self {
        Self {
            sender: OnceLock::new(),
            spawn,
        }
    }

    /// The way to the thread, which is made if there is none. `None` if it cannot be made now: the
    /// next call tries again.
    pub(crate) fn get(&self) -> Option<&SyncSender<T>> {
        if self.sender.get().is_none()
            && let Some(sender) = (self.spawn)()
        {
            // If another call was faster, this sender goes, and its thread ends.
            let _ = self.sender.set(sender);
        }
        self.sender.get()
    }
}

/// Starts a thread of that name, to which at most `waiting_max` pieces of work can be sent before
/// it takes them. `None` if the system refuses.
pub(crate) fn spawn<T: Send + 'static>(
    name: &str,
    waiting_max: usize,
    serve: fn(&Receiver<T>),
) -> Option<SyncSender<T>> {
    let (sender, receiver) = sync_channel(waiting_max);
    let thread = thread::Builder::new().name(name.to_owned());
    thread.spawn(move || serve(&receiver)).ok().map(|_| sender)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[test]
    fn thread_that_could_not_be_made_is_made_by_a_later_call() {
        static TRIES: AtomicU32 = AtomicU32::new(0);
        let worker = Worker::<SyncSender<u32>>::new(|| match TRIES.fetch_add(1, Ordering::Relaxed) {
            0 | 1 => None,
            _ => spawn("test", 1, |answers| {
                answers.iter().for_each(|answer| answer.send(7).unwrap());
            }),
        });
        assert!(worker.get().is_none() && worker.get().is_none());
        let (answer, answered) = sync_channel(1);
        worker.get().unwrap().send(answer).unwrap();
        assert_eq!(answered.recv(), Ok(7));
        worker.get().unwrap();
        assert_eq!(TRIES.load(Ordering::Relaxed), 3, "one thread is enough");
    }
}
