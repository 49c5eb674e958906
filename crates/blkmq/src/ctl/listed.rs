//! `ctl list`, `watch` and `show`: what there is of a kind, in a table, and one entry in full.

use std::time::Duration;

use anyhow::{Result, bail};
use clap::ValueEnum;
use serde_json::{Value, json};

use super::printed::{print_json, print_record};
use super::table::{Column, table};
use crate::control::client::Client;
use crate::stdout::{has_reader_left_within, print};

/// What can be listed.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Listed {
    /// Disks
    #[value(alias = "disk")]
    Disks,
    /// Queues
    #[value(alias = "queue")]
    Queues,
    /// Groups
    #[value(alias = "group")]
    Groups,
    /// Exports
    #[value(alias = "export")]
    Exports,
}

impl Listed {
    fn method(self) -> &'static str {
        match self {
            Self::Disks => "disk.list",
            Self::Queues => "queue.list",
            Self::Groups => "group.list",
            Self::Exports => "export.list",
        }
    }

    /// The key with the name of an entry.
    fn key(self) -> &'static str {
        match self {
            Self::Disks | Self::Queues => "name",
            Self::Groups => "path",
            Self::Exports => "address",
        }
    }

    fn table(self, rows: &Value) -> String {
        table(self.columns(), rows.as_array().map_or(&[], Vec::as_slice))
    }

    fn columns(self) -> &'static [Column] {
        match self {
            Self::Disks => DISKS,
            Self::Queues => QUEUES,
            Self::Groups => GROUPS,
            Self::Exports => EXPORTS,
        }
    }
}

/// Prints all entries of a kind.
///
/// # Errors
/// There is no daemon.
pub(super) fn list(is_json: bool, client: &mut Client, what: Listed) -> Result<()> {
    let rows = client.call(what.method(), &json!({}))?;
    match is_json {
        true => print_json(&rows),
        false => print(&what.table(&rows)),
    }
}

/// Prints a list, and again whenever it differs; as JSON, each on a line.
///
/// # Errors
/// There is no daemon.
pub(super) fn watch(is_json: bool, client: &mut Client, what: Listed, interval: Duration) -> Result<()> {
    let mut last = Value::Null;
    loop {
        let rows = client.call(what.method(), &json!({}))?;
        if rows != last {
            let gap = if is_json || last.is_null() { "" } else { "\n" };
            match is_json {
                true => print(&format!("{rows}\n"))?,
                false => print(&format!("{gap}{}", what.table(&rows)))?,
            }
            last = rows;
        }
        if has_reader_left_within(std::io::stdout(), interval) {
            return Ok(());
        }
    }
}

/// Prints what is known of an entry; of a group, on each queue.
///
/// # Errors
/// There is none of this name.
pub(super) fn show(is_json: bool, client: &mut Client, what: Listed, name: &str) -> Result<()> {
    let rows = client.call(what.method(), &json!({}))?;
    let all = rows.as_array().into_iter().flatten();
    let found: Vec<&Value> = all.filter(|row| row[what.key()] == name).collect();
    if found.is_empty() {
        let known = rows.as_array().into_iter().flatten();
        let mut known: Vec<&str> = known.filter_map(|row| row[what.key()].as_str()).collect();
        known.sort_unstable();
        known.dedup();
        let more = if known.len() > SHOWN_MAX { ", …" } else { "" };
        known.truncate(SHOWN_MAX);
        bail!(
            "{name}: there is none of this name; there are: {}{more}",
            known.join(", ")
        );
    }
    found.into_iter().try_for_each(|row| print_record(is_json, row))
}

/// Names that an error lists.
const SHOWN_MAX: usize = 20;
const DISKS: &[Column] = &[
    Column::text("name"),
    Column::text("queue"),
    Column::bytes("size"),
    Column::number("block_size"),
    Column::text("read_only"),
    Column::text("group"),
    Column::number("clients"),
    Column::text("state"),
];
const QUEUES: &[Column] = &[
    Column::text("name"),
    Column::text("sched"),
    Column::number("depth"),
    Column::number("depth_limit"),
    Column::number("in_flight"),
    Column::text("io_poll"),
];
const GROUPS: &[Column] = &[
    Column::text("queue"),
    Column::text("path"),
    Column::number("weight"),
    Column::text("caps"),
    Column::time("latency_target_ns"),
    Column::number("in_flight"),
    Column::time("oldest_ns"),
];
const EXPORTS: &[Column] = &[
    Column::text("address"),
    Column::number("open"),
    Column::number("max"),
    Column::number("refused"),
    Column::text("state"),
    Column::text("problem"),
];
