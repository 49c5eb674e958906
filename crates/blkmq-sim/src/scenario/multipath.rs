//! `multipath`: paths that fail, hang and recover at random under load, with schedulers above them,
//! groups and messages of an operator.

use blkmq_core::mapper::multipath::{Failback, NoPath, Selector};
use blkmq_core::time::Nanos;

use super::Scenario;
use super::any_elevator;
use crate::drive::fault::Faults;
use crate::paths;
use crate::rng::{Ppm, Rng};
use crate::setup::Setup;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "multipath",
    about: "paths fail, hang and come back; every elevator and selector; messages while requests run",
    setup,
};

fn setup(rng: &mut Rng) -> Setup {
    let mut setup = Setup::base(rng);
    setup.elevator = any_elevator(rng);
    setup.shared_tags = rng.chance(Ppm::percent(20));
    // Short, because requests that a hanging path has taken continue over another path only after
    // it.
    setup.timeout = Nanos::from_millis(rng.from_to(2, 8));
    setup.patience = Nanos::from_secs(2);
    setup.drive.slots = rng.pick(&[2, 16, 1024]);
    setup.drive.faults = Faults {
        resource: Ppm::percent(rng.pick(&[0, 2])),
        device_resource: Ppm::percent(rng.pick(&[0, 5])),
        transport: Ppm::percent(rng.pick(&[0, 1])),
        twice: Ppm::percent(1),
        wait: Ppm::percent(30),
        late: Ppm::percent(30),
        bad_blocks: if rng.chance(Ppm::percent(30)) {
            40..42
        } else {
            0..0
        },
        ..Faults::default()
    };
    let after = Failback::After(Nanos::from_millis(1));
    setup.paths = Some(paths::Spec {
        groups: (0..rng.from_to(1, 5)).map(|_| rng.below(3) as u8).collect(),
        selector: rng.pick(&Selector::ALL),
        failback: rng.pick(&[Failback::Immediate, Failback::Manual, after]),
        no_path: rng.pick(&[
            NoPath::Queue,
            NoPath::Queue,
            NoPath::Fail,
            NoPath::QueueFor(Nanos::from_millis(2)),
        ]),
        check_interval: Nanos::from_micros(rng.pick(&[200, 1000])),
        every: (Nanos::from_micros(20), Nanos::from_micros(rng.pick(&[100, 1000]))),
        messages: Ppm::percent(rng.pick(&[0, 20, 50])),
    });
    setup
}
