//! Decides what `scale` measures: how the elevator's throughput grows with the number of submitters, each on a CPU of its
//! own, in the CPU model; our gate, where who comes late leaves its work to the holder, against a spin lock.
//!
//! It is a model: two cores cannot show 128. The costs are those of `cpu::Costs::exact`; a null drive ends everything
//! inline; all submitters together have the same depth.

use std::fmt::Write;

use blkmq_core::sched::Kind;

use crate::cpu::Costs;
use crate::drive::model::Model;
use crate::rng::{Ppm, Rng};
use crate::setup::Setup;
use crate::workload::Workload;
use crate::world;

/// Its name on the command line.
pub const NAME: &str = "scale";
/// What it is about.
pub const ABOUT: &str =
    "measures, in the CPU model, 1 to 128 submitters at one elevator: gate against lock; a table";

/// An elevator, and what a request takes of the gate's holder in it, in nanoseconds (the core's test `elevator_cost`).
#[derive(Clone, Copy, Debug)]
pub struct Held {
    kind: Kind,
    elevate: u64,
}

const HELD: [Held; 2] = [
    Held {
        kind: Kind::MqDeadline,
        elevate: 60,
    },
    Held {
        kind: Kind::Bfq,
        elevate: 150,
    },
];

/// What one run of the model gave.
#[derive(Clone, Copy, Debug)]
pub struct Point {
    /// Bios in a second of virtual time.
    pub iops: u64,
    /// CPU time per bio, over all CPUs, in nanoseconds.
    pub cpu_ns: u64,
}

/// Measures one point of the model.
///
/// # Panics
/// If the oracle finds a fault.
pub fn measure(held: Held, submitters: usize, lock: bool, seed: u64) -> Point {
    let setup = setup(held, submitters, lock, seed);
    let summary = world::run(&setup, seed, false).expect("a history without faults passes");
    let ended = summary.counts.ended;
    Point {
        iops: ended * 1_000_000_000 / summary.time.0.max(1),
        cpu_ns: summary.busy.0 / ended.max(1),
    }
}

/// Measures all points and returns the table.
pub fn table(seed: u64) -> String {
    let mut table =
        format!("a null drive, depth {DEPTH} in all, virtual time: a model, see docs/simulator.md\n");
    for held in HELD {
        let _ = writeln!(
            table,
            "\n{}, {} ns a request\n\
             submitters   gate M IOPS  of one  CPU ns/IO   lock M IOPS  of one  CPU ns/IO",
            held.kind.name(),
            held.elevate
        );
        let one = [false, true].map(|lock| measure(held, 1, lock, seed).iops);
        for submitters in SUBMITTERS {
            let [gate, lock] = [false, true].map(|lock| measure(held, submitters, lock, seed));
            let _ = writeln!(
                table,
                "{submitters:>10} {} {}",
                columns(gate, one[0]),
                columns(lock, one[1])
            );
        }
    }
    table
}

fn columns(point: Point, one: u64) -> String {
    format!(
        "{:>13.1} {:>5} % {:>10}",
        point.iops as f64 / 1e6,
        point.iops * 100 / one.max(1),
        point.cpu_ns
    )
}

fn setup(held: Held, submitters: usize, lock: bool, seed: u64) -> Setup {
    let mut setup = Setup::base(&mut Rng::new(seed, 0));
    let depth = DEPTH / submitters as u64;
    setup.promises = vec![true; submitters];
    setup.depth = DEPTH as u32;
    setup.requests_per_reactor = depth as u32;
    setup.elevator = held.kind;
    setup.interleave = Ppm::NEVER;
    setup.check_every = u64::MAX / 64;
    setup.disk_blocks = vec![4096];
    setup.read_only = vec![false];
    setup.costs = Costs {
        lock,
        elevate: held.elevate,
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

const SUBMITTERS: [usize; 6] = [1, 8, 16, 32, 64, 128];
/// Requests under way in all, over all submitters.
const DEPTH: u64 = 1024;
const BIOS: u64 = 25_600;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn in_the_model_8_and_64_submitters_lose_little_against_one_and_burn_less_than_with_a_lock() {
        for held in HELD {
            let one = measure(held, 1, false, 1);
            for submitters in [8, 64] {
                let gate = measure(held, submitters, false, 1);
                let lock = measure(held, submitters, true, 1);
                assert!(
                    gate.iops * 10 >= one.iops * 9,
                    "{held:?}, {submitters}: {gate:?} {one:?}"
                );
                assert!(
                    gate.cpu_ns < lock.cpu_ns,
                    "{held:?}, {submitters}: {gate:?} {lock:?}"
                );
            }
        }
    }
}
