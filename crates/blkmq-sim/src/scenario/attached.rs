//! `attached`: threads that attached themselves, and that stop polling at any moment, beside one with an
//! event loop.

use blkmq_core::time::Nanos;

use super::Scenario;
use super::any_elevator;
use crate::rng::{Ppm, Rng};
use crate::setup::Setup;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "attached",
    about: "attached threads that stop looking, beside one with an event loop",
    setup,
};

fn setup(rng: &mut Rng) -> Setup {
    let mut setup = Setup::base(rng);
    let attached = rng.from_to(1, 3) as usize;
    setup.is_event_loop = vec![false; attached + 1];
    let helper = rng.below(attached as u64 + 1) as usize;
    setup.is_event_loop[helper] = true;
    setup.elevator = any_elevator(rng);
    setup.shared_tags = rng.chance(Ppm::percent(30));
    setup.away = Ppm::percent(30);
    setup.away_max = Nanos::from_millis(rng.pick(&[1, 50]));
    setup.patience = Nanos::from_secs(2);
    setup
}
