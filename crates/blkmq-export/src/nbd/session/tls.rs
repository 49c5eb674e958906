//! Decides what a client may ask for before TLS has been started, and after. `negotiation` asks it for every option.

use blkmq_nbd::codec::handshake::{OptionCode, OptionHeader};
use blkmq_nbd::codec::option_reply::ReplyKind;
use blkmq_tls::Mode;

/// How a session stands to TLS.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Tls {
    /// There is none here.
    #[default]
    Off,
    /// Clients may start it.
    Offered,
    /// Clients must start it.
    Required,
    /// `STARTTLS` was granted: nothing is taken before the handshake has ended.
    Starting,
    /// What comes is what the client has sent, and nobody else.
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
    /// Whether an option is refused, whatever else is said of it. `EXPORT_NAME`, which has no error, is judged elsewhere.
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
