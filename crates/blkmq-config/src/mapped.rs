//! Parses the members of a mapped disk: `a+b+c`, each with a range if only a part is meant, as in
//! `a:0:1G+b:512M:1G` (start, length).

use blkmq_core::mapper::table::MapKind;

use blkmq_host::mapped::{MapConfig, Member};
use blkmq_host::value::{self, ConfigError};

/// Parses `linear=MEMBERS`.
pub(crate) fn linear(members: &str) -> Result<MapConfig, ConfigError> {
    Ok(MapConfig {
        kind: MapKind::Linear,
        members: parse("linear", members)?,
    })
}

/// Parses `striped=MEMBERS`. The chunk has its default of 64 KiB until [`set`] changes it.
pub(crate) fn striped(members: &str) -> Result<MapConfig, ConfigError> {
    Ok(MapConfig {
        kind: MapKind::Striped { chunk: CHUNK },
        members: parse("striped", members)?,
    })
}

/// Sets another key: `chunk`, a size, of a striped disk.
pub(crate) fn set(map: &mut MapConfig, key: &str, text: &str) -> Result<(), ConfigError> {
    let (driver, known) = match &mut map.kind {
        MapKind::Striped { chunk } if key == "chunk" => {
            *chunk = value::size(key, text)?;
            return Ok(());
        }
        MapKind::Striped { .. } => ("striped", "chunk"),
        MapKind::Linear => ("linear", "none"),
    };
    let key = key.to_owned();
    Err(ConfigError::UnknownKey { driver, key, known })
}

fn parse(key: &str, members: &str) -> Result<Vec<Member>, ConfigError> {
    members.split('+').map(|text| member(key, text.trim())).collect()
}

fn member(key: &str, text: &str) -> Result<Member, ConfigError> {
    let mut parts = text.split(':');
    let disk = parts.next().unwrap_or_default().to_owned();
    let start = parts.next().map_or(Ok(0), |start| value::size(key, start))?;
    let len = parts.next().map(|len| value::size(key, len)).transpose()?;
    if disk.is_empty() || parts.next().is_some() {
        return value::bad(key, text, MEMBERS);
    }
    Ok(Member { disk, start, len })
}

const CHUNK: u64 = 64 << 10;
const MEMBERS: &str = "names of disks with + between, each as NAME, NAME:START or NAME:START:LENGTH";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_are_read_with_their_ranges() {
        let map = linear("a+b:512M + c.1:1G:4096").unwrap();
        let seen: Vec<_> = map
            .members
            .iter()
            .map(|member| (member.disk.as_str(), member.start, member.len))
            .collect();
        assert_eq!(
            seen,
            [
                ("a", 0, None),
                ("b", 512 << 20, None),
                ("c.1", 1 << 30, Some(4096))
            ]
        );
    }

    #[test]
    fn stripe_has_chunks_and_a_linear_disk_has_none() {
        let mut map = striped("a+b").unwrap();
        assert_eq!(map.kind, MapKind::Striped { chunk: 65536 });
        set(&mut map, "chunk", "1M").unwrap();
        assert_eq!(map.kind, MapKind::Striped { chunk: 1 << 20 });
        let error = set(&mut linear("a").unwrap(), "chunk", "1M").unwrap_err();
        assert!(
            error
                .to_string()
                .contains("key chunk rejected: the linear driver has no such key")
        );
    }

    #[test]
    fn disk_that_is_no_member_is_named() {
        for text in ["", "a++b", "a:1:2:3", "a:x", ":1"] {
            let error = linear(text).unwrap_err().to_string();
            assert!(
                error.starts_with("linear=") && error.contains("rejected: must be"),
                "{error}"
            );
        }
    }
}
