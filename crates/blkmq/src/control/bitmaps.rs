//! Bitmaps of disks, at an operator's word: which parts of a disk have changed since a moment. `methods` lists them;
//! `serve::running` makes them.

use serde::Deserialize;
use serde_json::{Value, json};

use super::methods::Session;
use super::methods::params::of;
use super::protocol::Failure;
use super::server::Daemon;

pub(super) const ADD_HELP: &str = "note all changes of a disk in an image from now on, for backups: {disk, name, granularity}; without granularity, a cluster's size from 4 to 64 KiB";
pub(super) const REMOVE_HELP: &str = "remove a bitmap of a disk: {disk, name}";
pub(super) const LIST_HELP: &str =
    "the bitmaps of a disk, with the bytes that have changed, null if it cannot be used: {disk}";

/// `bitmap.add`.
pub(super) fn add(_: &mut Session, params: Value, daemon: &Daemon) -> Result<Value, Failure> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Params {
        disk: String,
        name: String,
        granularity: Option<u64>,
    }
    let Params {
        disk,
        name,
        granularity,
    } = of(params)?;
    daemon.running.add_bitmap(&disk, &name, granularity)?;
    Ok(json!({}))
}

/// `bitmap.remove`.
pub(super) fn remove(_: &mut Session, params: Value, daemon: &Daemon) -> Result<Value, Failure> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Params {
        disk: String,
        name: String,
    }
    let Params { disk, name } = of(params)?;
    daemon.running.remove_bitmap(&disk, &name)?;
    Ok(json!({}))
}

/// `bitmap.list`.
pub(super) fn list(_: &mut Session, params: Value, daemon: &Daemon) -> Result<Value, Failure> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Params {
        disk: String,
    }
    let Params { disk } = of(params)?;
    let bitmaps = daemon.running.bitmaps(&disk)?.into_iter();
    let bitmaps = bitmaps.map(|bitmap| {
        json!({
            "name": bitmap.name,
            "granularity": bitmap.granularity,
            "enabled": bitmap.is_enabled,
            "changed": bitmap.changed,
        })
    });
    Ok(bitmaps.collect())
}
