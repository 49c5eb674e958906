//! Tests of peers that violate the protocol, or that would use more than their share of time and
//! memory.

use rustls::AlertDescription;

use super::*;

#[test]
fn alert_follows_data_that_waits() {
    let (mut client, mut reference) = client_and_reference();
    let data = noise(50_000);
    client.seal(&[IoSlice::new(&data)]).unwrap();
    let mut broken = reference.seal(b"a byte of it is changed");
    broken[9] ^= 1;
    assert_eq!(open_all(&mut client, &broken), Err(Error::DecryptError));
    assert!(client.open(&mut [0]).is_err(), "there is no way on");
    assert!(client.seal(&[IoSlice::new(b"x")]).is_err());
    client.close();
    let records = taken(&mut client);
    let (before, alert) = records.split_at(records.len() - 24);
    assert_eq!(reference.deliver(before).unwrap(), data);
    let told = reference.deliver(alert);
    assert_eq!(told, Err(Error::AlertReceived(AlertDescription::BadRecordMac)));
}

#[test]
fn bytes_that_do_not_belong_in_records_are_refused_with_the_reason() {
    use AlertDescription as Told;
    let handshake = ContentType::Handshake;
    let alert = ContentType::Alert;
    let cases: [(&str, ContentType, &[u8], Option<Told>); 13] = [
        ("an empty alert", alert, &[], Some(Told::DecodeError)),
        ("half an alert", alert, &[2], Some(Told::DecodeError)),
        ("two alerts", alert, &[1, 0, 1, 0], Some(Told::DecodeError)),
        ("an error", alert, &[2, 40], None),
        ("an empty message", handshake, &[], Some(Told::DecodeError)),
        (
            "a finished",
            handshake,
            &[20, 0, 0, 0],
            Some(Told::UnexpectedMessage),
        ),
        (
            "a ticket for a server",
            handshake,
            &[4, 0, 0, 0],
            Some(Told::UnexpectedMessage),
        ),
        (
            "an update to 2",
            handshake,
            &[24, 0, 0, 1, 2],
            Some(Told::IllegalParameter),
        ),
        (
            "an update of 2",
            handshake,
            &[24, 0, 0, 2, 0, 0],
            Some(Told::IllegalParameter),
        ),
        (
            "something behind an update",
            handshake,
            &[24, 0, 0, 1, 0, 4],
            Some(Told::UnexpectedMessage),
        ),
        (
            "a long message",
            handshake,
            &[4, 1, 0, 0],
            Some(Told::DecodeError),
        ),
        (
            "a heartbeat",
            ContentType::Heartbeat,
            &[1],
            Some(Told::UnexpectedMessage),
        ),
        (
            "a change of ciphers",
            ContentType::ChangeCipherSpec,
            &[1],
            Some(Told::UnexpectedMessage),
        ),
    ];
    for (what, kind, content, told) in cases {
        let (mut client, mut server) = ready();
        seal_any(&mut client, kind, content);
        assert!(open_all(&mut server, &taken(&mut client)).is_err(), "{what}");
        assert!(server.open(&mut [0]).is_err(), "{what}");
        let answer = open_all(&mut client, &taken(&mut server));
        let expected = told.map_or(Ok(Vec::new()), |told| Err(Error::AlertReceived(told)));
        assert_eq!(answer, expected, "{what}");
    }
}

#[test]
fn records_that_cannot_be_are_refused_by_their_header() {
    let cases: [(&[u8], AlertDescription); 3] = [
        (&[23, 3, 3, 0x41, 1], AlertDescription::RecordOverflow),
        (&[20, 3, 3, 0, 1, 1], AlertDescription::UnexpectedMessage),
        (b"GET / HTTP/1.1", AlertDescription::UnexpectedMessage),
    ];
    for (bytes, told) in cases {
        let (mut client, mut server) = ready();
        assert!(open_all(&mut server, bytes).is_err(), "{bytes:?}");
        let answer = open_all(&mut client, &taken(&mut server));
        assert_eq!(answer, Err(Error::AlertReceived(told)), "{bytes:?}");
    }
}

#[test]
fn client_passes_over_tickets_in_pieces_and_lets_no_data_between_them() {
    let mut ticket = noise(204);
    ticket[..4].copy_from_slice(&[4, 0, 0, 200]);
    let (mut client, mut server) = ready();
    for piece in ticket.chunks(50) {
        seal_any(&mut server, ContentType::Handshake, piece);
    }
    server.seal(&[IoSlice::new(b"data")]).unwrap();
    assert_eq!(open_all(&mut client, &taken(&mut server)).unwrap(), b"data");
    seal_any(&mut server, ContentType::Handshake, &ticket[..100]);
    server.seal(&[IoSlice::new(b"data")]).unwrap();
    assert!(open_all(&mut client, &taken(&mut server)).is_err());
}

#[test]
fn records_without_data_are_borne_for_a_while() {
    for (kind, content) in [
        (ContentType::ApplicationData, &[][..]),
        (ContentType::Alert, &[1, 90]),
        (ContentType::Handshake, &[4, 0, 0, 0]),
    ] {
        let (mut client, mut server) = ready();
        for _ in 0..3 {
            (0..32).for_each(|_| seal_any(&mut server, kind, content));
            server.seal(&[IoSlice::new(b"x")]).unwrap();
            assert_eq!(open_all(&mut client, &taken(&mut server)).unwrap(), b"x");
        }
        (0..33).for_each(|_| seal_any(&mut server, kind, content));
        assert!(open_all(&mut client, &taken(&mut server)).is_err(), "{kind:?}");
    }
}

#[test]
fn turn_looks_at_so_many_small_records() {
    let (mut client, mut server) = ready();
    let mut opened = 0;
    client.begin_turn();
    for _ in 0..3 {
        (0..2500).for_each(|_| seal_any(&mut server, ContentType::ApplicationData, b"x"));
        receive(&mut client, &taken(&mut server));
        while client.open(&mut [0; 9]).unwrap() == Opened::Bytes(1) {
            opened += 1;
        }
        let before = opened;
        assert_eq!(client.open(&mut [0; 9]).unwrap(), Opened::Enough);
        client.begin_turn();
        while client.open(&mut [0; 9]).unwrap() == Opened::Bytes(1) {
            opened += 1;
        }
        assert!((200..2400).contains(&(opened - before)), "{opened} and {before}");
    }
    assert_eq!(opened, 7500);
}

#[test]
fn unsent_bytes_have_a_limit() {
    let (mut client, mut server) = ready();
    let data = noise(UNSENT_MAX + 1000);
    let first = client.seal(&[IoSlice::new(&data)]).unwrap();
    assert_eq!(first, UNSENT_MAX);
    assert_eq!(client.seal(&[IoSlice::new(&data)]).unwrap(), 0);
    // The socket takes a part.
    let mut sent = Vec::new();
    let blocked = client.send(|records| {
        if !sent.is_empty() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        sent.extend_from_slice(&records[..100_000]);
        Ok(100_000)
    });
    assert_eq!(blocked.unwrap_err().kind(), io::ErrorKind::WouldBlock);
    let second = client.seal(&[IoSlice::new(&data[first..])]).unwrap();
    assert_eq!(second, 1000);
    sent.extend(taken(&mut client));
    assert_eq!(open_all(&mut server, &sent).unwrap(), data);
}

#[test]
fn handshake_that_fails_leaves_an_alert() {
    let (ours, others) = (Files::new(), Files::new());
    let (mut client, mut server) = (
        ours.client().connect().unwrap(),
        others.server().accept().unwrap(),
    );
    client.shake_hands().unwrap();
    receive(&mut server, &taken(&mut client));
    server.shake_hands().unwrap();
    receive(&mut client, &taken(&mut server));
    assert!(matches!(client.shake_hands(), Err(Error::InvalidCertificate(_))));
    assert!(client.seal(&[IoSlice::new(b"x")]).is_err() && client.open(&mut [0]).is_err());
    receive(&mut server, &taken(&mut client));
    assert!(matches!(server.shake_hands(), Err(Error::AlertReceived(_))));

    let mut server = ours.server().accept().unwrap();
    receive(&mut server, b"GET / HTTP/1.1\r\n\r\n");
    assert!(server.shake_hands().is_err());
    assert_eq!(taken(&mut server).len(), 7, "an alert in the clear");
}

#[test]
fn handshake_message_that_does_not_fit_is_refused() {
    let mut server = Files::new().server().accept().unwrap();
    // A ClientHello of 16 MiB, as far as there is room for it.
    let mut message = vec![1, 0xff, 0xff, 0xff];
    message.resize(1 << 14, 0);
    let outcome = (0..8).try_for_each(|_| {
        receive(&mut server, &[22, 3, 3, 0x40, 0]);
        receive(&mut server, &message);
        server.shake_hands()
    });
    assert!(outcome.is_err());
}

#[test]
fn no_bytes_make_a_stream_panic() {
    for seed in 0..300 {
        let mut random = Random::new(seed);
        let (mut client, mut server) = ready();
        for _ in 0..random.below(40) {
            let kinds = [20, 21, 22, 22, 22, 23, 24, 0];
            let mut content: Vec<u8> = (0..random.below(40)).map(|_| random.below(26) as u8).collect();
            if random.below(2) == 0 && content.len() > 4 {
                let length = content.len() as u8 - 4;
                content[..4].copy_from_slice(&[random.one_of(&[4, 24]), 0, 0, length]);
            }
            seal_any(&mut server, random.one_of(&kinds).into(), &content);
        }
        let mut records = taken(&mut server);
        for _ in 0..random.below(3) {
            let at = random.below(records.len().max(1) as u64) as usize;
            if let Some(byte) = records.get_mut(at) {
                *byte ^= 1 << random.below(8);
            }
        }
        // The result does not matter here.
        let _ = open_all(&mut client, &records);
        let mut shaking = Files::shared().server().accept().unwrap();
        receive(&mut shaking, &records);
        let _ = shaking.shake_hands();
    }
}

#[test]
fn turn_follows_so_many_key_updates() {
    let (mut client, mut reference) = client_and_reference();
    let mut records = Vec::new();
    for _ in 0..300 {
        reference.0.refresh_traffic_keys().unwrap();
        records.extend(reference.seal(b"x"));
    }
    receive(&mut client, &records);
    let mut opened = Vec::new();
    while opened.iter().sum::<usize>() < 300 {
        let mut count = 0;
        client.begin_turn();
        while client.open(&mut [0; 9]).unwrap() == Opened::Bytes(1) {
            count += 1;
        }
        opened.push(count);
    }
    assert_eq!(opened.len(), 4, "{opened:?}");
}

#[test]
fn message_that_may_not_come_is_refused_before_all_of_it_is_there() {
    for content in [&[20, 0, 0, 32][..], &[4, 0, 0, 9], &[24, 0, 0, 2]] {
        let (mut client, mut server) = ready();
        seal_any(&mut client, ContentType::Handshake, content);
        assert!(open_all(&mut server, &taken(&mut client)).is_err(), "{content:?}");
    }
}

#[test]
fn record_by_another_version_is_as_good_as_changed() {
    for at in [1, 2] {
        let (mut client, mut reference) = client_and_reference();
        let mut records = reference.seal(b"data");
        records[at] ^= 2;
        assert_eq!(open_all(&mut client, &records), Err(Error::DecryptError));
    }
}

#[test]
fn numbers_of_records_end_before_they_begin_again() {
    let set = |stream: &mut Stream, opened, sealed| {
        let State::Ready(records) = &mut stream.state else {
            panic!("not ready");
        };
        records.limit_sealed(u64::MAX);
        records.set_sequences(opened, sealed);
    };
    let (mut client, mut server) = ready();
    set(&mut client, 0, u64::MAX - 3);
    set(&mut server, u64::MAX - 3, 0);
    for _ in 0..4 {
        // The third one is sealed with the next key.
        assert_eq!(pass(&mut client, &mut server, b"data"), b"data");
    }
    set(&mut server, u64::MAX, 0);
    client.seal(&[IoSlice::new(b"data")]).unwrap();
    let opened = open_all(&mut server, &taken(&mut client));
    assert!(matches!(opened, Err(Error::General(_))), "{opened:?}");
}

#[test]
fn nothing_is_opened_after_data_could_not_be_sealed() {
    let (mut client, mut server) = ready();
    client.close();
    assert!(client.seal(&[IoSlice::new(b"data")]).is_err());
    server.seal(&[IoSlice::new(b"data")]).unwrap();
    assert!(client.open(&mut [0; 9]).is_err());
    assert!(open_all(&mut client, &taken(&mut server)).is_err());
}
