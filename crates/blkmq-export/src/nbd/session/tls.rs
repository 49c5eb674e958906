//! The state of TLS in a negotiation: what a client may ask for before TLS is started, and after.
//! `negotiation` asks for every option.

use blkmq_nbd::codec::handshake::{OptionCode, OptionHeader};
use blkmq_nbd::codec::option_reply::ReplyKind;
use blkmq_tls::Mode;

/// The state of TLS in a session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Tls {
    /// There is no TLS here.
    #[default]
    Off,
    /// Clients may start it.
    Offered,
    /// Clients must start it.
    Required,
    /// `STARTTLS` was granted: nothing is taken before the handshake has ended.
    Starting,
    /// All input now comes from the client and from nobody else.
    Started,
}

impl From<Mode> for Tls {
    fn from(mode: Mode) -> Self {
        match mode {
            Mode::Off => Self::Off,
            Mode::Allow => Self::Offered,
            Mode::Require => Self::Required,
        }
    }
}

impl Tls {
    /// The refusal of an option for lack of TLS. `EXPORT_NAME`, which has no error reply, is judged
    /// elsewhere.
    pub(super) fn refusal(self, header: &OptionHeader) -> Option<(ReplyKind, &'static str)> {
        match (header.code, self) {
            (OptionCode::STARTTLS, Self::Off) => Some((
                ReplyKind::ERR_POLICY,
                "this server offers no TLS: continue without, or use a tunnel",
            )),
            (OptionCode::STARTTLS, Self::Started) => Some((ReplyKind::ERR_INVALID, "TLS is started already")),
            (OptionCode::STARTTLS, _) if header.data_bytes > 0 => {
                Some((ReplyKind::ERR_INVALID, "this option has no data"))
            }
            (OptionCode::STARTTLS, _) => None,
            (_, Self::Required) => Some((
                ReplyKind::ERR_TLS_REQD,
                "this server wants TLS: STARTTLS comes before everything else",
            )),
            _ => None,
        }
    }
}
