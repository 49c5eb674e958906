//! blkmq-core.
