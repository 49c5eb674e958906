//! The keys of a disk in a qcow2 image. `disk` opens what they describe.

use std::path::PathBuf;

use blkmq_host::value::{self, ConfigError};

use crate::file::{Direct, FileConfig};

/// How bases are read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BaseCache {
    /// Through the page cache: once from the drive for all images on them.
    #[default]
    Page,
    /// Past it.
    Direct,
}

/// A disk in a qcow2 image. `docs/drivers/qcow2.md` has every key's default, unit and trade-off.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Qcow2Config {
    /// The image.
    pub path: PathBuf,
    /// Open it read-only, beside other readers.
    pub read_only: bool,
    /// Logical block size in bytes. Default 512.
    pub block_size: Option<u32>,
    /// Whether the image's own data bypasses the page cache. Default `Auto`.
    pub direct: Direct,
    /// How its bases are read. Default `Page`.
    pub base_cache: BaseCache,
    /// Bytes of memory for the cached map, at most. Default 16 MiB.
    pub map_cache: u64,
    /// The directories below which its other files may be. None: the image's own.
    pub directories: Vec<PathBuf>,
    /// Most images of the chain, itself among them. Default 16.
    pub chain_max: u16,
    /// Take no lock against serving a file twice. Default off.
    pub unlocked: bool,
}

impl Default for Qcow2Config {
    fn default() -> Self {
        Self {
            path: PathBuf::new(),
            read_only: false,
            block_size: None,
            direct: Direct::Auto,
            base_cache: BaseCache::Page,
            map_cache: 16 << 20,
            directories: Vec::new(),
            chain_max: 16,
            unlocked: false,
        }
    }
}

impl Qcow2Config {
    /// Sets one key from its text form.
    ///
    /// # Errors
    /// `UnknownKey`, or `BadValue` with what is allowed.
    pub fn set(&mut self, key: &str, value: &str) -> Result<(), ConfigError> {
        match key {
            "qcow2" if value.is_empty() => return value::bad(key, value, "the path of an image"),
            "qcow2" => self.path = PathBuf::from(value),
            "read_only" | "block_size" | "direct" | "lock" => {
                let mut file = FileConfig::default();
                file.set(key, value)?;
                match key {
                    "read_only" => self.read_only = file.read_only,
                    "block_size" => self.block_size = file.block_size,
                    "direct" => self.direct = file.direct,
                    _ => self.unlocked = file.unlocked,
                }
            }
            "base_cache" => {
                self.base_cache = match value {
                    "page" => BaseCache::Page,
                    "direct" => BaseCache::Direct,
                    _ => return value::bad(key, value, "page or direct"),
                }
            }
            "map_cache" => match value::size(key, value)? {
                bytes if MAP_CACHE.contains(&bytes) => self.map_cache = bytes,
                _ => return value::bad(key, value, "a size from 16K to 16G"),
            },
            "dirs" => {
                let all = value
                    .split(':')
                    .filter(|part| !part.is_empty())
                    .map(PathBuf::from);
                self.directories = all.collect();
                if self.directories.is_empty() {
                    return value::bad(key, value, "directories, with colons between them");
                }
            }
            "chain" => match value.parse() {
                Ok(most @ 1..=CHAIN_MAX) => self.chain_max = most,
                _ => return value::bad(key, value, "a number from 1 to 32"),
            },
            _ => {
                return Err(ConfigError::UnknownKey {
                    driver: "qcow2",
                    key: key.to_owned(),
                    known: "qcow2, read_only, block_size, direct, base_cache, map_cache, dirs, chain, lock",
                });
            }
        }
        Ok(())
    }
}

const MAP_CACHE: std::ops::RangeInclusive<u64> = 16 << 10..=16 << 30;
/// Each image may have two files, and the map has numbers for 64.
const CHAIN_MAX: u16 = 32;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_images_are_taken_and_wrong_values_answered_with_what_is_allowed() {
        let mut config = Qcow2Config::default();
        for (key, value) in [
            ("qcow2", "vm1.qcow2"),
            ("base_cache", "direct"),
            ("map_cache", "1M"),
            ("dirs", "/a:/b"),
            ("chain", "3"),
            ("direct", "off"),
            ("lock", "off"),
        ] {
            config.set(key, value).unwrap();
        }
        assert_eq!((config.map_cache, config.chain_max), (1 << 20, 3));
        assert_eq!(config.directories, [PathBuf::from("/a"), "/b".into()]);
        let error = |key, value| Qcow2Config::default().set(key, value).unwrap_err().to_string();
        assert!(error("qcow2", "").contains("the path of an image"));
        assert!(error("base_cache", "none").contains("must be page or direct"));
        assert!(error("map_cache", "1").contains("16K to 16G"));
        assert!(error("chain", "33").contains("1 to 32"));
        assert!(error("dirs", ":").contains("directories"));
        assert!(error("size", "1G").contains("no such key"));
    }
}
