//! The table `[metrics]`: where metrics are read, and how many series there are. The command's metrics take the detail
//! for who asks for none.

use anyhow::{Result, bail};
use blkmq_core::group::LEVELS_MAX;
use serde::Deserialize;

/// Where metrics are read, and which.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Metrics {
    /// The address. Default: none.
    pub address: Option<String>,
    /// Other hosts may read them, whoever they are.
    pub allow_insecure: bool,
    /// What has series, unless a request asks for less or more.
    pub detail: Detail,
}

/// What has series of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Detail {
    /// The levels of groups, from 0 to 16: deeper groups are counted in the one above them, and with 0 all of a queue as
    /// one. Default: all levels.
    pub group_levels: Option<u8>,
    /// Each disk.
    pub disks: bool,
    /// Each address.
    pub exports: bool,
}

impl Default for Detail {
    fn default() -> Self {
        Self {
            group_levels: None,
            disks: true,
            exports: true,
        }
    }
}

impl Detail {
    /// Sets one key from text, as a request has it.
    ///
    /// # Errors
    /// There is no such key, or the value is none of it.
    pub fn set(&mut self, key: &str, value: &str) -> Result<()> {
        let switch = || match value {
            "on" | "true" => Ok(true),
            "off" | "false" => Ok(false),
            _ => bail!("{key}={value} rejected: must be on or off"),
        };
        match key {
            "group_levels" => match value.parse() {
                Ok(levels) if usize::from(levels) <= LEVELS_MAX => self.group_levels = Some(levels),
                _ => bail!("{key}={value} rejected: must be from 0 to {LEVELS_MAX}"),
            },
            "disks" => self.disks = switch()?,
            "exports" => self.exports = switch()?,
            _ => bail!("{key}={value} rejected: must be one of group_levels, disks, exports"),
        }
        Ok(())
    }
}

/// The table as it is written.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Table {
    address: Option<String>,
    #[serde(default)]
    allow_insecure: bool,
    group_levels: Option<i64>,
    disks: Option<bool>,
    exports: Option<bool>,
}

impl Table {
    pub(crate) fn parse(self) -> Result<Metrics> {
        let mut detail = Detail::default();
        if let Some(levels) = self.group_levels {
            detail.set("group_levels", &levels.to_string())?;
        }
        detail.disks = self.disks.unwrap_or(detail.disks);
        detail.exports = self.exports.unwrap_or(detail.exports);
        Ok(Metrics {
            address: self.address,
            allow_insecure: self.allow_insecure,
            detail,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn detail_of_metrics_is_everything_unless_a_key_says_less() {
        let parse = |text: &str| toml::from_str::<Table>(text).unwrap().parse();
        assert_eq!(parse("").unwrap(), Metrics::default());
        let found = parse("group_levels = 1\ndisks = false").unwrap().detail;
        assert_eq!(
            (found.group_levels, found.disks, found.exports),
            (Some(1), false, true)
        );
        for (key, value, part) in [
            ("group_levels", "17", "must be from 0 to 16"),
            ("group_levels", "-1", "must be from 0 to 16"),
            ("disks", "few", "must be on or off"),
            ("queues", "on", "must be one of group_levels, disks, exports"),
        ] {
            let error = Detail::default().set(key, value).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}
