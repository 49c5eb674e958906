//! The lists that are queried of a daemon beside its statistics: its groups and disks, and their settings.

use std::collections::BTreeMap;

use anyhow::Result;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::json;

use crate::control::client::Client;

/// Groups and disks.
#[derive(Clone, Debug, Default)]
pub(super) struct Lists {
    pub(super) groups: Vec<Group>,
    pub(super) disks: Vec<Disk>,
}

/// A group.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Group {
    /// `None` if no disk is in it.
    pub(super) queue: Option<String>,
    pub(super) path: String,
    pub(super) weight: u16,
    /// By name, as in a configuration.
    #[serde(default)]
    pub(super) caps: BTreeMap<String, Cap>,
}

/// A rate per second.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(super) struct Cap {
    pub(super) rate: u64,
}

/// A disk.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Disk {
    pub(super) name: String,
    /// `None` for a disk that lies on others.
    pub(super) queue: Option<String>,
    pub(super) group: Option<String>,
    pub(super) size: u64,
    pub(super) clients: usize,
}

impl Lists {
    /// Queries everything.
    pub(super) fn ask(client: &mut Client) -> Result<Self> {
        Ok(Self {
            groups: list(client, "group.list")?,
            disks: list(client, "disk.list")?,
        })
    }

    /// Queries what changes without a change of the configuration: the connected clients.
    pub(super) fn ask_again(&mut self, client: &mut Client) -> Result<()> {
        self.disks = list(client, "disk.list")?;
        Ok(())
    }
}

fn list<T: DeserializeOwned>(client: &mut Client, method: &str) -> Result<Vec<T>> {
    Ok(serde_json::from_value(client.call(method, &json!({}))?)?)
}
