//! The interface of a front door, a protocol by which clients reach disks. Each is one entry of
//! [`FRONT_DOORS`]; others use nothing else of it. `blkmq-config` parses addresses with their keys; the
//! daemon opens them before the engine starts, and serves.

use std::any::Any;
use std::path::PathBuf;
use std::sync::Arc;

use blkmq_host::disk::Disk;
use blkmq_host::engine::Engine;
use blkmq_host::value::ConfigError;
use blkmq_tls::FileError;

use crate::client_settings::Client;
use crate::common::{Access, AddressLimits, Common, OpenError, Place};
use crate::handover::Handover;
use crate::keys::{Key, Keys, NO_KEYS};

pub use crate::common::AddressError;

/// A protocol by which clients reach disks.
pub trait FrontDoor: Sync {
    /// Its name: the key of its addresses in `[[export]]`, and the flag of the command, such as `nbd`.
    fn name(&self) -> &'static str;

    /// One line for people: what is served, and how an address is written.
    fn help(&self) -> &'static str;

    /// The keys of an address, beside those of every address, in lists: front doors may share one.
    fn keys(&self) -> &'static [&'static [Key]] {
        &[]
    }

    /// The keys of its table, which has its name. They hold for all of its addresses.
    fn table_keys(&self) -> &'static [Key] {
        &[]
    }

    /// Parses its table, which has no keys but those of the list. What holds for all connections of the
    /// daemon together goes into `limits`.
    ///
    /// # Errors
    /// The key, and what is allowed.
    fn parse_table(&self, _table: &Keys, _limits: &mut DaemonLimits) -> Result<(), ConfigError> {
        Ok(())
    }

    /// What its addresses take of the host beyond their [places](Address::places).
    fn reach(&self) -> Reach {
        Reach::Places
    }

    /// Parses an address.
    ///
    /// # Errors
    /// What is wrong with the address, and what is allowed.
    fn parse(&self, given: &Given<'_>) -> Result<Box<dyn Address>, AddressError>;

    /// Prepares what was left here for the next daemon, which gets it when this process has ended. The
    /// engine has ended. May block for a moment.
    fn leave(&self) {}
}

/// What a front door takes of the host, for a daemon that is confined to what it needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// Its places alone: it listens there.
    Places,
    /// It mounts, by itself or by a program that it starts.
    Mounts,
    /// It makes devices of the host, and serves them.
    Devices,
}

/// An address as it is configured.
#[derive(Clone, Copy, Debug)]
pub struct Given<'a> {
    /// The address.
    pub address: &'a str,
    /// Those of its keys that are its front door's: no others than [`FrontDoor::keys`].
    pub keys: &'a Keys,
    /// The table of its front door: no keys but [`FrontDoor::table_keys`].
    pub table: &'a Keys,
    /// Whether another daemon may take over.
    pub may_hand_over: bool,
}

impl<'a> Given<'a> {
    /// An address without keys, in a daemon of which no other takes over.
    pub fn new(address: &'a str) -> Self {
        Self {
            address,
            keys: &NO_KEYS,
            table: &NO_KEYS,
            may_hand_over: false,
        }
    }
}

/// A disk as patterns of addresses name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskName<'a> {
    /// Its name, for `{disk}`.
    pub disk: &'a str,
    /// The path of its group, for `{group}`.
    pub group: &'a str,
}

impl DiskName<'_> {
    /// Puts the names into a pattern. The path of a group becomes directories: `/a/vm1` is `a/vm1`.
    pub fn fill(&self, pattern: &str) -> String {
        let group = self.group.trim_start_matches('/');
        pattern.replace(GROUP, group).replace(DISK, self.disk)
    }
}

/// The names of disks alone.
pub(crate) fn names<'a>(disks: &[DiskName<'a>]) -> Vec<&'a str> {
    disks.iter().map(|disk| disk.disk).collect()
}

/// The placeholder for the disk's name in an address.
pub const DISK: &str = "{disk}";
/// The placeholder for the disk's group.
pub const GROUP: &str = "{group}";

/// What holds for all connections of the daemon together, as far as it is configured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DaemonLimits {
    /// Bytes of payload that the connections may hold together. Default: 1 GiB.
    pub memory_bytes: Option<u64>,
    /// Connections at a time. Default: as many as there are descriptors for.
    pub connections: Option<u32>,
}

/// An address that has been parsed, with its settings; nothing is open yet. It is displayed as people write it.
pub trait Address: Any + std::fmt::Debug + std::fmt::Display + Send + Sync {
    /// Returns whether each disk has a socket of its own there.
    fn is_per_disk(&self) -> bool {
        false
    }

    /// How many file descriptors each of its sockets or mounts may need, with its clients' where they are not counted as
    /// connections are, on so many reactors. Default: the socket that listens, and a client for which there is no room yet;
    /// or the channel of a mount, and its copy for a take-over.
    fn descriptors(&self, _reactors: usize) -> usize {
        2
    }

    /// Who may open its disks, if it listens at a unix socket.
    fn access(&self) -> Option<&Access> {
        None
    }

    /// The files that are read while it is served, such as keys.
    fn reads(&self) -> Vec<PathBuf> {
        Vec::new()
    }

    /// Returns whether the daemon connects to a unix socket there, instead of listening.
    fn connects(&self) -> bool {
        false
    }

    /// Checks, without opening anything, that these disks can be served there at the same time.
    ///
    /// # Errors
    /// The address has one place for several disks, and what to do.
    fn check_disks(&self, _disks: &[&str]) -> Result<(), OpenError> {
        Ok(())
    }

    /// Checks that the disks which its keys name are among those of the configuration.
    ///
    /// # Errors
    /// The key, the disk, and what to do.
    fn check_named(&self, _disks: &[&str]) -> Result<(), ConfigError> {
        Ok(())
    }

    /// What a client of this kind is told to reach a disk here; none if there are no such clients, or the address is only
    /// known while it is served.
    fn client_settings(&self, _client: Client, _disk: &Disk, _group: &str) -> Option<String> {
        None
    }

    /// What the address takes on this host for these disks. No two addresses may take the same.
    fn places(&self, disks: &[DiskName<'_>]) -> Vec<Place>;

    /// Checks, without opening anything, that the places could be had: their directories are there, and nothing else
    /// is at their paths. Who serves there now does not matter.
    ///
    /// # Errors
    /// The obstacle, and what to do.
    fn check_places(&self, _disks: &[DiskName<'_>]) -> Result<(), OpenError> {
        Ok(())
    }

    /// Checks, without opening anything, that the address can be served with its settings. Reads
    /// the files that they name.
    ///
    /// # Errors
    /// The obstacle, and what to do.
    fn check(&self) -> Result<(), ServeError> {
        Ok(())
    }

    /// Opens the address for these disks before the engine starts, so that an address that cannot
    /// be opened fails early; or takes the sockets that another daemon has handed over.
    ///
    /// # Errors
    /// The address cannot be opened.
    fn open(&self, disks: &[DiskName<'_>], handover: &Handover) -> Result<Vec<Box<dyn Opened>>, OpenError>;
}

/// An address that is open.
pub trait Opened {
    /// What a client needs to reach a disk here, if the disk is served here and that is known.
    fn client_line(&self, disk: &Disk) -> Option<String>;

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
    /// The address, with the settings that hold from now on.
    pub at: &'a dyn Address,
}

impl Offer<'_> {
    /// Its address, with the settings of the front door whose type it is.
    pub(crate) fn settings<T: Address>(&self) -> Option<&T> {
        let at: &dyn Any = self.at;
        at.downcast_ref()
    }
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

/// The names of all front doors there can be, also of those that this program is built without.
pub const NAMES: [&str; 4] = ["nbd", "vhost-user", "fuse", "ublk"];

/// Finds a front door by its name, in which `_` and `-` are the same.
pub fn find(name: &str) -> Option<&'static dyn FrontDoor> {
    FRONT_DOORS
        .iter()
        .copied()
        .find(|door| door.name() == name.replace('_', "-"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pattern_of_an_address_has_the_disk_and_its_group() {
        let vm1 = DiskName {
            disk: "vm1",
            group: "/customers/a",
        };
        assert_eq!(
            vm1.fill("unix:/run/{group}/{disk}.sock"),
            "unix:/run/customers/a/vm1.sock"
        );
        assert_eq!(vm1.fill("/run/{disk}-{disk}"), "/run/vm1-vm1");
    }

    #[test]
    fn every_front_door_is_among_the_names() {
        for door in FRONT_DOORS {
            assert!(NAMES.contains(&door.name()), "{}", door.name());
        }
    }

    #[test]
    fn front_doors_have_a_page_with_every_key() {
        for door in FRONT_DOORS {
            let pages = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/exports");
            let page = std::fs::read_to_string(format!("{pages}/{}.md", door.name())).unwrap();
            for key in door.keys().iter().copied().flatten().chain(door.table_keys()) {
                let named = format!("`{}`", key.name);
                let mut rows = page.lines().filter(|line| line.starts_with('|'));
                assert!(
                    rows.any(|row| row.contains(&named)),
                    "{}: {}",
                    door.name(),
                    key.name
                );
            }
        }
    }
}
