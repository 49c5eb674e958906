//! `scale`, a CPU model of many submitters: how an elevator's throughput grows with their number, each on
//! its own CPU. It compares our gate, where reactors that find it held leave their work to the holder,
//! with a spin lock. `blkmq-lab bench scale` measures it.
//!
//! It is a model: two cores cannot show 64. The costs are those of `cpu::Costs::exact`; a null
//! drive ends every request inline; the depth of all submitters together is constant.

use blkmq_core::sched::{self, ElevatorType};
use blkmq_core::time::Nanos;

use crate::cpu::Costs;
use crate::drive::model::Model;
use crate::rng::{Ppm, Rng};
use crate::setup::Setup;
use crate::workload::Workload;
use crate::world;

/// The result of one run of the model.
#[derive(Clone, Copy, Debug)]
pub struct Point {
    /// Bios that have ended.
    pub bios: u64,
    /// How long they took, in virtual time.
    pub time: Nanos,
    /// CPU time, over all CPUs.
    pub busy: Nanos,
}

impl Point {
    /// Bios in a second of virtual time.
    pub fn iops(&self) -> u64 {
        self.bios * 1_000_000_000 / self.time.0.max(1)
    }

    /// CPU time per bio, in nanoseconds.
    pub fn cpu_ns(&self) -> u64 {
        self.busy.0 / self.bios.max(1)
    }
}

/// Measures one point of the model: `submitters` submitters that keep `depth` bios under way
/// together, with a gate or with a lock.
///
/// # Panics
/// If the oracle finds a fault.
pub fn measure(kind: &'static ElevatorType, submitters: usize, depth: u64, lock: bool, seed: u64) -> Point {
    let setup = setup(kind, submitters, depth, lock, seed);
    let summary = world::run(&setup, seed, false).expect("a history without faults passes");
    let ended = summary.counts.ended;
    Point {
        bios: ended,
        time: summary.time,
        busy: summary.busy,
    }
}

/// How long a request occupies the gate in an elevator, in nanoseconds.
fn held_for(kind: &'static ElevatorType) -> u64 {
    let measured = HELD_FOR.iter().find(|(of, _)| *of == kind);
    measured.map_or(0, |(_, time)| *time)
}

/// As the core's test `elevator_cost` has measured it.
const HELD_FOR: [(&ElevatorType, u64); 3] = [(sched::MQ_DEADLINE, 60), (sched::KYBER, 75), (sched::BFQ, 150)];

fn setup(kind: &'static ElevatorType, submitters: usize, total: u64, lock: bool, seed: u64) -> Setup {
    let mut setup = Setup::base(&mut Rng::new(seed, 0));
    let depth = total / submitters as u64;
    setup.is_event_loop = vec![true; submitters];
    setup.depth = total as u32;
    setup.requests_per_reactor = depth as u32;
    setup.elevator = kind;
    setup.interleave = Ppm::NEVER;
    setup.check_every = u64::MAX / 64;
    setup.disk_blocks = vec![4096];
    setup.read_only = vec![false];
    setup.costs = Costs {
        lock,
        elevate: held_for(kind),
        ..Costs::exact()
    };
    setup.drive.model = Model::Null {
        inline: Ppm::percent(100),
    };
    let bios = BIOS / submitters as u64;
    setup.clients = vec![Workload {
        bios,
        depth: (depth, depth),
        mix: [1, 0, 0, 0, 0],
        no_merge: Ppm::NEVER,
        sequential: Ppm::NEVER,
        blocks_max: 1,
        groups: 1,
        prio: Ppm::NEVER,
        invalid: Ppm::NEVER,
        burst: (bios, bios),
        ..setup.clients[0].clone()
    }];
    setup
}

const BIOS: u64 = 25_600;

#[cfg(test)]
mod tests {
    use super::*;

    const DEPTH: u64 = 1024;

    #[test]
    fn submitters_8_and_64_lose_little_against_one_and_burn_less_than_with_a_lock() {
        for kind in [sched::MQ_DEADLINE, sched::BFQ] {
            let one = measure(kind, 1, DEPTH, false, 1);
            for submitters in [8, 64] {
                let gate = measure(kind, submitters, DEPTH, false, 1);
                let lock = measure(kind, submitters, DEPTH, true, 1);
                assert!(
                    gate.iops() * 10 >= one.iops() * 9,
                    "{kind}, {submitters}: {gate:?} {one:?}"
                );
                assert!(
                    gate.cpu_ns() < lock.cpu_ns(),
                    "{kind}, {submitters}: {gate:?} {lock:?}"
                );
            }
        }
    }
}
