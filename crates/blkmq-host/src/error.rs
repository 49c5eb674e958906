//! Decides how set-up and control say what went wrong: the object, the value, the limit and the next step.
//! The request path has `blkmq_core::bio::Status` instead.

use std::io;

use blkmq_core::group::GroupError;
use blkmq_core::ids::ReactorId;
use blkmq_core::queue::ConfigError;
use blkmq_core::sched::TunableError;
use blkmq_core::time::Nanos;

/// Why the engine could not be set up, changed or shut down.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// io_uring is not to be had.
    #[error("reactor {reactor}: no io_uring: {source}; {}", ring_hint(source))]
    Ring {
        /// Whose.
        reactor: ReactorId,
        /// What the kernel said.
        source: io::Error,
    },
    /// The operating system refused something that set-up needs.
    #[error("{what}: {source}")]
    Os {
        /// What was attempted.
        what: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// A drive could not be opened.
    #[error("queue {queue}: {source}")]
    Device {
        /// The queue's name.
        queue: String,
        /// What the drive or the operating system said.
        source: io::Error,
    },
    /// A queue that cannot be.
    #[error(transparent)]
    Queue(#[from] ConfigError),
    /// A disk, or a set of disks, that cannot be. The text says it all.
    #[error("{0}")]
    Disk(String),
    /// Something that one at a time may do is being done. The text says what.
    #[error("{0}")]
    Busy(String),
    /// A number out of its range.
    #[error("{name} {value} rejected: must be from {min} to {max}")]
    Range {
        /// What it is.
        name: &'static str,
        /// Its value.
        value: u64,
        /// The smallest allowed.
        min: u64,
        /// The largest allowed.
        max: u64,
    },
    /// No queue of that name.
    #[error("no queue is named {name}; there are: {known}")]
    NoQueue {
        /// As asked for.
        name: String,
        /// The names there are.
        known: String,
    },
    /// No queue of that number. Mapped disks have numbers behind the queues'.
    #[error(
        "there is no queue {number}, there are {queues}: a mapped disk has none of its own; ask for those of its members"
    )]
    NoQueueNumber {
        /// As asked for.
        number: u16,
        /// How many there are.
        queues: usize,
    },
    /// All handles for attached threads are taken.
    #[error(
        "all {max} handles for attached threads are taken; raise attached_max, or drop an Attached first"
    )]
    NoQueueHandle {
        /// How many there are.
        max: usize,
    },
    /// What was under way on a queue has not ended in time.
    #[error(
        "queue {queue}: {outstanding} requests are still under way after {waited}; is the device answering? \
         A thread that holds unended I/O must poll meanwhile"
    )]
    NotDrained {
        /// The queue's name.
        queue: String,
        /// Requests started and not ended.
        outstanding: u64,
        /// How long it was waited for.
        waited: Nanos,
    },
    /// A control operation that blocks was called on a reactor, which it would wait for.
    #[error("queue {queue}: control operations block: call them on another thread than a reactor's")]
    OnReactor {
        /// The queue's name.
        queue: String,
    },
    /// The elevator refuses a tunable.
    #[error("queue {queue}: {cause}")]
    Tunable {
        /// The queue's name.
        queue: String,
        /// What it says.
        cause: TunableError,
    },
    /// An attribute cannot have a value.
    #[error("queue {queue}: {name} {value} rejected: {limit}")]
    Attribute {
        /// The queue's name.
        queue: String,
        /// The attribute.
        name: &'static str,
        /// What it was to be.
        value: String,
        /// What it can be.
        limit: String,
    },
    /// No group of that path on a queue.
    #[error("queue {queue}: there is no group {path}; there are: {known}")]
    NoGroup {
        /// The queue's name.
        queue: String,
        /// As asked for.
        path: String,
        /// The paths there are, a few of them.
        known: String,
    },
    /// Not the path of a group.
    #[error(
        "group {path:?} rejected: must be /, or names of 1 to 128 letters, digits, dots, dashes and underscores with / \
         before each, at most 16, as in /customers/a"
    )]
    GroupPath {
        /// As asked for.
        path: String,
    },
    /// A path that a group cannot be moved to, since there is one.
    #[error("queue {queue}: there is a group {path} already: remove or move it first")]
    GroupExists {
        /// The queue's name.
        queue: String,
        /// Where one was to go.
        path: String,
    },
    /// A group that disks are accounted to is to be removed.
    #[error("queue {queue}: group {path} cannot be removed: disk {disk} is accounted to it")]
    GroupInUse {
        /// The queue's name.
        queue: String,
        /// The group.
        path: String,
        /// One of its disks.
        disk: String,
    },
    /// A group cannot be as it was to be.
    #[error("group {path}: {cause}")]
    Group {
        /// Its path.
        path: String,
        /// What the core says.
        cause: GroupError,
    },
    /// The engine could not be shut down cleanly in time.
    #[error("shutdown: {0}")]
    Shutdown(String),
}

impl Error {
    /// A drive that cannot be polled was to be.
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
