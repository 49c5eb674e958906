//! Paths such as `/customers/a/vm1`, the names of groups outside the core. `control` changes the groups
//! of a running queue; `blkmq-config` makes the initial groups of queues.

use std::collections::BTreeMap;

use blkmq_core::group::{GroupError, LEVELS_MAX, ROOT};
use blkmq_core::ids::GroupId;

use crate::error::Error;

/// The paths of one queue's groups.
#[derive(Clone, Debug)]
pub(crate) struct Paths(BTreeMap<String, GroupId>);

impl Paths {
    /// The paths of groups that are numbered in this order; the first is the root.
    pub(crate) fn new(paths: &[String]) -> Self {
        let mut all = BTreeMap::from([("/".to_owned(), ROOT)]);
        all.extend(paths.iter().cloned().zip((0..).map(GroupId)));
        Self(all)
    }

    pub(crate) fn get(&self, path: &str) -> Option<GroupId> {
        self.0.get(path).copied()
    }

    pub(crate) fn path_of(&self, group: GroupId) -> Option<&str> {
        let found = self.0.iter().find(|(_, id)| **id == group);
        found.map(|(path, _)| path.as_str())
    }

    pub(crate) fn insert(&mut self, path: String, id: GroupId) {
        self.0.insert(path, id);
    }

    pub(crate) fn remove(&mut self, path: &str) {
        self.0.remove(path);
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&String, &GroupId)> {
        self.0.iter()
    }

    /// Gives a group, and all groups below it, another path.
    pub(crate) fn rename(&mut self, from: &str, to: &str) {
        let moved = |path: &str| {
            let rest = path.strip_prefix(from)?;
            (rest.is_empty() || rest.starts_with('/')).then(|| format!("{to}{rest}"))
        };
        let old = std::mem::take(&mut self.0);
        let new = old
            .into_iter()
            .map(|(path, id)| (moved(&path).unwrap_or(path), id));
        self.0 = new.collect();
    }
}

/// The path of a group's parent.
pub fn parent_of(path: &str) -> &str {
    match path.rfind('/') {
        Some(0) | None => "/",
        Some(end) => &path[..end],
    }
}

/// Joins the path of a group and the name of a child.
pub(crate) fn join(parent: &str, name: &str) -> String {
    if parent == "/" {
        format!("/{name}")
    } else {
        format!("{parent}/{name}")
    }
}

/// Checks a group's path.
///
/// # Errors
/// Unless it is `/`, or names of 1 to 128 letters, digits, dots, dashes and underscores with `/` before each.
pub fn check_path(path: &str) -> Result<(), Error> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    let is_name = |name: &str| (1..=128).contains(&name.len()) && name.chars().all(is_plain);
    if path == "/"
        || path.strip_prefix('/').is_some_and(|names| {
            names.split('/').take(LEVELS_MAX + 1).count() <= LEVELS_MAX && names.split('/').all(is_name)
        })
    {
        return Ok(());
    }
    Err(Error::GroupPath {
        path: path.to_owned(),
    })
}

pub(crate) fn group_error(path: &str, cause: GroupError) -> Error {
    Error::Group {
        path: path.to_owned(),
        cause,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moved_group_takes_along_what_is_below_it_and_nothing_else() {
        let list = ["/", "/a", "/a/b", "/ab", "/c"].map(str::to_owned);
        let mut paths = Paths::new(&list);
        paths.rename("/a", "/c/a");
        let now: Vec<&String> = paths.iter().map(|(path, _)| path).collect();
        assert_eq!(now, ["/", "/ab", "/c", "/c/a", "/c/a/b"]);
        assert_eq!(paths.get("/c/a/b"), Some(GroupId(2)));
    }
}
