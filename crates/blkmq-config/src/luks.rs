//! Encrypted disks: the keys of `luks=DISK`, and where the key of the data comes from. `keyring` opens them in an
//! engine; `blkmq_luks` has the format and the cipher, `blkmq_host::encrypted` the way of bios.

mod keyring;

use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use blkmq_drivers::keys::Pairs;
use blkmq_host::found::{open_file, open_file_or_device, open_inherited};
use blkmq_host::value::{self, ConfigError};

pub use blkmq_luks::Secret;
pub use blkmq_luks::secret::KEY_BYTES_MAX;

pub use self::keyring::{Found, Keyring, Known, Opened, PlannedLuks, refuse};

/// What an encrypted disk lies on, and how it is opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LuksSource {
    /// The name of the disk below.
    pub below: String,
    /// Where the passphrase is. Default: the disk is locked until somebody unlocks it.
    pub key: Option<KeySource>,
    /// A file that has the header, if the disk below does not.
    pub header: Option<PathBuf>,
    /// Whether discards pass.
    pub discard: bool,
}

/// Where a passphrase is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeySource {
    /// A file: each byte of it counts.
    File(PathBuf),
    /// A descriptor that the daemon inherits.
    Descriptor(u32),
    /// A credential of systemd's.
    Credential(String),
    /// A program with its arguments, which prints it. It is run before the daemon confines itself.
    Command(Vec<String>),
}

impl LuksSource {
    /// Parses `luks=DISK` and the keys that belong to it.
    pub(crate) fn parse(below: String, pairs: &mut Pairs) -> Result<Self> {
        let mut source = Self {
            below,
            key: None,
            header: None,
            discard: false,
        };
        if source.below.is_empty() {
            value::bad("luks", "", "the name of the disk below")?;
        }
        pairs.set_all(|key, text| source.set(key, text))?;
        Ok(source)
    }

    /// The files that are read when it is opened.
    pub fn reads(&self) -> Vec<PathBuf> {
        let key = self.key.as_ref().and_then(KeySource::path);
        self.header.iter().cloned().chain(key).collect()
    }

    /// Looks whether the files that it names can be read, without reading a key that can be read once.
    ///
    /// # Errors
    /// The file, and why not.
    pub fn check_files(&self) -> Result<()> {
        if let Some(header) = &self.header {
            open_file_or_device(header).with_context(|| format!("header {}", header.display()))?;
        }
        if let Some(from @ (KeySource::File(_) | KeySource::Credential(_))) = &self.key {
            let path = from.path().context("there are no credentials of systemd's here");
            let opened = path.and_then(|path| Ok(open_file(&path)?));
            opened.with_context(|| format!("key {from}"))?;
        }
        Ok(())
    }

    /// Returns whether both are the same data, whoever keeps the key.
    pub(crate) fn has_data_of(&self, other: &Self) -> bool {
        (&self.below, &self.header) == (&other.below, &other.header)
    }

    fn set(&mut self, key: &str, text: &str) -> Result<(), ConfigError> {
        match key {
            "key" => self.key = Some(KeySource::parse(text)?),
            "header" => self.header = Some(text.into()),
            "discard" => self.discard = value::switch(key, text)?,
            _ => {
                return Err(ConfigError::UnknownKey {
                    driver: "luks",
                    key: key.to_owned(),
                    known: "key, header, discard",
                });
            }
        }
        Ok(())
    }
}

impl KeySource {
    fn parse(text: &str) -> Result<Self, ConfigError> {
        let bad = || {
            value::bad(
                "key",
                text,
                "a file, fd:NUMBER, cred:NAME, or cmd:PROGRAM with its arguments",
            )
        };
        match text.split_once(':') {
            Some(("fd", number)) => number.parse().map(Self::Descriptor).or_else(|_| bad()),
            Some(("cred", name)) if !name.is_empty() && !name.contains('/') => {
                Ok(Self::Credential(name.to_owned()))
            }
            Some(("cmd", words)) if !words.trim().is_empty() => {
                let words = words.split_ascii_whitespace().map(str::to_owned);
                Ok(Self::Command(words.collect()))
            }
            Some(("cred" | "cmd", _)) => bad(),
            _ if text.is_empty() => bad(),
            _ => Ok(Self::File(text.into())),
        }
    }

    /// The file, or what is open by its number. `None` for a command, and for a credential where there are none.
    fn path(&self) -> Option<PathBuf> {
        match self {
            Self::File(path) => Some(path.clone()),
            Self::Descriptor(number) => {
                let link = PathBuf::from(format!("/proc/self/fd/{number}"));
                // A file is opened again by its path; a pipe is not, if it has one.
                let path = std::fs::read_link(&link).ok().filter(|path| path.is_file());
                Some(path.unwrap_or(link))
            }
            Self::Credential(name) => {
                let directory = std::env::var_os("CREDENTIALS_DIRECTORY")?;
                Some(Path::new(&directory).join(name))
            }
            Self::Command(_) => None,
        }
    }

    /// Reads the passphrase, each byte of it.
    fn read(&self) -> Result<Secret> {
        let path = self.path().with_context(|| match self {
            Self::Command(_) => "a command is run when the daemon starts, and not later",
            _ => "there are no credentials of systemd's here",
        })?;
        let file = match self {
            Self::Descriptor(number) => open_inherited(*number)?,
            _ => open_file(&path)?,
        };
        Ok(Secret::read_from(file)?)
    }
}

impl fmt::Display for KeySource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Descriptor(number) => write!(f, "fd:{number}"),
            Self::Credential(name) => write!(f, "cred:{name}"),
            Self::Command(words) => write!(f, "cmd:{}", words.join(" ")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::{DiskSpec, Source};

    fn source(text: &str) -> LuksSource {
        match DiskSpec::parse(text).unwrap().source {
            Source::Luks(source) => source,
            other => panic!("{other:?}"),
        }
    }

    fn refusal(text: &str) -> String {
        format!("{:#}", DiskSpec::parse(text).unwrap_err())
    }

    #[test]
    fn keys_of_an_encrypted_disk_are_parsed() {
        let plain = source("name=a,luks=b");
        let wanted = LuksSource {
            below: "b".to_owned(),
            key: None,
            header: None,
            discard: false,
        };
        assert_eq!(plain, wanted);
        let all = source("name=a,luks=b,key=/run/k,header=/h,discard=on");
        let wanted = LuksSource {
            key: Some(KeySource::File("/run/k".into())),
            header: Some("/h".into()),
            discard: true,
            ..wanted
        };
        assert_eq!(all, wanted);
        assert_eq!(
            source("name=a,luks=b,key=fd:7").key,
            Some(KeySource::Descriptor(7))
        );
        let credential = Some(KeySource::Credential("vm1".to_owned()));
        assert_eq!(source("name=a,luks=b,key=cred:vm1").key, credential);
        let words = ["/bin/secret", "get", "vm1"].map(str::to_owned);
        assert_eq!(
            source("name=a,luks=b,key=cmd:/bin/secret get  vm1").key,
            Some(KeySource::Command(words.into()))
        );
    }

    #[test]
    fn wrong_keys_of_an_encrypted_disk_are_refused() {
        for key in ["fd:x", "cred:", "cred:../x", "cmd:", "cmd: ", ""] {
            let refused = refusal(&format!("name=a,luks=b,key={key}"));
            assert!(
                refused.contains("must be a file, fd:NUMBER, cred:NAME, or cmd:PROGRAM with its arguments"),
                "{refused}"
            );
        }
        let refused = refusal("name=a,luks=b,size=1M");
        assert!(refused.contains("it has key, header, discard"), "{refused}");
        let refused = refusal("name=a,luks=b,sched=bfq");
        assert!(
            refused.contains("sched= rejected: a disk on other disks"),
            "{refused}"
        );
    }
}
