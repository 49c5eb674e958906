//! The threads that work for images: what the cached map does not know, allocation, copies, decompression, and
//! flushes of tables. `hctx` gives them jobs and finds the ends in its mailbox; `image` has the work itself.
//!
//! Images take turns, and each has a few threads at most, so an image whose drive hangs leaves the others theirs.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use blkmq_core::bio::{Flags, Lent, Op, Status};
use blkmq_core::ids::{DiskId, HctxId};
use blkmq_host::runner::Runner;
use blkmq_sync::mpsc::Sender;

use super::image::Image;
use crate::file::part::{Part, Pieces};

/// Work for an image.
pub(super) struct Job {
    pub(super) image: Arc<Image>,
    pub(super) disk: DiskId,
    pub(super) op: Op,
    pub(super) flags: Flags,
    /// First byte on the disk.
    pub(super) offset: u64,
    /// Bytes.
    pub(super) len: u64,
    /// The memory of its request, of which `skip` bytes are not its own.
    pub(super) pieces: Vec<Lent>,
    pub(super) skip: u64,
    /// Only find out where its range is.
    pub(super) only_map: bool,
    /// An elevator has given it out.
    pub(super) is_ordered: bool,
    /// The tag of its request.
    pub(super) number: u32,
    pub(super) reply: Arc<Reply>,
}

impl Job {
    /// It as a request, or a part of one.
    pub(super) fn part(&self) -> Part<'_> {
        Part {
            op: self.op,
            flags: self.flags,
            disk: self.disk,
            offset: self.offset,
            len: self.len,
            is_ordered: self.is_ordered,
            skip: self.skip,
            memory: Pieces::List(&self.pieces),
        }
    }
}

/// How a job went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// Its range is in the cached map now, unless that is too small.
    Mapped,
    /// It is done.
    Done(Status),
}

/// The end of a job.
pub(super) type End = (Box<Job>, Outcome);

/// The mailbox of a hardware context.
pub(super) struct Reply {
    pub(super) sender: Sender<End>,
    pub(super) runner: Option<Runner>,
    pub(super) hctx: HctxId,
}

/// The jobs of one image that wait.
#[derive(Default)]
pub(super) struct Lane(Mutex<Waiting>);

#[derive(Default)]
struct Waiting {
    jobs: VecDeque<Box<Job>>,
    /// How often the image is in the pool's list, or has a thread.
    turns: usize,
}

/// Gives a job to the threads.
pub(super) fn submit(job: Box<Job>) {
    let image = Arc::clone(&job.image);
    let mut waiting = lock(&image.lane().0);
    waiting.jobs.push_back(job);
    if waiting.turns == TURNS_MAX {
        return;
    }
    waiting.turns += 1;
    drop(waiting);
    POOL.add(image);
}

struct Pool {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// Images with jobs, in turn.
    ready: VecDeque<Arc<Image>>,
    idle: usize,
    threads: usize,
}

static POOL: Pool = Pool {
    state: Mutex::new(State {
        ready: VecDeque::new(),
        idle: 0,
        threads: 0,
    }),
    changed: Condvar::new(),
};

impl Pool {
    fn add(&'static self, image: Arc<Image>) {
        let mut state = lock(&self.state);
        state.ready.push_back(image);
        if state.ready.len() <= state.idle || state.threads == THREADS_MAX {
            drop(state);
            self.changed.notify_one();
            return;
        }
        state.threads += 1;
        drop(state);
        let spawned = thread::Builder::new()
            .name("blkmq-image".to_owned())
            .spawn(|| self.work());
        if let Err(error) = spawned {
            let mut state = lock(&self.state);
            state.threads -= 1;
            if state.threads == 0 {
                // Nobody would do it: requests of images end with an error until there are threads again.
                let left = std::mem::take(&mut state.ready);
                drop(state);
                tracing::error!("images: there is no thread for their work: {error}");
                left.iter().for_each(|image| refuse(image));
            }
        }
    }

    /// What a thread does until there has been nothing for a while.
    fn work(&self) {
        while let Some(image) = self.next() {
            let job = lock(&image.lane().0).jobs.pop_front();
            let done = job.map(|job| {
                let outcome = image.run(&job);
                (job, outcome)
            });
            // Before the end is known: afterwards the image may be closed, and its lock is to be free then.
            self.end_turn(image);
            if let Some((job, outcome)) = done {
                end(job, outcome);
            }
        }
    }

    /// Puts an image behind the others, if it has more jobs.
    fn end_turn(&self, image: Arc<Image>) {
        let mut waiting = lock(&image.lane().0);
        if waiting.jobs.is_empty() {
            waiting.turns -= 1;
            return;
        }
        drop(waiting);
        lock(&self.state).ready.push_back(image);
    }

    fn next(&self) -> Option<Arc<Image>> {
        let mut state = lock(&self.state);
        loop {
            if let Some(image) = state.ready.pop_front() {
                return Some(image);
            }
            state.idle += 1;
            let (woken, waited) = self
                .changed
                .wait_timeout(state, IDLE_MAX)
                .unwrap_or_else(PoisonError::into_inner);
            state = woken;
            state.idle -= 1;
            if waited.timed_out() && state.ready.is_empty() {
                state.threads -= 1;
                return None;
            }
        }
    }
}

fn refuse(image: &Image) {
    let mut waiting = lock(&image.lane().0);
    waiting.turns -= 1;
    let jobs = match waiting.turns {
        0 => std::mem::take(&mut waiting.jobs),
        _ => VecDeque::new(),
    };
    drop(waiting);
    jobs.into_iter()
        .for_each(|job| end(job, Outcome::Done(Status::NoMemory)));
}

fn end(job: Box<Job>, outcome: Outcome) {
    let reply = Arc::clone(&job.reply);
    let pushed = reply.sender.push((job, outcome));
    debug_assert!(pushed.is_ok(), "a request has one job at a time");
    if let Some(runner) = &reply.runner {
        runner.run(reply.hctx);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Most threads of all images. They exist only while there is work.
const THREADS_MAX: usize = 32;
/// Most threads of one image.
const TURNS_MAX: usize = 4;
const IDLE_MAX: Duration = Duration::from_secs(5);
