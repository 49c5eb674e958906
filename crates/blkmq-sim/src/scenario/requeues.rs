//! `requeues`: the drive requeues every tenth request, refuses some for lack of resources, and fails
//! some.

use super::Scenario;
use super::any_elevator;
use crate::drive::fault::Faults;
use crate::rng::{Ppm, Rng};
use crate::setup::Setup;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "requeues",
    about: "10 % requeues, with every elevator; missing resources, errors, bad blocks",
    setup,
};

fn setup(rng: &mut Rng) -> Setup {
    let mut setup = Setup::base(rng);
    setup.elevator = any_elevator(rng);
    setup.drive.slots = rng.pick(&[2, 8, 1024]);
    setup.drive.faults = Faults {
        requeue: Ppm::percent(10),
        resource: Ppm::percent(rng.pick(&[0, 5])),
        device_resource: Ppm::percent(rng.pick(&[0, 10])),
        transport: Ppm::percent(2),
        twice: Ppm::percent(2),
        bad_blocks: if rng.chance(Ppm::percent(50)) {
            10..12
        } else {
            0..0
        },
        ..Faults::default()
    };
    setup
}
