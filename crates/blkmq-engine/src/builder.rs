//! The description of an engine: disks, groups and queues in the words of the command. `engine` is what
//! becomes of it.

use std::collections::BTreeMap;
use std::sync::Arc;

use blkmq_config::luks::{KEY_BYTES_MAX, Keyring, Secret};
use blkmq_config::{Config, DiskSpec, Plan, Registries, group, plan_with_all_groups};
use blkmq_host::EngineConfig;

use crate::engine::Engine;
use crate::error::Error;
use crate::sys::count_forks;

/// What an engine shall have. Faults in the texts are reported by [`Builder::start`].
#[derive(Clone, Debug)]
#[must_use = "a builder does nothing until it starts an engine"]
pub struct Builder {
    toml: String,
    disks: Vec<String>,
    /// Passphrases of encrypted disks, or why there is none.
    keys: BTreeMap<String, Result<Arc<Secret>, String>>,
    groups: Vec<String>,
    scheduler: Option<String>,
    threads: Option<usize>,
    registries: Registries,
    attached_max: usize,
}

impl Default for Builder {
    fn default() -> Self {
        Self {
            toml: String::new(),
            disks: Vec::new(),
            keys: BTreeMap::new(),
            groups: Vec::new(),
            scheduler: None,
            threads: None,
            registries: Registries::default(),
            attached_max: ATTACHED_MAX,
        }
    }
}

impl Builder {
    /// Adds a disk, as for `blkmq serve --disk`: `name=vm1,file=vm1.raw,group=/a`.
    pub fn disk(mut self, text: &str) -> Self {
        self.disks.push(text.to_owned());
        self
    }

    /// The passphrase of an encrypted disk (`luks=`), in place of its `key=`: 1 to 65536 bytes, each of which counts. It is
    /// copied into locked memory that is left out of cores, and wiped with the builder; the caller wipes its own.
    pub fn key(mut self, disk: &str, passphrase: &[u8]) -> Self {
        let kept = match passphrase.len() {
            1..=KEY_BYTES_MAX => {
                Secret::zeroed(passphrase.len()).map_err(|error| format!("no locked memory: {error}"))
            }
            len => Err(format!(
                "its key has {len} bytes, and must have 1 to {KEY_BYTES_MAX}"
            )),
        };
        let kept = kept.map(|mut secret| {
            secret.bytes_mut().copy_from_slice(passphrase);
            Arc::new(secret)
        });
        self.keys.insert(disk.to_owned(), kept);
        self
    }

    /// Adds a group with its weight, caps and latency target, as for `blkmq serve --group`:
    /// `/a,weight=300,read_bps=100M`.
    pub fn group(mut self, text: &str) -> Self {
        self.groups.push(text.to_owned());
        self
    }

    /// Adds the tables `[disk.NAME]`, `[group.PATH]` and `[queue.NAME]` of a configuration file, and `sched`, `wait` and
    /// `reactors` of `[daemon]`. Replaces the text of an earlier call. What else a daemon's file has is ignored: the rest of
    /// `[daemon]`, addresses, `[control]`, `[metrics]`.
    pub fn toml(mut self, text: &str) -> Self {
        text.clone_into(&mut self.toml);
        self
    }

    /// The scheduler of queues that have none of their own: `none` (default), `mq-deadline`, `kyber` or
    /// `bfq`. Weights have an effect with `bfq`.
    pub fn scheduler(mut self, name: &str) -> Self {
        self.scheduler = Some(name.to_owned());
        self
    }

    /// Threads of the engine's own, 1 to 128 together with [`Self::attached_max`]. Default: `reactors` of
    /// [`Self::toml`], otherwise 1. They do the I/O of threads that do not attach, and sleep otherwise.
    pub fn threads(mut self, count: usize) -> Self {
        self.threads = Some(count);
        self
    }

    /// How many threads can be [attached](Engine::attach) at the same time. Default 8. Each costs memory at
    /// every queue, about 100 KiB.
    pub fn attached_max(mut self, count: usize) -> Self {
        self.attached_max = count;
        self
    }

    /// Has disks and queues use drivers and schedulers of one's own, which internal crates describe: these may change
    /// with every version, and so may this call.
    #[cfg(feature = "registries")]
    pub fn registries(mut self, registries: Registries) -> Self {
        self.registries = registries;
        self
    }

    /// Opens the disks and starts the engine. Blocks for some milliseconds, and as long as a drive needs to
    /// open; the key slots of encrypted disks take seconds, if they were made for passphrases.
    ///
    /// # Errors
    /// The first fault of the texts, a drive that cannot be opened, or what the system lacks. Nothing is left
    /// running or locked.
    pub fn start(&self) -> Result<Engine, Error> {
        let no_count = |error| Error::Engine(format!("forks cannot be noticed: {error}"));
        count_forks().map_err(no_count)?;
        let config = self.config().map_err(|error| Error::configuration(&error))?;
        let planned = plan_with_all_groups(&config);
        let Plan { queues, mapped, luks } = planned.map_err(|error| Error::configuration(&error))?;
        let keyring = self.keyring().map_err(|error| Error::configuration(&error))?;
        let threads = self.threads.or(config.reactors.map(usize::from));
        let host = blkmq_host::Engine::start(EngineConfig {
            reactors: threads.unwrap_or(1).max(1),
            attached_max: self.attached_max,
            wait: config.wait,
            queues,
            mapped,
            ..EngineConfig::default()
        })?;
        let opened = keyring.open_each(&host.control(), &luks);
        opened.map_err(|error| Error::configuration(&error))?;
        Ok(Engine::new(host, config, self.registries.clone()))
    }

    /// The passphrases that were given.
    fn keyring(&self) -> anyhow::Result<Keyring> {
        let keyring = Keyring::default();
        for (disk, key) in &self.keys {
            let copied = match key {
                Ok(secret) => secret.copy().map_err(anyhow::Error::from),
                Err(problem) => Err(anyhow::anyhow!("{problem}")),
            };
            let copied = copied.map_err(|error| error.context(format!("disk {disk}")))?;
            keyring.set_passphrase(disk.clone(), Ok(copied));
        }
        Ok(keyring)
    }

    fn config(&self) -> anyhow::Result<Config> {
        let mut config = Config::from_toml_without_addresses(&self.toml, &self.registries)?;
        for text in &self.disks {
            config.disks.push(DiskSpec::parse_with(text, &self.registries)?);
        }
        for text in &self.groups {
            config.groups.push(group::parse(text)?);
        }
        if let Some(name) = &self.scheduler {
            let kind = self.registries.elevators.choose(name);
            let kind = kind.map_err(|error| anyhow::anyhow!("scheduler {name} rejected: {error}"))?;
            config.sched = Some(kind);
        }
        config.check_parts()?;
        Ok(config)
    }
}

const ATTACHED_MAX: usize = 8;
