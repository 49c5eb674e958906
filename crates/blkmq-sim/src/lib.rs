//! blkmq-sim.
