//! LUKS, the format of encrypted disks that `cryptsetup` writes: its headers, the way from a passphrase to
//! the volume key, and the cipher of the sectors behind them. It reads headers and never writes one: slots
//! are managed by `cryptsetup`. Sockets, files and threads are the caller's; `blkmq-host` has the sectors
//! encrypted on their way, `blkmq` opens the disks.
//!
//! ```text
//!  bytes ─ Header::read ─► Header ─ unlock(passphrase) ─► VolumeKey ─ Xts::new ─► encrypt, decrypt
//!            (either copy)          key slot: KDF, area, anti-forensic merge, digest
//! ```
//! | module | what it has |
//! |---|---|
//! | [`header`] | the headers of LUKS1 and LUKS2: what is checked, what is refused by name |
//! | `slot` | one key slot: derivation, the area, the anti-forensic merge |
//! | `kdf` | PBKDF2 and Argon2 with bounds, and the hashes by name |
//! | [`xts`] | AES in XTS mode |
//! | [`secret`] | memory for keys: locked, not dumped, wiped |
//!
//! Sources: the *LUKS On-Disk Format Specification* 1.2.3 and the *LUKS2 On-Disk Format Specification* 1.1.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

mod error;
pub mod header;
mod kdf;
pub mod secret;
mod slot;
pub mod xts;

pub use error::LuksError;
pub use header::{Header, Payload, ReadAt};
pub use secret::Secret;
pub use slot::VolumeKey;
pub use xts::Xts;
