//! blkmq-export.
