//! The keys of a disk in a file. `open` turns the result into a disk.

use std::path::PathBuf;

use blkmq_host::value::{self, ConfigError};

/// Whether requests bypass the page cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Direct {
    /// Where the file can; a warning reports where it cannot.
    #[default]
    Auto,
    /// Yes, or the disk is refused.
    On,
    /// No.
    Off,
}

/// A disk in a file or on a block device. `docs/drivers/file.md` has every key's default, unit and trade-off.
#[derive(Clone, Debug, Default)]
pub struct FileConfig {
    /// The file or device.
    pub path: PathBuf,
    /// Open it read-only, beside other readers.
    pub read_only: bool,
    /// The least size, in bytes. Default: the present size.
    pub size: Option<u64>,
    /// Create the file with `size` bytes if it is missing. Default off.
    pub create: bool,
    /// Logical block size in bytes. Default: 512, or a block device's sector.
    pub block_size: Option<u32>,
    /// Whether to bypass the page cache. Default `Auto`.
    pub direct: Direct,
    /// Take no lock against serving a file twice. Default off.
    pub unlocked: bool,
}

/// Equal if they describe the same disk: once it is open, it does not matter who made the file.
impl PartialEq for FileConfig {
    fn eq(&self, other: &Self) -> bool {
        let keys = |config: &Self| {
            let Self {
                path: _,
                read_only,
                size,
                create: _,
                block_size,
                direct,
                unlocked,
            } = *config;
            (read_only, size, block_size, direct, unlocked)
        };
        self.path == other.path && keys(self) == keys(other)
    }
}

impl Eq for FileConfig {}

impl FileConfig {
    /// Sets one key from its text form.
    ///
    /// # Errors
    /// `UnknownKey`, or `BadValue` with what is allowed.
    pub fn set(&mut self, key: &str, value: &str) -> Result<(), ConfigError> {
        match key {
            "file" if value.is_empty() => return value::bad(key, value, PATH),
            "file" => self.path = PathBuf::from(value),
            "size" => match value::size_from(key, value, 1, SIZE)? {
                size if i64::try_from(size).is_ok() => self.size = Some(size),
                _ => return value::bad(key, value, SIZE),
            },
            "create" => self.create = value::switch(key, value)?,
            "read_only" => self.read_only = value::switch(key, value)?,
            "block_size" => {
                let bytes = value::size(key, value)?;
                let is_valid = bytes.is_power_of_two() && (512..=65536).contains(&bytes);
                let valid = u32::try_from(bytes).ok().filter(|_| is_valid);
                self.block_size = Some(valid.map_or_else(|| value::bad(key, value, BLOCK), Ok)?);
            }
            "direct" => {
                self.direct = match value {
                    "auto" => Direct::Auto,
                    _ if value::switch(key, value).is_err() => return value::bad(key, value, DIRECT),
                    _ if value::switch(key, value)? => Direct::On,
                    _ => Direct::Off,
                }
            }
            "lock" => self.unlocked = !value::switch(key, value)?,
            _ => {
                return Err(ConfigError::UnknownKey {
                    driver: "file",
                    key: key.to_owned(),
                    known: "file, size, create, read_only, block_size, direct, lock",
                });
            }
        }
        Ok(())
    }

    /// Checks the keys against each other.
    ///
    /// # Errors
    /// `BadValue`: a file is to be created, and its size is not known, or nobody could write to it.
    pub fn check(&self) -> Result<(), ConfigError> {
        match self.create && (self.size.is_none() || self.read_only) {
            true => value::bad("create", "on", CREATE),
            false => Ok(()),
        }
    }

    /// The size with which the file is to be created if it is missing.
    pub(super) fn new_size(&self) -> Option<u64> {
        self.size.filter(|_| self.create && !self.read_only)
    }
}

const CREATE: &str = "off, or given with size= and without ro=on";
const PATH: &str = "the path of a file or a block device";
/// The largest is the kernel's largest offset.
const SIZE: &str = "a size in bytes such as 64M or 2G, at least one block and less than 8388608T";
const BLOCK: &str = "a power of two from 512 to 65536";
const DIRECT: &str = "auto, on or off";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_taken_and_wrong_values_answered_with_what_is_allowed() {
        let mut config = FileConfig::default();
        for (key, value) in [
            ("file", "vm1.raw"),
            ("size", "64M"),
            ("create", "on"),
            ("block_size", "4K"),
            ("direct", "off"),
            ("lock", "off"),
        ] {
            config.set(key, value).unwrap();
        }
        let expected = FileConfig {
            path: "vm1.raw".into(),
            size: Some(64 << 20),
            create: true,
            block_size: Some(4096),
            direct: Direct::Off,
            unlocked: true,
            ..FileConfig::default()
        };
        assert_eq!(config, expected);
        assert!(config.create);
        config.check().unwrap();
        config.size = None;
        let text = config.check().unwrap_err().to_string();
        assert_eq!(
            text,
            "create=on rejected: must be off, or given with size= and without ro=on"
        );
        let error = |key, value| FileConfig::default().set(key, value).unwrap_err().to_string();
        assert_eq!(
            error("block_size", "768"),
            "block_size=768 rejected: must be a power of two from 512 to 65536"
        );
        for wrong in ["0", "8388608T", "9000000T", "-1", ""] {
            let text = error("size", wrong);
            assert!(
                text.starts_with(&format!("size={wrong} rejected")) && text.contains("less than 8388608T"),
                "{text}"
            );
        }
        assert!(error("file", "").contains("must be the path"));
        assert_eq!(
            error("direct", "maybe"),
            "direct=maybe rejected: must be auto, on or off"
        );
        assert!(error("cache", "on").contains("the file driver has no such key"));
    }
}
