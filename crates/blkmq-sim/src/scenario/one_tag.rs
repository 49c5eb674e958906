//! `one-tag`: one tag for a depth of 1024. All bios but one wait, and none is lost.

use super::Scenario;
use super::any_elevator;
use crate::rng::{Ppm, Rng};
use crate::setup::Setup;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "one-tag",
    about: "one tag at depth 1024, every elevator",
    setup,
};

fn setup(rng: &mut Rng) -> Setup {
    let mut setup = Setup::base(rng);
    setup.is_event_loop = vec![true; rng.from_to(1, 2) as usize];
    setup.elevator = any_elevator(rng);
    setup.depth = 1;
    setup.shared_tags = rng.chance(Ppm::percent(50));
    setup.requests_per_reactor = rng.pick(&[16, 256, 1024]);
    setup.check_every = 16;
    let depth = 1024 / setup.is_event_loop.len() as u64;
    for client in &mut setup.clients {
        client.bios = depth;
        client.depth = (depth, depth);
        client.burst = (depth, depth);
        client.blocks_max = 2;
        client.mix = [45, 45, 1, 4, 4];
        client.fua = Ppm::percent(1);
        client.preflush = Ppm::percent(1);
    }
    setup
}
