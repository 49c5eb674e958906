//! The names that disks, queues, paths and groups can have.

use anyhow::{Result, bail};

/// Checks the name of a disk or a queue: 1 to 128 letters, digits, dots, dashes and underscores.
pub(crate) fn check_name(what: &str, name: &str) -> Result<()> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    if name.is_empty() || name.len() > 128 || !name.chars().all(is_plain) {
        bail!(
            "{what} name {name:?} rejected: must be 1 to 128 of letters, digits, dots, dashes and underscores"
        );
    }
    Ok(())
}
