//! Why a disk cannot be opened. The caller adds the disk's name; nothing here contains a part of a key, or
//! says which part of a key was wrong.

use std::io;

/// Why a disk with a LUKS header cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum LuksError {
    /// There is no header.
    #[error(
        "there is no LUKS header: format it by cryptsetup luksFormat, or name the file that has it by header="
    )]
    NoHeader,
    /// A header whose copies are both damaged, or that contradicts itself.
    #[error("its LUKS header is damaged: {0}; restore it from a backup (cryptsetup luksHeaderRestore)")]
    Damaged(String),
    /// The header asks for what is not supported.
    #[error("its LUKS header asks for {what}, which is not supported: {allowed}")]
    Unsupported {
        /// What it asks for.
        what: String,
        /// What is supported, or what to do.
        allowed: &'static str,
    },
    /// The header asks for more memory or time than is allowed.
    #[error("a key slot asks for {name} {value}, more than {max}: change it by cryptsetup luksConvertKey")]
    Limit {
        /// The parameter.
        name: &'static str,
        /// Its value.
        value: u64,
        /// The largest that is allowed.
        max: u64,
    },
    /// No key slot opens with this key.
    #[error("no key slot opens with this key")]
    WrongKey,
    /// The same, and slots that could not be tried: which, and why.
    #[error("no key slot opens with this key; not tried: {0}")]
    Untried(String),
    /// The header, or the area of a key slot, cannot be read.
    #[error("its LUKS header cannot be read: {0}")]
    Read(io::Error),
    /// There is no locked memory for a key.
    #[error("no locked memory for its key: {0}; raise LimitMEMLOCK (ulimit -l)")]
    Memory(io::Error),
}

impl LuksError {
    pub(crate) fn damaged(what: impl Into<String>) -> Self {
        Self::Damaged(what.into())
    }
}
