//! Snapshots, resets and clones of disks in images, at an operator's word. `methods` lists them.

use std::collections::BTreeMap;
use std::path::PathBuf;

use blkmq_config::{Document, Kind};
use blkmq_drivers::qcow2::{BaseFormat, NewImage};
use blkmq_host::device::Replacement;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::methods::Session;
use super::methods::params::{of, values};
use super::protocol::Failure;
use super::server::Daemon;

pub(super) const SNAPSHOT_HELP: &str = "keep what disks have now as images at these paths, all at one moment, and go on above them: {disks: {NAME: PATH}}";
pub(super) const RESET_HELP: &str =
    "throw away what disks without clients have above their bases: {disks: [NAME]}";
pub(super) const CLONE_HELP: &str = "make an image on a base and serve it: {name, path, base, format, keys}; format is that of the base, raw or qcow2";

/// `disk.snapshot`.
pub(super) fn snapshot(_: &mut Session, params: Value, daemon: &Daemon) -> Result<Value, Failure> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Params {
        disks: BTreeMap<String, PathBuf>,
    }
    let Params { disks } = of(params)?;
    let wanted = disks
        .into_iter()
        .map(|(name, path)| (name, Replacement::Snapshot(path)));
    replace(daemon, &wanted.collect::<Vec<_>>())
}

/// `disk.reset`.
pub(super) fn reset(_: &mut Session, params: Value, daemon: &Daemon) -> Result<Value, Failure> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Params {
        disks: Vec<String>,
    }
    let Params { disks } = of(params)?;
    let wanted = disks.into_iter().map(|name| (name, Replacement::Reset));
    replace(daemon, &wanted.collect::<Vec<_>>())
}

fn replace(daemon: &Daemon, wanted: &[(String, Replacement)]) -> Result<Value, Failure> {
    daemon.running.replace_disks(wanted)?;
    Ok(json!({}))
}

/// `disk.clone`.
pub(super) fn clone(session: &mut Session, params: Value, daemon: &Daemon) -> Result<Value, Failure> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Params {
        name: String,
        path: PathBuf,
        base: PathBuf,
        format: Format,
        #[serde(default)]
        keys: Map<String, Value>,
    }
    let Params {
        name,
        path,
        base,
        format,
        keys,
    } = of(params)?;
    let format = match format {
        Format::Raw => BaseFormat::Raw,
        Format::Qcow2 => BaseFormat::Qcow2,
    };
    let new = NewImage {
        path: path.clone(),
        size: None,
        cluster: None,
        has_subclusters: false,
        base: Some((base, format)),
    };
    let add = |document: &mut Document| {
        let given = values(keys.clone())?.into_iter();
        let given = given.filter_map(|(key, value)| Some((key, value?)));
        let image = ("qcow2".to_owned(), toml::Value::try_from(&path)?);
        document.insert(Kind::Disk, &name, given.chain([image]).collect())
    };
    // Who may not have the disk, or has a sandbox without its directory, is told that, and makes no file.
    session.check(daemon, add)?;
    new.create().map_err(anyhow::Error::from)?;
    let added = session.edit(daemon, false, add);
    if added.is_err() {
        // It was made for nothing. The first error is the one to report.
        let _ = std::fs::remove_file(&path);
    }
    added
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Format {
    Raw,
    Qcow2,
}
