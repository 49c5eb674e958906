//! Bytes against what a daemon reads of another one that takes over from it: messages, and within them NBD connections, which a
//! session then goes on with, vhost-user front ends, and mounts. A message that is read is written again as it was.

use std::sync::Arc;

use blkmq_export::fuse::saved::SavedMount;
use blkmq_export::handover::codec::{HEADER_BYTES, Message};
use blkmq_export::nbd::export::{Export, ExportId, ExportTable};
use blkmq_export::nbd::limits::Limits;
use blkmq_export::nbd::saved::SavedConnection;
use blkmq_export::nbd::session::{Event, Session};
use blkmq_export::vhost_user::saved::SavedFrontEnd;

/// Runs one input: messages, or where its first byte is odd the body of a session.
///
/// # Panics
/// An invariant is broken.
pub fn run(data: &[u8]) {
    match data.split_first() {
        Some((kind, rest)) if kind % 2 == 0 => messages(rest),
        Some((_, rest)) => connection(rest),
        None => {}
    }
}

fn messages(mut data: &[u8]) {
    while let Some((header, rest)) = data.split_first_chunk::<HEADER_BYTES>() {
        let Ok((kind, length)) = Message::parse_header(*header) else {
            return;
        };
        let Some((body, rest)) = rest.split_at_checked(length) else {
            return;
        };
        match Message::parse(kind, body) {
            Ok(message) => {
                let mut written = Vec::new();
                message.write(&mut written);
                assert_eq!(&written[HEADER_BYTES..], body, "{message:?}");
                if let Message::Session(session) = message {
                    connection(&session.body);
                }
            }
            Err(error) => assert!(!error.to_string().is_empty()),
        }
        data = rest;
    }
}

fn connection(bytes: &[u8]) {
    if let Ok(saved) = SavedFrontEnd::parse(bytes) {
        assert_eq!(saved.bytes(), bytes, "{saved:?}");
        assert!(saved.fds() <= saved.messages.len());
    }
    if let Ok(saved) = SavedMount::parse(bytes) {
        assert_eq!(saved.bytes(), bytes, "{saved:?}");
    }
    let Ok(saved) = SavedConnection::parse(bytes) else {
        return;
    };
    assert_eq!(saved.bytes(), bytes, "{saved:?}");
    let mut export = Export::new(ExportId(0), "a", 1 << 20);
    export.block_min_bytes = 512;
    let exports = ExportTable::new([export]).expect("one export");
    let Ok(mut session) = Session::restore(&saved.session, Arc::new(exports), Limits::default()) else {
        return;
    };
    let (mut input, mut out) = (&saved.input[..], Vec::new());
    loop {
        let step = session.receive(input, &mut out);
        input = &input[step.consumed..];
        match step.event {
            Event::Selected(_) | Event::Refused(_) => {}
            Event::Request(request) => session.replies().cancel(&request),
            Event::Write(request) => {
                let there = request.length.min(input.len() as u64);
                session.payload_taken(there);
                if there < request.length {
                    return;
                }
                input = &input[there as usize..];
                session.replies().cancel(&request);
            }
            Event::StartTls => unreachable!("a session that is handed over has no certificate"),
            Event::NeedMore | Event::Busy | Event::Disconnect | Event::Close(_) => return,
        }
    }
}
