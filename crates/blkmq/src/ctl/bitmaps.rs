//! `ctl bitmap`: which parts of a disk have changed since a moment, for backups.

use anyhow::Result;
use clap::Subcommand;
use clap_complete::engine::ArgValueCompleter;
use serde_json::json;

use super::printed::print_json;
use super::table::{Column, table};
use crate::complete::Disks;
use crate::control::client::Client;
use crate::stdout::print;

/// What can be done with bitmaps.
#[derive(Debug, Subcommand)]
pub enum BitmapCommand {
    /// Note all changes of a disk from now on
    Add {
        /// The disk
        #[arg(add = ArgValueCompleter::new(Disks))]
        disk: String,
        /// A name for the bitmap
        name: String,
        /// What a bit stands for: a power of two from 512 to 2G [default: a cluster of the image, 4K to 64K]
        #[arg(long, value_name = "SIZE")]
        granularity: Option<String>,
    },
    /// Remove a bitmap
    Remove {
        /// The disk
        #[arg(add = ArgValueCompleter::new(Disks))]
        disk: String,
        /// The bitmap
        name: String,
    },
    /// List the bitmaps of a disk, with the bytes that have changed
    List {
        /// The disk
        #[arg(add = ArgValueCompleter::new(Disks))]
        disk: String,
    },
}

/// Does it.
///
/// # Errors
/// The daemon's, or a size that is none.
pub(super) fn run(is_json: bool, client: &mut Client, command: &BitmapCommand) -> Result<()> {
    match command {
        BitmapCommand::Add {
            disk,
            name,
            granularity,
        } => {
            let size = |text: &str| blkmq_host::value::size("granularity", text);
            let granularity = granularity.as_deref().map(size).transpose()?;
            let params = json!({"disk": disk, "name": name, "granularity": granularity});
            client.call("bitmap.add", &params).map(drop)
        }
        BitmapCommand::Remove { disk, name } => {
            let params = json!({"disk": disk, "name": name});
            client.call("bitmap.remove", &params).map(drop)
        }
        BitmapCommand::List { disk } => {
            let bitmaps = client.call("bitmap.list", &json!({"disk": disk}))?;
            match is_json {
                true => print_json(&bitmaps),
                false => print(&table(COLUMNS, bitmaps.as_array().map_or(&[], Vec::as_slice))),
            }
        }
    }
}

const COLUMNS: &[Column] = &[
    Column::text("name"),
    Column::bytes("granularity"),
    Column::text("enabled"),
    Column::bytes("changed"),
];
