//! The errors of set-up and control: they name the object, the value, the limit and the next step. The
//! request path has `blkmq_core::bio::Status` instead.

use std::io;

use blkmq_core::group::GroupError;
use blkmq_core::ids::ReactorId;
use blkmq_core::queue::ConfigError;
use blkmq_core::sched::TunableError;

use crate::counted::counted;
use blkmq_core::time::Nanos;

/// Why the engine could not be set up, changed or shut down.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// io_uring is not available.
    #[error("reactor {reactor}: no io_uring: {cause}; {}", ring_hint(cause))]
    Ring {
        /// The reactor.
        reactor: ReactorId,
        /// The kernel's error.
        cause: io::Error,
    },
    /// The operating system refused something that set-up needs.
    #[error("{what}: {cause}")]
    Os {
        /// The operation that was attempted.
        what: String,
        /// The kernel's error.
        cause: io::Error,
    },
    /// A drive could not be opened.
    #[error("queue {queue}: {cause}")]
    Device {
        /// The queue's name.
        queue: String,
        /// The error of the drive or the operating system.
        cause: io::Error,
    },
    /// The queue cannot be configured so.
    #[error(transparent)]
    Queue(#[from] ConfigError),
    /// The disk, or set of disks, cannot be configured so. The text has the details.
    #[error("{0}")]
    Disk(String),
    /// The disk's drive has a size that its clients cannot be told of: a smaller one, or a part of a block. The
    /// text has the details.
    #[error("{0}")]
    Size(String),
    /// An exclusive operation is already running. The text says which.
    #[error("{0}")]
    Busy(String),
    /// A number is out of range.
    #[error("{name} {value} rejected: must be from {min} to {max}")]
    Range {
        /// Name of the number.
        name: &'static str,
        /// Its value.
        value: u64,
        /// Smallest value allowed.
        min: u64,
        /// Largest value allowed.
        max: u64,
    },
    /// There is no queue of that name.
    #[error("no queue is named {name}; there are: {known}")]
    NoQueue {
        /// The name that was given.
        name: String,
        /// The existing names.
        known: String,
    },
    /// There is no queue of that number. Mapped disks have a number above those of all queues.
    #[error(
        "there is no queue {number}, there are {queues}: a mapped disk has none of its own; ask for those of its members"
    )]
    NoQueueNumber {
        /// The number that was given.
        number: u16,
        /// Number of queues.
        queues: usize,
    },
    /// All handles for attached threads are taken.
    #[error(
        "all {max} handles for attached threads are taken; raise attached_max, or drop an Attached first"
    )]
    NoQueueHandle {
        /// Number of handles.
        max: usize,
    },
    /// Requests under way on a queue have not ended in time.
    #[error(
        "queue {queue}: {} still under way after {waited}; is the device answering? A thread that holds unended I/O must poll \
         meanwhile",
        counted(*outstanding as usize, "request is", "requests are")
    )]
    NotDrained {
        /// The queue's name.
        queue: String,
        /// Requests started and not ended.
        outstanding: u64,
        /// How long they were waited for.
        waited: Nanos,
    },
    /// A control operation that blocks was called on a reactor, for which the operation would wait.
    #[error("queue {queue}: control operations block: call them on another thread than a reactor's")]
    OnReactor {
        /// The queue's name.
        queue: String,
    },
    /// The elevator rejects a tunable.
    #[error("queue {queue}: {cause}")]
    Tunable {
        /// The queue's name.
        queue: String,
        /// The elevator's reason.
        cause: TunableError,
    },
    /// The value is not valid for the attribute.
    #[error("queue {queue}: {name} {value} rejected: {limit}")]
    Attribute {
        /// The queue's name.
        queue: String,
        /// The attribute.
        name: &'static str,
        /// The value that was given.
        value: String,
        /// The values allowed.
        limit: String,
    },
    /// There is no group of that path on a queue.
    #[error("queue {queue}: there is no group {path}; there are: {known}")]
    NoGroup {
        /// The queue's name.
        queue: String,
        /// The path that was given.
        path: String,
        /// A few of the existing paths.
        known: String,
    },
    /// The text is not a group's path.
    #[error(
        "group {path:?} rejected: must be /, or names of 1 to 128 letters, digits, dots, dashes and underscores with / \
         before each, at most 16, as in /customers/a"
    )]
    GroupPath {
        /// The path that was given.
        path: String,
    },
    /// A group cannot be moved to a path that another group has.
    #[error("queue {queue}: there is a group {path} already: remove or move it first")]
    GroupExists {
        /// The queue's name.
        queue: String,
        /// The path that was given.
        path: String,
    },
    /// A group cannot be removed while disks are accounted to it.
    #[error("queue {queue}: group {path} cannot be removed: disk {disk} is accounted to it")]
    GroupInUse {
        /// The queue's name.
        queue: String,
        /// The group.
        path: String,
        /// One of its disks.
        disk: String,
    },
    /// A group cannot be configured so.
    #[error("group {path}: {cause}")]
    Group {
        /// Its path.
        path: String,
        /// The core's reason.
        cause: GroupError,
    },
    /// The engine could not be shut down cleanly in time.
    #[error("shutdown: {0}")]
    Shutdown(String),
}

impl Error {
    /// The error for a drive that cannot be polled although this was asked for.
    pub(crate) fn not_polled(queue: &str, name: &'static str, value: &str) -> Self {
        Self::Attribute {
            queue: queue.to_owned(),
            name,
            value: value.to_owned(),
            limit: "its drive cannot be polled; file disks can, and null disks with poll_queues".to_owned(),
        }
    }
}

fn ring_hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::ENOSYS) => "the kernel has none: Linux 6.1 or later is needed",
        Some(libc::EPERM) => {
            "it is forbidden here: see kernel.io_uring_disabled and the container's seccomp profile"
        }
        Some(libc::EINVAL) => "the kernel is too old: Linux 6.1 or later is needed",
        Some(libc::ENOMEM) => "locked memory is limited: raise ulimit -l",
        Some(libc::EMFILE | libc::ENFILE) => "too many open files: raise ulimit -n",
        _ => "see the kernel's log",
    }
}
