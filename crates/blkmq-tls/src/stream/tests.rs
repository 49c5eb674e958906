//! Streams are tested against each other, and against the library's own connections, which are the
//! reference.

use std::io::{Read, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use blkmq_testkit::Random;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::{
    ClientConfig, ClientConnection, Connection, ContentType, ServerConnection, SupportedCipherSuite,
    SupportedProtocolVersion,
};

use super::*;
use crate::{Client, ClientFiles, Mode, Server, Settings, files};

mod hostile;
mod tls12;

#[test]
fn stream_and_a_stream_learn_each_others_names_and_pass_data_both_ways() {
    let (mut client, mut server) = ready();
    assert_eq!(server.peer_names()[0], "client.test");
    assert_eq!(client.peer_names()[0], "server.test");
    for count in [1, 2, 16_383, 16_384, 16_385, 70_000, 300_000] {
        let data = noise(count);
        assert_eq!(pass(&mut client, &mut server, &data), data, "{count} bytes");
        assert_eq!(pass(&mut server, &mut client, &data), data, "{count} bytes");
    }
}

#[test]
fn data_of_many_pieces_is_sealed_as_if_it_were_one() {
    let (mut client, mut reference) = client_and_reference();
    let data = noise(40_000);
    for piece in [1, 7, 4096, 16_384, 40_000] {
        let pieces: Vec<IoSlice<'_>> = data.chunks(piece).map(IoSlice::new).collect();
        assert_eq!(client.seal(&pieces).unwrap(), data.len());
        let records = taken(&mut client);
        assert_eq!(records.len(), data.len() + 3 * 22, "three records for {piece}");
        assert_eq!(reference.deliver(&records).unwrap(), data);
    }
    let none = [IoSlice::new(&[]), IoSlice::new(b"x"), IoSlice::new(&[])];
    assert_eq!(client.seal(&none).unwrap(), 1);
    assert_eq!(client.seal(&[]).unwrap(), 0);
    assert_eq!(reference.deliver(&taken(&mut client)).unwrap(), b"x");
}

#[test]
fn records_split_at_any_byte_are_opened_whole() {
    let (mut client, mut reference) = client_and_reference();
    for at in 0..3 * 22 + 1 + 90 + 200 {
        let data = noise(291);
        let parts = [&data[..1], &data[1..91], &data[91..]];
        let records: Vec<u8> = parts.iter().flat_map(|part| reference.seal(part)).collect();
        let (before, after) = records.split_at(at);
        let mut opened = open_all(&mut client, before).unwrap();
        opened.extend(open_all(&mut client, after).unwrap());
        assert_eq!(opened, data, "split at {at}");
    }
}

#[test]
fn handshake_and_data_behind_it_come_byte_by_byte() {
    let files = Files::new();
    let mut client = files.client().connect().unwrap();
    let mut server = files.server().accept().unwrap();
    while client.is_shaking_hands() || server.is_shaking_hands() {
        client.shake_hands().unwrap();
        for byte in taken(&mut client) {
            receive(&mut server, &[byte]);
            server.shake_hands().unwrap();
        }
        for byte in taken(&mut server) {
            receive(&mut client, &[byte]);
            client.shake_hands().unwrap();
        }
    }
    client.seal(&[IoSlice::new(b"behind it")]).unwrap();
    let mut opened = Vec::new();
    for byte in taken(&mut client) {
        opened.extend(open_all(&mut server, &[byte]).unwrap());
    }
    assert_eq!(opened, b"behind it");
}

#[test]
fn data_that_comes_with_the_end_of_a_handshake_is_kept() {
    let files = Files::new();
    let (mut client, mut server) = (
        files.client().connect().unwrap(),
        files.server().accept().unwrap(),
    );
    client.shake_hands().unwrap();
    receive(&mut server, &taken(&mut client));
    server.shake_hands().unwrap();
    receive(&mut client, &taken(&mut server));
    client.shake_hands().unwrap();
    assert!(!client.is_shaking_hands());
    client.seal(&[IoSlice::new(b"with it")]).unwrap();
    receive(&mut server, &taken(&mut client));
    server.shake_hands().unwrap();
    assert!(!server.is_shaking_hands() && server.has_received());
    assert_eq!(open_all(&mut server, &[]).unwrap(), b"with it");
    assert!(!server.has_received());
}

#[test]
fn record_larger_than_the_destination_is_taken_in_parts() {
    let (mut client, mut reference) = client_and_reference();
    let data = noise(16_384);
    receive(&mut client, &reference.seal(&data));
    let (mut into, mut opened) = ([0; 1000], Vec::new());
    while let Opened::Bytes(count) = client.open(&mut into).unwrap() {
        assert!(count <= 1000);
        opened.extend_from_slice(&into[..count]);
        assert_eq!(client.has_received(), opened.len() < data.len());
        // `room` must not overwrite the rest.
        client.room();
    }
    assert_eq!(opened, data);
}

#[test]
fn key_updates_are_followed_and_are_answered_once_before_the_next_data() {
    let (mut client, mut reference) = client_and_reference();
    for round in 0..3 {
        for _ in 0..4 {
            reference.0.refresh_traffic_keys().unwrap();
        }
        let records = reference.seal(b"by the new key");
        assert_eq!(open_all(&mut client, &records).unwrap(), b"by the new key");
        assert!(
            !client.has_unsent(),
            "nothing is answered before there is data to send"
        );
        client.seal(&[IoSlice::new(b"an answer")]).unwrap();
        let records = taken(&mut client);
        assert_eq!(records.len(), (5 + 22) + (9 + 22), "one update, round {round}");
        assert_eq!(reference.deliver(&records).unwrap(), b"an answer");
    }
}

#[test]
fn key_seals_no_more_records_than_it_may() {
    let (mut client, mut reference) = client_and_reference();
    let State::Ready(records) = &mut client.state else {
        panic!("not ready");
    };
    records.limit_sealed(4);
    for count in 0..40 {
        let data = noise(20_000 + count);
        client.seal(&[IoSlice::new(&data)]).unwrap();
        assert_eq!(reference.deliver(&taken(&mut client)).unwrap(), data, "{count}");
    }
}

#[test]
fn close_ends_the_data_before_it_and_voids_what_follows() {
    let (mut client, mut server) = ready();
    client.seal(&[IoSlice::new(b"the last")]).unwrap();
    client.close();
    client.close();
    let mut records = taken(&mut client);
    assert_eq!(records.len(), (8 + 22) + (2 + 22), "one alert");
    records.extend_from_slice(b"anything");
    receive(&mut server, &records);
    let mut into = [0; 64];
    assert_eq!(server.open(&mut into).unwrap(), Opened::Bytes(8));
    assert_eq!(server.open(&mut into).unwrap(), Opened::End);
    assert!(!server.has_received());
    receive(&mut server, b"more");
    assert_eq!(server.open(&mut into).unwrap(), Opened::End);
    // The other direction goes on.
    assert_eq!(pass(&mut server, &mut client, b"still"), b"still");
}

#[test]
fn reference_takes_a_close_and_its_own_is_taken() {
    let (mut client, mut reference) = client_and_reference();
    client.close();
    assert_eq!(reference.deliver(&taken(&mut client)).unwrap(), b"");
    assert_eq!(
        reference.0.reader().read(&mut [0]).unwrap(),
        0,
        "the end, not a cut"
    );
    reference.0.send_close_notify();
    receive(&mut client, &reference.take());
    assert_eq!(client.open(&mut [0]).unwrap(), Opened::End);
}

#[test]
fn each_cipher_is_opened_and_sealed_as_the_reference_does() {
    let suites = rustls::crypto::ring::ALL_CIPHER_SUITES;
    for suite in suites.iter().filter(|suite| suite.tls13().is_some()) {
        let config = Files::shared().config_of_client(&[*suite], &rustls::version::TLS13);
        let server = Files::shared().server();
        let (mut server, mut reference) = server_and_reference(&server, config);
        assert_eq!(reference.0.negotiated_cipher_suite(), Some(*suite));
        for count in [1, 16_385] {
            reference.0.refresh_traffic_keys().unwrap();
            let data = noise(count);
            assert_eq!(open_all(&mut server, &reference.seal(&data)).unwrap(), data);
            server.seal(&[IoSlice::new(&data)]).unwrap();
            assert_eq!(reference.deliver(&taken(&mut server)).unwrap(), data);
        }
    }
}

fn noise(count: usize) -> Vec<u8> {
    Random::new(count as u64).bytes(count)
}

/// A directory with the files of an authority, and of the certificates that it has signed.
struct Files(PathBuf);

impl Files {
    fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let directory = std::env::temp_dir().join(format!("blkmq-tls-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let mut params = CertificateParams::new([]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let put = |name: &str, text: String| std::fs::write(directory.join(name), text).unwrap();
        put("ca-cert.pem", authority.pem());
        for side in ["client", "server"] {
            let key = KeyPair::generate().unwrap();
            let params = CertificateParams::new([format!("{side}.test")]).unwrap();
            put(
                &format!("{side}-cert.pem"),
                params.signed_by(&key, &authority).unwrap().pem(),
            );
            put(&format!("{side}-key.pem"), key.serialize_pem());
        }
        Self(directory)
    }

    /// The same files for all callers.
    fn shared() -> &'static Self {
        static SHARED: std::sync::OnceLock<Files> = std::sync::OnceLock::new();
        SHARED.get_or_init(Self::new)
    }

    fn client(&self) -> Client {
        Client::load(&ClientFiles::in_directory(&self.0), "server.test").unwrap()
    }

    /// What the library's client needs, with these cipher suites.
    fn config_of_client(
        &self,
        suites: &[SupportedCipherSuite],
        version: &'static SupportedProtocolVersion,
    ) -> Arc<ClientConfig> {
        let mut provider = rustls::crypto::ring::default_provider();
        provider.cipher_suites = suites.to_vec();
        let path = |name| self.0.join(name);
        let config = ClientConfig::builder_with_provider(Arc::new(provider))
            .with_protocol_versions(&[version])
            .unwrap()
            .with_root_certificates(files::authorities(&path("ca-cert.pem")).unwrap().store)
            .with_client_auth_cert(
                files::own_certificates(&path("client-cert.pem")).unwrap(),
                files::key(&path("client-key.pem")).unwrap(),
            );
        let mut config = config.unwrap();
        config.enable_secret_extraction = true;
        Arc::new(config)
    }

    fn server(&self) -> Server {
        self.server_with(false)
    }

    fn server_with(&self, allow_tls12: bool) -> Server {
        let file = |name| Some(self.0.join(name));
        let settings = Settings {
            allow_tls12,
            mode: Mode::Require,
            certificate: file("server-cert.pem"),
            key: file("server-key.pem"),
            ca: file("ca-cert.pem"),
            ..Settings::default()
        };
        Server::load(&settings).unwrap().unwrap()
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Two streams whose handshake is over.
fn ready() -> (Stream, Stream) {
    let files = Files::shared();
    let (mut client, mut server) = (
        files.client().connect().unwrap(),
        files.server().accept().unwrap(),
    );
    while client.is_shaking_hands() || server.is_shaking_hands() {
        client.shake_hands().unwrap();
        receive(&mut server, &taken(&mut client));
        server.shake_hands().unwrap();
        receive(&mut client, &taken(&mut server));
    }
    (client, server)
}

/// A stream of a client, and the library's own server.
fn client_and_reference() -> (Stream, Reference) {
    let files = Files::shared();
    let mut client = files.client().connect().unwrap();
    let server = ServerConnection::new(files.server().config()).unwrap();
    let mut reference = Reference(server.into());
    while client.is_shaking_hands() || reference.0.is_handshaking() {
        client.shake_hands().unwrap();
        assert_eq!(reference.deliver(&taken(&mut client)).unwrap(), b"");
        receive(&mut client, &reference.take());
    }
    (client, reference)
}

/// A stream of a server, and the library's own client.
fn server_and_reference(server: &Server, config: Arc<ClientConfig>) -> (Stream, Reference) {
    let mut server = server.accept().unwrap();
    let client = ClientConnection::new(config, "server.test".try_into().unwrap());
    let mut reference = Reference(client.unwrap().into());
    while server.is_shaking_hands() || reference.0.is_handshaking() {
        receive(&mut server, &reference.take());
        server.shake_hands().unwrap();
        assert_eq!(reference.deliver(&taken(&mut server)).unwrap(), b"");
    }
    (server, reference)
}

/// A connection of the library.
struct Reference(Connection);

impl Reference {
    /// Delivers records to the connection. Returns the data in them.
    fn deliver(&mut self, mut records: &[u8]) -> Result<Vec<u8>, Error> {
        let mut data = Vec::new();
        while !records.is_empty() {
            self.0.read_tls(&mut records).unwrap();
            self.0.process_new_packets()?;
            // It returns an error at the end of the data, after it has appended the data.
            let _ = self.0.reader().read_to_end(&mut data);
        }
        Ok(data)
    }

    fn seal(&mut self, data: &[u8]) -> Vec<u8> {
        self.0.writer().write_all(data).unwrap();
        self.take()
    }

    fn take(&mut self) -> Vec<u8> {
        let mut records = Vec::new();
        while self.0.wants_write() {
            self.0.write_tls(&mut records).unwrap();
        }
        records
    }
}

/// Takes the records that wait to be sent.
fn taken(stream: &mut Stream) -> Vec<u8> {
    let mut records = Vec::new();
    let all = |bytes: &[u8]| {
        records.extend_from_slice(bytes);
        Ok(bytes.len())
    };
    stream.send(all).unwrap();
    records
}

/// Delivers bytes to a stream, as many as it has room for.
fn receive(stream: &mut Stream, bytes: &[u8]) {
    let room = stream.room();
    // The stream has to report an error itself if there is too little room.
    let count = bytes.len().min(room.len());
    room[..count].copy_from_slice(&bytes[..count]);
    stream.received(count);
}

/// Delivers bytes to a stream, and returns all the data in them.
fn open_all(stream: &mut Stream, mut bytes: &[u8]) -> Result<Vec<u8>, Error> {
    let (mut into, mut data) = (vec![0; 5000], Vec::new());
    loop {
        stream.begin_turn();
        match stream.open(&mut into)? {
            Opened::Bytes(count) => data.extend_from_slice(&into[..count]),
            Opened::Enough => {}
            Opened::NeedMore if !bytes.is_empty() => {
                let count = stream.room().len().min(bytes.len());
                receive(stream, &bytes[..count]);
                bytes = &bytes[count..];
            }
            Opened::NeedMore | Opened::End => return Ok(data),
        }
    }
}

/// Sends data from one stream to another.
fn pass(from: &mut Stream, to: &mut Stream, data: &[u8]) -> Vec<u8> {
    let (mut sealed, mut opened) = (0, Vec::new());
    while sealed < data.len() {
        sealed += from.seal(&[IoSlice::new(&data[sealed..])]).unwrap();
        opened.extend(open_all(to, &taken(from)).unwrap());
    }
    opened
}

fn seal_any(stream: &mut Stream, kind: ContentType, content: &[u8]) {
    let State::Ready(records) = &mut stream.state else {
        panic!("not ready");
    };
    records.seal_any(kind, content, &mut stream.out);
}
