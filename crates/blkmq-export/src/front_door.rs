//! Decides what a front door is: a protocol by which clients reach disks. Each is one entry of [`FRONT_DOORS`], which is all that
//! others know of it: the daemon reads addresses, opens them before the engine starts, and serves.

use std::sync::Arc;
use std::time::Duration;

use blkmq_host::disk::Disk;
use blkmq_host::engine::Engine;
use blkmq_tls::Settings;

use crate::common::{AddressLimits, Common, OpenError};
use crate::handover::Handover;

pub use crate::common::AddressError;

/// A protocol by which clients reach disks.
pub trait FrontDoor: Sync {
    /// Its name: the key of its addresses in `[[export]]`, and the flag of the command, such as `nbd`.
    fn name(&self) -> &'static str;

    /// One line for people: what is served, and how an address is written.
    fn help(&self) -> &'static str;

    /// Says whether its clients can use TLS.
    fn has_tls(&self) -> bool {
        false
    }

    /// Reads an address.
    ///
    /// # Errors
    /// What is wrong with it, and what is allowed.
    fn parse(&self, text: &str) -> Result<Box<dyn Address>, AddressError>;
}

/// An address that has been read; nothing is open yet. It is shown as people write it.
pub trait Address: std::fmt::Debug + std::fmt::Display {
    /// Says whether each disk has a socket of its own there.
    fn is_per_disk(&self) -> bool {
        false
    }

    /// Checks, as far as can be without opening anything, that it can be served so. Reads the files of TLS.
    ///
    /// # Errors
    /// What is in the way, and what to do.
    fn check(&self, _tls: &Settings) -> Result<(), ServeError> {
        Ok(())
    }

    /// Opens it for these disks, so that an address that cannot be had costs no start of the engine; or takes what another daemon
    /// has handed over.
    ///
    /// # Errors
    /// If it cannot be had.
    fn open(&self, disks: &[&str], handover: &Handover) -> Result<Vec<Box<dyn Opened>>, OpenError>;
}

/// Where clients come to.
pub trait Opened {
    /// What a client is given to reach a disk, if it is reached there and that is known.
    fn client_line(&self, disk: &str, tls: &Settings) -> Option<String>;

    /// Serves disks there until the engine ends, or the address is closed.
    ///
    /// # Errors
    /// The limit that is out of its range, or the disk that cannot be offered, with the reason.
    fn serve(
        self: Box<Self>,
        engine: &Engine,
        what: Offer<'_>,
        common: &Arc<Common>,
    ) -> Result<Box<dyn Served>, ServeError>;
}

/// An address that is served.
pub trait Served: Send + Sync {
    /// The only disk that can be reached there, where each has a socket of its own.
    fn disk(&self) -> Option<&str> {
        None
    }

    /// What a client is given to reach its disk, where that is not known before it is served.
    fn client_line(&self) -> Option<String> {
        None
    }

    /// The engine's disks are these now, or what is served of them has changed: who comes from here on finds that. Those who are
    /// there keep what they have.
    ///
    /// # Errors
    /// The disk that cannot be offered, with the reason; what was offered before is offered on then.
    fn offer(&self, disks: &[Disk], what: Offer<'_>) -> Result<(), ServeError>;

    /// Reads its files again, if it has some. Says whether it has. Who comes from here on finds what they hold now.
    ///
    /// # Errors
    /// The file that cannot be used, with the reason; what was read before holds on then.
    fn refresh(&self) -> Result<bool, ServeError> {
        Ok(false)
    }

    /// Lets nobody in any more. Those who are there stay until they leave. Blocks until the socket is closed.
    fn close(&self);
}

/// What is served at an address.
#[derive(Clone, Debug)]
pub struct Offer<'a> {
    /// The disks, by name; none for all that no mapped disk lies on.
    pub disks: Option<&'a [String]>,
    /// How many connections there may be.
    pub admitted: AddressLimits,
    /// Whether clients use TLS, and who may come.
    pub tls: &'a Settings,
    /// How long a client may take to begin. Default: the front door's.
    pub handshake_deadline: Option<Duration>,
    /// Whether FUSE goes over io_uring. Default: if the kernel has it switched on.
    pub fuse_io_uring: Option<bool>,
}

/// Why disks cannot be served at an address.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct ServeError(#[from] pub Box<dyn std::error::Error + Send + Sync>);

/// The front doors that there are.
pub static FRONT_DOORS: &[&dyn FrontDoor] = &[
    #[cfg(feature = "nbd")]
    &crate::nbd::Nbd,
    #[cfg(feature = "vhost-user")]
    &crate::vhost_user::VhostUser,
    #[cfg(feature = "fuse")]
    &crate::fuse::Fuse,
    #[cfg(feature = "ublk")]
    &crate::ublk::Ublk,
];

/// Finds a front door by its name, in which `_` is as good as `-`.
pub fn find(name: &str) -> Option<&'static dyn FrontDoor> {
    FRONT_DOORS
        .iter()
        .copied()
        .find(|door| door.name() == name.replace('_', "-"))
}
