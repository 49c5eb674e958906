//! Decides what a reactor does so that nobody who has memory written back ever waits for himself: for doors whose disks this host writes
//! to. It is marked for the kernel, which then waits for no I/O when it allocates something for it. Where that is refused, the reactor at
//! least has no threads made for it: their stacks are what the kernel allocates most.
//!
//! A control group of the first version waits for pages that are being written back when it is full. If one of its processes is this
//! daemon, and the pages are to be written to a disk of it, that is for ever. Those of the second version do not wait.

mod sys;

use std::io;
use std::sync::OnceLock;

use blkmq_host::service::Cx;

/// Marks the calling reactor, or has it do without threads. What it pushes to its ring for that has this number.
pub(crate) fn become_io_flusher(cx: &Cx<'_>, door: &str, user: u64) {
    static REFUSED: OnceLock<bool> = OnceLock::new();
    let Err(error) = sys::mark() else { return };
    let waits = *REFUSED.get_or_init(|| is_said_to_wait(door, &error));
    if waits && cx.ring_client().ring().limit_workers(1).is_ok() {
        // The last one never ends, and what the kernel notes of so many entries it keeps.
        cx.ring_client().push_nop_for_worker(user);
        (0..ENTRIES).for_each(|_| cx.ring_client().push_nop(user));
    }
}

/// Says once that the mark was refused. Returns whether memory that is short is waited for without it.
#[cold]
fn is_said_to_wait(door: &str, error: &io::Error) -> bool {
    let groups = std::fs::read_to_string(GROUPS).unwrap_or_default();
    let waits = is_first_version(&groups);
    match waits {
        true => tracing::warn!(
            "{door}: PR_SET_IO_FLUSHER: {error}: give the daemon CAP_SYS_RESOURCE, or no limit on memory that those who write to its \
             disks share: they may wait for each other for ever; what blocks on files is done one after another meanwhile"
        ),
        false => tracing::info!("{door}: PR_SET_IO_FLUSHER: {error}: it needs CAP_SYS_RESOURCE"),
    }
    waits
}

/// Says whether a process is in a control group of the first version that counts its memory, from what `/proc/self/cgroup` has.
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
