//! `shared-tags`: one tag set for all hardware contexts, a disk of 1 ms beside one of 100 ms.

use blkmq_core::time::Nanos;

use super::Scenario;
use super::any_elevator;
use crate::drive::model::Model;
use crate::rng::{Ppm, Rng};
use crate::setup::Setup;
use crate::workload::Workload;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "shared-tags",
    about: "one tag set; a disk of 1 ms beside one of 100 ms",
    setup,
};

fn setup(rng: &mut Rng) -> Setup {
    let mut setup = Setup::base(rng);
    setup.is_event_loop = vec![true, true];
    setup.elevator = any_elevator(rng);
    setup.shared_tags = true;
    setup.depth = rng.pick(&[1, 8, 32]);
    setup.patience = Nanos::from_secs(60);
    setup.drive.model = Model::Flash {
        units: 64,
        read: Nanos::from_millis(1),
        write: Nanos::from_millis(1),
        spread: 20,
    };
    setup.drive.slowness = vec![1, 100];
    let one = |disk| Workload {
        disks: vec![disk],
        sequential: Ppm::NEVER,
        blocks_max: 1,
        ..setup.clients[0].clone()
    };
    setup.clients = vec![one(0), one(1)];
    setup
}
