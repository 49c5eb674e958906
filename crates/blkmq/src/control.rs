//! The control socket, at which a running daemon is queried and changed: JSON-RPC 2.0, a request and a
//! response a line. `docs/operate/control.md` is for users.
//!
//! | part | decides |
//! |---|---|
//! | `protocol` | the form of a line |
//! | `wiped` | what is left of a line that may have a passphrase: nothing |
//! | `server` | how long a client may take; a thread for each client, never a reactor |
//! | `roles` | who may do what |
//! | `methods` | what can be queried and changed |
//! | `images` | what becomes of disks in images |
//! | `bitmaps` | which parts of a disk have changed |
//! | `readings` | what queues have counted, for all who ask |
//! | `report` | what a daemon reports of itself |
//! | `subscription` | what a subscriber is told, and when |
//! | `statistics` | the form of its counts on the wire |
//! | `client` | the other side, for `ctl` and for tests |

mod bitmaps;
pub mod client;
mod images;
mod jobs;
mod methods;
mod names;
mod protocol;
mod readings;
mod report;
mod roles;
mod server;
pub mod statistics;
mod subscription;
mod wiped;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use blkmq_export::common::Address;

pub(crate) use readings::{ANSWER_MAX, GroupReading, Reading, Readings};
pub(crate) use server::{Daemon, LINE_MAX, Server};

/// The version of the methods and of their results; a larger version has more, and everything of
/// this one, except for the methods of traces, which are for programs of the daemon's own version.
pub const API: u32 = 16;

/// Parses the address of a control socket; `None` for `none`.
///
/// # Errors
/// It is neither that nor a unix socket's.
pub(crate) fn socket_path(address: &str) -> Result<Option<PathBuf>> {
    if address == "none" {
        return Ok(None);
    }
    match address.parse::<Address>() {
        Ok(Address::Unix(path)) => Ok(Some(path)),
        _ => bail!(
            "control socket {address:?} rejected: must be unix:PATH, as in unix:/run/blkmq/control.sock, or none"
        ),
    }
}

/// The socket that a command queries, with or without an address.
///
/// # Errors
/// The address is no socket's.
pub(crate) fn path_to_ask(address: Option<&str>) -> Result<PathBuf> {
    let Some(address) = address else {
        return Ok(default_path_to_ask());
    };
    socket_path(address)?.context("--socket none: there is nobody to ask")
}

/// Where a daemon listens, and whether its configuration asks for that; nowhere without a directory for such sockets.
///
/// # Errors
/// The address is no socket's.
pub(crate) fn place(config: &blkmq_config::Control) -> Result<Option<(PathBuf, bool)>> {
    if let Some(address) = &config.socket {
        return Ok(socket_path(address)?.map(|path| (path, true)));
    }
    let path = default_path();
    let has_place = path.parent().and_then(Path::parent).is_some_and(Path::is_dir);
    let is_system = path.starts_with("/run") && !path.parent().is_some_and(Path::is_dir);
    Ok((has_place && !is_system).then_some((path, false)))
}

/// Where a daemon listens by default: in the user's runtime directory, or in that of system services.
fn default_path() -> PathBuf {
    of_user().unwrap_or_else(of_system)
}

/// Where a command looks for a daemon by default: there, and, if none of the user listens, among system services.
pub(crate) fn default_path_to_ask() -> PathBuf {
    asked(of_user(), of_system())
}

fn asked(of_user: Option<PathBuf>, of_system: PathBuf) -> PathBuf {
    match of_user {
        Some(path) if path.exists() || !of_system.exists() => path,
        _ => of_system,
    }
}

fn of_user() -> Option<PathBuf> {
    let dir = std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty())?;
    Some(PathBuf::from(dir).join(SOCKET))
}

fn of_system() -> PathBuf {
    Path::new("/run").join(SOCKET)
}

const SOCKET: &str = "blkmq/control.sock";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn socket_of_the_system_is_asked_where_the_user_has_none() {
        let dir = std::env::temp_dir().join(format!("blkmq-default-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let (user, system) = (dir.join("user"), dir.join("system"));
        let ask = |of_user: Option<&PathBuf>| asked(of_user.cloned(), system.clone());
        assert_eq!((ask(None), ask(Some(&user))), (system.clone(), user.clone()));
        std::fs::write(&system, "").unwrap();
        assert_eq!(ask(Some(&user)), system);
        std::fs::write(&user, "").unwrap();
        assert_eq!(ask(Some(&user)), user);
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
