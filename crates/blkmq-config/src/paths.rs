//! Parses the paths of a multipath disk: `a+b/c:3`, with a slash between priority groups, the first one
//! preferred, and after a colon how much a path carries relative to the others.

use anyhow::{Result, bail};
use blkmq_host::value;

use crate::name::check_name;

/// A disk that is a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathRef {
    /// The disk's name.
    pub name: String,
    /// How much it carries relative to the others, 0 to 100.
    pub throughput: u32,
}

/// Parses the paths, by priority group.
///
/// # Errors
/// A name is invalid or given twice, or a number is out of range.
pub(crate) fn parse(text: &str) -> Result<Vec<Vec<PathRef>>> {
    let mut groups: Vec<Vec<PathRef>> = Vec::new();
    for group in text.split('/') {
        let mut paths = Vec::new();
        for word in group.split('+') {
            let path = path(word)?;
            if groups
                .iter()
                .flatten()
                .chain(&paths)
                .any(|other| other.name == path.name)
            {
                bail!("multipath={text} rejected: path {} is named twice", path.name);
            }
            paths.push(path);
        }
        groups.push(paths);
    }
    Ok(groups)
}

fn path(word: &str) -> Result<PathRef> {
    let (name, throughput) = word.split_once(':').unwrap_or((word, "1"));
    check_name("path", name)?;
    Ok(PathRef {
        name: name.to_owned(),
        throughput: value::whole(
            "multipath",
            throughput,
            0..=100,
            "NAME or NAME:THROUGHPUT, from 0 to 100",
        )?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_in_order_and_paths_have_a_throughput() {
        let groups = parse("a+b:3/c").unwrap();
        let told: Vec<Vec<_>> = groups
            .iter()
            .map(|group| {
                group
                    .iter()
                    .map(|path| (path.name.as_str(), path.throughput))
                    .collect()
            })
            .collect();
        assert_eq!(told, [vec![("a", 1), ("b", 3)], vec![("c", 1)]]);
    }

    #[test]
    fn impossible_path_is_named() {
        for (text, part) in [
            ("a+a", "path a is named twice"),
            ("a/b+a", "path a is named twice"),
            ("a+", "path"),
            ("a:101", "0 to 100"),
            ("a:x", "0 to 100"),
        ] {
            let error = format!("{:#}", parse(text).unwrap_err());
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
