//! `quiesce`: the queue is quiesced and frozen repeatedly, also nested. Nothing may be issued meanwhile,
//! and nothing may be lost.

use super::Scenario;
use super::any_elevator;
use crate::rng::{Ppm, Rng};
use crate::setup::Control;
use crate::setup::Setup;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "quiesce",
    about: "quiesce and freeze, nested, under load",
    setup,
};

fn setup(rng: &mut Rng) -> Setup {
    let mut setup = Setup::base(rng);
    setup.elevator = any_elevator(rng);
    setup.interleave = Ppm::percent(20);
    // A thaw often finds a reactor between its last dispatch and its sleep.
    setup.costs.preempt = Ppm::percent(5);
    setup.drive.faults.requeue = Ppm::percent(5);
    setup.control = Control {
        quiesce: 1,
        freeze: 1,
        ..Control::every_us(400)
    };
    setup
}
