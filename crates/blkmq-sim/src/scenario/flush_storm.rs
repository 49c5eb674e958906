//! `flush-storm`: 64 jobs that write and flush, all at once.

use super::Scenario;
use super::any_elevator;
use crate::rng::{Ppm, Rng};
use crate::setup::Setup;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "flush-storm",
    about: "64 jobs that write, flush and use FUA and PREFLUSH",
    setup,
};

fn setup(rng: &mut Rng) -> Setup {
    let mut setup = Setup::base(rng);
    let reactors = rng.pick(&[1, 4, 8]);
    setup.is_event_loop = vec![true; reactors];
    setup.elevator = any_elevator(rng);
    let jobs = 64 / reactors as u64;
    for client in &mut setup.clients {
        client.bios = 4 * jobs;
        client.depth = (jobs, jobs);
        client.burst = (4 * jobs, 4 * jobs);
        client.mix = [2, 50, 40, 2, 2];
        client.fua = Ppm::percent(30);
        client.preflush = Ppm::percent(30);
        client.blocks_max = 4;
    }
    setup
}
