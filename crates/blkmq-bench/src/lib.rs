//! blkmq-bench.
