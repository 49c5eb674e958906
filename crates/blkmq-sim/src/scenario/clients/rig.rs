//! One run in virtual time: the CPUs with their reactors, the clients on them and the disk. Unlike
//! `world`, it has no faults, no control thread and no oracle: it is made for many I/Os.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use blkmq_core::bio::{Bio, Status};
use blkmq_core::driver::{Done, HctxDriver, Issued};
use blkmq_core::ids::{Cookie, HctxId};
use blkmq_core::limits::Limits;
use blkmq_core::local::LocalQueue;
use blkmq_core::queue::{DiskConfig, Dispatch, Effects, Queue, QueueConfig, TagMode};
use blkmq_core::request::Request;
use blkmq_core::sched::ElevatorType;
use blkmq_core::time::{Instant, Nanos};

use super::program::{DISK_BYTES, Log, Program, Want};
use super::{Point, Side};
use crate::cpu::{self, Costs, Gate};
use crate::drive::model::Work;
use crate::drive::seek_queue::SeekQueue;
use crate::events::EventQueue;
use crate::rng::Rng;
use crate::stage;

/// Runs `clients` clients until they have finished.
///
/// # Panics
/// If the clients do not finish: an I/O was lost.
pub fn measure(side: Side, elevator: &'static ElevatorType, clients: usize, seed: u64) -> Point {
    let mut rig = Rig::new(side, elevator, clients, seed);
    for client in 0..clients {
        rig.ask(client);
    }
    while rig.programs.iter().any(|program| !program.is_done()) {
        let (at, event) = rig.events.pop().expect("an I/O of a client was lost");
        rig.now = rig.now.max(at);
        match event {
            Event::Run(cpu, epoch) if rig.cpus[cpu].epoch == epoch => rig.run(cpu),
            Event::Run(..) => {}
            Event::Disk => rig.disk_ended(),
            Event::Ask(client) => rig.ask(client),
        }
    }
    rig.latencies.sort_unstable();
    Point {
        time: rig.now.since(Instant(0)),
        bios: rig.latencies.len() as u64,
        requests: rig.disk.borrow().served,
        busy: rig.busy,
        latencies: rig.latencies,
    }
}

struct Rig {
    now: Instant,
    cpus: Vec<Cpu>,
    programs: Vec<Program>,
    log: Log,
    disk: Rc<RefCell<Disk>>,
    events: EventQueue<Event>,
    costs: Costs,
    gate: Gate,
    busy: Nanos,
    latencies: Vec<u64>,
    /// A hand-over to another CPU takes no time.
    hands_over_free: bool,
}

#[derive(Clone, Copy, Debug)]
enum Event {
    /// A CPU's reactor has its turn; void if scheduled in an earlier epoch.
    Run(usize, u64),
    /// The disk ends the command in service.
    Disk,
    /// A client is asked what it wants.
    Ask(usize),
}

struct Cpu {
    local: LocalQueue,
    fx: Effects,
    /// Batches to submit, from clients that run on this CPU.
    inbox: VecDeque<Vec<Bio>>,
    free_at: Instant,
    /// The next turn, and whether the CPU is idle and so must be woken.
    next: Option<Instant>,
    is_idle: bool,
    epoch: u64,
    gate_entered: u64,
}

impl Rig {
    fn new(side: Side, elevator: &'static ElevatorType, clients: usize, seed: u64) -> Self {
        let disk = Rc::new(RefCell::new(Disk::new(seed)));
        let (_, handles) = Queue::new(config(side, elevator)).expect("the configuration is possible");
        let cpu = |handle: blkmq_core::queue::QueueHandle| {
            let hctx = HctxId(handle.id().0);
            let driver = handle.owns_hctx().then(|| {
                let disk = Rc::clone(&disk);
                Box::new(ModelledHctx { hctx, disk }) as Box<dyn HctxDriver>
            });
            Cpu {
                local: handle.attach(driver),
                fx: Effects::default(),
                inbox: VecDeque::new(),
                free_at: Instant(0),
                next: None,
                is_idle: true,
                epoch: 0,
                gate_entered: 0,
            }
        };
        let cpus = handles.into_iter().map(cpu).collect();
        let program = |id| Program::new(id, CPUS, Rng::new(seed, STREAM_CLIENTS + id as u64));
        Self {
            now: Instant(1),
            cpus,
            programs: (0..clients).map(program).collect(),
            log: Log::default(),
            disk,
            events: EventQueue::default(),
            costs: Costs {
                lock: side == Side::Before,
                ..Costs::exact()
            },
            gate: Gate::default(),
            busy: Nanos::ZERO,
            latencies: Vec::new(),
            hands_over_free: side == Side::SingleDirect,
        }
    }

    /// Carries out a client's wishes until it waits for something.
    fn ask(&mut self, client: usize) {
        loop {
            match self.programs[client].want(self.now, &mut self.log) {
                Want::Submit(cpu, bios) => {
                    self.cpus[cpu].inbox.push_back(bios);
                    self.wake(cpu, self.now);
                }
                Want::Sleep(at) => return self.events.push(at, Event::Ask(client)),
                Want::Wait | Want::Nothing => return,
            }
        }
    }

    /// Makes a CPU take its turn soon after `at`. Returns whether it was idle.
    fn wake(&mut self, cpu: usize, at: Instant) -> bool {
        let was_idle = self.cpus[cpu].is_idle;
        let latency = if was_idle { self.costs.wake } else { 0 };
        self.plan(cpu, at + Nanos(latency));
        was_idle
    }

    fn plan(&mut self, cpu: usize, at: Instant) {
        let side = &mut self.cpus[cpu];
        let at = at.max(side.free_at);
        side.is_idle = false;
        if side.next.is_none_or(|next| at < next) {
            side.next = Some(at);
            side.epoch += 1;
            self.events.push(at, Event::Run(cpu, side.epoch));
        }
    }

    /// One turn of a CPU's reactor.
    fn run(&mut self, cpu: usize) {
        let now = self.now;
        let side = &mut self.cpus[cpu];
        side.next = None;
        let mut done = cpu::Done::default();
        side.local.run(now, &mut side.fx);
        for mut bios in side.inbox.drain(..) {
            for bio in &mut bios {
                bio.cookie = now.0;
                done.submitted += 1;
                let taken = side.local.submit(std::mem::take(bio), now, &mut side.fx);
                assert!(taken.is_ok(), "more bios than a CPU's clients may have under way");
            }
            side.local.unplug(now, &mut side.fx);
        }
        let ended = std::mem::take(&mut side.fx.ended);
        let kicks: Vec<usize> = std::iter::from_fn(|| side.fx.kicks.pop())
            .map(|id| id.index())
            .collect();
        let entered = side.local.gate_entered();
        let entries = entered - std::mem::replace(&mut side.gate_entered, entered);
        done.driver = self.disk.borrow_mut().take_work();
        done.ended = ended.len() as u64;
        done.kicks = if self.hands_over_free {
            0
        } else {
            kicks.iter().filter(|&&to| self.cpus[to].is_idle).count() as u64
        };
        let through = done.driver.issued.max(done.submitted);
        let time = self.costs.step(&done) + self.gate.charge(&self.costs, cpu, entries, through, now);
        let at = (now + Nanos(time)).max(self.gate.kept(cpu));
        self.busy += at.since(now);
        self.cpus[cpu].free_at = at;
        self.sleep(cpu, at);
        for to in kicks {
            if self.hands_over_free {
                self.plan(to, at);
            } else {
                self.wake(to, at);
            }
        }
        for bio in ended {
            assert!(bio.status.is_ok(), "{bio:?}");
            self.latencies.push(now.0 - bio.cookie);
            self.programs[bio.client as usize].ended(&bio);
            // The client continues on its own CPU, where it is woken.
            self.events.push(at, Event::Ask(bio.client as usize));
        }
        self.start_disk();
    }

    /// Schedules a CPU's next turn, for the event that its reactor waits for.
    fn sleep(&mut self, cpu: usize, at: Instant) {
        match self.cpus[cpu].local.next_wakeup() {
            Some(due) if due <= at => self.plan(cpu, at),
            Some(due) => {
                self.plan(cpu, due + Nanos(self.costs.timer));
                self.cpus[cpu].is_idle = true;
            }
            None => self.cpus[cpu].is_idle = true,
        }
    }

    fn start_disk(&mut self) {
        if let Some(end) = self.disk.borrow_mut().start(self.now) {
            self.events.push(end, Event::Disk);
        }
    }

    fn disk_ended(&mut self) {
        let hctx = self.disk.borrow_mut().end();
        self.start_disk();
        self.wake(usize::from(hctx.0), self.now);
    }
}

fn config(side: Side, elevator: &'static ElevatorType) -> QueueConfig {
    QueueConfig {
        hctxs: if matches!(side, Side::SingleQueue | Side::SingleDirect) {
            1
        } else {
            CPUS as u16
        },
        tags: TagMode::PerHctx(DISK_DEPTH),
        requests_per_reactor: 512,
        limits: Limits {
            rotational: true,
            ..Limits::default()
        },
        elevator,
        dispatch: if side == Side::Before {
            Dispatch::EveryContext
        } else {
            Dispatch::Single
        },
        disks: vec![DiskConfig {
            name: "disk".into(),
            base: 0,
            size: DISK_BYTES,
            read_only: false,
            logical_block: 512,
        }],
        ..QueueConfig::new("disk", CPUS as u16)
    }
}

/// One arm, and the hardware context whose command it serves.
struct Disk {
    queue: SeekQueue<Command>,
    serving: Option<Command>,
    ended: Vec<Vec<Done>>,
    served: u64,
    work: stage::Work,
}

struct Command {
    hctx: HctxId,
    cookie: Cookie,
}

impl Disk {
    fn new(seed: u64) -> Self {
        Self {
            queue: SeekQueue::new(DISK_BYTES, DISK_DEPTH, Rng::new(seed, STREAM_DISK)),
            serving: None,
            ended: (0..CPUS).map(|_| Vec::new()).collect(),
            served: 0,
            work: stage::Work::default(),
        }
    }

    /// Begins the next command if the arm is free; returns when it ends.
    fn start(&mut self, now: Instant) -> Option<Instant> {
        if self.serving.is_some() {
            return None;
        }
        let (command, time) = self.queue.take(now)?;
        self.serving = Some(command);
        Some(now + time)
    }

    /// Ends the command; returns its hardware context.
    fn end(&mut self) -> HctxId {
        let command = self.serving.take().expect("the disk was busy");
        self.served += 1;
        let status = Status::Ok;
        self.ended[usize::from(command.hctx.0)].push(Done {
            cookie: command.cookie,
            status,
        });
        command.hctx
    }

    fn take_work(&mut self) -> stage::Work {
        std::mem::take(&mut self.work)
    }
}

/// A hardware context's access to the disk.
struct ModelledHctx {
    hctx: HctxId,
    disk: Rc<RefCell<Disk>>,
}

impl HctxDriver for ModelledHctx {
    fn issue(&mut self, rq: &Request, cookie: Cookie, _last: bool, now: Instant) -> Issued {
        let mut disk = self.disk.borrow_mut();
        disk.work.issued += 1;
        let work = Work {
            op: rq.op(),
            position: rq.position(),
            len: rq.len(),
            owed: 0,
        };
        let hctx = self.hctx;
        disk.queue.push(now, work, Command { hctx, cookie });
        Issued::Queued
    }

    fn reap(&mut self, _now: Instant, done: &mut Vec<Done>) {
        let mut disk = self.disk.borrow_mut();
        let ended = &mut disk.ended[usize::from(self.hctx.0)];
        let count = ended.len() as u64;
        done.append(ended);
        disk.work.reaped += count;
    }
}

/// Number of reactors, with a CPU each.
pub const CPUS: usize = 64;
/// Number of commands that the disk takes.
pub const DISK_DEPTH: u32 = 32;
const STREAM_DISK: u64 = 1;
const STREAM_CLIENTS: u64 = 1000;
