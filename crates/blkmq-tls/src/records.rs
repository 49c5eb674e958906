//! Records after a handshake, by RFC 8446: records (section 5), the messages in them besides data
//! (section 4.6), and the end of a connection (section 6); and by RFC 5246, where an address allows TLS 1.2,
//! which has none of these messages. The library derives the keys, [`opener`] and [`sealer`] have them, and
//! `stream` has the buffers.

mod opener;
mod sealer;

use std::ops::Range;

use ring::aead;
use rustls::client::ClientConnectionData;
use rustls::crypto::cipher::{AeadKey, Iv};
use rustls::kernel::KernelConnection;
use rustls::server::ServerConnectionData;
use rustls::{
    AlertDescription, ConnectionTrafficSecrets, ContentType, Error, ExtractedSecrets, HandshakeType,
    InvalidMessage, PeerMisbehaved, SupportedCipherSuite,
};

use self::opener::Opener;
use self::sealer::Sealer;
use crate::outbox::Outbox;

/// The records of a connection after its handshake.
pub(crate) struct Records {
    keys: Keys,
    suite: SupportedCipherSuite,
    opener: Opener,
    sealer: Sealer,
    /// How many records one key may seal.
    sealed_max: u64,
    /// The first bytes of a message of the handshake protocol that is not complete.
    message: Vec<u8>,
    /// The peer has asked for a new key of ours. It gets one before the next data, no matter how
    /// often it has asked.
    owes_key_update: bool,
    /// How many more records without data may come before the next record with data.
    fruitless_left: u8,
    /// An alert that ends the connection was sent to the peer.
    is_closed: bool,
}

/// The part of the library that derives the keys.
pub(crate) enum Keys {
    Client(KernelConnection<ClientConnectionData>),
    Server(KernelConnection<ServerConnectionData>),
}

/// The content of a record.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Content {
    /// Data, in these bytes of the record.
    Data(Range<usize>),
    /// Nothing for the caller.
    Nothing,
    /// Nothing for the caller, and a new key opens the next record. Its derivation takes as long as
    /// the opening of many small records.
    NewKey,
    /// The peer sends no more.
    Close,
}

impl Records {
    pub(crate) fn new(keys: Keys, secrets: ExtractedSecrets) -> Result<Self, Error> {
        let suite = keys.suite();
        let sealed_max = match suite {
            SupportedCipherSuite::Tls13(suite) => suite.common.confidentiality_limit,
            SupportedCipherSuite::Tls12(suite) => suite.common.confidentiality_limit,
        };
        Ok(Self {
            opener: Opener::new(suite, secrets.rx)?,
            sealer: Sealer::new(suite, secrets.tx)?,
            sealed_max,
            keys,
            suite,
            message: Vec::new(),
            owes_key_update: false,
            fruitless_left: FRUITLESS_MAX,
            is_closed: false,
        })
    }

    /// The length of the record that begins with these bytes, with its header; `None` if the header
    /// is not complete.
    ///
    /// # Errors
    /// No such record may come after a handshake.
    pub(crate) fn length_of(&self, bytes: &[u8]) -> Result<Option<usize>, Error> {
        let Some(&[kind, major, minor, high, low]) = bytes.first_chunk::<HEADER>() else {
            return Ok(None);
        };
        match ContentType::from(kind) {
            ContentType::ApplicationData => {}
            ContentType::Alert | ContentType::Handshake if !self.has_updates() => {}
            kind => return Err(unexpected(kind)),
        }
        // The header is authenticated, but the library authenticates this version in place of the
        // one that was received.
        if [major, minor] != VERSION {
            return Err(Error::DecryptError);
        }
        match usize::from(u16::from_be_bytes([high, low])) {
            sealed if sealed > SEALED_MAX => Err(Error::PeerSentOversizedRecord),
            sealed => Ok(Some(HEADER + sealed)),
        }
    }

    /// Opens a complete record in its place.
    ///
    /// # Errors
    /// The peer violates the protocol or has sent an alert, or the record was changed on its way.
    pub(crate) fn open(&mut self, record: &mut [u8]) -> Result<Content, Error> {
        let (kind, sealed) = (record[0].into(), &mut record[HEADER..]);
        let place = sealed.as_ptr();
        let opened = self.opener.open(kind, sealed)?;
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

    /// Processes the messages of the handshake protocol that are complete.
    fn take_messages(&mut self) -> Result<Content, Error> {
        let (mut at, mut content) = (0, Content::Nothing);
        while let Some(&[kind, high, middle, low]) = self.message[at..].first_chunk::<MESSAGE_HEADER>() {
            let from = at + MESSAGE_HEADER;
            let to = from + u32::from_be_bytes([0, high, middle, low]) as usize;
            self.check_message(kind.into(), to - from)?;
            if to > self.message.len() {
                break;
            }
            if HandshakeType::from(kind) == HandshakeType::KeyUpdate {
                if to < self.message.len() {
                    return Err(PeerMisbehaved::KeyEpochWithPendingFragment.into());
                }
                self.follow_key_update(self.message[from])?;
                content = Content::NewKey;
            }
            // Any other message is a ticket. No session is resumed, so the ticket is dropped.
            at = to;
        }
        self.message.drain(..at);
        Ok(content)
    }

    /// Checks a message by its header, before the rest of the message is stored.
    fn check_message(&self, kind: HandshakeType, length: usize) -> Result<(), Error> {
        if MESSAGE_HEADER + length > MESSAGES_MAX {
            return Err(InvalidMessage::HandshakePayloadTooLarge.into());
        }
        match (kind, &self.keys) {
            // TLS 1.2 has no message here but those of a new negotiation, which nobody gets.
            (HandshakeType::KeyUpdate, _) if self.has_updates() && length == 1 => Ok(()),
            (HandshakeType::KeyUpdate, _) if self.has_updates() => {
                Err(InvalidMessage::InvalidKeyUpdate.into())
            }
            (HandshakeType::NewSessionTicket, Keys::Client(_)) if self.has_updates() => Ok(()),
            _ => Err(Error::InappropriateHandshakeMessage {
                expect_types: vec![HandshakeType::KeyUpdate],
                got_type: kind,
            }),
        }
    }

    /// Returns whether keys can be replaced: TLS 1.2 has one for a connection.
    fn has_updates(&self) -> bool {
        matches!(self.suite, SupportedCipherSuite::Tls13(_))
    }

    /// Opens the following records with the peer's next key.
    fn follow_key_update(&mut self, request: u8) -> Result<(), Error> {
        match request {
            UPDATE_NOT_REQUESTED => {}
            UPDATE_REQUESTED => self.owes_key_update = true,
            _ => return Err(InvalidMessage::InvalidKeyUpdate.into()),
        }
        self.opener = Opener::new(self.suite, self.keys.update_receiving()?)?;
        Ok(())
    }

    /// Appends data, in as many records as it needs. `fill` is called for each record in turn, and
    /// copies the next bytes to the place where they are sealed.
    ///
    /// # Errors
    /// There is no further key, which the peer is told by a close, or the connection was closed. The records
    /// appended before the error hold a part of the data.
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

    /// Appends a key update, sealed with the old key, and replaces that key.
    fn update_sending(&mut self, out: &mut Outbox) -> Result<(), Error> {
        if !self.has_updates() {
            self.close(out);
            return Err(Error::General(format!(
                "a key may seal {} records, and TLS 1.2 has no other one: the peer has to connect again",
                self.sealed_max
            )));
        }
        let message = [u8::from(HandshakeType::KeyUpdate), 0, 0, 1, UPDATE_NOT_REQUESTED];
        let fill = |room: &mut [u8]| room.copy_from_slice(&message);
        self.sealer
            .seal(ContentType::Handshake, message.len(), fill, out)?;
        self.sealer = Sealer::new(self.suite, self.keys.update_sending()?)?;
        self.owes_key_update = false;
        Ok(())
    }

    /// Appends the alert that nothing more will be sent.
    pub(crate) fn close(&mut self, out: &mut Outbox) {
        self.close_with_alert(AlertDescription::CloseNotify, out);
    }

    /// Appends the alert for an error.
    pub(crate) fn tell_error(&mut self, error: &Error, out: &mut Outbox) {
        match error {
            Error::DecryptError => self.close_with_alert(AlertDescription::BadRecordMac, out),
            Error::PeerSentOversizedRecord => self.close_with_alert(AlertDescription::RecordOverflow, out),
            Error::InvalidMessage(InvalidMessage::InvalidKeyUpdate) => {
                self.close_with_alert(AlertDescription::IllegalParameter, out);
            }
            Error::InvalidMessage(_) => self.close_with_alert(AlertDescription::DecodeError, out),
            Error::AlertReceived(_) => {}
            Error::General(_) => self.close_with_alert(AlertDescription::InternalError, out),
            _ => self.close_with_alert(AlertDescription::UnexpectedMessage, out),
        }
    }

    fn close_with_alert(&mut self, what: AlertDescription, out: &mut Outbox) {
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
    fn suite(&self) -> SupportedCipherSuite {
        match self {
            Self::Client(keys) => keys.negotiated_cipher_suite(),
            Self::Server(keys) => keys.negotiated_cipher_suite(),
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

fn parts(secrets: ConnectionTrafficSecrets) -> Result<(&'static aead::Algorithm, AeadKey, Iv), Error> {
    match secrets {
        ConnectionTrafficSecrets::Aes128Gcm { key, iv } => Ok((&aead::AES_128_GCM, key, iv)),
        ConnectionTrafficSecrets::Aes256Gcm { key, iv } => Ok((&aead::AES_256_GCM, key, iv)),
        ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => Ok((&aead::CHACHA20_POLY1305, key, iv)),
        _ => Err(Error::General("a cipher that is not offered".to_owned())),
    }
}

/// Bytes of a record's header (RFC 8446, section 5.1).
pub(crate) const HEADER: usize = 5;
/// The version in the header of each sealed record (section 5.2).
const VERSION: [u8; 2] = [3, 3];
/// Bytes of the tag behind the sealed content: 16 with each of the ciphers.
const TAG: usize = 16;
/// The most bytes of content of a record (section 5.1).
const CONTENT_MAX: usize = 1 << 14;
/// The most bytes behind a header (section 5.2).
const SEALED_MAX: usize = CONTENT_MAX + 256;
/// Bytes of the header of a message of the handshake protocol (section 4).
const MESSAGE_HEADER: usize = 4;
/// The most bytes of messages that are not complete: the limit of the library.
const MESSAGES_MAX: usize = 0xffff;
/// The most key updates, tickets and empty records in a row: the limit of the library.
const FRUITLESS_MAX: u8 = 32;
/// The content of a key update (section 4.6.3).
const UPDATE_NOT_REQUESTED: u8 = 0;
const UPDATE_REQUESTED: u8 = 1;
/// The level of an alert (section 6).
const LEVEL_WARNING: u8 = 1;
const LEVEL_FATAL: u8 = 2;

#[cfg(test)]
impl Records {
    /// Appends a record that no peer should send.
    pub(crate) fn seal_any(&mut self, kind: ContentType, content: &[u8], out: &mut Outbox) {
        let fill = |room: &mut [u8]| room.copy_from_slice(content);
        self.sealer.seal(kind, content.len(), fill, out).unwrap();
    }

    pub(crate) fn suite(&self) -> SupportedCipherSuite {
        self.suite
    }

    /// Sets how many records one key may seal.
    pub(crate) fn limit_sealed(&mut self, sealed_max: u64) {
        self.sealed_max = sealed_max;
    }

    /// Sets the numbers of the next records that are opened and sealed.
    pub(crate) fn set_sequences(&mut self, opened: u64, sealed: u64) {
        (self.opener.sequence, self.sealer.sequence) = (opened, sealed);
    }
}
