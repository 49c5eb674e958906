//! The set-up of these tests: a multipath queue of one reactor in virtual time, on paths whose speed and
//! state the tests set.

#![allow(unreachable_pub)]

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use blkmq_core::bio::{Bio, Op, Status};
use blkmq_core::driver::{Done, HctxDriver, Issued, TimedOut};
use blkmq_core::ids::{Cookie, HctxId};
use blkmq_core::local::LocalQueue;
use blkmq_core::mapper::multipath::{
    ByWorker, Config, Detour, Job, Multipath, MultipathHctx, Opener, PathId, PathSpec, PathState,
};
use blkmq_core::queue::{DiskConfig, Effects, Queue, QueueConfig, TagMode};
use blkmq_core::request::Request;
use blkmq_core::time::{Instant, Nanos};

/// The model of a path: it serves one request at a time, each for the same time.
#[derive(Debug)]
pub struct Model {
    pub service: Nanos,
    /// The status of its requests, and of writes if they are well.
    pub status: Status,
    pub write_status: Status,
    /// With this many requests in flight it answers that it is busy.
    pub slots: usize,
    free_at: Instant,
    under_way: VecDeque<(Cookie, Instant, Instant, Op)>,
    /// How long each request was at the path.
    pub times: Vec<Nanos>,
    pub issued: u64,
}

pub struct Path(Rc<RefCell<Model>>);

impl HctxDriver for Path {
    fn issue(&mut self, rq: &Request, cookie: Cookie, _last: bool, now: Instant) -> Issued {
        let mut model = self.0.borrow_mut();
        if model.under_way.len() >= model.slots {
            return Issued::DeviceResource;
        }
        model.issued += 1;
        let end = model.free_at.max(now) + model.service;
        model.free_at = end;
        model.under_way.push_back((cookie, now, end, rq.op()));
        Issued::Queued
    }

    fn reap(&mut self, now: Instant, done: &mut Vec<Done>) {
        let mut model = self.0.borrow_mut();
        while let Some(&(cookie, start, end, op)) = model.under_way.front() {
            if end > now {
                break;
            }
            model.under_way.pop_front();
            model.times.push(end.since(start));
            let status = match op {
                Op::Write => model.status.and(model.write_status),
                _ => model.status,
            };
            done.push(Done { cookie, status });
        }
    }

    fn next_event(&self) -> Option<Instant> {
        self.0.borrow().under_way.front().map(|&(_, _, end, _)| end)
    }

    fn timed_out(&mut self, cookie: Cookie) -> TimedOut {
        self.0
            .borrow_mut()
            .under_way
            .retain(|(other, ..)| *other != cookie);
        TimedOut::Ended
    }
}

/// The jobs of a worker, in order; they return when the test runs it.
#[derive(Debug, Default)]
pub struct Worker {
    jobs: VecDeque<Job>,
    pub is_awake: bool,
    /// The status of the requests that it issues by itself; without one it has no room for them.
    pub answer: Option<Status>,
}

struct Side(Rc<RefCell<Worker>>);

impl Detour for Side {
    fn send(&mut self, job: Job) {
        self.0.borrow_mut().jobs.push_back(job);
    }

    fn take(&mut self) -> Option<Job> {
        let mut worker = self.0.borrow_mut();
        let job = worker.is_awake.then(|| worker.jobs.pop_front())??;
        Some(match (job, worker.answer) {
            (Job::Issue(ByWorker { cookie, .. }), Some(status)) => Job::Complete(Done { cookie, status }),
            (Job::Issue(ByWorker { cookie, .. }), None) => Job::Insert(cookie),
            (job, _) => job,
        })
    }
}

struct Paths(Vec<Rc<RefCell<Model>>>, Rc<RefCell<Worker>>);

impl Opener for Paths {
    fn open(&mut self, path: PathId) -> Option<Box<dyn HctxDriver>> {
        Some(Box::new(Path(Rc::clone(&self.0[path.index()]))))
    }

    fn probe(&mut self, _path: PathId) -> Bio {
        Bio {
            op: Op::Read,
            len: 512,
            ..Bio::default()
        }
    }

    fn detour(&mut self) -> Option<Box<dyn Detour>> {
        Some(Box::new(Side(Rc::clone(&self.1))))
    }

    fn keep_memory(&mut self) {}
}

pub struct World {
    pub multipath: Arc<Multipath>,
    pub models: Vec<Rc<RefCell<Model>>>,
    pub worker: Rc<RefCell<Worker>>,
    local: LocalQueue,
    fx: Effects,
    pub now: Instant,
    next: u64,
    pub ended: Vec<Status>,
}

/// Paths a, b, c … of one group.
pub fn paths(count: usize) -> Vec<PathSpec> {
    let path = |name: &str| PathSpec {
        name: name.into(),
        group: 0,
        throughput: 1,
    };
    ["a", "b", "c", "d"][..count]
        .iter()
        .map(|name| path(name))
        .collect()
}

impl World {
    /// A drive over paths with these service times, in microseconds.
    pub fn new(config: Config, services_us: &[u64]) -> Self {
        let model = |us: &u64| Model {
            service: Nanos::from_micros(*us),
            status: Status::Ok,
            write_status: Status::Ok,
            slots: usize::MAX,
            free_at: Instant(0),
            under_way: VecDeque::new(),
            times: Vec::new(),
            issued: 0,
        };
        let models: Vec<_> = services_us
            .iter()
            .map(|us| Rc::new(RefCell::new(model(us))))
            .collect();
        let multipath = Multipath::new(config).unwrap();
        let mut queue = QueueConfig::new("m", 1);
        queue.tags = TagMode::PerHctx(DEPTH);
        queue.merges = false;
        queue.disks.push(DiskConfig {
            name: "m".into(),
            base: 0,
            size: 1 << 40,
            read_only: false,
            logical_block: 512,
        });
        let (_, mut handles) = Queue::new(queue).unwrap();
        let worker = Rc::default();
        let opener = Box::new(Paths(models.clone(), Rc::clone(&worker)));
        let hctx = MultipathHctx::open(&multipath, HctxId(0), DEPTH, opener)
            .ok()
            .unwrap();
        Self {
            multipath,
            models,
            worker,
            local: handles.remove(0).attach(Some(Box::new(hctx))),
            fx: Effects::default(),
            now: Instant(1),
            next: 0,
            ended: Vec::new(),
        }
    }

    /// Submits `count` reads of 4 KiB.
    pub fn submit(&mut self, count: usize) {
        self.submit_of(Op::Read, count);
    }

    /// Submits `count` reads or writes of 4 KiB.
    pub fn submit_of(&mut self, op: Op, count: usize) {
        for _ in 0..count {
            self.next += 1;
            let bio = Bio {
                op,
                offset: self.next * 8192 % (1 << 39),
                len: 4096,
                ..Bio::default()
            };
            self.local.submit(bio, self.now, &mut self.fx).unwrap();
        }
        self.local.unplug(self.now, &mut self.fx);
        self.take_ended();
    }

    /// Runs the queue at the present time.
    pub fn run(&mut self) -> usize {
        self.local.run(self.now, &mut self.fx);
        self.local.check_invariants();
        self.take_ended()
    }

    /// Advances to the next event, but not beyond `until`. Returns how many bios have ended.
    pub fn step(&mut self, until: Instant) -> usize {
        let due = self.local.next_wakeup().unwrap_or(until);
        self.now = self.now.max(due.min(until));
        self.run()
    }

    /// Keeps `depth` requests under way until `until`.
    pub fn load(&mut self, depth: usize, until: Instant) {
        let mut free = depth - self.local.outstanding() as usize;
        while self.now < until {
            self.submit(free);
            free = self.step(until);
        }
    }

    /// Lets time pass without new requests.
    pub fn pass(&mut self, time: Nanos) {
        let until = self.now + time;
        while self.now < until {
            self.step(until);
        }
    }

    pub fn outstanding(&self) -> usize {
        self.local.outstanding() as usize
    }

    /// How many requests each path got since the last call.
    pub fn take_issued(&mut self) -> Vec<u64> {
        let take = |model: &Rc<RefCell<Model>>| std::mem::take(&mut model.borrow_mut().issued);
        self.models.iter().map(take).collect()
    }

    pub fn states(&self) -> Vec<PathState> {
        self.multipath
            .path_stats()
            .iter()
            .map(|path| path.state)
            .collect()
    }

    fn take_ended(&mut self) -> usize {
        let count = self.fx.ended.len();
        self.ended.extend(self.fx.ended.drain(..).map(|bio| bio.status));
        count
    }
}

pub const DEPTH: u32 = 64;
