//! Tests the client's handshake with our own server, and with defective ones.

use std::sync::Arc;

use blkmq_nbd::client::*;
use blkmq_nbd::codec::TransmissionFlags;
use blkmq_nbd::codec::option_reply::{OptionReplies, write_export_name_reply};

use super::*;
use crate::nbd::export::{Export, ExportId, ExportTable};
use crate::nbd::limits::Limits;
use crate::nbd::session::{Event, Session};

/// Runs a handshake with our own server to its end.
fn meet(wanted: Wanted, exports: Vec<Export>) -> (Progress, Session) {
    let (mut to_client, mut to_server) = (Vec::new(), Vec::new());
    let table = Arc::new(ExportTable::new(exports).unwrap());
    let mut session = Session::new(table, Limits::default(), &mut to_client);
    let mut handshake = Handshake::new(wanted);
    loop {
        let (taken, progress) = handshake.receive(&to_client, &mut to_server);
        to_client.drain(..taken);
        if progress != Progress::NeedMore {
            let agreed = matches!(progress, Progress::Agreed(_));
            assert!(!agreed || to_client.is_empty(), "the client left {to_client:?}");
            return (progress, session);
        }
        loop {
            let step = session.receive(&to_server, &mut to_client);
            to_server.drain(..step.consumed);
            if !matches!(step.event, Event::Selected(_)) {
                assert_eq!(step.event, Event::NeedMore);
                break;
            }
        }
    }
}

fn disk() -> Export {
    Export {
        block_min_bytes: 512,
        ..Export::new(ExportId(7), "vm1", 1 << 20)
    }
}

#[test]
fn client_and_server_agree_on_every_style() {
    for style in [
        HeaderStyle::Simple,
        HeaderStyle::Structured,
        HeaderStyle::Extended,
    ] {
        let wanted = Wanted {
            name: "vm1".into(),
            style,
            block_status: style != HeaderStyle::Simple,
            session: None,
        };
        let (progress, session) = meet(wanted, vec![disk()]);
        let Progress::Agreed(agreed) = progress else {
            panic!("{progress:?}")
        };
        assert_eq!((agreed.style, session.style()), (style, style));
        assert_eq!(agreed.size_bytes, 1 << 20);
        assert_eq!(agreed.block_sizes.unwrap().minimum, 512);
        assert_eq!(agreed.allocation_context.is_some(), style != HeaderStyle::Simple);
        assert_eq!(agreed.flags, disk().transmission_flags(style));
    }
}

#[test]
fn export_that_is_not_there_is_reported_with_the_servers_words() {
    let (progress, _) = meet(Wanted::plain("vm2"), vec![disk()]);
    let Progress::Failed(failure) = progress else {
        panic!("{progress:?}")
    };
    let message = failure.to_string();
    assert!(
        message.contains("GO") && message.contains("'vm2' is not here"),
        "{message}"
    );
}

#[test]
fn server_without_go_is_entered_by_export_name() {
    let (mut from_server, mut out) = (b"NBDMAGICIHAVEOPT\x00\x03".to_vec(), Vec::new());
    OptionReplies::new(OptionCode::GO, &mut from_server).error(ReplyKind::ERR_UNSUP, "what is that?");
    write_export_name_reply(4096, TransmissionFlags::HAS_FLAGS, false, &mut from_server);
    let (taken, progress) = Handshake::new(Wanted::plain("old")).receive(&from_server, &mut out);
    assert_eq!(taken, from_server.len());
    let Progress::Agreed(agreed) = progress else {
        panic!("{progress:?}")
    };
    assert_eq!(
        (agreed.size_bytes, agreed.style, agreed.block_sizes),
        (4096, HeaderStyle::Simple, None)
    );
    assert!(out.ends_with(b"old"));
}

#[test]
fn server_that_grants_go_without_describing_the_export_is_refused() {
    let (mut from_server, mut out) = (b"NBDMAGICIHAVEOPT\x00\x03".to_vec(), Vec::new());
    OptionReplies::new(OptionCode::GO, &mut from_server).ack();
    let mut handshake = Handshake::new(Wanted::plain("x"));
    let (_, progress) = handshake.receive(&from_server, &mut out);
    assert_eq!(progress, Progress::Failed(Failure::Malformed(OptionCode::GO)));
    assert_eq!(handshake.receive(&from_server, &mut out), (0, Progress::NeedMore));
}

#[test]
fn answer_longer_than_any_is_refused_before_it_is_buffered() {
    let (mut from_server, mut out) = (b"NBDMAGICIHAVEOPT\x00\x03".to_vec(), Vec::new());
    OptionReplies::new(OptionCode::GO, &mut from_server).error(ReplyKind::ERR_UNKNOWN, "no");
    let length_at = from_server.len() - 2 - 4;
    from_server[length_at..length_at + 4].copy_from_slice(&(1u32 << 30).to_be_bytes());
    let (_, progress) = Handshake::new(Wanted::plain("x")).receive(&from_server, &mut out);
    assert_eq!(progress, Progress::Failed(Failure::Malformed(OptionCode::GO)));
}

#[test]
fn web_server_is_told_from_an_nbd_server() {
    let (_, progress) = Handshake::new(Wanted::plain("x")).receive(b"HTTP/1.1 200 OK\r\n", &mut Vec::new());
    assert!(matches!(progress, Progress::Failed(Failure::BadMagic(_))));
}
