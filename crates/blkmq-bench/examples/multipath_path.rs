//! Decides nothing: does as many I/Os over four paths as its argument says, for `cargo xtask instructions`, which runs it twice
//! under callgrind and divides the difference. A second argument is another selector than round-robin.

use anyhow::{Context, Result, anyhow};
use blkmq_bench::engine::direct;
use blkmq_host::driver::multipath::Selector;

fn main() -> Result<()> {
    let mut words = std::env::args().skip(1);
    let count = words.next().context("say how many I/Os: multipath_path N")?;
    let count: u64 = count
        .parse()
        .with_context(|| format!("multipath_path {count}: not a whole number"))?;
    let name = words.next().unwrap_or_else(|| "round-robin".into());
    let selector: Selector = name.parse().map_err(|_| anyhow!("no selector is named {name}"))?;
    let done = direct::run_multipath(4, selector, count)?;
    println!("{done} I/Os");
    Ok(())
}
