//! `groups`: groups are made, weighted, capped, moved and removed under load; sometimes the queue is
//! frozen or quiesced, or its elevator switched, with requests waiting for caps.

use blkmq_core::time::Nanos;

use super::{Scenario, any_elevator};
use crate::rng::Rng;
use crate::setup::{Control, Setup};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "groups",
    about: "groups come, change and go, with caps, under load",
    setup,
};

fn setup(rng: &mut Rng) -> Setup {
    let mut setup = Setup::base(rng);
    setup.elevator = any_elevator(rng);
    // Few, so that groups have to share them.
    setup.requests_per_reactor = rng.pick(&[4, 8, 32]);
    setup.hctxs = rng.pick(&[1, 2, u16::MAX]);
    setup.control = Control {
        groups: 20,
        freeze: 1,
        quiesce: 1,
        switch: 1,
        ..Control::every_us(rng.pick(&[100, 500, 2000]))
    };
    for client in &mut setup.clients {
        client.groups = 8;
        client.depth = (1, rng.pick(&[4, 16, 64]));
        client.burst = (10, 60);
        client.pause_max = Nanos::from_millis(5);
    }
    setup
}
