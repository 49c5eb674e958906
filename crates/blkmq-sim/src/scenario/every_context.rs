//! `every-context`: every hardware context dispatches for itself, as before there was one dispatcher,
//! with faults, freezes and changes of depth.

use blkmq_core::queue::Dispatch;

use super::Scenario;
use super::any_elevator;
use crate::rng::{Ppm, Rng};
use crate::setup::{Control, Setup};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "every-context",
    about: "every context for itself behind an elevator, with faults, freezes and changes of depth",
    setup,
};

fn setup(rng: &mut Rng) -> Setup {
    let mut setup = Setup::base(rng);
    setup.elevator = any_elevator(rng);
    setup.dispatch = rng.pick(&[Dispatch::EveryContext, Dispatch::OwnContext]);
    setup.hctxs = rng.pick(&[1, 2, u16::MAX]);
    // A context that waits for the elevator spins, and the simulator has one thread, so no other
    // context may run in the middle of its turn.
    setup.interleave = Ppm::NEVER;
    setup.drive.faults.resource = Ppm::percent(2);
    setup.drive.faults.device_resource = Ppm::percent(2);
    setup.drive.faults.requeue = Ppm::percent(2);
    setup.control = Control {
        freeze: 2,
        quiesce: 1,
        switch: 2,
        depth: 3,
        ..Control::every_us(400)
    };
    setup
}
