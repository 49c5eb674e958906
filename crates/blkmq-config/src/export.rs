//! The settings of an address at which disks are served: the front door, the disks, the number of
//! connections, and whether clients use TLS.

use blkmq_tls::Settings;

/// One address at which disks are served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportSpec {
    /// The front door, by its name.
    pub door: String,
    /// Where clients connect, in that front door's form.
    pub address: String,
    /// The names of the disks; `None` for all.
    pub disks: Option<Vec<String>>,
    /// Connections at a time. Default 4096.
    pub connections: Option<u32>,
    /// Connections of one group at a time. Default: its share.
    pub group_connections: Option<u32>,
    /// Whether clients use TLS, and which may connect. Default: no TLS.
    pub tls: Settings,
}

impl ExportSpec {
    /// All disks, and default limits of connections.
    pub fn new(door: &str, address: &str) -> Self {
        Self {
            door: door.to_owned(),
            address: address.to_owned(),
            disks: None,
            connections: None,
            group_connections: None,
            tls: Settings::default(),
        }
    }
}
