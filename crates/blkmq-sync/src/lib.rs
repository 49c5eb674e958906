//! blkmq-sync.
