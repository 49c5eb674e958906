//! `few-hctx`: fewer hardware contexts than reactors; the other reactors submit through their owners.

use super::Scenario;
use super::any_elevator;
use crate::rng::{Ppm, Rng};
use crate::setup::Setup;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "few-hctx",
    about: "fewer hardware contexts than reactors",
    setup,
};

fn setup(rng: &mut Rng) -> Setup {
    let mut setup = Setup::base(rng);
    setup.is_event_loop = vec![true; rng.from_to(2, 6) as usize];
    setup.hctxs = rng.from_to(1, setup.is_event_loop.len() as u64 - 1) as u16;
    setup.elevator = any_elevator(rng);
    setup.shared_tags = rng.chance(Ppm::percent(30));
    setup
}
