//! The configuration file: TOML with `[daemon]`, `[queue.NAME]`, `[disk.NAME]`, `[group."/PATH"]`,
//! `[[export]]` and a table for each front door. A disk's keys are those of `--disk`, a group's those of
//! `--group`; see `docs/operate/configuration.md`.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use blkmq_core::ids::REACTORS_MAX;
use blkmq_core::poll::Policy;
use blkmq_core::sched;
use blkmq_core::time::Nanos;
use blkmq_export::front_door;
use blkmq_host::value;
use serde::Deserialize;
use toml::Value;

use crate::config::{Config, Sandbox};
use crate::control;
use crate::disk::DiskSpec;
use crate::document::Kind;
use crate::export;
use crate::group::{self, GroupSpec};
use crate::line::{at, with_line};
use crate::metrics;
use crate::name::check_name;
use crate::queue::{Polling, QueueSettings, elevator, poll_delay};
use crate::registries::Registries;

/// The file as written. Tables that are not here are those of front doors.
#[derive(Debug, Deserialize)]
struct File {
    #[serde(default)]
    daemon: Daemon,
    #[serde(default)]
    control: control::Table,
    #[serde(default)]
    metrics: metrics::Table,
    #[serde(default)]
    queue: BTreeMap<String, Queue>,
    #[serde(default = "no_disks")]
    disk: Value,
    #[serde(default)]
    group: toml::Table,
    #[serde(default)]
    export: Vec<toml::Table>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Daemon {
    reactors: Option<Value>,
    shutdown_limit: Option<String>,
    wait: Option<String>,
    sched: Option<String>,
    upgrade_socket: Option<String>,
    sandbox: Option<String>,
    #[serde(default)]
    paths: Vec<PathBuf>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Queue {
    sched: Option<String>,
    depth: Option<Value>,
    timeout: Option<String>,
    merges: Option<Value>,
    io_poll: Option<Value>,
    io_poll_delay: Option<Value>,
    #[serde(default)]
    tunables: BTreeMap<String, Value>,
}

impl Config {
    /// Parses a configuration file's text.
    ///
    /// # Errors
    /// The fault, with the table and the key.
    pub fn from_toml(text: &str) -> Result<Self> {
        Self::from_toml_with(text, &Registries::default())
    }

    /// The same, with other drivers and elevators than the built-in ones.
    ///
    /// # Errors
    /// As [`Self::from_toml`].
    pub fn from_toml_with(text: &str, registries: &Registries) -> Result<Self> {
        parse(text, registries)
    }

    /// The same for a program that serves no addresses: what only a daemon needs (`[[export]]`, `[control]`, `[metrics]`,
    /// tables of front doors, whichever are built in) is left out unread, so that the file of a daemon serves for both.
    ///
    /// # Errors
    /// As [`Self::from_toml`].
    pub fn from_toml_without_addresses(text: &str, registries: &Registries) -> Result<Self> {
        let mut file: File = toml::from_str(text)?;
        file.export.clear();
        file.control = control::Table::default();
        file.metrics = metrics::Table::default();
        let mut all: toml::Table = text.parse()?;
        all.retain(|head, _| !front_door::NAMES.contains(&head.replace('_', "-").as_str()));
        read(file, all, registries).map_err(|error| with_line(text, error))
    }
}

/// Parses a configuration file's text.
pub(crate) fn parse(text: &str, registries: &Registries) -> Result<Config> {
    let parsed = read(toml::from_str(text)?, text.parse()?, registries);
    parsed.map_err(|error| with_line(text, error))
}

/// Parses a configuration file's tables.
pub(crate) fn parse_table(table: toml::Table) -> Result<Config> {
    let file = File::deserialize(Value::Table(table.clone()))?;
    read(file, table, &Registries::default())
}

fn read(file: File, mut all: toml::Table, registries: &Registries) -> Result<Config> {
    let mut config = Config::default();
    let may_hand_over = file.daemon.upgrade_socket.is_some();
    at(
        "daemon",
        "",
        file.daemon.add_to(&mut config, registries).context("[daemon]"),
    )?;
    Kind::heads().for_each(|head| drop(all.remove(head)));
    (config.doors, config.limits) = export::tables(&all)?;
    for (number, table) in file.export.into_iter().enumerate() {
        let export = export::parse(&table, &config.doors, may_hand_over);
        config.exports.push(at("export", number, export)?);
    }
    for (name, queue) in file.queue {
        let settings = check_name("queue", &name).and_then(|()| {
            queue
                .settings(&registries.elevators)
                .context(format!("[queue.{name}]"))
        });
        config.queues.insert(name.clone(), at("queue", name, settings)?);
    }
    config.metrics = at("metrics", "", file.metrics.parse().context("[metrics]"))?;
    config.control = at("control", "", file.control.parse())?;
    for (name, table) in tables(file.disk)? {
        let disk = disk((name.clone(), table), registries);
        config.disks.push(at("disk", name, disk)?);
    }
    for (path, table) in file.group {
        let group = one_group((path.clone(), table));
        config.groups.push(at("group", path, group)?);
    }
    Ok(config)
}

impl Daemon {
    fn add_to(self, config: &mut Config, registries: &Registries) -> Result<()> {
        let reactors = self.reactors.as_ref();
        config.reactors = reactors.map(|value| whole("reactors", value)).transpose()?;
        if let Some(0) = config.reactors {
            bail!(
                "reactors=0 rejected: must be from 1 to {REACTORS_MAX}, or left out for one for each processor"
            );
        }
        if let Some(text) = &self.shutdown_limit {
            config.shutdown_limit = duration("shutdown_limit", text)?;
        }
        if let Some(text) = &self.wait {
            config.wait = text.parse().map_err(anyhow::Error::msg)?;
        }
        let sched = self.sched.as_deref();
        config.sched = sched
            .map(|name| elevator(name, &registries.elevators))
            .transpose()?;
        config.upgrade_socket = self.upgrade_socket;
        config.sandbox = self.sandbox.as_deref().map(sandbox).transpose()?;
        config.paths = absolute(self.paths)?;
        Ok(())
    }
}

impl Queue {
    fn settings(self, elevators: &sched::Registry) -> Result<QueueSettings> {
        Ok(QueueSettings {
            sched: self
                .sched
                .as_deref()
                .map(|name| elevator(name, elevators))
                .transpose()?,
            depth: self
                .depth
                .as_ref()
                .map(|value| whole("depth", value))
                .transpose()?,
            timeout: self
                .timeout
                .as_deref()
                .map(|text| duration("timeout", text))
                .transpose()?,
            merges: self
                .merges
                .as_ref()
                .map(|value| switch("merges", value))
                .transpose()?,
            polling: Polling {
                io_poll: self
                    .io_poll
                    .as_ref()
                    .map(|value| switch("io_poll", value))
                    .transpose()?,
                delay: self.io_poll_delay.as_ref().map(delay).transpose()?,
            },
            tunables: self
                .tunables
                .into_iter()
                .map(|(name, value)| Ok((name.clone(), whole(&name, &value)?)))
                .collect::<Result<_>>()?,
        })
    }
}

/// Parses `sandbox`.
fn sandbox(text: &str) -> Result<Sandbox> {
    match text {
        "off" => Ok(Sandbox::Off),
        "warn" => Ok(Sandbox::Warn),
        "on" => Ok(Sandbox::On),
        _ => bail!("sandbox={text} rejected: must be on, warn or off"),
    }
}

/// Checks `paths`: whatever directory the daemon starts in, they mean the same.
fn absolute(paths: Vec<PathBuf>) -> Result<Vec<PathBuf>> {
    match paths.iter().find(|path| !path.is_absolute()) {
        Some(path) => bail!("paths={path:?} rejected: must be absolute, as in \"/var/lib/blkmq\""),
        None => Ok(paths),
    }
}

/// Parses a switch: a boolean, or a text such as `"on"`.
fn switch(key: &str, value: &Value) -> Result<bool> {
    match value {
        Value::Boolean(is_on) => Ok(*is_on),
        Value::String(text) => Ok(blkmq_host::value::switch(key, text)?),
        other => bail!("{key}={other} rejected: must be true, false, \"on\" or \"off\""),
    }
}

/// Parses a whole number; what is given as a text, too, as `ctl` passes on what is no number of TOML.
fn whole<N: TryFrom<u64>>(key: &str, value: &Value) -> Result<N> {
    let text = match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    let most = 8 * size_of::<N>() as u32;
    let most = u64::MAX.checked_shr(64 - most).unwrap_or(u64::MAX);
    Ok(value::whole(key, &text, 0..=most, "a whole number")?)
}

/// Parses `io_poll_delay`: a number, or `"auto"`.
fn delay(value: &Value) -> Result<Policy> {
    match value {
        Value::String(text) => poll_delay(text),
        other => poll_delay(&other.to_string()),
    }
}

fn no_disks() -> Value {
    Value::Table(toml::Table::new())
}

/// The tables of the disks, by name.
fn tables(disks: Value) -> Result<toml::Table> {
    match disks {
        Value::Table(tables) => Ok(tables),
        Value::Array(_) => {
            bail!(
                "[[disk]] rejected: a disk's name is part of its table's head: write [disk.NAME], as in [disk.vm1]"
            )
        }
        other => bail!("disk = {other} rejected: each disk is a table: write [disk.NAME], as in [disk.vm1]"),
    }
}

fn disk((name, table): (String, Value), registries: &Registries) -> Result<DiskSpec> {
    let Value::Table(table) = table else {
        bail!("[disk] {name} rejected: must be a table, as in [disk.{name}]");
    };
    let pairs = pairs(&format!("[disk.{name}]"), table)?;
    DiskSpec::from_pairs_with(name, pairs, registries)
}

fn one_group((path, table): (String, Value)) -> Result<GroupSpec> {
    let Value::Table(table) = table else {
        bail!("[group] {path} rejected: must be a table, as in [group.\"/customers/a\"]");
    };
    group::from_pairs(&path, pairs(&format!("[group.{path:?}]"), table)?)
}

/// The keys of a table with their values in the form of a flag.
fn pairs(head: &str, table: toml::Table) -> Result<Vec<(String, String)>> {
    let pair = |(key, value): (String, Value)| {
        let value = match value {
            Value::String(text) => text,
            Value::Integer(number) => number.to_string(),
            Value::Float(number) => number.to_string(),
            Value::Boolean(true) => "on".to_owned(),
            Value::Boolean(false) => "off".to_owned(),
            Value::Array(list) if list.iter().all(Value::is_str) => {
                let names: Vec<&str> = list.iter().filter_map(Value::as_str).collect();
                names.join("+")
            }
            other => {
                bail!(
                    "{head} {key} rejected: must be a text, a list of texts, a number or a boolean, not {other}"
                )
            }
        };
        Ok((key, value))
    };
    table.into_iter().map(pair).collect()
}

fn duration(key: &str, text: &str) -> Result<Duration> {
    let Nanos(ns) = value::time(key, text)?;
    Ok(Duration::from_nanos(ns))
}

#[cfg(test)]
mod tests {
    use blkmq_core::poll::Wait;
    use blkmq_export::front_door::DaemonLimits;

    use super::*;
    use crate::export::ExportSpec;
    use crate::plan::scheduler::without_effect;

    fn parse(text: &str) -> Result<Config> {
        super::parse(text, &Registries::default())
    }

    const EXAMPLE: &str = r#"
        [daemon]
        reactors = 2
        shutdown_limit = "5s"
        sandbox = "warn"
        paths = ["/srv/disks"]
        wait = "hybrid"
        [nbd]
        memory = "256M"
        connections = 500
        [fuse]
        io_uring = true
        [queue.fast]
        io_poll = "on"
        io_poll_delay = -1
        sched = "mq-deadline"
        depth = 64
        tunables = { read_expire = 250 }
        [disk.vm1]
        file = "vm1.raw"
        ro = true
        queue = "fast"
        [disk.scratch]
        ram = "64M"
        [disk.pair]
        striped = ["scratch:0:16M", "scratch:16M"]
        chunk = 4096
        [group."/customers/a"]
        weight = 200
        read_bps = "100M"
        iops_burst = 50
        iops = 5000
        latency_target = "2ms"
        [[export]]
        nbd = "unix:vm1.sock"
        disks = ["vm1"]
        connections = 100
        group_connections = 8
        [[export]]
        nbd = "tcp:127.0.0.1:10809"
    "#;

    #[test]
    fn addresses_are_left_out_for_a_program_without() {
        let text = "[[export]]\nufs = \"x\"\n[vhost_user]\nno = 1\n[control]\nsocket = \"unix:/c\"\n[disk.a]\nnull = \"1M\"\n";
        let parse = |text: &str| Config::from_toml_without_addresses(text, &Registries::default());
        let config = parse(text).unwrap();
        assert_eq!((config.disks.len(), config.exports.len()), (1, 0));
        assert_eq!(config.control, Config::default().control);
        let error = format!("{:#}", parse("[daemon]\n[nbdd]\n").unwrap_err());
        assert!(error.contains("line 2: [nbdd] rejected"), "{error}");
    }

    #[test]
    fn file_says_the_same_as_flags() {
        let config = parse(EXAMPLE).unwrap();
        config.check().unwrap();
        assert_eq!(
            config.disks[0],
            DiskSpec::parse("name=pair,striped=scratch:0:16M+scratch:16M,chunk=4096").unwrap()
        );
        assert_eq!(config.disks[1], DiskSpec::parse("name=scratch,ram=64M").unwrap());
        assert_eq!(
            config.disks[2],
            DiskSpec::parse("name=vm1,file=vm1.raw,ro=on,queue=fast").unwrap()
        );
        assert_eq!(
            (config.reactors, config.shutdown_limit),
            (Some(2), Duration::from_secs(5))
        );
        assert_eq!(config.wait, Wait::Hybrid);
        let DaemonLimits {
            memory_bytes,
            connections,
        } = config.limits;
        assert_eq!((memory_bytes, connections), (Some(256 << 20), Some(500)));
        assert_eq!(config.doors["fuse"].shown("io_uring").as_deref(), Some("on"));
        assert_eq!(config.sandbox, Some(Sandbox::Warn));
        assert_eq!(config.paths, [PathBuf::from("/srv/disks")]);
        let of = |export: &ExportSpec| (export.connections, export.group_connections);
        let limits: Vec<_> = config.exports.iter().map(of).collect();
        assert_eq!(limits, [(Some(100), Some(8)), (None, None)]);
        let polling = Polling {
            io_poll: Some(true),
            delay: Some(Policy::Classic),
        };
        assert_eq!(config.queues["fast"].polling, polling);
        assert_eq!(config.queues["fast"].tunables, [("read_expire".to_owned(), 250)]);
        let group =
            group::parse("/customers/a,weight=200,read_bps=100M,iops=5000,iops_burst=50,latency_target=2ms");
        assert_eq!(config.groups, [group.unwrap()]);
    }

    #[test]
    fn example_of_the_documents_is_sound() {
        let config = parse(include_str!("../../../docs/operate/blkmq.toml")).unwrap();
        config.check().unwrap();
        assert_eq!((config.disks.len(), config.exports.len()), (5, 2));
        let found = without_effect(&config, "fast", ["vm1", "vm2"].into_iter()).unwrap();
        assert_eq!(found, None, "settings of groups");
    }

    #[test]
    fn bad_file_is_answered_with_table_and_key() {
        for (text, part) in [
            ("[disk.a]\nram = \"1M\"\ncolour = 3", "colour"),
            ("[disk.a]\nram = [1]", "[disk.a] ram"),
            ("[queue.q]\nsched = \"cfq\"", "[queue.q]"),
            (
                "[queue.q]\ndepth = 1.5",
                "[queue.q]: depth=1.5 rejected: must be a whole number",
            ),
            (
                "[queue.q]\ndepth = -1",
                "depth=-1 rejected: must be a whole number",
            ),
            (
                "[queue.q]\ntunables = { slice_idle = \"a\" }",
                "slice_idle=a rejected: must be a whole number",
            ),
            (
                "[daemon]\nreactors = 70007",
                "reactors=70007 rejected: must be a whole number",
            ),
            (
                "[group.\"/a\"]\nweight = 1.5",
                "weight=1.5 rejected: must be a whole number from 1 to 1000",
            ),
            (
                "[group.\"/a\"]\ncolour = 3",
                "key colour rejected: a group has no such key; it has weight",
            ),
            (
                "[daemon]\nsched = \"cfq\"",
                "[daemon]: sched=cfq rejected: must be one of none",
            ),
            ("[demon]", "[demon] rejected: must be one of daemon, control,"),
            ("[daemon]\nnbd_memory = 1", "unknown field `nbd_memory`"),
            (
                "[daemon]\nwait = \"spin\"",
                "wait spin rejected: must be block, poll",
            ),
            (
                "[daemon]\nsandbox = \"yes\"",
                "[daemon]: sandbox=yes rejected: must be on, warn or off",
            ),
            (
                "[daemon]\npaths = [\"disks\"]",
                "[daemon]: paths=\"disks\" rejected: must be absolute",
            ),
            (
                "[fuse]\nio_uring = \"yes\"",
                "[fuse]: io_uring=yes rejected: must be auto, on or off",
            ),
            (
                "[queue.q]\nio_poll_delay = -2",
                "io_poll_delay=-2 rejected: must be -1",
            ),
            ("[queue.q]\nio_poll = 1", "io_poll"),
            (
                "[daemon]\nreactors = 0",
                "reactors=0 rejected: must be from 1 to 128",
            ),
            ("[[export]]\ndisks = []", "must have one address"),
            (
                "[[export]]\nnbd = \"unix:x\"\ndisk = \"a\"",
                "[[export]] unix:x: disk=a rejected: must be one of disks, connections,",
            ),
            (
                "[[export]]\nufs = \"x\"",
                "[[export]] with ufs rejected: must have",
            ),
            (
                "[[export]]\nfuse = \"/x\"\ntls = \"off\"",
                "[[export]] /x: tls=off rejected: must be one of disks,",
            ),
            ("[[export]]\nnbd = 7", "[[export]] nbd rejected: must be a text"),
            ("[daemon]\nshutdown_limit = \"soon\"", "shutdown_limit=soon"),
            (
                "[nbd]\nmemory = 1024",
                "[nbd]: memory=1024 rejected: must be at least 32M",
            ),
            ("[nbd]\nmemory = \"much\"", "memory=much"),
            (
                "[nbd]\nmemory = 9223372036854775807",
                "rejected: must be at most 16T",
            ),
            ("[nbd]\nconnections = 0", "connections=0 rejected"),
            (
                "[nbd]\nhandshake_deadline = \"1ms\"",
                "handshake_deadline=1ms rejected: must be at least 100ms",
            ),
            (
                "[nbd]\nmem = \"1G\"",
                "[nbd]: mem=1G rejected: must be one of memory, connections",
            ),
            ("nbd = 3", "nbd = 3 rejected: must be a table, [nbd]"),
            (
                "[[export]]\nnbd = \"unix:x\"\nconnections = 0",
                "[[export]] unix:x: connections=0 rejected",
            ),
            (
                "disk = 3",
                "disk = 3 rejected: each disk is a table: write [disk.NAME]",
            ),
            (
                "[[disk]]\nname = \"a\"\nram = \"1M\"",
                "write [disk.NAME], as in [disk.vm1]",
            ),
            ("[group.a]\nweight = 3", "as in /customers/a"),
            ("[group.\"/a\"]\nweight = 2000", "weight=2000"),
            ("[group.\"/a\"]\ncaps = [1]", "[group.\"/a\"] caps"),
            ("[group]\n\"/a\" = 3", "[group] /a"),
        ] {
            let error = format!("{:#}", parse(text).unwrap_err());
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn parts_that_do_not_fit_together_are_refused() {
        let check = |text: &str| format!("{:#}", parse(text).unwrap().check().unwrap_err());
        assert!(check("").contains("no disk"));
        assert!(
            check("[disk.a]\nram=\"1M\"\n[[export]]\nnbd=\"unix:x\"\ndisks=[\"b\"]").contains("no disk b")
        );
        assert!(check("[disk.a]\nram=\"1M\"\n[queue.q]\ndepth=3").contains("queue q"));
    }
}
