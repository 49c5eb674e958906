//! What is written is read again, and what is wrong has an error of its own.

use super::*;

fn one_of_each() -> Vec<Message> {
    let (door, address) = ("nbd".to_owned(), "unix:/run/nbd.sock".to_owned());
    vec![
        Message::Hello { version: VERSION },
        Message::Welcome {
            version: 7,
            instance: Some(u64::MAX),
        },
        Message::Welcome {
            version: 7,
            instance: None,
        },
        Message::Source(Source {
            disk: "vm1".to_owned(),
            keys: "file = \"/a\"\n".to_owned(),
            size: Some(1 << 40),
            files: vec![FileId {
                device: 7,
                inode: u64::MAX,
            }],
            has_clients: true,
        }),
        Message::Key {
            disk: "vm1".to_owned(),
        },
        Message::Lock,
        Message::Socket(Socket {
            door: door.clone(),
            address: address.clone(),
            origin: Origin::Systemd(Some("nbd.socket".to_owned())),
        }),
        Message::Path {
            address: "unix:/run/nbd.sock".to_owned(),
            file: FileId { device: 7, inode: 1 },
        },
        Message::Disk(Disk {
            name: "vm1".to_owned(),
            size: 1 << 40,
            block_size: 4096,
            read_only: true,
        }),
        Message::Differs(Difference {
            disk: "vm1".to_owned(),
            how: "another file".to_owned(),
        }),
        Message::Take,
        Message::Session(Session {
            door,
            address,
            body: vec![1, 2, 3],
        }),
        Message::Statistics(Statistics {
            queue: "fast".to_owned(),
            group: "/vm1".to_owned(),
            counts: vec![1, 0, u64::MAX],
            debts: vec![0, 7],
            scheduler: "bfq".to_owned(),
            learnt: vec![300, 1, 1_000_000],
        }),
        Message::End { count: 3 },
        Message::Ready,
        Message::Go,
        Message::Taken,
        Message::Refused {
            reason: "no".to_owned(),
        },
    ]
}

fn read(bytes: &[u8]) -> Result<Message, DecodeError> {
    let (header, body) = bytes
        .split_first_chunk()
        .ok_or(DecodeError::Truncated("a header"))?;
    let (kind, length) = Message::parse_header(*header)?;
    Message::parse(kind, body.get(..length).ok_or(DecodeError::Truncated("a body"))?)
}

fn written(message: &Message) -> Vec<u8> {
    let mut bytes = Vec::new();
    message.write(&mut bytes);
    bytes
}

#[test]
fn message_that_is_written_is_read_again() {
    for message in one_of_each() {
        assert_eq!(read(&written(&message)), Ok(message));
    }
}

#[test]
fn body_that_ends_early_or_late_is_refused_wherever_it_is_cut() {
    for message in one_of_each() {
        let bytes = written(&message);
        let kind = u16::from_le_bytes([bytes[4], bytes[5]]);
        for cut in HEADER_BYTES..bytes.len() {
            let error = Message::parse(kind, &bytes[HEADER_BYTES..cut]).unwrap_err();
            assert!(
                matches!(error, DecodeError::Truncated(_)),
                "{message:?} cut at {cut}: {error}"
            );
        }
        let long = [&bytes[HEADER_BYTES..], &[0]].concat();
        assert_eq!(
            Message::parse(kind, &long),
            Err(DecodeError::Trailing(1)),
            "{message:?}"
        );
    }
}

#[test]
fn lengths_kinds_and_values_out_of_their_range_have_an_error_each() {
    let header = |length: u32, kind: u16| {
        let [a, b, c, d] = length.to_le_bytes();
        let [e, f] = kind.to_le_bytes();
        Message::parse_header([a, b, c, d, e, f])
    };
    assert_eq!(header(0, 0), Err(DecodeError::Kind(0)));
    assert_eq!(header(0, KEY + 1), Err(DecodeError::Kind(KEY + 1)));
    assert!(matches!(
        header(u32::MAX, SESSION),
        Err(DecodeError::TooLong { .. })
    ));
    assert!(matches!(header(1 << 20, HELLO), Err(DecodeError::TooLong { .. })));
    assert_eq!(header(1 << 20, SESSION), Ok((SESSION, 1 << 20)));
    let mut body = Vec::new();
    Writer(&mut body).bytes(&[0xff, 0xfe]);
    assert_eq!(Message::parse(REFUSED, &body), Err(DecodeError::Text("a reason")));
    let mut body = Vec::new();
    Writer(&mut body).u32(u32::MAX);
    assert!(matches!(
        Message::parse(REFUSED, &body),
        Err(DecodeError::TooLong { .. })
    ));
    let mut body = Vec::new();
    let mut writer = Writer(&mut body);
    writer.u32(VERSION);
    writer.u8(2);
    assert_eq!(
        Message::parse(WELCOME, &body),
        Err(DecodeError::Value("the instance", 2))
    );
}

#[test]
fn reason_that_is_too_long_is_cut_between_two_characters() {
    let reason = "ä".repeat(TEXT_BYTES_MAX);
    let bytes = written(&Message::Refused { reason });
    let Ok(Message::Refused { reason }) = read(&bytes) else {
        panic!("it is read");
    };
    assert_eq!(reason.len(), TEXT_BYTES_MAX);
}
