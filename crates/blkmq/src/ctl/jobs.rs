//! `ctl flatten`, `ctl commit` and `ctl jobs`: work of the daemon in the background, shown until it has ended.

use std::io::{IsTerminal, Write};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use blkmq_host::value::{self, ConfigError};
use clap::Args;
use clap_complete::engine::ArgValueCompleter;
use serde_json::json;

use super::printed::print_json;
use super::table::{Column, table};
use crate::complete::Disks;
use crate::control::client::Client;
use crate::stdout::{has_reader_left_within, print};

/// Work on a disk's image.
#[derive(Debug, Args)]
pub struct WorkArgs {
    /// The disk
    #[arg(add = ArgValueCompleter::new(Disks))]
    pub disk: String,
    /// Weight of this work among the disk's neighbours, 1 to 1000
    #[arg(long, default_value_t = 100, value_parser = weight)]
    pub weight: u16,
    /// Do not wait until it is done
    #[arg(long)]
    pub no_wait: bool,
}

/// Parses `--weight`.
fn weight(text: &str) -> Result<u16, ConfigError> {
    value::whole("weight", text, 1..=1000, "a whole number from 1 to 1000")
}

/// Begins work on a disk's image by this method, and waits for its end, unless that is not wanted.
///
/// # Errors
/// It cannot be, or was given up.
pub(super) fn begin(client: &mut Client, method: &str, work: &WorkArgs) -> Result<()> {
    client.call(method, &json!({"disk": work.disk, "weight": work.weight}))?;
    match work.no_wait {
        true => Ok(()),
        false => wait(client, &work.disk),
    }
}

/// Waits for the end of a disk's work, and shows how far it is on a terminal.
fn wait(client: &mut Client, disk: &str) -> Result<()> {
    let is_shown = std::io::stderr().is_terminal();
    loop {
        let jobs = client.call("job.list", &json!({}))?;
        let mut all = jobs.as_array().into_iter().flatten();
        let job = all.find(|job| job["disk"] == disk);
        let job = job.with_context(|| format!("disk {disk}: the daemon does not know of it any more"))?;
        if is_shown {
            let (done, bytes) = (&job["done"], &job["bytes"]);
            // Who does not see it misses nothing else.
            let _ = write!(std::io::stderr(), "\r\x1b[K{done} of {bytes} bytes");
        }
        if job["state"] == "running" {
            match has_reader_left_within(std::io::stdout(), LOOK) {
                true => return Ok(()),
                false => continue,
            }
        }
        if is_shown {
            eprint!("\r\x1b[K");
        }
        return match job["error"].as_str() {
            Some(error) => bail!("disk {disk}: {error}"),
            None => Ok(()),
        };
    }
}

/// Prints what is under way and what has ended.
///
/// # Errors
/// There is no daemon.
pub(super) fn list(client: &mut Client, is_json: bool) -> Result<()> {
    let jobs = client.call("job.list", &json!({}))?;
    match is_json {
        true => print_json(&jobs),
        false => print(&table(COLUMNS, jobs.as_array().map_or(&[], Vec::as_slice))),
    }
}

const COLUMNS: &[Column] = &[
    Column::text("disk"),
    Column::text("kind"),
    Column::bytes("bytes"),
    Column::bytes("done"),
    Column::text("state"),
    Column::text("error"),
];
/// How often the daemon is asked.
const LOOK: Duration = Duration::from_millis(200);
