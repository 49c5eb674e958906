//! How the latest request of a drive on another host has ended, and whether there is a connection to
//! it: what `ctl list disks` shows of it. Files know more of themselves.

use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};

use blkmq_core::bio::Status;
use blkmq_host::device::State;

/// What is known of a drive; written by the threads that have its requests, read by others.
#[derive(Debug, Default)]
pub(crate) struct Health {
    latest: AtomicU8,
    connections: AtomicU32,
}

impl Health {
    /// Notes how a request has ended.
    #[inline]
    pub(crate) fn note(&self, status: Status) {
        let latest = match status {
            Status::Ok => OK,
            Status::NoSpace => FULL,
            // Says nothing of the drive.
            Status::NotSupported | Status::Invalid | Status::ReadOnly | Status::NoMemory => return,
            _ => FAILING,
        };
        // Relaxed: a report, which orders nothing. Read first, since others read it seldom and this thread often.
        if self.latest.load(Ordering::Relaxed) != latest {
            self.latest.store(latest, Ordering::Relaxed);
        }
    }

    /// Notes that there is a connection more.
    pub(crate) fn connected(&self) {
        self.connections.fetch_add(1, Ordering::Relaxed);
    }

    /// Notes that there is a connection less.
    pub(crate) fn disconnected(&self) {
        self.connections.fetch_sub(1, Ordering::Relaxed);
    }

    /// What is known of it.
    pub(crate) fn state(&self) -> State {
        match self.latest.load(Ordering::Relaxed) {
            _ if self.connections.load(Ordering::Relaxed) == 0 => State::Gone,
            FULL => State::Full,
            FAILING => State::Failing,
            _ => State::Ok,
        }
    }
}

const OK: u8 = 0;
const FAILING: u8 = 1;
const FULL: u8 = 2;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn health_follows_the_latest_request_and_the_connections() {
        let health = Health::default();
        assert_eq!(health.state(), State::Gone);
        health.connected();
        for (status, state) in [
            (Status::Ok, State::Ok),
            (Status::Io, State::Failing),
            (Status::Invalid, State::Failing),
            (Status::NoSpace, State::Full),
            (Status::Timeout, State::Failing),
            (Status::NotSupported, State::Failing),
            (Status::Ok, State::Ok),
        ] {
            health.note(status);
            assert_eq!(health.state(), state, "{status:?}");
        }
        health.disconnected();
        assert_eq!(health.state(), State::Gone);
    }
}
