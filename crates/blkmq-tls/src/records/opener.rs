//! The key for received records. A record is opened by the library, in the buffer that it was received into.

use rustls::crypto::cipher::{InboundOpaqueMessage, InboundPlainMessage, MessageDecrypter};
use rustls::{ConnectionTrafficSecrets, ContentType, Error, ProtocolVersion, SupportedCipherSuite};

use super::parts;

/// A key for received records.
pub(super) struct Opener {
    decrypter: Box<dyn MessageDecrypter>,
    /// How many records the key has opened.
    pub(super) sequence: u64,
}

impl Opener {
    pub(super) fn new(
        suite: SupportedCipherSuite,
        (sequence, secrets): (u64, ConnectionTrafficSecrets),
    ) -> Result<Self, Error> {
        let (_, key, iv) = parts(secrets)?;
        let decrypter = match suite {
            SupportedCipherSuite::Tls13(suite) => suite.aead_alg.decrypter(key, iv),
            SupportedCipherSuite::Tls12(suite) => {
                // The rest of a nonce of AES is in each record.
                let fixed = suite.aead_alg.key_block_shape().fixed_iv_len;
                suite.aead_alg.decrypter(key, &iv.as_ref()[..fixed])
            }
        };
        Ok(Self { decrypter, sequence })
    }

    /// Opens the part of a record behind its header, which has `kind`, and removes the padding.
    pub(super) fn open<'a>(
        &mut self,
        kind: ContentType,
        sealed: &'a mut [u8],
    ) -> Result<InboundPlainMessage<'a>, Error> {
        // A number must not be used twice (RFC 8446, section 5.3). No peer can send 2^64 records by
        // one key.
        let next = self.sequence.checked_add(1);
        let next = next.ok_or_else(|| Error::General("a key has opened too many records".to_owned()))?;
        let message = InboundOpaqueMessage::new(kind, ProtocolVersion::TLSv1_2, sealed);
        let opened = self.decrypter.decrypt(message, self.sequence)?;
        self.sequence = next;
        Ok(opened)
    }
}
