//! `depth-change`: the depth is changed all the time, under load.

use super::Scenario;
use super::any_elevator;
use crate::rng::{Ppm, Rng};
use crate::setup::Control;
use crate::setup::Setup;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "depth-change",
    about: "the depth is changed under load",
    setup,
};

fn setup(rng: &mut Rng) -> Setup {
    let mut setup = Setup::base(rng);
    setup.elevator = any_elevator(rng);
    setup.shared_tags = rng.chance(Ppm::percent(30));
    setup.depth = rng.pick(&[2, 16, 64]);
    setup.control = Control {
        depth: 8,
        freeze: 1,
        ..Control::every_us(300)
    };
    setup
}
