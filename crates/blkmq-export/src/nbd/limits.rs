//! The limits of one connection: how much of anything it may take, and how much time it has.
//! [`super::session`] enforces the counts and sizes; the socket layer has the clock and enforces the
//! durations.

use std::time::Duration;

/// Bytes of payload that no server may treat as an attack (protocol, "Size constraints"): the
/// payload of a refused write up to this size is read and discarded, so that its client learns the
/// reason.
const PORTABLE_PAYLOAD_BYTES: u32 = 32 << 20;

/// The bounds of one connection. `Limits::default()` suits a host with hundreds of clients.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Longest payload of one read or write, in bytes; 64 KiB to 1 GiB, default 32 MiB. Advertised to clients. Smaller
    /// saves memory per connection; below 32 MiB, clients that never ask for sizes may run into it.
    pub payload_bytes_max: u32,
    /// Requests begun and not yet replied to; default 256. More lets one connection fill a deep drive; each costs a
    /// slot in the engine.
    pub requests_max: u32,
    /// Bytes of read and write payload held for the connection, at least `payload_bytes_max`;
    /// default 64 MiB. At the limit the connection is not read until replies have been sent.
    pub memory_bytes_max: u64,
    /// Bytes of reply heads (and negotiation answers) that may wait to be sent before the
    /// connection is no longer read; 4 KiB to 1 GiB, default 64 KiB. A single answer may exceed it by
    /// its own length. More lets a client that reads slowly have more requests under way, and costs
    /// memory for each such client.
    pub unsent_bytes_max: usize,
    /// Options that one client may send before it is disconnected; default 1024 (a listing takes
    /// two for each export).
    pub options_max: u32,
    /// Longest option data that is read, in bytes, at least 4096 + 64; default 16 KiB. The receive
    /// buffer must hold it: see [`Limits::receive_bytes_min`].
    pub option_bytes_max: u32,
    /// Longest option data that is skipped rather than answered by a disconnect, in bytes; default 1 MiB.
    pub option_skip_bytes_max: u32,
    /// Extents in one block status reply; 1 to 2^20, default 4096. Fewer make the client ask more
    /// often. The front door looks up at most 64 for one reply, whatever this says, since each costs
    /// system calls.
    pub extents_max: u32,
    /// From the greeting to the selection of an export; default 10 s. Longer helps people who type,
    /// shorter frees the slots that scanners take.
    pub handshake_deadline: Duration,
    /// From a reply that does not fit the socket to the next byte that the client takes; default 60
    /// s. Then the connection is closed, since nobody reads what its buffers hold.
    pub unread_reply_deadline: Duration,
    /// From the first byte of a request (or payload) to its last; default 60 s.
    pub half_request_deadline: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            payload_bytes_max: PORTABLE_PAYLOAD_BYTES,
            requests_max: 256,
            memory_bytes_max: 64 << 20,
            unsent_bytes_max: 64 << 10,
            options_max: 1024,
            option_bytes_max: 16 << 10,
            option_skip_bytes_max: 1 << 20,
            extents_max: 4096,
            handshake_deadline: Duration::from_secs(10),
            unread_reply_deadline: Duration::from_secs(60),
            half_request_deadline: Duration::from_secs(60),
        }
    }
}

impl Limits {
    /// Checks that the limits are in range and consistent.
    ///
    /// # Errors
    /// The first limit that is out of its range, with the range.
    pub fn check(&self) -> Result<(), LimitError> {
        let in_range = |name, value: u64, min: u64, max: u64| {
            if (min..=max).contains(&value) {
                Ok(())
            } else {
                Err(LimitError {
                    name,
                    value,
                    min,
                    max,
                })
            }
        };
        let payload = u64::from(self.payload_bytes_max);
        in_range("payload_bytes_max", payload, 64 << 10, 1 << 30)?;
        in_range("requests_max", u64::from(self.requests_max), 1, 1 << 16)?;
        in_range("memory_bytes_max", self.memory_bytes_max, payload, 1 << 40)?;
        in_range("unsent_bytes_max", self.unsent_bytes_max as u64, 4096, 1 << 30)?;
        in_range("options_max", u64::from(self.options_max), 1, 1 << 20)?;
        in_range(
            "option_bytes_max",
            u64::from(self.option_bytes_max),
            4096 + 64,
            1 << 20,
        )?;
        let skip = u64::from(self.option_skip_bytes_max);
        in_range(
            "option_skip_bytes_max",
            skip,
            u64::from(self.option_bytes_max),
            1 << 30,
        )?;
        in_range("extents_max", u64::from(self.extents_max), 1, 1 << 20)
    }

    /// Bytes that a receive buffer must be able to hold, so that every message that is decoded
    /// whole fits.
    pub fn receive_bytes_min(&self) -> usize {
        blkmq_nbd::codec::handshake::OPTION_HEADER_BYTES + self.option_bytes_max as usize
    }

    /// Longest payload of a refused request that is read and discarded; a longer one ends the
    /// connection.
    pub fn drain_bytes_max(&self) -> u64 {
        u64::from(self.payload_bytes_max.max(PORTABLE_PAYLOAD_BYTES))
    }
}

/// A limit out of its range.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("NBD limit {name} = {value} rejected: must be from {min} to {max}")]
pub struct LimitError {
    /// The field.
    pub name: &'static str,
    /// Its value.
    pub value: u64,
    /// Smallest allowed value.
    pub min: u64,
    /// Largest allowed value.
    pub max: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_within_their_own_ranges() {
        assert_eq!(Limits::default().check(), Ok(()));
    }

    #[test]
    fn memory_smaller_than_one_payload_is_rejected_with_the_range() {
        let limits = Limits {
            memory_bytes_max: 1 << 20,
            ..Limits::default()
        };
        let message = limits.check().unwrap_err().to_string();
        assert_eq!(
            message,
            "NBD limit memory_bytes_max = 1048576 rejected: must be from 33554432 to 1099511627776"
        );
    }

    #[test]
    fn smaller_payload_limit_still_drains_what_portable_clients_send() {
        let limits = Limits {
            payload_bytes_max: 1 << 20,
            ..Limits::default()
        };
        assert_eq!(limits.drain_bytes_max(), 32 << 20);
    }
}
