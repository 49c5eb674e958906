//! The places that addresses take on this host: paths, ports, devices. No two addresses may take the same one, which
//! is seen before any is opened. `front_door` names those of an address.

use std::fmt;
use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, AtFlags, CWD, accessat};

use super::address::Address;
use super::socket::{OpenError, loopbacks};

/// What an address takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// A path, with its directory as the system knows it.
    Path(PathBuf),
    /// A port of one address of this host, or of all.
    Tcp(SocketAddr),
    /// A name in the abstract namespace of unix sockets.
    Abstract(String),
    /// The sockets that systemd hands over: those of a name, or all.
    Systemd(Option<String>),
    /// A block device, by its number.
    Device(u32),
}

impl Place {
    /// A path, by which directory it is in.
    pub fn of_path(path: &Path) -> Self {
        let parent = directory_of(path).canonicalize();
        let known = parent.ok().zip(path.file_name());
        // A directory that is not there is said elsewhere.
        Self::Path(known.map_or_else(|| path.to_owned(), |(parent, name)| parent.join(name)))
    }

    /// What a socket takes; nothing if the system chooses its port.
    pub fn of_socket(address: &Address) -> Vec<Self> {
        let tcp = |at: SocketAddr| (at.port() != 0).then_some(Self::Tcp(at));
        match address {
            Address::Unix(path) => vec![Self::of_path(path)],
            Address::Abstract(name) => vec![Self::Abstract(name.clone())],
            Address::Tcp(at) => tcp(*at).into_iter().collect(),
            Address::Localhost(port) => loopbacks(*port).into_iter().filter_map(tcp).collect(),
            Address::Systemd(name) => vec![Self::Systemd(name.clone())],
        }
    }

    /// Returns whether only one of the two can be had at a time.
    pub fn is_in_the_way_of(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Tcp(one), Self::Tcp(other)) => {
                let is_all = one.ip().is_unspecified() || other.ip().is_unspecified();
                let is_same = one.ip() == other.ip() || is_all && one.is_ipv4() == other.is_ipv4();
                one.port() == other.port() && is_same
            }
            (Self::Systemd(one), Self::Systemd(other)) => one.is_none() || other.is_none() || one == other,
            // By their bytes: there may be a thousand of them.
            (Self::Path(one), Self::Path(other)) => one.as_os_str() == other.as_os_str(),
            _ => self == other,
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => path.display().fmt(f),
            Self::Tcp(at) => write!(f, "port {}", at.port()),
            Self::Abstract(name) => write!(f, "@{name}"),
            Self::Systemd(_) => f.write_str("what systemd hands over"),
            Self::Device(number) => write!(f, "device {number}"),
        }
    }
}

/// Checks, without opening it, that this process could listen at an address. Who listens there now does not matter.
///
/// # Errors
/// The obstacle, and what to do. The text does not name the address.
pub fn check_socket(address: &Address) -> Result<(), OpenError> {
    let Address::Unix(path) = address else {
        return Ok(());
    };
    check_directory(directory_of(path))?;
    match fs::symlink_metadata(path) {
        Ok(found) if !found.file_type().is_socket() => {
            let what = "there is something else than a socket: choose another path, or move it away";
            Err(OpenError::new(what))
        }
        _ => Ok(()),
    }
}

/// Checks that this process may make files in a directory.
///
/// # Errors
/// It is not there, or the process may not.
pub(crate) fn check_directory(directory: &Path) -> Result<(), OpenError> {
    let access = Access::WRITE_OK | Access::EXEC_OK;
    let missing = |error| OpenError::new("its directory cannot be found: make it").with_source(error);
    if !fs::metadata(directory).map_err(missing)?.is_dir() {
        let what = "what is to be its directory is none: choose another path";
        return Err(OpenError::new(what));
    }
    accessat(CWD, directory, access, AtFlags::EACCESS).map_err(|error| {
        let what =
            "this process may not make files in its directory: change its permissions, or choose another";
        OpenError::new(what).with_source(error.into())
    })
}

fn directory_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn place_is_taken_by_another_spelling_of_it_and_by_all_addresses_of_a_port() {
        let places = |text: &str| Place::of_socket(&text.parse().unwrap());
        for (one, other, is_taken) in [
            ("unix:/tmp/x", "unix:/tmp/../tmp/x", true),
            ("unix:x", "unix:./x", true),
            ("unix:x", "unix:y", false),
            ("tcp:127.0.0.1:9", "tcp:9", true),
            ("tcp:0.0.0.0:9", "tcp:9", true),
            ("tcp:127.0.0.2:9", "tcp:9", false),
            ("tcp:10", "tcp:9", false),
            ("tcp:0.0.0.0:9", "tcp:[::]:9", false),
            ("tcp:[::]:9", "tcp:[::1]:9", true),
            ("tcp:localhost:9", "tcp:[::1]:9", true),
            ("tcp:localhost:9", "tcp:9", true),
            ("unix:@x", "unix:@x", true),
            ("unix:@x", "unix:x", false),
            ("systemd", "systemd", true),
            ("systemd", "systemd:a", true),
            ("systemd:a", "systemd:b", false),
        ] {
            let mut one_of = places(one).into_iter();
            let found = one_of.any(|place| places(other).iter().any(|other| place.is_in_the_way_of(other)));
            assert_eq!(found, is_taken, "{one} {other}");
        }
        assert_eq!(Place::of_socket(&"tcp:0".parse().unwrap()), []);
    }
}
