//! The settings of a disk in a Ceph cluster, parsed from its keys. `image` turns the result into a disk.

use std::path::PathBuf;
use std::time::Duration;

use blkmq_host::value::{self, ConfigError};

/// A disk in a Ceph cluster. `docs/drivers/rbd.md` has every key's default, unit and trade-off.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RbdConfig {
    /// Which image.
    pub image: ImageName,
    /// How its cluster is reached.
    pub cluster: ClusterConfig,
    /// Whether the image's exclusive lock is taken. Default: yes.
    pub lock: bool,
    /// How long to wait for a lock whose holder may be dead. Default 45 s.
    pub lock_wait: Duration,
    /// How long the cluster may take to answer the requests of opening. Default 30 s.
    pub open_timeout: Duration,
    /// Refuse writes.
    pub read_only: bool,
    /// librbd's own encryption of the image. Default: none.
    pub encryption: Option<Encryption>,
    /// The file with the passphrase of that, each byte of which counts.
    pub key: Option<PathBuf>,
}

/// A format of librbd's own encryption.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encryption {
    /// LUKS1.
    Luks1,
    /// LUKS2.
    Luks2,
}

/// How a cluster is reached. Disks with equal settings share one connection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterConfig {
    /// Ceph's configuration file. Default: where Ceph's own programs look.
    pub conf: Option<String>,
    /// The user, without `client.`. Default `admin`.
    pub id: Option<String>,
    /// The file with the user's key. Default: as in the configuration.
    pub keyring: Option<String>,
    /// How long a request may wait for its reply; zero for no limit. Default 0.
    pub timeout: Duration,
    /// Ceph's own options, by name.
    pub options: Vec<(String, String)>,
}

/// The name of an image, or of a snapshot of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageName {
    /// As it was given, for messages.
    pub text: String,
    /// The pool.
    pub pool: String,
    /// The namespace in the pool; empty for the default one.
    pub namespace: String,
    /// The image.
    pub image: String,
    /// The snapshot.
    pub snapshot: Option<String>,
}

impl Encryption {
    fn name(self) -> &'static str {
        match self {
            Self::Luks1 => "luks1",
            Self::Luks2 => "luks2",
        }
    }
}

impl RbdConfig {
    /// The disk of a name, with defaults for everything else.
    ///
    /// # Errors
    /// `Refused`, with the fault in the name.
    pub fn new(name: &str) -> Result<Self, ConfigError> {
        Ok(Self {
            image: image_name(name)?,
            cluster: ClusterConfig::default(),
            lock: true,
            lock_wait: LOCK_WAIT,
            open_timeout: OPEN_TIMEOUT,
            read_only: false,
            encryption: None,
            key: None,
        })
    }

    /// Checks the keys against each other.
    ///
    /// # Errors
    /// One of `encryption` and `key` is given without the other.
    pub(super) fn check(&self) -> Result<(), ConfigError> {
        let refuse = |key: &str, value: &str, why: &str| {
            Err(ConfigError::Refused {
                key: key.to_owned(),
                value: value.to_owned(),
                why: why.to_owned(),
            })
        };
        match (&self.encryption, &self.key) {
            (Some(format), None) => refuse(
                "encryption",
                format.name(),
                "needs key=, the file with the passphrase",
            ),
            (None, Some(key)) => refuse(
                "key",
                &key.display().to_string(),
                "needs encryption=luks2 or luks1",
            ),
            _ => Ok(()),
        }
    }

    /// Sets one key from its text form.
    ///
    /// # Errors
    /// `UnknownKey`, or `BadValue` with what is allowed.
    pub fn set(&mut self, key: &str, value: &str) -> Result<(), ConfigError> {
        let cluster = &mut self.cluster;
        match key {
            "conf" => cluster.conf = Some(text(key, value, "the path of a configuration file")?),
            "id" => cluster.id = Some(user(value)?),
            "keyring" => cluster.keyring = Some(text(key, value, "the path of a keyring")?),
            "timeout" => cluster.timeout = seconds(key, value)?,
            "lock" => self.lock = value::switch(key, value)?,
            "lock_wait" => self.lock_wait = seconds(key, value)?,
            "open_timeout" => {
                self.open_timeout = seconds(key, value)?;
                if self.open_timeout.is_zero() {
                    return value::bad(key, value, "a time of at least 1s");
                }
            }
            "encryption" => {
                self.encryption = match value {
                    "off" => None,
                    "luks1" => Some(Encryption::Luks1),
                    "luks2" => Some(Encryption::Luks2),
                    _ => return value::bad(key, value, "luks2, luks1 or off"),
                };
            }
            "key" => self.key = Some(text(key, value, "the path of a file with the passphrase")?.into()),
            "read_only" => self.read_only = value::switch(key, value)?,
            _ => match key.strip_prefix("option.") {
                Some(option) => cluster.options.push(ceph_option(key, option, value)?),
                None => {
                    return Err(ConfigError::UnknownKey {
                        driver: "rbd",
                        key: key.to_owned(),
                        known: KEYS,
                    });
                }
            },
        }
        // In any order, they are the same connection.
        cluster.options.sort();
        Ok(())
    }

    /// Returns whether the disk cannot be written, as far as its keys show.
    pub(super) fn is_read_only(&self) -> bool {
        self.read_only || self.image.snapshot.is_some()
    }

    /// Returns whether the image's exclusive lock is taken.
    pub(super) fn is_locked(&self) -> bool {
        self.lock && !self.is_read_only()
    }

    /// Returns whether a write that was answered may be only in librbd's memory until a flush.
    pub(super) fn caches_writes(&self) -> bool {
        let options = &self.cluster.options;
        let set = options.iter().rev().find(|(key, _)| key == "rbd_cache");
        set.is_some_and(|(_, value)| !["false", "no", "0"].contains(&value.as_str()))
    }
}

/// Parses `[POOL/[NAMESPACE/]]IMAGE[@SNAPSHOT]`, as the rbd command does.
fn image_name(text: &str) -> Result<ImageName, ConfigError> {
    let refuse = |why: &str| ConfigError::Refused {
        key: "rbd".to_owned(),
        value: text.to_owned(),
        why: why.to_owned(),
    };
    let (path, snapshot) = match text.split_once('@') {
        Some((path, snapshot)) => (path, Some(snapshot.to_owned())),
        None => (text, None),
    };
    let parts: Vec<&str> = path.split('/').collect();
    let (pool, namespace, image) = match parts[..] {
        [image] => (POOL, "", image),
        [pool, image] => (pool, "", image),
        [pool, namespace, image] => (pool, namespace, image),
        _ => return Err(refuse("has more parts than pool/namespace/image@snapshot")),
    };
    let is_empty = [pool, image, snapshot.as_deref().unwrap_or("-")].contains(&"");
    if is_empty || parts.len() == 3 && namespace.is_empty() {
        return Err(refuse("a part of pool/namespace/image@snapshot is empty"));
    }
    if text.contains('\0') || snapshot.as_ref().is_some_and(|name| name.contains(['@', '/'])) {
        return Err(refuse("a name has no @, / or zero byte"));
    }
    Ok(ImageName {
        text: text.to_owned(),
        pool: pool.to_owned(),
        namespace: namespace.to_owned(),
        image: image.to_owned(),
        snapshot,
    })
}

fn text(key: &str, value: &str, allowed: &'static str) -> Result<String, ConfigError> {
    if value.is_empty() || value.contains('\0') {
        return value::bad(key, value, allowed);
    }
    Ok(value.to_owned())
}

fn user(value: &str) -> Result<String, ConfigError> {
    let allowed = "a user's name, without `client.` before it";
    if value.starts_with("client.") {
        return value::bad("id", value, allowed);
    }
    text("id", value, allowed)
}

/// An option of Ceph, with its value as Ceph writes it.
fn ceph_option(key: &str, option: &str, value: &str) -> Result<(String, String), ConfigError> {
    let refuse = |why: &str| ConfigError::Refused {
        key: key.to_owned(),
        value: value.to_owned(),
        why: why.to_owned(),
    };
    if !option.starts_with("rbd_") && option != "librados_thread_count" {
        return Err(refuse(
            "only options rbd_* and librados_thread_count can be given here; others belong in the file that conf= names",
        ));
    }
    if option == "rbd_non_blocking_aio" {
        return Err(refuse(
            "a thread that serves other disks, too, would wait inside librbd without it",
        ));
    }
    let value = match value {
        "on" => "true",
        "off" => "false",
        other => other,
    };
    Ok((option.to_owned(), text(key, value, "a value of the option")?))
}

/// A time in whole seconds, Ceph's unit; 0 and `off` are none.
fn seconds(key: &str, value: &str) -> Result<Duration, ConfigError> {
    let number = value.strip_suffix('s').unwrap_or(value);
    match number.parse() {
        _ if value == "off" => Ok(Duration::ZERO),
        Ok(seconds @ 0..=86_400) => Ok(Duration::from_secs(seconds)),
        _ => value::bad(key, value, "whole seconds such as 30 or 30s, at most a day"),
    }
}

/// The default of the rbd command.
const POOL: &str = "rbd";
/// Longer than the 30 s after which Ceph forgets a client that has died.
const LOCK_WAIT: Duration = Duration::from_secs(45);
const OPEN_TIMEOUT: Duration = Duration::from_secs(30);
const KEYS: &str =
    "rbd, conf, id, keyring, timeout, lock, lock_wait, open_timeout, encryption, key, read_only, option.KEY";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_taken_and_wrong_values_answered_with_what_is_allowed() {
        let mut config = RbdConfig::new("rbd/vm1").unwrap();
        for (key, value) in [
            ("conf", "/etc/ceph/other.conf"),
            ("id", "blkmq"),
            ("keyring", "k"),
            ("timeout", "30"),
            ("lock", "off"),
            ("lock_wait", "off"),
            ("open_timeout", "5s"),
            ("option.rbd_op_threads", "2"),
            ("option.rbd_cache", "on"),
            ("option.librados_thread_count", "2"),
        ] {
            config.set(key, value).unwrap();
        }
        let option = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        let options = [
            option("librados_thread_count", "2"),
            option("rbd_cache", "true"),
            option("rbd_op_threads", "2"),
        ];
        assert_eq!(config.cluster.options, options);
        assert_eq!(
            (config.cluster.timeout.as_secs(), config.open_timeout.as_secs()),
            (30, 5)
        );
        assert!(!config.lock && config.lock_wait.is_zero());
        assert!(config.caches_writes() && !RbdConfig::new("vm1").unwrap().caches_writes());
        let error = |key, value| config.clone().set(key, value).unwrap_err().to_string();
        assert!(error("id", "client.admin").contains("without `client.`"));
        assert!(error("timeout", "1.5s").contains("whole seconds"));
        assert!(error("open_timeout", "0").contains("at least 1s"));
        assert!(error("option.ms_type", "async").contains("only options rbd_*"));
        assert!(error("option.rbd_non_blocking_aio", "off").contains("would wait"));
        assert!(error("size", "1M").contains("the rbd driver has no such key"));
    }

    #[test]
    fn name_has_the_parts_that_the_rbd_command_gives_it() {
        let name = |text| image_name(text).unwrap();
        let parts = |text| {
            let name = name(text);
            (name.pool, name.namespace, name.image, name.snapshot)
        };
        let expected = |pool: &str, namespace: &str, image: &str, snapshot: Option<&str>| {
            (
                pool.to_owned(),
                namespace.to_owned(),
                image.to_owned(),
                snapshot.map(str::to_owned),
            )
        };
        assert_eq!(parts("vm"), expected("rbd", "", "vm", None));
        assert_eq!(parts("p/vm"), expected("p", "", "vm", None));
        assert_eq!(parts("p/n/vm@s"), expected("p", "n", "vm", Some("s")));
        for wrong in ["", "p/", "/vm", "p//vm", "p/n/vm@", "a/b/c/d", "vm@a@b"] {
            let error = image_name(wrong).unwrap_err().to_string();
            assert!(error.starts_with(&format!("rbd={wrong} rejected")), "{error}");
        }
    }
}
