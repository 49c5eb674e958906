//! `everything`: every fault, every control action, attached threads and power cuts together.

use blkmq_core::time::Nanos;

use super::Scenario;
use super::any_elevator;
use crate::drive::fault::Faults;
use crate::rng::{Ppm, Rng};
use crate::setup::Control;
use crate::setup::Setup;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "everything",
    about: "every fault and control action at once",
    setup,
};

fn setup(rng: &mut Rng) -> Setup {
    let mut setup = Setup::base(rng);
    setup.is_event_loop = (0..rng.from_to(1, 5))
        .map(|id| id == 0 || rng.chance(Ppm::percent(70)))
        .collect();
    setup.away = Ppm::percent(10);
    setup.away_max = Nanos::from_millis(5);
    setup.elevator = any_elevator(rng);
    setup.shared_tags = rng.chance(Ppm::percent(30));
    setup.interleave = Ppm::percent(10);
    setup.destage_every = Some(Nanos::from_micros(200));
    setup.power_cuts = rng.below(2) as u32;
    setup.timeout = Nanos::from_millis(5);
    setup.requests_per_reactor = rng.pick(&[4, 64]);
    setup.drive.slots = rng.pick(&[2, 1024]);
    setup.drive.faults = Faults {
        resource: Ppm::percent(2),
        device_resource: Ppm::percent(3),
        requeue: Ppm::percent(4),
        lost: Ppm::percent(2),
        slow: Ppm::percent(1),
        slow_factor: 200,
        twice: Ppm::percent(2),
        transport: Ppm::percent(1),
        wait: Ppm::percent(50),
        late: Ppm::percent(50),
        bad_blocks: 40..42,
        ..Faults::default()
    };
    setup.control = Control {
        freeze: 1,
        quiesce: 1,
        switch: 1,
        depth: 1,
        ..Control::every_us(2_000)
    };
    setup
}
