//! blkmq-host.
