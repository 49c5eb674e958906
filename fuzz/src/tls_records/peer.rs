//! The peer of the record layer under test: it seals and opens records with `ring` alone, and
//! derives its keys itself (RFC 8446, sections 5.2, 7.2 and 7.3). The TLS library only does the
//! handshake.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock};

use blkmq_tls::{Client, ClientFiles, Mode, Server, Settings, Stream};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use ring::aead::{self, Aad, LessSafeKey, Nonce, UnboundKey};
use ring::hkdf;
use rustls::pki_types::PrivateKeyDer;
use rustls::{
    CipherSuite, ClientConfig, ClientConnection, Connection, KeyLog, RootCertStore, ServerConfig,
    ServerConnection, SupportedCipherSuite, version,
};

/// A stream whose handshake is over, and its peer's keys.
pub(super) struct Ends {
    pub(super) ours: Stream,
    /// Seals what the stream opens.
    pub(super) sealer: Direction,
    /// Opens what the stream seals.
    pub(super) opener: Direction,
}

/// The keys of one direction.
pub(super) struct Direction {
    suite: Suite,
    secret: Vec<u8>,
    key: LessSafeKey,
    iv: [u8; aead::NONCE_LEN],
    /// Which key it is, and how many records it has sealed or opened.
    pub(super) number: (u64, u64),
}

/// Does a handshake, with the stream as the client or the server, and one of the three cipher
/// suites.
///
/// # Panics
/// The handshake fails.
pub(super) fn shake_hands(is_client: bool, suite: usize) -> Ends {
    let parties = Parties::get();
    let suite = suite % SUITES.len();
    let secrets = Arc::new(Secrets::default());
    let (mut ours, mut peer) = if is_client {
        let mut config = parties.server_configs[suite].clone();
        config.key_log = Arc::clone(&secrets) as _;
        let peer = ServerConnection::new(Arc::new(config)).expect("a server");
        (
            parties.client.connect().expect("a stream"),
            Connection::from(peer),
        )
    } else {
        let mut config = parties.client_configs[suite].clone();
        config.key_log = Arc::clone(&secrets) as _;
        let name = NAME.try_into().expect("a name");
        let peer = ClientConnection::new(Arc::new(config), name).expect("a client");
        (parties.server.accept().expect("a stream"), Connection::from(peer))
    };
    while ours.is_shaking_hands() || peer.is_handshaking() {
        ours.shake_hands().expect("a handshake");
        let mut records = Vec::new();
        ours.send(|bytes| {
            records.extend_from_slice(bytes);
            Ok(bytes.len())
        })
        .expect("records sent");
        let mut records = &records[..];
        while !records.is_empty() {
            peer.read_tls(&mut records).expect("records received");
            peer.process_new_packets().expect("a handshake");
        }
        while peer.wants_write() {
            let count = peer.write_tls(&mut ours.room()).expect("records sent");
            ours.received(count);
        }
    }
    let direction = |label: &str| Direction::new(Suite::of(SUITES[suite]), secrets.get(label));
    let (client, server) = (
        direction("CLIENT_TRAFFIC_SECRET_0"),
        direction("SERVER_TRAFFIC_SECRET_0"),
    );
    let (sealer, opener) = if is_client {
        (server, client)
    } else {
        (client, server)
    };
    Ends { ours, sealer, opener }
}

impl Direction {
    fn new(suite: Suite, secret: Vec<u8>) -> Self {
        let (key, iv) = suite.keys(&secret);
        Self {
            suite,
            secret,
            key,
            iv,
            number: (0, 0),
        }
    }

    /// Goes on to the next key.
    pub(super) fn update(&mut self) {
        let length = self.secret.len();
        let secret = self.suite.expand(&self.secret, b"traffic upd", length);
        let number = (self.number.0 + 1, 0);
        *self = Self {
            number,
            ..Self::new(self.suite, secret)
        };
    }

    /// Makes a record of what it is to hold: the content, its type, and padding.
    pub(super) fn seal(&mut self, inner: &[u8]) -> Vec<u8> {
        let [high, low] = u16::try_from(inner.len() + TAG)
            .expect("a short record")
            .to_be_bytes();
        let header = [23, 3, 3, high, low];
        let mut sealed = inner.to_vec();
        let nonce = self.next_nonce();
        self.key
            .seal_in_place_append_tag(nonce, Aad::from(header), &mut sealed)
            .expect("a sealed record");
        [&header[..], &sealed[..]].concat()
    }

    /// Opens a record. Returns its content and the content's type.
    ///
    /// # Panics
    /// The key does not open it.
    pub(super) fn open(&mut self, record: &[u8]) -> (Vec<u8>, u8) {
        let (header, sealed) = record.split_first_chunk::<HEADER>().expect("a header");
        let mut sealed = sealed.to_vec();
        let nonce = self.next_nonce();
        let opened = self.key.open_in_place(nonce, Aad::from(header), &mut sealed);
        let mut content = opened.expect("a record that opens").to_vec();
        let kind = content.pop().expect("a type");
        (content, kind)
    }

    fn next_nonce(&mut self) -> Nonce {
        let mut nonce = self.iv;
        let sequence = self.number.1.to_be_bytes();
        for (byte, number) in nonce[4..].iter_mut().zip(sequence) {
            *byte ^= number;
        }
        self.number.1 += 1;
        Nonce::assume_unique_for_key(nonce)
    }
}

#[derive(Clone, Copy)]
struct Suite {
    aead: &'static aead::Algorithm,
    hkdf: hkdf::Algorithm,
}

impl Suite {
    fn of(suite: CipherSuite) -> Self {
        let (aead, hkdf) = match suite {
            CipherSuite::TLS13_AES_128_GCM_SHA256 => (&aead::AES_128_GCM, hkdf::HKDF_SHA256),
            CipherSuite::TLS13_AES_256_GCM_SHA384 => (&aead::AES_256_GCM, hkdf::HKDF_SHA384),
            CipherSuite::TLS13_CHACHA20_POLY1305_SHA256 => (&aead::CHACHA20_POLY1305, hkdf::HKDF_SHA256),
            other => unreachable!("{other:?} is not in SUITES"),
        };
        Self { aead, hkdf }
    }

    fn keys(self, secret: &[u8]) -> (LessSafeKey, [u8; aead::NONCE_LEN]) {
        let key = self.expand(secret, b"key", self.aead.key_len());
        let key = UnboundKey::new(self.aead, &key).expect("a key");
        let iv = self.expand(secret, b"iv", aead::NONCE_LEN);
        (LessSafeKey::new(key), iv.try_into().expect("twelve bytes"))
    }

    /// HKDF-Expand-Label without a context (RFC 8446, section 7.1).
    fn expand(self, secret: &[u8], label: &[u8], length: usize) -> Vec<u8> {
        let [high, low] = u16::try_from(length).expect("a short key").to_be_bytes();
        let label_length = [u8::try_from(LABEL.len() + label.len()).expect("a short label")];
        let info = [&[high, low][..], &label_length, LABEL, label, &[0]];
        let mut out = vec![0; length];
        hkdf::Prk::new_less_safe(self.hkdf, secret)
            .expand(&info, Length(length))
            .and_then(|key| key.fill(&mut out))
            .expect("a key");
        out
    }
}

/// How much is expanded, in bytes.
struct Length(usize);

impl hkdf::KeyType for Length {
    fn len(&self) -> usize {
        self.0
    }
}

/// The secrets of a handshake, by their labels.
#[derive(Debug, Default)]
struct Secrets(Mutex<BTreeMap<String, Vec<u8>>>);

impl Secrets {
    fn get(&self, label: &str) -> Vec<u8> {
        self.0.lock().expect("no panic before")[label].clone()
    }
}

impl KeyLog for Secrets {
    fn log(&self, label: &str, _: &[u8], secret: &[u8]) {
        let mut secrets = self.0.lock().expect("no panic before");
        secrets.insert(label.to_owned(), secret.to_vec());
    }
}

/// What all inputs have in common: a certificate, and who uses it.
struct Parties {
    client: Client,
    server: Server,
    /// By the cipher suite, as in `SUITES`.
    client_configs: [ClientConfig; 3],
    server_configs: [ServerConfig; 3],
}

impl Parties {
    fn get() -> &'static Self {
        static PARTIES: OnceLock<Parties> = OnceLock::new();
        PARTIES.get_or_init(|| {
            let directory = std::env::temp_dir().join(format!("blkmq-fuzz-tls-{}", std::process::id()));
            std::fs::create_dir_all(&directory).expect("a directory");
            let parties = Self::new(&directory);
            std::fs::remove_dir_all(&directory).expect("the directory removed");
            parties
        })
    }

    /// Makes the certificate. Our two ends read it from files in `directory`.
    fn new(directory: &Path) -> Self {
        let mut params = CertificateParams::new([]).expect("parameters");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let own = KeyPair::generate().expect("a key");
        let authority = CertifiedIssuer::self_signed(params, own).expect("an authority");
        let key = KeyPair::generate().expect("a key");
        let params = CertificateParams::new([NAME.to_owned()]).expect("parameters");
        let certificate = params.signed_by(&key, &authority).expect("a certificate");
        let put = |name: &str, text: String| {
            let path = directory.join(name);
            std::fs::write(&path, text).expect("a file written");
            Some(path)
        };
        let client_files = ClientFiles {
            ca: put("ca-cert.pem", authority.pem()),
            ..ClientFiles::default()
        };
        let settings = Settings {
            mode: Mode::Require,
            certificate: put("server-cert.pem", certificate.pem()),
            key: put("server-key.pem", key.serialize_pem()),
            ..Settings::default()
        };
        let mut roots = RootCertStore::empty();
        roots.add(authority.der().clone()).expect("an authority");
        let client_config = |suite| {
            ClientConfig::builder_with_provider(provider(suite))
                .with_protocol_versions(&[&version::TLS13])
                .expect("TLS 1.3")
                .with_root_certificates(roots.clone())
                .with_no_client_auth()
        };
        let server_config = |suite| {
            let key = PrivateKeyDer::try_from(key.serialize_der()).expect("a key");
            let mut config = ServerConfig::builder_with_provider(provider(suite))
                .with_protocol_versions(&[&version::TLS13])
                .expect("TLS 1.3")
                .with_no_client_auth()
                .with_single_cert(vec![certificate.der().clone()], key)
                .expect("a server");
            // Tickets would be the first records by the new keys.
            config.send_tls13_tickets = 0;
            config
        };
        Self {
            client: Client::load(&client_files, NAME).expect("a client"),
            server: Server::load(&settings).expect("a server").expect("TLS"),
            client_configs: SUITES.map(client_config),
            server_configs: SUITES.map(server_config),
        }
    }
}

/// Offers one cipher suite.
fn provider(suite: CipherSuite) -> Arc<rustls::crypto::CryptoProvider> {
    let mut provider = rustls::crypto::ring::default_provider();
    let is_chosen = |other: &SupportedCipherSuite| other.suite() == suite;
    provider.cipher_suites.retain(is_chosen);
    Arc::new(provider)
}

/// All that TLS 1.3 has with `ring`.
const SUITES: [CipherSuite; 3] = [
    CipherSuite::TLS13_AES_128_GCM_SHA256,
    CipherSuite::TLS13_AES_256_GCM_SHA384,
    CipherSuite::TLS13_CHACHA20_POLY1305_SHA256,
];
const NAME: &str = "server.test";
const LABEL: &[u8] = b"tls13 ";
/// Bytes of a record before what is sealed.
pub(super) const HEADER: usize = 5;
/// Bytes of a record behind what is sealed.
pub(super) const TAG: usize = 16;
