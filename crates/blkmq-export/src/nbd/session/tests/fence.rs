//! Tests how a session gets a name, and which sessions may fence which.

use blkmq_nbd::client::{Handshake, Progress, Wanted};
use blkmq_nbd::codec::handshake::SessionName;
use blkmq_nbd::codec::option_reply::parse_session;

use super::*;
use crate::nbd::session::{Fault, Op};

const NAME: SessionName = SessionName {
    client: 0x0123_4567_89ab_cdef_0123_4567_89ab_cdef,
    number: 9,
};

fn wire(instance: Option<u64>) -> Wire {
    let mut table = ExportTable::new([disk()]).unwrap();
    table.instance = instance;
    let mut out = Vec::new();
    let session = Session::new(Arc::new(table), Limits::default(), &mut out);
    out.clear();
    let unread = Vec::new();
    let mut wire = Wire { session, out, unread };
    wire.send(&flags(ClientFlags::KNOWN));
    wire
}

fn name() -> Vec<u8> {
    let mut data = Vec::new();
    NAME.write(&mut data);
    data
}

fn select(wire: &mut Wire) {
    wire.send(&option(OptionCode::GO, &info("vm1", &[])));
    wire.out.clear();
}

fn fence(number: u64, length: u64) -> Vec<u8> {
    header(
        HeaderStyle::Simple,
        Command::FENCE,
        CommandFlags::NONE,
        number,
        length,
    )
}

#[test]
fn session_is_named_once_with_exactly_24_bytes() {
    let mut wire = wire(Some(77));
    for length in [0, 1, 8, 23, 25, 48, 16 << 10] {
        wire.send(&option(OptionCode::SESSION, &vec![7; length]));
        let answers = wire.answers();
        assert_eq!(answers.len(), 1, "{length} bytes");
        assert_eq!(answers[0].0, ReplyKind::ERR_INVALID, "{length} bytes");
    }
    wire.send(&option(OptionCode::SESSION, &vec![7; 17 << 10]));
    assert_eq!(wire.answers()[0].0, ReplyKind::ERR_TOO_BIG);
    wire.send(&option(OptionCode::SESSION, &name()));
    let answers = wire.answers();
    assert_eq!(
        (answers[0].0, parse_session(&answers[0].1)),
        (ReplyKind::SESSION, Some(77))
    );
    assert_eq!(answers[1], (ReplyKind::ACK, vec![]));
    wire.send(&option(OptionCode::SESSION, &name()));
    assert_eq!(wire.answers()[0].0, ReplyKind::ERR_INVALID, "a second name");
    assert_eq!(wire.session.name(), None, "nothing is selected");
    select(&mut wire);
    assert_eq!(wire.session.name(), Some(NAME));
    assert_eq!(format!("{NAME:?}"), "session 9", "the client's part is a secret");
}

#[test]
fn server_without_an_instance_does_not_know_the_option() {
    let mut wire = wire(None);
    wire.send(&option(OptionCode::SESSION, &name()));
    assert_eq!(wire.answers()[0].0, ReplyKind::ERR_UNSUP);
}

#[test]
fn session_without_a_name_can_fence_nobody() {
    let mut wire = wire(Some(77));
    select(&mut wire);
    let told = refused(&wire.send(&fence(1, 0)));
    assert_eq!(
        (told.fault, told.error),
        (Fault::UnknownCommand, ErrorCode::Invalid)
    );
}

#[test]
fn fence_names_another_session_and_no_range() {
    let mut wire = wire(Some(77));
    wire.acked(OptionCode::SESSION, &name());
    select(&mut wire);
    for (number, length, fault) in [
        (9, 0, Fault::OwnSession),
        (8, 1, Fault::WrongRange),
        (0, u64::from(u32::MAX), Fault::WrongRange),
    ] {
        let told = refused(&wire.send(&fence(number, length)));
        assert_eq!(
            (told.fault, told.error),
            (fault, ErrorCode::Invalid),
            "{number} {length}"
        );
        wire.out.clear();
    }
    for number in [0, 8, u64::MAX] {
        let request = request(&wire.send(&fence(number, 0)));
        assert_eq!((request.op, request.offset), (Op::Fence, number));
        wire.session.replies().ok(&request, &mut wire.out);
        assert_eq!(wire.reply(), (42, 0));
    }
    assert_eq!(wire.session.replies().requests(), 0);
}

#[test]
fn our_client_names_its_session_where_the_server_takes_note_of_it() {
    for (style, instance) in [
        (HeaderStyle::Simple, Some(5)),
        (HeaderStyle::Structured, Some(5)),
        (HeaderStyle::Extended, Some(5)),
        (HeaderStyle::Extended, None),
    ] {
        let mut table = ExportTable::new([disk()]).unwrap();
        table.instance = instance;
        let (mut to_client, mut to_server) = (Vec::new(), Vec::new());
        let mut session = Session::new(Arc::new(table), Limits::default(), &mut to_client);
        let mut handshake = Handshake::new(Wanted {
            style,
            block_status: style != HeaderStyle::Simple,
            session: Some(NAME),
            ..Wanted::plain("vm1")
        });
        let agreed = loop {
            let (taken, progress) = handshake.receive(&to_client, &mut to_server);
            to_client.drain(..taken);
            match progress {
                Progress::Agreed(agreed) => break agreed,
                Progress::Failed(failure) => panic!("{failure}"),
                Progress::NeedMore => {}
            }
            loop {
                let step = session.receive(&to_server, &mut to_client);
                to_server.drain(..step.consumed);
                if step.event == Event::NeedMore {
                    break;
                }
            }
        };
        assert_eq!((agreed.style, agreed.instance), (style, instance));
        assert_eq!(session.name(), instance.map(|_| NAME));
    }
}
