//! Does as many I/Os in process as its second argument says, in the way that its first one names
//! (see `blkmq_bench::engine::direct`). `cargo xtask instructions` runs it twice under callgrind
//! and divides the difference.

use anyhow::{Context, Result};
use blkmq_bench::engine::direct;

fn main() -> Result<()> {
    let mut words = std::env::args().skip(1);
    let way = words
        .next()
        .context("say which way, and how many I/Os: in_process WAY N")?;
    let count = words.next().context("say how many I/Os: in_process WAY N")?;
    let count: u64 = count
        .parse()
        .with_context(|| format!("in_process {way} {count}: not a whole number"))?;
    let done = direct::run(&way, count)?;
    println!("{done} I/Os");
    Ok(())
}
