//! How one daemon takes another one's place while clients are connected: `outgoing` hands over, `incoming` takes over. What they say
//! is `blkmq_export::handover`'s. `docs/operate/upgrade.md` is for operators, `docs/design/0013-live-upgrade.md` says why like this.

mod flusher;
mod incoming;
mod outgoing;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, bail};
use blkmq_core::stat::GroupStats;
use blkmq_export::common::Address;

pub(super) use incoming::take_over;
pub(super) use outgoing::Outgoing;

/// What groups did, by queue and path, while other daemons served before this one.
pub(crate) type Earlier = BTreeMap<(String, String), GroupStats>;

/// Reads the address of an upgrade socket.
///
/// # Errors
/// If it is no unix socket's.
pub(super) fn socket_path(address: &str) -> Result<PathBuf> {
    match address.parse::<Address>()? {
        Address::Unix(path) => Ok(path),
        _ => bail!(
            "upgrade socket {address:?} rejected: must be unix:PATH, as in unix:/run/blkmq/upgrade.sock"
        ),
    }
}

/// What the upgrade socket is called among those that are handed over.
const DOOR: &str = "upgrade";
/// For a message that the other daemon should have at hand.
const ANSWER_MAX: Duration = Duration::from_secs(5);
