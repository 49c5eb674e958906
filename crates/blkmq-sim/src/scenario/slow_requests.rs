//! Now and then a request hangs, of whichever operation, while the drive has room for others.

use blkmq_core::time::Nanos;

use super::Scenario;
use super::any_elevator;
use crate::drive::fault::Faults;
use crate::drive::model::Model;
use crate::rng::{Ppm, Rng};
use crate::setup::{Control, Setup};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "slow-requests",
    about: "requests that hang for 10 ms, 1 s, 30 s or for ever",
    setup,
};

fn setup(rng: &mut Rng) -> Setup {
    let mut setup = Setup::base(rng);
    setup.elevator = any_elevator(rng);
    setup.depth = rng.pick(&[2, 4, 16, 64]);
    setup.requests_per_reactor = 64;
    if let Model::Flash { units, .. } = &mut setup.drive.model {
        *units = rng.pick(&[4, 16]);
    }
    setup.drive.faults = Faults {
        hangs: Ppm(rng.pick(&[5_000, 10_000, 30_000])),
        hangs_for: rng.pick(&[
            Nanos::from_millis(10),
            Nanos::from_secs(1),
            Nanos::from_secs(30),
            FOR_EVER,
        ]),
        ..Faults::default()
    };
    setup.timeout = Nanos::from_secs(40);
    setup.patience = Nanos::from_secs(60);
    if rng.chance(Ppm::percent(50)) {
        setup.control = Control {
            groups: 1,
            ..Control::every_us(20_000)
        };
    }
    for client in &mut setup.clients {
        client.groups = rng.pick(&[2, 3, 8]);
        client.depth = (1, rng.pick(&[1, 4, 16, 64]));
        client.mix = [35, 35, 10, 10, 10];
        client.bios = 100;
        client.pause_max = Nanos::from_millis(2);
    }
    setup
}

/// Until the time limit.
const FOR_EVER: Nanos = Nanos::from_secs(3600);
