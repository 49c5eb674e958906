//! Decides nothing: does as many I/Os on the direct path as its argument says, for `cargo xtask instructions`, which
//! runs it twice under callgrind and divides the difference.

use anyhow::{Context, Result};
use blkmq_bench::engine::direct;
use blkmq_core::sched::Kind;

fn main() -> Result<()> {
    let count = std::env::args().nth(1);
    let count = count.context("say how many I/Os: direct_path N")?;
    let count: u64 = count
        .parse()
        .with_context(|| format!("direct_path {count}: not a whole number"))?;
    let done = direct::run(Kind::None, count)?;
    println!("{done} I/Os");
    Ok(())
}
