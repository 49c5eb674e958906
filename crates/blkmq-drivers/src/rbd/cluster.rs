//! Decides which disks share a connection to a cluster: all with the same connection settings. The
//! first one connects, and the close of the last image ends the connection.

use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use super::config::ClusterConfig;
use super::error::RbdError;
use super::sys::{Library, Rados};

/// Returns the connection for disks with these settings, made now if there is none. May block for
/// about `limit`.
pub(super) fn connect(image: &str, config: &ClusterConfig, limit: Duration) -> Result<Arc<Rados>, RbdError> {
    let library = Library::get().map_err(|problem| RbdError::Library {
        image: image.to_owned(),
        problem,
    })?;
    // Held during the connect: the others want the same connection, or can wait as long as one
    // cluster may take.
    let mut all = CONNECTIONS.lock().unwrap_or_else(PoisonError::into_inner);
    all.retain(|known| known.1.strong_count() > 0);
    let known = all.iter().find(|known| known.0 == *config);
    if let Some(rados) = known.and_then(|known| known.1.upgrade()) {
        return Ok(rados);
    }
    let made = Rados::connect(library, config, &options(config, limit));
    let rados = Arc::new(made.map_err(|(action, source)| RbdError::Call {
        image: image.to_owned(),
        action,
        advice: advice(source.raw_os_error()),
        source,
    })?);
    tracing::info!("rbd: connected to cluster {}", rados.fsid());
    all.push((config.clone(), Arc::downgrade(&rados)));
    Ok(rados)
}

/// Ceph's options for a connection; those of the disk come last, and prevail.
fn options(config: &ClusterConfig, limit: Duration) -> Vec<(String, String)> {
    let seconds = |time: Duration| time.as_secs().to_string();
    let mut options = vec![
        // Data of a write that was reported complete must not be only in this process: it may be
        // killed at any moment.
        ("rbd_cache", "false".to_owned()),
        ("client_mount_timeout", seconds(limit)),
        ("rados_mon_op_timeout", seconds(limit)),
        ("rados_osd_op_timeout", seconds(config.timeout)),
    ];
    if let Some(keyring) = &config.keyring {
        options.push(("keyring", keyring.clone()));
    }
    let given = config.options.iter().cloned();
    let ours = options.into_iter().map(|(key, value)| (key.to_owned(), value));
    ours.chain(given).collect()
}

fn advice(errno: Option<i32>) -> &'static str {
    match errno {
        Some(libc::ENOENT) => {
            ": name the cluster's configuration file with conf=, and the user's key with keyring="
        }
        Some(libc::EACCES | libc::EPERM) => {
            ": the cluster does not know this user with this key; see id= and keyring="
        }
        Some(libc::ETIMEDOUT) => ": see whether the monitors run and can be reached (ceph -s)",
        _ => "",
    }
}

static CONNECTIONS: Mutex<Vec<(ClusterConfig, Weak<Rados>)>> = Mutex::new(Vec::new());
