//! `deadline`: mq-deadline over one to four reactors, with the priority classes.

use blkmq_core::sched;

use super::Scenario;
use crate::drive::model::Model;
use crate::rng::{Ppm, Rng};
use crate::setup::Setup;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "deadline",
    about: "mq-deadline, priority classes, one to four submitters",
    setup,
};

fn setup(rng: &mut Rng) -> Setup {
    let mut setup = Setup::base(rng);
    setup.elevator = sched::MQ_DEADLINE;
    for client in &mut setup.clients {
        client.prio = Ppm::percent(50);
    }
    setup.interleave = Ppm::percent(rng.pick(&[5, 50, 90]));
    if rng.chance(Ppm::percent(40)) {
        // Nothing is ever in flight, so no completion compensates for a dispatcher that does not
        // check again.
        setup.is_event_loop = vec![true; 4];
        setup.drive.model = Model::Null {
            inline: Ppm::percent(100),
        };
    }
    setup
}
