//! Who may open the disks at a unix socket: the owner and the mode of its path, and the users whose connections are
//! accepted, whatever the modes on the way to it allow. Front doors that listen share the keys; `listener` asks.

use std::os::fd::AsFd;

use blkmq_host::value::{self, ConfigError};

use super::accounts;
use super::address::Address;
use super::credentials::Credentials;
use super::path_rights::PathRights;
use super::socket::OpenError;
use crate::keys::{Key, Keys};

/// The keys of an address at a unix socket.
pub(crate) const KEYS: &[Key] = &[
    key("owner", "a user", "the daemon's", "Owner of the socket"),
    key("group", "a group", "the daemon's", "Group of the socket"),
    key(
        "mode",
        "0600 to 0666",
        "0600; 0660 with group",
        "Mode of the socket",
    ),
    key(
        "allow_uid",
        "users",
        "all",
        "Users who may connect, by name or number",
    ),
    key("allow_gid", "groups", "all", "Groups whose members may connect"),
];

/// The settings of an address.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Access {
    owner: Option<u32>,
    group: Option<u32>,
    mode: Option<u32>,
    /// Who may connect.
    pub allowed: Allowed,
}

/// Who may connect to a unix socket: everybody, or the listed ones, root, and the daemon's user.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Allowed {
    /// Users and groups, by their numbers.
    listed: Option<(Vec<u32>, Vec<u32>)>,
}

impl Access {
    /// Parses the keys, and looks names up on this host.
    ///
    /// # Errors
    /// A key is invalid or names nobody, or the address is no unix socket.
    pub(crate) fn parse(keys: &Keys, address: &Address) -> Result<Self, ConfigError> {
        let given = KEYS.iter().find(|key| keys.names().any(|name| name == key.name));
        if let (Some(key), Address::Tcp(_) | Address::Localhost(_)) = (given, address) {
            let value = keys.shown(key.name).unwrap_or_default();
            return value::bad(key.name, &value, "at a unix socket: TCP does not tell users");
        }
        let one = |key, find: Find| keys.text(key)?.map(|name| number(key, name, find)).transpose();
        let all = |key, find: Find| {
            let named = keys.list(key)?;
            named
                .map(|all| all.iter().map(|name| number(key, name, find)).collect())
                .transpose()
        };
        let users: Option<Vec<u32>> = all("allow_uid", accounts::user)?;
        let groups: Option<Vec<u32>> = all("allow_gid", accounts::group)?;
        // An empty list is one, too: of nobody.
        let is_listed = users.is_some() || groups.is_some();
        Ok(Self {
            owner: one("owner", accounts::user)?,
            group: one("group", accounts::group)?,
            mode: keys.text("mode")?.map(mode).transpose()?,
            allowed: Allowed {
                listed: is_listed.then(|| (users.unwrap_or_default(), groups.unwrap_or_default())),
            },
        })
    }

    /// Gives a path its owner and its mode. Before this it is the daemon's user's alone.
    ///
    /// # Errors
    /// The daemon may not give it to them.
    pub fn apply(&self, address: &Address) -> Result<(), OpenError> {
        let Address::Unix(path) = address else {
            return Ok(());
        };
        let default = if self.group.is_some() { 0o660 } else { 0o600 };
        let rights = PathRights {
            owner: self.owner,
            group: self.group,
            mode: self.mode.unwrap_or(default),
        };
        rights.give(path).map_err(|error| {
            let what = format!("export {address}: the socket cannot be given to this owner and group");
            OpenError::new(what).with_source(error)
        })
    }
}

impl Allowed {
    /// Returns whether a client may connect.
    ///
    /// # Errors
    /// Who it is, if not.
    pub(crate) fn check(&self, client: impl AsFd) -> Result<(), String> {
        let Some((users, groups)) = &self.listed else {
            return Ok(());
        };
        let peer =
            Credentials::of_peer(&client).map_err(|error| format!("a client without a user: {error}"))?;
        let own = rustix::process::geteuid().as_raw();
        let is_allowed = peer.user == ROOT || peer.user == own || users.contains(&peer.user);
        let is_member = || {
            let of_peer = Credentials::groups_of_peer(&client).unwrap_or_default();
            of_peer.iter().any(|group| groups.contains(group))
        };
        match is_allowed || !groups.is_empty() && is_member() {
            true => Ok(()),
            false => Err(peer.to_string()),
        }
    }
}

type Find = fn(&str) -> Option<u32>;

/// The number of a user or a group, by its number or its name.
fn number(key: &str, name: &str, find: Find) -> Result<u32, ConfigError> {
    let found = name.parse().ok().or_else(|| find(name));
    found.map_or_else(|| value::bad(key, name, accounts::ALLOWED), Ok)
}

fn mode(text: &str) -> Result<u32, ConfigError> {
    let mode = u32::from_str_radix(text, 8).ok();
    match mode.filter(|mode| mode & !0o666 == 0 && mode & 0o600 == 0o600) {
        Some(mode) => Ok(mode),
        None => value::bad(
            "mode",
            text,
            "an octal number from \"0600\" to \"0666\", such as \"0660\"",
        ),
    }
}

const fn key(name: &'static str, range: &'static str, default: &'static str, help: &'static str) -> Key {
    Key {
        name,
        range,
        default,
        help,
        flag: None,
    }
}

const ROOT: u32 = 0;

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::common::listen_at;
    use crate::keys::Value;

    fn parse(pairs: &[(&str, &str)], address: &str) -> Result<Access, ConfigError> {
        let value = |key: &str, text: &str| match key.starts_with("allow") {
            true => Value::List(text.split(' ').map(str::to_owned).collect()),
            false => Value::Text(text.to_owned()),
        };
        let keys = pairs
            .iter()
            .map(|(key, text)| ((*key).to_owned(), value(key, text)));
        Access::parse(&keys.collect(), &address.parse().unwrap())
    }

    #[test]
    fn access_is_the_owners_alone_unless_a_group_or_a_mode_is_given() {
        let path = std::env::temp_dir().join(format!("blkmq-access-{}", std::process::id()));
        let address = Address::Unix(path.clone());
        let _listener = listen_at(&path).unwrap();
        let own = rustix::process::getegid().as_raw().to_string();
        for (pairs, expected) in [
            (&[][..], 0o600),
            (&[("group", own.as_str())], 0o660),
            (&[("mode", "0666")], 0o666),
            (&[("group", own.as_str()), ("mode", "640")], 0o640),
        ] {
            parse(pairs, "unix:/x").unwrap().apply(&address).unwrap();
            let found = fs::metadata(&path).unwrap().permissions().mode();
            assert_eq!(found & 0o777, expected, "{pairs:?}");
        }
        fs::remove_file(&path).unwrap();
    }

    #[test]
    fn empty_list_of_users_means_nobody_and_no_list_everybody() {
        let listed = |keys: Keys| Access::parse(&keys, &"unix:/x".parse().unwrap()).unwrap().allowed;
        let empty = ("allow_uid".to_owned(), Value::List(Vec::new()));
        assert_eq!(
            listed([empty].into_iter().collect()).listed,
            Some((vec![], vec![]))
        );
        assert_eq!(listed([].into_iter().collect()).listed, None);
    }

    #[test]
    fn access_by_unknown_names_by_odd_modes_and_at_tcp_is_refused() {
        for (pair, address, part) in [
            (
                ("owner", "no-such-user"),
                "unix:/x",
                "owner=no-such-user rejected",
            ),
            (
                ("allow_gid", "no-such-group"),
                "unix:/x",
                "a name that this host knows",
            ),
            (("mode", "0777"), "unix:/x", "an octal number"),
            (("mode", "432"), "unix:/x", "an octal number"),
            (("mode", "0400"), "unix:/x", "an octal number"),
            (("allow_uid", "0"), "tcp:127.0.0.1:9", "TCP does not tell users"),
        ] {
            let error = parse(&[pair], address).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
        assert_eq!(parse(&[("owner", "root")], "unix:/x").unwrap().owner, Some(0));
    }

    #[test]
    fn access_of_a_client_is_by_its_user_or_one_of_its_groups() {
        let (client, _server) = UnixStream::pair().unwrap();
        let own = rustix::process::geteuid().as_raw();
        let check = |users: &[u32], groups: &[u32]| {
            let listed = Some((users.to_vec(), groups.to_vec()));
            Allowed { listed }.check(&client)
        };
        Allowed::default().check(&client).unwrap();
        check(&[own + 1], &[]).expect("the daemon's own user");
        let groups = Credentials::groups_of_peer(&client).unwrap();
        assert!(groups.contains(&rustix::process::getegid().as_raw()));
    }
}
