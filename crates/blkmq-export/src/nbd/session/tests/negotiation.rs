//! Tests what a client may request before it selects an export, and the answers.

use blkmq_nbd::codec::TransmissionFlags;
use blkmq_nbd::codec::option_reply::{
    BlockSizes, Info, parse_export_name_reply, parse_meta_context, parse_server,
};

use blkmq_tls::Mode;

use super::*;
use crate::nbd::session::CloseReason;

fn second_disk() -> Export {
    Export::new(ExportId(2), "vm2", 2 * MIB)
}

fn last_kind(wire: &mut Wire) -> ReplyKind {
    wire.answers().last().expect("an answer").0
}

#[test]
fn list_names_every_export_with_its_description() {
    let mut wire = Wire::greeted([disk(), second_disk()]);
    wire.send(&option(OptionCode::LIST, &[]));
    let answers = wire.answers();
    assert_eq!(parse_server(&answers[0].1), Some(("vm1", "root disk")));
    assert_eq!(parse_server(&answers[1].1), Some(("vm2", "")));
    assert_eq!(answers[2], (ReplyKind::ACK, vec![]));
}

#[test]
fn info_describes_the_export_and_selects_nothing() {
    let mut wire = Wire::greeted([disk(), second_disk()]);
    let kinds = [
        InfoKind::NAME,
        InfoKind::DESCRIPTION,
        InfoKind::BLOCK_SIZE,
        InfoKind(77),
    ];
    assert_eq!(
        wire.send(&option(OptionCode::INFO, &info("vm1", &kinds))),
        [Event::NeedMore]
    );
    let answers = wire.answers();
    let infos: Vec<Info<'_>> = answers[..answers.len() - 1]
        .iter()
        .map(|(_, data)| Info::parse(data).unwrap())
        .collect();
    let sizes = BlockSizes {
        minimum: 512,
        preferred: 4096,
        payload_max: 32 << 20,
    };
    let flags = disk().transmission_flags(HeaderStyle::Simple);
    assert_eq!(
        infos,
        [
            Info::Export {
                size_bytes: MIB,
                flags
            },
            Info::Name("vm1"),
            Info::Description("root disk"),
            Info::BlockSize(sizes),
        ]
    );
    assert_eq!(answers.last(), Some(&(ReplyKind::ACK, vec![])));
    assert!(wire.session.is_negotiating());
}

#[test]
fn df_is_offered_only_once_replies_are_structured() {
    assert!(
        !disk()
            .transmission_flags(HeaderStyle::Simple)
            .contains(TransmissionFlags::SEND_DF)
    );
    assert!(
        disk()
            .transmission_flags(HeaderStyle::Structured)
            .contains(TransmissionFlags::SEND_DF)
    );
}

#[test]
fn export_name_selects_and_pads_unless_told_otherwise() {
    for (client, bytes) in [(ClientFlags::FIXED_NEWSTYLE, 134), (ClientFlags::KNOWN, 10)] {
        let mut wire = Wire::new([disk()], Limits::default());
        wire.send(&flags(client));
        let events = wire.send(&option(OptionCode::EXPORT_NAME, b"vm1"));
        assert!(matches!(&events[0], Event::Selected(export) if export.name == "vm1"));
        assert_eq!(wire.out.len(), bytes);
        let (size_bytes, ..) = parse_export_name_reply(&wire.out, bytes == 134).unwrap();
        assert_eq!(size_bytes, MIB);
    }
}

#[test]
fn refused_selection_fails_go_with_the_reason_and_another_one_may_follow() {
    let other = Export::new(ExportId(2), "vm2", MIB);
    let mut wire = Wire::greeted([disk(), other]);
    wire.acked(OptionCode::STRUCTURED_REPLY, &[]);
    wire.acked(
        OptionCode::SET_META_CONTEXT,
        &contexts("vm1", &["base:allocation"]),
    );
    wire.out.clear();
    let go = |name: &str| option(OptionCode::GO, &info(name, &[InfoKind::NAME]));
    assert!(matches!(&wire.send(&go("vm1"))[0], Event::Selected(export) if export.name == "vm1"));
    assert!(wire.session.refuse("it is locked", &mut wire.out));
    assert_eq!(
        wire.answers(),
        [(ReplyKind::ERR_POLICY, b"it is locked".to_vec())]
    );
    assert!(wire.session.is_negotiating());
    wire.out.clear();
    assert!(matches!(&wire.send(&go("vm2"))[0], Event::Selected(export) if export.name == "vm2"));
    wire.session.accept();
    assert_eq!(wire.answers().last().map(|(kind, _)| *kind), Some(ReplyKind::ACK));
}

#[test]
fn refused_export_name_has_no_reply_and_asks_for_the_end() {
    let mut wire = Wire::greeted([disk()]);
    wire.send(&option(OptionCode::EXPORT_NAME, b"vm1"));
    assert!(!wire.session.refuse("it is locked", &mut wire.out));
}

#[test]
fn empty_name_selects_the_only_export() {
    let mut wire = Wire::greeted([disk()]);
    let events = wire.send(&option(OptionCode::GO, &info("", &[])));
    assert!(matches!(&events[0], Event::Selected(export) if export.name == "vm1"));
}

#[test]
fn unknown_export_fails_go_with_its_name_and_negotiation_goes_on() {
    let mut wire = Wire::greeted([disk()]);
    assert_eq!(
        wire.send(&option(OptionCode::GO, &info("vm9", &[]))),
        [Event::NeedMore]
    );
    let answers = wire.answers();
    assert_eq!(answers.len(), 1);
    assert_eq!(answers[0].0, ReplyKind::ERR_UNKNOWN);
    assert!(String::from_utf8_lossy(&answers[0].1).contains("'vm9'"));
    wire.acked(OptionCode::LIST, &[]);
}

#[test]
fn abort_is_acknowledged_whatever_data_it_announces() {
    let mut wire = Wire::greeted([disk()]);
    let mut bytes = option(OptionCode::ABORT, &[]);
    bytes[12..16].copy_from_slice(&u32::MAX.to_be_bytes());
    assert_eq!(wire.send(&bytes), [Event::Disconnect]);
    assert_eq!(last_kind(&mut wire), ReplyKind::ACK);
    assert!(wire.session.has_ended());
    assert_eq!(wire.send(b"anything"), [Event::NeedMore]);
    assert!(wire.out.is_empty() && wire.unread.is_empty());
}

#[test]
fn starttls_and_unknown_options_are_refused_and_their_data_skipped() {
    let mut wire = Wire::greeted([disk()]);
    for (code, data, kind) in [
        (OptionCode::STARTTLS, &b""[..], ReplyKind::ERR_POLICY),
        (OptionCode(4), b"vm1", ReplyKind::ERR_UNSUP),
        (OptionCode(99), &[7; 50_000], ReplyKind::ERR_UNSUP),
        (OptionCode::LIST, b"x", ReplyKind::ERR_INVALID),
        (OptionCode::STRUCTURED_REPLY, b"x", ReplyKind::ERR_INVALID),
        (OptionCode::EXTENDED_HEADERS, b"x", ReplyKind::ERR_INVALID),
        (OptionCode::GO, b"xyz", ReplyKind::ERR_INVALID),
        (OptionCode::GO, &[0; 20_000], ReplyKind::ERR_TOO_BIG),
        (OptionCode::SET_META_CONTEXT, b"", ReplyKind::ERR_INVALID),
    ] {
        assert_eq!(wire.send(&option(code, data)), [Event::NeedMore]);
        assert_eq!(last_kind(&mut wire), kind, "{code}");
    }
    wire.acked(OptionCode::STRUCTURED_REPLY, &[]);
}

#[test]
fn extended_headers_rule_out_structured_replies_and_export_name() {
    let mut wire = Wire::greeted([disk()]);
    wire.acked(OptionCode::STRUCTURED_REPLY, &[]);
    wire.acked(OptionCode::EXTENDED_HEADERS, &[]);
    wire.send(&option(OptionCode::STRUCTURED_REPLY, &[]));
    assert_eq!(last_kind(&mut wire), ReplyKind::ERR_EXT_HEADER_REQD);
    assert_eq!(wire.session.style(), HeaderStyle::Extended);
    let events = wire.send(&option(OptionCode::EXPORT_NAME, b"vm1"));
    assert_eq!(events, [Event::Close(CloseReason::ExportNameWithExtendedHeaders)]);
}

#[test]
fn contexts_are_listed_by_wildcard_and_selected_by_name_only() {
    let mut wire = Wire::greeted([disk()]);
    wire.acked(OptionCode::STRUCTURED_REPLY, &[]);
    for (code, queries, found) in [
        (OptionCode::LIST_META_CONTEXT, &[][..], true),
        (OptionCode::LIST_META_CONTEXT, &["base:"], true),
        (OptionCode::LIST_META_CONTEXT, &["qemu:dirty-bitmap:x"], false),
        (OptionCode::SET_META_CONTEXT, &[], false),
        (OptionCode::SET_META_CONTEXT, &["base:"], false),
        (
            OptionCode::SET_META_CONTEXT,
            &["base:other", "base:allocation", "base:allocation"],
            true,
        ),
    ] {
        wire.send(&option(code, &contexts("vm1", queries)));
        let answers = wire.answers();
        assert_eq!(answers.len(), if found { 2 } else { 1 }, "{code} {queries:?}");
        if found {
            assert_eq!(parse_meta_context(&answers[0].1).unwrap().1, "base:allocation");
        }
    }
}

#[test]
fn context_is_void_for_another_export_or_after_a_failed_selection() {
    let later: [(&str, &[&str], &str, bool); 4] = [
        ("vm1", &["base:allocation"], "vm1", true),
        ("vm1", &["base:allocation"], "vm2", false),
        ("vm1", &[], "vm1", false),
        ("nowhere", &["base:allocation"], "vm1", false),
    ];
    for (named, queries, selected, valid) in later {
        let mut wire = Wire::greeted([disk(), second_disk()]);
        wire.acked(OptionCode::STRUCTURED_REPLY, &[]);
        wire.acked(
            OptionCode::SET_META_CONTEXT,
            &contexts("vm1", &["base:allocation"]),
        );
        wire.send(&option(OptionCode::SET_META_CONTEXT, &contexts(named, queries)));
        wire.send(&option(OptionCode::GO, &info(selected, &[])));
        wire.out.clear();
        let ask = command(
            HeaderStyle::Structured,
            Command::BLOCK_STATUS,
            CommandFlags::NONE,
            0,
            4096,
        );
        let events = wire.send(&ask);
        assert_eq!(
            matches!(events[0], Event::Request(_)),
            valid,
            "{named} {queries:?} {selected}"
        );
    }
}

#[test]
fn server_that_shuts_down_refuses_options_but_still_lets_clients_go() {
    let mut wire = Wire::greeted([disk()]);
    wire.session.shut_down();
    for code in [OptionCode::LIST, OptionCode::STRUCTURED_REPLY, OptionCode(99)] {
        wire.send(&option(code, &[]));
        assert_eq!(last_kind(&mut wire), ReplyKind::ERR_SHUTDOWN);
    }
    assert_eq!(wire.send(&option(OptionCode::ABORT, &[])), [Event::Disconnect]);
}

#[test]
fn client_that_does_not_read_its_answers_is_made_to_wait() {
    let mut wire = Wire::new(
        [disk()],
        Limits {
            unsent_bytes_max: 4096,
            ..Limits::default()
        },
    );
    wire.send(&flags(ClientFlags::KNOWN));
    let lists = option(OptionCode::LIST, &[]).repeat(1000);
    assert_eq!(wire.send(&lists), [Event::Busy]);
    assert!(wire.out.len() < 4096 + 200, "{} bytes unsent", wire.out.len());
    wire.out.clear();
    assert_eq!(wire.send(&[]), [Event::Busy]);
}

#[test]
fn where_tls_is_required_everything_else_waits_for_it() {
    let mut wire = Wire::greeted([disk(), second_disk()]);
    wire.session.offer_tls(Mode::Require);
    for code in [3, 6, 7, 8, 9, 10, 11, 99] {
        wire.send(&option(OptionCode(code), &[1, 2, 3]));
        assert_eq!(last_kind(&mut wire), ReplyKind::ERR_TLS_REQD, "option {code}");
    }
    wire.send(&option(OptionCode::STARTTLS, &[1]));
    assert_eq!(last_kind(&mut wire), ReplyKind::ERR_INVALID);
    assert_eq!(wire.send(&option(OptionCode::STARTTLS, &[])), [Event::StartTls]);
    assert_eq!(last_kind(&mut wire), ReplyKind::ACK);
    wire.session
        .secure(Arc::new(ExportTable::new([second_disk()]).unwrap()));
    wire.send(&option(OptionCode::STARTTLS, &[]));
    assert_eq!(last_kind(&mut wire), ReplyKind::ERR_INVALID);
    wire.send(&option(OptionCode::GO, &info("vm1", &[])));
    assert_eq!(last_kind(&mut wire), ReplyKind::ERR_UNKNOWN);
    let events = wire.send(&option(OptionCode::GO, &info("vm2", &[])));
    assert!(matches!(events[0], Event::Selected(_)), "{events:?}");
}

#[test]
fn export_name_without_the_tls_that_is_required_ends_the_session_and_abort_is_heard() {
    let mut wire = Wire::greeted([disk()]);
    wire.session.offer_tls(Mode::Require);
    let events = wire.send(&option(OptionCode::EXPORT_NAME, b"vm1"));
    assert_eq!(events, [Event::Close(CloseReason::TlsRequired)]);
    let mut wire = Wire::greeted([disk()]);
    wire.session.offer_tls(Mode::Require);
    assert_eq!(wire.send(&option(OptionCode::ABORT, &[])), [Event::Disconnect]);
}

#[test]
fn options_negotiated_before_tls_are_forgotten() {
    let mut wire = Wire::greeted([disk()]);
    wire.session.offer_tls(Mode::Allow);
    wire.acked(OptionCode::EXTENDED_HEADERS, &[]);
    assert_eq!(wire.send(&option(OptionCode::STARTTLS, &[])), [Event::StartTls]);
    wire.session.secure(Arc::new(ExportTable::new([disk()]).unwrap()));
    assert_eq!(wire.session.style(), HeaderStyle::Simple);
}

#[test]
fn bytes_behind_starttls_end_the_session_at_once_and_later() {
    let smuggled = [option(OptionCode::STARTTLS, &[]), option(OptionCode::LIST, &[])].concat();
    let mut wire = Wire::greeted([disk()]);
    wire.session.offer_tls(Mode::Allow);
    assert_eq!(
        wire.send(&smuggled),
        [Event::Close(CloseReason::BytesBehindStartTls)]
    );
    assert!(wire.out.is_empty(), "it was answered");
    let mut wire = Wire::greeted([disk()]);
    wire.session.offer_tls(Mode::Allow);
    wire.send(&option(OptionCode::STARTTLS, &[]));
    let events = wire.send(&option(OptionCode::LIST, &[]));
    assert_eq!(events, [Event::Close(CloseReason::BytesBehindStartTls)]);
}
