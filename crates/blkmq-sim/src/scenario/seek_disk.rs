//! `seek-disk`: a rotating disk with one arm, sequential streams and random places.

use blkmq_core::time::Nanos;

use super::Scenario;
use super::any_elevator;
use crate::drive::model::Model;
use crate::rng::{Ppm, Rng};
use crate::setup::Setup;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "seek-disk",
    about: "a rotating disk, streams beside random I/O",
    setup,
};

fn setup(rng: &mut Rng) -> Setup {
    let mut setup = Setup::base(rng);
    setup.elevator = any_elevator(rng);
    setup.patience = Nanos::from_secs(30);
    setup.drive.model = Model::Rotating {
        rpm: 7200,
        seek_min: Nanos::from_micros(500),
        seek_max: Nanos::from_millis(15),
        track: 64 << 10,
    };
    for client in &mut setup.clients {
        client.sequential = Ppm::percent(70);
        client.pause_max = Nanos::from_millis(5);
    }
    setup
}
