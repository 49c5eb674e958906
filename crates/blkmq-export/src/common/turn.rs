//! The turn of a daemon to look at what is at a path and to change it: daemons that start at the same
//! moment look one after the other. Used for mounts and for the paths of sockets.

use std::fs::File;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

/// This daemon's turn in a directory, until it is dropped.
#[derive(Debug)]
pub(crate) struct Turn {
    /// The directory, which is locked unless it cannot be, or somebody keeps it locked.
    _directory: Option<File>,
}

impl Turn {
    /// Waits until no other daemon has its turn in the directory of a path, for a while: who may read the
    /// directory may also lock it, and must not be able to prevent every start.
    pub(crate) fn wait_for(path: &Path) -> Self {
        let parent = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        let directory = File::open(parent).ok();
        let start = Instant::now();
        while let Some(directory) = &directory
            && let Err(Errno::WOULDBLOCK) = flock(directory, FlockOperation::NonBlockingLockExclusive)
            && start.elapsed() < TURN_MAX
        {
            thread::sleep(PAUSE);
        }
        Self {
            _directory: directory,
        }
    }
}

/// How long to wait for other daemons that start.
const TURN_MAX: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(2);
