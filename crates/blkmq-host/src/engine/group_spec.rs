//! Decides how groups are named and described outside the core: a path such as `/customers/a/vm1`, and the keys of what it
//! may take. `plan` makes the trees that queues begin with; `control` changes them while they are in use.

use std::collections::BTreeMap;

use blkmq_core::group::{Cap, CapKind, Caps, GroupError, GroupTree, LEVELS_MAX, ROOT, WEIGHT_DEFAULT};
use blkmq_core::ids::GroupId;
use blkmq_core::limits::Limits;
use blkmq_core::time::Nanos;

use crate::error::Error;
use crate::value::{self, ConfigError};

/// A group as it is configured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupSpec {
    /// Its path: `/`, or names with `/` before each.
    pub path: String,
    /// Its share against its siblings, 1 to 1000. Default 100.
    pub weight: u16,
    /// What it, with all groups below it, may take at most. Default: no bounds.
    pub caps: Caps,
    /// How long its requests should take at most. Default none.
    pub latency_target: Option<Nanos>,
}

impl GroupSpec {
    /// A group with everything by default.
    ///
    /// # Errors
    /// If the path is none.
    pub fn new(path: &str) -> Result<Self, Error> {
        check_path(path)?;
        Ok(Self {
            path: path.to_owned(),
            weight: WEIGHT_DEFAULT,
            caps: Caps::default(),
            latency_target: None,
        })
    }

    /// Sets one key: `weight`, `latency_target`, or a cap (`read_bps`, `write_bps`, `bps`, `read_iops`, `write_iops`,
    /// `iops`), or a cap's burst (`NAME_burst`), which needs the cap to be set before.
    ///
    /// # Errors
    /// If there is no such key or the value is none. Limits that depend on the drive are checked later.
    pub fn set(&mut self, key: &str, value: &str) -> Result<(), ConfigError> {
        let (name, is_burst) = match key.strip_suffix("_burst") {
            Some(name) => (name, true),
            None => (key, false),
        };
        let kind = CapKind::ALL.into_iter().find(|kind| kind.name() == name);
        match (key, kind) {
            ("weight", _) => self.weight = value::whole(key, value, 1..=1000, "from 1 to 1000")?,
            ("latency_target", _) => {
                let target = value::time(key, value)?;
                if target == Nanos::ZERO {
                    return value::bad(key, value, "more than 0");
                }
                self.latency_target = Some(target);
            }
            (_, Some(kind)) => {
                let amount = amount(kind, key, value)?;
                let cap = match (self.caps.get(kind), is_burst) {
                    (None, true) => {
                        return value::bad(key, value, "given along with the cap that it belongs to");
                    }
                    (Some(cap), true) => Cap { burst: amount, ..cap },
                    (cap, false) => Cap {
                        rate: amount,
                        burst: cap.map_or(0, |cap| cap.burst),
                    },
                };
                self.caps.set(kind, Some(cap));
            }
            _ => {
                return Err(ConfigError::UnknownKey {
                    driver: "group",
                    key: key.to_owned(),
                    known: KEYS,
                });
            }
        }
        Ok(())
    }
}

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

    pub(crate) fn insert(&mut self, path: String, id: GroupId) {
        self.0.insert(path, id);
    }

    pub(crate) fn remove(&mut self, path: &str) {
        self.0.remove(path);
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&String, &GroupId)> {
        self.0.iter()
    }

    /// Gives a group, and all below it, another path.
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

/// Makes the tree of `paths`, numbered in this order, each after the one that it is part of, with room for some more.
pub fn tree_of(paths: &[String], specs: &[GroupSpec], limits: &Limits) -> Result<GroupTree, Error> {
    let mut tree = GroupTree::new(paths.len() as u32 + SPARE);
    let numbered = Paths::new(paths);
    for path in &paths[1..] {
        let parent = numbered.get(parent_of(path)).expect("listed before");
        let wrong = |source| group_error(path, source);
        tree.create(parent, WEIGHT_DEFAULT).map_err(wrong)?;
    }
    for spec in specs {
        let wrong = |source| group_error(&spec.path, source);
        let id = numbered.get(&spec.path).expect("all specs are listed");
        spec.caps.check(limits).map_err(wrong)?;
        if id != ROOT || spec.weight != WEIGHT_DEFAULT {
            tree.set_weight(id, spec.weight).map_err(wrong)?;
        }
        tree.set_caps(id, spec.caps).map_err(wrong)?;
        tree.set_latency_target(id, spec.latency_target).map_err(wrong)?;
    }
    Ok(tree)
}

/// Finds the number of a path in a list, adding what is missing: the path, and before it those that it is part of.
pub fn number_of(paths: &mut Vec<String>, path: &str) -> GroupId {
    if let Some(known) = paths.iter().position(|known| known == path) {
        return GroupId(known as u32);
    }
    number_of(paths, parent_of(path));
    paths.push(path.to_owned());
    GroupId(paths.len() as u32 - 1)
}

/// The path of the group that a group is part of.
pub(crate) fn parent_of(path: &str) -> &str {
    match path.rfind('/') {
        Some(0) | None => "/",
        Some(end) => &path[..end],
    }
}

/// Joins a group's path and the name of one that is part of it.
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

fn amount(kind: CapKind, key: &str, value: &str) -> Result<u64, ConfigError> {
    if kind.is_bytes() {
        return value::size(key, value);
    }
    value::whole(key, value, 0..=u64::MAX, "a whole number")
}

/// Groups that can be made at run time beside the configured ones.
const SPARE: u32 = 64;
const KEYS: &str = "weight, latency_target, read_bps, write_bps, bps, read_iops, write_iops, iops, and each of these six \
                    with _burst";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_numbered_after_those_they_are_part_of() {
        let mut paths = vec!["/".to_owned()];
        assert_eq!(number_of(&mut paths, "/a/b/c"), GroupId(3));
        assert_eq!(number_of(&mut paths, "/a/d"), GroupId(4));
        assert_eq!(number_of(&mut paths, "/a"), GroupId(1));
        assert_eq!(paths, ["/", "/a", "/a/b", "/a/b/c", "/a/d"]);
        let tree = tree_of(&paths, &[], &Limits::default()).unwrap();
        assert_eq!(tree.get(GroupId(4)).unwrap().parent, GroupId(1));
    }

    #[test]
    fn a_moved_group_takes_along_what_is_below_it_and_nothing_else() {
        let list = ["/", "/a", "/a/b", "/ab", "/c"].map(str::to_owned);
        let mut paths = Paths::new(&list);
        paths.rename("/a", "/c/a");
        let now: Vec<&String> = paths.iter().map(|(path, _)| path).collect();
        assert_eq!(now, ["/", "/ab", "/c", "/c/a", "/c/a/b"]);
        assert_eq!(paths.get("/c/a/b"), Some(GroupId(2)));
    }

    #[test]
    fn keys_are_read_and_what_is_wrong_is_named() {
        let mut spec = GroupSpec::new("/a").unwrap();
        for (key, value) in [
            ("weight", "200"),
            ("read_bps", "100M"),
            ("iops", "5000"),
            ("iops_burst", "500"),
            ("latency_target", "2ms"),
        ] {
            spec.set(key, value).unwrap();
        }
        assert_eq!(
            (spec.weight, spec.latency_target),
            (200, Some(Nanos::from_millis(2)))
        );
        let cap = Cap {
            rate: 5000,
            burst: 500,
        };
        assert_eq!(spec.caps.get(CapKind::Iops), Some(cap));
        for (key, value, part) in [
            ("weight", "1001", "from 1 to 1000"),
            ("bps_burst", "1M", "along with the cap"),
            ("iops", "5k", "iops=5k"),
            ("wait", "1", "read_bps"),
            ("latency_target", "0", "more than 0"),
        ] {
            let error = spec.set(key, value).unwrap_err().to_string();
            assert!(error.contains(part), "{key}={value}: {error}");
        }
    }

    #[test]
    fn what_the_drive_or_the_tree_cannot_have_is_named_with_the_path() {
        let paths = ["/", "/a"].map(str::to_owned);
        let mut spec = GroupSpec::new("/a").unwrap();
        spec.set("bps", "4096").unwrap();
        let error = tree_of(&paths, &[spec], &Limits::default())
            .unwrap_err()
            .to_string();
        assert!(error.contains("group /a: bps 4096 rejected"), "{error}");
        let mut root = GroupSpec::new("/").unwrap();
        root.set("weight", "7").unwrap();
        let error = tree_of(&paths, &[root], &Limits::default())
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("group /: the root group cannot be weighted"),
            "{error}"
        );
        for path in ["", "a", "//", "/a/", "/a b"] {
            assert!(GroupSpec::new(path).is_err(), "{path}");
        }
    }
}
