//! `switch`: the elevator is switched every 10 ms on average, under load.

use blkmq_core::time::Nanos;

use super::Scenario;
use super::any_elevator;
use crate::rng::Rng;
use crate::setup::Control;
use crate::setup::Setup;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "switch",
    about: "the elevator is switched every 10 ms under load",
    setup,
};

fn setup(rng: &mut Rng) -> Setup {
    let mut setup = Setup::base(rng);
    setup.elevator = any_elevator(rng);
    setup.control = Control {
        switch: 4,
        freeze: 1,
        ..Control::every_us(10_000)
    };
    for client in &mut setup.clients {
        client.burst = (10, 30);
        client.pause_max = Nanos::from_millis(20);
    }
    setup
}
