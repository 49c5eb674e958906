//! `mapped-power-cut`: the power of all drives fails under mapped disks; blocks of a mapped disk may be
//! torn at the physical blocks of a member and between members, but flushed data must be there on all of
//! them.

use blkmq_core::time::Nanos;

use super::Scenario;
use crate::rng::{Ppm, Rng};
use crate::setup::Setup;

pub(in crate::scenario) const SCENARIO: Scenario = Scenario {
    name: "mapped-power-cut",
    about: "the power fails under mapped disks; flushed and FUA data must be on all members",
    setup,
};

fn setup(rng: &mut Rng) -> Setup {
    let mut setup = super::over_drives(rng);
    setup.power_cuts = rng.from_to(1, 3) as u32;
    setup.destage_every = Some(Nanos::from_micros(rng.from_to(50, 500)));
    for client in &mut setup.clients {
        client.bios = 100;
        client.mix = [20, 60, 10, 5, 5];
        client.fua = Ppm::percent(15);
        client.preflush = Ppm::percent(10);
    }
    setup
}
