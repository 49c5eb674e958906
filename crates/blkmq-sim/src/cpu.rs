//! The CPU model: how long a reactor's steps take, from the figures measured on our machines. `world`
//! charges each step of a reactor; the gate's serial part is charged to its holder.

use blkmq_core::time::{Instant, Nanos};

use crate::rng::{Ppm, Rng};
use crate::stage::Work;

/// The costs of steps, in nanoseconds of one CPU.
#[derive(Clone, Debug)]
pub struct Costs {
    /// One bio through the plug.
    pub submit: u64,
    /// One turn of the loop without work.
    pub turn: u64,
    /// One request issued to the driver.
    pub issue: u64,
    /// One completion taken from the driver and delivered to its submitter.
    pub end: u64,
    /// One request through the elevator, inside the gate.
    pub elevate: u64,
    /// A reactor that finds the elevator busy waits for it and does its work itself, as with a spin
    /// lock; otherwise it leaves the work to the holder.
    pub lock: bool,
    /// Entering the gate when the last holder was this CPU.
    pub gate: u64,
    /// A cache line fetched from another core.
    pub line: u64,
    /// A system call that wakes a reactor.
    pub kick: u64,
    /// From the wake-up call until a halted core runs.
    pub wake: u64,
    /// How late a timer is.
    pub timer: u64,
    /// Up to this many percent are added to all costs.
    pub jitter: u32,
    /// How often another task on the CPU interrupts a step.
    pub preempt: Ppm,
    /// The longest such interruption.
    pub preempt_max: Nanos,
}

impl Costs {
    /// The measured costs in nanoseconds: 4 for an uncontended lock, 250 to 330 one way for a line
    /// from the other core, 15 000 to wake a halted core, 7100 of them on the waker's side, 14 000
    /// to 28 000 for a late timer; about 30 per bio in all.
    pub fn lab() -> Self {
        Self {
            submit: 12,
            turn: 15,
            issue: 8,
            end: 10,
            elevate: 60,
            lock: false,
            gate: 8,
            line: 280,
            kick: 7_100,
            wake: 15_000,
            timer: 14_000,
            jitter: 100,
            preempt: Ppm(2_000),
            preempt_max: Nanos::from_millis(3),
        }
    }

    /// The same without randomness, for measurements.
    pub fn exact() -> Self {
        Self {
            jitter: 0,
            preempt: Ppm::NEVER,
            ..Self::lab()
        }
    }

    /// Returns the time of a step: `base`, varied at random.
    pub fn time(&self, base: u64, rng: &mut Rng) -> Nanos {
        let mut time = rng.spread(base, self.jitter);
        if rng.chance(self.preempt) {
            time += rng.below(self.preempt_max.0 + 1);
        }
        Nanos(time)
    }
}

/// What one step of a reactor did.
#[derive(Clone, Copy, Debug, Default)]
pub struct Done {
    /// Bios submitted.
    pub submitted: u64,
    /// Bios that came back.
    pub ended: u64,
    /// Reactors woken.
    pub kicks: u64,
    /// What the drivers did.
    pub driver: Work,
}

/// The gate as a serial resource. In the simulator a call into the core takes no time, so no
/// reactor ever finds the gate held; the work that a holder would do for others is charged to it
/// here instead.
#[derive(Clone, Copy, Debug, Default)]
pub struct Gate {
    holder: usize,
    busy_until: Instant,
}

impl Costs {
    /// Returns the time of a step on CPU `cpu` that starts now, without the elevator.
    pub fn step(&self, done: &Done) -> u64 {
        self.turn
            + done.submitted * self.submit
            + done.driver.issued * self.issue
            + done.driver.reaped * self.end
            + done.kicks * self.kick
    }
}

impl Gate {
    /// Charges the `entries` of a step of `cpu`, and its `requests` that went through the elevator.
    /// Returns how long `cpu` is busy with them: as the holder, or only with publishing them, if
    /// another CPU holds the gate at that moment.
    pub fn charge(&mut self, costs: &Costs, cpu: usize, entries: u64, requests: u64, now: Instant) -> u64 {
        if entries == 0 {
            return 0;
        }
        let held = now < self.busy_until;
        if held && self.holder != cpu && !costs.lock {
            // The holder fetches the submitter's insert list and does the work before it leaves the
            // gate.
            self.busy_until = self.busy_until + Nanos(costs.line + requests * costs.elevate);
            // One line to publish the work, and one to learn of its completions.
            return 2 * costs.line;
        }
        let moved = if self.holder == cpu { 0 } else { costs.line };
        let time = entries * costs.gate + moved + requests * costs.elevate;
        self.holder = cpu;
        self.busy_until = now.max(self.busy_until) + Nanos(time);
        self.busy_until.since(now).0
    }

    /// Returns until when `cpu`, as the holder, does the work of others.
    pub fn kept(&self, cpu: usize) -> Instant {
        if self.holder == cpu {
            self.busy_until
        } else {
            Instant(0)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn submitter_that_finds_the_gate_held_leaves_the_work_to_the_holder() {
        let costs = Costs::exact();
        let mut gate = Gate::default();
        let first = gate.charge(&costs, 0, 1, 10, Instant(0));
        assert_eq!(first, costs.gate + 10 * costs.elevate);
        assert_eq!(gate.charge(&costs, 1, 1, 5, Instant(1)), 2 * costs.line);
        assert_eq!(gate.kept(0), Instant(first + costs.line + 5 * costs.elevate));
        assert_eq!(gate.kept(1), Instant(0));
    }

    #[test]
    fn submitter_that_finds_the_lock_held_waits_for_it() {
        let costs = Costs {
            lock: true,
            ..Costs::exact()
        };
        let mut gate = Gate::default();
        let first = gate.charge(&costs, 0, 1, 10, Instant(0));
        let second = costs.gate + costs.line + 5 * costs.elevate;
        assert_eq!(gate.charge(&costs, 1, 1, 5, Instant(1)), first - 1 + second);
    }
}
