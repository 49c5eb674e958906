//! Decides what a front door is: a protocol by which clients reach disks. Each is one entry of
//! [`FRONT_DOORS`]; others use nothing else of it. The daemon parses addresses, opens them before
//! the engine starts, and serves.

use std::sync::Arc;
use std::time::Duration;

use blkmq_host::disk::Disk;
use blkmq_host::engine::Engine;
use blkmq_tls::{FileError, Settings};

use crate::common::{AddressLimits, Common, OpenError, Place};
use crate::handover::Handover;

pub use crate::common::AddressError;

/// A protocol by which clients reach disks.
pub trait FrontDoor: Sync {
    /// Its name: the key of its addresses in `[[export]]`, and the flag of the command, such as `nbd`.
    fn name(&self) -> &'static str;

    /// One line for people: what is served, and how an address is written.
    fn help(&self) -> &'static str;

    /// Returns whether its clients can use TLS.
    fn has_tls(&self) -> bool {
        false
    }

    /// Parses an address.
    ///
    /// # Errors
    /// What is wrong with the address, and what is allowed.
    fn parse(&self, text: &str) -> Result<Box<dyn Address>, AddressError>;

    /// Prepares what was left here for the next daemon, which gets it when this process has ended. The
    /// engine has ended. May block for a moment.
    fn leave(&self) {}
}

/// An address that has been parsed; nothing is open yet. It is displayed as people write it.
pub trait Address: std::fmt::Debug + std::fmt::Display {
    /// Returns whether each disk has a socket of its own there.
    fn is_per_disk(&self) -> bool {
        false
    }

    /// Checks, without opening anything, that these disks can be served there at the same time.
    ///
    /// # Errors
    /// The address has one place for several disks, and what to do.
    fn check_disks(&self, _disks: &[&str]) -> Result<(), OpenError> {
        Ok(())
    }

    /// What the address takes on this host for these disks. No two addresses may take the same.
    fn places(&self, disks: &[&str]) -> Vec<Place>;

    /// Checks, without opening anything, that the places could be had: their directories are there, and nothing else
    /// is at their paths. Who serves there now does not matter.
    ///
    /// # Errors
    /// The obstacle, and what to do.
    fn check_places(&self, _disks: &[&str]) -> Result<(), OpenError> {
        Ok(())
    }

    /// Checks, without opening anything, that the address can be served with these settings. Reads
    /// the TLS files.
    ///
    /// # Errors
    /// The obstacle, and what to do.
    fn check(&self, _tls: &Settings) -> Result<(), ServeError> {
        Ok(())
    }

    /// Opens the address for these disks before the engine starts, so that an address that cannot
    /// be opened fails early; or takes the sockets that another daemon has handed over.
    ///
    /// # Errors
    /// The address cannot be opened.
    fn open(&self, disks: &[&str], handover: &Handover) -> Result<Vec<Box<dyn Opened>>, OpenError>;
}

/// An address that is open.
pub trait Opened {
    /// What a client needs to reach a disk here, if the disk is served here and that is known.
    fn client_line(&self, disk: &Disk, tls: &Settings) -> Option<String>;

    /// Serves disks here until the engine ends, or the address is closed.
    ///
    /// # Errors
    /// A limit is out of its range, or a disk cannot be offered, with the reason.
    fn serve(
        self: Box<Self>,
        engine: &Engine,
        what: Offer<'_>,
        common: &Arc<Common>,
    ) -> Result<Box<dyn Served>, ServeError>;
}

/// An address that is served.
pub trait Served: Send + Sync {
    /// The only disk that can be reached here, where each disk has a socket of its own.
    fn disk(&self) -> Option<&str> {
        None
    }

    /// What a client needs to reach its disk, where that is not known before it is served.
    fn client_line(&self) -> Option<String> {
        None
    }

    /// Reports that the engine's disks, or what is served of them, have changed. New clients find
    /// the change; present clients keep what they have.
    ///
    /// # Errors
    /// A disk cannot be offered, with the reason; the earlier offer stays.
    fn offer(&self, disks: &[Disk], what: Offer<'_>) -> Result<(), ServeError>;

    /// Reads the address's files again, if it has any. Returns whether it has. New clients find the
    /// new contents.
    ///
    /// # Errors
    /// A file cannot be used, with the reason; the earlier contents stay.
    fn refresh(&self) -> Result<bool, ServeError> {
        Ok(false)
    }

    /// Admits nobody any more. Present clients stay until they leave. Blocks until the socket is
    /// closed.
    fn close(&self);
}

/// What is served at an address.
#[derive(Clone, Debug)]
pub struct Offer<'a> {
    /// The names of the disks; `None` for all disks that no mapped disk lies on.
    pub disks: Option<&'a [String]>,
    /// How many connections are admitted.
    pub admitted: AddressLimits,
    /// Whether clients use TLS, and which may connect.
    pub tls: &'a Settings,
    /// How long a client may take to begin. Default: the front door's.
    pub handshake_deadline: Option<Duration>,
    /// Whether FUSE uses io_uring. Default: if it is enabled in the kernel.
    pub fuse_io_uring: Option<bool>,
}

/// Why disks cannot be served at an address.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct ServeError(#[from] pub Box<dyn std::error::Error + Send + Sync>);

impl ServeError {
    /// Returns whether nothing but the time is in the way: a certificate has expired, is not valid yet, or the clock
    /// is wrong.
    pub fn is_of_time(&self) -> bool {
        self.0
            .downcast_ref::<FileError>()
            .is_some_and(FileError::is_of_time)
    }
}

/// All front doors.
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

/// Finds a front door by its name, in which `_` and `-` are the same.
pub fn find(name: &str) -> Option<&'static dyn FrontDoor> {
    FRONT_DOORS
        .iter()
        .copied()
        .find(|door| door.name() == name.replace('_', "-"))
}
