//! What keeps a reactor from waiting for its own write-back, for doors to whose disks this host writes. The
//! reactor is marked for the kernel, which then never waits for I/O when it allocates memory for the reactor.
//! Where the mark is refused, the reactor at least has no worker threads made for it: their stacks are most
//! of what the kernel allocates; and its own memory is touched before.
//!
//! A control group of version 1 waits for pages under write-back when it is full. If this daemon is
//! one of its processes, and the pages go to a disk of this daemon, the wait never ends. Groups of
//! version 2 do not wait.

mod sys;

use std::io;
use std::sync::OnceLock;

use blkmq_host::service::Cx;

use super::resident;

/// Marks the calling reactor, or makes it do without threads. What it pushes to its ring for that
/// has the number `user`.
pub(crate) fn become_io_flusher(cx: &Cx<'_>, door: &str, user: u64) {
    static REFUSED: OnceLock<bool> = OnceLock::new();
    let Err(error) = sys::mark() else { return };
    let waits = *REFUSED.get_or_init(|| is_said_to_wait(door, &error));
    if !waits {
        return;
    }
    resident::touch();
    if cx.ring_client().ring().limit_workers(1).is_ok() {
        // The last entry never ends, and the kernel keeps its records of this many entries.
        cx.ring_client().push_nop_for_worker(user);
        (0..ENTRIES).for_each(|_| cx.ring_client().push_nop(user));
    }
}

/// Logs once that the mark was refused. Returns whether short memory is waited for without the
/// mark.
#[cold]
fn is_said_to_wait(door: &str, error: &io::Error) -> bool {
    let groups = std::fs::read_to_string(GROUPS).unwrap_or_default();
    let waits = is_first_version(&groups);
    match waits {
        true => tracing::warn!(
            "{door}: the kernel does not let the daemon serve the writing back of its own disks without waiting for memory \
             (PR_SET_IO_FLUSHER: {error}), and its control group limits memory: programs that write to the disks, and the \
             daemon, may wait for each other for ever. Give the daemon CAP_SYS_RESOURCE, or a control group of its own; \
             meanwhile what blocks on files is done one after another"
        ),
        false => tracing::info!(
            "{door}: without CAP_SYS_RESOURCE the daemon may wait for memory while this host writes back to its disks: slower \
             when memory is short (PR_SET_IO_FLUSHER: {error})"
        ),
    }
    waits
}

/// Returns whether `/proc/self/cgroup` shows a control group of version 1 that counts the process's
/// memory.
fn is_first_version(groups: &str) -> bool {
    let controllers = groups.lines().filter_map(|line| line.split(':').nth(1));
    controllers
        .flat_map(|names| names.split(','))
        .any(|name| name == "memory")
}

/// Entries of a reactor's ring under way at a time, roughly.
const ENTRIES: u32 = 256;
const GROUPS: &str = "/proc/self/cgroup";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_counted_by_control_groups_of_the_first_version_where_they_are_named() {
        assert!(is_first_version("9:name=systemd:/\n4:memory:/small\n0::/\n"));
        assert!(is_first_version("4:cpu,memory:/\n"));
        assert!(!is_first_version("0::/system.slice/memory\n"));
        assert!(!is_first_version("1:memoryless:/\n"));
        assert!(!is_first_version(""));
    }
}
