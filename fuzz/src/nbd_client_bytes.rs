//! Bytes of a server against the NBD client's handshake and its parsers of replies.
//!
//! The first two bytes choose what the client wants and the size of the pieces the stream arrives in; the rest is the
//! stream. Broken would be: a panic, options without end, or a message that is waited for though no buffer holds it.

use blkmq_nbd::client::{Agreed, Handshake, Progress, RECEIVE_BYTES_MIN, Wanted};
use blkmq_nbd::codec::HeaderStyle;
use blkmq_nbd::codec::handshake::SessionName;
use blkmq_nbd::codec::reply::{ChunkPayload, ReplyHead};

/// Longest payload of a chunk that this client takes.
const PAYLOAD_BYTES_MAX: u64 = 4096;
/// The client's flags and every option it may send, with room for their names.
const SENT_BYTES_MAX: usize = 400;

/// Runs one input.
///
/// # Panics
/// An invariant is broken.
pub fn run(data: &[u8]) {
    let Some((&[want, piece], stream)) = data.split_first_chunk() else {
        return;
    };
    let style = match want & 3 {
        0 => HeaderStyle::Simple,
        1 => HeaderStyle::Structured,
        _ => HeaderStyle::Extended,
    };
    let wanted = Wanted {
        name: "a".into(),
        style,
        block_status: want & 4 != 0,
        session: (want & 8 != 0).then_some(SessionName {
            client: 0x626c_6b6d_7100 << 80,
            number: 7,
        }),
    };
    let (mut handshake, mut sent, mut received) = (Handshake::new(wanted), Vec::new(), Vec::new());
    if want & 16 != 0 {
        handshake = handshake.with_tls();
    }
    let mut agreed = None;
    for piece in stream.chunks(usize::from(piece) + 1) {
        received.extend_from_slice(piece);
        if let Some(agreed) = &agreed {
            if take_replies(agreed, &mut received).is_none() {
                return;
            }
            continue;
        }
        let (taken, progress) = handshake.receive(&received, &mut sent);
        received.drain(..taken);
        assert!(sent.len() <= SENT_BYTES_MAX, "{} bytes of options", sent.len());
        match progress {
            Progress::NeedMore if handshake.is_starting_tls() => {
                // Bytes from before TLS end the connection.
                if !received.is_empty() {
                    return;
                }
                handshake.secured(&mut sent);
            }
            Progress::NeedMore => assert!(received.len() < RECEIVE_BYTES_MIN, "a message that never fits"),
            Progress::Agreed(found) => agreed = Some(found),
            Progress::Failed(failure) => return assert!(!failure.to_string().is_empty()),
        }
    }
}

/// Takes whole replies; `None` when the server broke the protocol.
fn take_replies(agreed: &Agreed, received: &mut Vec<u8>) -> Option<()> {
    while let Some((head, bytes)) = ReplyHead::parse(agreed.style, received).ok()? {
        let ReplyHead::Chunk(chunk) = head else {
            received.drain(..bytes);
            continue;
        };
        if chunk.payload_bytes > PAYLOAD_BYTES_MAX {
            return None;
        }
        let end = bytes + chunk.payload_bytes as usize;
        let Some(payload) = received.get(bytes..end) else {
            break;
        };
        if let ChunkPayload::Status(status) = ChunkPayload::parse(chunk.kind, payload)? {
            assert!(status.extents().count() > 0, "a status without extents");
        }
        received.drain(..end);
    }
    assert!(
        (received.len() as u64) < 64 + PAYLOAD_BYTES_MAX,
        "a reply that never fits"
    );
    Some(())
}
