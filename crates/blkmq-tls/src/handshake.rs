//! The handshake: it passes received records to the library, and appends the library's answers to the
//! outbox. `stream` has received the records. The result of a handshake is `records`, which has the keys,
//! and the names of the peer.

use rustls::Error;
use rustls::client::UnbufferedClientConnection;
use rustls::server::UnbufferedServerConnection;
use rustls::unbuffered::{ConnectionState, EncodeError, EncodeTlsData, UnbufferedStatus};

use crate::names;
use crate::outbox::Outbox;
use crate::records::{Keys, Records};

/// A handshake that is not over.
pub(crate) enum Handshake {
    Client(UnbufferedClientConnection),
    Server(UnbufferedServerConnection),
}

impl Handshake {
    /// Gives records to the library, and appends its answers. Returns how many bytes at the front
    /// the library no longer needs. The next call has to present the other bytes again, with those
    /// that follow them.
    ///
    /// # Errors
    /// The handshake has failed. The alert for the peer was appended.
    pub(crate) fn look_at(&mut self, input: &mut [u8], out: &mut Outbox) -> Result<usize, Error> {
        let mut start = 0;
        loop {
            let (discard, progress) = match self {
                Self::Client(tls) => one_step(tls.process_tls_records(&mut input[start..]), out),
                Self::Server(tls) => one_step(tls.process_tls_records(&mut input[start..]), out),
            };
            start += discard;
            match progress {
                Ok(Progress::Step) => {}
                Ok(Progress::Through) => return Ok(start),
                Err(error) => {
                    self.append_alert(out);
                    return Err(error);
                }
            }
        }
    }

    pub(crate) fn is_over(&self) -> bool {
        match self {
            Self::Client(tls) => !tls.is_handshaking(),
            Self::Server(tls) => !tls.is_handshaking(),
        }
    }

    /// Returns the result of a handshake that is over: records, and the peer's names.
    ///
    /// # Errors
    /// The library does not give its keys away, although the settings allow it.
    pub(crate) fn finish(self) -> Result<(Records, Vec<String>), Error> {
        let chain = match &self {
            Self::Client(tls) => tls.peer_certificates(),
            Self::Server(tls) => tls.peer_certificates(),
        };
        let names = chain.and_then(<[_]>::first).map(|first| names::of(first));
        let (secrets, keys) = match self {
            Self::Client(tls) => {
                let (secrets, keys) = tls.dangerous_into_kernel_connection()?;
                (secrets, Keys::Client(keys))
            }
            Self::Server(tls) => {
                let (secrets, keys) = tls.dangerous_into_kernel_connection()?;
                (secrets, Keys::Server(keys))
            }
        };
        Ok((Records::new(keys, secrets)?, names.unwrap_or_default()))
    }

    /// Appends the alert after an error, and nothing else: the library reads no record while it has
    /// something to send.
    fn append_alert(&mut self, out: &mut Outbox) {
        loop {
            let (_, progress) = match self {
                Self::Client(tls) if tls.wants_write() => one_step(tls.process_tls_records(&mut []), out),
                Self::Server(tls) if tls.wants_write() => one_step(tls.process_tls_records(&mut []), out),
                _ => return,
            };
            if !matches!(progress, Ok(Progress::Step)) {
                return;
            }
        }
    }
}

enum Progress {
    /// The library may have more to do with the same records.
    Step,
    /// The library waits for more records.
    Through,
}

fn one_step<Data>(
    status: UnbufferedStatus<'_, '_, Data>,
    out: &mut Outbox,
) -> (usize, Result<Progress, Error>) {
    let progress = status.state.and_then(|state| match state {
        ConnectionState::EncodeTlsData(answer) => encode(answer, out),
        ConnectionState::TransmitTlsData(appended) => {
            appended.done();
            Ok(Progress::Step)
        }
        ConnectionState::BlockedHandshake | ConnectionState::WriteTraffic(_) => Ok(Progress::Through),
        // The library gets no data before the handshake is over, and there is no early data.
        state => Err(Error::General(format!("{state:?} in a handshake"))),
    });
    (status.discard, progress)
}

fn encode<Data>(mut answer: EncodeTlsData<'_, Data>, out: &mut Outbox) -> Result<Progress, Error> {
    let encoded = match answer.encode(&mut []) {
        Err(EncodeError::InsufficientSize(size)) => answer.encode(out.room(size.required_size)),
        other => other,
    };
    match encoded {
        Ok(bytes) => {
            out.appended(bytes);
            Ok(Progress::Step)
        }
        Err(error) => Err(Error::General(error.to_string())),
    }
}
