//! Parameters of the [methods](super): what they are read into, and what is refused.

use anyhow::{Context, Result};
use blkmq_drivers::multipath::MultipathDevice;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use crate::control::protocol::{BAD_PARAMS, Failure};
use crate::control::server::Daemon;
use crate::control::wiped::Wiped;

/// A table of the configuration, and what is to become of it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Edit {
    pub(super) kind: String,
    #[serde(default)]
    pub(super) name: String,
    #[serde(default)]
    pub(super) keys: Map<String, Value>,
    #[serde(default)]
    pub(super) dry_run: bool,
}

/// A disk, for methods that need nothing else.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct OneDisk {
    pub(super) disk: String,
}

/// Keys with their values as a configuration has them; null is none.
pub(in crate::control) fn values(keys: Map<String, Value>) -> Result<Vec<(String, Option<toml::Value>)>> {
    let value = |(key, value): (String, Value)| {
        let value = match value {
            Value::Null => None,
            value => {
                let converted = toml::Value::try_from(&value);
                Some(converted.with_context(|| format!("{key} = {value} rejected"))?)
            }
        };
        Ok((key, value))
    };
    keys.into_iter().map(value).collect()
}

/// A message to a multipath disk.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Message {
    disk: String,
    message: String,
    path: Option<String>,
    group: Option<u8>,
}

impl Message {
    pub(super) fn send(self, daemon: &Daemon) -> Result<()> {
        let control = daemon.running.control();
        let disks = control.disks();
        let disk = disks.iter().find(|disk| disk.name == self.disk);
        let disk = disk.with_context(|| format!("disk {}: there is no such disk", self.disk))?;
        let device = MultipathDevice::of_queue(&control, disk.queue)?;
        let path = || self.path.as_deref().context("path is missing");
        match self.message.as_str() {
            "fail_path" => device.fail_path(path()?)?,
            "reinstate_path" => device.reinstate_path(path()?)?,
            "switch_group" => device.switch_group(self.group.context("group is missing")?)?,
            other => {
                anyhow::bail!("message {other:?} rejected: must be fail_path, reinstate_path or switch_group")
            }
        }
        Ok(())
    }
}

/// The default of a flag.
pub(super) fn yes() -> bool {
    true
}

/// Accepts no parameters.
///
/// # Errors
/// If there are some.
pub(super) fn none(params: Value) -> Result<(), Failure> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct None {}
    of::<None>(params).map(drop)
}

pub(in crate::control) fn of<T: DeserializeOwned>(params: Value) -> Result<T, Failure> {
    let params = if params.is_null() { json!({}) } else { params };
    // Somebody's passphrase may be where none is expected.
    let params = Wiped::from(params);
    if !params.get().is_object() {
        return Err(Failure::new(BAD_PARAMS, "params: must be an object, by names"));
    }
    T::deserialize(params.get()).map_err(|error| Failure::new(BAD_PARAMS, format!("params: {error}")))
}
