//! The table `[control]`: the socket at which a running daemon is queried and changed, and who may do so there
//! besides the daemon's user and root. The command's control socket asks [`Account`]s for its clients.

use std::collections::BTreeMap;
use std::fmt;

use anyhow::{Result, bail};
use blkmq_export::common::accounts;
use blkmq_host::group_paths::check_path;
use serde::Deserialize;

/// Where a running daemon is queried and changed, and by whom.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Control {
    /// The address of the socket, or `none`. Default: in the directory for such sockets, if there
    /// is one.
    pub socket: Option<String>,
    /// Who may query everything. Default: only root and the daemon's user may.
    pub readers: Vec<Account>,
    /// Who may query what is in a group, and set the groups below it, by the path of the group.
    pub tenants: BTreeMap<String, Vec<Account>>,
}

/// A user or a group of this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Account {
    /// A user, by number.
    User(u32),
    /// The members of a group, by its number.
    Group(u32),
}

impl Account {
    /// Parses a user's name or number, or `@` and a group's. May block as a look-up of names does.
    ///
    /// # Errors
    /// This host knows nobody of this name.
    pub fn parse(text: &str) -> Result<Self> {
        let number = |name: &str, find: fn(&str) -> Option<u32>| name.parse().ok().or_else(|| find(name));
        let found = match text.strip_prefix('@') {
            Some(group) => number(group, accounts::group).map(Self::Group),
            None => number(text, accounts::user).map(Self::User),
        };
        let Some(account) = found else {
            let hint = match accounts::group(text) {
                Some(_) => format!("; of the group, write \"@{text}\""),
                None => String::new(),
            };
            bail!(
                "{text:?} rejected: must be a user by {}; or @ and a group{hint}",
                accounts::ALLOWED
            );
        };
        Ok(account)
    }

    /// Returns whether somebody with this user and these groups is meant.
    pub fn is(self, user: u32, groups: &[u32]) -> bool {
        match self {
            Self::User(number) => number == user,
            Self::Group(number) => groups.contains(&number),
        }
    }
}

impl fmt::Display for Account {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::User(number) => write!(f, "{number}"),
            Self::Group(number) => write!(f, "@{number}"),
        }
    }
}

/// The table as it is written.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Table {
    socket: Option<String>,
    #[serde(default)]
    readers: Names,
    #[serde(default)]
    tenants: BTreeMap<String, Names>,
}

/// One name, or a list.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "must be a text or a list of texts")]
enum Names {
    One(String),
    All(Vec<String>),
}

impl Default for Names {
    fn default() -> Self {
        Self::All(Vec::new())
    }
}

impl Names {
    fn accounts(&self) -> Result<Vec<Account>> {
        match self {
            Self::One(name) => Ok(vec![Account::parse(name)?]),
            Self::All(names) => names.iter().map(|name| Account::parse(name)).collect(),
        }
    }
}

impl Table {
    pub(crate) fn parse(self) -> Result<Control> {
        let readers = self.readers.accounts();
        let tenant = |(path, names): (String, Names)| {
            let context = |error: anyhow::Error| error.context(format!("[control]: tenants of {path:?}"));
            if path == "/" {
                bail!(
                    "[control]: tenants of \"/\" rejected: must be a group, as in \"/customers/a\"; whoever may set all of them \
                     is the daemon's user"
                );
            }
            check_path(&path).map_err(|error| context(error.into()))?;
            let accounts = names.accounts().map_err(context)?;
            Ok((path, accounts))
        };
        Ok(Control {
            socket: self.socket,
            readers: readers.map_err(|error| error.context("[control]: readers"))?,
            tenants: self.tenants.into_iter().map(tenant).collect::<Result<_>>()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Control> {
        toml::from_str::<Table>(text)?.parse()
    }

    #[test]
    fn accounts_are_users_by_name_or_number_and_groups_behind_an_at() {
        let control =
            parse("readers = [\"root\", \"@7\"]\ntenants = { \"/a/b\" = \"70\", \"/c\" = [\"@root\"] }")
                .unwrap();
        assert_eq!(control.readers, [Account::User(0), Account::Group(7)]);
        let of = |path: &str| control.tenants[path].as_slice();
        assert_eq!(
            (of("/a/b"), of("/c")),
            (&[Account::User(70)][..], &[Account::Group(0)][..])
        );
        assert!(Account::User(7).is(7, &[8]) && !Account::User(8).is(7, &[8]));
        assert!(Account::Group(8).is(7, &[8]) && !Account::Group(7).is(7, &[8]));
    }

    #[test]
    fn account_that_nobody_has_and_group_that_is_none_are_refused() {
        for (text, part) in [
            (
                "readers = \"no-such-user\"",
                "[control]: readers: \"no-such-user\" rejected: must be a user",
            ),
            ("readers = \"@no-such-group\"", "\"@no-such-group\" rejected"),
            ("readers = \"nogroup\"", "of the group, write \"@nogroup\""),
            ("readers = 7", "must be a text or a list of texts"),
            (
                "tenants = { \"/\" = \"root\" }",
                "tenants of \"/\" rejected: must be a group",
            ),
            ("tenants = { a = \"root\" }", "as in /customers/a"),
            (
                "tenants = { \"/a\" = \"no-such-user\" }",
                "tenants of \"/a\": \"no-such-user\" rejected",
            ),
        ] {
            let error = format!("{:#}", parse(text).unwrap_err());
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
