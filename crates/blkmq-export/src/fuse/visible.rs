//! Whether a mount is seen where people look for it. In a mount namespace of its own, as systemd and containers give
//! one, the daemon finds its disk, and the host a file that is empty. `mount` has made the mount; the front door says so.

use std::fs;
use std::path::Path;

use super::mount_table::{self, Entry};

/// What is known of the place of a mount.
#[derive(Clone, Copy, Debug)]
struct Facts {
    /// Whether the first process of this PID namespace has the mount in its table; `None` if that cannot be read.
    is_in_first_table: Option<bool>,
    /// Whether the first process is the host's, as far as can be seen.
    is_first_of_host: bool,
    /// Whether mounts below the directory are passed on to other mount namespaces.
    is_shared: bool,
}

/// Why others may not see a mount at a path, and what to do.
pub(super) fn why_hidden(path: &Path, entry: &Entry) -> Option<&'static str> {
    let first = fs::read("/proc/1/mountinfo").ok();
    reason(Facts {
        is_in_first_table: first.map(|table| mount_table::has_device(&table, &entry.device)),
        is_first_of_host: is_first_of_host(),
        is_shared: mount_table::is_shared(path.parent()?).unwrap_or(true),
    })
}

fn reason(facts: Facts) -> Option<&'static str> {
    match facts {
        Facts {
            is_in_first_table: Some(false),
            ..
        } => Some(OF_SERVICE),
        Facts {
            is_first_of_host: false,
            is_shared: false,
            ..
        } => Some(OF_CONTAINER),
        _ => None,
    }
}

/// Returns whether this process is in the host's PID namespace, as far as can be seen.
fn is_first_of_host() -> bool {
    let own = fs::read_link("/proc/self/ns/pid");
    own.map_or(true, |own| own.as_os_str() == PIDS_OF_HOST)
}

/// The number of the first PID namespace (`PROC_PID_INIT_INO` of Linux).
const PIDS_OF_HOST: &str = "pid:[4026531836]";
const OF_SERVICE: &str = "it is mounted in a mount namespace of this service alone, and the host sees a plain file there: in the \
                          unit, take out what makes one (PrivateTmp=, PrivateMounts=, ProtectSystem=, ProtectHome=, \
                          ReadWritePaths= and the like), which MountFlags=shared does not mend";
const OF_CONTAINER: &str = "it is mounted in this container alone, as mounts in its directory are private: share the directory with \
                            the host in both directions (docker -v DIR:DIR:rshared, mountPropagation: Bidirectional of Kubernetes)";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_is_hidden_in_a_namespace_of_its_own_or_a_private_directory_of_a_container() {
        let facts = |is_in_first_table, is_first_of_host, is_shared| Facts {
            is_in_first_table,
            is_first_of_host,
            is_shared,
        };
        for (facts, wanted) in [
            (facts(Some(true), true, false), None),
            (facts(Some(false), true, true), Some(OF_SERVICE)),
            (facts(Some(false), false, false), Some(OF_SERVICE)),
            (facts(Some(true), false, true), None),
            (facts(Some(true), false, false), Some(OF_CONTAINER)),
            (facts(None, true, false), None),
        ] {
            assert_eq!(reason(facts), wanted, "{facts:?}");
        }
    }
}
