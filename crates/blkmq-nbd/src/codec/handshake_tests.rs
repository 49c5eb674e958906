//! Greeting and options: there and back, and what is refused.

use proptest::prelude::*;

use super::*;
use crate::codec::STRING_BYTES_MAX;

#[test]
fn greeting_is_eighteen_bytes_and_says_newstyle() {
    let mut out = Vec::new();
    write_greeting(HandshakeFlags::FIXED_NEWSTYLE, &mut out);
    assert_eq!(out, b"NBDMAGICIHAVEOPT\x00\x01");
    assert_eq!(out.len(), GREETING_BYTES);
    assert_eq!(parse_greeting(&out), Ok(Some(HandshakeFlags::FIXED_NEWSTYLE)));
    assert_eq!(parse_greeting(&out[..17]), Ok(None));
}

#[test]
fn oldstyle_greeting_is_told_from_a_newstyle_one() {
    let error = parse_greeting(b"NBDMAGIC\x00\x00\x42\x02\x81\x86\x12\x53").unwrap_err();
    assert_eq!(error.expected, OPTION_MAGIC);
    assert!(parse_greeting(b"HTTP/1.1 400 Bad").is_err());
}

#[test]
fn info_request_whose_count_disagrees_with_its_data_is_refused() {
    let mut data = Vec::new();
    InfoRequest::write("disk", &[InfoKind::BLOCK_SIZE], &mut data);
    assert!(InfoRequest::parse(&data).unwrap().wants(InfoKind::BLOCK_SIZE));
    assert!(!InfoRequest::parse(&data).unwrap().wants(InfoKind::NAME));
    for wrong in [
        &data[..data.len() - 1],
        &[&data[..], &[0]].concat(),
        &data[..3],
        &[],
    ] {
        assert_eq!(InfoRequest::parse(wrong), None, "{wrong:?}");
    }
}

#[test]
fn names_with_nul_bad_utf8_or_excess_length_are_no_names() {
    assert_eq!(parse_name(b"vm1"), Some("vm1"));
    assert_eq!(parse_name(b"v\0m"), None);
    assert_eq!(parse_name(b"\xff\xfe"), None);
    assert!(parse_name(&[b'a'; STRING_BYTES_MAX]).is_some());
    assert!(parse_name(&[b'a'; STRING_BYTES_MAX + 1]).is_none());
}

#[test]
fn query_count_beyond_the_data_is_refused_without_looping_over_it() {
    let mut data = Vec::new();
    MetaRequest::write("disk", &[], &mut data);
    data[8..12].copy_from_slice(&u32::MAX.to_be_bytes());
    assert!(MetaRequest::parse(&data).is_none());
}

proptest! {
    #[test]
    fn every_option_survives_the_wire(code: u32, data in prop::collection::vec(any::<u8>(), 0..64)) {
        let mut out = Vec::new();
        write_option(OptionCode(code), &data, &mut out);
        let header = OptionHeader::parse(&out).unwrap().unwrap();
        prop_assert_eq!(header, OptionHeader { code: OptionCode(code), data_bytes: data.len() as u32 });
        prop_assert_eq!(&out[OPTION_HEADER_BYTES..], &data[..]);
        prop_assert_eq!(OptionHeader::parse(&out[..OPTION_HEADER_BYTES - 1]), Ok(None));
    }

    #[test]
    fn every_info_request_survives_the_wire(
        name in "[a-z0-9/é]{0,40}", kinds in prop::collection::vec(0u16..6, 0..6),
    ) {
        let kinds: Vec<_> = kinds.into_iter().map(InfoKind).collect();
        let mut data = Vec::new();
        InfoRequest::write(&name, &kinds, &mut data);
        let parsed = InfoRequest::parse(&data).unwrap();
        prop_assert_eq!(parsed.name, &name);
        for raw in 0..6 {
            prop_assert_eq!(parsed.wants(InfoKind(raw)), kinds.contains(&InfoKind(raw)));
        }
    }

    #[test]
    fn every_meta_request_survives_the_wire(
        name in "[a-z]{0,20}", queries in prop::collection::vec("[a-z]{1,9}:[a-z]{0,9}", 0..5),
    ) {
        let queries: Vec<&str> = queries.iter().map(String::as_str).collect();
        let mut data = Vec::new();
        MetaRequest::write(&name, &queries, &mut data);
        let parsed = MetaRequest::parse(&data).unwrap();
        prop_assert_eq!(parsed.name, &name);
        prop_assert_eq!(parsed.queries().collect::<Vec<_>>(), queries);
    }

    #[test]
    fn option_data_of_any_bytes_never_panics(data in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = InfoRequest::parse(&data);
        if let Some(meta) = MetaRequest::parse(&data) {
            prop_assert_eq!(meta.queries().count(), meta.query_count as usize);
        }
    }
}
