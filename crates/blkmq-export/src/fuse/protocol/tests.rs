//! Tests of the parser, and of what is agreed on.

use super::*;

fn request(opcode: u32, body: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; HEADER_BYTES];
    bytes[..4].copy_from_slice(&((HEADER_BYTES + body.len()) as u32).to_ne_bytes());
    bytes[4..8].copy_from_slice(&opcode.to_ne_bytes());
    bytes[8..16].copy_from_slice(&77_u64.to_ne_bytes());
    bytes.extend_from_slice(body);
    bytes
}

/// The fixed part of a read or write.
fn range(offset: u64, len: u32, flags: u32) -> Vec<u8> {
    let mut bytes = vec![0; 40];
    bytes[8..16].copy_from_slice(&offset.to_ne_bytes());
    bytes[16..20].copy_from_slice(&len.to_ne_bytes());
    bytes[32..36].copy_from_slice(&flags.to_ne_bytes());
    bytes
}

fn parse(bytes: &[u8]) -> Result<Call, String> {
    let fixed = &bytes[..bytes.len().min(FIXED_BYTES_MAX)];
    let parsed = Request::parse(fixed, bytes.len());
    parsed
        .map(|request| {
            assert_eq!(request.unique, 77);
            request.call
        })
        .map_err(|error| error.to_string())
}

#[test]
fn read_and_a_write_say_where_and_how_much() {
    let read = request(READ, &range(8192, 4096, 0));
    let expected = Range {
        offset: 8192,
        len: 4096,
    };
    assert_eq!(parse(&read), Ok(Call::Read(expected)));
    let write = |flags| {
        let mut bytes = range(8192, 4096, flags);
        bytes.resize(40 + 4096, 7);
        parse(&request(WRITE, &bytes))
    };
    let expected = |is_durable| {
        let range = expected;
        Ok(Call::Write { range, is_durable })
    };
    assert_eq!(write(libc::O_RDWR as u32), expected(false));
    assert_eq!(write(libc::O_DSYNC as u32), expected(true));
    assert_eq!(write(libc::O_SYNC as u32), expected(true));
}

#[test]
fn lengths_that_contradict_each_other_are_refused() {
    let mut short = request(READ, &range(0, 4096, 0));
    short.truncate(60);
    assert!(parse(&short).unwrap_err().contains("length says otherwise"));
    short[0] = 60;
    assert!(parse(&short).unwrap_err().contains("cut off"));
    let huge = request(READ, &range(0, DATA_BYTES_MAX as u32 + 1, 0));
    assert!(parse(&huge).unwrap_err().contains("agreed on"));
    let far = request(READ, &range(u64::MAX - 100, 4096, 0));
    assert!(parse(&far).unwrap_err().contains("beyond"));
    let mut body = range(0, 4096, 0);
    body.resize(40 + 4000, 0);
    assert!(
        parse(&request(WRITE, &body))
            .unwrap_err()
            .contains("another length")
    );
    assert!(parse(&[0; 39]).unwrap_err().contains("shorter than a header"));
}

#[test]
fn agreed_features_are_those_that_both_know() {
    let mut init = Init {
        major: 7,
        minor: 45,
        max_readahead: 131_072,
        flags: u64::MAX,
    };
    let agreed = Agreed::on(&init, false).expect("version 7");
    let bytes = init_answer(&init, &agreed, 64);
    let number = |at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
    assert_eq!((number(0), number(4)), (7, 38));
    assert_eq!(number(20), 1 << 20, "the largest write");
    assert_eq!(u16::from_ne_bytes([bytes[28], bytes[29]]), 256, "pages of it");
    assert_eq!(number(32), 0, "none of the newer flags");
    let agreed = Agreed::on(&init, true).expect("version 7");
    let bytes = init_answer(&init, &agreed, 64);
    let number = |at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
    assert_eq!(
        (number(20), number(32)),
        (128 << 10, 1 << 9),
        "rings, and what their entries hold"
    );
    init.flags = 0;
    assert!(
        !Agreed::on(&init, true).expect("version 7").is_ring,
        "the kernel has none"
    );
    init.minor = 27;
    assert!(Agreed::on(&init, false).is_none());
}

#[test]
fn answer_has_its_length_its_error_and_its_number() {
    let header = answer(77, 22, 0);
    assert_eq!(header[..4], 16_u32.to_ne_bytes());
    assert_eq!(header[4..8], (-22_i32).to_ne_bytes());
    assert_eq!(header[8..], 77_u64.to_ne_bytes());
}

/// What the kernel puts into an entry's area.
fn area(opcode: u32, body: &[u8], data_bytes: u32) -> [u8; RING_HEADER_BYTES] {
    let mut area = [0; RING_HEADER_BYTES];
    let request = request(opcode, body);
    area[..HEADER_BYTES].copy_from_slice(&request[..HEADER_BYTES]);
    let len = request.len() as u32 + data_bytes;
    area[..4].copy_from_slice(&len.to_ne_bytes());
    area[128..][..body.len()].copy_from_slice(body);
    area[264..272].copy_from_slice(&77_u64.to_ne_bytes());
    area[272..276].copy_from_slice(&data_bytes.to_ne_bytes());
    area
}

#[test]
fn ring_has_the_same_requests_with_their_data_apart() {
    let parse = |area: &[u8; RING_HEADER_BYTES]| {
        Request::parse_in_ring(area)
            .map(|request| request.call)
            .map_err(|error| error.to_string())
    };
    let range = |len| Range { offset: 8192, len };
    let read = area(READ, &super::tests::range(8192, 4096, 0), 0);
    assert_eq!(parse(&read), Ok(Call::Read(range(4096))));
    assert_eq!(commit_id(&read), 77);
    let body = super::tests::range(8192, 4096, 0);
    let written = Call::Write {
        range: range(4096),
        is_durable: false,
    };
    assert_eq!(parse(&area(WRITE, &body, 4096)), Ok(written));
    let mut other = area(WRITE, &body, 4096);
    other[272] = 1;
    assert!(parse(&other).unwrap_err().contains("another length"));
    let long = super::tests::range(0, RING_DATA_BYTES_MAX as u32 + 1, 0);
    assert!(parse(&area(READ, &long, 0)).unwrap_err().contains("room for"));
    assert!(parse(&[0; RING_HEADER_BYTES]).unwrap_err().contains("shorter"));
    let mut answered = area(READ, &body, 0);
    put_ring_answer(&mut answered, 77, 0, 4096);
    assert_eq!(answered[..16], answer(77, 0, 4096));
    assert_eq!(answered[272..276], 4096_u32.to_ne_bytes());
}
