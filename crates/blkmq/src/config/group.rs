//! Decides how one group is described: `/customers/a,weight=200,iops=5000` on the command line, or a table of the
//! configuration file with the same keys. The keys themselves are `blkmq_host::group_spec`'.

use anyhow::{Context, Result, bail};
use blkmq_host::group_spec::GroupSpec;

/// Reads `PATH,key=value,key=value`.
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
pub(super) fn from_pairs(path: &str, mut pairs: Vec<(String, String)>) -> Result<GroupSpec> {
    let mut spec = GroupSpec::new(path)?;
    // A burst belongs to a cap, which is to be known by then.
    pairs.sort_by_key(|(key, _)| (key.ends_with("_burst"), key.clone()));
    if let Some(pair) = pairs.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        bail!("group {path}: {}= is given twice: keep one", pair[0].0);
    }
    for (key, value) in &pairs {
        spec.set(key, value).with_context(|| format!("group {path}"))?;
    }
    Ok(spec)
}

#[cfg(test)]
mod tests {
    use blkmq_core::group::{Cap, CapKind};

    use super::*;

    #[test]
    fn a_group_string_becomes_a_group_whatever_the_order_of_its_keys() {
        let group = parse("/customers/a,read_bps_burst=8M,weight=200,read_bps=100M").unwrap();
        assert_eq!((group.path.as_str(), group.weight), ("/customers/a", 200));
        let cap = Cap {
            rate: 100 << 20,
            burst: 8 << 20,
        };
        assert_eq!(group.caps.get(CapKind::ReadBps), Some(cap));
    }

    #[test]
    fn what_is_wrong_is_named_with_what_is_allowed() {
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
}
