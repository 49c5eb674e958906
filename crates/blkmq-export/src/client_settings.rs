//! What each kind of client is told to reach a disk: words of a command line, a request's body, an element of libvirt's.
//! Front doors write them for their addresses; `blkmq ctl show` prints them on request.

use std::fmt;

/// A kind of client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Client {
    /// QEMU's words.
    Qemu,
    /// An element of a domain of libvirt.
    Libvirt,
    /// Cloud Hypervisor's words.
    CloudHypervisor,
    /// A request to Firecracker's socket.
    Firecracker,
    /// crosvm's words.
    Crosvm,
    /// The kernel's client of NBD.
    NbdClient,
    /// What tools of NBD take: `qemu-img`, `nbdinfo`, fio.
    Uri,
}

impl Client {
    /// All kinds.
    pub const ALL: [Self; 7] = [
        Self::Qemu,
        Self::Libvirt,
        Self::CloudHypervisor,
        Self::Firecracker,
        Self::Crosvm,
        Self::NbdClient,
        Self::Uri,
    ];

    /// Its name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Qemu => "qemu",
            Self::Libvirt => "libvirt",
            Self::CloudHypervisor => "cloud-hypervisor",
            Self::Firecracker => "firecracker",
            Self::Crosvm => "crosvm",
            Self::NbdClient => "nbd-client",
            Self::Uri => "uri",
        }
    }

    /// Finds a kind by its name.
    pub fn by_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|client| client.name() == name)
    }
}

impl fmt::Display for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Escapes a text for an attribute of XML between apostrophes.
#[cfg(any(feature = "nbd", feature = "vhost-user"))]
pub(crate) fn xml(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '\'' => escaped.push_str("&apos;"),
            c => escaped.push(c),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn client_is_found_by_its_name_alone() {
        for client in Client::ALL {
            assert_eq!(Client::by_name(client.name()), Some(client));
        }
        assert_eq!(Client::by_name("vmware"), None);
    }

    #[test]
    fn attribute_of_xml_holds_odd_paths() {
        assert_eq!(xml("/run/a&b<'c\".sock"), "/run/a&amp;b&lt;&apos;c\".sock");
    }
}
