//! NBD among the front doors: its name, its addresses, and the URI for clients.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use blkmq_host::disk::Disk;
use blkmq_host::engine::Engine;
use blkmq_host::value::ConfigError;

use super::door::{self, Served};
use super::limits::Limits;
use super::settings;
use super::tls_files::TlsFiles;
use crate::client_settings::{Client, xml};
use crate::common::access;
use crate::common::{self, Access, AddressError, Common, OpenError, Place, Socket};
use crate::front_door::{self, Address, DaemonLimits, DiskName, FrontDoor, Given, Offer, Opened, ServeError};
use crate::handover::Handover;
use crate::keys::{Key, Keys};
use blkmq_tls::Mode;

/// The network block device protocol.
#[derive(Debug)]
pub struct Nbd;

impl FrontDoor for Nbd {
    fn name(&self) -> &'static str {
        "nbd"
    }

    fn help(&self) -> &'static str {
        "Serve all disks over NBD at ADDRESS: unix:PATH, tcp:HOST:PORT, systemd or systemd:NAME; may be given again"
    }

    fn keys(&self) -> &'static [&'static [Key]] {
        &[settings::KEYS, access::KEYS]
    }

    fn table_keys(&self) -> &'static [Key] {
        settings::TABLE_KEYS
    }

    fn parse_table(&self, table: &Keys, limits: &mut DaemonLimits) -> Result<(), ConfigError> {
        settings::table(table, limits).map(drop)
    }

    fn parse(&self, given: &Given<'_>) -> Result<Box<dyn Address>, AddressError> {
        let address = given.address.parse()?;
        Ok(Box::new(ConfiguredAddress {
            access: Access::parse(given.keys, &address)?,
            address,
            tls: TlsFiles::new(settings::tls(given.keys)?),
            handshake_deadline: settings::table(given.table, &mut DaemonLimits::default())?,
        }))
    }
}

/// An address, with its settings.
#[derive(Clone, Debug)]
pub(super) struct ConfiguredAddress {
    address: common::Address,
    access: Access,
    pub(super) tls: Arc<TlsFiles>,
    handshake_deadline: Option<Duration>,
}

impl fmt::Display for ConfiguredAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.address.fmt(f)
    }
}

impl Address for ConfiguredAddress {
    fn check_named(&self, disks: &[&str]) -> Result<(), ConfigError> {
        for allowed in &self.tls.clients {
            let mut named = allowed.disks.iter().flatten();
            if let Some(disk) = named.find(|disk| !disks.contains(&disk.as_str())) {
                return Err(ConfigError::Refused {
                    key: "tls_clients".to_owned(),
                    value: allowed.name.clone(),
                    why: format!("names disk {disk}, which is not there: add [disk.{disk}] or take it out"),
                });
            }
        }
        Ok(())
    }

    fn access(&self) -> Option<&Access> {
        Some(&self.access)
    }

    fn client_settings(&self, client: Client, disk: &Disk, _group: &str) -> Option<String> {
        let uri = match &self.address {
            common::Address::Unix(path) => self.uri(disk, &path.display().to_string(), true),
            common::Address::Tcp(at) if at.port() != 0 => self.uri(disk, &at.to_string(), false),
            common::Address::Localhost(port) if *port != 0 => {
                self.uri(disk, &format!("localhost:{port}"), false)
            }
            _ => return None,
        };
        match client {
            Client::Uri => Some(uri),
            Client::Qemu => Some(format!(
                "-drive file={},format=raw,if=virtio,cache=none",
                uri.replace(',', ",,")
            )),
            Client::Libvirt | Client::NbdClient => self.plain_settings(client, disk),
            Client::CloudHypervisor | Client::Firecracker | Client::Crosvm => None,
        }
    }

    fn reads(&self) -> Vec<PathBuf> {
        let files = [&self.tls.certificate, &self.tls.key, &self.tls.ca];
        files.into_iter().flatten().cloned().collect()
    }

    fn places(&self, _disks: &[DiskName<'_>]) -> Vec<Place> {
        Place::of_socket(&self.address)
    }

    fn check_places(&self, _disks: &[DiskName<'_>]) -> Result<(), OpenError> {
        common::check_socket(&self.address).map_err(|error| error.of(&format!("export {self}")))
    }

    fn check(&self) -> Result<(), ServeError> {
        let wrong = |error: door::ServeError| ServeError(error.into());
        let is_exposed = !self.tls.is_secure() && !self.tls.allow_insecure;
        match &self.address {
            common::Address::Tcp(at) if !at.ip().to_canonical().is_loopback() && is_exposed => {
                Err(wrong(door::ServeError::Exposed(self.to_string())))
            }
            _ => self
                .tls
                .read()
                .map(drop)
                .map_err(|error| ServeError(error.into())),
        }
    }

    fn open(&self, _disks: &[DiskName<'_>], handover: &Handover) -> Result<Vec<Box<dyn Opened>>, OpenError> {
        let opened = common::open(&self.address, handover)?.into_iter();
        self.access.apply(&self.address)?;
        let opened = opened.map(|socket| Listening {
            socket,
            at: self.clone(),
        });
        Ok(opened.map(|one| Box::new(one) as Box<dyn Opened>).collect())
    }
}

impl ConfiguredAddress {
    /// The URI of a disk at a unix socket's path, or at a host and port.
    fn uri(&self, disk: &Disk, place: &str, is_unix: bool) -> String {
        let nbd = match self.tls.mode {
            Mode::Require => "nbds",
            _ => "nbd",
        };
        let disk = escape(&disk.export);
        match is_unix {
            true => format!("{nbd}+unix:///{disk}?socket={}", escape(place)),
            // The mark of a zone begins an escape in a URI.
            false => format!("{nbd}://{}/{disk}", place.replace('%', "%25")),
        }
    }

    /// The words of the kernel's client, and libvirt's element, as far as the address needs no certificates.
    fn plain_settings(&self, client: Client, disk: &Disk) -> Option<String> {
        if self.tls.mode == Mode::Require {
            return None;
        }
        let (words, host) = match &self.address {
            common::Address::Unix(path) => {
                let path = path.display().to_string();
                (
                    format!("-unix {path}"),
                    format!("transport='unix' socket='{}'", xml(&path)),
                )
            }
            common::Address::Tcp(at) if at.port() != 0 => (
                format!("{} {}", at.ip(), at.port()),
                format!("name='{}' port='{}'", at.ip(), at.port()),
            ),
            _ => return None,
        };
        let export = &disk.export;
        // The kernel's sectors: others than the disk's would hide its partitions, and larger ones cut its end off. Versions
        // of the client differ in what they are unless it is said.
        let sectors = disk.block_size;
        Some(match client {
            Client::NbdClient if sectors > SECTOR_MAX => return None,
            Client::NbdClient => format!("nbd-client {words} -N {export} -C 4 -b {sectors} -t 30 /dev/nbd0"),
            _ => format!(
                "<disk type='network' device='disk'>\n  <driver name='qemu' type='raw' cache='none'/>\n  \
                 <source protocol='nbd' name='{}'>\n    <host {host}/>\n    <reconnect delay='60'/>\n  </source>\n  \
                 <target dev='vda' bus='virtio'/>\n</disk>",
                xml(export)
            ),
        })
    }
}

/// A socket of an address.
struct Listening {
    socket: Socket,
    at: ConfiguredAddress,
}

impl Opened for Listening {
    fn client_line(&self, disk: &Disk) -> Option<String> {
        Some(match &self.socket {
            Socket::Unix(..) => self.at.uri(disk, &self.socket.path(), true),
            Socket::Tcp(listener) => {
                let address = listener.local_addr();
                let address = address.map_or_else(|_| "?".to_owned(), |address| address.to_string());
                self.at.uri(disk, &address, false)
            }
        })
    }

    fn serve(
        self: Box<Self>,
        engine: &Engine,
        what: Offer<'_>,
        common: &Arc<Common>,
    ) -> Result<Box<dyn front_door::Served>, ServeError> {
        let mut limits = Limits::default();
        limits.handshake_deadline = self.at.handshake_deadline.unwrap_or(limits.handshake_deadline);
        let served = Served {
            socket: self.socket,
            disks: what.disks,
            limits,
            admitted: what.admitted,
            tls: self.at.tls,
        };
        match door::serve(engine, served, common) {
            Ok(served) => Ok(Box::new(served)),
            Err(error) => Err(ServeError(error.into())),
        }
    }
}

/// Escapes a path for the query of a URI, or an export's name for its path.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'/' | b'.' | b'-' | b'_' | b'~' => {
                escaped.push(byte.into())
            }
            _ => escaped.push_str(&format!("%{byte:02X}")),
        }
    }
    escaped
}

/// The largest sectors that the kernel's client can ask for.
const SECTOR_MAX: u32 = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uri_carries_odd_paths() {
        assert_eq!(escape("/run/a b&c.sock"), "/run/a%20b%26c.sock");
    }
}
