//! Decides how NBD appears among the front doors: its name, its addresses, and the URI for clients.

use std::sync::Arc;

use blkmq_host::disk::Disk;
use blkmq_host::engine::Engine;

use super::door::{self, Served};
use super::limits::Limits;
use crate::common::{self, AddressError, Common, OpenError, Place, Socket};
use crate::front_door::{self, Address, FrontDoor, Offer, Opened, ServeError};
use crate::handover::Handover;
use blkmq_tls::{Mode, Server, Settings};

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

    fn has_tls(&self) -> bool {
        true
    }

    fn parse(&self, text: &str) -> Result<Box<dyn Address>, AddressError> {
        Ok(Box::new(text.parse::<common::Address>()?))
    }
}

impl Address for common::Address {
    fn places(&self, _disks: &[&str]) -> Vec<Place> {
        Place::of_socket(self)
    }

    fn check_places(&self, _disks: &[&str]) -> Result<(), OpenError> {
        common::check_socket(self).map_err(|error| error.of(&format!("export {self}")))
    }

    fn check(&self, tls: &Settings) -> Result<(), ServeError> {
        let wrong = |error: door::ServeError| ServeError(error.into());
        match self {
            Self::Tcp(at)
                if !at.ip().to_canonical().is_loopback() && !tls.is_secure() && !tls.allow_insecure =>
            {
                Err(wrong(door::ServeError::Exposed(self.to_string())))
            }
            _ => Server::load(tls)
                .map(drop)
                .map_err(|error| ServeError(error.into())),
        }
    }

    fn open(&self, _disks: &[&str], handover: &Handover) -> Result<Vec<Box<dyn Opened>>, OpenError> {
        let opened = common::open(self, handover)?.into_iter();
        Ok(opened.map(|socket| Box::new(socket) as Box<dyn Opened>).collect())
    }
}

impl Opened for Socket {
    fn client_line(&self, disk: &Disk, tls: &Settings) -> Option<String> {
        let disk = escape(&disk.export);
        let nbd = if tls.mode == Mode::Require { "nbds" } else { "nbd" };
        Some(match self {
            Self::Unix(..) => {
                let path = escape(&self.path());
                format!("{nbd}+unix:///{disk}?socket={path}")
            }
            Self::Tcp(listener) => {
                let address = listener
                    .local_addr()
                    .map_or_else(|_| "?".to_owned(), |address| address.to_string());
                // The mark of a zone begins an escape in a URI.
                let address = address.replace('%', "%25");
                format!("{nbd}://{address}/{disk}")
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
        limits.handshake_deadline = what.handshake_deadline.unwrap_or(limits.handshake_deadline);
        let served = Served {
            socket: *self,
            disks: what.disks,
            limits,
            admitted: what.admitted,
            tls: what.tls,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uri_carries_odd_paths() {
        assert_eq!(escape("/run/a b&c.sock"), "/run/a%20b%26c.sock");
    }
}
