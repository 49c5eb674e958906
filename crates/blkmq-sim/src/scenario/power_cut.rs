//! `power-cut`: the power fails at a random point, up to three times; what was acknowledged as durable
//! must be there.

use blkmq_core::time::Nanos;

use super::Scenario;
use super::any_elevator;
use crate::rng::{Ppm, Rng};
use crate::setup::Setup;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "power-cut",
    about: "the power fails, up to three times; flushed and FUA data must be there",
    setup,
};

fn setup(rng: &mut Rng) -> Setup {
    let mut setup = Setup::base(rng);
    setup.elevator = any_elevator(rng);
    setup.power_cuts = rng.from_to(1, 3) as u32;
    setup.destage_every = Some(Nanos::from_micros(rng.from_to(50, 500)));
    for client in &mut setup.clients {
        client.bios = 100;
        client.mix = [20, 60, 10, 5, 5];
        client.fua = Ppm::percent(15);
        client.preflush = Ppm::percent(10);
    }
    if rng.chance(Ppm::percent(20)) {
        // Without a cache every write is durable on completion.
        setup.limits.cache = false;
        setup.drive.cache = false;
    }
    setup
}
