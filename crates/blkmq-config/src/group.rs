//! The description of one group: `/customers/a,weight=200,iops=5000` on the command line, or a table of
//! the configuration file with the same keys; and the tree of groups with which a queue begins.

use anyhow::{Context, Result, bail};
use blkmq_core::group::{Cap, CapKind, Caps, GroupError, GroupTree, ROOT, WEIGHT_DEFAULT};
use blkmq_core::ids::GroupId;
use blkmq_core::limits::Limits;
use blkmq_core::time::Nanos;
use blkmq_host::Error;
use blkmq_host::group_paths::{check_path, parent_of};
use blkmq_host::value::{self, ConfigError};

/// A group as it is configured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupSpec {
    /// Its path: `/`, or names with `/` before each.
    pub path: String,
    /// Its share against its siblings, 1 to 1000, if it is given. Default 100.
    pub weight: Option<u16>,
    /// The most that it, with all groups below it, may take. Default: no bounds.
    pub caps: Caps,
    /// How long nine of ten of its requests should take at most. Default none.
    pub latency_target: Option<Nanos>,
}

impl GroupSpec {
    /// A group with default settings.
    ///
    /// # Errors
    /// The path is invalid.
    pub fn new(path: &str) -> Result<Self, Error> {
        check_path(path)?;
        Ok(Self {
            path: path.to_owned(),
            weight: None,
            caps: Caps::default(),
            latency_target: None,
        })
    }

    /// Its share against its siblings, 1 to 1000.
    pub fn weight(&self) -> u16 {
        self.weight.unwrap_or(WEIGHT_DEFAULT)
    }

    /// Sets one key: `weight`, `latency_target`, or a cap (`read_bps`, `write_bps`, `bps`, `read_iops`, `write_iops`,
    /// `iops`), or a cap's burst (`NAME_burst`), which needs the cap to be set before.
    ///
    /// # Errors
    /// There is no such key or the value is invalid. Limits that depend on the drive are checked
    /// later.
    pub fn set(&mut self, key: &str, value: &str) -> Result<(), ConfigError> {
        let (name, is_burst) = match key.strip_suffix("_burst") {
            Some(name) => (name, true),
            None => (key, false),
        };
        let kind = CapKind::ALL.into_iter().find(|kind| kind.name() == name);
        match (key, kind) {
            ("weight", _) => {
                let weight = value::whole(key, value, 1..=1000, "a whole number from 1 to 1000")?;
                if self.path == "/" && weight != WEIGHT_DEFAULT {
                    return value::bad(
                        key,
                        value,
                        "left out: the root group cannot be weighted, name a group below it",
                    );
                }
                self.weight = Some(weight);
            }
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
                return Err(ConfigError::NoSuchKey {
                    part: "a group",
                    key: key.to_owned(),
                    known: KEYS,
                });
            }
        }
        Ok(())
    }
}

/// Parses `PATH,key=value,key=value`.
///
/// # Errors
/// Names the group, the key, the value and what is allowed.
pub fn parse(text: &str) -> Result<GroupSpec> {
    let mut parts = text.split(',');
    let path = parts.next().unwrap_or_default();
    let mut pairs = Vec::new();
    for part in parts {
        let Some((key, value)) = part.split_once('=') else {
            bail!(
                "--group {text}: {part:?} is not KEY=VALUE; an example: --group /customers/a,weight=200,iops=5000"
            );
        };
        pairs.push((key.trim().to_owned(), value.to_owned()));
    }
    from_pairs(path, pairs).with_context(|| format!("--group {text}"))
}

/// Makes a group of its keys and values.
///
/// # Errors
/// As [`parse`].
pub(crate) fn from_pairs(path: &str, mut pairs: Vec<(String, String)>) -> Result<GroupSpec> {
    let mut spec = GroupSpec::new(path)?;
    // A burst belongs to a cap, which must be set before it.
    pairs.sort_by_key(|(key, _)| (key.ends_with("_burst"), key.clone()));
    if let Some(pair) = pairs.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        bail!("group {path}: {}= is given twice: keep one", pair[0].0);
    }
    for (key, value) in &pairs {
        spec.set(key, value).with_context(|| format!("group {path}"))?;
    }
    Ok(spec)
}

/// Checks that a drive with these limits can be shared with a group's caps.
pub(crate) fn check_caps(spec: &GroupSpec, limits: &Limits) -> Result<(), Error> {
    spec.caps
        .check(limits)
        .map_err(|cause| group_error(&spec.path, cause))
}

fn group_error(path: &str, cause: GroupError) -> Error {
    Error::Group {
        path: path.to_owned(),
        cause,
    }
}

/// Makes the tree of `paths`, numbered in this order, each after its parent, as configured, with
/// room for some more, and for `more` beside them.
pub(crate) fn tree_of(
    paths: &[String],
    specs: &[GroupSpec],
    limits: &Limits,
    more: u32,
) -> Result<GroupTree, Error> {
    let mut tree = GroupTree::new(paths.len() as u32 + SPARE + more);
    let number = |path: &str| paths.iter().position(|known| known == path);
    let id_of = |path: &str| number(path).map(|number| GroupId(number as u32));
    for path in &paths[1..] {
        let parent = id_of(parent_of(path)).expect("listed before");
        let wrong = |source| group_error(path, source);
        tree.create(parent, WEIGHT_DEFAULT).map_err(wrong)?;
    }
    for spec in specs {
        let wrong = |source| group_error(&spec.path, source);
        let Some(id) = id_of(&spec.path) else { continue };
        check_caps(spec, limits)?;
        if id != ROOT || spec.weight() != WEIGHT_DEFAULT {
            tree.set_weight(id, spec.weight()).map_err(wrong)?;
        }
        tree.set_caps(id, spec.caps).map_err(wrong)?;
        tree.set_latency_target(id, spec.latency_target).map_err(wrong)?;
    }
    Ok(tree)
}

/// Returns the number of a path in a list, after adding what is missing: first its parents, then
/// the path.
pub(crate) fn number_of(paths: &mut Vec<String>, path: &str) -> GroupId {
    if let Some(known) = paths.iter().position(|known| known == path) {
        return GroupId(known as u32);
    }
    number_of(paths, parent_of(path));
    paths.push(path.to_owned());
    GroupId(paths.len() as u32 - 1)
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
    fn group_string_becomes_a_group_whatever_the_order_of_its_keys() {
        let group = parse("/customers/a,read_bps_burst=8M,weight=200,read_bps=100M").unwrap();
        assert_eq!((group.path.as_str(), group.weight), ("/customers/a", Some(200)));
        let cap = Cap {
            rate: 100 << 20,
            burst: 8 << 20,
        };
        assert_eq!(group.caps.get(CapKind::ReadBps), Some(cap));
    }

    #[test]
    fn fault_is_named_with_the_allowed_values() {
        for (text, parts) in [
            ("a,weight=1", &["--group a,weight=1", "as in /customers/a"][..]),
            ("/a,weight", &["not KEY=VALUE"]),
            ("/a,weight=0", &["group /a", "weight=0", "from 1 to 1000"]),
            ("/a,iops_burst=3", &["iops_burst=3", "along with the cap"]),
            ("/a,bps=fast", &["bps=fast", "64K"]),
            ("/a,iops=1,iops=2", &["iops= is given twice"]),
            ("/a,speed=1", &["speed", "read_bps"]),
        ] {
            let error = format!("{:#}", parse(text).unwrap_err());
            assert!(parts.iter().all(|part| error.contains(part)), "{text}: {error}");
        }
    }

    #[test]
    fn paths_are_numbered_after_those_they_are_part_of() {
        let mut paths = vec!["/".to_owned()];
        assert_eq!(number_of(&mut paths, "/a/b/c"), GroupId(3));
        assert_eq!(number_of(&mut paths, "/a/d"), GroupId(4));
        assert_eq!(number_of(&mut paths, "/a"), GroupId(1));
        assert_eq!(paths, ["/", "/a", "/a/b", "/a/b/c", "/a/d"]);
        let tree = tree_of(&paths, &[], &Limits::default(), 0).unwrap();
        assert_eq!(tree.get(GroupId(4)).unwrap().parent, GroupId(1));
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
            (Some(200), Some(Nanos::from_millis(2)))
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
    fn value_that_the_drive_or_the_tree_cannot_have_is_named_with_its_path() {
        let paths = ["/", "/a"].map(str::to_owned);
        let mut spec = GroupSpec::new("/a").unwrap();
        spec.set("bps", "4096").unwrap();
        let error = tree_of(&paths, &[spec], &Limits::default(), 0)
            .unwrap_err()
            .to_string();
        assert!(error.contains("group /a: bps 4096 rejected"), "{error}");
        let mut root = GroupSpec::new("/").unwrap();
        let error = root.set("weight", "7").unwrap_err().to_string();
        assert!(error.contains("the root group cannot be weighted"), "{error}");
        for path in ["", "a", "//", "/a/", "/a b"] {
            assert!(GroupSpec::new(path).is_err(), "{path}");
        }
    }
}
