//! Answers to options: there and back, and what is refused.

use proptest::prelude::*;

use super::*;

fn data_of(out: &[u8]) -> (ReplyHeader, &[u8]) {
    let header = ReplyHeader::parse(out).unwrap().unwrap();
    let data = &out[REPLY_HEADER_BYTES..];
    assert_eq!(data.len(), header.data_bytes as usize);
    (header, data)
}

fn written(write: impl FnOnce(&mut OptionReplies<'_>)) -> Vec<u8> {
    let mut out = Vec::new();
    write(&mut OptionReplies::new(OptionCode::GO, &mut out));
    out
}

#[test]
fn ack_is_a_header_without_data() {
    let out = written(|replies| replies.ack());
    let (header, _) = data_of(&out);
    assert_eq!(
        header,
        ReplyHeader {
            option: OptionCode::GO,
            kind: ReplyKind::ACK,
            data_bytes: 0
        }
    );
    assert_eq!(ReplyHeader::parse(&out[..19]), Ok(None));
    assert!(ReplyHeader::parse(b"NBDMAGIC............").is_err());
}

#[test]
fn long_error_message_is_cut_between_characters() {
    let out = written(|replies| replies.error(ReplyKind::ERR_UNKNOWN, &"é".repeat(4000)));
    let (header, data) = data_of(&out);
    assert!(header.kind.is_error());
    assert_eq!(std::str::from_utf8(data).unwrap().chars().count(), 2048);
}

#[test]
fn info_whose_length_does_not_fit_its_kind_is_refused() {
    for data in [
        &[][..],
        &[0],
        &[0, 0, 1],
        &[0; 13],
        &[0, 3, 0, 0, 0, 1],
        &[0, 1, 0xff],
    ] {
        assert_eq!(Info::parse(data), None, "{data:?}");
    }
    assert_eq!(Info::parse(&[0, 9, 1]), Some(Info::Unknown(InfoKind(9))));
}

#[test]
fn answer_to_export_name_is_padded_unless_the_client_does_without() {
    for padded in [false, true] {
        let mut out = Vec::new();
        write_export_name_reply(1 << 40, TransmissionFlags::HAS_FLAGS, padded, &mut out);
        assert_eq!(out.len(), if padded { 134 } else { 10 });
        let all = Some((1 << 40, TransmissionFlags::HAS_FLAGS, out.len()));
        assert_eq!(parse_export_name_reply(&out, padded), all);
        assert_eq!(parse_export_name_reply(&out[..out.len() - 1], padded), None);
    }
}

proptest! {
    #[test]
    fn every_info_survives_the_wire(
        size_bytes: u64, flags: u16, minimum: u32, preferred: u32, payload_max: u32, text in "[a-zé ]{0,30}",
    ) {
        let sizes = BlockSizes { minimum, preferred, payload_max };
        let export = Info::Export { size_bytes, flags: TransmissionFlags(flags) };
        for info in [export, Info::BlockSize(sizes), Info::Name(&text), Info::Description(&text)] {
            let out = written(|replies| replies.info(info));
            let (header, data) = data_of(&out);
            prop_assert_eq!(header.kind, ReplyKind::INFO);
            prop_assert_eq!(Info::parse(data), Some(info));
        }
    }

    #[test]
    fn every_listed_export_and_context_survives_the_wire(
        name in "[a-z]{0,30}", text in "[a-zé ]{0,30}", id: u32,
    ) {
        let out = written(|replies| replies.server(&name, &text));
        prop_assert_eq!(parse_server(data_of(&out).1), Some((name.as_str(), text.as_str())));
        let out = written(|replies| replies.meta_context(id, &name));
        prop_assert_eq!(parse_meta_context(data_of(&out).1), Some((id, name.as_str())));
    }

    #[test]
    fn answer_data_of_any_bytes_never_panics(data in prop::collection::vec(any::<u8>(), 0..100)) {
        let _ = (Info::parse(&data), parse_meta_context(&data), parse_server(&data), ReplyHeader::parse(&data));
    }
}
