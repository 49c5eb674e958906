//! The take-over of one daemon from another while clients are connected: `outgoing` hands over, `incoming`
//! takes over. `blkmq_export::handover` has their messages. `docs/operate/upgrade.md` is for operators,
//! `docs/design/0013-live-upgrade.md` has the reasons.

mod flusher;
mod incoming;
mod outgoing;
mod sources;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, bail};
use blkmq_core::stat::GroupStats;
use blkmq_export::common::Address;

pub(super) use incoming::take_over;
pub(super) use outgoing::Outgoing;

/// Statistics of groups, by queue and path, from the time when other daemons served before this
/// one.
pub(crate) type Earlier = BTreeMap<(String, String), GroupStats>;

/// Parses the address of an upgrade socket.
///
/// # Errors
/// It is no unix socket's.
pub(super) fn socket_path(address: &str) -> Result<PathBuf> {
    match address.parse::<Address>()? {
        Address::Unix(path) => Ok(path),
        _ => bail!(
            "upgrade socket {address:?} rejected: must be unix:PATH, as in unix:/run/blkmq/upgrade.sock"
        ),
    }
}

/// The name of the upgrade socket in a hand-over.
const DOOR: &str = "upgrade";
/// Time for all that a start needs: sources, keys, locks and sockets.
const START_MAX: Duration = Duration::from_secs(30);
/// Time for a message that the other daemon should have ready.
const ANSWER_MAX: Duration = Duration::from_secs(5);
