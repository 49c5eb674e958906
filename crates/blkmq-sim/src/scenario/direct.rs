//! `direct`: no elevator, a hardware context for each reactor, everything submitted, merged, split,
//! issued and reaped on the same reactor.

use super::Scenario;
use crate::drive::model::Model;
use crate::rng::{Ppm, Rng};
use crate::setup::Setup;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "direct",
    about: "no elevator, a hardware context per reactor; flash or a null drive that ends inline",
    setup,
};

fn setup(rng: &mut Rng) -> Setup {
    let mut setup = Setup::base(rng);
    if rng.chance(Ppm::percent(30)) {
        let inline = Ppm::percent(rng.pick(&[0, 50, 100]));
        setup.drive.model = Model::Null { inline };
    }
    setup
}
