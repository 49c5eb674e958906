//! The state with which another daemon continues a session: what was negotiated, up to the last byte that was
//! taken. `nbd::saved` defines its bytes; the connection saves what was not taken yet and what was not sent.

use blkmq_nbd::codec::handshake::{OptionCode, SessionName};
use blkmq_nbd::codec::option_reply::ReplyKind;
use blkmq_nbd::codec::request::RequestHeader;
use blkmq_nbd::codec::{HeaderStyle, TransmissionFlags};

use super::contexts::Contexts;

/// A session, between two messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavedSession {
    /// Which headers were negotiated.
    pub style: HeaderStyle,
    /// The client's name for the session.
    pub name: Option<SessionName>,
    /// How far it is.
    pub phase: SavedPhase,
}

impl SavedSession {
    /// Returns whether its client has selected a bitmap.
    pub(in crate::nbd) fn has_bitmaps(&self) -> bool {
        let contexts = match &self.phase {
            SavedPhase::Negotiation { context, .. } => context.as_ref().map(|(_, contexts)| contexts),
            SavedPhase::Transmission { contexts, .. } => Some(contexts),
        };
        contexts.is_some_and(|contexts| !contexts.bitmaps.is_empty())
    }
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
        /// The export whose contexts it has selected, and which.
        context: Option<(String, Contexts)>,
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
        /// What replies to block status requests have.
        contexts: Contexts,
        /// A refused request of whose payload this number of bytes is still to be discarded.
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
    /// The rest of an option's data, which is discarded, and then the option is refused.
    Skipping {
        /// Bytes.
        left: u32,
        /// Which option.
        option: OptionCode,
        /// How it is refused.
        kind: ReplyKind,
    },
}

/// Why a session cannot continue here.
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
        /// The property.
        what: &'static str,
        /// The value that the client was told.
        told: u64,
        /// The value here.
        found: u64,
    },
    /// The client was told that the export can do more.
    #[error("export {0}: it cannot do all that its client was told (transmission flags {1:#x}, here {2:#x})")]
    Lacks(String, u16, u16),
}

/// The message for an option of which an earlier daemon took the beginning.
pub(super) const REFUSED_BEFORE: &str = "this option is refused";
