//! The keys of NBD: the TLS of an address, and the table `[nbd]`. `front_door` reads them for the addresses.

use std::time::Duration;

use blkmq_host::value::{self, ConfigError};
use blkmq_tls::Settings;
use blkmq_tls::settings::Allowed;

use crate::common::{AddressError, deadline};
use crate::front_door::DaemonLimits;
use crate::keys::{Flag, Key, Keys, Takes};

/// The keys of an address.
pub(super) const KEYS: &[Key] = &[
    Key {
        name: "tls",
        range: "require, allow or off",
        default: "off",
        help: "Whether clients of --nbd use TLS",
        flag: Some(Flag {
            name: "tls",
            takes: Takes::Value("MODE"),
        }),
    },
    Key {
        name: "tls_certificate",
        range: "a file (PEM)",
        default: "",
        help: "The server's certificate, then the chain to its authority",
        flag: Some(Flag {
            name: "tls-certificate",
            takes: Takes::Value("FILE"),
        }),
    },
    Key {
        name: "tls_key",
        range: "a file (PEM)",
        default: "",
        help: "The certificate's key",
        flag: Some(Flag {
            name: "tls-key",
            takes: Takes::Value("FILE"),
        }),
    },
    Key {
        name: "tls_ca",
        range: "a file (PEM)",
        default: "",
        help: "The authorities of clients' certificates; if they are given, every client needs a certificate",
        flag: Some(Flag {
            name: "tls-ca",
            takes: Takes::Value("FILE"),
        }),
    },
    Key {
        name: "tls_clients",
        range: "NAME for all disks, NAME=DISK+DISK for some",
        default: "",
        help: "Admit clients with NAME in their certificate",
        flag: Some(Flag {
            name: "tls-client",
            takes: Takes::Values("NAME"),
        }),
    },
    Key {
        name: "allow_tls12",
        range: "on or off",
        default: "off",
        help: "Admit clients that have TLS 1.2 at most, such as Debian 12's nbd-client, with its safe ciphers",
        flag: Some(Flag {
            name: "allow-tls12",
            takes: Takes::Nothing,
        }),
    },
    Key {
        name: "allow_insecure",
        range: "on or off",
        default: "off",
        help: "Admit clients of other hosts without TLS at tcp:HOST:PORT, for networks that only storage uses",
        flag: Some(Flag {
            name: "insecure",
            takes: Takes::Nothing,
        }),
    },
];

/// The keys of `[nbd]`.
pub(super) const TABLE_KEYS: &[Key] = &[
    Key {
        name: "memory",
        range: "32M to 16T",
        default: "1G",
        help: "Memory for the payload of all connections together",
        flag: None,
    },
    Key {
        name: "connections",
        range: "1 and more",
        default: "as many as file descriptors allow",
        help: "Connections of all addresses at a time",
        flag: None,
    },
    deadline::key("Time from connecting to the selection of a disk"),
];

/// Parses the TLS settings of an address.
pub(super) fn tls(keys: &Keys) -> Result<Settings, AddressError> {
    let wrong = |error: &dyn ToString| AddressError(error.to_string());
    let mode = keys.text("tls")?.map(str::parse).transpose();
    let clients = keys.list("tls_clients")?;
    if clients.is_some_and(<[String]>::is_empty) {
        return Err(AddressError(
            "tls_clients=[] rejected: name the clients that may connect, or leave the key out, and every client with a certificate may"
                .to_owned(),
        ));
    }
    let clients = clients.into_iter().flatten().map(|text| text.parse());
    let clients: Result<Vec<Allowed>, _> = clients.collect();
    let path = |key| Ok::<_, ConfigError>(keys.text(key)?.map(Into::into));
    let settings = Settings {
        mode: mode.map_err(|error| wrong(&error))?.unwrap_or_default(),
        certificate: path("tls_certificate")?,
        key: path("tls_key")?,
        ca: path("tls_ca")?,
        clients: clients.map_err(|error| wrong(&error))?,
        allow_tls12: keys.switch("allow_tls12")?,
        allow_insecure: keys.switch("allow_insecure")?,
    };
    settings.check().map_err(|error| wrong(&error))?;
    Ok(settings)
}

/// Parses `[nbd]`. Returns the handshake's deadline.
pub(super) fn table(table: &Keys, limits: &mut DaemonLimits) -> Result<Option<Duration>, ConfigError> {
    if let Some(text) = table.text("memory")? {
        let allowed = "at least 32M, since a client may send as much in one request";
        let bytes = value::size_from("memory", text, MEMORY_MIN, allowed)?;
        if bytes > MEMORY_MAX {
            return value::bad("memory", text, "at most 16T");
        }
        limits.memory_bytes = Some(bytes);
    }
    if let Some(text) = table.text("connections")? {
        let range = 1..=u64::from(u32::MAX);
        let number = value::whole("connections", text, range, "at least 1, or left out")?;
        limits.connections = Some(number);
    }
    deadline::parse(table)
}

/// The longest payload of a request, in bytes.
const MEMORY_MIN: u64 = 32 << 20;
/// More than a host has, and small enough that sums of it do not overflow.
const MEMORY_MAX: u64 = 16 << 40;
