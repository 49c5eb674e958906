//! The `blkmq` command.
fn main() {}
