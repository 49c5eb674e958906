//! The names that disks, queues, paths and groups can have.

use anyhow::{Result, bail};

/// Checks the name of a disk or a queue: 1 to 128 letters, digits, dots, dashes and underscores.
pub(crate) fn check_name(what: &str, name: &str) -> Result<()> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    if name.is_empty() || name.len() > 128 || !name.chars().all(is_plain) {
        if what == "queue" && name.contains(':') {
            bail!(
                "queue name {name:?} rejected: it is the name of a queue that a drive's disks have without asking; give them \
                 queue=NAME, of letters, digits, dots, dashes and underscores, to set its keys"
            );
        }
        bail!(
            "{what} name {name:?} rejected: must be 1 to 128 of letters, digits, dots, dashes and underscores"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::check_name;

    #[test]
    fn name_of_a_drives_own_queue_is_refused_with_the_way_to_set_its_keys() {
        let error = check_name("queue", "fs-254:0").unwrap_err().to_string();
        assert!(error.contains("queue=NAME"), "{error}");
        assert!(check_name("queue", "fs-0").is_ok());
    }
}
