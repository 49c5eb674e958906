//! Records of TLS 1.2 that reach a server's stream after its handshake, and records that it sends: what an address with
//! `allow_tls12` lets anybody send who is admitted.
//!
//! The first byte chooses the cipher suite. The rest is a sequence of operations: the peer seals content of any type by
//! the right key, somebody changes, swaps, repeats and drops records or sends noise, and the stream answers. Broken would
//! be: data that was not sealed, or not in order; data behind a record that was tampered with; or a record of ours that
//! the peer cannot open. The peer seals and opens with `ring` alone (RFC 5246, 5288, 7905); the library does the handshake.

use std::io::IoSlice;
use std::sync::{Arc, OnceLock};

use blkmq_tls::{Mode, Opened, Server, Settings, Stream};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use ring::aead::{self, Aad, LessSafeKey, Nonce, UnboundKey};
use rustls::{
    CipherSuite, ClientConfig, ClientConnection, ConnectionTrafficSecrets, RootCertStore,
    SupportedCipherSuite, version,
};

/// Runs one input.
///
/// # Panics
/// An invariant is broken.
pub fn run(data: &[u8]) {
    let Some((&suite, mut rest)) = data.split_first() else {
        return;
    };
    let mut bench = Bench::new(usize::from(suite) % SUITES.len());
    while let Some((operation, after)) = rest.split_first_chunk::<4>() {
        rest = bench.step(*operation, after);
    }
    bench.deliver(usize::MAX);
    bench.answer(1);
}

/// A record that the peer has sealed and not sent.
#[derive(Clone)]
struct Record {
    bytes: Vec<u8>,
    /// As it was sealed: the bytes may be changed, and changed back.
    sealed: Vec<u8>,
    number: u64,
    kind: u8,
    content: Vec<u8>,
}

struct Bench {
    ours: Stream,
    sealer: Direction,
    opener: Direction,
    pending: Vec<Record>,
    /// The number of the next record that the stream can open; none once something else has reached it.
    expected: Option<u64>,
    /// Data that may come out, and how much of it came.
    data: Vec<u8>,
    opened: usize,
    /// How much of it has to come, and whether all that reached the stream was data.
    certain: usize,
    is_certain: bool,
    is_failed: bool,
}

impl Bench {
    fn new(suite: usize) -> Self {
        let (ours, sealer, opener) = shake_hands(suite);
        Self {
            expected: Some(sealer.number),
            ours,
            sealer,
            opener,
            pending: Vec::new(),
            data: Vec::new(),
            opened: 0,
            certain: 0,
            is_certain: true,
            is_failed: false,
        }
    }

    /// Does an operation, and returns what is left of the input.
    fn step<'a>(&mut self, [what, one, high, low]: [u8; 4], rest: &'a [u8]) -> &'a [u8] {
        let count = usize::from(u16::from_be_bytes([high, low]));
        let which = usize::from(one) % self.pending.len().max(1);
        match what % 9 {
            0 | 1 => self.seal(DATA, &vec![one; count % 17_000]),
            2 => {
                let (content, rest) = rest.split_at(rest.len().min(count % 64));
                self.seal(one, content);
                return rest;
            }
            3 => {
                if let Some(record) = self.pending.get_mut(which)
                    && !record.bytes.is_empty()
                {
                    let at = count % record.bytes.len();
                    record.bytes[at] ^= 1 << (what >> 5);
                }
            }
            4 => {
                if let Some(record) = self.pending.get(which).cloned() {
                    self.pending.push(record);
                }
            }
            5 if !self.pending.is_empty() => drop(self.pending.remove(which)),
            5 => {}
            6 => self.deliver(usize::from(one)),
            7 => self.answer(count % 40_000),
            _ => {
                let (noise, rest) = rest.split_at(rest.len().min(count % 64));
                self.pending.push(Record {
                    bytes: noise.to_vec(),
                    sealed: Vec::new(),
                    number: 0,
                    kind: DATA,
                    content: Vec::new(),
                });
                return rest;
            }
        }
        rest
    }

    fn seal(&mut self, kind: u8, content: &[u8]) {
        let number = self.sealer.number;
        let sealed = self.sealer.seal(kind, content);
        self.pending.push(Record {
            bytes: sealed.clone(),
            sealed,
            number,
            kind,
            content: content.to_vec(),
        });
    }

    /// Has the first pending records reach the stream, and opens what it can.
    fn deliver(&mut self, count: usize) {
        let later = self.pending.split_off(count.min(self.pending.len()));
        for record in std::mem::replace(&mut self.pending, later) {
            if record.bytes.is_empty() {
                continue;
            }
            let is_next = record.bytes == record.sealed && Some(record.number) == self.expected;
            self.expected = self.expected.filter(|_| is_next).map(|number| number + 1);
            let is_data =
                record.kind == DATA && !record.content.is_empty() && record.content.len() <= CONTENT_MAX;
            if is_next && is_data {
                self.data.extend_from_slice(&record.content);
            }
            // Nothing behind anything else needs to come out.
            self.is_certain &= is_next && is_data;
            if self.is_certain {
                self.certain = self.data.len();
            }
            let mut bytes = &record.bytes[..];
            while !bytes.is_empty() && !self.is_failed {
                let room = self.ours.room();
                let now = room.len().min(bytes.len());
                room[..now].copy_from_slice(&bytes[..now]);
                self.ours.received(now);
                bytes = &bytes[now..];
                self.open();
            }
        }
        assert!(self.opened >= self.certain, "data is missing");
    }

    fn open(&mut self) {
        let mut into = [0; 5000];
        loop {
            self.ours.begin_turn();
            match self.ours.open(&mut into) {
                Ok(Opened::Bytes(count)) => {
                    let expected = self.data.get(self.opened..self.opened + count);
                    assert_eq!(expected, Some(&into[..count]), "data that was not sealed");
                    self.opened += count;
                }
                Ok(Opened::Enough) => {}
                Ok(Opened::NeedMore) => return,
                Ok(Opened::End) | Err(_) => {
                    self.is_failed = true;
                    return;
                }
            }
        }
    }

    /// Has the stream seal data, which the peer opens.
    fn answer(&mut self, count: usize) {
        let data = vec![7; count];
        let sealed = self.ours.seal(&[IoSlice::new(&data)]).unwrap_or(0);
        let mut records = Vec::new();
        let sent = self.ours.send(|bytes| {
            records.extend_from_slice(bytes);
            Ok(bytes.len())
        });
        sent.expect("the peer takes all");
        let (mut at, mut opened) = (0, 0);
        while at < records.len() {
            let length = usize::from(u16::from_be_bytes([records[at + 3], records[at + 4]]));
            let (kind, content) = self.opener.open(&records[at..at + HEADER + length]);
            if kind == DATA {
                assert!(content.iter().all(|byte| *byte == 7));
                opened += content.len();
            }
            at += HEADER + length;
        }
        assert_eq!(opened, sealed);
    }
}

/// The key of one direction.
struct Direction {
    key: LessSafeKey,
    iv: [u8; aead::NONCE_LEN],
    /// How many bytes of a nonce are in each record.
    explicit: usize,
    number: u64,
}

impl Direction {
    fn new((number, secrets): (u64, ConnectionTrafficSecrets)) -> Self {
        let (algorithm, key, iv) = match &secrets {
            ConnectionTrafficSecrets::Aes128Gcm { key, iv } => (&aead::AES_128_GCM, key, iv),
            ConnectionTrafficSecrets::Aes256Gcm { key, iv } => (&aead::AES_256_GCM, key, iv),
            ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => (&aead::CHACHA20_POLY1305, key, iv),
            _ => unreachable!("not in SUITES"),
        };
        let unbound = UnboundKey::new(algorithm, key.as_ref()).expect("a key");
        Self {
            key: LessSafeKey::new(unbound),
            iv: iv.as_ref().try_into().expect("twelve bytes"),
            explicit: if algorithm == &aead::CHACHA20_POLY1305 {
                0
            } else {
                8
            },
            number,
        }
    }

    fn nonce(&self) -> [u8; aead::NONCE_LEN] {
        let mut nonce = self.iv;
        for (byte, number) in nonce[4..].iter_mut().zip(self.number.to_be_bytes()) {
            *byte ^= number;
        }
        nonce
    }

    fn seal(&mut self, kind: u8, content: &[u8]) -> Vec<u8> {
        let nonce = self.nonce();
        let explicit = &nonce[aead::NONCE_LEN - self.explicit..];
        let mut sealed = content.to_vec();
        let aad = Aad::from(additional(self.number, kind, content.len()));
        let unique = Nonce::assume_unique_for_key(nonce);
        let done = self.key.seal_in_place_append_tag(unique, aad, &mut sealed);
        done.expect("a sealed record");
        self.number += 1;
        let [high, low] = ((explicit.len() + sealed.len()) as u16).to_be_bytes();
        [&[kind, 3, 3, high, low], explicit, &sealed[..]].concat()
    }

    /// Opens a record. Returns its type and content.
    fn open(&mut self, record: &[u8]) -> (u8, Vec<u8>) {
        let mut nonce = self.nonce();
        let (explicit, sealed) = record[HEADER..].split_at(self.explicit);
        let at = aead::NONCE_LEN - self.explicit;
        nonce[at..].copy_from_slice(explicit);
        let mut sealed = sealed.to_vec();
        let length = sealed.len() - TAG;
        let aad = Aad::from(additional(self.number, record[0], length));
        let opened = self
            .key
            .open_in_place(Nonce::assume_unique_for_key(nonce), aad, &mut sealed);
        opened.expect("a record that opens");
        self.number += 1;
        sealed.truncate(length);
        (record[0], sealed)
    }
}

/// What is authenticated beside the content (RFC 5246, section 6.2.3.3).
fn additional(number: u64, kind: u8, length: usize) -> Vec<u8> {
    let [high, low] = (length as u16).to_be_bytes();
    [&number.to_be_bytes()[..], &[kind, 3, 3, high, low]].concat()
}

/// Does a handshake. Returns the server's stream, and the peer's keys to seal and to open.
fn shake_hands(suite: usize) -> (Stream, Direction, Direction) {
    static PARTIES: OnceLock<(Server, Vec<Arc<ClientConfig>>)> = OnceLock::new();
    let (server, clients) = PARTIES.get_or_init(parties);
    let name = NAME.try_into().expect("a name");
    let mut peer = ClientConnection::new(Arc::clone(&clients[suite]), name).expect("a client");
    let mut ours = server.accept().expect("a stream");
    while ours.is_shaking_hands() || peer.is_handshaking() {
        while peer.wants_write() {
            let count = peer.write_tls(&mut ours.room()).expect("records sent");
            ours.received(count);
        }
        ours.shake_hands().expect("a handshake");
        let mut records = Vec::new();
        let sent = ours.send(|bytes| {
            records.extend_from_slice(bytes);
            Ok(bytes.len())
        });
        sent.expect("records sent");
        let mut records = &records[..];
        while !records.is_empty() {
            peer.read_tls(&mut records).expect("records received");
            peer.process_new_packets().expect("a handshake");
        }
    }
    let secrets = peer.dangerous_extract_secrets().expect("keys");
    (ours, Direction::new(secrets.tx), Direction::new(secrets.rx))
}

/// A server with a certificate, and a client for each cipher suite.
fn parties() -> (Server, Vec<Arc<ClientConfig>>) {
    let directory = std::env::temp_dir().join(format!("blkmq-fuzz-tls12-{}", std::process::id()));
    std::fs::create_dir_all(&directory).expect("a directory");
    let mut params = CertificateParams::new([]).expect("parameters");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().expect("a key"));
    let authority = authority.expect("an authority");
    let key = KeyPair::generate().expect("a key");
    let params = CertificateParams::new([NAME.to_owned()]).expect("parameters");
    let certificate = params.signed_by(&key, &authority).expect("a certificate");
    let put = |name: &str, text: String| {
        let path = directory.join(name);
        std::fs::write(&path, text).expect("a file written");
        Some(path)
    };
    let settings = Settings {
        mode: Mode::Require,
        certificate: put("server-cert.pem", certificate.pem()),
        key: put("server-key.pem", key.serialize_pem()),
        allow_tls12: true,
        ..Settings::default()
    };
    let server = Server::load(&settings).expect("a server").expect("TLS");
    std::fs::remove_dir_all(&directory).expect("the directory removed");
    let mut roots = RootCertStore::empty();
    roots.add(authority.der().clone()).expect("an authority");
    let client = |suite: &CipherSuite| {
        let mut provider = rustls::crypto::ring::default_provider();
        let is_chosen = |other: &SupportedCipherSuite| other.suite() == *suite;
        provider.cipher_suites.retain(is_chosen);
        let mut config = ClientConfig::builder_with_provider(Arc::new(provider))
            .with_protocol_versions(&[&version::TLS12])
            .expect("TLS 1.2")
            .with_root_certificates(roots.clone())
            .with_no_client_auth();
        config.enable_secret_extraction = true;
        Arc::new(config)
    };
    (server, SUITES.iter().map(client).collect())
}

/// All that TLS 1.2 has here with a key of ECDSA.
const SUITES: [CipherSuite; 3] = [
    CipherSuite::TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256,
    CipherSuite::TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384,
    CipherSuite::TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256,
];
const NAME: &str = "server.test";
const HEADER: usize = 5;
const TAG: usize = 16;
/// The most bytes of a record's content.
const CONTENT_MAX: usize = 1 << 14;
/// The type of a record with data.
const DATA: u8 = 23;
