//! The worker thread for requests that take a detour, as in Linux' request-based device mapper of old: it
//! is woken, issues the request (or returns its name), and makes the reactor that owns the context
//! continue. One thread for a drive, as one kernel worker ran its queues; it is started at the first
//! detour, and sleeps without a timer while idle.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::{JoinHandle, Thread};

use blkmq_core::driver::{Done, Issued};
use blkmq_core::ids::{HctxId, REACTORS_MAX};
use blkmq_core::mapper::multipath::{Detour, Job};
use blkmq_host::runner::Runner;
use blkmq_host::threads;
use blkmq_sync::mpsc::{self, Receiver, Sender};

use super::lowers::Lowers;
use super::opener::Links;

/// The source of a drive's worker: no thread until one is needed.
#[derive(Default)]
pub(super) struct Workshop {
    pub(super) runner: OnceLock<Runner>,
    /// `None` before one is needed, and while there can be no thread. Held for as long as a thread takes to start.
    worker: Mutex<Option<Worker>>,
}

/// The worker of a drive. Ends with it.
struct Worker {
    queue: Arc<WorkQueue>,
    thread: JoinHandle<()>,
}

/// What the reactors and the worker share.
struct WorkQueue {
    tasks: Sender<Task>,
    /// Contexts that are to be run and whose task is under way: a run is requested once.
    runs: [AtomicBool; REACTORS_MAX],
    backs: Vec<Back>,
    thread: OnceLock<Thread>,
    is_over: AtomicBool,
}

/// The way back to one context. The receiver is with the context while that is open.
struct Back {
    sender: Sender<Job>,
    receiver: Mutex<Option<Receiver<Job>>>,
}

struct Task {
    hctx: HctxId,
    job: Job,
}

/// One context's side of the worker.
struct Side {
    hctx: HctxId,
    queue: Arc<WorkQueue>,
    /// Always there until dropped.
    receiver: Option<Receiver<Job>>,
}

impl Workshop {
    /// Opens a context's side of the worker, which is started for the first one. `None` if the
    /// drive is not in an engine, whose reactors would have to be run, or no thread can be started now.
    pub(super) fn open(
        &self,
        links: &Arc<Links>,
        hctx: HctxId,
        hctxs: u16,
        depth: u32,
    ) -> Option<Box<dyn Detour>> {
        let runner = self.runner.get()?;
        let mut worker = lock(&self.worker);
        if worker.is_none() {
            let hctxs = usize::from(hctxs).min(REACTORS_MAX);
            *worker = Worker::start(links, runner, hctxs, depth as usize);
        }
        let queue = Arc::clone(&worker.as_ref()?.queue);
        drop(worker);
        let receiver = lock(&queue.backs.get(hctx.index())?.receiver).take()?;
        Some(Box::new(Side {
            hctx,
            queue,
            receiver: Some(receiver),
        }))
    }
}

impl Worker {
    /// Starts the thread. `None` if there can be none now.
    fn start(links: &Arc<Links>, runner: &Runner, hctxs: usize, depth: usize) -> Option<Self> {
        // For each context: every request once, and one run.
        let (tasks, receiver) = mpsc::channel(hctxs * (depth + 1));
        let back = || {
            let (sender, receiver) = mpsc::channel(depth);
            Back {
                sender,
                receiver: Mutex::new(Some(receiver)),
            }
        };
        let queue = Arc::new(WorkQueue {
            tasks,
            runs: [const { AtomicBool::new(false) }; REACTORS_MAX],
            backs: (0..hctxs).map(|_| back()).collect(),
            thread: OnceLock::new(),
            is_over: AtomicBool::new(false),
        });
        match spawn(Arc::clone(&queue), Arc::clone(links), runner.clone(), receiver) {
            Ok(thread) => {
                // Set before anybody can send: no task is without a thread to wake.
                _ = queue.thread.set(thread.thread().clone());
                Some(Self { queue, thread })
            }
            Err(error) => {
                tracing::warn!("multipath: no worker thread, so nothing takes a detour: {error}");
                None
            }
        }
    }
}

impl Drop for Workshop {
    fn drop(&mut self) {
        let Some(worker) = lock(&self.worker).take() else {
            return;
        };
        worker.queue.is_over.store(true, Ordering::Release);
        worker.thread.thread().unpark();
        // Not joined: the worker itself may drop the drive, with the last reference to the engine.
        // It uses only the queue, blocks only in `park`, and ends by itself.
    }
}

fn spawn(
    queue: Arc<WorkQueue>,
    links: Arc<Links>,
    runner: Runner,
    mut tasks: Receiver<Task>,
) -> io::Result<JoinHandle<()>> {
    threads::spawn("blkmq-mpath", move || {
        let mut lowers = Lowers::new(links);
        while !queue.is_over.load(Ordering::Acquire) {
            let mut woken = 0u128;
            while let Some(Task { hctx, job }) = tasks.pop() {
                if let Some(back) = queue.carry_out(hctx, job, &mut lowers) {
                    queue.give_back(hctx, back);
                }
                woken |= 1 << hctx.0;
            }
            lowers.commit();
            lowers.reap(|hctx, end| {
                queue.give_back(hctx, Job::Complete(end));
                woken |= 1 << hctx.0;
            });
            while woken != 0 {
                runner.run(HctxId(woken.trailing_zeros() as u16));
                woken &= woken - 1;
            }
            // A task that was pushed meanwhile has left its token: this returns at once.
            lowers.wait();
        }
    })
}

impl WorkQueue {
    /// Executes the task of a context, and returns the answer for the context, if any.
    fn carry_out(&self, hctx: HctxId, job: Job, lowers: &mut Lowers) -> Option<Job> {
        match job {
            Job::Run => {
                // Before the run: a request from here on is a new one.
                self.runs[hctx.index()].store(false, Ordering::SeqCst);
                None
            }
            Job::Issue(job) => match lowers.issue(hctx, &job) {
                Issued::Queued => None,
                Issued::Done(status) => Some(Job::Complete(Done {
                    cookie: job.cookie,
                    status,
                })),
                Issued::Resource | Issued::DeviceResource => Some(Job::Insert(job.cookie)),
            },
            job => Some(job),
        }
    }

    fn give_back(&self, hctx: HctxId, job: Job) {
        let sent = self.backs[hctx.index()].sender.push(job);
        assert!(sent.is_ok(), "a way back shorter than the tags there are");
    }
}

impl Detour for Side {
    fn send(&mut self, job: Job) {
        if matches!(job, Job::Run) && self.queue.runs[self.hctx.index()].swap(true, Ordering::SeqCst) {
            return;
        }
        let hctx = self.hctx;
        let sent = self.queue.tasks.push(Task { hctx, job });
        assert!(sent.is_ok(), "a list of tasks shorter than the tags there are");
        if let Some(thread) = self.queue.thread.get() {
            thread.unpark();
        }
    }

    fn take(&mut self) -> Option<Job> {
        self.receiver.as_mut()?.pop()
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        *lock(&self.queue.backs[self.hctx.index()].receiver) = self.receiver.take();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
