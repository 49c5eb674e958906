//! Decides what `blkmq demo` shows.

use anyhow::Result;
use clap::Args;

/// What `demo` takes.
#[derive(Debug, Args)]
pub struct DemoArgs {
    /// Run the load N seconds for each elevator
    #[arg(long, value_name = "N", default_value_t = 5.0)]
    pub seconds: f64,
}

/// Shows it.
///
/// # Errors
/// What cannot be served.
pub fn main(_args: &DemoArgs) -> Result<()> {
    anyhow::bail!("not yet")
}
