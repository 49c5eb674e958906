//! `mapped-faults`: one member fails, requeues, refuses or loses requests, and the others do not.

use blkmq_core::time::Nanos;

use super::Scenario;
use crate::drive::fault::Faults;
use crate::rng::{Ppm, Rng};
use crate::setup::Setup;

pub(in crate::scenario) const SCENARIO: Scenario = Scenario {
    name: "mapped-faults",
    about: "mapped disks of which one member fails, requeues, refuses or times out",
    setup,
};

fn setup(rng: &mut Rng) -> Setup {
    let mut setup = super::over_drives(rng);
    setup.timeout = Nanos::from_millis(5);
    let faults = Faults {
        requeue: Ppm::percent(rng.pick(&[3, 10])),
        resource: Ppm::percent(rng.pick(&[0, 5])),
        device_resource: Ppm::percent(rng.pick(&[0, 10])),
        transport: Ppm::percent(rng.pick(&[0, 2, 10])),
        lost: Ppm::percent(rng.pick(&[0, 2])),
        slow: Ppm::percent(rng.pick(&[0, 2])),
        slow_factor: 200,
        twice: Ppm::percent(2),
        wait: Ppm::percent(30),
        late: Ppm::percent(30),
        bad_blocks: if rng.chance(Ppm::percent(50)) {
            16..20
        } else {
            0..0
        },
        ..Faults::default()
    };
    match setup.more_drives.last_mut() {
        Some((_, drive)) => drive.faults = faults,
        None => setup.drive.faults = faults,
    }
    if rng.chance(Ppm::percent(30)) {
        setup.drive.faults.transport = Ppm::percent(5);
    }
    setup
}
