//! The main loop of one history: it takes the next event, moves the time, lets a reactor, the drive or
//! the control thread act, and reports the result to the oracle. A power cut ends one life of the queue
//! and begins the next.

mod alive;
mod boot;
mod summary;

pub use summary::{Failure, PowerCuts, Summary};

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::{Rc, Weak};
use std::sync::Arc;

use blkmq_core::ids::ReactorId;
use blkmq_core::queue::Queue;
use blkmq_core::sched;
use blkmq_core::time::{Instant, Nanos};

use crate::control::{CONTROLLED, Control};
use crate::cpu::Gate;
use crate::events::EventQueue;
use crate::history::Fact;
use crate::mapped;
use crate::reactor::{Outcome, Phase, Reactor};
use crate::rng::Rng;
use crate::setup::{Sabotage, Setup};
use crate::stage::{Others, Stage};
use crate::workload::Client;

/// Runs one history of `setup` under `seed`.
///
/// # Errors
/// The first fault that the oracle finds.
///
/// # Panics
/// If an assertion of the core fails, or `setup` is not possible.
pub fn run(setup: &Setup, seed: u64, trace: bool) -> Result<Summary, Failure> {
    let setup = Rc::new(setup.clone());
    let stage = Rc::new(boot::make_stage(&setup, seed, trace));
    let mut clients: Vec<Client> = (0..setup.is_event_loop.len())
        .map(|id| boot::make_client(&setup, seed, id))
        .collect();
    let mut rng = Rng::new(seed, STREAM_WORLD);
    let mut total = Total::default();
    for record in 0..=setup.power_cuts {
        let cut = (record < setup.power_cuts).then(|| rng.from_to(1, setup.events_before_cut()));
        let world = World::boot(
            &setup,
            &stage,
            clients,
            seed.wrapping_add(u64::from(record) << 48),
        );
        world.run(cut);
        clients = world.end_life(&mut total);
        if stage.oracle.borrow().failure().is_some() {
            break;
        }
        if cut.is_some() {
            cut_power(&stage, &mut clients, &mut total.power_cuts);
        }
    }
    let oracle = stage.oracle.borrow();
    let history = stage.history.borrow();
    match oracle.failure() {
        Some(fault) => Err(Failure {
            fault: format!("at {} ns: {fault}", stage.now.get().0),
            tail: history.tail(),
        }),
        None => Ok(Summary {
            digest: history.digest(),
            facts: history.len(),
            time: stage.now.get().since(Instant(0)),
            counts: oracle.counts,
            controls: total.controls,
            gate_skipped: total.gate_skipped,
            power_cuts: total.power_cuts,
            busy: total.busy,
            finished_at: total.finished_at,
        }),
    }
}

#[derive(Default)]
struct Total {
    controls: u64,
    gate_skipped: u64,
    power_cuts: PowerCuts,
    busy: Nanos,
    finished_at: [Instant; 2],
}

#[derive(Clone, Copy, Debug)]
enum Event {
    /// A reactor's next step, or its timer.
    Step(ReactorId, u64),
    /// A kick arrives.
    Kick(ReactorId),
    /// A woken reactor runs.
    Woken(ReactorId, u64),
    /// The client of a reactor starts a burst.
    Burst(ReactorId),
    /// The drive handles its own events.
    Drive,
    Control,
    Destage,
    /// The paths change.
    Weather,
}

/// One life of a queue: from its making to the end of the work or to a power cut.
struct World {
    setup: Rc<Setup>,
    stage: Rc<Stage>,
    /// One for each drive.
    queues: Vec<Arc<Queue>>,
    reactors: Vec<RefCell<Reactor>>,
    events: RefCell<EventQueue<Event>>,
    rng: RefCell<Rng>,
    control: RefCell<Control>,
    gate: Cell<Gate>,
    busy: Cell<Nanos>,
    /// The time for which the drive's next event is planned.
    drive_due: Cell<Option<Instant>>,
    /// Kicks on their way.
    kicks: Cell<u32>,
    /// Set while a reactor runs in the middle of another's step.
    nested: Cell<bool>,
    last_end: Cell<(u64, Instant)>,
    /// Since when nothing is issued although something could be.
    hold: Cell<Option<alive::Hold>>,
    finished_at: RefCell<BTreeMap<ReactorId, Instant>>,
}

impl World {
    fn boot(setup: &Rc<Setup>, stage: &Rc<Stage>, clients: Vec<Client>, seed: u64) -> Rc<Self> {
        let (queues, locals) = boot::make_queues(setup, stage);
        let table = Arc::new(mapped::table(setup, setup.sabotage));
        let reactors = clients.into_iter().zip(locals).enumerate();
        let reactors = reactors
            .map(|(id, (client, locals))| {
                let stack = boot::make_stack(setup, &table);
                RefCell::new(Reactor::new(ReactorId(id as u16), locals, stack, client))
            })
            .collect();
        let mut oracle = stage.oracle.borrow_mut();
        for queue in 0..queues.len() {
            oracle.set_scheduled(queue, setup.elevator != sched::NONE);
            oracle.set_depth(queue, setup.depth);
        }
        drop(oracle);
        let world = Rc::new(Self {
            queues,
            reactors,
            events: RefCell::default(),
            rng: RefCell::new(Rng::new(seed, STREAM_CPU)),
            control: RefCell::new(Control::new(
                setup.control.clone(),
                setup.depth,
                setup.sabotage == Some(Sabotage::QuiescesNothing),
                Rng::new(seed, STREAM_CONTROL),
            )),
            gate: Cell::default(),
            busy: Cell::default(),
            drive_due: Cell::new(None),
            kicks: Cell::new(0),
            nested: Cell::new(false),
            hold: Cell::new(None),
            last_end: Cell::new((stage.oracle.borrow().counts.ended, stage.now.get())),
            finished_at: RefCell::default(),
            setup: Rc::clone(setup),
            stage: Rc::clone(stage),
        });
        let weak: Weak<dyn Others> = Rc::downgrade(&world) as Weak<dyn Others>;
        *stage.others.borrow_mut() = Some(weak);
        world.plan_start();
        world
    }

    fn plan_start(&self) {
        let now = self.stage.now.get();
        for reactor in &self.reactors {
            let start = now + Nanos(self.rng.borrow_mut().below(20_000));
            let reactor = reactor.borrow();
            self.push(start, Event::Step(reactor.id, reactor.epoch));
        }
        if let Some(at) = self.control.borrow_mut().next_action(now) {
            self.push(at, Event::Control);
        }
        if let Some(paths) = &self.stage.paths {
            self.push(paths.next_change(now), Event::Weather);
        }
        if let Some(every) = self.setup.destage_every {
            self.push(now + every, Event::Destage);
        }
    }

    /// Takes events until all work is done, a fault is found, or `cut` events have passed.
    fn run(&self, cut: Option<u64>) {
        let mut count = 0;
        while !self.is_over() && cut != Some(count) {
            let Some((at, event)) = self.events.borrow_mut().pop() else {
                self.fail_stuck("nothing is going to happen any more");
                return;
            };
            count += 1;
            self.check_hold(at);
            self.stage.now.set(self.stage.now.get().max(at));
            self.handle(event);
            self.after_event(event, count);
        }
        if cut.is_none() && self.stage.oracle.borrow().failure().is_none() {
            self.check_rest();
        }
    }

    fn is_over(&self) -> bool {
        let idle = |reactor: &RefCell<Reactor>| reactor.borrow().client.is_finished();
        self.stage.oracle.borrow().failure().is_some()
            || !self.control.borrow().is_holding() && self.reactors.iter().all(idle)
    }

    fn handle(&self, event: Event) {
        match event {
            Event::Step(id, epoch) => {
                let mut reactor = self.reactors[id.index()].borrow_mut();
                if reactor.epoch != epoch {
                    return;
                }
                if !reactor.is_awake() {
                    self.back(&mut reactor);
                }
                self.step(&mut reactor);
            }
            Event::Kick(to) => {
                self.kicks.set(self.kicks.get() - 1);
                if !self.loses(Sabotage::LosesKick) {
                    self.wake(to, |reactor| reactor.notified = true);
                }
            }
            Event::Woken(id, epoch) => {
                let mut reactor = self.reactors[id.index()].borrow_mut();
                if reactor.epoch == epoch {
                    self.back(&mut reactor);
                    self.step(&mut reactor);
                }
            }
            Event::Burst(id) => {
                let start = |reactor: &mut Reactor| {
                    reactor.pausing = false;
                    reactor.client.next_burst();
                    reactor.ring = true;
                };
                start(&mut self.reactors[id.index()].borrow_mut());
                self.wake(id, |_| {});
            }
            Event::Drive => {
                self.drive_due.set(None);
                self.stage.advance_drives();
            }
            Event::Control => self.control_step(),
            Event::Destage => self.destage(),
            Event::Weather => self.change_weather(),
        }
    }

    /// Records that a reactor is awake again, for whatever reason.
    fn back(&self, reactor: &mut Reactor) {
        self.stage.note(Fact::Wake { reactor: reactor.id });
        reactor.phase = Phase::Run;
    }

    fn step(&self, reactor: &mut Reactor) {
        if reactor.phase == Phase::Announce && self.goes_away(reactor) {
            return;
        }
        let mut rng = Rng::new(self.rng.borrow_mut().bits(), 0);
        let outcome = reactor.step(&self.stage, &mut rng, self.setup.sabotage);
        self.plan_next(reactor, outcome);
        if !reactor.pausing
            && let Some(at) = reactor.client.pause(self.stage.now.get())
        {
            reactor.pausing = true;
            self.push(at, Event::Burst(reactor.id));
        }
        if reactor.client.is_finished() {
            let now = self.stage.now.get();
            self.finished_at.borrow_mut().entry(reactor.id).or_insert(now);
        }
    }

    /// Says whether an attached thread stops polling now, whatever is under way.
    fn goes_away(&self, reactor: &mut Reactor) -> bool {
        let mut rng = self.rng.borrow_mut();
        if self.setup.is_event_loop[reactor.id.index()] || !rng.chance(self.setup.away) {
            return false;
        }
        let until = self.stage.now.get() + Nanos(rng.below(self.setup.away_max.0 + 1));
        reactor.phase = Phase::Away;
        reactor.epoch += 1;
        self.stage.note(Fact::Away {
            reactor: reactor.id,
            until: until.0,
        });
        self.push(until, Event::Step(reactor.id, reactor.epoch));
        true
    }

    fn plan_next(&self, reactor: &mut Reactor, outcome: Outcome) {
        let now = self.stage.now.get();
        let costs = &self.setup.costs;
        let mut rng = self.rng.borrow_mut();
        let mut time = costs.step(&outcome.done);
        if self.queues[CONTROLLED].elevator() != sched::NONE {
            let mut gate = self.gate.get();
            let issued = outcome.done.driver.issued;
            time += gate.charge(costs, reactor.id.index(), u64::from(issued > 0), issued, now);
            self.gate.set(gate);
        }
        let mut at = now + costs.time(time, &mut rng);
        at = at.max(self.gate.get().kept(reactor.id.index()));
        self.busy.set(self.busy.get() + at.since(now));
        for to in outcome.kicks {
            self.kicks.set(self.kicks.get() + 1);
            self.push(at, Event::Kick(to));
        }
        reactor.epoch += 1;
        match outcome.sleeps {
            None => self.push(at, Event::Step(reactor.id, reactor.epoch)),
            Some(Some(until)) => {
                let late = Nanos(rng.spread(costs.timer, costs.jitter));
                self.push(at.max(until) + late, Event::Step(reactor.id, reactor.epoch));
            }
            Some(None) => {}
        }
    }

    /// Reports an event for a reactor: wakes it if it sleeps. If it is about to sleep, it will
    /// notice the event itself.
    fn wake(&self, id: ReactorId, mark: impl FnOnce(&mut Reactor)) {
        let mut reactor = self.reactors[id.index()].borrow_mut();
        if !reactor.hears() {
            return;
        }
        mark(&mut reactor);
        if reactor.phase == Phase::Asleep {
            let mut rng = self.rng.borrow_mut();
            let latency = Nanos(rng.spread(self.setup.costs.wake, self.setup.costs.jitter));
            reactor.epoch += 1;
            reactor.phase = Phase::Run;
            self.push(self.stage.now.get() + latency, Event::Woken(id, reactor.epoch));
        }
    }

    fn control_step(&self) {
        let done = |reactor: &RefCell<Reactor>| reactor.borrow().client.is_finished();
        let last = self.reactors.iter().all(done);
        let next = self
            .control
            .borrow_mut()
            .step(&self.queues[CONTROLLED], &self.stage, last);
        if next.kick {
            let mut everybody = self.queues[CONTROLLED].everybody();
            while let Some(to) = everybody.pop() {
                self.kicks.set(self.kicks.get() + 1);
                self.push(self.stage.now.get() + Nanos(100), Event::Kick(to));
            }
        }
        if let Some(at) = next.at {
            self.push(at, Event::Control);
        }
    }

    fn destage(&self) {
        for drive in &self.stage.drives {
            drive.borrow_mut().destage();
        }
        if let Some(every) = self.setup.destage_every {
            self.push(self.stage.now.get() + every, Event::Destage);
        }
    }

    fn after_event(&self, event: Event, count: u64) {
        self.arm_drive();
        self.interrupt();
        self.run_for_paths();
        for drive in &self.stage.drives {
            let mut drive = drive.borrow_mut();
            self.stage.oracle.borrow_mut().check_durable(drive.images());
        }
        self.check_invariants(event, count);
        self.check_alive();
    }

    /// Checks, after one step in `check_every`, the reactor that did it, and sometimes all of them.
    fn check_invariants(&self, event: Event, count: u64) {
        let stepped = match event {
            Event::Step(id, _) | Event::Woken(id, _) => Some(id.index()),
            _ => None,
        };
        let all = count.is_multiple_of(self.setup.check_every * 64);
        for (id, reactor) in self.reactors.iter().enumerate() {
            if all || stepped == Some(id) && count.is_multiple_of(self.setup.check_every) {
                reactor.borrow().check_invariants();
            }
        }
    }

    fn arm_drive(&self) {
        let due = self
            .stage
            .drives
            .iter()
            .filter_map(|drive| drive.borrow().next_due());
        if let Some(at) = due.min()
            && self.drive_due.get().is_none_or(|planned| at < planned)
        {
            self.drive_due.set(Some(at));
            self.push(at, Event::Drive);
        }
    }

    fn interrupt(&self) {
        for drive in &self.stage.drives {
            let ways = drive.borrow_mut().take_interrupts();
            if !drive.borrow().has_interrupts() {
                continue;
            }
            for way in ways {
                let hctx = way % self.setup.hctx_count();
                if self.loses(Sabotage::LosesInterrupt) {
                    continue;
                }
                self.reactors[usize::from(hctx)].borrow_mut().ring = true;
                self.wake(ReactorId(hctx), |_| {});
            }
        }
    }

    fn change_weather(&self) {
        let Some(paths) = &self.stage.paths else { return };
        let now = self.stage.now.get();
        paths.change(now);
        // A path that is cut or works again interrupts.
        for reactor in &self.reactors {
            let id = {
                let mut reactor = reactor.borrow_mut();
                reactor.ring = true;
                reactor.id
            };
            self.wake(id, |_| {});
        }
        self.push(paths.next_change(now), Event::Weather);
    }

    /// Runs the contexts that the paths have requested.
    fn run_for_paths(&self) {
        let Some(paths) = &self.stage.paths else { return };
        for hctx in paths.take_kicks() {
            if let Some(to) = self.queues[CONTROLLED].ask_to_run(hctx) {
                self.kicks.set(self.kicks.get() + 1);
                self.push(self.stage.now.get() + Nanos(100), Event::Kick(to));
            }
        }
    }

    /// Says whether the sabotage `what` happens now.
    fn loses(&self, what: Sabotage) -> bool {
        self.setup.sabotage == Some(what) && self.rng.borrow_mut().below(20) == 0
    }

    fn push(&self, at: Instant, event: Event) {
        self.events.borrow_mut().push(at, event);
    }

    /// Ends this life; returns the clients.
    fn end_life(self: Rc<Self>, total: &mut Total) -> Vec<Client> {
        *self.stage.others.borrow_mut() = None;
        total.controls += self.control.borrow().actions;
        total.busy += self.busy.get();
        let skipped = self.queues.iter().map(|queue| queue.event_stats().gate_skipped);
        total.gate_skipped += skipped.sum::<u64>();
        for (id, at) in &*self.finished_at.borrow() {
            let last = &mut total.finished_at[id.index().min(1)];
            *last = (*last).max(*at);
        }
        self.reactors
            .iter()
            .map(|reactor| reactor.borrow().client.clone())
            .collect()
    }
}

impl Others for World {
    fn run_meanwhile(&self) {
        if self.nested.replace(true) {
            return;
        }
        while self.rng.borrow_mut().chance(self.setup.interleave) {
            let other = self.rng.borrow_mut().below(self.reactors.len() as u64) as usize;
            // A reactor in the middle of a call is borrowed.
            if let Ok(mut reactor) = self.reactors[other].try_borrow_mut()
                && reactor.is_awake()
            {
                self.step(&mut reactor);
            }
        }
        self.nested.set(false);
    }
}

impl std::fmt::Debug for World {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("World")
            .field("now", &self.stage.now)
            .finish_non_exhaustive()
    }
}

fn cut_power(stage: &Stage, clients: &mut [Client], cuts: &mut PowerCuts) {
    stage.note(Fact::PowerCut);
    let mut oracle = stage.oracle.borrow_mut();
    let in_flight = oracle.in_flight();
    let mut lost = 0;
    for drive in &stage.drives {
        lost += drive.borrow_mut().power_cut(&mut *oracle);
    }
    let torn = oracle.torn(|block| stage.durable(block));
    cuts.count += 1;
    cuts.in_flight += u32::from(in_flight > 0);
    cuts.lost += u32::from(lost > 0);
    cuts.torn_bios += u32::from(torn.bios);
    cuts.torn_blocks += u32::from(torn.blocks);
    for drive in &stage.drives {
        oracle.power_cut(drive.borrow_mut().images());
    }
    oracle.restart();
    clients.iter_mut().for_each(Client::reboot);
}

const STREAM_CPU: u64 = 2;
const STREAM_CONTROL: u64 = 3;
const STREAM_WORLD: u64 = 4;
