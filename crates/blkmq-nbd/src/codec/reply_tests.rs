//! Replies of the transmission phase: there and back, and what is refused.

use proptest::prelude::*;

use super::*;

const CHUNKED: [HeaderStyle; 2] = [HeaderStyle::Structured, HeaderStyle::Extended];

fn split(style: HeaderStyle, out: &[u8]) -> (ChunkHead, &[u8]) {
    let (head, bytes) = ReplyHead::parse(style, out).unwrap().unwrap();
    let ReplyHead::Chunk(head) = head else {
        panic!("{head:?} is no chunk")
    };
    assert_eq!(out.len() - bytes, head.payload_bytes as usize);
    (head, &out[bytes..])
}

#[test]
fn simple_reply_is_laid_out_as_the_protocol_draws_it() {
    let mut out = Vec::new();
    write_simple(0x1122, Some(ErrorCode::NoSpace), &mut out);
    assert_eq!(
        out,
        [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 28, 0, 0, 0, 0, 0, 0, 0x11, 0x22]
    );
}

#[test]
fn each_style_accepts_its_own_replies_only() {
    let mut simple = Vec::new();
    write_simple(7, None, &mut simple);
    assert!(ReplyHead::parse(HeaderStyle::Structured, &simple).is_ok());
    assert!(ReplyHead::parse(HeaderStyle::Extended, &simple).is_err());
    let head = ChunkHead {
        cookie: 7,
        offset: 0,
        payload_bytes: 0,
        kind: ChunkKind::NONE,
        flags: ChunkFlags::DONE,
    };
    let mut chunk = Vec::new();
    write_chunk_head(HeaderStyle::Structured, &head, &mut chunk);
    assert!(ReplyHead::parse(HeaderStyle::Simple, &chunk).is_err());
    assert!(ReplyHead::parse(HeaderStyle::Extended, &chunk).is_err());
}

#[test]
fn payloads_of_the_wrong_shape_are_refused() {
    let wrong: [(ChunkKind, &[u8]); 10] = [
        (ChunkKind::NONE, &[0]),
        (ChunkKind::OFFSET_DATA, &[0; 8]),
        (ChunkKind::OFFSET_HOLE, &[0; 12]),
        (ChunkKind::OFFSET_HOLE, &[1; 13]),
        (ChunkKind::BLOCK_STATUS, &[0; 4]),
        (ChunkKind::BLOCK_STATUS, &[0; 13]),
        (ChunkKind::BLOCK_STATUS_EXT, &[0; 24]),
        (ChunkKind::ERROR, &[0, 0, 0, 5, 0, 1]),
        (ChunkKind::ERROR_OFFSET, &[0, 0, 0, 5, 0, 0]),
        (ChunkKind(99), &[]),
    ];
    for (kind, payload) in wrong {
        assert_eq!(ChunkPayload::parse(kind, payload), None, "{kind:?} {payload:?}");
    }
}

#[test]
fn unknown_error_chunk_still_counts_as_an_error() {
    let payload = [0, 0, 0, 28, 0, 2, b'n', b'o', 1, 2, 3];
    let parsed = ChunkPayload::parse(ChunkKind(ERROR_BIT + 77), &payload);
    assert_eq!(
        parsed,
        Some(ChunkPayload::Error {
            error: ErrorCode::NoSpace,
            message: "no",
            offset: None
        })
    );
}

proptest! {
    #[test]
    fn every_simple_reply_survives_the_wire(cookie: u64, which in 0..9usize) {
        let error = ErrorCode::ALL.get(which).copied();
        let mut out = Vec::new();
        write_simple(cookie, error, &mut out);
        let expected = ReplyHead::Simple { cookie, error: error.map_or(0, ErrorCode::to_wire) };
        prop_assert_eq!(ReplyHead::parse(HeaderStyle::Simple, &out), Ok(Some((expected, SIMPLE_BYTES))));
        prop_assert_eq!(ReplyHead::parse(HeaderStyle::Simple, &out[..15]), Ok(None));
    }

    #[test]
    fn every_data_chunk_survives_the_wire(
        cookie: u64, offset: u64, data in prop::collection::vec(any::<u8>(), 1..64),
    ) {
        for style in CHUNKED {
            let mut out = Vec::new();
            write_data_head(style, cookie, offset, offset, data.len() as u64, &mut out);
            out.extend_from_slice(&data);
            let (head, payload) = split(style, &out);
            prop_assert_eq!((head.cookie, head.kind, head.flags), (cookie, ChunkKind::OFFSET_DATA, ChunkFlags::DONE));
            let parsed = ChunkPayload::parse(head.kind, payload);
            prop_assert_eq!(parsed, Some(ChunkPayload::Data { offset, data: &data }));
        }
    }

    #[test]
    fn every_error_chunk_survives_the_wire(cookie: u64, which in 0..8usize, message in "[a-zé ]{0,60}") {
        let error = ErrorCode::ALL[which];
        for style in CHUNKED {
            let mut out = Vec::new();
            write_error_chunk(style, cookie, 5, error, &message, &mut out);
            let (head, payload) = split(style, &out);
            prop_assert!(head.kind.is_error());
            let expected = ChunkPayload::Error { error, message: &message, offset: None };
            prop_assert_eq!(ChunkPayload::parse(head.kind, payload), Some(expected));
        }
    }

    #[test]
    fn every_status_chunk_survives_the_wire(
        cookie: u64, context: u32, runs in prop::collection::vec((1..u32::MAX, 0..4u32), 1..20),
    ) {
        let extents: Vec<Extent> = runs
            .iter()
            .map(|&(bytes, state)| Extent { bytes: u64::from(bytes), state: ExtentState(state) })
            .collect();
        for style in CHUNKED {
            let mut out = Vec::new();
            write_status_chunk(style, (cookie, 5), context, extents.iter().copied(), ChunkFlags::DONE, &mut out);
            let (head, payload) = split(style, &out);
            let Some(ChunkPayload::Status(status)) = ChunkPayload::parse(head.kind, payload) else {
                panic!("no status in {head:?}")
            };
            prop_assert_eq!(status.context, context);
            prop_assert_eq!(status.extents().collect::<Vec<_>>(), extents.clone());
        }
    }

    #[test]
    fn payloads_of_any_bytes_never_panic(kind in 0..8u16, payload in prop::collection::vec(any::<u8>(), 0..80)) {
        for kind in [ChunkKind(kind), ChunkKind(kind | ERROR_BIT)] {
            if let Some(ChunkPayload::Status(status)) = ChunkPayload::parse(kind, &payload) {
                prop_assert!(status.extents().count() > 0);
            }
        }
    }
}
