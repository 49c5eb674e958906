//! The names of this process: as a client, so that its lost sessions can be fenced, and as a server, so
//! that clients know whether its memory is still there. The names are random; without a source of
//! randomness there are none.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::rand::{GetRandomFlags, getrandom};

use super::codec::handshake::SessionName;

/// Names a session that is about to be made.
pub fn next_session() -> Option<SessionName> {
    static CLIENT: OnceLock<Option<u128>> = OnceLock::new();
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let client = (*CLIENT.get_or_init(draw))?;
    // Relaxed: only a unique number.
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    Some(SessionName { client, number })
}

/// Names an instance of a server: each start is another instance.
pub fn new_instance() -> Option<u64> {
    draw().map(|drawn| drawn as u64)
}

fn draw() -> Option<u128> {
    let mut bytes = [0; 16];
    match getrandom(&mut bytes, GetRandomFlags::empty()) {
        Ok(16) => Some(u128::from_ne_bytes(bytes)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sessions_of_one_process_have_one_client_and_different_numbers() {
        let (one, other) = (next_session().unwrap(), next_session().unwrap());
        assert_eq!(one.client, other.client);
        assert_ne!(one.number, other.number);
        assert_ne!(new_instance(), new_instance());
    }
}
