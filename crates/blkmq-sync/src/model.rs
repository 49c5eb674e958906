//! The extent of the loom models (every interleaving with at most two preemptions, unless
//! `LOOM_MAX_PREEMPTIONS` sets another limit), and how they inject faults.
//!
//! Every actor in a scenario is a thread of its own; the first thread only spawns, joins and checks at the
//! end. When it acted too, loom left out orders in which the others act first, and after a `yield_now` it
//! lets no load return a value that its thread has seen before. Both hid faults. So threads do not loop until
//! they see something; they look once or twice, and invariants are asserted at the end.
//!
//! The models were tried on 29 weakened copies of the code (an ordering made relaxed, a step left out), in
//! addition to the faults that the tests inject. They find 25. Of the other four, two drop an Acquire that
//! the fence after it makes redundant, one drops an Acquire that no reader of the run state relies on, and
//! one is a `start` of run work that queues nothing when no run was requested, which a unit test finds.

use crate::atomic::faults::{Fault, INJECTED};

/// Runs `scenario` in every interleaving within the bound.
pub(crate) fn check(scenario: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = builder.preemption_bound.or(Some(2));
    builder.check(scenario);
}

/// Runs `scenario` with a fence left out of the code. The test around it expects a panic.
pub(crate) fn check_with(fault: Fault, scenario: impl Fn() + Sync + Send + 'static) {
    INJECTED.set(fault);
    check(scenario);
}

/// Waits for threads of a scenario.
pub(crate) fn join_all(threads: impl IntoIterator<Item = loom::thread::JoinHandle<()>>) {
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}
