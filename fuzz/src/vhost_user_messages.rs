//! Bytes against the parser of vhost-user messages: a message of the length and with the descriptors that it should have, or an error.

use blkmq_export::vhost_user::codec::{BODY_BYTES_MAX, FDS_MAX, HEADER_BYTES, Header, Message};

/// Runs one input: the first byte is the number of descriptors, the rest are messages.
///
/// # Panics
/// An invariant is broken.
pub fn run(data: &[u8]) {
    let Some((fds, mut data)) = data.split_first() else {
        return;
    };
    while let Some((header, rest)) = data.split_first_chunk::<HEADER_BYTES>() {
        let Ok(header) = Header::parse(header) else { return };
        assert!(header.bytes <= BODY_BYTES_MAX, "{header:?}");
        let Some((body, rest)) = rest.split_at_checked(header.bytes) else {
            return;
        };
        let fds = usize::from(*fds) % (FDS_MAX + 1);
        match Message::parse(header, body, fds) {
            Ok(message) => {
                assert_eq!(message.fds(), fds, "{message:?}");
                let mut reply = Vec::new();
                header.reply(body, &mut reply);
                assert_eq!(reply.len(), HEADER_BYTES + body.len());
            }
            Err(error) => assert!(!error.to_string().is_empty()),
        }
        data = rest;
    }
}
