//! blkmq-sync.
pub mod lent;
