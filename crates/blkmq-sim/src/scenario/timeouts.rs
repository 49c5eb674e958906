//! `timeouts`: half of all requests never complete by themselves; some completions come after the drive
//! has given up the request.

use blkmq_core::time::Nanos;

use super::Scenario;
use super::any_elevator;
use crate::drive::fault::Faults;
use crate::rng::{Ppm, Rng};
use crate::setup::Setup;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "timeouts",
    about: "50 % of the requests time out; late and repeated ends",
    setup,
};

fn setup(rng: &mut Rng) -> Setup {
    let mut setup = Setup::base(rng);
    setup.elevator = any_elevator(rng);
    setup.timeout = Nanos::from_millis(rng.from_to(1, 10));
    setup.patience = Nanos::from_millis(200);
    setup.drive.faults = Faults {
        lost: Ppm::percent(50),
        slow: Ppm::percent(5),
        slow_factor: 100,
        twice: Ppm::percent(5),
        wait: Ppm::percent(30),
        late: Ppm::percent(50),
        ..Faults::default()
    };
    setup
}
