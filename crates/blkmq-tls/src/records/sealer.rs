//! The key for sent records. The content of a record is copied once, into the outbox, and sealed there by
//! `ring`.
//!
//! ```text
//! TLS 1.3          | type, version, length | content | type of content | tag |
//!                  0                       5         5+n               6+n   22+n
//! TLS 1.2, AES     | type, version, length | a part of the nonce | content | tag |
//!                  0                       5                     13        13+n  29+n
//! TLS 1.2, ChaCha  | type, version, length | content | tag |
//!                  0                       5         5+n   21+n
//! ```

use ring::aead::{self, Aad, LessSafeKey, UnboundKey};
use rustls::crypto::cipher::{self, Iv};
use rustls::{ConnectionTrafficSecrets, ContentType, Error, ProtocolVersion, SupportedCipherSuite};

use super::{HEADER, TAG, VERSION, parts};
use crate::outbox::Outbox;

/// A key for sent records. No number is used twice: the number increases with each record, and
/// `Records` replaces the key before the numbers end, or ends the connection.
pub(super) struct Sealer {
    key: LessSafeKey,
    iv: Iv,
    form: Form,
    /// How many records the key has sealed.
    pub(super) sequence: u64,
}

/// How a record is put together.
#[derive(Clone, Copy, Debug)]
enum Form {
    /// As RFC 8446 has it: the type of the content is sealed as well.
    Tls13,
    /// As RFC 5246 has it, with so many bytes of the nonce in each record: 8 with AES (RFC 5288), none with ChaCha
    /// (RFC 7905).
    Tls12 { nonce: usize },
}

impl Sealer {
    pub(super) fn new(
        suite: SupportedCipherSuite,
        (sequence, secrets): (u64, ConnectionTrafficSecrets),
    ) -> Result<Self, Error> {
        let (algorithm, key, iv) = parts(secrets)?;
        let key = UnboundKey::new(algorithm, key.as_ref()).map_err(|_| Error::EncryptError)?;
        let form = match suite {
            SupportedCipherSuite::Tls13(_) => Form::Tls13,
            SupportedCipherSuite::Tls12(suite) => Form::Tls12 {
                nonce: suite.aead_alg.key_block_shape().explicit_nonce_len,
            },
        };
        Ok(Self {
            key: LessSafeKey::new(key),
            iv,
            form,
            sequence,
        })
    }

    /// Appends a record with `bytes` bytes of content, which `fill` copies.
    #[inline]
    pub(super) fn seal(
        &mut self,
        kind: ContentType,
        bytes: usize,
        mut fill: impl FnMut(&mut [u8]),
        out: &mut Outbox,
    ) -> Result<(), Error> {
        let (before, behind) = match self.form {
            Form::Tls13 => (0, 1),
            Form::Tls12 { nonce } => (nonce, 0),
        };
        let length = HEADER + before + bytes + behind + TAG;
        let record = out.room(length);
        let (header, sealed) = record.split_at_mut(HEADER);
        let (explicit, sealed) = sealed.split_at_mut(before);
        let (content, tag) = sealed.split_at_mut(bytes + behind);
        fill(&mut content[..bytes]);
        let nonce = cipher::Nonce::new(&self.iv, self.sequence).0;
        let of_tls12;
        let authenticated = match self.form {
            Form::Tls13 => {
                content[bytes] = kind.into();
                header.copy_from_slice(&cipher::make_tls13_aad(content.len() + TAG));
                &*header
            }
            Form::Tls12 { .. } => {
                explicit.copy_from_slice(&nonce[nonce.len() - before..]);
                let [high, low] = ((before + bytes + TAG) as u16).to_be_bytes();
                header.copy_from_slice(&[kind.into(), VERSION[0], VERSION[1], high, low]);
                of_tls12 = cipher::make_tls12_aad(self.sequence, kind, ProtocolVersion::TLSv1_2, bytes);
                &of_tls12
            }
        };
        self.sequence += 1;
        let nonce = aead::Nonce::assume_unique_for_key(nonce);
        let sealed = self
            .key
            .seal_in_place_separate_tag(nonce, Aad::from(authenticated), content);
        tag.copy_from_slice(sealed.map_err(|_| Error::EncryptError)?.as_ref());
        out.appended(length);
        Ok(())
    }
}
