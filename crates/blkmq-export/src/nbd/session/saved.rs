//! What another daemon has to know of a session to go on with it: what was negotiated, up to the last byte that was taken. Its bytes
//! are `saved_codec`'s; what was not taken yet, and what was not sent, is the connection's.

use blkmq_nbd::codec::handshake::{OptionCode, SessionName};
use blkmq_nbd::codec::option_reply::ReplyKind;
use blkmq_nbd::codec::request::RequestHeader;
use blkmq_nbd::codec::{HeaderStyle, TransmissionFlags};

/// A session, between two messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavedSession {
    /// Which headers were agreed on.
    pub style: HeaderStyle,
    /// What the client calls the session.
    pub name: Option<SessionName>,
    /// How far it is.
    pub phase: SavedPhase,
}

/// How far a session is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SavedPhase {
    /// No export is selected.
    Negotiation {
        /// What comes next.
        state: SavedState,
        /// The client expects zeroes behind an export's flags.
        is_padded: bool,
        /// Options it has sent.
        options: u32,
        /// The export whose allocation context it has selected.
        context: Option<String>,
    },
    /// An export is selected.
    Transmission {
        /// Its name.
        export: String,
        /// Its size, in bytes, as the client was told.
        size_bytes: u64,
        /// Its smallest unit, in bytes, as the client was told.
        block_min_bytes: u32,
        /// What it can do, as the client was told.
        flags: TransmissionFlags,
        /// Block status requests are in order.
        block_status: bool,
        /// A refused request of whose payload so many bytes are still thrown away.
        drain: Option<(u64, RequestHeader)>,
    },
}

/// What comes next in the negotiation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SavedState {
    /// The client's flags.
    Flags,
    /// An option.
    Options,
    /// The rest of an option's data, which is thrown away, and the option refused.
    Skipping {
        /// Bytes.
        left: u32,
        /// Which option.
        option: OptionCode,
        /// How it is refused.
        kind: ReplyKind,
    },
}

/// Why a session cannot go on here.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RestoreError {
    /// The export is not offered.
    #[error("export {0} is not served at this address")]
    NoExport(String),
    /// The client was told otherwise.
    #[error("export {export}: its client was told of {what} {told}, and it is {found} here")]
    Differs {
        /// The export.
        export: String,
        /// What of it.
        what: &'static str,
        /// As the client was told.
        told: u64,
        /// As it is.
        found: u64,
    },
    /// The client was told that it can do more.
    #[error("export {0}: it cannot do all that its client was told (transmission flags {1:#x}, here {2:#x})")]
    Lacks(String, u16, u16),
}

/// What is said of an option whose rest came to another daemon than its beginning.
pub(super) const REFUSED_BEFORE: &str = "this option is refused";
