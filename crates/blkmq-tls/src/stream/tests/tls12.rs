//! Tests of TLS 1.2, which an address may allow: records against those of the library's own client, and peers that
//! want what it has and TLS 1.3 has not.

use rustls::client::UnbufferedClientConnection;
use rustls::{AlertDescription, CipherSuite, ProtocolVersion};

use super::*;
use crate::handshake::Handshake;

#[test]
fn tls12_is_opened_and_sealed_as_the_reference_does_where_it_is_allowed() {
    let mut tried = 0;
    for suite in suites() {
        let config = Files::shared().config_of_client(&[suite], &rustls::version::TLS12);
        let server = Files::shared().server_with(true);
        let (mut server, mut reference) = server_and_reference(&server, config);
        assert_eq!(reference.0.protocol_version(), Some(ProtocolVersion::TLSv1_2));
        assert_eq!(reference.0.negotiated_cipher_suite(), Some(suite));
        assert_eq!(server.peer_names()[0], "client.test");
        for count in [1, 2, 16_383, 16_384, 16_385, 60_000] {
            let data = noise(count);
            assert_eq!(open_all(&mut server, &reference.seal(&data)).unwrap(), data);
            server.seal(&[IoSlice::new(&data)]).unwrap();
            assert_eq!(reference.deliver(&taken(&mut server)).unwrap(), data, "{count}");
        }
        server.close();
        assert_eq!(reference.deliver(&taken(&mut server)).unwrap(), b"");
        reference.0.send_close_notify();
        receive(&mut server, &reference.take());
        assert_eq!(server.open(&mut [0]).unwrap(), Opened::End);
        tried += 1;
    }
    assert_eq!(tried, 3, "AES with 128 and with 256 bits, and ChaCha20");
}

#[test]
fn tls12_is_refused_where_it_is_not_allowed() {
    let suite = suites().next().unwrap();
    let config = Files::shared().config_of_client(&[suite], &rustls::version::TLS12);
    let client = ClientConnection::new(config, "server.test".try_into().unwrap());
    let mut reference = Reference(client.unwrap().into());
    let mut server = Files::shared().server().accept().unwrap();
    receive(&mut server, &reference.take());
    let said = crate::explain(&server.shake_hands().unwrap_err());
    assert!(said.contains("set allow_tls12"), "{said}");
    let told = reference.deliver(&taken(&mut server));
    assert_eq!(told, Err(Error::AlertReceived(AlertDescription::ProtocolVersion)));
}

#[test]
fn tls12_prefers_the_cipher_without_a_limit_of_records() {
    let (_, server) = ready12(&rustls::crypto::ring::default_provider().cipher_suites);
    let State::Ready(records) = &server.state else {
        panic!("not ready");
    };
    let chosen = CipherSuite::TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256;
    assert_eq!(records.suite().suite(), chosen);
}

#[test]
fn tls12_ends_by_a_close_when_its_key_may_seal_no_more() {
    let suite = suites().next().unwrap();
    let config = Files::shared().config_of_client(&[suite], &rustls::version::TLS12);
    let (mut server, mut reference) = server_and_reference(&Files::shared().server_with(true), config);
    let State::Ready(records) = &mut server.state else {
        panic!("not ready");
    };
    // One was sealed in the handshake, and one is kept for the close.
    records.limit_sealed(4);
    for data in [b"one", b"two"] {
        server.seal(&[IoSlice::new(data)]).unwrap();
        assert_eq!(reference.deliver(&taken(&mut server)).unwrap(), data);
    }
    let error = server.seal(&[IoSlice::new(b"three")]).unwrap_err().to_string();
    assert!(error.contains("has to connect again"), "{error}");
    assert_eq!(reference.deliver(&taken(&mut server)).unwrap(), b"");
    assert_eq!(
        reference.0.reader().read(&mut [0]).unwrap(),
        0,
        "the end, not a cut"
    );
}

#[test]
fn tls12_negotiates_nothing_again_and_has_no_key_updates() {
    for (what, kind, content, told) in [
        (
            "a client's hello",
            ContentType::Handshake,
            &[1, 0, 0, 1, 0][..],
            AlertDescription::UnexpectedMessage,
        ),
        (
            "a key update",
            ContentType::Handshake,
            &[24, 0, 0, 1, 0],
            AlertDescription::UnexpectedMessage,
        ),
        (
            "a change of ciphers",
            ContentType::ChangeCipherSpec,
            &[1],
            AlertDescription::UnexpectedMessage,
        ),
    ] {
        let all: Vec<_> = suites().collect();
        let (mut client, mut server) = ready12(&all);
        seal_any(&mut client, kind, content);
        assert!(open_all(&mut server, &taken(&mut client)).is_err(), "{what}");
        let answer = open_all(&mut client, &taken(&mut server));
        assert_eq!(answer, Err(Error::AlertReceived(told)), "{what}");
    }
}

#[test]
fn tls12_opens_no_record_that_was_changed_swapped_or_repeated() {
    let all: Vec<_> = suites().collect();
    for suite in &all {
        let mut records = Vec::new();
        let (mut client, _) = ready12(&[*suite]);
        client.seal(&[IoSlice::new(b"a record")]).unwrap();
        let length = taken(&mut client).len();
        for at in 0..length {
            let (mut client, mut server) = ready12(&[*suite]);
            client.seal(&[IoSlice::new(b"a record")]).unwrap();
            let mut record = taken(&mut client);
            record[at] ^= 1;
            // A changed length may have it wait for more.
            let opened = open_all(&mut server, &record);
            assert!(
                opened.is_err() || opened == Ok(Vec::new()),
                "byte {at}: {opened:?}"
            );
        }
        let (mut client, mut server) = ready12(&[*suite]);
        for data in [b"1", b"2"] {
            client.seal(&[IoSlice::new(data)]).unwrap();
            records.push(taken(&mut client));
        }
        assert_eq!(open_all(&mut server, &records[0]).unwrap(), b"1");
        assert_eq!(
            open_all(&mut server, &records[0]),
            Err(Error::DecryptError),
            "again"
        );
        let (mut client, mut server) = ready12(&[*suite]);
        client.seal(&[IoSlice::new(b"1")]).unwrap();
        taken(&mut client);
        client.seal(&[IoSlice::new(b"2")]).unwrap();
        let second = taken(&mut client);
        assert_eq!(
            open_all(&mut server, &second),
            Err(Error::DecryptError),
            "too early"
        );
    }
}

/// The cipher suites of TLS 1.2 that the tests' keys can sign for.
fn suites() -> impl Iterator<Item = SupportedCipherSuite> {
    let all = rustls::crypto::ring::ALL_CIPHER_SUITES.iter().copied();
    all.filter(|suite| format!("{:?}", suite.suite()).contains("ECDHE_ECDSA"))
}

/// Two streams with TLS 1.2. Only tests have such a client.
fn ready12(suites: &[SupportedCipherSuite]) -> (Stream, Stream) {
    let files = Files::shared();
    let config = files.config_of_client(suites, &rustls::version::TLS12);
    let client = UnbufferedClientConnection::new(config, "server.test".try_into().unwrap());
    let mut client = Stream::new(Handshake::Client(client.unwrap()));
    let mut server = files.server_with(true).accept().unwrap();
    while client.is_shaking_hands() || server.is_shaking_hands() {
        client.shake_hands().unwrap();
        receive(&mut server, &taken(&mut client));
        server.shake_hands().unwrap();
        receive(&mut client, &taken(&mut server));
    }
    (client, server)
}
