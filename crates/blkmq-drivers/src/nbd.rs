//! The NBD driver: a disk on an NBD server, reached over several connections, which are made again when
//! they are lost.
//!
//! [`NbdDisk::open`] connects and learns the export's properties, [`NbdDevice`] divides the
//! connections among hardware contexts, and each context turns requests into the protocol's.
//! [`blkmq_nbd`] defines the messages.
//!
//! ```text
//!  issue ─► slots ─► connection: headers ─► sendmsg          ring: readable ─► recvmsg ─► replies ─► slots ─► reap
//!             ▲ held                                                              │ lost
//!             └────────── connected again ◄── reconnect (thread) ◄────────────────────┘
//! ```

mod config;
mod connection;
mod device;
mod dial;
mod disk;
mod driver;
mod fences;
mod hctx;
mod ledger;
mod reconnect;
mod slots;
mod sys;
mod wire;

pub use config::NbdConfig;
pub use device::NbdDevice;
pub use dial::DialError;
pub use disk::{NbdDisk, NbdError};
pub use driver::DRIVER;
pub use ledger::Ledger;
