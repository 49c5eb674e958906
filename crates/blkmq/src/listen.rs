//! The daemon's own sockets: nobody can connect to one before its owner and mode are set.

use std::os::unix::net::UnixListener;
use std::path::Path;

use anyhow::{Context, Result};
use blkmq_export::common::{FreePath, OwnedPath, listen_at};

/// Listens at `path`, once `prepare` has set the socket's owner and mode: it is made under another
/// name, and then moved.
///
/// # Errors
/// Another daemon listens there, or a step fails.
pub(crate) fn listen(
    path: &Path,
    prepare: impl FnOnce(&Path) -> Result<()>,
) -> Result<(UnixListener, OwnedPath)> {
    let free = FreePath::find(path)?;
    let own = path.with_extension(format!("{}.new", std::process::id()));
    let _ = std::fs::remove_file(&own);
    let listener = listen_at(&own).context("cannot listen there")?;
    let prepared = prepare(&own).and_then(|()| Ok(std::fs::rename(&own, path)?));
    if prepared.is_err() {
        let _ = std::fs::remove_file(&own);
    }
    prepared?;
    Ok((listener, free.own()?))
}
