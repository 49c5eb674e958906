//! Decides how records are opened and sealed once a handshake is over, as RFC 8446 has it: records (section 5), what may come in them
//! besides data (4.6), and how a connection ends (6). The library makes the keys and opens records, `ring` seals them; `stream` has the buffers.
//!
//! A record is opened where it was received. One that is sent is sealed where its content was copied to, which is where it waits for
//! the socket.
//!
//! ```text
//!  | type, version, length | content | type of content | tag |
//!  0                       5         5+n               6+n   22+n
//! ```

use std::ops::Range;

use ring::aead::{self, Aad, LessSafeKey, UnboundKey};
use rustls::client::ClientConnectionData;
use rustls::crypto::cipher::{self, InboundOpaqueMessage, Iv, MessageDecrypter};
use rustls::kernel::KernelConnection;
use rustls::server::ServerConnectionData;
use rustls::{
    AlertDescription, ConnectionTrafficSecrets, ContentType, Error, ExtractedSecrets, HandshakeType,
    InvalidMessage, PeerMisbehaved, ProtocolVersion, SupportedCipherSuite, Tls13CipherSuite,
};

use crate::outbox::Outbox;

/// The records of a connection after its handshake.
pub(crate) struct Records {
    keys: Keys,
    suite: &'static Tls13CipherSuite,
    opener: Opener,
    sealer: Sealer,
    /// Records that one key may seal.
    sealed_max: u64,
    /// The beginning of a message of the handshake protocol that is not all there.
    message: Vec<u8>,
    /// The peer has asked for a new key of ours. It gets one before the next data, however often it has asked.
    owes_key_update: bool,
    /// Records without data that may still come before the next with some.
    fruitless_left: u8,
    /// The peer has been told that this is the end.
    is_closed: bool,
}

/// Where keys come from, first and later.
pub(crate) enum Keys {
    Client(KernelConnection<ClientConnectionData>),
    Server(KernelConnection<ServerConnectionData>),
}

/// What a record held.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Content {
    /// Data, in these bytes of the record.
    Data(Range<usize>),
    /// Nothing for the caller.
    Nothing,
    /// The peer sends no more.
    Close,
}

impl Records {
    pub(crate) fn new(keys: Keys, secrets: ExtractedSecrets) -> Result<Self, Error> {
        let suite = keys.suite()?;
        Ok(Self {
            opener: Opener::new(suite, secrets.rx)?,
            sealer: Sealer::new(secrets.tx)?,
            sealed_max: suite.common.confidentiality_limit,
            keys,
            suite,
            message: Vec::new(),
            owes_key_update: false,
            fruitless_left: FRUITLESS_MAX,
            is_closed: false,
        })
    }

    /// The length of the record that begins so, with its header; none while the header is not all there.
    ///
    /// # Errors
    /// Such a record does not come after a handshake.
    pub(crate) fn length_of(bytes: &[u8]) -> Result<Option<usize>, Error> {
        let Some(&[kind, _, _, high, low]) = bytes.first_chunk::<HEADER>() else {
            return Ok(None);
        };
        if ContentType::from(kind) != ContentType::ApplicationData {
            return Err(unexpected(ContentType::from(kind)));
        }
        match usize::from(u16::from_be_bytes([high, low])) {
            sealed if sealed > SEALED_MAX => Err(Error::PeerSentOversizedRecord),
            sealed => Ok(Some(HEADER + sealed)),
        }
    }

    /// Opens a record, all of which is there, in its place.
    ///
    /// # Errors
    /// The peer does not keep to the protocol, or has said that it cannot go on, or somebody has changed the record.
    pub(crate) fn open(&mut self, record: &mut [u8]) -> Result<Content, Error> {
        let sealed = &mut record[HEADER..];
        let place = sealed.as_ptr();
        let opened = self.opener.open(sealed)?;
        assert_eq!(opened.payload.as_ptr(), place, "a record is opened in its place");
        if !self.message.is_empty() && opened.typ != ContentType::Handshake {
            return Err(PeerMisbehaved::MessageInterleavedWithHandshakeMessage.into());
        }
        if opened.typ == ContentType::ApplicationData && !opened.payload.is_empty() {
            self.fruitless_left = FRUITLESS_MAX;
            return Ok(Content::Data(HEADER..HEADER + opened.payload.len()));
        }
        let left = self.fruitless_left.checked_sub(1);
        self.fruitless_left = left.ok_or(PeerMisbehaved::TooManyEmptyFragments)?;
        match (opened.typ, opened.payload) {
            (ContentType::ApplicationData, _) => Ok(Content::Nothing),
            (ContentType::Alert, &[_, description]) => alert(description.into()),
            (ContentType::Handshake, fragment) if !fragment.is_empty() => {
                if self.message.len() + fragment.len() > MESSAGES_MAX {
                    return Err(InvalidMessage::HandshakePayloadTooLarge.into());
                }
                self.message.extend_from_slice(fragment);
                self.take_messages()
            }
            (ContentType::Alert | ContentType::Handshake, _) => {
                Err(InvalidMessage::MissingData("a record's content").into())
            }
            (kind, _) => Err(unexpected(kind)),
        }
    }

    /// Takes the messages of the handshake protocol that are all there.
    fn take_messages(&mut self) -> Result<Content, Error> {
        let mut at = 0;
        while let Some(&[kind, high, middle, low]) = self.message[at..].first_chunk::<MESSAGE_HEADER>() {
            let from = at + MESSAGE_HEADER;
            let to = from + u32::from_be_bytes([0, high, middle, low]) as usize;
            if to - at > MESSAGES_MAX {
                return Err(InvalidMessage::HandshakePayloadTooLarge.into());
            }
            if to > self.message.len() {
                break;
            }
            match (HandshakeType::from(kind), &self.message[from..to], &self.keys) {
                (HandshakeType::KeyUpdate, &[wants_ours @ (0 | 1)], _) => {
                    if to < self.message.len() {
                        return Err(PeerMisbehaved::KeyEpochWithPendingFragment.into());
                    }
                    self.owes_key_update |= wants_ours == 1;
                    self.opener = Opener::new(self.suite, self.keys.update_receiving()?)?;
                }
                (HandshakeType::KeyUpdate, ..) => return Err(InvalidMessage::InvalidKeyUpdate.into()),
                // No session is resumed: there is no use for a ticket.
                (HandshakeType::NewSessionTicket, _, Keys::Client(_)) => {}
                (kind, ..) => {
                    return Err(Error::InappropriateHandshakeMessage {
                        expect_types: vec![HandshakeType::KeyUpdate],
                        got_type: kind,
                    });
                }
            }
            at = to;
        }
        self.message.drain(..at);
        Ok(Content::Nothing)
    }

    /// Appends data, in as many records as it needs; `fill` is called for each of them in turn, to copy the next bytes to where they are
    /// sealed.
    ///
    /// # Errors
    /// There is no further key, or the end was announced. Records appended before the error are not all of the data.
    pub(crate) fn seal(
        &mut self,
        mut bytes: usize,
        mut fill: impl FnMut(&mut [u8]),
        out: &mut Outbox,
    ) -> Result<(), Error> {
        if self.is_closed {
            return Err(Error::General("data after the end".to_owned()));
        }
        while bytes > 0 {
            if self.owes_key_update || self.sealer.sequence + 1 >= self.sealed_max {
                self.update_sending(out)?;
            }
            let now = bytes.min(CONTENT_MAX);
            self.sealer
                .seal(ContentType::ApplicationData, now, &mut fill, out)?;
            bytes -= now;
        }
        Ok(())
    }

    /// Appends word of a new key, by the old one, which is used no more then.
    fn update_sending(&mut self, out: &mut Outbox) -> Result<(), Error> {
        let message = [u8::from(HandshakeType::KeyUpdate), 0, 0, 1, UPDATE_NOT_REQUESTED];
        let fill = |room: &mut [u8]| room.copy_from_slice(&message);
        self.sealer
            .seal(ContentType::Handshake, message.len(), fill, out)?;
        self.sealer = Sealer::new(self.keys.update_sending()?)?;
        self.owes_key_update = false;
        Ok(())
    }

    /// Appends word that nothing more comes.
    pub(crate) fn close(&mut self, out: &mut Outbox) {
        self.tell(AlertDescription::CloseNotify, out);
    }

    /// Appends what the peer is told about an error.
    pub(crate) fn tell_error(&mut self, error: &Error, out: &mut Outbox) {
        match error {
            Error::DecryptError => self.tell(AlertDescription::BadRecordMac, out),
            Error::PeerSentOversizedRecord => self.tell(AlertDescription::RecordOverflow, out),
            Error::InvalidMessage(InvalidMessage::InvalidKeyUpdate) => {
                self.tell(AlertDescription::IllegalParameter, out);
            }
            Error::InvalidMessage(_) => self.tell(AlertDescription::DecodeError, out),
            Error::AlertReceived(_) => {}
            Error::General(_) => self.tell(AlertDescription::InternalError, out),
            _ => self.tell(AlertDescription::UnexpectedMessage, out),
        }
    }

    fn tell(&mut self, what: AlertDescription, out: &mut Outbox) {
        if self.is_closed {
            return;
        }
        self.is_closed = true;
        let level = match what {
            AlertDescription::CloseNotify => LEVEL_WARNING,
            _ => LEVEL_FATAL,
        };
        let fill = |room: &mut [u8]| room.copy_from_slice(&[level, u8::from(what)]);
        // An alert that cannot be sealed is not sent: the connection ends in either case.
        let _ = self.sealer.seal(ContentType::Alert, 2, fill, out);
    }
}

fn alert(description: AlertDescription) -> Result<Content, Error> {
    match description {
        AlertDescription::CloseNotify => Ok(Content::Close),
        AlertDescription::UserCanceled => Ok(Content::Nothing),
        description => Err(Error::AlertReceived(description)),
    }
}

fn unexpected(kind: ContentType) -> Error {
    Error::InappropriateMessage {
        expect_types: vec![ContentType::ApplicationData],
        got_type: kind,
    }
}

impl Keys {
    fn suite(&self) -> Result<&'static Tls13CipherSuite, Error> {
        let suite = match self {
            Self::Client(keys) => keys.negotiated_cipher_suite(),
            Self::Server(keys) => keys.negotiated_cipher_suite(),
        };
        match suite {
            SupportedCipherSuite::Tls13(suite) => Ok(suite),
            #[allow(
                unreachable_patterns,
                reason = "there are more of them if a crate turns TLS 1.2 on"
            )]
            _ => Err(Error::General("not TLS 1.3".to_owned())),
        }
    }

    fn update_receiving(&mut self) -> Result<(u64, ConnectionTrafficSecrets), Error> {
        match self {
            Self::Client(keys) => keys.update_rx_secret(),
            Self::Server(keys) => keys.update_rx_secret(),
        }
    }

    fn update_sending(&mut self) -> Result<(u64, ConnectionTrafficSecrets), Error> {
        match self {
            Self::Client(keys) => keys.update_tx_secret(),
            Self::Server(keys) => keys.update_tx_secret(),
        }
    }
}

/// A key for what is received.
struct Opener {
    decrypter: Box<dyn MessageDecrypter>,
    /// Records that were opened by it.
    sequence: u64,
}

impl Opener {
    fn new(
        suite: &'static Tls13CipherSuite,
        (sequence, secrets): (u64, ConnectionTrafficSecrets),
    ) -> Result<Self, Error> {
        let (_, key, iv) = parts(secrets)?;
        Ok(Self {
            decrypter: suite.aead_alg.decrypter(key, iv),
            sequence,
        })
    }

    /// Opens what follows a record's header, and takes off the padding.
    fn open<'a>(&mut self, sealed: &'a mut [u8]) -> Result<cipher::InboundPlainMessage<'a>, Error> {
        let kind = ContentType::ApplicationData;
        let message = InboundOpaqueMessage::new(kind, ProtocolVersion::TLSv1_2, sealed);
        let opened = self.decrypter.decrypt(message, self.sequence)?;
        self.sequence += 1;
        Ok(opened)
    }
}

/// A key for what is sent. No number is used twice: it goes up with each record, and there is a new key long before it ends.
struct Sealer {
    key: LessSafeKey,
    iv: Iv,
    /// Records that were sealed by it.
    sequence: u64,
}

impl Sealer {
    fn new((sequence, secrets): (u64, ConnectionTrafficSecrets)) -> Result<Self, Error> {
        let (algorithm, key, iv) = parts(secrets)?;
        let key = UnboundKey::new(algorithm, key.as_ref()).map_err(|_| Error::EncryptError)?;
        Ok(Self {
            key: LessSafeKey::new(key),
            iv,
            sequence,
        })
    }

    /// Appends a record of `bytes` that `fill` copies.
    #[inline]
    fn seal(
        &mut self,
        kind: ContentType,
        bytes: usize,
        mut fill: impl FnMut(&mut [u8]),
        out: &mut Outbox,
    ) -> Result<(), Error> {
        let length = HEADER + bytes + 1 + TAG;
        let record = out.room(length);
        let (header, sealed) = record.split_at_mut(HEADER);
        let (content, tag) = sealed.split_at_mut(bytes + 1);
        header.copy_from_slice(&cipher::make_tls13_aad(content.len() + TAG));
        fill(&mut content[..bytes]);
        content[bytes] = kind.into();
        let nonce = cipher::Nonce::new(&self.iv, self.sequence);
        self.sequence += 1;
        let nonce = aead::Nonce::assume_unique_for_key(nonce.0);
        let sealed = self
            .key
            .seal_in_place_separate_tag(nonce, Aad::from(&*header), content);
        tag.copy_from_slice(sealed.map_err(|_| Error::EncryptError)?.as_ref());
        out.appended(length);
        Ok(())
    }
}

fn parts(
    secrets: ConnectionTrafficSecrets,
) -> Result<(&'static aead::Algorithm, cipher::AeadKey, Iv), Error> {
    match secrets {
        ConnectionTrafficSecrets::Aes128Gcm { key, iv } => Ok((&aead::AES_128_GCM, key, iv)),
        ConnectionTrafficSecrets::Aes256Gcm { key, iv } => Ok((&aead::AES_256_GCM, key, iv)),
        ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => Ok((&aead::CHACHA20_POLY1305, key, iv)),
        _ => Err(Error::General("a cipher that is not offered".to_owned())),
    }
}

/// Of a record (RFC 8446, 5.1).
pub(crate) const HEADER: usize = 5;
/// Behind what was sealed: 16 bytes with each of the ciphers.
const TAG: usize = 16;
/// Content of a record at most (5.1).
const CONTENT_MAX: usize = 1 << 14;
/// What follows a header at most (5.2).
const SEALED_MAX: usize = CONTENT_MAX + 256;
/// Of a message of the handshake protocol (4).
const MESSAGE_HEADER: usize = 4;
/// Messages that are not all there, in bytes: as many as the library allows.
const MESSAGES_MAX: usize = 0xffff;
/// Key updates, tickets and empty records one after the other, as many as the library allows.
const FRUITLESS_MAX: u8 = 32;
/// Of a key update (4.6.3).
const UPDATE_NOT_REQUESTED: u8 = 0;
/// Of an alert (6).
const LEVEL_WARNING: u8 = 1;
const LEVEL_FATAL: u8 = 2;

#[cfg(test)]
impl Records {
    /// Appends a record as no peer should send it.
    pub(crate) fn seal_any(&mut self, kind: ContentType, content: &[u8], out: &mut Outbox) {
        let fill = |room: &mut [u8]| room.copy_from_slice(content);
        self.sealer.seal(kind, content.len(), fill, out).unwrap();
    }

    /// Has a key seal no more than so many records.
    pub(crate) fn limit_sealed(&mut self, sealed_max: u64) {
        self.sealed_max = sealed_max;
    }
}
