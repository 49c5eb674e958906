//! The scenarios: each by its name, in a file of its own. A scenario turns a seed into a setup; `scale`,
//! `clients`, `fair` and `poll` measure a model instead.

mod attached;
pub mod clients;
mod deadline;
mod depth_change;
mod direct;
mod every_context;
mod everything;
pub mod fair;
mod few_hctx;
mod flush_storm;
mod groups;
mod mapped;
mod multipath;
mod one_tag;
pub mod poll;
mod power_cut;
mod quiesce;
mod requeues;
pub mod scale;
mod seek_disk;
mod shared_tags;
mod slow_requests;
mod switch;
mod timeouts;

use blkmq_core::sched::{self, ElevatorType};

use crate::rng::Rng;
use crate::setup::Setup;

/// A kind of history.
#[derive(Clone, Copy, Debug)]
pub struct Scenario {
    /// Its name on the command line.
    pub name: &'static str,
    /// A summary in one line.
    pub about: &'static str,
    /// Draws a setup.
    pub setup: fn(&mut Rng) -> Setup,
}

/// All scenarios.
pub const ALL: &[Scenario] = &[
    direct::SCENARIO,
    deadline::SCENARIO,
    flush_storm::SCENARIO,
    power_cut::SCENARIO,
    switch::SCENARIO,
    one_tag::SCENARIO,
    timeouts::SCENARIO,
    requeues::SCENARIO,
    slow_requests::SCENARIO,
    shared_tags::SCENARIO,
    attached::SCENARIO,
    few_hctx::SCENARIO,
    seek_disk::SCENARIO,
    depth_change::SCENARIO,
    groups::SCENARIO,
    quiesce::SCENARIO,
    every_context::SCENARIO,
    multipath::SCENARIO,
    mapped::SCENARIO,
    mapped::faults::SCENARIO,
    mapped::power_cut::SCENARIO,
    everything::SCENARIO,
];

/// Finds a scenario by its name.
pub fn by_name(name: &str) -> Option<&'static Scenario> {
    ALL.iter().find(|scenario| scenario.name == name)
}

impl Scenario {
    /// Returns the setup of one seed.
    pub fn setup_of(&self, seed: u64) -> Setup {
        (self.setup)(&mut Rng::new(seed, STREAM_SETUP))
    }
}

fn any_elevator(rng: &mut Rng) -> &'static ElevatorType {
    rng.pick(&sched::BUILT_IN)
}

const STREAM_SETUP: u64 = 100;
