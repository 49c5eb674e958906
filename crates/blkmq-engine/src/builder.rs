//! The description of an engine: disks, groups and queues in the words of the command. `engine` is what
//! becomes of it.

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

    /// Adds a group with its weight, caps and latency target, as for `blkmq serve --group`:
    /// `/a,weight=300,read_bps=100M`.
    pub fn group(mut self, text: &str) -> Self {
        self.groups.push(text.to_owned());
        self
    }

    /// Adds the tables `[disk.NAME]`, `[group.PATH]` and `[queue.NAME]` of a configuration file. Replaces the
    /// text of an earlier call; the addresses at which a daemon would serve are ignored.
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
    /// open.
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
        blkmq_config::luks::refuse(&luks).map_err(|error| Error::configuration(&error))?;
        let threads = self.threads.or(config.reactors.map(usize::from));
        let host = blkmq_host::Engine::start(EngineConfig {
            reactors: threads.unwrap_or(1).max(1),
            attached_max: self.attached_max,
            wait: config.wait,
            queues,
            mapped,
            ..EngineConfig::default()
        })?;
        Ok(Engine::new(host))
    }

    fn config(&self) -> anyhow::Result<Config> {
        let mut config = Config::from_toml_with(&self.toml, &self.registries)?;
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
